"""The cold store on a local SSD: RocksDB through ``rocksdict``."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import rocksdict
import torch
from torch import Tensor

from torchrec_recstore.options import RocksDBStore
from torchrec_recstore.run_directories import RunDirectory
from torchrec_recstore.store.arguments import check_ids, check_rows
from torchrec_recstore.store.cold_store import (
    ID_BYTES,
    ColdStoreError,
    escaped_name,
    found_rows,
    id_bytes,
    ids_of,
    in_parts,
    join,
    new_run,
    split,
)
from torchrec_recstore.utils import leave_to_parent

WRITE_BUFFER_BYTES = 2**24
WRITE_BUFFERS = 3
SHARED_WRITE_BYTES = 3 * 2**25
BLOOM_BITS = 10
# of the write buffer: 11 bits per row for rows of 140 bytes
WRITE_BUFFER_BLOOM = 1 / 128
MERGED_FILES = 8
_READ_BYTES = 2**25
_SCAN_BYTES = 2**22
# a read of this number of rows, or more, is divided between two threads
_HALVED_READ = 128
# rocksdict 0.3.29 holds the GIL while it writes a batch. Small batches let other
# threads run in between.
_WRITE_BYTES = 2**20
_STALL_PAUSE_S = 0.002
# RocksDB's background threads in this process
_threads: Literal["none", "started", "lost"] = "none"


class RocksDBColdStore:
    """A cold store in a RocksDB database, which has the rows of one shard.

    Keys sort as ids do.

    Writes go to RocksDB's log without an fsync: rows survive errors and a full disk,
    and need not survive the process. If a put or delete fails, the rows stay readable.
    The next put or delete reopens the database, because RocksDB refuses all writes
    after a failed write. Open scans then end with an error.
    """

    ascending_snapshots = True

    def __init__(
        self,
        options: RocksDBStore,
        *,
        name: str,
        row_bytes: int,
    ) -> None:
        """Creates the directory of the store and opens the database, or raises
        ColdStoreError.
        """
        self._row_bytes = row_bytes
        self._rows_a_read = max(1, _READ_BYTES // row_bytes)
        self._rows_a_write = max(1, _WRITE_BYTES // row_bytes)
        self._scans: weakref.WeakSet[_Scan] = weakref.WeakSet()
        self._write_failed = False
        self._write_options = rocksdict.WriteOptions()
        self._write_options.no_slowdown = True
        self._db: rocksdict.Rdict | None = None
        leave_to_parent(self)

        try:
            self._directory: RunDirectory | None = RunDirectory(
                options.path,
                escaped_name(name),
                new_run(),
            )
        except OSError as error:
            store = f"cold store RocksDBStore({options.path!r})"
            raise ColdStoreError(f"{store}: {error}") from error
        self._path = self._directory.path
        try:
            self._database()
        except ColdStoreError:
            self.close()
            raise

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`ColdStore.get`."""
        check_ids(ids)
        db = self._database()
        parts_of_ids = in_parts(ids, self._rows_a_read)
        parts = [self._get_part(db, part) for part in parts_of_ids]
        if len(parts) == 1:
            return parts[0]
        has_row = torch.cat([part_has_row for part_has_row, _ in parts])
        rows = torch.cat([part_rows for _, part_rows in parts])
        return has_row, rows

    def _get_part(self, db: rocksdict.Rdict, ids: Tensor) -> tuple[Tensor, Tensor]:
        keys: list[Any] = split(id_bytes(ids))
        try:
            values: Any = _halved(lambda half: db.get(half, b""), keys)
        except Exception as error:  # rocksdict raises Exception itself
            raise self._error("cannot be read", error) from error
        return found_rows(values, self._row_bytes)

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """See :meth:`ColdStore.put`."""
        check_ids(ids)
        check_rows(
            rows,
            "rows",
            (len(ids), self._row_bytes),
            [torch.uint8],
        )
        self._prepare_write(len(ids) * (self._row_bytes + ID_BYTES))
        # Ascending keys take less processor time than random ones: 2.2 instead of 3.5
        # to 4.1 us per row of 140 bytes.
        for part in in_parts(ids.argsort(), self._rows_a_write):
            # index_select copies whole rows, and an index in brackets single bytes.
            part_rows = rows.index_select(0, part)
            keys = split(id_bytes(ids[part]))
            self._write(keys, split(part_rows))

    def delete(self, ids: Tensor) -> None:
        """See :meth:`ColdStore.delete`."""
        check_ids(ids)
        self._prepare_write(len(ids) * ID_BYTES)
        for part in in_parts(ids, self._rows_a_write):
            keys = split(id_bytes(part))
            self._write(keys, None)

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See :meth:`ColdStore.scan`.

        Ids are in ascending order, and the rows are those of the time of the call.
        """
        db = self._database()
        try:
            scan = _Scan(db.snapshot(), self._row_bytes, str(self))
        except Exception as error:
            raise self._error("cannot be read", error) from error
        self._scans.add(scan)
        leave_to_parent(scan)
        return scan

    def close(self) -> None:
        """See :meth:`ColdStore.close`."""
        directory = self._directory
        self._directory = None
        if directory is None:
            return
        self._shut()
        try:
            directory.remove()
        except OSError as error:
            raise self._error("cannot be removed", error) from error

    def __str__(self) -> str:
        return f"cold store RocksDBStore({str(self._path)!r})"

    def _error(self, fault: str, reason: object) -> ColdStoreError:
        return ColdStoreError(f"{self} {fault}: {reason}")

    def _database(self) -> rocksdict.Rdict:
        if self._directory is None:
            raise self._error("is closed", "only close() may be called")
        if self._db is None:
            self._db = self._opened()
            self._write_failed = False
        return self._db

    def _opened(self) -> rocksdict.Rdict:
        global _threads
        if _threads == "lost":
            raise self._error(
                "cannot be opened",
                "this process was forked from a process that uses RocksDB, and does"
                " not have its threads: start it with multiprocessing's start method"
                " 'spawn' or 'forkserver'",
            )
        _threads = "started"
        path = str(self._path / "db")
        options = _options()
        try:
            # Without column_families, rocksdict opens an existing database with the
            # options that are on disk.
            return rocksdict.Rdict(path, options, {"default": options})
        except Exception as error:
            raise self._error("cannot be opened", error) from error

    def _shut(self) -> None:
        for scan in list(self._scans):
            scan.end()
        db = self._db
        self._db = None
        if db is not None:
            # the flush may fail, but the database is closed, and its rows are in the
            # log
            with suppress(Exception):
                db.close()

    def _prepare_write(self, n_bytes: int) -> None:
        db = self._database()
        if not self._write_failed:
            return
        # Opening the database writes the rows of the log to a file. If that failed, no
        # row could be read any more.
        in_memory = db.property_int_value("rocksdb.size-all-mem-tables") or 0
        try:
            _check_room(self._path / "room", in_memory + n_bytes + 2**20)
        except OSError as error:
            raise self._error("cannot be written", error) from error
        self._shut()
        self._database()

    def _write(self, keys: list[bytes], values: list[bytes] | None) -> None:
        db = self._database()
        while True:
            batch = rocksdict.WriteBatch(raw_mode=True)
            if values is None:
                for key in keys:
                    batch.delete(key)
            else:
                for key, value in zip(keys, values, strict=True):
                    batch[key] = value
            try:
                db.write(batch, self._write_options)
                return
            except Exception as error:
                # If compaction lags, the loop waits here, because RocksDB itself would
                # wait while it holds the GIL.
                if "Write stall" in str(error):
                    time.sleep(_STALL_PAUSE_S)
                    continue
                self._write_failed = True
                raise self._error("cannot be written", error) from error


@cache
def _reader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "recstore-cold-reads")


def _halved(read: Callable[[list[Any]], Any], keys: list[Any]) -> Any:
    """Returns ``read(keys)``.

    A second thread reads half of them if they are many and torch may use two threads.
    """
    if len(keys) < _HALVED_READ or torch.get_num_threads() == 1:
        return read(keys)
    half = len(keys) // 2
    try:
        second = _reader().submit(read, keys[half:])
    except RuntimeError:  # the interpreter exits, and starts no thread any more
        return read(keys)
    try:
        values = read(keys[:half])
    finally:
        # the database may not be closed before both reads have ended
        second.exception()
    return values + second.result()


def _lose_threads() -> None:
    """Prepares a forked process, in which RocksDB's threads do not exist although
    RocksDB's state says that they do.
    """
    global _threads
    _reader.cache_clear()
    if _threads == "none":
        return
    _threads = "lost"
    # RocksDB joins its threads in a destructor that exit() calls, which would wait
    # forever. Exit handlers run in the reverse order of their registration, so _exit
    # ends the process before that destructor, with the same status. The interpreter has
    # been finalized by then.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


os.register_at_fork(after_in_child=_lose_threads)


class _Scan(Iterator[tuple[Tensor, Tensor]]):
    """An iterator over the rows of a snapshot of a RocksDB database."""

    def __init__(
        self,
        snapshot: rocksdict.Snapshot,
        row_bytes: int,
        store: str,
    ) -> None:
        options = rocksdict.ReadOptions()
        options.set_readahead_size(2**20)
        self._snapshot: rocksdict.Snapshot | None = snapshot
        self._items: Iterator[tuple[Any, Any]] | None = snapshot.items(read_opt=options)
        # The iterators are opened here, because rocksdict 0.3.29 opens an iterator of a
        # snapshot on the current rows.
        end = snapshot.iter()
        end.seek_to_last()
        end.status()
        self._end = end.key() if end.valid() else b""
        self._row_bytes = row_bytes
        self._batch_rows = max(1, _SCAN_BYTES // row_bytes)
        self._store = store
        self._last = b""
        self._exhausted = False

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._exhausted:
            raise StopIteration
        if self._items is None:
            raise ColdStoreError(
                f"{self._store} was closed, or reopened after an error, while it was"
                " scanned"
            )
        keys = []
        values = []
        # A list of the pairs would start the garbage collector again and again: half of
        # the processor time of a scan.
        for key, value in islice(self._items, self._batch_rows):
            keys.append(key)
            values.append(value)
        if not keys:
            # At an error, an iterator of rocksdict ends without raising, as it does at
            # the last row.
            if self._end != self._last:
                raise ColdStoreError(
                    f"{self._store} cannot be read: the scan ended before its last row"
                )
            self.end()
            self._exhausted = True
            raise StopIteration
        self._last = keys[-1]
        ids = ids_of(join(keys, ID_BYTES))
        rows = join(values, self._row_bytes)
        return ids, rows

    def end(self) -> None:
        """Releases the database, which cannot close before its iterators are freed."""
        self._items = None
        self._snapshot = None


def _check_room(path: Path, n_bytes: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.posix_fallocate(file, 0, n_bytes)
    finally:
        os.close(file)
        path.unlink()


@cache
def _write_buffers() -> rocksdict.WriteBufferManager:
    """Returns the memory budget for the write buffers of all stores in this process."""
    return rocksdict.WriteBufferManager(SHARED_WRITE_BYTES, False)


def _options() -> rocksdict.Options:
    blocks = rocksdict.BlockBasedOptions()
    # Reads are random, so a cache of blocks has few hits. It took a third of a read's
    # time. The kernel caches files.
    blocks.disable_cache()
    blocks.set_checksum_type(rocksdict.ChecksumType.xxh3())
    blocks.set_bloom_filter(BLOOM_BITS, False)
    blocks.set_format_version(5)
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_manager(_write_buffers())
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(WRITE_BUFFERS)
    # Most ids of a read are not in the write buffers. Without a filter, their search
    # took a third of the read's time.
    options.set_memtable_prefix_bloom_ratio(WRITE_BUFFER_BLOOM)
    options.set_memtable_whole_key_filtering(True)
    # With the default, 4 files, merges took 1.4 times the processor time. The filters
    # keep reads of more files fast.
    options.set_level_zero_file_num_compaction_trigger(MERGED_FILES)
    # lz4 did not make 299 MB of floats smaller
    options.set_compression_type(rocksdict.DBCompressionType.none())
    # larger files, because all files stay open
    options.set_target_file_size_multiplier(2)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options
