"""How a table's rows are spread over shards: whole tensors are assembled from shards and cut into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.sharders.gather import all_gathered
from torchrec_recstore.store import Table


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


Value = Tensor | ShardedTensor
"""A whole table's tensor: plain, the same on every rank, or sharded as the model is."""

PIECE_ROWS = 1 << 18
"""No piece of a sharded tensor has more rows: ``torch.distributed.checkpoint`` can read a piece only as a whole, so
that this bounds what a load takes beside the tables."""


@dataclass(frozen=True)
class _Piece:
    """Where a shard, or a part of one, lies in the whole table."""

    rank: int
    rows: range
    columns: range

    def cut(self) -> Iterator[_Piece]:
        """Pieces of bounded size; the piece itself where it has no rows."""
        for begin in range(self.rows.start, max(self.rows.stop, self.rows.start + 1), PIECE_ROWS):
            yield replace(self, rows=range(begin, min(begin + PIECE_ROWS, self.rows.stop)))


class ShardLayout:
    """How a table's rows are spread at this moment. Making one is collective.

    Args:
        name: the table's.
        shards: this rank's.
        env: of the sharded module.
    """

    def __init__(self, name: str, shards: Sequence[LocalShard], env: ShardingEnv) -> None:
        local = [(len(t), t.columns, t.optimizer_steps, t.steps, t.dtype) for t in (shard.table for shard in shards)]
        gathered = all_gathered(local, env)
        self.env = env
        self.dim = 1 + max(columns[-1] for pieces in gathered for _, columns, *_ in pieces)
        self.optimizer_steps = max(steps for pieces in gathered for _, _, steps, *_ in pieces)
        self.clock = max(clock for pieces in gathered for *_, clock, _ in pieces)
        ends: dict[range, int] = {}
        self.pieces: list[_Piece] = []
        for rank, pieces in enumerate(gathered):
            for rows, columns, *_, dtype in pieces:
                self.dtype = dtype  # of the weights; the same in every shard
                begin = ends.get(columns, 0)
                ends[columns] = begin + rows
                self.pieces.append(_Piece(rank, range(begin, begin + rows), columns))
        if len(set(ends.values())) > 1:
            raise RuntimeError(f"RecStore table {name!r}: its column shards hold different numbers of rows: {ends}")
        self.rows = next(iter(ends.values()))
        self.column_shards = sorted(ends, key=lambda columns: columns.start)

    def rowed(self, tensors: Iterable[Tensor], dtype: torch.dtype = torch.int64) -> ShardedTensor:
        """A (R,) tensor from this rank's parts, which the first column shard alone holds.

        Args:
            tensors: a part for each of this rank's shards, (rows,).
            dtype: of the tensor.
        """
        return self.sharded(tensors, None, None, dtype)

    def sharded(
        self,
        tensors: Iterable[Tensor],
        width: Callable[[range], range] | None,
        size: int | None,
        dtype: torch.dtype = torch.float32,
    ) -> ShardedTensor:
        """The whole tensor from this rank's parts, one a shard that it has.

        Args:
            tensors: a part for each of this rank's shards, (rows,) or (rows, width).
            width: the columns of the whole that a shard's columns stand for; None for one-dimensional tensors.
            size: columns of the whole; None for one-dimensional tensors.
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
        kept = [p for p in holders if len(p.rows)] or list({p.columns: p for p in reversed(holders)}.values())[::-1]
        rank = self._rank()
        mine = zip([piece for piece in self.pieces if piece.rank == rank], tensors, strict=True)
        local = [
            TensorShard(tensor[part.rows.start - piece.rows.start : part.rows.stop - piece.rows.start], metadata(part))
            for piece, tensor in mine
            if piece in kept
            for part in piece.cut()
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local,
            ShardedTensorMetadata(
                shards_metadata=[metadata(part) for piece in kept for part in piece.cut()],
                size=torch.Size([self.rows] if size is None else [self.rows, size]),
                tensor_properties=TensorProperties(dtype=dtype),
            ),
            process_group=self.env.process_group,
        )

    def _rank(self) -> int:
        group = self.env.process_group
        return 0 if group is None else dist.get_rank(group)


class WholeRows:
    """A whole table's tensor and the ids of its rows, to be cut for any shard.

    Args:
        what: names the tensor in errors.
        value: (R, W).
        ids: (R,) int64, ids of the rows; None: row i is id i, as in TorchRec's own tables.

    Raises:
        ValueError: another shape, or other ids than a row each.
    """

    def __init__(self, what: str, value: Value, ids: Tensor | None) -> None:
        self._what = what
        self._value = value
        self.shape = tuple(value.size())
        if len(self.shape) != 2:
            raise ValueError(f"{what} must have two dimensions, got the shape {self.shape}")
        self.ids = torch.arange(self.shape[0]) if ids is None else ids
        if self.ids.shape != self.shape[:1] or self.ids.dtype is not torch.int64:
            raise ValueError(
                f"{what} has {self.shape[0]} rows, its ids are {self.ids.dtype} of shape {tuple(self.ids.shape)}"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has a part of the tensor alone."""
        return isinstance(self._value, ShardedTensor)

    def check(self, shard: LocalShard, columns: range) -> None:
        """Refuses a tensor that :meth:`rows` could not cut for the shard.

        Raises:
            ValueError: a sharded tensor whose rows or columns lie elsewhere than the model's.
        """
        if self.is_sharded:
            here = [torch.arange(first, first + len(rows)) for first, rows in self._local(columns)]
            # Else rows that belong here lie with another rank, or are cut into other columns.
            if not torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *here]), owned_positions(shard, self.ids)):
                raise ValueError(
                    f"{self._what} is sharded otherwise than the model: load_distributed_checkpoint can read it"
                )

    def rows(self, shard: LocalShard, columns: range) -> Tensor:
        """``columns`` of the rows that belong to a shard, float32, in the order of :func:`owned_positions`.

        Raises:
            ValueError: as :meth:`check`.
        """
        self.check(shard, columns)
        if self.is_sharded:
            part = torch.cat([torch.empty(0, len(columns)), *(rows for _, rows in self._local(columns))])
        else:
            part = self._value[owned_positions(shard, self.ids), columns.start : columns.stop]
        return part.to(torch.float32)

    def _local(self, columns: range) -> list[tuple[int, Tensor]]:
        """The first row of each part that this rank holds of ``columns``, and its rows; ascending."""
        parts: list[tuple[int, Tensor]] = []
        for part in self._value.local_shards() if isinstance(self._value, ShardedTensor) else ():
            first, column = part.metadata.shard_offsets
            if (column, part.metadata.shard_sizes[1]) == (columns.start, len(columns)):
                parts.append((first, part.tensor))
        return sorted(parts, key=lambda part: part[0])


def owned_positions(shard: LocalShard, ids: Tensor) -> Tensor:
    """(n,) int64, ascending: where in ``ids``, (R,) int64, those are that belong to the shard."""
    return shard.owned(ids).nonzero().squeeze(1)


def gathered_rows(value: Value, env: ShardingEnv) -> Tensor:
    """A (R,) tensor, whole, on every rank. Collective where it is sharded."""
    if not isinstance(value, ShardedTensor):
        return value
    # A copy of each part: pickling a view would send all that it is a view of.
    local = [(part.metadata.shard_offsets[0], part.tensor.clone()) for part in value.local_shards()]
    parts = sorted((part for parts in all_gathered(local, env) for part in parts), key=lambda part: part[0])
    return torch.cat([torch.empty(0, dtype=value.dtype), *(tensor for _, tensor in parts)])
