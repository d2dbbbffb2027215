"""The cold store on a local SSD: RocksDB through ``rocksdict``."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from rocksdict import (
    BlockBasedOptions,
    ChecksumType,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    Snapshot,
    WriteBatch,
    WriteBufferManager,
    WriteOptions,
)
from torch import Tensor

from torchrec_recstore.options import RocksDBStore
from torchrec_recstore.store.cold_store import (
    ID_BYTES,
    ColdStoreError,
    check_ids,
    check_rows,
    escaped_name,
    filled,
    id_bytes,
    ids_of,
    in_parts,
    join,
    new_run,
    split,
)
from torchrec_recstore.utils import leave_to_parent

_RUN = re.compile(r"run-[0-9a-f]{12}")
_LOCK = "lock"


class RunDirectory:
    """A directory of one open store, ``root/<escaped name>/run-<random>``, which nothing outlives.

    Its owner holds a lock on a file in it for as long as it lives. Making one removes all under ``root`` whose owner is
    dead, of any name: a run on fewer ranks would never come back for the others.
    """

    def __init__(self, root: str, name: str) -> None:
        """Raises OSError."""
        Path(root).mkdir(parents=True, exist_ok=True)
        # One at a time, or one process would take a directory that another has made and not locked yet for a dead one.
        with _locked(Path(root) / _LOCK):
            _remove_dead(Path(root))
            self.path = (Path(root) / escaped_name(name) / f"run-{new_run()}").absolute()
            self.path.mkdir(parents=True)
            self._root_lock = Path(root).absolute() / _LOCK
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Deletes it, and the directory of its name where that is empty. Raises OSError."""
        try:
            shutil.rmtree(self.path)
            # Not waiting: the garbage collector may come here out of the constructor above, which holds the lock.
            with suppress(BlockingIOError), _locked(self._root_lock, wait=False):
                _remove_if_empty(self.path.parent)
        finally:
            os.close(self._lock)


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def _remove_dead(root: Path) -> None:
    for lock in root.glob(f"*/run-*/{_LOCK}"):
        run = lock.parent
        if _RUN.fullmatch(run.name) and _is_free(lock):
            shutil.rmtree(run, ignore_errors=True)  # what stays is tried again by the next
    for directory in root.glob("*/"):
        _remove_if_empty(directory)


def _is_free(lock: Path) -> bool:
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError:  # gone with its owner, or another user's
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return


WRITE_BUFFER_BYTES = 2**24
WRITE_BUFFERS = 3
SHARED_WRITE_BYTES = 3 * 2**25
BLOOM_BITS = 10
_READ_BYTES = 2**25
_SCAN_BYTES = 2**22
# rocksdict 0.3.29 holds the interpreter's lock while a batch is written: short ones let other threads in between.
_WRITE_BYTES = 2**20
_STALL_PAUSE_S = 0.002


class RocksDBColdStore:
    """Rows in a RocksDB database of their own, by ids that sort as their keys do.

    Writes go through RocksDB's log, without an fsync: what has been put outlives errors and a full disk, not the
    process, nor is it meant to. A put or delete that fails leaves the rows readable; the next one opens the database
    anew, since RocksDB refuses all writes after a failed one. Scans that are open then end with an error.
    """

    ascending_snapshots = True

    def __init__(self, options: RocksDBStore, *, name: str, row_bytes: int) -> None:
        """Makes its directory and opens the database in it. Raises ColdStoreError."""
        self._row_bytes = row_bytes
        self._rows_a_read = max(1, _READ_BYTES // row_bytes)
        self._rows_a_write = max(1, _WRITE_BYTES // row_bytes)
        self._scans: weakref.WeakSet[_Scan] = weakref.WeakSet()
        self._write_failed = False
        self._write_options = WriteOptions()
        self._write_options.no_slowdown = True
        self._db: Rdict | None = None
        leave_to_parent(self)
        try:
            self._directory: RunDirectory | None = RunDirectory(options.path, name)
        except OSError as error:
            raise ColdStoreError(f"cold store RocksDBStore({options.path!r}): {error}") from error
        self._path = self._directory.path
        try:
            self._database()
        except ColdStoreError:
            self.close()
            raise

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`ColdStore.get`."""
        check_ids(ids)
        db = self._database()
        parts = [self._get_part(db, part) for part in in_parts(ids, self._rows_a_read)]
        if len(parts) == 1:
            return parts[0]
        found, rows = zip(*parts, strict=True)
        return torch.cat(found), torch.cat(rows)

    def _get_part(self, db: Rdict, ids: Tensor) -> tuple[Tensor, Tensor]:
        keys: list[Any] = split(id_bytes(ids))
        try:
            values: Any = db.get(keys, b"")
        except Exception as error:  # rocksdict raises no narrower class
            raise self._error("cannot be read", error) from error
        rows = join(values, self._row_bytes)
        return (torch.ones(len(ids), dtype=torch.bool) if len(rows) == len(ids) else filled(values)), rows

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """As :meth:`ColdStore.put`."""
        check_rows(ids, rows, self._row_bytes)
        self._prepare_write(len(ids) * (self._row_bytes + ID_BYTES))
        for some_ids, some_rows in zip(
            in_parts(ids, self._rows_a_write), in_parts(rows, self._rows_a_write), strict=True
        ):
            self._write(split(id_bytes(some_ids)), split(some_rows))

    def delete(self, ids: Tensor) -> None:
        """As :meth:`ColdStore.delete`."""
        check_ids(ids)
        self._prepare_write(len(ids) * ID_BYTES)
        for part in in_parts(ids, self._rows_a_write):
            self._write(split(id_bytes(part)), None)

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As :meth:`ColdStore.scan`: ids ascending, the rows of this moment."""
        db = self._database()
        try:
            scan = _Scan(db.snapshot(), self._row_bytes, str(self))
        except Exception as error:
            raise self._error("cannot be read", error) from error
        self._scans.add(scan)
        leave_to_parent(scan)
        return scan

    def close(self) -> None:
        """As :meth:`ColdStore.close`."""
        directory, self._directory = self._directory, None
        if directory is None:
            return
        self._shut()
        try:
            directory.remove()
        except OSError as error:
            raise self._error("cannot be removed", error) from error

    def __str__(self) -> str:
        return f"cold store RocksDBStore({str(self._path)!r})"

    def _error(self, what: str, reason: object) -> ColdStoreError:
        return ColdStoreError(f"{self} {what}: {reason}")

    def _database(self) -> Rdict:
        if self._directory is None:
            raise self._error("is closed", "no call but close is allowed")
        if self._db is None:
            global _threads
            if _threads == "lost":
                raise self._error(
                    "cannot be opened",
                    "this process was forked from one that uses RocksDB, whose threads it does not have: start it with "
                    "multiprocessing's start method 'spawn' or 'forkserver'",
                )
            _threads = "started"
            options = _options()
            try:
                # column_families too: else an existing database is opened with those that rocksdict reads from disk.
                self._db = Rdict(str(self._path / "db"), options, {"default": options})
            except Exception as error:
                raise self._error("cannot be opened", error) from error
            self._write_failed = False
        return self._db

    def _shut(self) -> None:
        for scan in list(self._scans):
            scan.end()
        db, self._db = self._db, None
        if db is not None:
            try:
                db.close()
            except Exception:  # it cannot flush; the database is closed all the same, its rows are in the log
                return

    def _prepare_write(self, n_bytes: int) -> None:
        db = self._database()
        if not self._write_failed:
            return
        # Opening writes the log's rows to a table. Where that fails nothing can be read: ask for the room first.
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
            batch = WriteBatch(raw_mode=True)
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
                # Compaction lags: wait here, since RocksDB would wait with the interpreter's lock held.
                if "Write stall" in str(error):
                    time.sleep(_STALL_PAUSE_S)
                    continue
                self._write_failed = True
                raise self._error("cannot be written", error) from error


def _lose_threads() -> None:
    """What a forked process begins with: RocksDB believes that it has the threads of the parent."""
    global _threads
    if _threads == "none":
        return
    _threads = "lost"
    # RocksDB joins its threads in a destructor that exit() calls. Handlers run in the reverse of their order, so the
    # process ends before that one, with the status that on_exit() passes on; the interpreter has ended by then.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


_threads: Literal["none", "started", "lost"] = "none"
os.register_at_fork(after_in_child=_lose_threads)


class _Scan(Iterator[tuple[Tensor, Tensor]]):
    def __init__(self, snapshot: Snapshot, row_bytes: int, store: str) -> None:
        options = ReadOptions()
        options.set_readahead_size(2**20)
        self._snapshot: Snapshot | None = snapshot
        self._items: Iterator[tuple[Any, Any]] | None = snapshot.items(read_opt=options)
        # Now, since rocksdict 0.3.29 opens an iterator of a snapshot on the rows of the moment of that.
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
            raise ColdStoreError(f"{self._store}: it was closed, or opened anew after an error, while it was scanned")
        batch = list(islice(self._items, self._batch_rows))
        if not batch:
            self._check_complete()
            self.end()
            self._exhausted = True
            raise StopIteration
        keys, values = zip(*batch, strict=True)
        self._last = keys[-1]
        return ids_of(join(keys, ID_BYTES)), join(values, self._row_bytes)

    def end(self) -> None:
        """Lets go of the database, which stays open for as long as an iterator does."""
        self._items = self._snapshot = None

    def _check_complete(self) -> None:
        # An iterator of rocksdict's ends at an error as it does at the last row.
        if self._end != self._last:
            raise ColdStoreError(f"{self._store} cannot be read: the scan ended before its last row")


def _check_room(path: Path, n_bytes: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.posix_fallocate(file, 0, n_bytes)
    finally:
        os.close(file)
        path.unlink()


@cache
def _write_buffers() -> WriteBufferManager:
    """A budget for all stores of the process."""
    return WriteBufferManager(SHARED_WRITE_BYTES, False)


def _options() -> Options:
    blocks = BlockBasedOptions()
    blocks.disable_cache()  # rows come at random: a cache of blocks cost a third of a read's time; the kernel has one
    blocks.set_checksum_type(ChecksumType.xxh3())
    blocks.set_bloom_filter(BLOOM_BITS, False)
    blocks.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_manager(_write_buffers())
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(WRITE_BUFFERS)
    options.set_compression_type(DBCompressionType.none())  # floats do not get smaller: lz4 left 299 MB as they were
    options.set_target_file_size_multiplier(2)  # all files stay open: fewer of them
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options
