"""Saves, loads and deletes the checkpoints of a run in one folder."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.filesize import decimal
from torch import nn
from tqdm import tqdm

from common.command import DataError
from common.processes import on_rank_0, progress_bar
from torchrec_recstore import (
    CheckpointInfo,
    load_checkpoint,
    read_info,
    save_checkpoint,
)

_NAME = re.compile(r"step-(\d{9,})")


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Turns an error of a checkpoint or of the disk into a :class:`DataError`."""
    try:
        yield
    except OSError as error:
        if not error.strerror:
            raise DataError(str(error)) from error
        # The error may name a file inside the checkpoint.
        raise DataError(f"{error.filename or path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(str(error)) from error


@contextmanager
def _rows_shown(label: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar of rank 0's rows.

    Yields a function of the number of completed rows and the total number.
    """
    with progress_bar(desc=label, unit=" rows", total=0, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


class CheckpointFolder:
    """A folder of checkpoints with names like ``step-000000123``.

    Every method is collective.

    A checkpoint is written under a hidden name and renamed when it is complete, so
    every visible checkpoint is complete.

    The checkpoints are ordered by their names, and not by
    ``torchrec_recstore.checkpoint.newest`` and ``keep_newest``. These compare the steps
    of the tables, which ``--reset-rows-each-epoch`` sets back to 0, and they refuse a
    folder in which a later checkpoint has fewer steps. A name has the step of the run.

    Args:
        path: The path of the folder. Only one run may save or sweep there at a time.
        keep: The number of checkpoints to keep, at least 1.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep

    def sweep(self) -> None:
        """Removes the incomplete checkpoints of a killed run.

        A run leaves them if it is killed while it saves or deletes a checkpoint.

        Raises:
            DataError: A file cannot be removed.
        """

        def remove() -> None:
            with _in_one_line(self.path):
                for incomplete in self.path.glob(".step-*"):
                    if incomplete.is_dir():
                        shutil.rmtree(incomplete)
                    else:
                        incomplete.unlink()

        on_rank_0(remove)

    def _paths(self) -> list[Path]:
        """Returns the paths of the checkpoints, the oldest first."""
        numbered_paths = []
        for path in self.path.iterdir():
            name = _NAME.fullmatch(path.name)
            if name:
                numbered_paths.append((int(name[1]), path))
        return [path for _, path in sorted(numbered_paths)]

    def newest(self) -> CheckpointInfo | None:
        """Returns the metadata of the newest checkpoint.

        It is None if there is no checkpoint.

        Raises:
            DataError: The checkpoint cannot be read.
        """

        def read() -> CheckpointInfo | None:
            paths = self._paths()
            if not paths:
                return None
            with _in_one_line(paths[-1]):
                return read_info(paths[-1])

        return on_rank_0(read)

    def load(self, model: nn.Module, path: Path) -> dict[str, Any]:
        """Loads a checkpoint into a model.

        Returns:
            The training state that was saved with the checkpoint.

        Raises:
            DataError: The checkpoint is damaged or does not fit the model. The model is
                not changed.
        """
        with _in_one_line(path), _rows_shown(f"loading {path.name}") as progress:
            return load_checkpoint(model, path, progress=progress).training_state or {}

    def save(
        self,
        model: nn.Module,
        step: int,
        training_state: dict[str, Any],
    ) -> None:
        """Saves a checkpoint, and reports it on stderr.

        The checkpoints that are no longer kept are deleted.

        Args:
            model: The model, wrapped in ``DistributedModelParallel``.
            step: The step that names the checkpoint. It must be greater than the step
                of every earlier checkpoint.
            training_state: The state that the run needs besides the model. It must be
                the same on every rank.

        Raises:
            DataError: The checkpoint cannot be written, for example because the disk is
                full. Older checkpoints are kept.
        """
        path = self.path / f"step-{step:09}"
        begin = time.perf_counter()
        with _in_one_line(path), _rows_shown(f"saving {path.name}") as progress:
            info = save_checkpoint(
                model,
                path,
                training_state=training_state,
                progress=progress,
            )
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - begin
            tqdm.write(
                f"checkpoint {path}: {decimal(info.bytes)} in {seconds:.1f} s",
                file=sys.stderr,
            )
        on_rank_0(self._delete_old)

    def _delete_old(self) -> None:
        paths = self._paths()
        needed = self._needed(paths)
        for path in paths:
            if Path(os.path.abspath(path)) not in needed:
                with _in_one_line(path):
                    # An incomplete checkpoint must not be visible, so it is hidden
                    # before it is deleted.
                    hidden = path.rename(path.with_name(f".{path.name}.removing"))
                    shutil.rmtree(hidden)

    def _needed(self, paths: list[Path]) -> set[Path]:
        """Returns the newest checkpoints and the checkpoints that they are based on."""
        present = {Path(os.path.abspath(path)) for path in paths}
        needed: set[Path] = set()
        for path in paths[-self.keep :]:
            checkpoint: Path | None = Path(os.path.abspath(path))
            while checkpoint in present and checkpoint not in needed:
                needed.add(checkpoint)
                try:
                    checkpoint = read_info(checkpoint).base
                except (ValueError, OSError):
                    # A checkpoint that cannot be read cannot be loaded, so its base is
                    # not needed.
                    checkpoint = None
        return needed
