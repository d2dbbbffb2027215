"""tune_threads: waiting threads of OpenMP sleep, whether torch has been imported or
not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SPINS = """
import time, torch
torch.set_num_threads(2)

def spinning():
    # The worker of each operation waits for the next operation, which comes 5 ms later.
    x = torch.randn(1 << 17)
    before = time.process_time()
    for _ in range(40):
        x.exp()
        time.sleep(0.005)
    return time.process_time() - before
"""

TUNED_LATE = f"""{SPINS}
import json, os, torchrec_recstore
untuned = spinning()
torchrec_recstore.tune_threads()
threads = len(os.listdir("/proc/self/task"))
torchrec_recstore.tune_threads()
again = len(os.listdir("/proc/self/task"))
print(json.dumps([untuned, spinning(), threads, again, os.environ.get("GOMP_SPINCOUNT")]))
"""

TUNED_FIRST = """
import sys, torchrec_recstore
torchrec_recstore.tune_threads()
assert "torch" not in sys.modules
import os, torch
torch.set_num_threads(2)
torch.randn(1 << 17).exp()
threads = len(os.listdir("/proc/self/task"))
torchrec_recstore.tune_threads()  # as a library may do that is imported later
assert len(os.listdir("/proc/self/task")) == threads
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(
        command, env=plain | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="on one core, threads never spin long"
)
def test_waiting_threads_sleep_after_an_import_of_torch() -> None:
    untuned, tuned, threads, again, variable = json.loads(run(TUNED_LATE).stdout)
    # A worker spins for up to 5 ms after each of 40 operations. This is processor time,
    # which other programs do not change.
    assert tuned < untuned / 3
    assert again == threads
    assert variable == "1000", "for the processes that this one starts"


@pytest.mark.slow
def test_variable_is_set_before_an_import_of_torch() -> None:
    assert (
        "GOMP_SPINCOUNT = '1000'" in run(TUNED_FIRST, OMP_DISPLAY_ENV="VERBOSE").stderr
    )


@pytest.mark.parametrize(
    "setting", [{"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "active"}]
)
def test_the_settings_of_a_user_stay(setting: dict[str, str]) -> None:
    (name, value), *_ = setting.items()
    code = (
        "import os,"
        " torchrec_recstore\ntorchrec_recstore.tune_threads()\nprint(os.environ.get('GOMP_SPINCOUNT'))"
    )
    assert run(code, **setting).stdout.strip() == (
        value if name == "GOMP_SPINCOUNT" else "None"
    )


@pytest.mark.slow
def test_another_library_of_openmp_is_named() -> None:
    code = """
import torch, warnings, torchrec_recstore.threads as threads
known = threads._loaded
threads._loaded = lambda name: [] if name == "libgomp" else known(name)
with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("always")
    threads.tune_threads()
print(shown[0].message)
"""
    assert "Start the process with OMP_WAIT_POLICY=passive" in run(code).stdout


@pytest.mark.slow
def test_a_process_that_may_not_read_proc_is_warned() -> None:
    """As after a change of the user, which makes a process unreadable to itself."""
    code = """
import ctypes, os, warnings, torch, torchrec_recstore
from torchrec_recstore.utils import RecStoreWarning
if os.getuid() == 0:
    os.setuid(54321)
else:
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("always")
    torchrec_recstore.tune_threads()
(warning,) = shown
assert warning.category is RecStoreWarning
print(warning.message, os.environ.get("GOMP_SPINCOUNT"))
"""
    assert run(code).stdout == (
        "tune_threads: /proc/self/environ: Permission denied. Start the process with"
        " GOMP_SPINCOUNT=1000 in its environment instead. None\n"
    )
