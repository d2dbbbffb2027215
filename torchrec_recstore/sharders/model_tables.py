"""The RecStore tables of a model: their names, statistics and cold stores; and the model's dense part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.options import is_shared
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import all_gathered, refused_together, whole_environment
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.sharders.state import RowState
from torchrec_recstore.store import TableStats
from torchrec_recstore.store.stats import combined


@dataclass(frozen=True)
class ModelTable:
    """A RecStore table of a model.

    Args:
        name: The name that the model's tables are told apart by: ``config_name`` where no other RecStore table of the
            model has it, else ``full_name``.
        config_name: The name in the table's config, which differs from those of the collection's other tables.
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
        """The columns of the whole table."""
        return int(self.module.recstore_dims()[self.config_name])

    @property
    def state(self) -> RowState:
        """The table's state on this rank."""
        return self.module.recstore_state.tables[self.config_name]

    @property
    def shards(self) -> list[LocalShard]:
        """This rank's shards of the table."""
        return list(self.state.shards)


def recstore_tables(model: nn.Module) -> list[ModelTable]:
    """Every RecStore table of the model, in the same order on every rank; no two have the same ``name``."""
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
    """The RecStore table that ``name`` is the name, or the full name, of.

    Raises:
        ValueError: there is none, or ``name`` is in the configs of several collections.
    """
    return tables_named(model, [name])[name]


def tables_named(model: nn.Module, names: Iterable[str]) -> dict[str, ModelTable]:
    """The RecStore tables that ``names`` are the names, or the full names, of.

    Raises:
        ValueError: there is no such table, a name is in the configs of several collections, or two of ``names`` are of
            one table.
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
            raise ValueError(f"{twice[0]!r} and {name!r} are names of one RecStore table: give one of them")
        found[name] = fitting[0]
    return found


def _path_prefix(prefix: str) -> str:
    # A feature-processed collection has the bags in an attribute of this name (torchrec 1.8.0); plans leave it out.
    return prefix.removesuffix("_embedding_bag_collection.")


@contextmanager
def rows_left_out(model: nn.Module) -> Iterator[None]:
    """Within it, ``state_dict`` of the model and of its fused optimizer are without the rows of RecStore tables.

    There they are copies, as large as the tables. Loading such a state leaves the tables as they are.
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
    """The collections by the prefix of their keys; one that has several places in the model by its first."""
    found: dict[str, RecStoreCollection] = {}
    # state_dict leaves the wrappers' names out.
    if isinstance(module, DistributedModelParallel | DistributedDataParallel):
        return _sharded_modules(module.module, prefix)
    if isinstance(module, RecStoreCollection):
        return {prefix: module}
    for name, child in module.named_children():
        for its_prefix, collection in _sharded_modules(child, f"{prefix}{name}.").items():
            if collection not in found.values():
                found[its_prefix] = collection
    return found


_Shard = tuple[int, TableStats]  # first column, counts


def table_stats(model: nn.Module) -> dict[str, TableStats]:
    """Counts of each RecStore table of the model, over all its shards. Collective: every rank calls it.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or anything that contains them.

    Returns:
        Statistics by table name, the same on every rank; no entry for tables on TorchRec's kernels. A table whose name
        another collection has too is named by the path of its collection in the model, a dot and its name. Counts are
        summed over ranks; a row split by columns counts once, its bytes in full; ``steps`` is the furthest shard's.
    """
    stats: dict[str, TableStats] = {}
    gathered: dict[RecStoreCollection, list[dict[str, list[_Shard]]]] = {}
    for table in recstore_tables(model):
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
    return all_gathered(local, module.ranks_env)


def _combined(shards: Iterable[_Shard]) -> TableStats:
    shards = list(shards)
    first = min(column for column, _ in shards)
    whole = combined(stats for column, stats in shards if column == first)
    return replace(whole, bytes=sum(stats.bytes for _, stats in shards), steps=max(stats.steps for _, stats in shards))


def flush_tables(model: nn.Module) -> None:
    """Writes the rows that have changed in memory to the shared cold stores of the model. Collective.

    When it returns, those of every rank are there. Tables with a cold store of their own, or none, are passed over. A
    model is not closed as a :class:`Table` is: what has changed since the last call is lost to others when it is gone.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or anything that contains them.

    Raises:
        ValueError: The model has no RecStore table with a shared cold store, one is being saved, or two tables of one
            name share one store: under a plan that is not ``RecStorePlanner``'s they have the same rows.
        ColdStoreError: a store fails; it may have some of the rows. The call can be repeated. All of these on every
            rank.
    """
    modules = [module for module in model.modules() if isinstance(module, RecStoreCollection)]
    with refused_together(whole_environment()):
        states = [state for module in modules for state in module.recstore_state.tables.values()]
        if not any(is_shared(state.options.cold_store) for state in states):
            raise ValueError("the model has no RecStore table with a shared cold store")
        tables = [table for module in modules for table in module.recstore_tables()]
        shared = [table for table in tables if is_shared(table.options.cold_store)]
        stores = Counter((table.options.cold_store, table.name, table.columns) for table in shared)
        for (store, name, _), times in stores.items():
            if times > 1:
                raise ValueError(
                    f"{times} collections have a RecStore table {name!r} whose rows are in {store!r}, so that they "
                    "share rows: plan the model with RecStorePlanner, or give the tables different names"
                )
        for table in shared:
            table.flush()


def dense_tensors(model: nn.Module, tables: Sequence[ModelTable]) -> dict[str, Tensor]:
    """What ``model.state_dict()`` has beside the RecStore tables: the model's own tensors, no copies.

    Raises:
        ValueError: a table on one of TorchRec's own sharded kernels, or something that is no tensor.
    """
    placeholders = {table.weight_key for table in tables}
    with rows_left_out(model):
        state = {key: value for key, value in model.state_dict().items() if key not in placeholders}
    for key, value in state.items():
        # ShardedTensor and DTensor: tables on TorchRec's own kernels (torchrec 1.8.0).
        if type(value) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"{key} is a {type(value).__name__}: a checkpoint holds RecStore tables and plain tensors; "
                "use torch.distributed.checkpoint for tables on TorchRec's own kernels"
            )
    return {key: value.detach() for key, value in state.items()}


def check_dense(saved: Mapping[str, Tensor], own: Mapping[str, Tensor], *, strict: bool) -> None:
    """Compares the tensors of a checkpoint with those of the model, which must be such that can be written.

    Raises:
        ValueError: another shape; with ``strict`` also a name that only one of them has; a tensor of the model that
            was expanded, or made in inference mode.
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
    """Copies tensors that :func:`check_dense` has passed into the model."""
    with torch.no_grad():
        for name in own.keys() & saved.keys():
            own[name].copy_(saved[name])
