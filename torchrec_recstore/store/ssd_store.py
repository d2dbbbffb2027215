"""The cold store on a local SSD, which is native code: csrc/cold/ssd_store.h."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.options import SSDStore
from torchrec_recstore.ownership import refuse_foreign, refuse_link
from torchrec_recstore.run_directories import RunDirectory
from torchrec_recstore.store.arguments import check_ids, check_rows
from torchrec_recstore.store.cold_store import ColdStoreError, escaped_name, new_run
from torchrec_recstore.utils import warn_user

_SCAN_BYTES = 2**22
_STORAGE = "recstore storage: "  # the prefix of csrc/base/error.h
_ops = torch.ops.recstore_ops


class SSDColdStore:
    """A cold store in one file.

    Rows go to the page cache of the kernel, so they survive the process at any moment.

    If a put or delete fails, the rows are those of before, and the call can be
    repeated.
    """

    ascending_snapshots = True

    def __init__(
        self,
        options: SSDStore,
        *,
        name: str,
        row_bytes: int,
    ) -> None:
        """Creates the file of the store, or opens that of shared rows, or raises
        ColdStoreError.
        """
        self._row_bytes = row_bytes
        self._name = f"cold store SSDStore({options.path!r})"
        self._directory: RunDirectory | None = None
        self._file: _Native | None = None
        self._scans: WeakSet[_Native] = WeakSet()
        try:
            if options.shared is None:
                self._directory = RunDirectory(
                    options.path,
                    escaped_name(name),
                    new_run(),
                )
                path = self._directory.path / "rows"
            else:
                folder = _shared_folder(options.path, options.shared, name)
                path = folder.resolve() / "rows"
        except OSError as error:
            raise ColdStoreError(f"{self._name}: {error}") from error
        self._name = f"cold store SSDStore({str(path)!r})"
        try:
            with self._errors():
                self._file = _opened(path, row_bytes, keep=options.shared is not None)
                self._warn_of_dropped_rows()
        except ColdStoreError:
            self.close()
            raise

    def _warn_of_dropped_rows(self) -> None:
        dropped = _ops.ssd_dropped(self._handle)
        if dropped:
            warn_user(
                f"{self}: {dropped} rows at its end were dropped"
                f" ({dropped * self._row_bytes} bytes): the call that wrote them"
                " failed, or was not acknowledged before its process was killed. All"
                " acknowledged rows are there"
            )

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`ColdStore.get`."""
        check_ids(ids)
        with self._errors():
            is_found, rows = _ops.ssd_get(self._handle, ids)
        return is_found, rows

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """See :meth:`ColdStore.put`."""
        check_ids(ids)
        check_rows(
            rows,
            "rows",
            (len(ids), self._row_bytes),
            [torch.uint8],
        )
        with self._errors():
            _ops.ssd_put(self._handle, ids, rows)

    def delete(self, ids: Tensor) -> None:
        """See :meth:`ColdStore.delete`."""
        check_ids(ids)
        with self._errors():
            _ops.ssd_delete(self._handle, ids)

    def ids(self) -> Tensor:
        """See :meth:`SharedColdStore.ids`."""
        with self._errors():
            ids: Tensor = _ops.ssd_ids(self._handle)
        return ids

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See :meth:`ColdStore.scan`.

        Ids are in ascending order, and the rows are those of the time of the call.

        The iterator takes 16 bytes for each row.
        """
        with self._errors():
            scan = _Native(
                _ops.ssd_scan(self._handle),
                _scan_close,
                self._row_bytes,
            )
        self._scans.add(scan)
        return self._rows_of(scan)

    def close(self) -> None:
        """See :meth:`ColdStore.close`. Shared rows stay in their file."""
        for scan in list(self._scans):
            # a scan has the file open, and the end of a former use would end the lock
            # of the next one
            scan.close()
        self._file = None
        directory = self._directory
        self._directory = None
        try:
            if directory is not None:
                directory.remove()
        except OSError as error:
            raise ColdStoreError(f"{self} cannot be removed: {error}") from error

    def __str__(self) -> str:
        return self._name

    @property
    def _handle(self) -> int:
        if self._file is None:
            raise ColdStoreError(f"{self} is closed: only close() may be called")
        return self._file.handle

    def _rows_of(self, scan: _Native) -> Iterator[tuple[Tensor, Tensor]]:
        batch_rows = max(1, _SCAN_BYTES // self._row_bytes)
        while self._handle:
            with self._errors():
                ids, rows = _ops.ssd_scan_read(scan.handle, batch_rows)
            if not len(ids):
                return
            yield ids, rows

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            if not text.startswith(_STORAGE):
                raise
            raise ColdStoreError(f"{self}: {text.removeprefix(_STORAGE)}") from error


def _shared_folder(root: str, shared: str, name: str) -> Path:
    """Returns the folder of shared rows, which is made if it does not exist."""
    folder = Path(
        root,
        "shared",
        escaped_name(shared),
        escaped_name(name),
    )
    refuse_foreign(folder)
    for part in (folder.parent.parent, folder.parent, folder):
        refuse_link(part)
    folder.mkdir(parents=True, exist_ok=True)
    refuse_foreign(folder)
    return folder


class _Native:
    """A handle of the native code, which is closed with its last user."""

    def __init__(
        self,
        handle: int,
        close: Callable[[int], None],
        row_bytes: int,
    ) -> None:
        self.handle = handle
        self.row_bytes = row_bytes
        self._free = weakref.finalize(self, close, handle)
        # While the interpreter ends, ops cannot be called. The kernel closes the file,
        # which has all rows.
        self._free.atexit = False

    def close(self) -> None:
        """Closes the handle, also a second time."""
        self._free()


_close = ops.untraced(_ops.ssd_close.default)
_scan_close = ops.untraced(_ops.ssd_scan_close.default)
# tables of this process share the files of shared rows
_files: WeakValueDictionary[Path, _Native] = WeakValueDictionary()
_opening = threading.Lock()


def _opened(path: Path, row_bytes: int, *, keep: bool) -> _Native:
    with _opening:
        file = _files.get(path)
        if file is None:
            handle = _ops.ssd_open(str(path), row_bytes, keep)
            file = _Native(handle, _close, row_bytes)
            _files[path] = file
    if file.row_bytes != row_bytes:
        raise ColdStoreError(
            f"{path} has rows of {file.row_bytes} bytes, and the table has rows of"
            f" {row_bytes} bytes"
        )
    return file
