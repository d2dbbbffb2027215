"""Access to the RecStore tables of a model by name, and to its dense tensors.

Tests: tests/sharders/test_equal_names.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.modules.table_module import RemoteTableModule, TableModule
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.sharders.row_state import RowState
from torchrec_recstore.store import Table
from torchrec_recstore.table_parameter import TableParameter

_Table = TypeVar(
    "_Table",
    "ModelTable",
    "EagerModelTable",
    "ModelTable | EagerModelTable",
)

OWNED_BY_SERVERS = (
    "{} is on servers, which own its rows: save the rows with client.save(name), and"
    " the other tensors of the model with torch.save(model.state_dict(), path)"
)


@dataclass(frozen=True)
class ModelTable:
    """A RecStore table of a model."""

    # Unique in the model: config_name, or full_name if several tables have the same
    # config_name.
    name: str
    config_name: str  # The name in the table's config, unique in the collection.
    module: RecStoreCollection
    prefix: str  # The prefix of the collection's keys in the model's state_dict.

    @property
    def full_name(self) -> str:
        """The path of the collection in the model, a dot, and ``config_name``."""
        return _path_prefix(self.prefix) + self.config_name

    @property
    def weight_key(self) -> str:
        """The key of the table's weights in the model's ``state_dict``."""
        return self.key_of(self.config_name)

    def key_of(self, name: str) -> str:
        """The key of the weights of a table of this name in the same collection."""
        return self.module.recstore_state.weight_key(self.prefix, name)

    @property
    def dim(self) -> int:
        """The number of columns of the whole table."""
        return int(self.module.recstore_dims()[self.config_name])

    @property
    def state(self) -> RowState:
        """The table's state on this rank."""
        return self.module.recstore_state.tables[self.config_name]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the rows."""
        return self.state.optimizer

    @property
    def options(self) -> TableOptions:
        """The options of the whole table."""
        return self.state.options

    @property
    def shards(self) -> list[LocalShard]:
        """This rank's shards of the table."""
        return list(self.state.shards)


@dataclass(frozen=True)
class EagerModelTable:
    """A table of a module of a model that is not sharded.

    Each rank has rows of its own.
    """

    # Unique in the model: the table's name, or full_name if several tables have the
    # same name.
    name: str
    # The path of the collection in the model, a dot, and the table's name; or the path
    # of the module.
    full_name: str
    module: TableModule
    prefix: str  # The prefix of the module's keys in the model's state_dict.

    @property
    def config_name(self) -> str:
        """The table's name."""
        return self.module.weight.table

    @property
    def dim(self) -> int:
        """The number of columns."""
        return self.module.table.dim

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the rows."""
        return self.module.table.optimizer

    @property
    def options(self) -> TableOptions:
        """The options of the table."""
        return self.module.table.options

    @property
    def shards(self) -> list[LocalShard]:
        """The whole table."""
        return [LocalShard(self.module.table, None)]


def eager_tables(
    model: nn.Module,
    tables: Sequence[ModelTable],
) -> list[EagerModelTable]:
    """Returns the tables of the modules that are not sharded, each once.

    ``tables`` are the other tables.
    """
    prefixes: dict[TableModule, str] = {}
    _find_eager(model, "", prefixes)
    times = Counter(table.config_name for table in tables)
    times.update(module.weight.table for module in prefixes)
    eager = []
    for module, prefix in prefixes.items():
        # A module on the meta device has no rows, but a name.
        table_name = module.weight.table
        path = f".{prefix}"
        for container in (".embedding_bags.", ".embeddings."):
            path = path.replace(container, ".")
        full_name = path.strip(".") or table_name
        name = table_name
        if times[table_name] > 1:
            name = full_name
        eager.append(EagerModelTable(name, full_name, module, prefix))
    return eager


def _find_eager(
    module: nn.Module,
    prefix: str,
    prefixes: dict[TableModule, str],
) -> None:
    """Adds the modules with a table, by the prefix of their keys.

    The prefix is that of the first place of a module in the model.
    """
    if isinstance(module, DistributedModelParallel | DistributedDataParallel):
        _find_eager(module.module, prefix, prefixes)
    elif isinstance(module, TableModule):
        prefixes.setdefault(module, prefix)
    elif not isinstance(module, RecStoreCollection):
        for name, child in module.named_children():
            _find_eager(child, f"{prefix}{name}.", prefixes)


def collections_of(model: nn.Module) -> list[RecStoreCollection]:
    """Returns the sharded collections of the model, each once."""
    return [
        module for module in model.modules() if isinstance(module, RecStoreCollection)
    ]


def refuse_remote_tables(
    model: nn.Module,
    refusal: str = OWNED_BY_SERVERS,
) -> None:
    """Raises ValueError on every rank if a table of the model is on servers.

    The table's name replaces ``{}`` in ``refusal``.
    """
    for module in model.modules():
        names = []
        if isinstance(module, RecStoreCollection):
            names = module.remote_table_names()
        elif isinstance(module, RemoteTableModule):
            names = [module.table.name]
        if names:
            raise ValueError(refusal.format(f"table {names[0]!r}"))


def tables_of_rank(model: nn.Module, refusal: str) -> list[Table]:
    """Returns the tables of this rank, of sharded and of eager modules.

    See :func:`refuse_remote_tables` for errors.
    """
    refuse_remote_tables(model, refusal)
    tables: list[Table] = []
    for module in model.modules():
        if isinstance(module, RecStoreCollection):
            tables += module.recstore_tables()
        elif isinstance(module, TableModule):
            tables.append(module.table)
    return tables


def recstore_tables(model: nn.Module) -> list[ModelTable]:
    """Returns all RecStore tables of the model, in the same order on every rank.

    Raises ValueError if a table is on servers, and RuntimeError if the tables have lost
    rows in a failed reshard.
    """
    refuse_remote_tables(model)
    tables = all_tables(model)
    for table in tables:
        table.state.copies.check_usable()
    return tables


def all_tables(model: nn.Module) -> list[ModelTable]:
    """Returns all RecStore tables of the model.

    Tables on servers have no ``state``.
    """
    tables: list[ModelTable] = []
    modules = _sharded_modules(model, "")
    for prefix, module in modules.items():
        for name in module.recstore_table_names():
            tables.append(ModelTable(name, name, module, prefix))

    times = Counter(table.name for table in tables)
    for place, table in enumerate(tables):
        if times[table.name] > 1:
            tables[place] = replace(table, name=table.full_name)
    return tables


def tables_named(model: nn.Module, names: Iterable[str]) -> dict[str, ModelTable]:
    """Returns the RecStore tables with these names or full names, by the given name.

    Raises ValueError if a name belongs to no table or to several, or if two names
    belong to the same table.
    """
    return named_among(recstore_tables(model), names)


def any_table_named(model: nn.Module, name: str) -> ModelTable | EagerModelTable:
    """Returns the RecStore table with this name or full name.

    It can be of a sharded or of an eager module.

    Raises ValueError if there is none, or if the name is that of several tables.
    """
    sharded = recstore_tables(model)
    tables: list[ModelTable | EagerModelTable] = list(sharded)
    tables += eager_tables(model, sharded)
    tables_by_name = named_among(tables, [name])
    return tables_by_name[name]


def named_among(tables: Sequence[_Table], names: Iterable[str]) -> dict[str, _Table]:
    """Returns the tables with these names or full names, as :func:`tables_named` does."""
    tables_by_name: dict[str, _Table] = {}
    for name in names:
        table = _one_named(tables, name)
        for earlier_name, earlier_table in tables_by_name.items():
            if earlier_table == table:
                raise ValueError(
                    f"{earlier_name!r} and {name!r} are names of the same RecStore"
                    " table: use only one of them"
                )
        tables_by_name[name] = table
    return tables_by_name


def _one_named(tables: Sequence[_Table], name: str) -> _Table:
    """Returns the table with this name or full name."""
    matching = [table for table in tables if name in (table.name, table.full_name)]
    full_names = [table.full_name for table in tables if table.config_name == name]
    # A sharded table keeps its name in checkpoints beside eager ones, but here no table
    # goes first.
    is_ambiguous = len(full_names) > 1 and name not in full_names
    if is_ambiguous or (full_names and not matching):
        listed = ", ".join(map(repr, full_names))
        raise ValueError(
            f"the model has {len(full_names)} RecStore tables {name!r}: name one of"
            f" {listed}"
        )
    if not matching:
        listed = ", ".join(repr(table.name) for table in tables)
        raise ValueError(
            f"the model has no RecStore table {name!r}; it has {listed or 'none'}"
        )
    return matching[0]


def collections_by_path(model: nn.Module) -> dict[str, RecStoreCollection]:
    """Returns the sharded collections by their paths in the model, as plans name them."""
    collections: dict[str, RecStoreCollection] = {}
    for prefix, module in _sharded_modules(model, "").items():
        path = _path_prefix(prefix).removesuffix(".")
        collections[path] = module
    return collections


def _path_prefix(prefix: str) -> str:
    # A feature-processed collection has the bags in an attribute of this name (torchrec
    # 1.8.0); plans leave it out.
    return prefix.removesuffix("_embedding_bag_collection.")


@contextmanager
def rows_left_out(
    model: nn.Module,
    eager: Sequence[EagerModelTable] = (),
) -> Iterator[None]:
    """A context in which the states of a model have no RecStore rows.

    The states are those of the model and of its fused optimizer, and loading them
    changes no row.

    The states of modules that are not sharded have no rows if their tables are in
    ``eager``.
    """
    states: list[RowState | TableModule] = []
    states += [table.state for table in recstore_tables(model)]
    states += [table.module for table in eager]
    emitted_rows = [state.emits_rows for state in states]
    for state in states:
        state.emits_rows = False
    try:
        yield
    finally:
        for state, emits in zip(states, emitted_rows, strict=True):
            state.emits_rows = emits


def _sharded_modules(module: nn.Module, prefix: str) -> dict[str, RecStoreCollection]:
    """Returns the collections by the prefix of their keys.

    The prefix is that of the first place of a collection in the model.
    """
    # The keys of state_dict do not have the names of these wrappers.
    if isinstance(module, DistributedModelParallel | DistributedDataParallel):
        return _sharded_modules(module.module, prefix)
    if isinstance(module, RecStoreCollection):
        return {prefix: module}
    collections: dict[str, RecStoreCollection] = {}
    for name, child in module.named_children():
        of_child = _sharded_modules(child, f"{prefix}{name}.")
        for collection_prefix, collection in of_child.items():
            if collection not in collections.values():
                collections[collection_prefix] = collection
    return collections


def dense_tensors(
    model: nn.Module,
    tables: Sequence[ModelTable],
    eager: Sequence[EagerModelTable] = (),
) -> dict[str, Tensor]:
    """Returns the tensors of ``model.state_dict()`` that are not of RecStore tables.

    The tensors are not copied.

    Raises ValueError for tables on TorchRec's own sharded kernels, for tables of
    modules that are not sharded and not in ``eager``, and for other values.
    """
    known_parameters = {id(table.module.weight) for table in eager}
    for collection in collections_of(model):
        known_parameters.update(map(id, collection.parameters()))
    for key, parameter in model.named_parameters():
        is_table = isinstance(parameter, TableParameter)
        if is_table and id(parameter) not in known_parameters:
            refuse_remote_tables(model)
            raise ValueError(
                f"{key} is the table of a module that is not sharded: a checkpoint"
                " holds the tables of sharded modules; save and load the state_dict of"
                " this module"
            )

    with rows_left_out(model, eager):
        state = dict(model.state_dict())
    for table in tables:
        state.pop(table.weight_key, None)
    for eager_table in eager:
        state.pop(f"{eager_table.prefix}weight", None)
        # A module can be in several places of the model.
        for key, parameter in model.named_parameters(remove_duplicate=False):
            if parameter is eager_table.module.weight:
                state.pop(key, None)

    for key, value in state.items():
        # Tables on TorchRec's own kernels are ShardedTensor or DTensor (torchrec
        # 1.8.0).
        if type(value) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"{key} is a {type(value).__name__}: a checkpoint holds RecStore tables"
                " and plain tensors; use torch.distributed.checkpoint for tables on"
                " TorchRec's own kernels"
            )
    return {key: value.detach() for key, value in state.items()}


def check_dense(
    saved: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
    *,
    strict: bool,
) -> None:
    """Raises ValueError if the tensors of a checkpoint do not fit those of the model.

    If ``strict``, the names must be the same.
    """
    if strict:
        missing = current.keys() - saved.keys()
        if missing:
            raise ValueError(f"the checkpoint has no tensor {min(missing)!r}")
        unknown = saved.keys() - current.keys()
        if unknown:
            raise ValueError(f"the checkpoint has an unknown tensor {min(unknown)!r}")
    for name in current.keys() & saved.keys():
        tensor = current[name]
        shape = tuple(tensor.shape)
        saved_shape = tuple(saved[name].shape)
        if shape != saved_shape:
            raise ValueError(
                f"{name} is of shape {saved_shape} in the checkpoint, of shape {shape}"
                " in the model"
            )
        if not _is_writable(tensor):
            raise ValueError(
                f"{name} of the model cannot be written: it was expanded, or made in"
                " inference mode"
            )


def _is_writable(tensor: Tensor) -> bool:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return False
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    return not any(step == 0 and size > 1 for step, size in dimensions)


def load_dense(saved: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    """Copies the tensors of a checkpoint to those of the model.

    :func:`check_dense` has checked them.
    """
    with torch.no_grad():
        for name in current.keys() & saved.keys():
            current[name].copy_(saved[name])
