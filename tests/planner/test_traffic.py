"""The bytes of a step: those that ``rank_traffic`` states are those that the
collectives of real ranks get.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from tests.distributed.workers import run_on_ranks
from tests.sharders.models import bag
from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder
from torchrec_recstore.planner.traffic import (
    COLLECTIVES,
    STEP_COLLECTIVES,
    PlacedTable,
    RankTraffic,
    rank_traffic,
)

BATCH, ROWS = 8, 64
FEATURES = {"whole": ("a", "b"), "rows": ("c", "d", "e"), "columns": ("f",)}
KINDS = {"whole": "table_wise", "rows": "row_wise", "columns": "column_wise"}
DIMS = {"whole": 12, "rows": 8, "columns": 16}


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Counted:
    """Replaces the collectives of this process, which it calls, and sums what they get
    for and from other ranks.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.calls = 0
        self.backward = False
        self._rank, self._ranks = rank, ranks
        for name in (
            "all_to_all_single",
            "reduce_scatter_tensor",
            "all_gather_into_tensor",
            "all_reduce",
        ):
            setattr(dist, name, partial(self._count, name, getattr(dist, name)))

    def _count(
        self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        if name == "all_to_all_single":
            output, input = bound["output"], bound["input"]
            splits = bound.get("output_split_sizes"), bound.get("input_split_sizes")
            received, sent = (
                size(each)
                - (
                    each.element_size() * split[self._rank]
                    if split
                    else size(each) // self._ranks
                )
                for each, split in zip((output, input), splits, strict=True)
            )
            kind = self._kind(input, equal=splits[1] is None)
        elif name == "reduce_scatter_tensor":
            kind, sent = (
                "partial sums",
                size(bound["input"]) // self._ranks * (self._ranks - 1),
            )
            received = sent
        elif name == "all_gather_into_tensor":
            kind, sent = (
                "gradients of sums",
                size(bound["input_tensor"]) * (self._ranks - 1),
            )
            received = size(bound["output_tensor"]) - size(bound["input_tensor"])
        else:
            kind = name
            sent = received = size(bound["tensor"])
        self.calls += 1
        self.sent[kind] += sent
        self.received[kind] += received
        return original(*args, **kwargs)

    def _kind(self, input: Tensor, equal: bool) -> str:
        if input.is_floating_point():
            return "gradients" if self.backward else "weights and pooled"
        if input.dtype == torch.int64 and not equal:
            return "ids"
        return "splits" if equal else "lengths"


def batch(ranks: int, weighted: bool) -> KeyedJaggedTensor:
    """Each bag of the row-wise table has an id of each rank, and as many more of rank
    0.
    """
    names = [name for features in FEATURES.values() for name in features]
    ids: list[int] = []
    lengths = []
    for name in names:
        for sample in range(BATCH):
            bag_of_rows = [each * ROWS // ranks for each in range(ranks)] + [0] * ranks
            in_bag = bag_of_rows if name in FEATURES["rows"] else list(range(sample))
            ids += in_bag
            lengths.append(len(in_bag))
    weights = torch.rand(len(ids)) if weighted else None
    return KeyedJaggedTensor(
        names,
        torch.tensor(ids),
        weights,
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )


def placed(plan: ShardingPlan, ranks: int, weighted: bool) -> list[PlacedTable]:
    (module,) = plan.plan.values()
    shares = tuple((ranks * (each == 0) + 1) / (2 * ranks) for each in range(ranks))
    return [
        PlacedTable(
            sharding_type=sharding.sharding_type,
            ranks=tuple(
                shard.placement.rank() for shard in sharding.sharding_spec.shards
            ),
            dim=DIMS[name],
            features=len(FEATURES[name]),
            ids_per_sample=len(FEATURES[name])
            * (2 * ranks if name == "rows" else (BATCH - 1) / 2),
            weighted=weighted,
            row_shares=shares if name == "rows" else None,
        )
        for name, sharding in module.items()
    ]


def compare(rank: int, ranks: int, *, weighted: bool) -> None:
    tables = [bag(name, FEATURES[name], DIMS[name], ROWS) for name in FEATURES]
    model = EmbeddingBagCollection(
        tables, device=torch.device("meta"), is_weighted=weighted
    )
    constraints: Any = {
        name: RecStoreConstraints(
            sharding_types=[kind], min_partition=4 if name == "columns" else None
        )
        for name, kind in KINDS.items()
    }
    topology = Topology(world_size=ranks, local_world_size=ranks, compute_device="cpu")
    planner = RecStorePlanner(topology=topology, constraints=constraints, debug=False)
    plan = planner.collective_plan(model, [RecStoreSharder()], dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, plan=plan, sharders=[RecStoreSharder()], device=torch.device("cpu")
    )
    counted = Counted(rank, ranks)
    values = sharded(batch(ranks, weighted)).wait().values()
    counted.backward = True
    values.sum().backward()

    whole = placed(plan, ranks, weighted)
    rows = [table for table in whole if table.sharding_type == "row_wise"]
    others = [table for table in whole if table.sharding_type != "row_wise"]
    stated = {
        kind: {
            each.collective: each for each in rank_traffic(tables, rank, ranks, BATCH)
        }
        for kind, tables in (("whole", whole), ("rows", rows), ("others", others))
    }
    expected = {
        "splits": [("whole", "splits")],
        "lengths": [("whole", "lengths")],
        "ids": [("whole", "ids")],
        "weights and pooled": [("whole", "weights"), ("others", "pooled")],
        "gradients": [("others", "gradients")],
        "partial sums": [("rows", "partial sums")],
        "gradients of sums": [("rows", "gradients")],
    }
    # Each sharding type runs its own collectives, and one more for weights.
    assert counted.calls == len(KINDS) * (STEP_COLLECTIVES + weighted)
    for got, direction in ((counted.sent, "sent"), (counted.received, "received")):
        assert got == {
            kind: sum(getattr(stated[of][name], direction) for of, name in parts)
            for kind, parts in expected.items()
        }, direction


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "weighted"), [(2, True), (4, False)])
def test_bytes_are_those_of_the_collectives(ranks: int, weighted: bool) -> None:
    run_on_ranks(ranks, partial(compare, weighted=weighted))


def test_bytes_by_hand() -> None:
    """2 hosts of 2 ranks, 10 samples a rank: a table of rank 1 with 3 ids a sample, and
    one by rows with 4.
    """
    tables = [
        PlacedTable("table_wise", (1,), 8, 2, 3.0, weighted=True),
        PlacedTable("row_wise", (0, 1, 2, 3), 4, 1, 4),
    ]
    of_owner = {
        each.collective: each
        for each in rank_traffic(tables, 1, 4, 10, ranks_per_host=2)
    }
    of_other = {
        each.collective: each
        for each in rank_traffic(tables, 0, 4, 10, ranks_per_host=2)
    }
    assert list(of_owner) == list(COLLECTIVES)
    # To each rank 10 samples x 1 id; from each rank the same, and 10 x 3 ids of the
    # table.
    assert of_owner["ids"] == RankTraffic(
        "ids", 3 * 80, 3 * (80 + 240), 2 * 80, 2 * (80 + 240)
    )
    assert of_other["ids"] == RankTraffic("ids", 3 * 80 + 240, 3 * 80, 2 * 80, 2 * 80)
    assert of_other["weights"] == RankTraffic("weights", 120, 0, 0, 0)
    assert of_other["lengths"] == RankTraffic(
        "lengths", 3 * 40 + 80, 3 * 40, 2 * 40, 2 * 40
    )
    assert of_other["splits"] == RankTraffic("splits", 3 * 64, 3 * 64, 2 * 64, 2 * 64)
    # Partial sums of 10 bags x 4 columns to each rank, and 10 x 2 bags x 8 columns of
    # rank 1.
    assert of_owner["partial sums"] == RankTraffic(
        "partial sums", 3 * 160, 3 * 160, 2 * 160, 2 * 160
    )
    assert of_owner["pooled"] == RankTraffic("pooled", 3 * 640, 0, 2 * 640, 0)
    assert of_owner["gradients"] == RankTraffic(
        "gradients", 3 * 160, 3 * (160 + 640), 2 * 160, 2 * (160 + 640)
    )
    on_one_host = {each.collective: each for each in rank_traffic(tables, 0, 4, 10)}
    assert on_one_host["lengths"] == RankTraffic("lengths", 3 * 40 + 80, 3 * 40, 0, 0)


def test_refusals() -> None:
    with pytest.raises(
        ValueError,
        match=(
            "sharding_type must be one of table_wise, column_wise, row_wise, got 'grid'"
        ),
    ):
        PlacedTable("grid", (0,), 4, 1, 1.0)
    with pytest.raises(ValueError, match="ranks must be the rank of each shard"):
        PlacedTable("table_wise", (0, 1), 4, 1, 1.0)
    with pytest.raises(ValueError, match="dim must be a multiple of the 3 shards"):
        PlacedTable("column_wise", (0, 1, 2), 4, 1, 1.0)
    with pytest.raises(ValueError, match="one share for each of 2 ranks"):
        PlacedTable("row_wise", (0, 1), 4, 1, 1.0, row_shares=(1.0,))
    with pytest.raises(
        ValueError, match=r"ranks must be from 0 to 1, got rank 0 and shards on \(2,\)"
    ):
        rank_traffic([PlacedTable("table_wise", (2,), 4, 1, 1.0)], 0, 2, 10)
    with pytest.raises(ValueError, match="must be on all 4 ranks"):
        rank_traffic([PlacedTable("row_wise", (0, 1), 4, 1, 1.0)], 0, 4, 10)
