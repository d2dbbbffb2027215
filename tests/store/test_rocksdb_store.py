from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.store.disk_rows import ROW_BYTES, assert_has, random_rows
from torchrec_recstore.options import RocksDBStore
from torchrec_recstore.store import (
    ColdStore,
    ColdStoreError,
    open_cold_store,
    rocksdb_store,
)


def _open(path: Path, name: str = "table/0", row_bytes: int = ROW_BYTES) -> ColdStore:
    return open_cold_store(RocksDBStore(str(path)), name=name, row_bytes=row_bytes)


def _take_the_rest(path: Path) -> None:
    """Fills the disk with a file."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**16)):
            pass


def _runs(path: Path) -> list[Path]:
    return sorted(path.glob("*/run-*"))


def test_rows_that_left_memory_come_back(tmp_path: Path) -> None:
    store = _open(tmp_path)
    # 41 MB: two write buffers and more
    ids, rows = torch.randperm(80_000) * 7919 - 10**8, random_rows(80_000)
    for some_ids, some_rows in zip(ids.split(20_000), rows.split(20_000), strict=True):
        store.put(some_ids, some_rows)
    assert list(tmp_path.glob("*/run-*/db/*.sst"))
    assert_has(store, ids, rows)
    store.close()


def test_a_directory_each_that_closing_removes(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here"
    one, two, other = _open(path), _open(path), _open(path, "../..")
    assert len(_runs(path)) == 3
    assert {run.parent.name for run in _runs(path)} == {"table%2F0", "%2E%2E%2F%2E%2E"}
    other.close()
    one.close()
    assert len(_runs(path)) == 1
    two.close()
    assert os.listdir(path) == ["lock"]


_OWNER = """
import sys, torch
from torchrec_recstore.options import RocksDBStore
from torchrec_recstore.store import open_cold_store
store = open_cold_store(RocksDBStore(sys.argv[1]), name="table/1", row_bytes=512)
store.put(torch.arange(1000), torch.ones(1000, 512, dtype=torch.uint8))
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def _owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _OWNER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_what_dead_processes_left_is_removed_and_the_living_keep_theirs(
    tmp_path: Path,
) -> None:
    mine = _open(tmp_path)
    mine.put(torch.arange(10), random_rows(10))
    strangers = tmp_path / "table%2F0" / "run-of-a-stranger"
    strangers.mkdir()
    (strangers / "lock").touch()
    with _owner(tmp_path) as dead, _owner(tmp_path) as living:
        owned = set(_runs(tmp_path))
        assert len(owned) == 4
        dead.kill()  # SIGKILL
        dead.wait()
        next_one = _open(tmp_path)
        gone = owned - set(_runs(tmp_path))
        assert [run.parent.name for run in gone] == ["table%2F1"]
        assert len(_runs(tmp_path)) == 4
        assert_has(mine, torch.arange(10), random_rows(10))
        living.kill()
        living.wait()
    next_one.close()
    mine.close()
    assert len(_runs(tmp_path)) == 2
    _open(tmp_path, "another").close()
    assert _runs(tmp_path) == [strangers]


def test_stores_are_opened_at_once_from_several_threads(tmp_path: Path) -> None:
    stores: list[ColdStore] = []
    threads = [
        threading.Thread(target=lambda: stores.append(_open(tmp_path)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == len(_runs(tmp_path)) == 8
    for store in stores:
        store.put(torch.arange(3), random_rows(3))
        store.close()


def test_closing_ends_open_scans(tmp_path: Path) -> None:
    store = _open(tmp_path)
    ids = torch.arange(70_000)
    store.put(ids, random_rows(1).expand(70_000, -1))
    scan = store.scan()
    next(scan)
    store.close()
    assert not _runs(tmp_path)
    with pytest.raises(ColdStoreError, match="while it was scanned"):
        next(scan)


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ColdStoreError, match=f"RocksDBStore.*{file}"):
        _open(file)


_RUNNING = ("num-running-flushes", "num-running-compactions")
_PENDING = ("mem-table-flush-pending", "compaction-pending")


def wait_for_background_work(
    store: Any, work: tuple[str, ...] = _RUNNING + _PENDING
) -> None:
    end = time.monotonic() + 30
    while any(store._db.property_int_value(f"rocksdb.{name}") for name in work):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_read_uses_two_threads_if_torch_may(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    readers = set()

    def read(keys: list[int]) -> list[int]:
        readers.add(threading.get_ident())
        return [-key for key in keys]

    for size in (0, 1, 127, 128, 1001):
        readers.clear()
        assert rocksdb_store._halved(read, list(range(size))) == [
            -key for key in range(size)
        ]
        assert len(readers) == (threads if size >= 128 else 1)


@pytest.mark.parametrize("damaged", [0, 999])
def test_a_read_that_fails_in_one_thread_ends_in_both(
    monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ends = []

    def read(keys: list[int]) -> list[int]:
        try:
            if damaged in keys:
                raise ColdStoreError("damaged")
            return keys
        finally:
            ends.append(keys[0])

    with pytest.raises(ColdStoreError, match="damaged"):
        rocksdb_store._halved(read, list(range(1000)))
    assert sorted(ends) == [0, 500]


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_files_are_an_error(tmp_path: Path, damage: str) -> None:
    store = _open(tmp_path)
    ids, rows = torch.arange(50_000), random_rows(50_000)
    store.put(ids, rows)
    # a file that is still being written would replace the damaged one
    wait_for_background_work(store)
    tables = sorted(tmp_path.glob("*/run-*/db/*.sst"))
    assert tables
    for table in tables:
        with open(table, "r+b") as file:
            if damage == "cut":
                file.truncate(4096)
            else:
                file.seek(table.stat().st_size // 2)
                file.write(bytes(8192))
    with pytest.raises(ColdStoreError, match=str(tmp_path)):
        store.get(ids)
    with pytest.raises(ColdStoreError, match=str(tmp_path)):
        list(store.scan())
    store.close()


@pytest.mark.parametrize(
    ("ids", "rows", "error"),
    [
        (torch.arange(3, dtype=torch.int32), random_rows(3), TypeError),
        (torch.zeros(3, 1, dtype=torch.int64), random_rows(3), ValueError),
        (torch.arange(3), random_rows(2), ValueError),
        (torch.arange(3), random_rows(3)[:, 1:], ValueError),
        (torch.arange(3), random_rows(3).int(), TypeError),
    ],
)
def test_arguments_of_another_kind(
    tmp_path: Path, ids: Tensor, rows: Tensor, error: type[Exception]
) -> None:
    store = _open(tmp_path)
    with pytest.raises(error, match=r"ids|rows"):
        store.put(ids, rows)
    assert not list(store.scan())
    store.close()


@pytest.mark.slow
def test_a_full_disk_loses_nothing_and_is_no_end(small_disk: Path) -> None:
    store = _open(small_disk)
    ids, rows = torch.randperm(80_000) - 10**5, random_rows(80_000)
    put = 0

    def fill() -> None:
        nonlocal put
        while put < len(ids):
            store.put(ids[put : put + 5000], rows[put : put + 5000])
            put += 5000

    with pytest.raises(
        ColdStoreError, match=f"{small_disk}.* cannot be written: .*[Nn]o space"
    ):
        fill()
    assert put >= 20_000
    found, got = store.get(ids[:put])
    assert found.all()
    assert torch.equal(got, rows[:put])
    # space on the disk is freed when the work ends
    wait_for_background_work(store, _RUNNING)
    _take_the_rest(small_disk / "rest")
    again = (ids[put : put + 5000], rows[put : put + 5000])
    with pytest.raises(ColdStoreError, match="No space"):
        store.put(*again)
    with pytest.raises(ColdStoreError, match="No space"):
        store.delete(ids[:1])
    assert torch.equal(store.get(ids[:put])[1], rows[:put])

    (small_disk / "ballast").unlink()
    (small_disk / "rest").unlink()
    store.put(*again)
    assert_has(store, ids[: put + 5000], rows[: put + 5000])
    store.delete(ids[:put])
    store.put(ids[:5000], rows[:5000])
    assert_has(
        store, torch.cat([ids[:5000], again[0]]), torch.cat([rows[:5000], again[1]])
    )
    store.close()
    assert not _runs(small_disk)


def test_a_store_that_meets_a_full_disk_is_closed_all_the_same(
    small_disk: Path,
) -> None:
    store = _open(small_disk)
    rows = random_rows(1).expand(150_000, -1)
    with pytest.raises(ColdStoreError):
        store.put(torch.arange(150_000), rows)
    store.close()
    assert not _runs(small_disk)
    with pytest.raises(ColdStoreError, match="closed"):
        store.put(torch.arange(150_000), rows)
