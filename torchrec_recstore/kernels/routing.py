from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.store import Table

_MIX_FACTORS = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
"""The factors of ``mix`` in csrc/base/mix.h, mod 2**64."""


@dataclass(frozen=True)
class BlockRouting:
    """The inverse of TorchRec's row-wise split, so that every shard stores raw ids.

    TorchRec maps the ids of a rank to local ids. The raw id is ``local + rank *
    block_rows`` if ``0 <= local < block_rows``, otherwise ``local * world_size +
    rank``, mod 2**64. With ``mixed``, the result then passes through the inverse of
    ``ops.mix_ids``.

    Source: ``block_bucketize_sparse_features`` of fbgemm 1.8.0, as torchrec 1.8.0's
    ``RwSparseFeaturesDist`` calls it.

    Args:
        block_rows: The number of ids in a block, ``ceil(num_embeddings / world_size)``.
        world_size: The number of ranks among which the table's rows are split.
        rank: The index of this shard among these ranks.
        mixed: Whether ids passed through ``ops.mix_ids`` before the split. Default:
            False.

    Raises:
        ValueError: A number is out of range.
    """

    block_rows: int
    world_size: int
    rank: int
    mixed: bool = False

    def __post_init__(self) -> None:
        if (
            self.block_rows < 0
            or self.world_size < 1
            or not 0 <= self.rank < self.world_size
        ):
            raise ValueError(
                "BlockRouting needs block_rows >= 0 and 0 <= rank < world_size, got"
                f" {self}"
            )

    def raw(self, ids: Tensor) -> Tensor:
        """Returns the raw ids of this rank's local ids ``ids``: (N,) int64."""
        is_in_block = (ids >= 0) & (ids < self.block_rows)
        of_block = ids + self.rank * self.block_rows
        of_remainder = ids * self.world_size + self.rank
        raw = torch.where(is_in_block, of_block, of_remainder)
        return ops.mix_ids(raw, True) if self.mixed else raw

    def owned(self, ids: Tensor) -> Tensor:
        """Returns which raw ``ids``, (N,) int64, come to this rank: (N,) bool."""
        if self.mixed:
            ids = ops.mix_ids(ids, False)
        is_in_blocks = (ids >= 0) & (ids < self.block_rows * self.world_size)
        block = ids // max(self.block_rows, 1)
        # TorchRec's split takes the remainder of ids as uint64, in which a negative id
        # is id + 2**64.
        shift_of_negative = 2**64 % self.world_size
        remainder = ids % self.world_size + (ids < 0) * shift_of_negative
        remainder = remainder % self.world_size
        rank = torch.where(is_in_blocks, block, remainder)
        return rank == self.rank


def mixed_ids(ids: Tensor) -> Tensor:
    """Returns ``ids``, (N,) int64, mixed for hash routing, on their device.

    They are ``ops.mix_ids(ids, False)``, whose native code reads the memory of the host.
    """
    return ops.mix_ids(ids, False) if ids.is_cpu else _mixed_by_torch(ids)


def _mixed_by_torch(ids: Tensor) -> Tensor:
    """Returns the same as ``ops.mix_ids(ids, False)``, by operators of torch."""
    for factor in _MIX_FACTORS:
        ids = (ids ^ _upper_bits(ids)) * factor
    return ids ^ _upper_bits(ids)


def _upper_bits(ids: Tensor) -> Tensor:
    """Returns the upper 31 bits of each id, as a number from 0 on."""
    # The shift of a negative id brings ones.
    return (ids >> 33) & torch.full_like(ids, 2**31 - 1)


def one_routing_each(
    tables: Sequence[Table], routings: Sequence[BlockRouting | None] | None
) -> Sequence[BlockRouting | None]:
    """Returns the routing of each table, None for raw ids.

    Raises ValueError if the lengths differ.
    """
    if routings is None:
        return [None] * len(tables)
    if len(routings) != len(tables):
        raise ValueError(
            f"routings must have one entry per table, got {len(routings)} for"
            f" {len(tables)}"
        )
    return routings
