"""Has each call of the disk fail in turn during saves of all kinds.

python -m tests.checkpoint.failing_saves DIRECTORY RANKS STEP, with the shim of
tests/failing_disk.py
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchrec.distributed import DistributedModelParallel

from tests.checkpoint import models
from tests.failing_disk import FOR_EVER, failing_calls
from torchrec_recstore import async_save, load_checkpoint, save_checkpoint

FAILURES = [
    ("write pwrite", errno.ENOSPC),
    ("fsync", errno.EIO),
    ("rename", errno.EIO),
    ("mkdir create", errno.ENOSPC),
]


def save(kind: str, model: DistributedModelParallel, folder: Path) -> None:
    if kind == "save":
        save_checkpoint(model, folder / "next")
    elif kind == "async":
        async_save(model, folder / "next").wait()
    elif kind == "delta":
        save_checkpoint(model, folder / "next", delta_of=folder / "first")
    else:
        save_checkpoint(model, folder / "first", overwrite=True)


class Saves:
    """Saves of a model while the disk of one rank fails."""

    def __init__(self, folder: Path, failing_rank: int) -> None:
        self.folder = folder
        self.fails_here = dist.get_rank() == failing_rank
        self.sharding = "row_wise" if dist.get_world_size() > 1 else "table_wise"
        self.model = models.recstore(self.sharding)
        self.other = models.recstore(self.sharding)
        self.tried: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()

    def begin(self) -> None:
        """Writes the checkpoint ``first``, and trains on."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        dist.barrier()
        models.train(self.model)
        save_checkpoint(self.model, self.folder / "first")
        self.first = models.shards(self.model)
        models.train(self.model, steps=2, distinct=60)

    def assert_loads(self, name: str, expected: list[Any]) -> None:
        """Loads a checkpoint into the other model, whose rows are different ones
        before.
        """
        models.train(self.other, steps=1, distinct=9)
        load_checkpoint(self.other, self.folder / name)
        models.assert_holds(self.other, expected)

    def failing(self, kind: str, names: str, error: int, first: int, count: int) -> int:
        """Makes a save of this kind while calls fail.

        Returns the number of calls of this rank that could fail.
        """
        before = models.shards(self.model)
        saved = "first" if kind == "overwrite" else "next"
        files = sorted(path.name for path in self.folder.iterdir())
        dist.barrier()
        raised = None
        with failing_calls(
            self.folder, names, first, count if self.fails_here else 0, error
        ) as failures:
            try:
                save(kind, self.model, self.folder)
            except Exception as failure:
                raised = failure
            calls = failures.calls
        dist.barrier()
        self.tried[names] += 1
        models.assert_holds(self.model, before)
        # All failures were at calls that the save can do without, or on the other rank.
        if raised is None:
            self.assert_loads(saved, before)
        else:
            self.raised[names] += 1
            message = str(raised)
            assert str(self.folder) in message, (kind, names, first, repr(raised))
            assert os.strerror(error) in message, (kind, names, first, repr(raised))
            left = sorted(path.name for path in self.folder.iterdir())
            assert left == files, (kind, names, first, count, left)
            dist.barrier()
            self.assert_loads("first", self.first)
            # Training goes on, and the same save works.
            models.train(self.model, steps=1)
            now = models.shards(self.model)
            save(kind, self.model, self.folder)
            self.assert_loads(saved, now)
        dist.barrier()
        assert not list(self.folder.glob(".*")), sorted(self.folder.glob(".*"))
        if kind == "overwrite":
            self.first = models.shards(self.model)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / "next", ignore_errors=True)
        dist.barrier()
        return calls

    def run(self, kind: str, step: int, offset: int) -> None:
        """Has each call fail in turn, or one of ``step`` calls from the one of this
        number on, once and for ever.
        """
        for names, error in FAILURES:
            self.begin()
            own_calls = self.failing(kind, names, error, 0, 0)
            calls = torch.tensor(own_calls if self.fails_here else 0)
            dist.all_reduce(calls)
            begin = min(offset, int(calls) - 1)
            for first in range(begin, int(calls), step):
                for count in (1, FOR_EVER):
                    self.failing(kind, names, error, first, count)


def main(rank: int, folder: Path, ranks: int, step: int) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    rendezvous = folder / "rendezvous"
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )
    for failing_rank in range(ranks):
        saves = Saves(folder / "saves", failing_rank)
        for number, kind in enumerate(("save", "async", "delta", "overwrite")):
            saves.run(kind, step, offset=(2 * number + failing_rank) % step)
        if rank == 0:
            for names, _ in FAILURES:
                print(
                    f"{names}: {saves.tried[names]} saves, {saves.raised[names]}"
                    " failed",
                    flush=True,
                )
            assert sum(saves.raised.values()) > (20 if step == 1 else 0)
    dist.barrier()


if __name__ == "__main__":
    directory, world_size, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    function = partial(main, folder=directory, ranks=world_size, step=every)
    mp.start_processes(function, (), world_size, start_method="fork")
