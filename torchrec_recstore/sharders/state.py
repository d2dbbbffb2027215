"""The rows of RecStore tables in ``state_dict`` and in the state of the fused optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.gather import refused_together
from torchrec_recstore.sharders.kernel import placeholder_parameter
from torchrec_recstore.sharders.layout import (
    PIECE_ROWS,
    LocalShard,
    ShardLayout,
    Value,
    WholeRows,
    gathered_rows,
    owned_positions,
)
from torchrec_recstore.store import Table, insert_all, write_all
from torchrec_recstore.store.snapshot import column_weighted_mean
from torchrec_recstore.table_parameter import GivenCopies


class ShardedRows(ShardedTensor):
    """The rows of a table as a (R, dim) tensor, whose ``gather`` makes a tensor of TorchRec's own tables of it.

    It is pickled, copied and cloned as a ``ShardedTensor``.
    """

    _table: str
    _ids: ShardedTensor
    _env: ShardingEnv

    @classmethod
    def of(cls, table: str, weights: ShardedTensor, ids: ShardedTensor, env: ShardingEnv) -> ShardedRows:
        """``weights`` (R, dim) of the rows of ``ids`` (R,), which becomes one.

        Args:
            table: The name of the table, for errors.
            weights: as its shards hold it.
            ids: the same.
            env: The environment of the sharded module.
        """
        weights.__class__ = cls  # torch 2.13 makes a ShardedTensor and nothing else of shards and their metadata
        assert isinstance(weights, ShardedRows)
        weights._table, weights._ids, weights._env = table, ids, env
        return weights

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Row i of ``out`` becomes the row of id i, zeros where there is none. Collective.

        TorchRec's ``state_dict_gather`` calls it with the weight of an unsharded model.

        Args:
            dst: The rank that gets the rows.
            out: (N, dim). A tensor on the rank ``dst``, None on the others.
            enforce_dtype: Without effect: rows are converted to the dtype of ``out``.
            dtype: Likewise.

        Raises:
            ValueError: ``out`` is missing or of another dim, or there are ids outside [0, N); on every rank, with
                ``out`` as it was.
        """
        mine = dist.get_rank(self._process_group) == dst
        what = f"RecStore table {self._table!r}"
        with refused_together(self._env):
            if mine and (out is None or out.dim() != 2 or out.shape[1] != self.size(1)):
                shape = "None" if out is None else tuple(out.shape)
                raise ValueError(f"{what}: out must have the shape (rows, {self.size(1)}), got {shape}")
        ids = torch.empty(self._ids.size(), dtype=torch.int64) if mine else None
        rows = torch.empty(self.size(), dtype=self.dtype) if mine else None
        if self.size(0):
            self._ids.gather(dst, ids, dtype=torch.int64)
            super().gather(dst, rows, dtype=self.dtype)
        with refused_together(self._env):
            if out is None or ids is None or rows is None:
                return
            outside = int(((ids < 0) | (ids >= len(out))).sum())
            if outside:
                raise ValueError(
                    f"{what} has {outside} ids outside [0, {len(out)}), and row i of the gathered tensor is the row of "
                    "id i: stock_state_dict(model, num_rows, leave_out=True) goes without them; with weight_id, "
                    "local_shards() have all rows"
                )
            with torch.no_grad():
                out.zero_()
                out[ids.to(out.device)] = rows.to(out)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = ShardedTensor._init_from_local_shards_and_global_metadata(
            self.local_shards(), self.metadata(), process_group=self._process_group
        )
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


BOOKKEEPING = ("last_step", "frequency")
WEIGHTS = "state_dict"
"""What gives copies of a table's weights and ids."""
_STATES = "fused_optimizer.state_dict"


class RowState:
    """A table's optimizer state and bookkeeping, as TorchRec's ``KeyedOptimizer`` saves and loads objects (1.8.0).

    The optimizer state of a table with ``R`` rows, ``D`` its dim and ``C`` its column shards: ``id`` (R,) int64,
    ``columns`` (C,) int64 where each column shard begins, ``steps`` (1,) int64 updates so far, the optimizer's states,
    element-wise ones (R, D), row-wise ones (R, C), and what eviction goes by: ``last_step`` and ``frequency`` (R,)
    int64, ``clock`` (1,) int64, the table's steps so far.

    Args:
        name: the table's.
        dim: columns of the whole table.
        shards: this rank's.
        env: of the sharded module.
        optimizer: that the table is updated by.
        options: of the whole table, while those of a shard have its part of ``max_rows``.
        copies: the tensors that the states of the module's tables have given out.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        shards: Sequence[LocalShard],
        env: ShardingEnv,
        optimizer: Optimizer,
        options: TableOptions,
        copies: GivenCopies,
    ) -> None:
        self.name = name
        self.copies = copies
        self.dim = dim
        self.shards = shards
        self.env = env
        self.optimizer = optimizer
        self.options = options
        self.emits_rows = True
        """Whether :meth:`state_dict` and :meth:`load_state_dict` do anything."""
        self._states = state_names(optimizer)

    def state_dict(self) -> dict[str, Value]:
        """A copy of the optimizer state. Collective."""
        if not self.emits_rows:
            return {}
        layout = ShardLayout(self.name, self.shards, self.env)
        ids = [shard.table.ids() for shard in self.shards]
        rows = [self._read(shard.table, i) for shard, i in zip(self.shards, ids, strict=True)]
        rows = [{key: self._given(value) for key, value in of_shard.items()} for of_shard in rows]
        starts = [columns.start for columns in layout.column_shards]
        state: dict[str, Value] = {
            "id": layout.rowed(map(self._given, ids)),
            "columns": self._given(torch.tensor(starts)),
            "steps": self._given(torch.tensor([layout.optimizer_steps])),
            "clock": self._given(torch.tensor([layout.clock])),
            **{key: layout.rowed([r[key] for r in rows]) for key in BOOKKEEPING},
        }
        for key, kind in self._states.items():
            if kind == "element":
                state[key] = layout.sharded([r[key] for r in rows], lambda columns: columns, layout.dim)
            else:
                parts = [r[key].unsqueeze(1) for r in rows]
                state[key] = layout.sharded(parts, lambda c: _position(starts.index(c.start)), len(starts))
        return state

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        """Gives the state to the rows that the table holds; all or nothing. Collective.

        Between different column splits a row-wise state becomes the column-weighted mean of those that it covers.
        State without bookkeeping, of an earlier version, leaves it as it is.

        Raises:
            ValueError: a key is missing, a shape does not fit, or an id has no row: load the model's state first.
        """
        if not self.emits_rows:
            return
        self.check_keys(state)
        # On every rank, also those without a shard.
        state = {k: gathered_rows(v, self.env) if k in ("id", *BOOKKEEPING) else v for k, v in state.items()}
        with refused_together(self.env):
            parts = [self.rows_of(shard, state) for shard in self.shards]
        for shard, (ids, rows) in zip(self.shards, parts, strict=True):
            set_clocks(shard.table, state)  # first: by it rows are told that leave for these
            write_all(shard.table, ids, rows)
        self.copies.forget(self.name, _STATES)

    def forget_copies(self) -> None:
        """What ``state_dict`` has given of the table is no longer watched: all of its rows have been replaced."""
        for what in (WEIGHTS, _STATES):
            self.copies.forget(self.name, what)

    def check_keys(self, state: Mapping[str, object]) -> None:
        """Refuses optimizer state that lacks something.

        Raises:
            ValueError: a key is missing.
        """
        missing = [key for key in ("id", "columns", "steps", *self._states) if key not in state]
        if missing:
            raise ValueError(f"RecStore table {self.name!r}: the optimizer state has no {', '.join(missing)}")

    def rows_of(self, shard: LocalShard, state: Mapping[str, Value]) -> tuple[Tensor, dict[str, Tensor]]:
        """A shard's ids among those of ``state``, and its rows with the state in them, for ``Table.write_rows``.

        Args:
            shard: of this table.
            state: as :meth:`state_dict` gives it, for all rows of the table or some; what is (R,) plain.

        Raises:
            ValueError: a shape does not fit, or an id has no row.
        """
        whole_ids = torch.as_tensor(state["id"])
        positions = owned_positions(shard, whole_ids)
        ids = whole_ids[positions]
        rows = shard.table.read_rows(ids)
        for key in BOOKKEEPING:
            if key in state:
                if state[key].shape != whole_ids.shape:
                    raise ValueError(
                        f"RecStore table {self.name!r}: {key} is of shape {tuple(state[key].shape)}, "
                        f"there are {len(whole_ids)} ids"
                    )
                rows[key] = state[key][positions]
        starts = torch.as_tensor(state["columns"]).tolist()
        for key, kind in self._states.items():
            source = WholeRows(f"RecStore table {self.name!r}: {key}", state[key], whole_ids)
            width = self.dim if kind == "element" else len(starts)
            if source.shape[1] != width:
                raise ValueError(f"RecStore table {self.name!r}: {key} is of shape {source.shape}, not {width} columns")
            rows[key] = self._state_of(shard, source, kind, starts)
        return ids, rows

    def _given(self, copy: Tensor) -> Tensor:
        return self.copies.give(self.name, _STATES, copy)

    def _read(self, table: Table, ids: Tensor) -> dict[str, Tensor]:
        """Optimizer state and bookkeeping of ``ids``, without their weights."""
        parts: dict[str, list[Tensor]] = {key: [] for key in (*self._states, *BOOKKEEPING)}
        for begin in range(0, max(1, len(ids)), PIECE_ROWS):
            rows = table.read_rows(ids[begin : begin + PIECE_ROWS])
            for key, values in parts.items():
                values.append(rows[key])
        return {key: torch.cat(values) for key, values in parts.items()}

    def _state_of(self, shard: LocalShard, source: WholeRows, kind: str, starts: Sequence[int]) -> Tensor:
        columns = shard.table.columns
        if kind == "element":
            return source.rows(shard, columns)
        if not source.is_sharded:
            return _joined(source.rows(shard, range(len(starts))), starts, shard.table)
        # Of a column split that is not the model's there is no such position, which is refused.
        position = starts.index(columns.start) if columns.start in starts else len(starts)
        return source.rows(shard, _position(position)).squeeze(1)


def set_clocks(table: Table, state: Mapping[str, Value]) -> None:
    """Sets what a shard counts: its updates and, where an optimizer state has them, its steps."""
    table.optimizer_steps = int(torch.as_tensor(state["steps"])[0])
    if "clock" in state:
        table.steps = int(torch.as_tensor(state["clock"])[0])


def export_weights(
    name: str, shards: Sequence[LocalShard], env: ShardingEnv, copies: GivenCopies
) -> tuple[ShardedRows, ShardedTensor]:
    """``weight`` (R, dim) of its dtype and ``weight_id`` (R,) int64 of a table, as ``copies``. Collective."""
    layout = ShardLayout(name, shards, env)
    ids = [shard.table.ids() for shard in shards]
    weights = [shard.table.lookup(i) for shard, i in zip(shards, ids, strict=True)]
    given_weights, given_ids = ([copies.give(name, WEIGHTS, part) for part in parts] for parts in (weights, ids))
    whole_ids = layout.rowed(given_ids)
    whole = layout.sharded(given_weights, lambda columns: columns, layout.dim, layout.dtype)
    return ShardedRows.of(name, whole, whole_ids, env), whole_ids


def checked_weights(name: str, shards: Sequence[LocalShard], weight: Value, ids: Tensor | None) -> WholeRows:
    """A table's weights for :func:`replace_rows`.

    Args:
        name: the table's.
        shards: this rank's.
        weight: (R, dim) of any floating-point dtype, rounded to the table's.
        ids: (R,) int64; None: row i is id i, as in TorchRec's own tables.

    Raises:
        ValueError: a shape or dtype that does not fit the table, or a value that is sharded otherwise; or the rows are
            in a shared cold store, and not this model's to replace.
    """
    check_not_shared(shards)
    source = WholeRows(f"RecStore table {name!r}: weight", weight, ids)
    for shard in shards:
        if shard.table.dim != source.shape[1]:
            raise ValueError(
                f"RecStore table {name!r}: weight is of shape {source.shape}, the table's dim is {shard.table.dim}"
            )
        source.check(shard, shard.table.columns)
    return source


def check_not_shared(shards: Sequence[LocalShard]) -> None:
    """Refuses tables for :func:`replace_rows`.

    Raises:
        ValueError: the rows are in a shared cold store.
    """
    for shard in shards:
        shard.table.check_unshared("others' rows would be replaced")


def replace_rows(shards: Sequence[LocalShard], source: WholeRows) -> None:
    """Replaces the rows of a table's shards by what :func:`checked_weights` has passed; optimizer state starts anew."""
    for shard in shards:
        rows = source.rows(shard, shard.table.columns)
        shard.table.remove(shard.table.ids())
        insert_all(shard.table, source.ids[owned_positions(shard, source.ids)], rows)
        shard.table.optimizer_steps = 0


def _position(index: int) -> range:
    return range(index, index + 1)


def _joined(values: Tensor, starts: Sequence[int], table: Table) -> Tensor:
    """(R,) of (R, C): the mean of a row-wise state over the column shards that cover the table's columns."""
    ends = [*starts[1:], table.dim]
    columns = table.columns
    overlaps = [
        max(0, min(end, columns.stop) - max(start, columns.start)) for start, end in zip(starts, ends, strict=True)
    ]
    covering = [i for i, overlap in enumerate(overlaps) if overlap]
    return column_weighted_mean([values[:, i].contiguous() for i in covering], [overlaps[i] for i in covering])


class ModuleOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The states of a module's RecStore tables; learning rates stay with the kernels' own handles."""

    def step(self, closure: Any = None) -> None:
        """Nothing: backward has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: there are no gradient tensors."""


class ModuleState:
    """Rows of a sharded module's RecStore tables in its ``state_dict``, and their states in its fused optimizer.

    Args:
        module: the sharded module.
        container: its attribute under which TorchRec names tables: ``embedding_bags`` or ``embeddings``.
        tables: every RecStore table of the plan by its name, on every rank, in the same order.
        env: of the module.
        copies: the tensors that the tables' states have given out.
    """

    def __init__(
        self,
        module: nn.Module,
        container: str,
        tables: Mapping[str, RowState],
        env: ShardingEnv,
        copies: GivenCopies,
    ) -> None:
        self.copies = copies
        self.tables = tables
        self.shards: dict[str, Sequence[LocalShard]] = {name: table.shards for name, table in tables.items()}
        """This rank's shards of each table."""
        self.container = container
        self.env = env
        self.marks: dict[str, dict[str, list[int]]] = {}
        """For each checkpoint that was saved or loaded, by its checksum, and each table: its shards' marks."""
        module._register_state_dict_hook(self._add_rows)  # type: ignore[no-untyped-call]

    @property
    def emits_rows(self) -> bool:
        """Whether ``state_dict`` of the module and its fused optimizer have the rows, and loading it replaces them."""
        return all(table.emits_rows for table in self.tables.values())

    @emits_rows.setter
    def emits_rows(self, emits: bool) -> None:
        for table in self.tables.values():
            table.emits_rows = emits

    def load(self, state_dict: dict[str, Value], prefix: str) -> None:
        """Takes the rows out of ``state_dict`` into the tables, and leaves what TorchRec's loading expects. Collective.

        Raises:
            ValueError: see :func:`checked_weights`; no table of the module has changed.
        """
        keys = {name: f"{prefix}{self.container}.{name}.weight" for name in self.shards}
        if self.emits_rows:
            found = {name: key for name, key in keys.items() if key in state_dict}
            ids = {name: state_dict.pop(f"{key}_id", None) for name, key in found.items()}
            whole_ids = {name: None if i is None else gathered_rows(i, self.env) for name, i in ids.items()}
            with refused_together(self.env):
                sources = {
                    name: checked_weights(name, self.shards[name], state_dict[key], whole_ids[name])
                    for name, key in found.items()
                }
            for name, source in sources.items():
                replace_rows(self.shards[name], source)
                self.copies.forget(name, WEIGHTS)
        for name, key in keys.items():
            if key in state_dict or not self.emits_rows:
                state_dict[key] = placeholder_parameter(name, self.tables[name].dim)

    def optimizer_with_states(self, optimizer: CombinedOptimizer) -> CombinedOptimizer:
        """The fused optimizer, with every table's state on every rank, since saving it is collective.

        Args:
            optimizer: the module's, which knows the tables of this rank.
        """
        # Saving is collective, table by table: each rank must know all of them, in the same order.
        parameters, states = {}, {}
        for name, state in self.tables.items():
            key = f"{self.container}.{name}.weight"
            parameters[key] = placeholder_parameter(name, state.dim)
            for _, handle in optimizer.optimizers:
                if key in handle.params:
                    parameters[key] = handle.params[key]
                    handle.params = {k: p for k, p in handle.params.items() if k != key}
            states[parameters[key]] = {"rows": state}
        return CombinedOptimizer([*optimizer.optimizers, ("", ModuleOptimizer(parameters, states, []))])

    def _add_rows(self, module: nn.Module, state_dict: dict[str, Value], prefix: str, metadata: object) -> None:
        if not self.emits_rows:
            return
        with refused_together(self.env):
            self.copies.check()
        for name, shards in self.shards.items():
            key = f"{prefix}{self.container}.{name}.weight"
            state_dict[key], state_dict[f"{key}_id"] = export_weights(name, shards, self.env, self.copies)
