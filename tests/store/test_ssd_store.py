from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrec_recstore import RowWiseAdagrad, SSDStore, Table, TableOptions
from torchrec_recstore.store import ColdStore, ColdStoreError, open_cold_store

ROW_BYTES = 512


def _open(path: Path, name: str = "table/0", shared: str | None = None, row_bytes: int = ROW_BYTES) -> ColdStore:
    return open_cold_store(SSDStore(str(path), shared), name=name, row_bytes=row_bytes)


def _rows(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, ROW_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _check(store: ColdStore, ids: Tensor, rows: Tensor) -> None:
    found, got = store.get(ids)
    assert found.all()
    assert torch.equal(got, rows)
    scanned = list(store.scan())
    ids, order = ids.sort()
    assert torch.equal(torch.cat([batch for batch, _ in scanned]), ids)
    assert torch.equal(torch.cat([batch for _, batch in scanned]), rows[order])


def _file_of(path: Path) -> int:
    (file,) = (int(each.name) for each in Path("/proc/self/fd").iterdir() if _target(each).startswith(str(path)))
    return file


def _target(link: Path) -> str:
    with suppress(FileNotFoundError):
        return os.readlink(link) if link.name != "lock" and os.readlink(link).endswith("/rows") else ""
    return ""


@contextmanager
def _replaced(path: Path, by: str) -> Iterator[None]:
    """Puts another file in the place of the store's: a disk that is full, or that cannot be read."""
    file, other = _file_of(path), os.open(by, os.O_RDWR)
    kept = os.dup(file)
    os.dup2(other, file)
    try:
        yield
    finally:
        os.dup2(kept, file)
        os.close(kept)
        os.close(other)


def test_a_directory_each_that_closing_removes(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here"
    one, two, other = _open(path), _open(path), _open(path, "../..")
    assert {run.parent.name for run in path.glob("*/run-*")} == {"table%2F0", "%2E%2E%2F%2E%2E"}
    one.put(torch.arange(3), _rows(3))
    assert not two.get(torch.arange(3))[0].any()
    for store in (one, two, other):
        store.close()
    assert os.listdir(path) == ["lock"]
    with pytest.raises(
        ColdStoreError, match=r"cold store SSDStore\('.*/rows'\) is closed: only close\(\) may be called"
    ):
        one.get(torch.arange(3))


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for shared in (None, "rows"):
        with pytest.raises(ColdStoreError, match=rf"cold store SSDStore\('{tmp_path}/file/cold'\): .*Not a directory"):
            _open(tmp_path / "file" / "cold", shared=shared)


@pytest.mark.parametrize("shared", [None, "rows"])
def test_a_disk_that_fails_changes_no_row(tmp_path: Path, shared: str | None) -> None:
    store = _open(tmp_path, shared=shared)
    ids, rows = torch.arange(10_000), _rows(10_000)
    store.put(ids, rows)
    for _ in range(3):
        with _replaced(tmp_path, "/dev/full"), pytest.raises(ColdStoreError, match="cannot be written: No space left"):
            store.put(ids.flip(0), rows)
        with (
            _replaced(tmp_path, "/proc/self/mem"),
            pytest.raises(ColdStoreError, match="cannot be read: Input/output error"),
        ):
            store.get(ids)
        _check(store, ids, rows)
    store.put(ids.flip(0), rows)
    _check(store, ids.flip(0), rows)
    store.close()


def test_a_full_disk_loses_nothing_and_is_no_end(small_disk: Path) -> None:
    store = _open(small_disk / "cold", shared="rows")
    ids, some = torch.arange(20_000), _rows(20_000)  # 10 MB of the 40 MB that are left
    rows = some
    store.put(ids, some)
    with pytest.raises(ColdStoreError, match="cannot be written: No space left on device"):  # noqa: PT012
        for begin in range(20_000, 200_000, 20_000):
            more = torch.arange(begin, begin + 20_000)
            store.put(more, some)
            ids, rows = torch.cat([ids, more]), torch.cat([rows, some])
    _check(store, ids, rows)
    store.close()
    store = _open(small_disk / "cold", shared="rows")
    _check(store, ids, rows)
    (small_disk / "ballast").unlink()
    store.put(more, some)
    _check(store, torch.cat([ids, more]), torch.cat([rows, some]))


def test_damaged_files_are_an_error(tmp_path: Path) -> None:
    store = _open(tmp_path, shared="rows")
    ids = torch.arange(20_000)
    store.put(ids, _rows(20_000))
    (file,) = tmp_path.rglob("rows/table%2F0/rows")
    with file.open("r+b") as opened:
        opened.seek(1_000_000)
        byte = opened.read(1)
        opened.seek(1_000_000)
        opened.write(bytes([byte[0] ^ 1]))
    for read in (lambda: store.get(ids), lambda: list(store.scan())):
        with pytest.raises(ColdStoreError, match=r"is damaged: the checksum of a row is wrong, at byte \d+"):
            read()
    store.close()
    with pytest.raises(ColdStoreError, match="is damaged"):
        _open(tmp_path, shared="rows")


def test_rows_that_are_kept_have_one_process_and_one_size(tmp_path: Path) -> None:
    store, again = _open(tmp_path, shared="rows"), _open(tmp_path, shared="rows")
    store.put(torch.arange(5), _rows(5))
    _check(again, torch.arange(5), _rows(5))  # tables of one process
    with pytest.raises(ColdStoreError, match="has rows of 512 bytes, and the table has rows of 8 bytes"):
        _open(tmp_path, shared="rows", row_bytes=8)
    code = f"""if True:
        from tests.store import test_ssd_store as tests
        try:
            tests._open(tests.Path({str(tmp_path)!r}), shared="rows")
        except tests.ColdStoreError as error:
            print(error)
    """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "is in use by another process" in told
    for each in (store, again):
        each.close()
    gc.collect()
    with pytest.raises(ColdStoreError, match="has rows of 512 bytes, and the table has rows of 8 bytes"):
        _open(tmp_path, shared="rows", row_bytes=8)
    _check(_open(tmp_path, shared="rows"), torch.arange(5), _rows(5))


def test_a_file_is_bounded_and_gives_its_space_back(tmp_path: Path) -> None:
    store = _open(tmp_path)
    ids = torch.arange(20_000)
    for seed in range(20):
        store.put(ids, _rows(20_000, seed))
    (file,) = tmp_path.rglob("run-*/rows")
    assert file.stat().st_blocks * 512 < 4.5 * 20_000 * (ROW_BYTES + 16)
    _check(store, ids, _rows(20_000, 19))
    store.delete(ids[1:])
    for _ in range(3):
        store.put(ids[:1], _rows(1))
    assert file.stat().st_blocks * 512 < 26e6  # the last batch of 20,000 rows is at the end, and all else is free
    store.close()


def test_a_table_goes_on_with_rows_that_are_kept(tmp_path: Path) -> None:
    """The rows of a table whose process was killed are those of its last flush, or later ones."""
    store = SSDStore(str(tmp_path), shared="ranking")
    options = TableOptions(max_rows=500, cold_store=store)
    ids, grads = torch.arange(3000), torch.ones(500, 4)
    code = f"""if True:
        import os, signal, torch
        from torchrec_recstore import RowWiseAdagrad, SSDStore, Table, TableOptions
        table = Table(4, optimizer=RowWiseAdagrad(), options=TableOptions(max_rows=500, cold_store={store!r}))
        for part in torch.arange(3000).split(500):
            table.lookup(part, train=True)
            table.update(part, torch.ones(500, 4))
        table.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with Table(4, optimizer=RowWiseAdagrad(), options=options) as table, Table(4, optimizer=RowWiseAdagrad()) as plain:
        for part in ids.split(500):
            plain.lookup(part, train=True)
            plain.update(part, grads)
        assert torch.equal(table.ids(), ids)
        assert torch.equal(table.lookup(ids), plain.lookup(ids))


def test_a_scan_that_nobody_reads_ends_with_its_iterator(tmp_path: Path) -> None:
    store = _open(tmp_path)
    ids = torch.arange(20_000)
    store.put(ids, _rows(20_000))
    scan = store.scan()
    del scan
    for seed in range(8):
        store.put(ids, _rows(20_000, seed))
    (file,) = tmp_path.rglob("run-*/rows")
    assert file.stat().st_blocks * 512 < 4.5 * 20_000 * (ROW_BYTES + 16)  # the scan would keep the rows from moving


def test_arguments_of_another_kind(tmp_path: Path) -> None:
    store = _open(tmp_path)
    for ids, rows, error in (
        (torch.arange(3).int(), _rows(3), TypeError),
        (torch.arange(3), _rows(2), ValueError),
        (torch.arange(3), _rows(3).float(), TypeError),
    ):
        with pytest.raises(error):
            store.put(ids, rows)
    with pytest.raises(ValueError, match=r"SSDStore\.path must not be empty"):
        SSDStore("")
    with pytest.raises(TypeError, match=r"SSDStore\.shared must be a str"):
        SSDStore("cold", shared=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_process_loses_no_row(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-m", "tests.store.killed_writer", str(kills), str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    print(told.stdout)
