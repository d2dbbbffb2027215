"""Commands in processes that are forked from a process which has imported TorchRec: the
import takes four seconds.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.multiprocessing as mp

# The processes start with the environment that the first of them was started with.
START_METHOD = "forkserver"
# What servers, commands and the functions of tests import. A module that is not
# installed is left out.
mp.get_context(START_METHOD).set_forkserver_preload(
    [
        "torchrec.distributed",
        "torchrec_recstore.sharders",
        "torchrec_recstore.commands.scripts",
        "torchrec_recstore.commands.checkpoints",
        "typer._adapters",
        "torchrec_recstore_service.commands.server_process",
        "grpc_health.v1.health",
        "hypothesis",
        "pytest",
    ]
)

ROOT = Path(__file__).parents[1]


class ForkedCommand:
    """``python SCRIPT FLAGS``, ``python -m MODULE FLAGS`` or ``python -c CODE FLAGS``
    in a forked process.

    Args:
        arguments: The command line without ``python``.
        environment: The process's environment variables. Default: those of this
            process.
        daemon: True ends the process with this one. The process must then start none
            itself.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        daemon: bool = True,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name, "output")
        environment = dict(os.environ if environment is None else environment)
        self.process = mp.get_context(START_METHOD).Process(
            target=_run,
            args=(list(arguments), environment, Path.cwd(), self._output),
            daemon=daemon,
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def stdout(self) -> str:
        """What the process has written to stdout so far."""
        return self._written("out")

    @property
    def stderr(self) -> str:
        """What the process has written to stderr so far."""
        return self._written("err")

    def _written(self, kind: str) -> str:
        file = self._output.with_suffix(f".{kind}")
        return file.read_text() if file.exists() else ""

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end of the process, and returns its exit status; the status is
        negative for a signal.

        Raises:
            TimeoutError: The process has not ended after ``timeout_s`` seconds.
        """
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            raise TimeoutError(f"the command has not ended in {timeout_s} s")
        return self.process.exitcode

    def terminate(self) -> None:
        """Sends SIGTERM, as a service manager does."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def run_forked_command(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 280,
) -> subprocess.CompletedProcess[str]:
    """Runs a :class:`ForkedCommand` to its end; its output is captured.

    Raises:
        TimeoutError: The command has not ended after ``timeout_s`` seconds. The error
            says where each thread is, of the processes that the command has forked,
            too. All of them are killed.
    """
    command = ForkedCommand(arguments, environment, daemon=False)
    try:
        status = command.wait(timeout_s)
    except TimeoutError as error:
        found = subprocess.run(
            ["pgrep", "-g", str(command.pid)],
            check=False,
            capture_output=True,
            text=True,
        )
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGUSR1)
            time.sleep(0.5)  # for the traceback
        os.killpg(command.pid, signal.SIGKILL)
        raise TimeoutError(f"{error}:\n{command.stderr}") from None
    finally:
        command.kill()
    return subprocess.CompletedProcess(
        [*arguments], status, command.stdout, command.stderr
    )


def _run(
    arguments: list[str], environment: dict[str, str], folder: Path, output: Path
) -> None:
    for stream, kind in ((1, "out"), (2, "err")):
        file = os.open(
            output.with_suffix(f".{kind}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(file, stream)
        os.close(file)
    os.setpgrp()
    faulthandler.register(signal.SIGUSR1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    # The command must not find what only the tests have made importable.
    scripts = (str(ROOT / "examples"), str(ROOT / "benchmarks"))
    sys.path[:] = [path for path in sys.path if not path.startswith(scripts)]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
