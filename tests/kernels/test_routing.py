"""The ids that TorchRec's row-wise split sends to a shard, against the operator of the
split.
"""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  (registers the operator)
import pytest
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels import BlockRouting

EDGES = [0, 1, 2, 3, 4, 5, 2**31, 2**32, 2**53, 2**62, 2**63 - 3, 2**63 - 2, 2**63 - 1]


def some_ids(block_rows: int, world_size: int) -> Tensor:
    """Returns small and large ids of both signs, and ids at the borders of the blocks."""
    borders = [
        block_rows * rank + off for rank in range(world_size + 1) for off in (-1, 0, 1)
    ]
    values = {sign * id_ for id_ in [*EDGES, *borders] for sign in (1, -1)} | {
        -(2**63),
        -(2**63) + 1,
    }
    generator = torch.Generator().manual_seed(0)
    return torch.cat(
        [
            torch.tensor(sorted(values)),
            torch.randint(-(2**63), 2**63 - 1, (200,), generator=generator),
        ]
    )


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("block_rows", [0, 1, 7, 1000, 2**40])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_each_id_is_owned_by_the_rank_that_it_is_sent_to(
    world_size: int, block_rows: int, mixed: bool
) -> None:
    ids = some_ids(block_rows, world_size)
    sent = ops.mix_ids(ids, False) if mixed else ids
    if block_rows == 0:  # as fbgemm has it without a block: by the remainder alone
        ranks = torch.tensor([id_ % 2**64 % world_size for id_ in sent.tolist()])
    else:
        lengths, split, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths=torch.ones(len(sent), dtype=torch.int64),
            indices=sent,
            bucketize_pos=False,
            sequence=False,
            block_sizes=torch.tensor([block_rows]),
            my_size=world_size,
        )
        assert torch.equal(
            lengths.view(world_size, -1).sum(0),
            torch.ones(len(sent), dtype=torch.int64),
        )
        ranks = lengths.view(world_size, -1).argmax(0)
    owners = torch.stack(
        [
            BlockRouting(block_rows, world_size, rank, mixed).owned(ids)
            for rank in range(world_size)
        ]
    )
    assert torch.equal(owners.sum(0), torch.ones(len(ids), dtype=torch.int64))
    assert torch.equal(owners.long().argmax(0), ranks)
    for rank in range(world_size if block_rows else 0):
        at_rank = split.split(lengths.view(world_size, -1).sum(1).tolist())[rank]
        assert torch.equal(
            BlockRouting(block_rows, world_size, rank, mixed).raw(at_rank),
            ids[ranks == rank],
        )
