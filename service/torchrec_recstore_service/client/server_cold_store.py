from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from torchrec_recstore.optim import SGD
from torchrec_recstore.options import ConstantInit, ServerStore, TableOptions
from torchrec_recstore.store.arguments import check_ids, check_rows
from torchrec_recstore.store.cold_store import (
    ColdStoreError,
    escaped_name,
    in_parts,
    new_run,
)
from torchrec_recstore_service.client.connection import Connection
from torchrec_recstore_service.client.server_set import ServerSet
from torchrec_recstore_service.wire.access import Access
from torchrec_recstore_service.wire.agreement import label_of, run_label, run_of
from torchrec_recstore_service.wire.protocol import ServiceError
from torchrec_recstore_service.wire.table_spec import TableSpec

# the largest size of the rows in one call: each call has its own deadline
_CALL_BYTES = 2**24
_CLOSE_S = 1.0  # the longest time of a call in close()
_COLUMN_BYTES = 4
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class ServerColdStore:
    """A cold store on RecStore's parameter servers.

    The rows are the weights of a table ``cold/<run or shared name>/<name>``. The bytes
    of a row are stored in float32 columns unchanged. The servers never update these
    rows, so that the bytes are never used as numbers.

    A server loses rows if it restarts from its last save or loads another checkpoint.
    The connections therefore remember the state of the servers from when the store was
    opened, and every later call raises an error if a server has lost writes since then.
    """

    ascending_snapshots = False

    def __init__(
        self,
        options: ServerStore,
        *,
        name: str,
        row_bytes: int,
    ) -> None:
        """Creates the table on the servers if it does not exist.

        Args:
            options: The addresses of the servers, and how to connect to them.
            name: The name of the shard. See
                :func:`torchrec_recstore.store.open_cold_store`.
            row_bytes: The size of a row in bytes.

        Raises:
            ColdStoreError: A server cannot be reached, or refuses the table.
        """
        self._options = options
        self._row_bytes = row_bytes
        self._columns = -(-row_bytes // _COLUMN_BYTES)
        self._rows_a_call = max(1, _CALL_BYTES // (self._columns * _COLUMN_BYTES))
        folder = escaped_name(options.shared or new_run())
        self._table = f"cold/{folder}/{escaped_name(name)}"
        self._open = True
        try:
            self._access = Access(
                token=options.token,
                tls_ca=options.tls_ca,
                timeout_s=options.timeout_s,
            )
            self._servers = ServerSet(options.addresses, self._access)
        except OSError as error:
            raise self._error("cannot be used", error) from error
        try:
            self._call(lambda: self._servers.create(self._table, self._spec()))
            # A connection remembers the state of its server from the first write on, so
            # this is an empty write.
            self._delete_part(torch.empty(0, dtype=torch.int64))
        except ColdStoreError:
            self._servers.close()
            raise

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`ColdStore.get`."""
        check_ids(ids)
        self._check_open()
        has_row_parts = []
        row_parts = []
        for part in in_parts(ids, self._rows_a_call):
            has_row, rows = self._get_part(part)
            has_row_parts.append(has_row)
            row_parts.append(rows)
        return torch.cat(has_row_parts), torch.cat(row_parts)

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """See :meth:`ColdStore.put`."""
        check_ids(ids)
        check_rows(
            rows,
            "rows",
            (len(ids), self._row_bytes),
            [torch.uint8],
        )
        self._check_open()
        parts_of_ids = in_parts(ids, self._rows_a_call)
        parts_of_rows = in_parts(rows, self._rows_a_call)
        for part_ids, part_rows in zip(parts_of_ids, parts_of_rows, strict=True):
            self._put_part(part_ids, part_rows)

    def delete(self, ids: Tensor) -> None:
        """See :meth:`ColdStore.delete`."""
        check_ids(ids)
        self._check_open()
        for part in in_parts(ids, _CALL_BYTES // ids.element_size()):
            self._delete_part(part)

    def ids(self) -> Tensor:
        """See :meth:`SharedColdStore.ids`."""
        self._check_open()
        return self._call(lambda: self._servers.ids(self._table))

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        """See :meth:`ColdStore.scan`.

        The call first reads all ids, which take 8 bytes each.
        """
        return self._rows_of(self.ids())

    def close(self) -> None:
        """See :meth:`ColdStore.close`.

        A server that cannot be reached keeps the rows, and a warning is logged.
        """
        if not self._open:
            return
        self._open = False
        epoch = self._servers.epoch()
        self._servers.close()
        if self._options.shared is not None:
            return
        # The connections are used one after the other, because a process that is ending
        # cannot start threads. The timeout is short, so that the process ends soon.
        access = replace(self._access, timeout_s=min(self._options.timeout_s, _CLOSE_S))
        for address in self._options.addresses:
            connection = Connection(address, access)
            try:
                state = connection.describe()
                # another epoch does not have the table
                if state.live and label_of(state) == epoch:
                    connection.drop(self._table, run_label(epoch, run_of(state)))
            except (ServiceError, ValueError, OSError) as error:
                _log.warning("%s: table %r may be left: %s", self, self._table, error)
            finally:
                connection.close()

    def __str__(self) -> str:
        return f"cold store {self._options!r}"

    def _error(self, fault: str, reason: object) -> ColdStoreError:
        return ColdStoreError(f"{self} {fault}: {reason}")

    def _check_open(self) -> None:
        if not self._open:
            raise self._error("is closed", "only close() may be called")

    def _call(self, action: Callable[[], _Result]) -> _Result:
        try:
            return action()
        except (ServiceError, ValueError, MemoryError, OSError) as error:
            # The message names server and table.
            raise self._error("has failed", error) from error

    def _spec(self) -> TableSpec:
        return TableSpec(
            dim=self._columns,
            dtype=torch.float32,
            optimizer=SGD(lr=0.0),
            options=TableOptions(initializer=ConstantInit(0.0)),
            temporary=self._options.shared is None,
            lossless=True,
        )

    def _get_part(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        has_row, rows = self._call(lambda: self._servers.found_rows(self._table, ids))
        return has_row, rows.view(torch.uint8)[:, : self._row_bytes]

    def _put_part(self, ids: Tensor, rows: Tensor) -> None:
        padded_bytes = self._columns * _COLUMN_BYTES
        padded = torch.zeros(len(ids), padded_bytes, dtype=torch.uint8)
        padded[:, : self._row_bytes] = rows
        columns = padded.view(torch.float32)
        self._call(lambda: self._servers.push(self._table, ids, columns))

    def _delete_part(self, ids: Tensor) -> None:
        self._call(lambda: self._servers.delete(self._table, ids))

    def _rows_of(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part in in_parts(ids, self._rows_a_call):
            self._check_open()
            has_row, rows = self._get_part(part)
            if self._options.shared is None and not has_row.all():
                missing = int((~has_row).sum())
                raise self._error(
                    "has changed while it was scanned",
                    f"{missing} rows are gone",
                )
            if len(rows):
                yield part[has_row], rows
