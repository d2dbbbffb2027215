"""The layout of a table's rows over shards, as tensors of shards and of whole tables.

Tests: tests/checkpoint/test_state_dict.py, tests/checkpoint/test_distributed.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import metadata as tensor_metadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.kernels import BlockRouting
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.store import Table, TableState

Value = Tensor | ShardedTensor
"""A tensor of a whole table: a plain tensor that is equal on every rank, or a tensor
that is sharded as the model.
"""

# The largest number of rows in one piece of a sharded tensor.
# torch.distributed.checkpoint can only read whole pieces, so this limits the memory
# that a load takes besides the tables.
PIECE_ROWS = 1 << 18


@dataclass(frozen=True)
class LocalShard:
    """A shard of a table on this rank, and the routing of ids to it.

    The routing is None if all ids belong to the shard.
    """

    table: Table
    routing: BlockRouting | None

    def owned(self, ids: Tensor) -> Tensor:
        """Returns whether each of ``ids``, (N,) int64, belongs to the shard: (N,) bool."""
        if self.routing is None:
            return torch.ones_like(ids, dtype=torch.bool)
        return self.routing.owned(ids)

    def state(self) -> TableState:
        """Returns the shard's part of the state of the table.

        All column shards have the same sightings.
        """
        state = self.table.state()
        is_first = self.table.columns.start == 0
        if is_first:
            return state
        return replace(state, sightings=None)


@dataclass(frozen=True)
class _Piece:
    """The position of a shard, or of a part of a shard, in the whole table."""

    rank: int
    rows: range
    columns: range

    def cut(self) -> Iterator[_Piece]:
        """Yields parts of the piece with at most ``PIECE_ROWS`` rows.

        A piece without rows is yielded itself.
        """
        if not self.rows:
            yield self
        for begin in range(self.rows.start, self.rows.stop, PIECE_ROWS):
            end = min(begin + PIECE_ROWS, self.rows.stop)
            yield replace(self, rows=range(begin, end))


class _FirstShard(Tensor):
    """The tensor of a rank's first shard, if torch cannot gather the whole table.

    With ``full_state_dict=True``, torch.distributed.checkpoint gathers the first shard
    of each rank, as if the rows were split evenly (``_all_gather_sharded_tensor``,
    torch 2.13). It has no hook and finds no error, and fills up the other rows with
    zeros. It begins with ``flatten`` of the first shard, so that this function is
    refused.
    """

    _refusal: str

    @classmethod
    def of(cls, tensor: Tensor, refusal: str) -> _FirstShard:
        """Returns a view of a tensor, of which ``flatten`` raises ValueError."""
        view = tensor.as_subclass(cls)
        view._refusal = refusal
        return view

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is Tensor.flatten or func is torch.flatten:
            raise ValueError(args[0]._refusal)
        # The results are plain tensors.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


class RowTensor(ShardedTensor):
    """A sharded tensor with an entry for each row of a table.

    Pickling, copying and cloning make a ``ShardedTensor``.
    """

    # The ids of the rows, if the entries are their weights.
    ids: RowTensor | None = None
    _description: str
    _env: ShardingEnv

    @classmethod
    def of(
        cls,
        stock: ShardedTensor,
        description: str,
        env: ShardingEnv,
    ) -> RowTensor:
        """Returns the tensor as a RowTensor. ``description`` names it in errors."""
        # The functions of torch 2.13 that make a tensor from shards and their metadata
        # only make a ShardedTensor.
        properties = stock.metadata().tensor_properties
        rows: RowTensor = cls.__new__(
            cls,
            stock.sharding_spec(),
            stock.metadata().size,
            dtype=properties.dtype,
            layout=properties.layout,
            pin_memory=properties.pin_memory,
            requires_grad=properties.requires_grad,
        )
        vars(rows).update(vars(stock))
        rows._description = description
        rows._env = env
        return rows

    def size(self, dim: int | None = None) -> Any:
        """Returns the size. torch's method would warn that ShardedTensor is deprecated."""
        size = self.metadata().size
        if dim is None:
            return size
        return size[dim]

    def local_shards(self) -> list[TensorShard]:
        """Returns this rank's shards.

        ``flatten`` of the first tensor raises ValueError if torch would take it for a
        part of evenly split rows.
        """
        shards = super().local_shards()
        # Without a process group, torch gathers nothing.
        has_one_rank = not dist.is_initialized() or dist.get_world_size() == 1
        if not shards or (has_one_rank and len(shards) == 1):
            return shards
        first = shards[0]
        refusal = (
            f"{self._description}: full_state_dict=True gathers no table without rows,"
            " nor rows in several shards: save model.state_dict() with"
            " torch.distributed.checkpoint.save, and load it with"
            " torchrec_recstore.load_distributed_checkpoint(model, checkpoint_id)"
        )
        refusing = TensorShard(_FirstShard.of(first.tensor, refusal), first.metadata)
        return [refusing, *shards[1:]]

    def _stock(self) -> ShardedTensor:
        """Returns the same rows as torch's own class."""
        shards = super().local_shards()
        return sharded_tensor(shards, self.metadata(), self._process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        return copy.deepcopy(self._stock(), memo)

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes the row of id i to row i of ``out`` on the rank ``dst``.

        ``out`` is (N, dim), and has zeros elsewhere.

        Collective.

        TorchRec's ``state_dict_gather`` calls this method with the weight of an
        unsharded model. Raises ValueError on every rank if ``out`` does not fit or an
        id is outside [0, N). The last two arguments have no effect.
        """
        if self.ids is None:
            self._stock().gather(dst, out, enforce_dtype, dtype)
            return

        receives = dist.get_rank(self._process_group) == dst
        with refused_together(self._env):
            if receives:
                self._check_shape(out)

        ids: Tensor | None = None
        rows: Tensor | None = None
        if receives:
            ids = torch.empty(self.ids.size(), dtype=torch.int64)
            rows = torch.empty(self.size(), dtype=self.dtype)
        if self.size(0):
            self.ids.gather(dst, ids, dtype=torch.int64)
            self._stock().gather(dst, rows, dtype=self.dtype)

        with refused_together(self._env):
            if out is None or ids is None or rows is None:
                return
            is_outside = (ids < 0) | (ids >= len(out))
            ids_outside = int(is_outside.sum())
            if ids_outside:
                raise ValueError(
                    f"{self._description} has {ids_outside} ids outside"
                    f" [0, {len(out)}), and row i of the gathered tensor is the row of id i:"
                    " stock_state_dict(model, num_rows, leave_out=True) leaves these"
                    " rows out; local_shards() and weight_id have all rows"
                )
            with torch.no_grad():
                out.zero_()
                out[ids.to(out.device)] = rows.to(out)

    def _check_shape(self, out: Tensor | None) -> None:
        dim = self.size(1)
        if out is None or out.dim() != 2 or out.shape[1] != dim:
            shape = "None" if out is None else tuple(out.shape)
            raise ValueError(
                f"{self._description}: out must have the shape (rows, {dim}), got"
                f" {shape}"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What ShardedTensor returns here cannot be loaded with weights_only or a
        # callable map_location (torch 2.13).
        return sharded_tensor, (super().local_shards(), self.metadata())


def sharded_tensor(
    shards: list[TensorShard],
    metadata: ShardedTensorMetadata,
    group: Any = None,
) -> ShardedTensor:
    """Returns the tensor of this rank's shards.

    The files of ``torch.save`` name this function.
    """
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        metadata,
        process_group=group,
    )


# So that torch.load reads them by default, with weights_only=True. DTensor does the
# same for its classes.
_SAVED_CLASSES: list[Any] = [
    sharded_tensor,
    TensorShard,
    ShardMetadata,
    ShardedTensorMetadata,
    TensorProperties,
    tensor_metadata.MEM_FORMAT_ENCODING,
    _remote_device,
]
torch.serialization.add_safe_globals(_SAVED_CLASSES)


class ShardLayout:
    """The current layout of a table's rows over the shards.

    The constructor is collective.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[LocalShard],
        env: ShardingEnv,
        *,
        with_state: bool = False,
    ) -> None:
        local_sizes = []
        for shard in shards:
            table = shard.table
            dtype = value_dtype(table.dtype)
            local_sizes.append((len(table), table.columns, dtype))
        states: list[TableState] = []
        if with_state:
            states = [shard.state() for shard in shards]
        gathered = all_gathered((local_sizes, states), env)

        self._name = name
        all_states: list[TableState] = []
        for _, states_of_rank in gathered:
            all_states += states_of_rank
        self.state = TableState.merged(all_states)
        self._env = env

        ends: dict[range, int] = {}
        self._pieces: list[_Piece] = []
        for rank, (sizes, _) in enumerate(gathered):
            for row_count, columns, dtype in sizes:
                self.dtype = dtype  # The dtype of lookups is the same in every shard.
                begin = ends.get(columns, 0)
                end = begin + row_count
                ends[columns] = end
                self._pieces.append(_Piece(rank, range(begin, end), columns))
        if len(set(ends.values())) > 1:
            raise RuntimeError(
                f"RecStore table {name!r}: its column shards hold different numbers of"
                f" rows: {ends}"
            )
        self.rows = next(iter(ends.values()))
        self.column_shards = sorted(ends, key=lambda columns: columns.start)

    def by_row(self, tensors: Iterable[Tensor]) -> RowTensor:
        """Returns the tensor (R,) int64 of one part (rows,) for each local shard."""
        # Only the first column shard holds the parts.
        return self._row_tensor(tensors, None, torch.int64)

    def by_column(
        self,
        tensors: Iterable[Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> RowTensor:
        """Returns the tensor (R, D) of one part (rows, columns) for each local shard."""
        places = {columns: columns for columns in self.column_shards}
        return self._row_tensor(tensors, places, dtype)

    def by_column_shard(self, tensors: Iterable[Tensor]) -> RowTensor:
        """Returns the tensor (R, C) float32 of one part (rows,) for each local shard."""
        places = {}
        for number, columns in enumerate(self.column_shards):
            places[columns] = range(number, number + 1)
        matrices = [tensor.unsqueeze(1) for tensor in tensors]
        return self._row_tensor(matrices, places, torch.float32)

    def _row_tensor(
        self,
        tensors: Iterable[Tensor],
        places: Mapping[range, range] | None,
        dtype: torch.dtype,
    ) -> RowTensor:
        """Returns the whole tensor of one part for each of this rank's shards.

        Args:
            tensors: The parts.
            places: The columns of the tensor in each column shard of the table. None
                for a tensor of one dimension, in the first column shard.
            dtype: The data type of the tensor.
        """
        pieces = self._pieces
        size = [self.rows]
        if places is None:
            first_columns = self.column_shards[0]
            pieces = [piece for piece in pieces if piece.columns == first_columns]
        else:
            last_columns = self.column_shards[-1]
            size.append(places[last_columns].stop)

        pieces = _pieces_with_rows(pieces)
        shards = []
        for piece in pieces:
            shards += [_shard_metadata(part, places) for part in piece.cut()]

        local_shards = []
        local_pieces = [piece for piece in self._pieces if piece.rank == self._env.rank]
        for piece, tensor in zip(local_pieces, tensors, strict=True):
            if piece not in pieces:
                continue
            for part in piece.cut():
                begin = part.rows.start - piece.rows.start
                end = begin + len(part.rows)
                part_metadata = _shard_metadata(part, places)
                local_shards.append(TensorShard(tensor[begin:end], part_metadata))

        metadata = ShardedTensorMetadata(
            shards,
            torch.Size(size),
            TensorProperties(dtype=dtype),
        )
        stock = sharded_tensor(
            local_shards,
            metadata,
            self._env.process_group,
        )
        return RowTensor.of(
            stock,
            f"RecStore table {self._name!r}",
            self._env,
        )


def _pieces_with_rows(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Returns the pieces that have rows.

    Returns one piece for each column shard if none has.
    """
    # torch 2.13 accepts neither a ShardedTensor without shards, nor empty shards besides
    # others.
    with_rows = [piece for piece in pieces if piece.rows]
    if with_rows:
        return with_rows
    by_columns: dict[range, _Piece] = {}
    for piece in pieces:
        by_columns.setdefault(piece.columns, piece)
    return list(by_columns.values())


def _shard_metadata(
    piece: _Piece,
    places: Mapping[range, range] | None,
) -> ShardMetadata:
    """Returns torch's description of a piece.

    ``places`` are those of ``ShardLayout._row_tensor``.
    """
    offsets = [piece.rows.start]
    sizes = [len(piece.rows)]
    if places is not None:
        columns = places[piece.columns]
        offsets.append(columns.start)
        sizes.append(len(columns))
    return ShardMetadata(offsets, sizes, placement=f"rank:{piece.rank}/cpu")


class WholeRows:
    """The rows of a whole table, (R, W), and their ids.

    The rows of a shard can be taken from it.

    If ``ids`` is None, row i is the row of id i, as in TorchRec's own tables.
    ``description`` names the tensor in errors.
    """

    def __init__(
        self,
        description: str,
        value: Value,
        ids: Tensor | None,
    ) -> None:
        self._description = description
        self._value = value
        self.shape = tuple(value.size())
        if len(self.shape) != 2:
            raise ValueError(
                f"{description} must have two dimensions, got the shape {self.shape}"
            )
        rows = self.shape[0]
        if ids is None:
            ids = torch.arange(rows)
        self.ids = ids
        if tuple(ids.shape) != (rows,) or ids.dtype is not torch.int64:
            raise ValueError(
                f"{description} has {rows} rows, its ids are {ids.dtype} of shape"
                f" {tuple(ids.shape)}"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether the tensor is sharded, so that this rank has only a part of it."""
        return isinstance(self._value, ShardedTensor)

    def check(self, shard: LocalShard, columns: range) -> None:
        """Raises ``ValueError`` if the tensor is sharded in another way than the model."""
        if not self.is_sharded:
            return
        ranges = [torch.empty(0, dtype=torch.int64)]
        for first, rows in self._local(columns):
            ranges.append(torch.arange(first, first + len(rows)))
        local_positions = torch.cat(ranges)
        # If the positions differ, other ranks have rows of this shard, or the columns
        # are split in another way.
        if not torch.equal(local_positions, owned_positions(shard, self.ids)):
            raise ValueError(
                f"{self._description} is sharded in another way than the model:"
                " load_distributed_checkpoint can read it"
            )

    def rows(self, shard: LocalShard, columns: range) -> Tensor:
        """Returns ``columns`` of the rows that belong to a shard, float32.

        They have the order of :func:`owned_positions`.
        """
        self.check(shard, columns)
        if self.is_sharded:
            parts = [torch.empty(0, len(columns))]
            parts += [rows for _, rows in self._local(columns)]
            return torch.cat(parts).to(torch.float32)

        positions = owned_positions(shard, self.ids)
        cut = slice(columns.start, columns.stop)
        rows = self._value[positions, cut]
        return rows.to(torch.float32)

    def _local(self, columns: range) -> list[tuple[int, Tensor]]:
        """Returns this rank's parts of ``columns``, in ascending order.

        Each has the number of its first row, and the rows.
        """
        if not isinstance(self._value, ShardedTensor):
            return []
        parts: list[tuple[int, Tensor]] = []
        for shard in self._value.local_shards():
            first_row, first_column = shard.metadata.shard_offsets
            _, width = shard.metadata.shard_sizes
            if first_column == columns.start and width == len(columns):
                parts.append((first_row, shard.tensor))
        return sorted(parts, key=lambda part: part[0])


def owned_positions(shard: LocalShard, ids: Tensor) -> Tensor:
    """Returns the positions in ``ids`` of the ids that belong to the shard.

    ``ids`` are (R,) int64, and the positions (n,) int64, ascending.
    """
    return shard.owned(ids).nonzero().squeeze(1)


def gathered_rows(value: Value, env: ShardingEnv) -> Tensor:
    """Returns the whole (R,) tensor on every rank.

    Collective if the tensor is sharded.
    """
    if not isinstance(value, ShardedTensor):
        return value
    # Parts are copied, because pickling a view would send the whole tensor that it is a
    # view of.
    local_parts = []
    for shard in value.local_shards():
        first_row = shard.metadata.shard_offsets[0]
        local_parts.append((first_row, shard.tensor.clone()))

    parts: list[tuple[int, Tensor]] = []
    for parts_of_rank in all_gathered(local_parts, env):
        parts += parts_of_rank
    parts.sort(key=lambda part: part[0])
    tensors = [torch.empty(0, dtype=value.dtype)]
    tensors += [tensor for _, tensor in parts]
    return torch.cat(tensors)
