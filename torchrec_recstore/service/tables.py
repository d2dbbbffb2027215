"""The tables of a client: the protocol that the client is written against, and its implementation on servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from torchrec_recstore.rpc.connection import Access
from torchrec_recstore.rpc.protocol import NO_INITIAL_ROW, ServiceError
from torchrec_recstore.rpc.servers import Servers
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.stats import combined

InitialRows = tuple[Tensor, Tensor]
"""Ids (n,) int64, distinct, and the rows float32 (n, dim) that they begin with."""


class NoInitialRow(ValueError):
    """An id without a row is wanted, and only the client's ``init_func`` can tell how its row begins.

    Args:
        name: of the table.
        pending: (n,) int64: the positions, among the ids given, whose part of the call has not been carried out, so
            that these can be given again. None where that is not known.
    """

    def __init__(self, name: str, pending: Tensor | None = None) -> None:
        super().__init__(
            f"table {name!r} has rows that an init_func makes, and an id has none yet: "
            "call init_data with that init_func first"
        )
        self.pending = pending


class Tables(Protocol):
    """Named tables. The client is written against this; it checks what it passes on.

    Ids are (N,) int64, rows (N, dim) of the table's dtype or float32, all on
    the CPU; they are not changed, and not kept after the call. Any thread may call. A call either does all of its work
    or raises with everything as it was.

    Raises:
        ValueError: there is no such table; the message names it and those that there are. Or the tables are closed.
        MemoryError, ColdStoreError: as :class:`torchrec_recstore.store.Table`.
    """

    def create(self, name: str, spec: TableSpec) -> None:
        """Makes a table. One that is there with the same specification stays as it is.

        Raises:
            ValueError: there is one with another specification; the message names what differs.
        """

    def spec(self, name: str) -> TableSpec | None:
        """What the table was made with, with ``shard=(0, 1)``; None where there is no such table."""

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows: (N, dim) of the table's dtype. An id without a row reads as its initial row and gets none.

        Raises:
            NoInitialRow: an id has no row, and the table has ``initial_rows``.
        """

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids have a row, (N,) bool, and the rows of these, (found, dim) of the table's dtype, in their order."""

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes weights: new rows start with zero optimizer state, others keep theirs; of duplicates the last wins."""

    def update(self, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None) -> None:
        """Applies the optimizer once to each distinct id's row, on the sum of its gradients in the order given.

        One update is one step: of the clock by which rows are evicted and expire, and of what admission counts.

        Args:
            name: of the table.
            ids: (N,) int64.
            grads: (N, dim).
            initial: some of the ids with the rows they are to begin with; used for those that have no row when the
                update is carried out. Nobody sees the rows without the update. For a table with ``initial_rows``.

        Raises:
            NoInitialRow: an id has neither a row nor one in ``initial``, and the table has ``initial_rows``.
        """

    def delete(self, name: str, ids: Tensor) -> int:
        """Forgets rows; returns how many there were."""

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """Tells which ids have a row: (N,) bool."""

    def stats(self, name: str) -> TableStats:
        """What the table holds and has done."""

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Saves all tables but temporary ones, as they are at one moment on each server.

        Raises:
            FileExistsError: there is something at ``path``, and no ``overwrite``, or it is no checkpoint.
            OSError: a file cannot be written. Either way there is nothing new at ``path``.
        """

    def load(self, path: str | Path) -> None:
        """Replaces all tables by those saved; temporary ones stay.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: a file is missing or damaged.
            ValueError: a table of these is not in the checkpoint, or with another specification.
        """

    def close(self) -> None:
        """Frees what this holds: the tables, or the connections. Closing twice is fine."""


class RemoteTables:
    """As :class:`torchrec_recstore.service.tables.Tables`, each table shared out among servers by a hash of the id.

    Every call goes to all servers at once. One that fails at one server may have been carried out at the others.

    Args:
        servers: ``host:port`` each, in the same order for every client.
        access: token, certificates, deadline.

    Raises:
        TypeError, ValueError: an address is no ``host:port``.
        OSError: a file of certificates cannot be read.
    """

    def __init__(self, servers: Sequence[str], access: Access) -> None:
        self._servers = Servers(servers, access)
        self._specs: dict[str, TableSpec] = {}

    def create(self, name: str, spec: TableSpec) -> None:
        """As :meth:`Tables.create`."""
        n = len(self._servers.addresses)
        self._servers.create(name, [replace(spec, shard=(number, n)).to_json() for number in range(n)])
        self._specs[name] = spec

    def spec(self, name: str) -> TableSpec | None:
        """As :meth:`Tables.spec`.

        Raises:
            ValueError: the servers do not hold the parts of one table, in this order.
        """
        parts = self._servers.specs(name)
        if all(part is None for part in parts):
            return None
        n = len(parts)
        for number, (address, part) in enumerate(zip(self._servers.addresses, parts, strict=True)):
            if part is None:
                raise ValueError(f"table {name!r} is on other servers, but not on {address}")
            shard, shards = TableSpec.from_json(part).shard
            if (shard, shards) != (number, n):
                raise ValueError(
                    f"table {name!r}: server {address} holds part {shard + 1} of {shards}, and is server {number + 1} "
                    f"of {n} here: name all servers, in the order in which the table was made"
                )
        assert parts[0] is not None
        spec = self._specs[name] = replace(TableSpec.from_json(parts[0]), shard=(0, 1))
        return spec

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """As :meth:`Tables.pull`."""
        spec = self._spec(name)
        try:
            return self._servers.pull(name, ids, spec.dim, spec.dtype)
        except ServiceError as error:
            if error.kind == NO_INITIAL_ROW:
                raise NoInitialRow(name) from None
            raise

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`Tables.found_rows`."""
        spec = self._spec(name)
        found, rows = self._servers.found_rows(name, ids, spec.dim * spec.dtype.itemsize)
        return found, rows.view(spec.dtype).view(-1, spec.dim)

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """As :meth:`Tables.push`."""
        self._servers.push(name, ids, values)

    def update(self, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None) -> None:
        """As :meth:`Tables.update`."""
        refused = self._servers.update(name, ids, grads, initial)
        if len(refused):
            raise NoInitialRow(name, refused)

    def delete(self, name: str, ids: Tensor) -> int:
        """As :meth:`Tables.delete`."""
        return self._servers.delete(name, ids)

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """As :meth:`Tables.exists`."""
        return self._servers.found(name, ids)

    def stats(self, name: str) -> TableStats:
        """As :meth:`Tables.stats`, over all servers."""
        known = [field.name for field in fields(TableStats)]
        return combined(TableStats(**{key: counts[key] for key in known}) for counts in self._servers.stats(name))

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """As :meth:`Tables.save`; ``path`` is a name below each server's data directory."""
        self._servers.save(str(path), overwrite)

    def load(self, path: str | Path) -> None:
        """As :meth:`Tables.load`; ``path`` is a name below each server's data directory."""
        self._servers.load(str(path))
        self._specs.clear()

    def close(self) -> None:
        """Ends the connections."""
        self._servers.close()

    def _spec(self, name: str) -> TableSpec:
        spec = self._specs.get(name) or self.spec(name)
        if spec is None:
            raise ValueError(f"there is no table {name!r} on the servers {', '.join(self._servers.addresses)}")
        return spec
