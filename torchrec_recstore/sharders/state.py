"""The state of sharded RecStore tables: rows in and out of ``state_dict`` and the fused optimizer's state.

A table of ``R`` rows over all ranks is emitted as ``ShardedTensor`` s: ``weight`` (R, dim) and ``weight_id`` (R,), the
raw id of each row; shard after shard in the order of the ranks, ids ascending within a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.sharders.kernel import placeholder_parameter
from torchrec_recstore.store import Table

Value = Tensor | ShardedTensor
"""A whole table's tensor: plain, the same on every rank, or sharded as the model is."""


@dataclass(frozen=True)
class LocalShard:
    """A shard on this rank, and which ids belong to it."""

    table: Table
    routing: BlockRouting | None

    def owned(self, ids: Tensor) -> Tensor:
        """(N,) bool: whether this shard is the one for each of ``ids``, (N,) int64."""
        if self.routing is None:
            return torch.ones_like(ids, dtype=torch.bool)
        return self.routing.owned(ids)


@dataclass(frozen=True)
class _Piece:
    """Where a shard lies in the whole table."""

    rank: int
    rows: range
    columns: range


class _Layout:
    """How a table's rows are spread at this moment. Making one is collective."""

    def __init__(self, name: str, shards: Sequence[LocalShard], env: ShardingEnv) -> None:
        local = [(len(t), t.columns, t.optimizer_steps, t.dtype) for t in (shard.table for shard in shards)]
        gathered = all_gathered(local, env)
        self.env = env
        self.dim = 1 + max(columns[-1] for pieces in gathered for _, columns, *_ in pieces)
        self.optimizer_steps = max(steps for pieces in gathered for _, _, steps, _ in pieces)
        ends: dict[range, int] = {}
        self.pieces: list[_Piece] = []
        for rank, pieces in enumerate(gathered):
            for rows, columns, _, dtype in pieces:
                self.dtype = dtype  # of the weights; the same in every shard
                begin = ends.get(columns, 0)
                ends[columns] = begin + rows
                self.pieces.append(_Piece(rank, range(begin, begin + rows), columns))
        if len(set(ends.values())) > 1:
            raise RuntimeError(f"RecStore table {name!r}: its column shards hold different numbers of rows: {ends}")
        self.rows = next(iter(ends.values()))
        self.column_shards = sorted(ends, key=lambda columns: columns.start)

    def of_rank(self, rank: int) -> list[_Piece]:
        """This rank's pieces, in the order of its shards."""
        return [piece for piece in self.pieces if piece.rank == rank]

    def sharded(
        self,
        tensors: Iterable[Tensor],
        width: Callable[[range], range] | None,
        size: int | None,
        dtype: torch.dtype = torch.float32,
    ) -> ShardedTensor:
        """The whole tensor from this rank's parts, one a piece that it has.

        Args:
            tensors: a part for each of this rank's pieces, (rows,) or (rows, width).
            width: the columns of the whole that a piece's columns stand for; None for one-dimensional tensors, which
                the first column shard alone holds.
            size: columns of the whole.
            dtype: of the tensor.
        """

        def metadata(piece: _Piece) -> ShardMetadata:
            offsets, sizes = [piece.rows.start], [len(piece.rows)]
            if width is not None:
                part = width(piece.columns)
                offsets, sizes = [*offsets, part.start], [*sizes, len(part)]
            return ShardMetadata(offsets, sizes, placement=f"rank:{piece.rank}/cpu")

        holders = [p for p in self.pieces if width is not None or p.columns == self.column_shards[0]]
        # torch refuses a ShardedTensor without shards, and shards of no rows beside others (torch 2.13).
        kept = [p for p in holders if len(p.rows)] or holders[: len(self.column_shards) if width is not None else 1]
        mine = list(zip(self.of_rank(self._rank()), tensors, strict=True))
        local = [TensorShard(tensor, metadata(piece)) for piece, tensor in mine if piece in kept]
        whole = [self.rows] if size is None else [self.rows, size]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local,
            ShardedTensorMetadata(
                shards_metadata=[metadata(piece) for piece in kept],
                size=torch.Size(whole),
                tensor_properties=TensorProperties(dtype=dtype),
            ),
            process_group=self.env.process_group,
        )

    def _rank(self) -> int:
        group = self.env.process_group
        return 0 if group is None else dist.get_rank(group)


def export_weights(name: str, shards: Sequence[LocalShard], env: ShardingEnv) -> tuple[ShardedTensor, ShardedTensor]:
    """``weight`` (R, dim) of its dtype and ``weight_id`` (R,) int64 of a table, as copies. Collective."""
    layout = _Layout(name, shards, env)
    ids = [shard.table.ids() for shard in shards]
    weights = [shard.table.lookup(i) for shard, i in zip(shards, ids, strict=True)]
    weight = layout.sharded(weights, lambda columns: columns, layout.dim, layout.dtype)
    return weight, layout.sharded(ids, None, None, torch.int64)


def import_weights(name: str, shards: Sequence[LocalShard], env: ShardingEnv, weight: Value, ids: Value | None) -> None:
    """Replaces a table's rows; their optimizer state starts anew. Collective.

    Args:
        name: the table's.
        shards: this rank's.
        env: of the sharded module.
        weight: (R, dim) of any floating-point dtype, rounded to the table's.
        ids: (R,) int64; None: row i is id i, as in TorchRec's own tables.

    Raises:
        ValueError: a shape or dtype that does not fit the table, or a value that is sharded otherwise; nothing changed.
    """
    source = _Source(f"RecStore table {name!r}: weight", weight, None if ids is None else _whole_ids(ids, env))
    with refused_together(env):
        for dim in {shard.table.dim for shard in shards} - {source.shape[1]}:
            raise ValueError(f"RecStore table {name!r}: weight is of shape {source.shape}, the table's dim is {dim}")
        parts = [source.of(shard, shard.table.columns) for shard in shards]
    for shard, (part_ids, rows) in zip(shards, parts, strict=True):
        shard.table.remove(shard.table.ids())
        shard.table.insert(part_ids, rows)


class _Source:
    """A whole table's tensor and the ids of its rows, to be cut for any shard."""

    def __init__(self, what: str, value: Value, ids: Tensor | None) -> None:
        self._what = what
        self._value = value
        self.shape = tuple(value.size())
        if len(self.shape) != 2:
            raise ValueError(f"{what} must have two dimensions, got the shape {self.shape}")
        self._ids = torch.arange(self.shape[0]) if ids is None else ids
        if self._ids.shape != self.shape[:1] or self._ids.dtype is not torch.int64:
            raise ValueError(
                f"{what} has {self.shape[0]} rows, its ids are {self._ids.dtype} of shape {tuple(self._ids.shape)}"
            )

    def of(self, shard: LocalShard, columns: range) -> tuple[Tensor, Tensor]:
        """The ids that belong to a shard, and ``columns`` of their rows, float32."""
        if not isinstance(self._value, ShardedTensor):
            owned = shard.owned(self._ids).nonzero().squeeze(1)
            return self._ids[owned], self._value[owned, columns.start : columns.stop].to(torch.float32)
        ids, rows = [], []
        for part in self._value.local_shards():
            (first, column), (n, width) = part.metadata.shard_offsets, part.metadata.shard_sizes
            if (column, width) == (columns.start, len(columns)):
                ids.append(self._ids[first : first + n])
                rows.append(part.tensor)
        mine = torch.cat([self._ids.new_empty(0), *ids])
        # Else rows that belong here lie with another rank, or are cut into other columns.
        if not torch.equal(mine.sort().values, self._ids[shard.owned(self._ids)].sort().values):
            raise ValueError(
                f"{self._what} is sharded otherwise than the model: load_distributed_checkpoint can read it"
            )
        return mine, torch.cat([torch.empty(0, len(columns)), *rows]).to(torch.float32)


def _whole_ids(ids: Value, env: ShardingEnv) -> Tensor:
    if not isinstance(ids, ShardedTensor):
        return ids
    local = [(part.metadata.shard_offsets[0], part.tensor) for part in ids.local_shards()]
    parts = sorted((part for parts in all_gathered(local, env) for part in parts), key=lambda part: part[0])
    return torch.cat([torch.empty(0, dtype=torch.int64), *(tensor for _, tensor in parts)])


class TableState:
    """A table's optimizer state as TorchRec's ``KeyedOptimizer`` saves and loads objects (torchrec 1.8.0).

    The state of a table with ``R`` rows, ``D`` its dim and ``C`` its column shards: ``id`` (R,) int64, ``columns`` (C,)
    int64 where each column shard begins, ``steps`` (1,) int64 updates so far, and the optimizer's states, element-wise
    ones (R, D), row-wise ones (R, C).

    Args:
        name: the table's.
        shards: this rank's.
        env: of the sharded module.
        states: of the table's optimizer, see :func:`torchrec_recstore.optim.state_names`.
    """

    def __init__(self, name: str, shards: Sequence[LocalShard], env: ShardingEnv, states: Mapping[str, str]) -> None:
        self._name = name
        self._shards = shards
        self.env = env
        self._states = states

    def state_dict(self) -> dict[str, Value]:
        """A copy of the state. Collective."""
        layout = _Layout(self._name, self._shards, self.env)
        ids = [shard.table.ids() for shard in self._shards]
        rows = [shard.table.read_rows(i) for shard, i in zip(self._shards, ids, strict=True)]
        starts = [columns.start for columns in layout.column_shards]
        state: dict[str, Value] = {
            "id": layout.sharded(ids, None, None, torch.int64),
            "columns": torch.tensor(starts),
            "steps": torch.tensor([layout.optimizer_steps]),
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

        Raises:
            ValueError: a key is missing, a shape does not fit, or an id has no row: load the model's state first.
        """
        missing = [key for key in ("id", "columns", "steps", *self._states) if key not in state]
        if missing:
            raise ValueError(f"RecStore table {self._name!r}: the optimizer state has no {', '.join(missing)}")
        starts = torch.as_tensor(state["columns"]).tolist()
        whole_ids = _whole_ids(state["id"], self.env)  # on every rank, also those without a shard
        steps = int(torch.as_tensor(state["steps"])[0])
        with refused_together(self.env):
            parts = [self._rows_of(shard, state, whole_ids, starts) for shard in self._shards]
        for shard, (ids, rows) in zip(self._shards, parts, strict=True):
            shard.table.write_rows(ids, rows)
            shard.table.optimizer_steps = steps

    def _rows_of(
        self, shard: LocalShard, state: Mapping[str, Value], whole_ids: Tensor, starts: Sequence[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A shard's ids and its rows with the state in them."""
        columns = shard.table.columns
        states: dict[str, Tensor] = {}
        ids = torch.empty(0, dtype=torch.int64)
        for key, kind in self._states.items():
            source = _Source(f"RecStore table {self._name!r}: {key}", state[key], whole_ids)
            if kind == "element":
                ids, states[key] = source.of(shard, columns)
            elif isinstance(state[key], ShardedTensor):
                ids, part = source.of(shard, _position(starts.index(columns.start)))
                states[key] = part.squeeze(1)
            else:
                ids, part = source.of(shard, range(len(starts)))
                states[key] = _joined(part, starts, shard.table)
        return ids, {**shard.table.read_rows(ids), **states}


class TableStates(FusedOptimizer):  # type: ignore[misc]
    """The states of a module's RecStore tables; learning rates stay with the kernels' own handles."""

    def step(self, closure: Any = None) -> None:
        """Nothing: backward has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: there are no gradient tensors."""


def table_states(
    name: str, shards: Sequence[LocalShard], env: ShardingEnv, optimizer: Optimizer
) -> dict[str, TableState]:
    """What a fused optimizer holds for a table: nothing where the optimizer has no state."""
    states = state_names(optimizer)
    return {"rows": TableState(name, shards, env, states)} if states else {}


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
    if len(covering) == 1:
        return values[:, covering[0]].contiguous()  # a copy, bit for bit
    weights = torch.tensor(overlaps, dtype=torch.float64) / len(columns)
    return (values.double() @ weights).float()


class ModuleState:
    """Rows of a sharded module's RecStore tables in its ``state_dict``, and their states in its fused optimizer.

    Args:
        module: the sharded module.
        container: its attribute under which TorchRec names tables: ``embedding_bags`` or ``embeddings``.
        shards: this rank's shards by table name; every RecStore table of the plan has an entry, on every rank.
        env: of the module.
    """

    def __init__(
        self, module: nn.Module, container: str, shards: Mapping[str, Sequence[LocalShard]], env: ShardingEnv
    ) -> None:
        self.shards = shards
        self.container = container
        self.env = env
        self.emits_rows = True
        """Whether the module's ``state_dict`` has the rows, which are copies."""
        self.marks: dict[str, dict[str, list[int]]] = {}
        """For each checkpoint that was saved or loaded, by its checksum, and each table: its shards' marks."""
        module._register_state_dict_hook(self._add_rows)  # type: ignore[no-untyped-call]

    def load(self, state_dict: dict[str, Value], prefix: str) -> None:
        """Takes the rows out of ``state_dict`` into the tables, and leaves what TorchRec's loading expects. Collective.

        Raises:
            ValueError: see :func:`import_weights`.
        """
        for name, shards in self.shards.items():
            key = f"{prefix}{self.container}.{name}.weight"
            ids = state_dict.pop(f"{key}_id", None)
            if key in state_dict:
                import_weights(name, shards, self.env, state_dict[key], ids)
                state_dict[key] = torch.empty(0)

    def optimizer_with_states(
        self, optimizer: CombinedOptimizer, optimizers: Mapping[str, Optimizer]
    ) -> CombinedOptimizer:
        """The fused optimizer, with every table's state on every rank, since saving it is collective.

        Args:
            optimizer: the module's, which knows the tables of this rank.
            optimizers: what each table is updated by.
        """
        # Saving is collective, table by table: each rank must know all of them, in the same order.
        parameters, states = {}, {}
        for name, shards in self.shards.items():
            of_table = table_states(name, shards, self.env, optimizers[name])
            if of_table:
                key = f"{self.container}.{name}.weight"
                parameters[key] = placeholder_parameter()
                for _, handle in optimizer.optimizers:
                    if key in handle.params:
                        parameters[key] = handle.params[key]
                        handle.params = {k: p for k, p in handle.params.items() if k != key}
                states[parameters[key]] = of_table
        return CombinedOptimizer([*optimizer.optimizers, ("", TableStates(parameters, states, []))])

    def _add_rows(self, module: nn.Module, state_dict: dict[str, Value], prefix: str, metadata: object) -> None:
        if not self.emits_rows:
            return
        for name, shards in self.shards.items():
            key = f"{prefix}{self.container}.{name}.weight"
            state_dict[key], state_dict[f"{key}_id"] = export_weights(name, shards, self.env)
