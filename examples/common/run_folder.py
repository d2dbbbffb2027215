"""The folder of a run: taken by one run at a time, with a description of the run and of the machine."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.command import DataError
from common.processes import on_rank_0
from common.report import finite
from common.run_settings import RunSettings
from rich.filesize import decimal

from torchrec_recstore.checkpoint.files import FileLock, make_directory


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its place and renames it: a killed run, or a full disk, leaves the one before, or none.

    Raises:
        OSError: it cannot be written; with its name.
    """
    beside = path.with_name(f".{path.name}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """Makes a folder where it is not there, and keeps other runs out of it meanwhile; collective.

    Args:
        path: the folder, on a file system that all ranks see.

    Raises:
        DataError: there is no such folder and none can be made, it cannot be written to, another run has it, or a rank
            does not see it.
    """
    locks = ExitStack()

    def lock() -> None:
        locks.enter_context(locked_folder(path))

    with locks:
        on_rank_0(lock)
        seen: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(seen, path.is_dir())
        if not all(seen):
            raise DataError(f"{path}: rank {seen.index(False)} does not see this folder, which all ranks must share")
        yield


def locked_folder(path: Path) -> FileLock:
    """Makes a folder where it is not there, and locks it until the lock is closed or the process has ended.

    Raises:
        DataError: there is no such folder and none can be made, it cannot be written to, or another run has it.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: this is no folder")
    try:
        make_directory(path)
        # A torchrun that is killed leaves its processes to train on, and a second one would write among them.
        return FileLock(
            path / ".lock", "writing there", lambda holder: f"{path}: another run is writing there: {holder}"
        )
    except BlockingIOError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


PACKAGES = (
    "torchrec-recstore",
    "torch",
    "torchrec",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "numpy",
    "tensorboard",
    "matplotlib",
)


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run depends on; those that are installed."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """The processor, its cores as far as this process may use them, memory and system."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads of torch": str(torch.get_num_threads()),
        "memory": decimal(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "system": platform.platform(),
        "host": platform.node(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def resident_bytes() -> int:
    """Memory of this process that is in DRAM, with what it shares."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


RUN_FILE = "run.json"
INSTEAD = "(--log-dir names another folder, --no-log does without one)"


@contextmanager
def log_folder(settings: RunSettings, example: str, fixed: Path | None = None) -> Iterator[Path | None]:
    """Makes the folder of a run's log, and keeps other runs out of it meanwhile; collective. Rank 0 alone writes there.

    Args:
        settings: ``log_dir`` names the folder; without it a new one under ``runs`` is made, named by example and time.
        example: the example's name.
        fixed: instead of a new one, for a run that may have to find it again; its place is the run's alone.

    Returns:
        The folder, on every rank; None where the run writes no log.

    Raises:
        DataError: a package is missing, the folder cannot be written to, or has another run's curves.
    """
    if not settings.log:
        yield None
        return
    locks = ExitStack()

    def make() -> Path:
        _need("tensorboard", "torch.utils.tensorboard")
        _need("matplotlib", "matplotlib")
        folder = settings.log_dir or fixed or _new(example)
        try:
            locks.enter_context(locked_folder(folder))
        except DataError as error:
            raise DataError(f"{error} {INSTEAD}") from error
        # Its curves go on from the run's first sample. Without --resume that is the beginning: after torchrun's restart
        # of a run without checkpoints, and where a run was killed before its first one.
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if has_curves(folder) and not (settings.goes_on or restarted or folder == fixed):
            raise DataError(f"{folder} has a run's curves already: another --log-dir starts anew")
        return folder

    with locks:
        yield on_rank_0(make)


def _need(package: str, module: str) -> None:
    # Now, and not when the report of a finished training is made.
    try:
        import_module(module)
    except ImportError as error:
        raise DataError(
            f"curves and the report need {package}, which cannot be imported: {error}. "
            f"`pip install {package}`, or train with --no-log"
        ) from error


def _new(example: str) -> Path:
    """A folder that no run has taken yet."""
    while True:
        folder = Path("runs", f"{example}-{datetime.now():%Y%m%d-%H%M%S}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            time.sleep(0.1)  # of a run that began in the same second
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror} {INSTEAD}") from error


def describe(folder: Path, example: str, settings: dict[str, Any]) -> None:
    """Writes down what is about to run.

    Args:
        folder: of the log.
        example: the example's name.
        settings: as they may be shown.

    Raises:
        OSError: the file cannot be written.
    """
    about = {
        "example": example,
        "started": [*(read_about(folder).get("started") or []), f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"],
        "settings": settings,
        "ranks": dist.get_world_size(),
        "versions": versions(),
        "machine": machine(),
        "result": None,
    }
    _write(folder, about)


def add_result(folder: Path, result: dict[str, Any]) -> None:
    """Adds the result to what is written down of the run.

    Raises:
        OSError: the file cannot be written.
    """
    _write(folder, read_about(folder) | {"result": result})


def read_about(folder: Path) -> dict[str, Any]:
    """What is written down of a run; empty where nothing is, or not as a whole."""
    try:
        about = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _write(folder: Path, about: dict[str, Any]) -> None:
    write_whole(folder / RUN_FILE, (json.dumps(finite(about), indent=2, default=str) + "\n").encode())


EVENT_FILES = "*tfevents*"


def has_curves(folder: Path) -> bool:
    """Whether a run has written there."""
    return any(folder.glob(EVENT_FILES))
