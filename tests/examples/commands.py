"""Runs an example script as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.packages import PYTHON_PATH

from ..processes import ForkedCommand

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def run_script(
    script: str, *flags: object, ranks: int = 1, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Runs ``examples/<script>`` in a new interpreter, or in several under torchrun."""
    command = [sys.executable]
    if ranks > 1:
        command += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
    command += _script(script, flags)
    # One thread: tests share the machine, and spinning thread pools slow each other
    # down.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )


def run_forked(
    script: str, *flags: object, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """Runs ``examples/<script>`` in forked processes (:mod:`tests.processes`).

    Several ranks get the environment that torchrun gives, and the store of this process
    in the place of its agent's.
    """
    arguments = _script(script, flags)
    environments = [os.environ | {"OMP_NUM_THREADS": "1"} for _ in range(ranks)]
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, environment in enumerate(environments):
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            environment |= {
                "TORCHELASTIC_RUN_ID": "forked",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    commands = [
        ForkedCommand(arguments, environment, daemon=False)
        for environment in environments
    ]
    try:
        _join([command.process for command in commands])
        statuses = [command.process.exitcode for command in commands]
    finally:
        for command in commands:
            command.kill()
    out, err = (
        "".join(command.stdout for command in commands),
        "".join(command.stderr for command in commands),
    )
    return subprocess.CompletedProcess(
        arguments, next((status for status in statuses if status), 0) or 0, out, err
    )


def _script(script: str, flags: tuple[object, ...]) -> list[str]:
    """The command line.

    A training writes curves and a report only if a flag says where.
    """
    quiet = (
        ["--no-log"]
        if script.endswith("/train.py") and not {"--log-dir", "--log-every"} & {*flags}
        else []
    )
    return [str(ROOT / "examples" / script), *map(str, flags), *quiet]


def _join(processes: list[mp.Process]) -> None:
    """Waits until all processes have ended, or until one has failed."""
    deadline = time.monotonic() + TIMEOUT_S
    while running := [process for process in processes if process.is_alive()]:
        if any(process.exitcode for process in processes):
            # If the error occurs on all ranks, the other processes end by themselves.
            wait([process.sentinel for process in running], timeout=10)
            return
        if not wait(
            [process.sentinel for process in running],
            timeout=deadline - time.monotonic(),
        ):
            raise TimeoutError(f"the command has not ended in {TIMEOUT_S} s")
