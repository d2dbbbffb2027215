"""Access to the RecStore tables of a model, with their names, statistics and cold stores, and to its dense tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.modules.remote_table_module import RemoteTableModule
from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.options import is_shared
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import all_gathered, refused_together, whole_environment
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.sharders.state import RowState
from torchrec_recstore.store import Table, TableStats
from torchrec_recstore.store.table_state import StatsByTable, combined
from torchrec_recstore.table_parameter import TableParameter

_Shard = tuple[int, TableStats]
"""The first column and the statistics of a shard."""


@dataclass(frozen=True)
class ModelTable:
    """A RecStore table of a model.

    Args:
        name: The unique name of the table in the model: ``config_name`` if no other RecStore table of the model has the
            same ``config_name``, else ``full_name``.
        config_name: The name in the table's config. It is unique in the collection.
        module: The sharded collection that has the table.
        prefix: The prefix of the collection's keys in the model's ``state_dict``.
    """

    name: str
    config_name: str
    module: RecStoreCollection
    prefix: str

    @property
    def full_name(self) -> str:
        """The path of the collection in the model, a dot, and ``config_name``."""
        return _path_prefix(self.prefix) + self.config_name

    @property
    def weight_key(self) -> str:
        """The key of the table's weights in the model's ``state_dict``."""
        return f"{self.prefix}{self.module.recstore_state.container}.{self.config_name}.weight"

    @property
    def dim(self) -> int:
        """The number of columns of the whole table."""
        return int(self.module.recstore_dims()[self.config_name])

    @property
    def state(self) -> RowState:
        """The table's state on this rank."""
        return self.module.recstore_state.tables[self.config_name]

    @property
    def shards(self) -> list[LocalShard]:
        """This rank's shards of the table."""
        return list(self.state.shards)


def remote_table_names(model: nn.Module) -> list[str]:
    """Returns the names of the tables of the model whose rows are on servers."""
    names = []
    for module in model.modules():
        if isinstance(module, RecStoreCollection):
            names += module.remote_table_names()
        elif isinstance(module, RemoteTableModule):
            names.append(module.table.name)
    return names


def tables_of_rank(model: nn.Module, refusal: str) -> list[Table]:
    """Returns the tables of this rank, of sharded modules and of eager modules.

    Args:
        model: The model.
        refusal: The message of the error if a table is on servers. Its name replaces ``{}``.

    Raises:
        ValueError: The rows of a table are on servers. All ranks raise the same error.
    """
    remote = remote_table_names(model)
    if remote:
        raise ValueError(refusal.format(f"table {remote[0]!r}"))
    found: list[Table] = []
    for module in model.modules():
        if isinstance(module, RecStoreCollection):
            found += module.recstore_tables()
        elif isinstance(module, TableModule):
            found.append(module.table)
    return found


def refuse_remote_tables(model: nn.Module) -> None:
    """Raises an error if the rows of a table of the model are on servers. All ranks raise the same error.

    Raises:
        ValueError: There is such a table. The message names it, and says how its rows are saved.
    """
    names = remote_table_names(model)
    if names:
        raise ValueError(
            f"table {names[0]!r} is on servers, which own its rows: save the rows with client.save(name), and the "
            "other tensors of the model with torch.save(model.state_dict(), path)"
        )


def recstore_tables(model: nn.Module) -> list[ModelTable]:
    """Returns all RecStore tables of the model, in the same order on every rank. Their ``name`` is unique.

    Raises:
        ValueError: The rows of a table are on servers.
        RuntimeError: A reshard has failed, and the tables have lost rows.
    """
    refuse_remote_tables(model)
    tables = _all_tables(model)
    for table in tables:
        table.state.copies.check_usable()
    return tables


def _all_tables(model: nn.Module) -> list[ModelTable]:
    """Returns all RecStore tables of the model, also those on servers, which have no ``state``."""
    found = [
        (prefix, module, name)
        for prefix, module in _sharded_modules(model, "").items()
        for name in module.recstore_table_names()
    ]
    times = Counter(name for *_, name in found)
    return [
        ModelTable(name if times[name] == 1 else _path_prefix(prefix) + name, name, module, prefix)
        for prefix, module, name in found
    ]


def table_named(model: nn.Module, name: str) -> ModelTable:
    """Returns the RecStore table with the name or full name ``name``.

    Raises:
        ValueError: The model has no RecStore table with this name, or several collections have a table with this name.
    """
    return tables_named(model, [name])[name]


def tables_named(model: nn.Module, names: Iterable[str]) -> dict[str, ModelTable]:
    """Returns the RecStore tables with the names or full names ``names``, by the given name.

    Raises:
        ValueError: The model has no RecStore table with one of the names, several collections have a table with one of
            the names, or two names belong to the same table.
    """
    tables = recstore_tables(model)
    found: dict[str, ModelTable] = {}
    for name in names:
        fitting = [table for table in tables if name in (table.name, table.full_name)]
        same = [repr(table.full_name) for table in tables if table.config_name == name]
        if not fitting and same:
            raise ValueError(f"the model has {len(same)} RecStore tables {name!r}: name one of {', '.join(same)}")
        if not fitting:
            known = ", ".join(repr(table.name) for table in tables)
            raise ValueError(f"the model has no RecStore table {name!r}; it has {known or 'none'}")
        twice = [other for other, table in found.items() if table == fitting[0]]
        if twice:
            raise ValueError(f"{twice[0]!r} and {name!r} are names of the same RecStore table: use only one of them")
        found[name] = fitting[0]
    return found


def collections_by_path(model: nn.Module) -> dict[str, RecStoreCollection]:
    """Returns the sharded collections by their paths in the model, as plans name them."""
    return {_path_prefix(p).removesuffix("."): module for p, module in _sharded_modules(model, "").items()}


def _path_prefix(prefix: str) -> str:
    # A feature-processed collection has the bags in an attribute of this name (torchrec 1.8.0); plans leave it out.
    return prefix.removesuffix("_embedding_bag_collection.")


@contextmanager
def rows_left_out(model: nn.Module) -> Iterator[None]:
    """Returns a context in which the states of the model and its fused optimizer have no rows of RecStore tables.

    Outside of this context, ``state_dict`` copies all rows of the tables. Loading a state without rows does not change
    the tables.
    """
    states = [table.state for table in recstore_tables(model)]
    before = [state.emits_rows for state in states]
    for state in states:
        state.emits_rows = False
    try:
        yield
    finally:
        for state, emits in zip(states, before, strict=True):
            state.emits_rows = emits


def _sharded_modules(module: nn.Module, prefix: str) -> dict[str, RecStoreCollection]:
    """Returns the collections by the prefix of their keys.

    If a collection has several places in the model, the prefix is that of the first place.
    """
    found: dict[str, RecStoreCollection] = {}
    # The keys of state_dict do not have the names of these wrappers.
    if isinstance(module, DistributedModelParallel | DistributedDataParallel):
        return _sharded_modules(module.module, prefix)
    if isinstance(module, RecStoreCollection):
        return {prefix: module}
    for name, child in module.named_children():
        for its_prefix, collection in _sharded_modules(child, f"{prefix}{name}.").items():
            if collection not in found.values():
                found[its_prefix] = collection
    return found


def table_stats(model: nn.Module) -> dict[str, TableStats]:
    """Returns the statistics of each RecStore table of the model over all ranks. Collective: every rank must call it.

    Args:
        model: A ``DistributedModelParallel``, a sharded module, or a module that contains them.

    Returns:
        The statistics by table name, which ``print`` and notebooks show as a table. They are the same on every rank.
        Tables on TorchRec's kernels have no entry. If several collections have tables with the same name, the name is
        the path of the collection in the model, a dot and the table's name. Counts are summed over the ranks. A row
        that is split by columns counts once, with the bytes of all its columns. ``steps`` and ``refused_times`` are the
        largest value of the shards.
    """
    stats = StatsByTable()
    gathered: dict[RecStoreCollection, list[dict[str, list[_Shard]]]] = {}
    for table in _all_tables(model):
        if table.module not in gathered:
            gathered[table.module] = _all_shards(table.module)
        shards = [shard for of_rank in gathered[table.module] for shard in of_rank[table.config_name]]
        stats[table.name] = _combined(shards)
    return stats


def _all_shards(module: RecStoreCollection) -> list[dict[str, list[_Shard]]]:
    local = {
        name: [(shard.table.columns.start, shard.table.stats()) for shard in shards]
        for name, shards in module.recstore_state.shards.items()
    }
    # One rank has each table on servers; its statistics are those of all servers.
    local |= {name: [] for name in module.remote_table_names()}
    with refused_together(module.ranks_env):
        module.wait_for_updates()
        for kernel in module.remote_kernels():
            for name, remote in zip(kernel.config.table_names(), kernel.remote_tables, strict=True):
                local[name] = [(0, remote.client.stats(remote.name))]
    return all_gathered(local, module.ranks_env)


def _combined(shards: Iterable[_Shard]) -> TableStats:
    shards = list(shards)
    first = min(column for column, _ in shards)
    whole = combined(stats for column, stats in shards if column == first)
    return replace(whole, bytes=sum(stats.bytes for _, stats in shards), steps=max(stats.steps for _, stats in shards))


def flush_tables(model: nn.Module) -> None:
    """Writes the rows that have changed in memory to the shared cold stores of the model. Collective.

    When the call returns, the cold stores have the rows of every rank. Parameter servers have applied the updates of
    every rank to tables with ``TableOptions.servers``, so that ``RecStoreClient.save`` saves them. Other tables are
    skipped. Unlike a :class:`Table`, a model is not closed: rows that change after the last call are not written to the
    cold stores when the process ends.

    Args:
        model: A ``DistributedModelParallel``, a sharded module, or a module that contains them.

    Raises:
        ValueError: The model has no RecStore table with a shared cold store or on servers, or a table is being saved.
            Or two tables with the same name share a cold store, so that they have the same rows; the plans of
            ``RecStorePlanner`` keep these tables apart. The error is raised on every rank.
        ServiceError: A server has not applied an update. The error is raised on every rank.
        ColdStoreError: A cold store fails. It may have received some of the rows; the call can be repeated. The error
            is raised on every rank.
    """
    modules = [module for module in model.modules() if isinstance(module, RecStoreCollection)]
    with refused_together(whole_environment()):
        states = [state for module in modules for state in module.recstore_state.tables.values()]
        remote = [name for module in modules for name in module.remote_table_names()]
        if not remote and not any(is_shared(state.options.cold_store) for state in states):
            raise ValueError("the model has no RecStore table with a shared cold store or on servers")
        for module in modules:
            module.wait_for_updates()
        tables = [table for module in modules for table in module.recstore_tables()]
        shared = [table for table in tables if is_shared(table.options.cold_store)]
        stores = Counter((table.options.cold_store, table.name, table.columns) for table in shared)
        for (store, name, _), times in stores.items():
            if times > 1:
                raise ValueError(
                    f"{times} collections have a RecStore table {name!r} whose rows are in {store!r}, so that they "
                    "share rows: plan the model with RecStorePlanner, or use different names for the tables"
                )
        for table in shared:
            table.flush()


def dense_tensors(model: nn.Module, tables: Sequence[ModelTable]) -> dict[str, Tensor]:
    """Returns the tensors of ``model.state_dict()`` that are not of RecStore tables, without copying them.

    Raises:
        ValueError: The model has a table on one of TorchRec's own sharded kernels or in an eager module, or a value
            that is not a tensor.
    """
    placeholders = {table.weight_key for table in tables}
    collections = [module for module in model.modules() if isinstance(module, RecStoreCollection)]
    of_collections = {id(parameter) for collection in collections for parameter in collection.parameters()}
    for key, parameter in model.named_parameters():
        if isinstance(parameter, TableParameter) and id(parameter) not in of_collections:
            refuse_remote_tables(model)
            raise ValueError(
                f"{key} is the table of a module that is not sharded: a checkpoint holds the tables of sharded "
                "modules; save and load the state_dict of this module"
            )
    with rows_left_out(model):
        state = {key: value for key, value in model.state_dict().items() if key not in placeholders}
    for key, value in state.items():
        # Tables on TorchRec's own kernels are ShardedTensor or DTensor (torchrec 1.8.0).
        if type(value) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"{key} is a {type(value).__name__}: a checkpoint holds RecStore tables and plain tensors; "
                "use torch.distributed.checkpoint for tables on TorchRec's own kernels"
            )
    return {key: value.detach() for key, value in state.items()}


def check_dense(saved: Mapping[str, Tensor], own: Mapping[str, Tensor], *, strict: bool) -> None:
    """Checks that the tensors of a checkpoint can be loaded into the tensors of the model.

    Args:
        saved: The tensors of the checkpoint.
        own: The tensors of the model.
        strict: Whether both must have the same names.

    Raises:
        ValueError: A shape differs. Or ``strict`` is True, and only one of them has a name. Or a tensor of the model
            cannot be written, because it was expanded or made in inference mode.
    """
    for what, names in (("no", own.keys() - saved.keys()), ("an unknown", saved.keys() - own.keys())):
        if strict and names:
            raise ValueError(f"the checkpoint has {what} tensor {min(names)!r}")
    for name in own.keys() & saved.keys():
        if own[name].shape != saved[name].shape:
            raise ValueError(
                f"{name} is of shape {tuple(saved[name].shape)} in the checkpoint, "
                f"of shape {tuple(own[name].shape)} in the model"
            )
        overlaps = any(step == 0 and size > 1 for step, size in zip(own[name].stride(), own[name].shape, strict=True))
        if overlaps or (own[name].is_inference() and not torch.is_inference_mode_enabled()):
            raise ValueError(f"{name} of the model cannot be written: it was expanded, or made in inference mode")


def load_dense(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Copies the tensors of a checkpoint, which :func:`check_dense` has checked, to the tensors of the model."""
    with torch.no_grad():
        for name in own.keys() & saved.keys():
            own[name].copy_(saved[name])
