"""The folder of a run, which one run uses at a time, with a description of the run and of the machine."""

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

RUN_FILE = "run.json"
EVENT_FILES = "*tfevents*"
INSTEAD = "(choose another folder with --log-dir, or write no log with --no-log)"
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


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name and renames it, so that the file is never incomplete.

    If the run is killed or the disk is full, the previous file is kept.

    Raises:
        OSError: The file cannot be written. The error names the file.
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
    """Creates a folder if it does not exist, and locks it for this run while the body runs. Collective.

    Args:
        path: The path of the folder, on a file system that all ranks share.

    Raises:
        DataError: The folder cannot be created or written, another run uses it, or a rank does not see it.
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
    """Creates a folder if it does not exist, and locks it until the lock is closed or the process ends.

    Raises:
        DataError: The folder cannot be created or written, or another run uses it.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: this is not a folder")
    try:
        make_directory(path)
        # If torchrun is killed, its processes continue to train. The lock keeps a second run from writing to the folder
        # at the same time.
        return FileLock(
            path / ".lock", "writing there", lambda holder: f"{path}: another run is writing there: {holder}"
        )
    except BlockingIOError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that a run depends on."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Returns the processor, the cores that this process may use, the memory and the operating system."""
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
    """Returns the resident memory of this process in bytes, including shared memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def log_folder(settings: RunSettings, example: str, fixed: Path | None = None) -> Iterator[Path | None]:
    """Creates the folder of a run's log, and locks it for this run while the body runs. Only rank 0 writes to it.

    Collective.

    Args:
        settings: The settings of the run. ``log_dir`` is the folder. If it is None, a new folder is created under
            ``runs``, named by the example and the time.
        example: The name of the example.
        fixed: The folder to use instead of a new one, for a run that may be resumed. It must be used by this run only.

    Yields:
        The folder, on every rank, or None if the run writes no log.

    Raises:
        DataError: A package is missing, the folder cannot be written, or it contains the curves of another run.
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
        # After a restart by torchrun, or in a fixed folder, the curves belong to this run, also without --resume: the
        # run then has no checkpoint yet and begins again.
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if has_curves(folder) and not (settings.goes_on or restarted or folder == fixed):
            raise DataError(f"{folder} contains the curves of another run: choose another --log-dir")
        return folder

    with locks:
        yield on_rank_0(make)


def _need(package: str, module: str) -> None:
    # A missing package is reported now, and not after the training.
    try:
        import_module(module)
    except ImportError as error:
        raise DataError(
            f"curves and the report need {package}, which cannot be imported: {error}. "
            f"Install it with `pip install {package}`, or train with --no-log"
        ) from error


def _new(example: str) -> Path:
    """Creates a new folder and returns its path."""
    while True:
        folder = Path("runs", f"{example}-{datetime.now():%Y%m%d-%H%M%S}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            time.sleep(0.1)  # another run began in the same second
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror} {INSTEAD}") from error


def describe(folder: Path, example: str, settings: dict[str, Any]) -> None:
    """Writes the description of a run that begins.

    Args:
        folder: The folder of the log.
        example: The name of the example.
        settings: The settings, without credentials.

    Raises:
        OSError: The file cannot be written.
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
    """Adds the result to the description of the run.

    Raises:
        OSError: The file cannot be written.
    """
    _write(folder, read_about(folder) | {"result": result})


def read_about(folder: Path) -> dict[str, Any]:
    """Returns the description of a run. It is empty if the file is missing or incomplete."""
    try:
        about = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _write(folder: Path, about: dict[str, Any]) -> None:
    write_whole(folder / RUN_FILE, (json.dumps(finite(about), indent=2, default=str) + "\n").encode())


def has_curves(folder: Path) -> bool:
    """Returns whether a folder contains the curves of a run."""
    return any(folder.glob(EVENT_FILES))
