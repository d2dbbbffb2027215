"""Several servers, among which the ids are shared out by hash."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.network import checked_addresses, host_of, is_loopback
from torchrec_recstore.rpc import recstore_pb2 as pb
from torchrec_recstore.rpc.connection import Access, Connection
from torchrec_recstore.rpc.protocol import (
    NO_INITIAL_ROW,
    ServiceError,
    put_rows,
    rows_at,
    to_bytes,
)

_CALLS = 256  # at once, more than wait for each other in practice: the deadline of a call begins when it has a thread
_Result = TypeVar("_Result")


class Servers:
    """Tables whose rows are shared out among servers: every call goes to all that have a part in it, at once.

    A call that fails at one server may have been carried out at others.

    Args:
        addresses: ``host:port`` each; their order decides which ids lie where.
        access: as for :class:`Connection`.

    Raises:
        TypeError, ValueError: an address is no ``host:port``, or is there twice; or a token would go to another machine
            without TLS.
        OSError: a file of certificates cannot be read.
    """

    def __init__(self, addresses: Sequence[str], access: Access) -> None:
        self.addresses = checked_addresses(addresses)
        open_to_others = [a for a in self.addresses if not is_loopback(host_of(a))]
        if access.token is not None and access.tls_ca is None and open_to_others:
            raise ValueError(f"token would go to {open_to_others[0]} in the clear: pass tls_ca as well")
        self._connections = [Connection(address, access) for address in self.addresses]
        self._threads = ThreadPoolExecutor(_CALLS * len(self.addresses), "recstore-client")
        self._close = weakref.finalize(self, _close, self._connections, self._threads, os.getpid())

    def specs(self, table: str) -> list[str | None]:
        """What each server says of a table; None where it has none."""
        return self._each(lambda connection: connection.describe(table).tables.get(table))

    def create(self, table: str, specs: Sequence[str]) -> None:
        """Makes a table: each server its part."""
        of = dict(zip(self._connections, specs, strict=True))
        self._each(lambda connection: connection.create(table, of[connection]))

    def pull(self, table: str, ids: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """(N, columns): the rows of ``ids``, (N,) int64; those of ids without one are initial rows."""
        rows = torch.empty(len(ids), columns, dtype=dtype)
        if len(self._connections) == 1:
            self._connections[0].pull(table, ids, rows)
        else:
            places = self._places(ids)
            self._each(lambda connection: connection.pull(table, ids[places[connection]], rows, places[connection]))
        return rows

    def found(self, table: str, ids: Tensor) -> Tensor:
        """(N,) bool: which of ``ids``, (N,) int64, have a row."""
        return self.found_rows(table, ids, 0)[0]

    def found_rows(self, table: str, ids: Tensor, row_bytes: int) -> tuple[Tensor, Tensor]:
        """Which of ``ids``, (N,) int64, have a row, (N,) bool, and the rows of these, (n, row bytes) uint8."""
        if len(self._connections) == 1:
            return self._connections[0].found(table, ids, row_bytes)
        places = self._places(ids)
        parts = self._each(lambda connection: connection.found(table, ids[places[connection]], row_bytes))
        found = torch.empty(len(ids), dtype=torch.bool)
        for place, (part, _) in zip(places.values(), parts, strict=True):
            found[place] = part
        if row_bytes == 0:
            return found, torch.empty(0, 1, dtype=torch.uint8)
        rank = found.cumsum(0) - 1
        rows = torch.empty(int(found.sum()), row_bytes, dtype=torch.uint8)
        for place, (part, some) in zip(places.values(), parts, strict=True):
            put_rows(rows, rank[place[part]], to_bytes(some))
        return found, rows

    def push(self, table: str, ids: Tensor, values: Tensor) -> None:
        """Writes the rows ``values``, (N, columns), of ``ids``, (N,) int64; of duplicates the last wins."""
        self._write(table, pb.WriteHeader.PUSH, ids, values)

    def update(self, table: str, ids: Tensor, grads: Tensor, initial: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Applies gradients, (N, columns); before, ``initial`` ids get the ``initial`` rows where they have none.

        Returns:
            (n,) int64: places of the ids whose server has refused its part, because an id of that has neither a row nor
            an initial one.
        """
        return self._write(table, pb.WriteHeader.UPDATE, ids, grads, initial)[1]

    def delete(self, table: str, ids: Tensor) -> int:
        """Forgets the rows of ``ids``, (N,) int64; returns how many there were."""
        return self._write(table, pb.WriteHeader.DELETE, ids)[0]

    def ids(self, table: str) -> Tensor:
        """(N,) int64: all ids that have a row, ascending."""
        ids: Tensor = torch.cat(self._each(lambda connection: connection.ids(table))).sort().values
        return ids

    def stats(self, table: str) -> list[dict[str, int]]:
        """Each server's counts."""
        return self._each(lambda connection: connection.stats(table))

    def save(self, name: str, overwrite: bool) -> None:
        """Each server saves all of its tables."""
        self._each(lambda connection: connection.save(name, overwrite))

    def load(self, name: str) -> None:
        """Each server replaces its tables by those that it has saved."""
        self._each(lambda connection: connection.load(name))

    def close(self) -> None:
        """Ends the connections."""
        self._close()

    def _write(
        self,
        table: str,
        kind: pb.WriteHeader.Kind,
        ids: Tensor,
        rows: Tensor | None = None,
        initial: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[int, Tensor]:
        """How many rows were deleted, and the places of the ids whose server wants initial rows."""
        if len(self._connections) == 1:
            deleted = _written(self._connections[0], table, kind, ids, rows, initial)
            return deleted or 0, torch.arange(len(ids) if deleted is None else 0)
        places = self._places(ids)
        firsts = {} if initial is None else self._places(initial[0])

        def write(connection: Connection) -> int | None:
            place = places[connection]
            first = None
            if initial is not None and len(firsts[connection]):
                first = initial[0][firsts[connection]], initial[1][firsts[connection]]
            return _written(connection, table, kind, ids[place], None if rows is None else rows_at(rows, place), first)

        counts = self._each(write)
        refused = [place for place, count in zip(places.values(), counts, strict=True) if count is None]
        return sum(count or 0 for count in counts), torch.cat([ids[:0], *refused])

    def _places(self, ids: Tensor) -> dict[Connection, Tensor]:
        """Where among ``ids`` those of each server are, ascending."""
        owners = ops.mix_ids(ids, True).remainder_(len(self._connections))
        return {connection: (owners == number).nonzero()[:, 0] for number, connection in enumerate(self._connections)}

    def _each(self, call: Callable[[Connection], _Result]) -> list[_Result]:
        """Calls all servers at once and waits for all, so that nothing is under way when an error is raised."""
        if len(self._connections) == 1:
            return [call(self._connections[0])]
        self._connections[0].check_process()  # the threads are not there either
        futures = [self._threads.submit(call, connection) for connection in self._connections]
        wait(futures)
        return [future.result() for future in futures]


def _written(
    connection: Connection,
    table: str,
    kind: pb.WriteHeader.Kind,
    ids: Tensor,
    rows: Tensor | None,
    initial: tuple[Tensor, Tensor] | None,
) -> int | None:
    """How many rows were deleted; None where the server has refused, because it wants an initial row."""
    try:
        return connection.write(table, kind, ids, rows, initial)
    except ServiceError as error:
        if error.kind == NO_INITIAL_ROW:
            return None
        raise


def _close(connections: Sequence[Connection], threads: ThreadPoolExecutor, process: int) -> None:
    if os.getpid() != process:  # forked: connections and threads are the parent's
        return
    for connection in connections:
        connection.close()
    threads.shutdown(wait=False)
