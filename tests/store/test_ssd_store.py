from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.processes import run_forked_command
from tests.store.disk_rows import ROW_BYTES, assert_has, random_rows
from torchrec_recstore import RowWiseAdagrad, SSDStore, Table, TableOptions
from torchrec_recstore.store import ColdStore, ColdStoreError, open_cold_store


def _open(
    path: Path,
    name: str = "table/0",
    shared: str | None = None,
    row_bytes: int = ROW_BYTES,
) -> ColdStore:
    return open_cold_store(SSDStore(str(path), shared), name=name, row_bytes=row_bytes)


def _opened_elsewhere(path: Path) -> str:
    """Opens the kept rows in another process, and returns the error."""
    code = f"""if True:
        from tests.store import test_ssd_store as tests
        try:
            tests._open(tests.Path({str(path)!r}), shared="rows")
        except tests.ColdStoreError as error:
            print(error)
    """
    ended = run_forked_command(["-c", code])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _file_of(path: Path) -> int:
    """Returns the descriptor by which the store reads and writes.

    The next one holds the lock.
    """
    return min(
        int(each.name)
        for each in Path("/proc/self/fd").iterdir()
        if _target(each).startswith(str(path))
    )


def _target(link: Path) -> str:
    with suppress(FileNotFoundError):
        return (
            os.readlink(link)
            if link.name != "lock" and os.readlink(link).endswith("/rows")
            else ""
        )
    return ""


@contextmanager
def _replaced(path: Path, by: str) -> Iterator[None]:
    """Puts another file in the place of the store's: a disk that is full, or that
    cannot be read.
    """
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
    assert {run.parent.name for run in path.glob("*/run-*")} == {
        "table%2F0",
        "%2E%2E%2F%2E%2E",
    }
    one.put(torch.arange(3), random_rows(3))
    assert not two.get(torch.arange(3))[0].any()
    for store in (one, two, other):
        store.close()
    assert os.listdir(path) == ["lock"]
    with pytest.raises(
        ColdStoreError,
        match=(
            r"cold store SSDStore\('.*/rows'\) is closed: only close\(\) may be called"
        ),
    ):
        one.get(torch.arange(3))


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for shared in (None, "rows"):
        with pytest.raises(
            ColdStoreError,
            match=rf"cold store SSDStore\('{tmp_path}/file/cold'\): .*Not a directory",
        ):
            _open(tmp_path / "file" / "cold", shared=shared)


@pytest.mark.parametrize("shared", [None, "rows"])
def test_a_disk_that_fails_changes_no_row(tmp_path: Path, shared: str | None) -> None:
    store = _open(tmp_path, shared=shared)
    ids, rows = torch.arange(10_000), random_rows(10_000)
    store.put(ids, rows)
    for _ in range(3):
        with (
            _replaced(tmp_path, "/dev/full"),
            pytest.raises(ColdStoreError, match="cannot be written: No space left"),
        ):
            store.put(ids.flip(0), rows)
        with (
            _replaced(tmp_path, "/proc/self/mem"),
            pytest.raises(ColdStoreError, match="cannot be read: Input/output error"),
        ):
            store.get(ids)
        assert_has(store, ids, rows)
    store.put(ids.flip(0), rows)
    assert_has(store, ids.flip(0), rows)
    store.close()


def test_a_full_disk_loses_nothing_and_is_no_end(small_disk: Path) -> None:
    store = _open(small_disk / "cold", shared="rows")
    # 10 MB of the 40 MB that are left
    ids, some = torch.arange(20_000), random_rows(20_000)
    rows = some
    store.put(ids, some)
    with pytest.raises(  # noqa: PT012
        ColdStoreError, match="cannot be written: No space left on device"
    ):
        for begin in range(20_000, 200_000, 20_000):
            more = torch.arange(begin, begin + 20_000)
            store.put(more, some)
            ids, rows = torch.cat([ids, more]), torch.cat([rows, some])
    assert_has(store, ids, rows)
    store.close()
    store = _open(small_disk / "cold", shared="rows")
    assert_has(store, ids, rows)
    (small_disk / "ballast").unlink()
    store.put(more, some)
    assert_has(store, torch.cat([ids, more]), torch.cat([rows, some]))


def test_damaged_files_are_an_error(tmp_path: Path) -> None:
    store = _open(tmp_path, shared="rows")
    ids = torch.arange(20_000)
    store.put(ids, random_rows(20_000))
    (file,) = tmp_path.rglob("rows/table%2F0/rows")
    with file.open("r+b") as opened:
        opened.seek(1_000_000)
        byte = opened.read(1)
        opened.seek(1_000_000)
        opened.write(bytes([byte[0] ^ 1]))
    for read in (lambda: store.get(ids), lambda: list(store.scan())):
        with pytest.raises(
            ColdStoreError,
            match=r"is damaged: the checksum of a row is wrong, at byte \d+",
        ):
            read()
    store.close()
    with pytest.raises(ColdStoreError, match="is damaged"):
        _open(tmp_path, shared="rows")


def test_rows_that_are_kept_have_one_process_and_one_size(tmp_path: Path) -> None:
    store, again = _open(tmp_path, shared="rows"), _open(tmp_path, shared="rows")
    store.put(torch.arange(5), random_rows(5))
    assert_has(again, torch.arange(5), random_rows(5))  # tables of one process
    with pytest.raises(
        ColdStoreError, match="has rows of 512 bytes, and the table has rows of 8 bytes"
    ):
        _open(tmp_path, shared="rows", row_bytes=8)
    assert "is in use by another process" in _opened_elsewhere(tmp_path)
    for each in (store, again):
        each.close()
    gc.collect()
    with pytest.raises(
        ColdStoreError, match="has rows of 512 bytes, and the table has rows of 8 bytes"
    ):
        _open(tmp_path, shared="rows", row_bytes=8)
    assert_has(_open(tmp_path, shared="rows"), torch.arange(5), random_rows(5))


def test_a_scan_of_a_closed_store_does_not_end_the_lock_of_the_next_one(
    tmp_path: Path,
) -> None:
    store = _open(tmp_path, shared="rows")
    store.put(torch.arange(20_000), random_rows(20_000))
    scan = store.scan()
    next(scan)
    store.close()
    again = _open(tmp_path, shared="rows")
    with pytest.raises(ColdStoreError, match="is closed"):
        next(scan)
    del scan
    gc.collect()
    assert "is in use by another process" in _opened_elsewhere(tmp_path)
    assert_has(again, torch.arange(20_000), random_rows(20_000))


def test_a_file_is_bounded_and_gives_its_space_back(tmp_path: Path) -> None:
    store = _open(tmp_path)
    ids = torch.arange(20_000)
    for seed in range(10):
        store.put(ids, random_rows(20_000, seed))
    (file,) = tmp_path.rglob("run-*/rows")
    assert file.stat().st_blocks * 512 < 4.5 * 20_000 * (ROW_BYTES + 16)
    assert_has(store, ids, random_rows(20_000, 9))
    store.delete(ids[1:])
    for _ in range(3):
        store.put(ids[:1], random_rows(1))
    # the last batch of 20,000 rows is at the end, and all else is free
    assert file.stat().st_blocks * 512 < 26e6
    store.close()


def test_a_table_goes_on_with_rows_that_are_kept(tmp_path: Path) -> None:
    """The rows of a table whose process was killed are those of its last flush, or
    later ones.
    """
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
    assert run_forked_command(["-c", code]).returncode == -9
    with (
        Table(4, optimizer=RowWiseAdagrad(), options=options) as table,
        Table(4, optimizer=RowWiseAdagrad()) as plain,
    ):
        for part in ids.split(500):
            plain.lookup(part, train=True)
            plain.update(part, grads)
        assert torch.equal(table.ids(), ids)
        assert torch.equal(table.lookup(ids), plain.lookup(ids))


def test_a_scan_that_nobody_reads_ends_with_its_iterator(tmp_path: Path) -> None:
    store = _open(tmp_path)
    ids = torch.arange(20_000)
    store.put(ids, random_rows(20_000))
    scan = store.scan()
    del scan
    for seed in range(8):
        store.put(ids, random_rows(20_000, seed))
    (file,) = tmp_path.rglob("run-*/rows")
    # the scan would keep the rows from moving
    assert file.stat().st_blocks * 512 < 4.5 * 20_000 * (ROW_BYTES + 16)


def test_arguments_of_another_kind(tmp_path: Path) -> None:
    store = _open(tmp_path)
    for ids, rows, error in (
        (torch.arange(3).int(), random_rows(3), TypeError),
        (torch.arange(3), random_rows(2), ValueError),
        (torch.arange(3), random_rows(3).float(), TypeError),
    ):
        with pytest.raises(error):
            store.put(ids, rows)
    with pytest.raises(ValueError, match=r"SSDStore\.path must not be empty"):
        SSDStore("")
    with pytest.raises(TypeError, match=r"SSDStore\.shared must be a str"):
        SSDStore("cold", shared=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_process_loses_no_row(tmp_path: Path, kills: int) -> None:
    command = ["-m", "tests.store.killed_writer", str(kills), str(tmp_path)]
    told = run_forked_command(command)
    assert told.returncode == 0, told.stderr
    print(told.stdout)
