"""The folder of a run's log: which one, for this run alone; what it says of the run beside its curves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common.command import DataError
from common.curves import has_curves
from common.folder import locked_folder
from common.machine import machine, versions
from common.processes import on_rank_0
from common.report import finite
from common.settings import RunSettings
from common.whole_file import write_whole

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
