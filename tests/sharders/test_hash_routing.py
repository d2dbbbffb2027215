"""How evenly rows lie on ranks, and what hash routing refuses. Its numbers: tests/distributed."""

from __future__ import annotations

import pytest
import torch

from torchrec_recstore import ops
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import RecStoreConstraints
from torchrec_recstore.store import Table

from .models import bag, collection, sharded

INT64 = torch.iinfo(torch.int64)


def imbalance(ids: torch.Tensor, num_embeddings: int, ranks: int, routing: str) -> float:
    """The most ids of a rank over the mean, by TorchRec's own split (``block_bucketize_sparse_features``)."""
    if routing == "hash":
        ids = ops.mix_ids(ids, False)
    lengths, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([len(ids)]),
        ids,
        bucketize_pos=False,
        sequence=False,
        block_sizes=torch.tensor([-(-num_embeddings // ranks)]),
        my_size=ranks,
    )
    return float(lengths.max() / lengths.float().mean())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_patterns_load_ranks_evenly(ranks: int) -> None:
    patterns = {"sequential": torch.arange(100_000), "multiples": torch.arange(100_000) * ranks + 2**50}
    for ids in patterns.values():
        assert imbalance(ids, 2**40, ranks, "block") == ranks
        assert imbalance(ids, 2**40, ranks, "hash") < 1.05


def test_the_mix_is_a_bijection() -> None:
    ids = torch.cat([torch.arange(-1000, 1000), torch.tensor([INT64.min, INT64.max])])
    mixed = ops.mix_ids(ids, False)
    assert len(mixed.unique()) == len(ids)
    assert torch.equal(ops.mix_ids(mixed, True), ids)
    assert mixed[1001].item() == -5451962507482445012  # fmix64(1) = 0xb456bcfc34c2cb2c


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="routing"):
        TableOptions(routing="modulo")  # type: ignore[arg-type]
    Table(4, options=TableOptions(routing="hash"))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("sharding_type", "routing"), [("row_wise", "block"), ("table_wise", "hash")])
def test_a_feature_is_routed_in_one_way(sharding_type: str, routing: str) -> None:
    constraints = {
        "a": RecStoreConstraints(sharding_types=["row_wise"], options=TableOptions(routing="hash")),
        "b": RecStoreConstraints(sharding_types=[sharding_type], options=TableOptions(routing=routing)),
    }
    with pytest.raises(ValueError, match=r"'a'.*\['f'\].*'b'"):
        sharded(collection(bag("a", ["f"]), bag("b", ["f", "g"])), constraints=constraints)
