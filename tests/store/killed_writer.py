"""Kills a process that writes to a cold store on an SSD with SIGKILL, again and again,
and compares what is left.

python -m tests.store.killed_writer KILLS DIRECTORY

Each child opens the rows of its predecessor, and puts and deletes batches of them. It
notes the number of each call before and after the call, in memory that its parent sees.
A batch that was not acknowledged is there as a whole or not at all; all others are
there to the bit.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time

import torch
from torch import Tensor

from torchrec_recstore.options import SSDStore
from torchrec_recstore.store import open_cold_store
from torchrec_recstore.store.cold_store import SharedColdStore

IDS = 40_000
ROW_BYTES = 148
NONE = b"\xff" * 8
NOTHING = (
    torch.empty(0, dtype=torch.int64),
    torch.empty(0, ROW_BYTES, dtype=torch.uint8),
)


def batch(call: int) -> tuple[Tensor, Tensor | None]:
    """Returns the ids and rows of a put, or the ids of a delete and None.

    Rows tell their id and their call.
    """
    generator = torch.Generator().manual_seed(call)
    n = int(
        torch.randint(1, 20_000 if call % 3 == 0 else 200, (1,), generator=generator)
    )
    ids = torch.randperm(IDS, generator=generator)[:n] - IDS // 2
    if call % 5 == 4:
        return ids, None
    words = (ids * 1_000_003 + call)[:, None] + torch.arange(ROW_BYTES // 4)
    return ids, words.to(torch.int32).view(torch.uint8)


def opened(directory: str) -> SharedColdStore:
    return open_cold_store(
        SSDStore(directory, shared="killed"), name="t", row_bytes=ROW_BYTES
    )  # type: ignore[return-value]


class Model:
    """The rows that the store must have."""

    def __init__(self) -> None:
        self.there = torch.zeros(IDS, dtype=torch.bool)
        self.rows = torch.zeros(IDS, ROW_BYTES, dtype=torch.uint8)

    def apply(self, call: int) -> None:
        ids, images = batch(call)
        self.there[ids + IDS // 2] = images is not None
        if images is not None:
            self.rows[ids + IDS // 2] = images

    def is_in(self, store: SharedColdStore) -> bool:
        ids, rows = (
            torch.cat(parts) for parts in zip(NOTHING, *store.scan(), strict=True)
        )
        there = self.there.nonzero().squeeze(1)
        return torch.equal(ids, there - IDS // 2) and torch.equal(
            rows, self.rows[there]
        )


def write(directory: str, call: int, notes: mmap.mmap) -> None:
    store = opened(directory)
    while True:
        ids, images = batch(call)
        notes[:8] = call.to_bytes(8, "little")
        if images is None:
            store.delete(ids)
        else:
            store.put(ids, images)
        notes[8:] = call.to_bytes(8, "little")
        call += 1


def main(kills: int, directory: str) -> None:
    torch.set_num_threads(1)
    model = Model()
    call = kept = 0
    for kill in range(kills):
        notes = mmap.mmap(-1, 16)
        notes[:] = NONE * 2
        child = os.fork()
        if child == 0:
            write(directory, call, notes)
        chance = random.Random(kill)
        end = time.monotonic() + chance.uniform(0.0, 0.1)
        # It dies within a call that it has begun, most of the time.
        while notes[:8] == notes[8:] or time.monotonic() < end:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child has ended"
        time.sleep(chance.uniform(0.0, 0.003))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        begun = int.from_bytes(notes[:8], "little")
        while notes[8:] != NONE and call <= int.from_bytes(notes[8:], "little"):
            model.apply(call)
            call += 1
        store = opened(directory)
        if not model.is_in(store):
            assert begun == call, f"kill {kill}: acknowledged rows differ"
            model.apply(call)
            assert model.is_in(store), f"kill {kill}: a batch was kept in part"
            call += 1
            kept += 1
        assert len(store.ids()) == model.there.sum()
        store.close()
    assert call > kills // 4  # a busy machine may kill a child within its first call
    print(
        f"{kills} kills, {call} calls, {model.there.sum()} rows equal; {kept} calls had"
        " been made without an answer"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
