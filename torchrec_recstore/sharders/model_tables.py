"""The RecStore tables of a model, and the names that they have in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.local_shard import LocalShard
from torchrec_recstore.sharders.table_state import TableState


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
    def state(self) -> TableState:
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
