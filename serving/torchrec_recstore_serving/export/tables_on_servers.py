"""Served tables whose rows stay on parameter servers: ``rows="servers"``.

Tests: tests/serving/export/test_tables_on_servers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.modules.embedding_modules import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.modules.table_module import RemoteTableModule
from torchrec_recstore.plugins import plugin
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.sharders.plan_entries import remote_options
from torchrec_recstore_serving.export.hashed_tables import HashedTable
from torchrec_recstore_serving.export.native_library import load_library
from torchrec_recstore_serving.export.row_formats import FORMATS

ON_SERVERS = (
    "{} is on servers, which own its rows: export_for_inference(model, path,"
    ' index="hash", rows="servers") exports a model that reads them there'
)
"""The message for a table whose rows cannot be exported.

The name of the table replaces ``{}``.
"""


@dataclass(frozen=True)
class TableOnServers:
    """A table on servers, as an exported model finds it.

    Args:
        name: The name of the table on the servers.
        dim: The number of columns.
        dtype: The data type of the weights.
        servers: The address of the port for rows of each server, ``host:port``, with
            commas between them. ``host:port/host:port`` for a pair.
        tls: Whether connections are encrypted.
        zeros: Whether an id without a row reads as zeros in the model, too.
    """

    name: str
    dim: int
    dtype: torch.dtype
    servers: str
    tls: bool
    zeros: bool


class ServerTable(HashedTable):
    """A served table whose rows are on parameter servers: a call reads them there.

    Deltas do not change it.

    See :class:`ServedTable`; the methods are the same, except that the table has no ids
    and no rows of its own.

    Args:
        name: The table's name in the served model.
        row_format: The row format of the other tables of the model, a name in
            :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
        table: The table on the servers.
    """

    def __init__(self, name: str, row_format: str, table: TableOnServers) -> None:
        nn.Module.__init__(self)
        load_library()
        self.name = name
        self.dim = table.dim
        self.row_format = row_format
        self.has_ids = True
        self.version = ""
        self.attributes = ""
        kept = str(table.dtype).removeprefix("torch.")
        self.on_servers = (
            f"{table.name} {kept} {table.servers}{' tls' if table.tls else ''}"
        )
        self.native = torch.classes.recstore.ServerTable(
            table.name, table.dim, kept, table.servers, table.tls
        )

    @torch.jit.export
    def raw_ids(self) -> Tensor:
        """Raises ValueError, because the servers have the ids."""
        raise ValueError(
            "the rows of table "
            + self.name
            + " are on servers: a client reads its ids and rows there"
        )

    @torch.jit.export
    def stored_rows(self) -> Tensor:
        """Raises ValueError, because the servers have the rows."""
        return self.raw_ids()

    @torch.jit.export
    def row_like(self) -> Tensor:
        """Returns (1, dim) float32 zeros, the row for ids without a row."""
        return torch.zeros([1, self.dim])

    @torch.jit.export
    def row_count(self) -> int:
        """Returns 0, the number of rows of the served model itself."""
        return 0

    @torch.jit.export
    def size_bytes(self) -> int:
        """Returns 0, the size of the rows of the served model itself in bytes."""
        return 0

    @torch.jit.export
    def give_rows_of(self, table: str, values: Tensor, found: list[Tensor]) -> None:
        """Appends nothing, because deltas have no rows of the table."""

    @torch.jit.export
    def give_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Adds the bytes of what names the table on the servers, with which the model's
        version is computed.
        """
        codes: list[int] = []
        for char in self.on_servers:
            codes.append(ord(char))
        tensors[self.name + "/servers"] = torch.tensor(codes)

    @torch.jit.export
    def give_tensors_after(
        self, delta: dict[str, Tensor], tensors: dict[str, Tensor]
    ) -> None:
        """Adds the tensor of :meth:`give_tensors`, which no delta changes."""
        self.give_tensors(tensors)

    @torch.jit.export
    def check_delta(self, delta: dict[str, Tensor], known: list[str]) -> None:
        """Accepts no key of a delta."""

    @torch.jit.export
    def prepare_delta(
        self, delta: dict[str, Tensor], tensors: dict[str, Tensor]
    ) -> None:
        """Adds the tensor of :meth:`give_tensors`, which no delta changes."""
        self.give_tensors(tensors)

    @torch.jit.export
    def take_delta(
        self, delta: dict[str, Tensor], ids: dict[str, Tensor], rows: dict[str, Tensor]
    ) -> None:
        """Does nothing."""

    @torch.jit.export
    def end_delta(self) -> None:
        """Does nothing."""

    @torch.jit.export
    def replace_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """Raises ValueError, because the servers have the rows."""
        self.raw_ids()


def served_on_servers(model: nn.Module) -> dict[str, str]:
    """Returns what names each table of a served model that is on servers there, by the
    name of the table.
    """
    return {
        str(module.name): str(module.on_servers)
        for module in model.modules()
        if hasattr(module, "on_servers")
    }


def tables_on_servers(
    kinds: list[nn.Module], dtype: torch.dtype, env: ShardingEnv
) -> dict[tuple[nn.Module, str], TableOnServers]:
    """Finds the tables of a trained model that are on servers. Collective.

    Args:
        kinds: The collections of the model.
        dtype: The data type of the export.
        env: The environment of the model.

    Returns:
        The tables by collection and name.

    Raises:
        ValueError: There is none, or rows of ``dtype`` are not those of the servers.
        ServiceError: A server cannot be reached. All of these errors are raised on
            every rank.
    """
    collections = [module for module in kinds if isinstance(module, RecStoreCollection)]
    here = [_names_on_servers(module) for module in collections]
    every = all_gathered(here, env)
    names = [
        {name: there for rank in every for name, there in rank[place].items()}
        for place in range(len(here))
    ]
    found: dict[tuple[nn.Module, str], TableOnServers] = {}
    addresses: dict[int, str] = {}
    with refused_together(env):
        for module, of_module in zip(collections, names, strict=True):
            for name in module.remote_table_names():
                servers = remote_options(module.module_sharding_plan[name])
                found[module, name] = _table(
                    of_module[name], plugin("client")(servers), dtype, addresses
                )
        eager = [
            each
            for each in kinds
            if isinstance(
                each, RecStoreEmbeddingBagCollection | RecStoreEmbeddingCollection
            )
        ]
        for collection in eager:
            for each in collection.modules():
                if isinstance(each, RemoteTableModule):
                    name = each.table.name
                    found[collection, name] = _table(
                        name, each.client, dtype, addresses
                    )
        if not found:
            raise ValueError(
                'rows="servers": no table of the model is on servers'
                ' (TableOptions.servers): leave rows out, or pass rows="mapped" for a'
                " model that is larger than the memory"
            )
    return found


def _names_on_servers(module: RecStoreCollection) -> Mapping[str, str]:
    """Returns the names on the servers of the tables of a collection that this rank
    looks up.
    """
    found: dict[str, str] = {}
    for kernel in module.recstore_kernels():
        if kernel.remote_tables:
            names = kernel.config.table_names()
            found |= {
                name: table.name
                for name, table in zip(names, kernel.remote_tables, strict=True)
            }
    return found


def _table(
    name: str, client: Any, dtype: torch.dtype, addresses: dict[int, str]
) -> TableOnServers:
    """Returns a table of a client.

    ``addresses`` has the addresses of the servers of the clients that were asked.
    """
    spec = client.spec(name)
    of_rows = value_dtype(spec.dtype)
    if dtype not in (torch.float32, of_rows):
        accepted = " or ".join(
            str(each)
            for each in dict.fromkeys((torch.float32, of_rows))
            if each in FORMATS
        )
        raise ValueError(
            f"table {name!r} is on servers, whose rows an export does not convert to"
            f" {dtype}: pass dtype={accepted}"
        )
    if id(client) not in addresses:
        try:
            addresses[id(client)] = ",".join(client.rows_addresses())
        except ValueError as error:
            raise ValueError(f"table {name!r}: {error}") from None
    zeros = spec.options.missing == "zeros"
    return TableOnServers(
        name,
        spec.dim,
        spec.dtype,
        addresses[id(client)],
        bool(client.is_encrypted),
        zeros,
    )
