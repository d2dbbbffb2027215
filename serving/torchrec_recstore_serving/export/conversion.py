"""Converts the collections of a trained model to the static modules of an exported one.

Tests: tests/serving/export/test_from_model.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import (
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import ShardedModule, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.checkpoint.stock import gathered
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag
from torchrec_recstore.modules.embedding_modules import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.options import Initializer, TableOptions, default_initializer
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import refused_together
from torchrec_recstore.sharders.model_tables import refuse_remote_tables
from torchrec_recstore.store import Table
from torchrec_recstore.table_configs import ROW_DTYPES, initializer_of
from torchrec_recstore.torchrec_seams.models import (
    collection_inside,
    configs_of,
    feature_processors,
    is_weighted,
    need_indices,
    sharding_env,
)
from torchrec_recstore_serving.export.eager_modules import (
    PositionWeights,
    ProcessedFeatures,
    StaticEmbedding,
    StaticEmbeddingBag,
    StaticEmbeddingBagCollection,
    StaticEmbeddingCollection,
    StaticTable,
)
from torchrec_recstore_serving.export.row_formats import FORMATS, check_range, packed
from torchrec_recstore_serving.export.scriptable_modules import (
    copied_with,
    served_collection,
)
from torchrec_recstore_serving.export.selection import (
    Selection,
    is_untrained,
    missing_row,
    whole_table,
)
from torchrec_recstore_serving.export.tables_on_servers import (
    ON_SERVERS,
    ServerTable,
    TableOnServers,
)

_PROCESSED_COLLECTIONS = (
    ShardedFeatureProcessedEmbeddingBagCollection,
    FeatureProcessedEmbeddingBagCollection,
)
_SINGLE_TABLES = (RecStoreEmbedding, RecStoreEmbeddingBag)
_REPLACED = (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    EmbeddingBagCollection,
    EmbeddingCollection,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    *_SINGLE_TABLES,
    *_PROCESSED_COLLECTIONS,
)
"""The modules that an export replaces."""


def replaced_modules(model: nn.Module, rows: str) -> list[nn.Module]:
    """Returns the modules that an export replaces.

    A feature-processed collection comes after the collection in it.

    Raises:
        ValueError: There is no such module, a sharded module cannot be exported, or a
            table is on servers and ``rows`` is not ``"servers"``.
    """
    if rows != "servers":
        refuse_remote_tables(model, ON_SERVERS)
    by_path = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _REPLACED)
    }
    for path, module in model.named_modules():
        if isinstance(module, ShardedModule) and not _is_inside(path, by_path):
            raise ValueError(
                f"{path or 'the model'} is a {type(module).__name__}, whose tables"
                " cannot be exported"
            )
    if not by_path:
        raise ValueError(
            f"{type(model).__name__} has no tables: there is nothing to export"
        )
    modules = by_path.values()
    processed = [module for module in modules if _processors(module) is not None]
    others = [module for module in modules if _processors(module) is None]
    return others + processed


def _is_inside(path: str, replaced: Mapping[str, nn.Module]) -> bool:
    """Returns whether the module at a path is one of ``replaced`` or inside of one."""
    return any(
        outer in ("", path) or path.startswith(f"{outer}.") for outer in replaced
    )


def _processors(module: nn.Module) -> nn.Module | None:
    """Returns the feature processors of a collection. None: it has none."""
    if isinstance(module, _PROCESSED_COLLECTIONS):
        return feature_processors(module)
    return None


def dims_of(modules: list[nn.Module]) -> list[tuple[str, int]]:
    """Returns the name and the dim of each table of modules that an export replaces."""
    dims: list[tuple[str, int]] = []
    for module in modules:
        for config in configs_of(module):
            dims.append((config.name, config.embedding_dim))
    for module in modules:
        if isinstance(module, _SINGLE_TABLES):
            dims.append((module.table.name, module.embedding_dim))
    return dims


@dataclass(frozen=True)
class UnreadTable:
    """A RecStore table of which a conversion has read no rows.

    Args:
        name: The name of the table.
        module: The trained module that has the table.
        path: The path of the table in the scriptable form of the module, such as
            ``"tables.0"``.
        shards: The shards of this rank.
        env: The environment of the ranks that hold the other shards. None if this
            process holds all shards.
    """

    name: str
    module: nn.Module
    path: str
    shards: list[Table]
    env: ShardingEnv | None


class Conversion:
    """The conversion of one model's collections into static collections.

    Args:
        dtype: The data type of the rows.
        selection: Which rows are exported.
        marks: The change mark of each shard whose rows are read is added to it.
        on_servers: The tables whose rows stay on servers, by collection and name.
        reads_rows: Whether the rows of RecStore tables are read. Without them, these
            tables are empty, and are listed in :attr:`unread`. Default: True.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        selection: Selection,
        marks: dict[Table, int],
        on_servers: Mapping[tuple[nn.Module, str], TableOnServers],
        reads_rows: bool = True,
    ) -> None:
        self._dtype = dtype
        self._row_format = FORMATS[dtype]
        self._selection = selection
        self._marks = marks
        self._on_servers = on_servers
        self._reads_rows = reads_rows
        self._converted: dict[int, nn.Module] = {}
        """The static modules by the ``id`` of the modules that they replace."""
        self.unread: list[UnreadTable] = []
        """The tables whose rows were not read."""
        self.initial_rows: list[str] = []
        """The tables whose ids without a row read as initial rows in the model."""
        self.untrained: dict[str, bool] = {}
        """Whether each table whose rows were read is untrained, by its name."""

    def model(
        self,
        model: nn.Module,
        replaced: list[nn.Module],
        env: ShardingEnv,
    ) -> nn.Module:
        """Returns a copy of a model in evaluation mode, with static modules.

        They are in the place of the modules in ``replaced``.
        """
        static_modules: dict[int, Any] = {
            id(module): self._static(module) for module in replaced
        }
        with refused_together(env):
            exported = copied_with(model, static_modules).eval().requires_grad_(False)
            exported.zero_grad()
        return exported

    def unread_by_path(self, exported: nn.Module) -> dict[str, UnreadTable]:
        """Returns the tables whose rows were not read, by path.

        The paths are those of the scriptable form of ``exported``, which :meth:`model`
        has returned.
        """
        paths = {id(module): path for path, module in exported.named_modules()}
        by_path: dict[str, UnreadTable] = {}
        for table in self.unread:
            static = self._converted[id(table.module)]
            path = paths.get(id(static))
            if path is None:  # The module is inside of another one that was replaced.
                continue
            by_path[f"{path}.{table.path}" if path else table.path] = table
        return by_path

    def _static(self, module: nn.Module) -> nn.Module:
        """Returns the static module that replaces ``module``."""
        if id(module) not in self._converted:
            static = self._without_servers(module)
            self._converted[id(module)] = self._with_servers(module, static)
        return self._converted[id(module)]

    def _with_servers(self, module: nn.Module, static: nn.Module) -> nn.Module:
        """Returns the static module of a collection.

        If the collection has tables on servers, it is the served module with these
        tables.
        """
        remote_tables = {
            name: table
            for (collection, name), table in self._on_servers.items()
            if collection is module
        }
        if not remote_tables:
            return static
        assert isinstance(
            static,
            StaticEmbeddingBagCollection | StaticEmbeddingCollection,
        )
        served = served_collection(static)
        tables: nn.ModuleList = served.tables  # type: ignore[assignment]
        for number, (config, _) in enumerate(static.tables()):
            if config.name in remote_tables:
                tables[number] = ServerTable(
                    config.name,
                    self._row_format,
                    remote_tables[config.name],
                )
        for name, table in remote_tables.items():
            if not table.zeros:
                self.initial_rows.append(name)
        return served

    def _without_servers(self, module: nn.Module) -> nn.Module:
        processors = _processors(module)
        if processors is not None:
            return self._processed(module, processors)
        if isinstance(module, RecStoreEmbedding | RecStoreEmbeddingBag):
            ids, rows = self._rows_of_single(module)
            if isinstance(module, RecStoreEmbedding):
                return StaticEmbedding(module, ids, rows, self._row_format)
            return StaticEmbeddingBag(module, ids, rows, self._row_format)
        tables = self._tables(module)
        if isinstance(module, ShardedEmbeddingBagCollection):
            weighted = is_weighted(module)
            return StaticEmbeddingBagCollection(tables, weighted, self._dtype)
        if isinstance(module, EmbeddingBagCollection | RecStoreEmbeddingBagCollection):
            weighted = module.is_weighted()
            return StaticEmbeddingBagCollection(tables, weighted, self._dtype)
        if isinstance(module, ShardedEmbeddingCollection):
            return StaticEmbeddingCollection(tables, need_indices(module), self._dtype)
        return StaticEmbeddingCollection(tables, module.need_indices(), self._dtype)  # type: ignore[operator]

    def _processed(self, module: nn.Module, processors: nn.Module) -> ProcessedFeatures:
        """Returns the static module of a feature-processed collection."""
        weights: dict[int, Any] = {}
        for processor in processors.modules():
            if type(processor) is PositionWeightedModule:
                weights[id(processor)] = PositionWeights(copy.deepcopy(processor))
        collection = self._static(collection_inside(module))
        return ProcessedFeatures(copied_with(processors, weights), collection)

    def _tables(self, module: nn.Module) -> list[StaticTable]:
        """Returns the static tables of a collection, in its order."""
        stock = self._stock_weights(module)
        tables: list[StaticTable] = []
        for number, config in enumerate(configs_of(module)):
            if config.name in stock:
                table = StaticTable(config, None, stock[config.name].float())
            elif (module, config.name) in self._on_servers:
                # a ServerTable replaces it
                no_ids = torch.empty(0, dtype=torch.int64)
                zeros = torch.zeros(1, config.embedding_dim)
                table = StaticTable(config, no_ids, zeros)
            else:
                ids, weight = self._rows_of_table(module, number, config)
                table = StaticTable(config, ids, weight)
            check_range(config.name, table.weight, self._row_format)
            tables.append(table)
        return tables

    def _stock_weights(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Returns the weights of TorchRec's own tables of a collection by name."""
        if isinstance(
            module,
            RecStoreEmbeddingBagCollection | RecStoreEmbeddingCollection,
        ):
            return {}
        names = {config.name for config in configs_of(module)}
        if isinstance(module, RecStoreCollection):
            names -= set(module.recstore_table_names())
        if not names:
            return {}
        with _without_recstore_rows(module):
            state = module.state_dict()
        weights_by_name = {
            key.split(".")[-2]: value
            for key, value in state.items()
            if key.endswith(".weight")
        }
        plain: dict[str, Tensor] = {}
        sharded: dict[str, Tensor] = {}
        for name in sorted(names):
            weight = weights_by_name[name]
            # A ShardedTensor is also a Tensor, and raises on is_meta if this rank has
            # no part of it.
            is_plain = type(weight) in (Tensor, nn.Parameter)
            if is_plain and weight.is_meta:
                raise ValueError(
                    f"table {name!r} is on the meta device and has no rows"
                )
            if is_plain or not isinstance(module, ShardedModule):
                plain[name] = weight.detach().cpu().clone()
            else:
                sharded[name] = weight
        if not isinstance(module, ShardedModule):
            return plain
        return {**gathered(sharded, sharding_env(module)), **plain}

    def _rows_of_table(
        self,
        module: nn.Module,
        number: int,
        config: BaseEmbeddingConfig,
    ) -> tuple[Tensor, Tensor]:
        """Returns the ids and the rows of the table with a number in a collection."""
        env: ShardingEnv | None = None
        if isinstance(module, RecStoreCollection):
            state = module.recstore_state.tables[config.name]
            shards = [shard.table for shard in state.shards]
            options = state.options
            env = sharding_env(module)
        else:
            modules: nn.ModuleDict = (
                getattr(module, "embedding_bags", None) or module.embeddings  # type: ignore[assignment]
            )
            table_module = modules[config.name]
            assert isinstance(table_module, TableModule)
            shards = [table_module.table]
            options = table_module.table.options
        missing = self._missing_row(
            name=config.name,
            initializer=initializer_of(config, options),
            options=options,
            dim=config.embedding_dim,
            dtype=ROW_DTYPES[config.data_type],
        )
        table = UnreadTable(
            name=config.name,
            module=module,
            path=f"tables.{number}",
            shards=shards,
            env=env,
        )
        # TorchRec's modules quantise the rows.
        return self._rows(table, missing, "float32")

    def _rows_of_single(self, module: TableModule) -> tuple[Tensor, Tensor]:
        """Returns the ids and the rows of a module of one table."""
        table = module.table
        missing = self._missing_row(
            name=table.name,
            initializer=default_initializer(table.options),
            options=table.options,
            dim=table.dim,
            dtype=table.dtype,
        )
        unread = UnreadTable(
            name=table.name,
            module=module,
            path="table",
            shards=[table],
            env=None,
        )
        return self._rows(unread, missing, self._row_format)

    def _missing_row(
        self,
        name: str,
        initializer: Initializer,
        options: TableOptions,
        dim: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns the row for ids without a row: (dim,) float32."""
        self._selection.check_counts(name, options)
        missing, exact = missing_row(initializer, options, dim, dtype)
        if not exact:
            self.initial_rows.append(name)
        return missing

    def _rows(
        self,
        unread: UnreadTable,
        missing: Tensor,
        row_format: str,
    ) -> tuple[Tensor, Tensor]:
        """Returns the ids, and the rows in the row format.

        The rows begin with a row for ids without a row.
        """
        name = unread.name
        if not self._reads_rows:
            self.unread.append(unread)
            no_ids = torch.empty(0, dtype=torch.int64)
            return no_ids, packed(name, missing[None], row_format)
        table = whole_table(
            name,
            unread.shards,
            missing,
            unread.env,
            row_format,
            self._marks,
        )
        self._selection.check_counted(name, len(table.ids), table.steps)
        self.untrained[name] = is_untrained(
            rows=len(table.ids),
            steps=table.steps,
            updates=table.updates,
        )
        positions = self._selection.positions(table.frequency)
        if len(positions) == len(table.ids):
            return table.ids, table.rows
        row_positions = F.pad(positions + 1, [1, 0])  # row 0 stays the first one
        return table.ids[positions], table.rows[row_positions]


@contextmanager
def _without_recstore_rows(module: nn.Module) -> Iterator[None]:
    """Leaves the rows of RecStore tables out of the ``state_dict`` of a module."""
    if not isinstance(module, RecStoreCollection):
        yield
        return
    emits_rows = module.recstore_state.emits_rows
    module.recstore_state.emits_rows = False
    try:
        yield
    finally:
        module.recstore_state.emits_rows = emits_rows
