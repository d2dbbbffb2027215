"""A table that a module owns, and its rows as a state of tensors.

Tests: tests/modules/test_state.py, tests/modules/test_shared_rows.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.store import Part, Table, TableState
from torchrec_recstore.store.parts import STAMPS, frequency_key, zero_states
from torchrec_recstore.store.table_state import STATE_KEYS


class OwnedTable:
    """A :class:`Table` that can be copied with ``deepcopy`` and pickled, with its
    resident rows and its cold rows.

    The copy of a table with a shared cold store uses the same store, to which rows that
    have changed are written.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self.table = Table(**arguments)

    def with_optimizer(self, arguments: Mapping[str, Any]) -> OwnedTable:
        """Returns a table with the same rows and another optimizer.

        It takes over ``left_ids``.

        Rows keep the state of an optimizer of the same type and name. Otherwise the
        state starts as zeros: the rows must not have been updated, and ValueError is
        raised if they are in a shared cold store.
        """
        old = self.table
        optimizer = arguments["optimizer"]
        keeps_state = _state_kind(optimizer) == _state_kind(old.optimizer)
        if old.tier.shared and not keeps_state:
            raise ValueError(
                f"table {old.name!r}: its rows are shared and have the state of"
                f" {old.optimizer}: pass the optimizer to the constructor of the module"
            )
        fresh = OwnedTable(arguments)

        def converted(part: Part) -> Part:
            rows = zero_states(optimizer, len(part), old.dim)
            if keeps_state:
                kept_names = ["weight", *rows]
            else:
                kept_names = ["weight", *STAMPS]
            for name in kept_names:
                if name in part.rows:
                    rows[name] = part.rows[name]
            return replace(part, rows=rows)

        _copy(old, fresh.table, converted)
        # last, because the old table has no record afterwards
        if old.options.left_ids is not None:
            fresh.table.add_left_ids(old.left_ids())
        return fresh

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedTable:
        fresh = OwnedTable(self._arguments)
        _copy(self.table, fresh.table)
        return fresh

    def __reduce__(self) -> tuple[Any, ...]:
        if self.table.tier.shared:
            self.table.flush()
            state = self.table.state().tensors()
        else:
            state = table_state(self.table)
        process = get_spawning_popen()
        if process is not None:
            # Tensors that are pickled for a new process are in shared memory, which
            # must exist until it has started.
            finalizer = weakref.finalize(process, state.clear)
            finalizer.atexit = False
        return _restored, (self._arguments, state)


def _state_kind(optimizer: Optimizer) -> tuple[type[Optimizer], str | None]:
    """Returns what optimizers whose states fit each other have in common."""
    return type(optimizer), vars(optimizer).get("name")


def _restored(arguments: Mapping[str, Any], state: Mapping[str, Tensor]) -> OwnedTable:
    owned = OwnedTable(arguments)
    _fill(owned.table, state)
    return owned


def state_keys(table: Table) -> list[str]:
    """Returns the keys of :func:`table_state`."""
    stamps = ("last_step", frequency_key(table.options))
    return [
        "weight",
        "weight_id",
        *state_names(table.optimizer),
        *stamps,
        *table.state().tensors(),
    ]


def table_state(table: Table) -> dict[str, Tensor]:
    """Returns copies of all ``R`` rows of a table and their state.

    That is ``weight``, (R, dim) of the dtype of lookups; ``weight_id``, (R,) int64,
    ascending; the optimizer's states by name; ``last_step`` and ``frequency``, (R,)
    int64; and the tensors of the :class:`TableState`. A table with ``Scored()`` has
    ``encoded_score`` in the place of ``frequency``.
    """
    ids = table.ids()
    columns: dict[str, Tensor] = {}
    first = 0
    for part in table.parts():
        end = first + len(part)
        for name, values in part.rows.items():
            if values.dtype is torch.uint8:  # rows of 8 bits
                values = part.weights
            if name not in columns:
                shape = (len(ids), *values.shape[1:])
                columns[name] = values.new_empty(shape)
            columns[name][first:end] = values
        first = end

    columns[frequency_key(table.options)] = columns.pop("frequency")
    return {
        "weight": columns.pop("weight"),
        "weight_id": ids,
        **columns,
        **table.state().tensors(),
    }


def load_table_state(table: Table, state: Mapping[str, Tensor] | None) -> None:
    """Replaces all rows of a table with the rows of ``state``.

    Its handle stays the same.

    A state of :func:`table_state` must have ``weight``. Without ``weight_id``, row i
    becomes the row of id i. Other missing entries start as in a new table. None: the
    table becomes as it was made.

    Old and new rows are both in memory meanwhile. Rows above ``max_rows`` are evicted.
    After an error, the table is unchanged: ValueError, if a tensor has another shape or
    dtype, an id occurs twice, or the table cannot hold the rows, or the errors of
    :meth:`Table.write_rows`.
    """
    checked = None if state is None else _checked(table, state)
    fresh = table.empty_copy()
    try:
        if checked is not None:
            _fill(fresh, checked)
        table.take_rows(fresh)
    finally:
        fresh.close()


def _fill(table: Table, state: Mapping[str, Tensor]) -> None:
    table.set_state(TableState.from_tensors(state))
    if "weight" in state:  # not if other jobs share the rows
        names = ["weight", *state_names(table.optimizer), "last_step"]
        rows = {name: state[name] for name in names}
        rows["frequency"] = state[frequency_key(table.options)]
        part = Part(state["weight_id"], table.columns, rows)
        table.write(part)


def _copy(
    source: Table,
    target: Table,
    converted: Callable[[Part], Part] = lambda part: part,
) -> None:
    target.set_state(source.state())
    if source.tier.shared:
        source.flush()
        return
    for part in source.parts():
        target.write(converted(part))


def _checked(table: Table, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the complete state, on the CPU."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{key} must be a tensor, got {type(value).__name__}")
    weight = _plain_tensor("weight", state["weight"])
    rows = weight.shape[0] if weight.dim() else 0

    of_table = {}
    for key in STATE_KEYS:
        if key in state:
            of_table[key] = _plain_tensor(key, state[key])
    checked = TableState.from_tensors(of_table).tensors()

    floats = {"weight": "element", **state_names(table.optimizer)}
    by_row = [
        *floats,
        "weight_id",
        "last_step",
        frequency_key(table.options),
    ]
    for key in by_row:
        shape: tuple[int, ...] = (rows,)
        if floats.get(key) == "element":
            shape = (rows, table.dim)
        if key in state:
            value = _plain_tensor(key, state[key])
            checked[key] = _checked_column(
                table,
                key,
                value.detach().to("cpu"),
                shape,
                is_float=key in floats,
            )
        elif key == "weight_id":
            checked[key] = torch.arange(rows)
        elif key in floats:
            checked[key] = torch.zeros(shape, dtype=torch.float32)
        else:
            checked[key] = torch.zeros(shape, dtype=torch.int64)
    _check_ids(checked["weight_id"])
    return checked


def _checked_column(
    table: Table,
    key: str,
    value: Tensor,
    shape: tuple[int, ...],
    *,
    is_float: bool,
) -> Tensor:
    """Returns one value for each row, in the dtype in which the table takes it."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{key} must have the shape {shape}, got {tuple(value.shape)}")
    if value.is_floating_point() != is_float:
        kind = "a floating-point" if is_float else "an integer"
        raise ValueError(f"{key} must have {kind} dtype, got {value.dtype}")
    is_stored_weight = key == "weight" and value.dtype is table.dtype
    if is_float and not is_stored_weight:
        value = value.to(torch.float32)
    return value


def _check_ids(ids: Tensor) -> None:
    if ids.dtype is not torch.int64:
        raise ValueError(f"weight_id must be int64, got {ids.dtype}")
    ascends = ids[1:] > ids[:-1]
    if bool(ascends.all()):
        return
    steps = ids.sort().values.diff()
    if bool((steps == 0).any()):
        raise ValueError("weight_id must not contain the same id twice")


def _plain_tensor(key: str, value: Tensor) -> Tensor:
    """Returns a plain tensor for a tensor of a sharded module's state, if all of its
    shards are in this process.
    """
    # Only a ShardedTensor has this attribute. The check does not import its type, which
    # would take long.
    local_shards = getattr(value, "local_shards", None)
    if local_shards is None:
        return value
    rows = torch.empty(0)
    shards = sorted(local_shards(), key=lambda shard: shard.metadata.shard_offsets[0])
    if shards:
        rows = torch.cat([shard.tensor for shard in shards])
    if rows.shape != value.size():
        raise ValueError(
            f"{key} is sharded over several ranks or columns, and this process has only"
            " a part of it"
        )
    return rows
