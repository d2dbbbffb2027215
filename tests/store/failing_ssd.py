"""Has each call of the disk fail in turn while a cold store on an SSD works, once and
for ever.

python -m tests.store.failing_ssd DIRECTORY POINTS, with the shim of
tests/failing_disk.py
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from tests.failing_disk import FOR_EVER, failing_calls
from torchrec_recstore.options import SSDStore
from torchrec_recstore.store import ColdStoreError, open_cold_store
from torchrec_recstore.store.cold_store import SharedColdStore
from torchrec_recstore.utils import RecStoreWarning

ROW_BYTES = 4096
IDS = 700
CALLS = 16
NAMES = (
    "pwrite",
    "pwrite fallocate",
    "pread",
    "preadv",
    "rename",
    "create",
    "open",
    "ftruncate fsync",
)


def opened(folder: Path) -> SharedColdStore:
    options = SSDStore(str(folder), shared="rows")
    return open_cold_store(options, name="t", row_bytes=ROW_BYTES)  # type: ignore[return-value]


def batch(call: int) -> tuple[Tensor, Tensor | None]:
    """Returns the ids and rows of a put, or the ids of a delete and None.

    The rows depend on the id and the call.
    """
    generator = torch.Generator().manual_seed(call)
    ids = torch.randperm(IDS, generator=generator)[: IDS // 2 if call % 3 else 50]
    if call % 4 == 3:
        return ids, None
    words = (ids * 1_000_003 + call)[:, None] + torch.arange(ROW_BYTES // 4)
    return ids, words.to(torch.int32).view(torch.uint8)


class Model:
    """The rows that the store must have."""

    def __init__(self) -> None:
        self.has_row = torch.zeros(IDS, dtype=torch.bool)
        self.rows = torch.zeros(IDS, ROW_BYTES, dtype=torch.uint8)

    def apply(self, call: int) -> None:
        ids, rows = batch(call)
        self.has_row[ids] = rows is not None
        if rows is not None:
            self.rows[ids] = rows

    def assert_in(self, store: SharedColdStore) -> None:
        """Checks each row by a get and by a scan."""
        found, rows = store.get(torch.arange(IDS))
        assert torch.equal(found, self.has_row), "a row is missing, or was deleted"
        assert torch.equal(rows, self.rows[self.has_row]), "a row is old"
        scanned = [(torch.empty(0, dtype=torch.int64), rows[:0]), *store.scan()]
        ids = torch.cat([part for part, _ in scanned])
        assert torch.equal(ids, self.has_row.nonzero().squeeze(1))
        assert torch.equal(torch.cat([part for _, part in scanned]), rows)


def make(store: SharedColdStore, call: int) -> None:
    ids, rows = batch(call)
    if rows is None:
        store.delete(ids)
    else:
        store.put(ids, rows)


def run(folder: Path, names: str, first: int, count: int) -> tuple[int, int]:
    """Makes all calls while the disk fails.

    Returns the numbers of calls of the disk and of errors.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = Model()
    messages: list[str] = []
    store = None
    with failing_calls(folder, names, first, count) as failures:
        for call in range(CALLS):
            try:
                if store is None:
                    store = opened(folder)
                if call == CALLS // 2:
                    store.close()
                    store = None
                    store = opened(folder)
                make(store, call)
                model.apply(call)
                if call % 5 == 4:
                    model.assert_in(store)
            except ColdStoreError as error:
                messages.append(str(error))
        disk_calls = failures.calls
    for message in messages:
        assert str(folder) in message
        assert "Input/output error" in message, message
    # The disk works again: the store works, or it says that it does not. A new one has
    # all rows.
    if store is not None:
        model.assert_in(store)
        make(store, CALLS)
        model.apply(CALLS)
        model.assert_in(store)
        store.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if messages else "error", RecStoreWarning)
        store = opened(folder)
    model.assert_in(store)
    make(store, CALLS + 1)
    model.apply(CALLS + 1)
    model.assert_in(store)
    store.close()
    return disk_calls, len(messages)


def main(folder: Path, points: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RecStoreWarning)  # of rows that were dropped
    tried: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    for names in NAMES:
        disk_calls, errors = run(folder, names, FOR_EVER, 0)
        assert not errors
        for count in (1, FOR_EVER):
            for first in range(0, disk_calls, max(1, disk_calls // points)):
                errors = run(folder, names, first, count)[1]
                tried[names] += 1
                raised[names] += errors > 0
    for names in NAMES:
        print(
            f"{names}: {tried[names]} runs with failures, {raised[names]} of them with"
            " errors"
        )
    assert sum(raised.values()) > points


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
