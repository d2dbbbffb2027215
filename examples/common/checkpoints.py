"""The folder of a run's checkpoints: one for a step, the newest to go on from, and the older ones cleared away."""

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
from common.command import DataError
from common.processes import on_rank_0, progress_bar
from rich.filesize import decimal
from torch import nn
from tqdm import tqdm

from torchrec_recstore import CheckpointInfo, load_checkpoint, read_info, save_checkpoint

_NAME = re.compile(r"step-(\d{9,})")


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Makes a :class:`DataError` of what is wrong with a checkpoint, or with the disk."""
    try:
        yield
    except OSError as error:
        # The file that failed may be another one inside.
        line = f"{error.filename or path}: {error.strerror}" if error.strerror else str(error)
        raise DataError(line) from error
    except ValueError as error:
        raise DataError(str(error)) from error


@contextmanager
def _rows_shown(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over rank 0's rows; yields what takes the rows done and those of all."""
    with progress_bar(desc=what, unit=" rows", total=0, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


class CheckpointFolder:
    """A folder of checkpoints named by their step, ``step-000000123``. Every method is collective.

    A checkpoint is written under a hidden name beside and renamed when it is whole, so each one found is whole.

    Args:
        path: the folder. Whoever saves or sweeps has it to itself.
        keep: how many checkpoints stay; at least 1.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep

    def sweep(self) -> None:
        """Removes what a killed run was writing, or clearing away.

        Raises:
            DataError: it cannot be removed.
        """

        def remove() -> None:
            with _in_one_line(self.path):
                for rest in self.path.glob(".step-*"):
                    if rest.is_dir():
                        shutil.rmtree(rest)
                    else:
                        rest.unlink()

        on_rank_0(remove)

    def _all(self) -> list[Path]:
        """The checkpoints, oldest first."""
        found = ((_NAME.fullmatch(entry.name), entry) for entry in self.path.iterdir())
        return [entry for _, entry in sorted((int(name[1]), entry) for name, entry in found if name)]

    def newest(self) -> CheckpointInfo | None:
        """What the newest checkpoint says of itself; None where there is no checkpoint.

        Raises:
            DataError: it cannot be read.
        """

        def read() -> CheckpointInfo | None:
            paths = self._all()
            if not paths:
                return None
            with _in_one_line(paths[-1]):
                return read_info(paths[-1])

        return on_rank_0(read)

    def load(self, model: nn.Module, path: Path) -> dict[str, Any]:
        """Loads a checkpoint into a model.

        Returns:
            The training state that it was saved with.

        Raises:
            DataError: it is damaged, or does not fit the model; the model is as it was.
        """
        with _in_one_line(path), _rows_shown(f"loading {path.name}") as progress:
            return load_checkpoint(model, path, progress=progress).training_state or {}

    def save(self, model: nn.Module, step: int, training_state: dict[str, Any]) -> None:
        """Saves a checkpoint, says so on stderr, and removes those that are too old by then.

        Args:
            model: what ``DistributedModelParallel`` gives.
            step: that the checkpoint is named by; more than any before.
            training_state: what the run needs beside the model, the same on every rank.

        Raises:
            DataError: it cannot be written, for want of space or the like; the older ones are still there.
        """
        path = self.path / f"step-{step:09}"
        begin = time.perf_counter()
        with _in_one_line(path), _rows_shown(f"saving {path.name}") as progress:
            info = save_checkpoint(model, path, training_state=training_state, progress=progress)
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - begin
            tqdm.write(f"checkpoint {path}: {decimal(info.bytes)} in {seconds:.1f} s", file=sys.stderr)
        on_rank_0(self._clear)

    def _clear(self) -> None:
        paths = self._all()
        needed = self._needed(paths)
        for path in paths:
            if Path(os.path.abspath(path)) not in needed:
                with _in_one_line(path):
                    # Not visible while it is no longer whole.
                    shutil.rmtree(path.rename(path.with_name(f".{path.name}.removing")))

    def _needed(self, paths: list[Path]) -> set[Path]:
        """The newest, and those that they are deltas of."""
        present = {Path(os.path.abspath(path)) for path in paths}
        needed: set[Path] = set()
        for path in paths[-self.keep :]:
            place: Path | None = Path(os.path.abspath(path))
            while place in present - needed:
                needed.add(place)
                try:
                    place = read_info(place).base
                except (ValueError, OSError):
                    place = None  # what cannot be read can no longer be loaded, and needs no other
        return needed
