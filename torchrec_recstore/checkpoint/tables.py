"""The RecStore tables of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.table_state import TableState


@dataclass(frozen=True)
class ModelTable:
    """A table, and the module that has it."""

    name: str
    module: RecStoreCollection
    prefix: str
    """Of the module's keys in the model's ``state_dict``."""

    @property
    def weight_key(self) -> str:
        """Of the table's weights in the model's ``state_dict``."""
        return f"{self.prefix}{self.module.recstore_state.container}.{self.name}.weight"

    @property
    def dim(self) -> int:
        """Columns of the whole table."""
        return int(self.module.recstore_dims()[self.name])

    @property
    def state(self) -> TableState:
        """What the table is on this rank."""
        return self.module.recstore_state.tables[self.name]


def recstore_tables(model: nn.Module) -> list[ModelTable]:
    """Every RecStore table of the model, in the same order on every rank."""
    return [
        ModelTable(name, module, prefix)
        for prefix, module in _sharded_modules(model, "")
        for name in module.recstore_table_names()
    ]


def distinct_tables(model: nn.Module) -> list[ModelTable]:
    """As :func:`recstore_tables`, where a table's name says which it is.

    Raises:
        ValueError: two tables have the same name.
    """
    tables = recstore_tables(model)
    names = [table.name for table in tables]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the model has more than one RecStore table {name!r}: in a checkpoint names must differ")
    return tables


def table_named(model: nn.Module, name: str) -> ModelTable:
    """The RecStore table of that name.

    Raises:
        ValueError: there is none, or more than one.
    """
    tables = recstore_tables(model)
    found = [table for table in tables if table.name == name]
    if len(found) != 1:
        names = ", ".join(repr(table.name) for table in tables)
        what = "no" if not found else "more than one"
        raise ValueError(f"the model has {what} RecStore table {name!r}; it has {names or 'none'}")
    return found[0]


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


def _sharded_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, RecStoreCollection]]:
    # state_dict leaves the wrappers' names out.
    if isinstance(module, DistributedModelParallel | DistributedDataParallel):
        yield from _sharded_modules(module.module, prefix)
    elif isinstance(module, RecStoreCollection):
        yield prefix, module
    else:
        for name, child in module.named_children():
            yield from _sharded_modules(child, f"{prefix}{name}.")
