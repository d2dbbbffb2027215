"""The waiting threads of OpenMP.

This module imports no torch, so that it can run before torch starts OpenMP.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from torchrec_recstore.utils import warn_user

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""The environment variables that say how long threads wait before they sleep."""

SPIN_COUNT = "1000"
"""Some microseconds. libgomp's default is 300,000, which takes milliseconds."""

MOST_SPINS = 10_000
"""`recstore doctor` warns of higher counts.

This one is half a millisecond on AMD's Zen 5.
"""

_tuned: set[str] = set()
"""``"environment"`` if the variable was set before any library was loaded, and the
paths of libraries with a team.
"""


def tune_threads() -> None:
    """Makes the waiting threads of OpenMP leave their cores to other threads and
    processes.

    torch computes with the threads of GCC's OpenMP library (libgomp). By default, a
    thread that waits for another one spins for milliseconds. If another process, a
    reader of data or another library needs the cores, every operation of a training
    step then takes milliseconds. Call this function at the top of a script:

    ::

        import torchrec_recstore
        torchrec_recstore.tune_threads()
        import torch

    The function sets ``GOMP_SPINCOUNT=1000`` in the environment, for this process and
    for processes that it starts. libgomp reads the variable only when it is loaded. If
    torch has been imported already, the function also starts as many threads as make
    the threads of libgomp one more than the cores. These threads sleep. libgomp lets
    threads spin for less than a microsecond to some microseconds if there are more
    threads than cores. In this case, call the function after ``torch.set_num_threads``.

    The function changes nothing if ``GOMP_SPINCOUNT`` or ``OMP_WAIT_POLICY`` was set
    when the process started. A second call has no effect.

    Nothing in this package calls the function for you, except the commands and the
    examples: it changes how all threads of torch in the process wait, and libgomp ends
    the process if the system refuses one of the sleeping threads, as in a container
    with a low limit of processes.

    Warns:
        RecStoreWarning: torch has been imported already, and uses another library for
            OpenMP; or the process may not read its own ``/proc``, as after a change of
            its user. Nothing has changed for this process.
    """
    try:
        started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
        gomp_paths = _loaded("libgomp")
        torch_is_loaded = bool(_loaded("libtorch_cpu"))
    except OSError as error:
        warn_user(
            f"tune_threads: {error.filename}: {error.strerror}. Start the process with"
            f" GOMP_SPINCOUNT={SPIN_COUNT} in its environment instead."
        )
        return
    for entry in started_with:
        if entry.partition(b"=")[0].decode() in VARIABLES:
            return
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
        if not gomp_paths and not torch_is_loaded:
            _tuned.add("environment")
    if "environment" in _tuned:
        return  # each library that is loaded now or later has read the variable
    for path in gomp_paths:
        if path not in _tuned:
            _tuned.add(path)
            _start_sleeping_team(ctypes.CDLL(path))
    if torch_is_loaded and not gomp_paths:
        warn_user(
            "tune_threads: torch has been imported already, and its threads are not"
            " those of libgomp. Start the process with OMP_WAIT_POLICY=passive in its"
            " environment instead."
        )


def _loaded(library: str) -> list[str]:
    """Returns the paths of the loaded libraries with this name, which ends at a dot or
    a dash.
    """
    paths = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1].strip()
        if Path(path).name.startswith((f"{library}.", f"{library}-")):
            paths.add(path)
    return sorted(paths)


def _start_sleeping_team(gomp: ctypes.CDLL) -> None:
    """Starts a team of OpenMP that does nothing and sleeps, so that libgomp has more
    threads than cores.
    """
    max_threads = gomp.omp_get_max_threads()
    if max_threads == 1:
        return  # one thread waits for no other
    started = threading.Event()
    threads = max(gomp.omp_get_num_procs() - max_threads, 0) + 2

    def run_team() -> None:
        # Each thread of the team calls free(NULL), which does nothing. The team lives
        # as long as this thread.
        gomp.GOMP_parallel(
            ctypes.CDLL(None).free,
            None,
            threads,
            0,
        )
        started.set()
        threading.Event().wait()

    threading.Thread(
        target=run_team,
        name="recstore-tune-threads",
        daemon=True,
    ).start()
    started.wait()
