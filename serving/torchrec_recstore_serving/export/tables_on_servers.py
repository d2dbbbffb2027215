"""Served tables whose rows stay on parameter servers: ``rows="servers"``.

Tests: tests/serving/export/test_tables_on_servers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from torchrec_recstore_serving.export.model_table import NativeTable
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


class ServerTable(NativeTable):
    """A served table whose rows are on parameter servers: a call reads them there.

    The model has no ids and no rows of the table, and deltas do not change it.

    Args:
        name: The table's name in the served model.
        row_format: The row format of the other tables of the model, a name in
            :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
        table: The table on the servers.
    """

    def __init__(self, name: str, row_format: str, table: TableOnServers) -> None:
        load_library()
        super().__init__(name, table.dim, row_format, has_ids=True)
        dtype = str(table.dtype).removeprefix("torch.")
        encryption = " tls" if table.tls else ""
        self.on_servers = f"{table.name} {dtype} {table.servers}{encryption}"
        self.native = torch.classes.recstore.ServerTable(
            table.name,
            table.dim,
            dtype,
            table.servers,
            table.tls,
        )

    @torch.jit.export
    def row_count(self) -> int:
        """Returns 0, the number of rows in the model."""
        return 0

    @torch.jit.export
    def size_bytes(self) -> int:
        """Returns 0, the size of the rows in the model in bytes."""
        return 0

    @torch.jit.export
    def give_ids(self, table: str, results: list[Tensor]) -> None:
        """Raises ValueError if this table has the name ``table``, because the servers
        have the ids.
        """
        if table == self.name:
            raise ValueError(
                "the rows of table "
                + self.name
                + " are on servers: a client reads its ids and rows there"
            )

    @torch.jit.export
    def give_rows(self, table: str, results: list[Tensor]) -> None:
        """Raises ValueError if this table has the name ``table``, because the servers
        have the rows.
        """
        self.give_ids(table, results)

    @torch.jit.export
    def give_rows_of(self, table: str, values: Tensor, results: list[Tensor]) -> None:
        """Appends nothing, because deltas have no rows of the table."""

    @torch.jit.export
    def give_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See :meth:`ModelTable.give_tensors`. The tensor has the bytes of what names
        the table on the servers.
        """
        codes: list[int] = []
        for char in self.on_servers:
            codes.append(ord(char))
        tensors[self.name + "/servers"] = torch.tensor(codes)

    @torch.jit.export
    def give_tensors_after(
        self,
        delta: dict[str, Tensor],
        tensors: dict[str, Tensor],
    ) -> None:
        """Adds the tensor of :meth:`give_tensors`, which no delta changes."""
        self.give_tensors(tensors)

    @torch.jit.export
    def check_delta(self, delta: dict[str, Tensor], known_keys: list[str]) -> None:
        """Accepts no key of a delta."""

    @torch.jit.export
    def prepare_delta(
        self,
        delta: dict[str, Tensor],
        tensors: dict[str, Tensor],
    ) -> None:
        """Adds the tensor of :meth:`give_tensors`, which no delta changes."""
        self.give_tensors(tensors)

    @torch.jit.export
    def take_delta(
        self,
        delta: dict[str, Tensor],
        ids: dict[str, Tensor],
        rows: dict[str, Tensor],
    ) -> None:
        """Does nothing."""

    @torch.jit.export
    def end_delta(self) -> None:
        """Does nothing."""


def served_on_servers(model: nn.Module) -> dict[str, str]:
    """Returns the tables of a served model that are on servers.

    Returns:
        What names each table on its servers, by the name of the table in the model.
    """
    return {
        str(module.name): str(module.on_servers)
        for module in model.modules()
        if hasattr(module, "on_servers")
    }


def tables_on_servers(
    kinds: list[nn.Module],
    dtype: torch.dtype,
    env: ShardingEnv,
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
    sharded = [module for module in kinds if isinstance(module, RecStoreCollection)]
    names_of_ranks = all_gathered(
        [_names_on_servers(module) for module in sharded],
        env,
    )
    remote_tables: dict[tuple[nn.Module, str], TableOnServers] = {}
    addresses: dict[int, str] = {}
    with refused_together(env):
        for number, collection in enumerate(sharded):
            names: dict[str, str] = {}
            for names_of_rank in names_of_ranks:
                names |= names_of_rank[number]
            for name in collection.remote_table_names():
                servers = remote_options(collection.module_sharding_plan[name])
                client = plugin("client")(servers)
                table = _table(names[name], client, dtype, addresses)
                remote_tables[collection, name] = table
        for module, remote in _unsharded(kinds):
            name = remote.table.name
            remote_tables[module, name] = _table(name, remote.client, dtype, addresses)
        if not remote_tables:
            raise ValueError(
                'rows="servers": no table of the model is on servers'
                ' (TableOptions.servers): leave rows out, or pass rows="mapped" for a'
                " model that is larger than the memory"
            )
    return remote_tables


def _unsharded(kinds: list[nn.Module]) -> Iterator[tuple[nn.Module, RemoteTableModule]]:
    """Yields the tables on servers of collections that are not sharded.

    Each is with its collection.
    """
    for collection in kinds:
        if isinstance(
            collection,
            RecStoreEmbeddingBagCollection | RecStoreEmbeddingCollection,
        ):
            for module in collection.modules():
                if isinstance(module, RemoteTableModule):
                    yield collection, module


def _names_on_servers(module: RecStoreCollection) -> dict[str, str]:
    """Returns the names on the servers of tables that this rank looks up.

    They are by the names in the collection.
    """
    names: dict[str, str] = {}
    for kernel in module.recstore_kernels():
        if not kernel.remote_tables:
            continue
        for name, table in zip(
            kernel.config.table_names(), kernel.remote_tables, strict=True
        ):
            names[name] = table.name
    return names


def _table(
    name: str,
    client: Any,
    dtype: torch.dtype,
    addresses: dict[int, str],
) -> TableOnServers:
    """Returns a table of a client.

    Args:
        name: The name of the table on the servers.
        client: The client.
        dtype: The data type of the export.
        addresses: The addresses of the servers by the ``id`` of the client. Those of
            ``client`` are added.
    """
    spec = client.spec(name)
    stored_dtype = value_dtype(spec.dtype)
    if dtype not in (torch.float32, stored_dtype):
        accepted = [torch.float32]
        if stored_dtype in FORMATS and stored_dtype != torch.float32:
            accepted.append(stored_dtype)
        raise ValueError(
            f"table {name!r} is on servers, whose rows an export does not convert to"
            f" {dtype}: pass dtype={' or '.join(map(str, accepted))}"
        )
    if id(client) not in addresses:
        try:
            addresses[id(client)] = ",".join(client.rows_addresses())
        except ValueError as error:
            raise ValueError(f"table {name!r}: {error}") from None
    return TableOnServers(
        name=name,
        dim=spec.dim,
        dtype=spec.dtype,
        servers=addresses[id(client)],
        tls=bool(client.is_encrypted),
        zeros=spec.options.missing == "zeros",
    )
