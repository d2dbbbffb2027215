"""Kills a process with SIGKILL in the writes of a compaction of a cold store on an SSD,
one write after the other.

python -m tests.store.killed_compaction DIRECTORY POINTS, with the shim of
tests/failing_disk.py

Each child opens a copy of a store that is about to move the rows of its segments, and
makes calls until it dies in the middle of a write of its own. All calls that were
acknowledged are there to the bit, and the last one as a whole or not.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import torch

from tests.failing_disk import FOR_EVER, die_in_call, failing_calls
from tests.store.failing_ssd import Model, make, opened
from torchrec_recstore.store import ColdStoreError
from torchrec_recstore.utils import RecStoreWarning

WARM_CALLS = 14
CALLS = 8
WRITES = "pwrite fallocate"


def write(folder: Path, point: int, notes: mmap.mmap) -> None:
    """Makes calls, and notes how many of them were acknowledged. Dies in a write."""
    store = opened(folder)
    die_in_call(folder, WRITES, point)
    for call in range(CALLS):
        make(store, WARM_CALLS + call)
        notes[0] = call + 1


def same(model: Model, folder: Path) -> bool:
    """Opens the store and compares all rows. Closes it again."""
    store = opened(folder)
    try:
        model.assert_in(store)
    except AssertionError:
        return False
    finally:
        store.close()
    return True


def model_after(calls: int) -> Model:
    model = Model()
    for call in range(WARM_CALLS + calls):
        model.apply(call)
    return model


def main(directory: Path, points: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RecStoreWarning)
    warm = directory / "warm"
    folder = directory / "store"
    store = opened(warm)
    for call in range(WARM_CALLS):
        make(store, call)
    store.close()
    shutil.copytree(warm, folder)
    store = opened(folder)
    with failing_calls(folder, WRITES, FOR_EVER, 0) as failures:
        for call in range(CALLS):
            make(store, WARM_CALLS + call)
        writes = failures.calls
    store.close()
    in_compaction = 0
    kills = 0
    for point in range(0, writes, max(1, writes // points)):
        shutil.rmtree(folder)
        shutil.copytree(warm, folder)
        notes = mmap.mmap(-1, 1)
        child = os.fork()
        if child == 0:
            write(folder, point, notes)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -signal.SIGKILL, (point, status)
        kills += 1
        acknowledged = notes[0]
        if not same(model_after(acknowledged), folder):
            # The call in which it was killed had already been written, so that its
            # compaction was under way.
            assert same(model_after(acknowledged + 1), folder), (
                f"point {point}: rows differ"
            )
            in_compaction += 1
            acknowledged += 1
        # The file can be used: rows are written, moved and read again.
        model = model_after(acknowledged)
        store = opened(folder)
        for call in range(WARM_CALLS + acknowledged, WARM_CALLS + acknowledged + 4):
            make(store, call)
            model.apply(call)
        model.assert_in(store)
        store.close()
        try:
            assert same(model, folder)
        except ColdStoreError as error:
            raise AssertionError(f"point {point}: {error}") from error
    print(
        f"{kills} kills in {writes} writes, {in_compaction} of them after the call"
        " itself was written"
    )
    assert in_compaction > kills // 8


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
