"""A table that a module owns: its rows as tensors, out of it and into it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore.optim import state_names
from torchrec_recstore.options import is_shared
from torchrec_recstore.store import Table, write_all

_PIECE_ROWS = 1 << 16  # that are read or written at once, so that little lies in memory twice


class OwnedTable:
    """Carries a :class:`Table` through ``deepcopy`` and pickling, with all its rows, cold ones too.

    Rows of a shared cold store are the copy's as well: what has changed in memory goes there, and none is copied.

    Args:
        arguments: of the :class:`Table` that is made.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self.table = Table(**arguments)

    def with_optimizer(self, arguments: Mapping[str, Any]) -> OwnedTable:
        """The same rows in a table of another optimizer; their state stays where that is of the same type.

        One of another type is for rows that have not been updated.
        """
        old = self.table
        keeps_state = type(old.optimizer) is type(arguments["optimizer"])
        if _shares_rows(old) and not keeps_state:
            raise ValueError(
                f"table {old.name!r}: its rows are shared and have the state of {old.optimizer}: "
                "give the module its optimizer when it is made"
            )
        fresh = OwnedTable(arguments)
        new = fresh.table
        kinds = state_names(new.optimizer)

        def converted(rows: dict[str, Tensor]) -> dict[str, Tensor]:
            weight = rows["weight"]
            zeros = {
                name: torch.zeros(weight.shape if kind == "element" else weight.shape[:1])
                for name, kind in kinds.items()
            }
            kept = {name: rows[name] for name in ("weight", "last_step", "frequency")}
            return {**kept, **({name: rows.get(name, zeros[name]) for name in zeros} if keeps_state else zeros)}

        _copy(old, new, converted)
        return fresh

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedTable:
        fresh = OwnedTable(self._arguments)
        _copy(self.table, fresh.table)
        return fresh

    def __reduce__(self) -> tuple[Any, ...]:
        if _shares_rows(self.table):
            self.table.flush()
            state = _clocks(self.table)
        else:
            state = table_state(self.table)
        process = get_spawning_popen()
        if process is not None:
            # What is pickled for a new process goes there as shared memory, which must live until it has started.
            weakref.finalize(process, state.clear).atexit = False
        return _restored, (self._arguments, state)


def _restored(arguments: Mapping[str, Any], state: Mapping[str, Tensor]) -> OwnedTable:
    owned = OwnedTable(arguments)
    if _shares_rows(owned.table):
        _set_clocks(owned.table, state)
    else:
        _fill(owned.table, state)
    return owned


def state_keys(table: Table) -> list[str]:
    """The keys of :func:`table_state`."""
    keys = ["weight", "weight_id", *state_names(table.optimizer), "last_step", "frequency", "steps", "clock"]
    return [*keys, "sightings", "sightings_taken"] if _counts_sightings(table) else keys


def table_state(table: Table) -> dict[str, Tensor]:
    """All that there is of a table's ``R`` rows, as copies.

    Returns:
        ``weight`` (R, dim) of the table's dtype and ``weight_id`` (R,) int64, ascending; the optimizer's states under
        their names (:func:`torchrec_recstore.optim.state_names`), ``last_step`` and ``frequency`` (R,) int64;
        ``steps``, the updates so far, and ``clock``, the training lookups so far, () int64; with admission what it has
        counted: ``sightings`` (2, 4, N) uint8 and ``sightings_taken`` () int64.
    """
    ids = table.ids()
    whole: dict[str, Tensor] = {}
    for part in _pieces(len(ids)):
        for name, values in table.read_rows(ids[part]).items():
            if name not in whole:
                whole[name] = values.new_empty((len(ids), *values.shape[1:]))
            whole[name][part] = values
    state = {**whole, "weight_id": ids, **_clocks(table)}
    return {key: state[key] for key in state_keys(table)}


def load_table_state(table: Table, state: Mapping[str, Tensor]) -> None:
    """Gives a table the rows of ``state`` and no others; all or nothing.

    While they are written the old rows are still there, beside the new ones. Those that a table with ``max_rows`` has
    no room for go to its cold store; without one it keeps those that its eviction would keep.

    Args:
        table: keeps its handle.
        state: as :func:`table_state` gives it; at least ``weight``. Without ``weight_id`` row i becomes id i; other
            things that are not there start as in a new table.

    Raises:
        ValueError: a tensor of another shape or dtype, an id twice, or more rows than the table takes.
        MemoryError: no room.
        ColdStoreError: the cold store fails.
    """
    checked = _checked(table, state)
    fresh = table.empty_copy()
    try:
        _fill(fresh, checked)
        table.exchange_rows(fresh)
    finally:
        fresh.close()


def forget_rows(table: Table) -> None:
    """Leaves a table as it was when it was made, its handle too."""
    fresh = table.empty_copy()
    try:
        table.exchange_rows(fresh)
    finally:
        fresh.close()


def _fill(table: Table, state: Mapping[str, Tensor]) -> None:
    _set_clocks(table, state)  # first: by the clock eviction tells how old rows are
    ids = state["weight_id"]
    names = ["weight", *state_names(table.optimizer), "last_step", "frequency"]
    for part in _pieces(len(ids)):
        write_all(table, ids[part], {name: state[name][part] for name in names})


def _shares_rows(table: Table) -> bool:
    return is_shared(table.options.cold_store)


def _clocks(table: Table) -> dict[str, Tensor]:
    """What a table's state has besides rows."""
    state = {"steps": torch.tensor(table.optimizer_steps), "clock": torch.tensor(table.steps)}
    if _counts_sightings(table):
        cells, taken = table.sightings()
        state["sightings"], state["sightings_taken"] = cells, torch.tensor(taken)
    return state


def _set_clocks(table: Table, state: Mapping[str, Tensor]) -> None:
    table.steps, table.optimizer_steps = int(state["clock"]), int(state["steps"])
    if "sightings" in state and _counts_sightings(table):
        table.set_sightings(state["sightings"], int(state["sightings_taken"]))


def _copy(
    source: Table, target: Table, converted: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda rows: rows
) -> None:
    _set_clocks(target, _clocks(source))
    if _shares_rows(source):
        source.flush()
        return
    ids = source.ids()
    for part in _pieces(len(ids)):
        write_all(target, ids[part], converted(source.read_rows(ids[part])))


def _checked(table: Table, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole state, on the CPU, of a state that may lack things."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{key} must be a tensor, got {type(value).__name__}")
    weight = _whole("weight", state["weight"])
    rows = weight.shape[0] if weight.dim() else 0
    kinds = state_names(table.optimizer)
    shapes: dict[str, tuple[int, ...]] = {"weight": (rows, table.dim), "steps": (), "clock": ()}
    shapes |= dict.fromkeys(("weight_id", "last_step", "frequency"), (rows,))
    shapes |= {name: (rows, table.dim) if kind == "element" else (rows,) for name, kind in kinds.items()}
    if _counts_sightings(table):
        shapes |= {"sightings": tuple(table.sightings()[0].shape), "sightings_taken": ()}
    floats = {"weight", *kinds}
    whole = {}
    for key, shape in shapes.items():
        if key not in state:
            dtype = torch.float32 if key in floats else torch.uint8 if key == "sightings" else torch.int64
            whole[key] = torch.arange(rows) if key == "weight_id" else torch.zeros(shape, dtype=dtype)
            continue
        value = _whole(key, state[key]).detach().to("cpu")
        if tuple(value.shape) != shape:
            raise ValueError(f"{key} must have the shape {shape}, got {tuple(value.shape)}")
        if value.is_floating_point() != (key in floats):
            raise ValueError(f"{key} must not be of {value.dtype}")
        if key in floats:
            value = value.to(table.dtype if key == "weight" and value.dtype is table.dtype else torch.float32)
        whole[key] = value
    ids = whole["weight_id"]
    if ids.dtype is not torch.int64:
        raise ValueError(f"weight_id must be int64, got {ids.dtype}")
    if not bool((ids[1:] > ids[:-1]).all()) and bool((ids.sort().values.diff() == 0).any()):
        raise ValueError("weight_id must not have an id twice")
    return whole


def _whole(key: str, value: Tensor) -> Tensor:
    """A tensor of a sharded module's state that lies whole in this process, as a plain one."""
    local_shards = getattr(value, "local_shards", None)  # a ShardedTensor has it, whose type takes long to import
    if local_shards is None:
        return value
    shards = sorted(local_shards(), key=lambda shard: shard.metadata.shard_offsets[0])
    rows = torch.cat([shard.tensor for shard in shards]) if shards else torch.empty(0)
    if rows.shape != value.size():
        raise ValueError(f"{key} is sharded over several ranks or columns, of which this process has a part alone")
    return rows


def _counts_sightings(table: Table) -> bool:
    return table.options.admission is not None and table.options.admission.count > 1


def _pieces(rows: int) -> Iterator[slice]:
    return (slice(begin, begin + _PIECE_ROWS) for begin in range(0, max(1, rows), _PIECE_ROWS))
