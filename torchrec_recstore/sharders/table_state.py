"""The state of a RecStore table: its rows, their optimizer state and bookkeeping, out of its shards and into them.

A table of ``R`` rows over all ranks is emitted as ``ShardedTensor`` s: ``weight`` (R, dim) and ``weight_id`` (R,), the
raw id of each row; shard after shard in the order of the ranks, ids ascending within a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.given_copies import GivenCopies
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.options import TableOptions
from torchrec_recstore.row_wise_states import column_weighted_mean
from torchrec_recstore.sharders.gather import refused_together
from torchrec_recstore.sharders.local_shard import LocalShard
from torchrec_recstore.sharders.table_weights import TableWeights
from torchrec_recstore.sharders.whole_tensors import (
    PIECE_ROWS,
    TableLayout,
    TableSource,
    Value,
    gathered_rows,
    owned_positions,
)
from torchrec_recstore.store import Table, insert_all, write_all

BOOKKEEPING = ("last_step", "frequency")
WEIGHTS = "state_dict"
"""What gives copies of a table's weights and ids."""
_STATES = "fused_optimizer.state_dict"


class TableState:
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
        layout = TableLayout(self.name, self.shards, self.env)
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
            source = TableSource(f"RecStore table {self.name!r}: {key}", state[key], whole_ids)
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

    def _state_of(self, shard: LocalShard, source: TableSource, kind: str, starts: Sequence[int]) -> Tensor:
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
) -> tuple[TableWeights, ShardedTensor]:
    """``weight`` (R, dim) of its dtype and ``weight_id`` (R,) int64 of a table, as ``copies``. Collective."""
    layout = TableLayout(name, shards, env)
    ids = [shard.table.ids() for shard in shards]
    weights = [shard.table.lookup(i) for shard, i in zip(shards, ids, strict=True)]
    given_weights, given_ids = ([copies.give(name, WEIGHTS, part) for part in parts] for parts in (weights, ids))
    whole_ids = layout.rowed(given_ids)
    whole = layout.sharded(given_weights, lambda columns: columns, layout.dim, layout.dtype)
    return TableWeights.of(name, whole, whole_ids, env), whole_ids


def checked_weights(name: str, shards: Sequence[LocalShard], weight: Value, ids: Tensor | None) -> TableSource:
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
    source = TableSource(f"RecStore table {name!r}: weight", weight, ids)
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


def replace_rows(shards: Sequence[LocalShard], source: TableSource) -> None:
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
