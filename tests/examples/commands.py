"""Runs an example's script the way a user does."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..distributed.workers import START_METHOD

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def run_script(script: str, *flags: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs ``examples/<script>`` in a process of its own, or under torchrun in several."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += _script(script, flags)
    # One thread: tests share the machine, and spinning thread pools slow each other down without bound.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)


def run_forked(script: str, *flags: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """As :func:`run_script`, in processes forked from one that has imported TorchRec, which takes seconds.

    Several ranks get the environment that torchrun gives, and the store of this process in the place of its agent's.
    """
    arguments = _script(script, flags)
    environments = [dict(os.environ) for _ in range(ranks)]
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, environment in enumerate(environments):
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            environment |= {"TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": "0"}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    context = mp.get_context(START_METHOD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_here, args=(arguments, environment, Path.cwd(), Path(folder, str(rank))))
            for rank, environment in enumerate(environments)
        ]
        for process in processes:
            process.start()
        try:
            _join(processes)
            statuses = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        out, err = (
            "".join(Path(folder, f"{rank}.{kind}").read_text() for rank in range(ranks)) for kind in ("out", "err")
        )
    return subprocess.CompletedProcess(arguments, next((status for status in statuses if status), 0) or 0, out, err)


def _script(script: str, flags: tuple[object, ...]) -> list[str]:
    """The script and its flags; a training writes curves and a report only where a flag says where to."""
    quiet = ["--no-log"] if script.endswith("train.py") and not {"--log-dir", "--log-every"} & {*flags} else []
    return [str(ROOT / "examples" / script), *map(str, flags), *quiet]


def _join(processes: list[mp.Process]) -> None:
    """Waits for all to end, or for the first to fail."""
    deadline = time.monotonic() + TIMEOUT_S
    while running := [process for process in processes if process.is_alive()]:
        if any(process.exitcode for process in processes):
            # The others end by themselves where the error is that of all.
            wait([process.sentinel for process in running], timeout=10)
            return
        if not wait([process.sentinel for process in running], timeout=deadline - time.monotonic()):
            raise TimeoutError(f"the command has not ended in {TIMEOUT_S} s")


def _run_here(arguments: list[str], environment: dict[str, str], folder: Path, output: Path) -> None:
    for stream, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = arguments
    # What the script finds is not to be what the tests have made importable.
    others = [path for path in sys.path if not path.startswith(str(ROOT / "examples"))]
    sys.path[:] = [str(Path(arguments[0]).parent), *others]
    runpy.run_path(arguments[0], run_name="__main__")
