"""The backend of a client that keeps its tables on parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from torch import Tensor

from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.stats import combined
from torchrec_recstore_service.client.backend import InitialRows, NoInitialRow
from torchrec_recstore_service.client.connection import Access
from torchrec_recstore_service.client.server_set import ServerSet
from torchrec_recstore_service.wire.protocol import NO_INITIAL_ROW, ServiceError
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate
from torchrec_recstore_service.wire.table_spec import TableSpec


class RemoteBackend:
    """A backend on parameter servers. The ids of each table are distributed over the servers by a hash of the id.

    See :class:`Backend` for the methods. Each call is sent to all servers at the same time. A call that fails at one
    server may have been carried out at other servers.

    Args:
        servers: The address of each server, as ``host:port``. All clients name all servers of a set, in any order.
        access: The token, certificates and timeout of the connections.

    Raises:
        TypeError, ValueError: An address is not ``host:port``.
        OSError: A certificate file cannot be read.
    """

    def __init__(self, servers: Sequence[str], access: Access) -> None:
        self._servers = ServerSet(servers, access)
        self._specs: dict[str, TableSpec] = {}

    def create(self, name: str, spec: TableSpec) -> None:
        """See :meth:`Backend.create`."""
        n = len(self._servers.addresses)
        self._servers.create(name, [replace(spec, shard=(number, n)).to_json() for number in range(n)])
        self._specs[name] = spec

    def spec(self, name: str) -> TableSpec | None:
        """See :meth:`Backend.spec`.

        Raises:
            ValueError: Only some of the servers have the table, because :meth:`create` has failed in the middle; or the
                parts are those of another number of servers.
        """
        parts = self._servers.specs(name)
        there = [part for part in parts if part is not None]
        if not there:
            return None
        if len(there) < len(parts):
            lacking = self._servers.addresses[parts.index(None)]
            raise ValueError(f"table {name!r} is on other servers, but not on {lacking}: call init_data again")
        for address, member, part in zip(self._servers.addresses, self._servers.members(name), there, strict=True):
            shard, shards = TableSpec.from_json(part).shard
            if (shard, shards) != (member, len(there)):
                raise ValueError(
                    f"table {name!r}: server {address} holds part {shard + 1} of {shards}, and is server {member + 1} "
                    f"of {len(there)} in its set"
                )
        spec = self._specs[name] = replace(TableSpec.from_json(there[0]), shard=(0, 1))
        return spec

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """See :meth:`Backend.pull`."""
        spec = self._spec(name)
        try:
            return self._servers.pull(name, ids, spec.dim, value_dtype(spec.dtype))
        except ServiceError as error:
            if error.kind == NO_INITIAL_ROW:
                raise NoInitialRow(name) from None
            raise

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Backend.found_rows`."""
        spec = self._spec(name)
        dtype = value_dtype(spec.dtype)
        found, rows = self._servers.found_rows(name, ids, spec.dim * dtype.itemsize)
        return found, rows.view(dtype).view(-1, spec.dim)

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """See :meth:`Backend.push`."""
        self._servers.push(name, ids, values)

    def update(self, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None) -> None:
        """See :meth:`Backend.update`."""
        refused = self._servers.update(name, ids, grads, initial)
        if len(refused):
            raise NoInitialRow(name, refused)

    def pull_each(self, reads: Sequence[RowRead]) -> list[Tensor]:
        """See :meth:`Backend.pull_each`."""
        specs = [self._spec(read.table) for read in reads]
        return self._servers.pull_each(reads, [(spec.dim, value_dtype(spec.dtype)) for spec in specs])

    def update_each(self, updates: Sequence[RowUpdate]) -> None:
        """See :meth:`Backend.update_each`."""
        self._servers.update_each(updates)

    def delete(self, name: str, ids: Tensor) -> int:
        """See :meth:`Backend.delete`."""
        return self._servers.delete(name, ids)

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """See :meth:`Backend.exists`."""
        return self._servers.found(name, ids)

    def stats(self, name: str) -> TableStats:
        """See :meth:`Backend.stats`. The statistics are summed over all servers."""
        known = [field.name for field in fields(TableStats)]
        return combined(TableStats(**{key: counts[key] for key in known}) for counts in self._servers.stats(name))

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """See :meth:`Backend.save`. ``path`` is a name below each server's data directory."""
        self._servers.save(str(path), overwrite)

    def load(self, path: str | Path) -> None:
        """See :meth:`Backend.load`. ``path`` is a name below each server's data directory."""
        self._servers.load(str(path))
        self._specs.clear()

    def close(self) -> None:
        """Closes the connections."""
        self._servers.close()

    def _spec(self, name: str) -> TableSpec:
        spec = self._specs.get(name) or self.spec(name)
        if spec is None:
            raise ValueError(f"there is no table {name!r} on the servers {', '.join(self._servers.addresses)}")
        return spec
