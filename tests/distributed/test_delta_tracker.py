"""TorchRec's delta tracker on two ranks has every id once, with the states of its row
on any rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from tests.sharders.models import collection, sequence, sequences
from tests.sharders.test_delta_tracker import distributed, recstore, shards
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.options import ConstantInit, TableOptions

from .workers import run_on_ranks

LR = 0.1
INIT = 0.25
OPTIMIZER = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
SMALL = [[[1, 2, 1], [3]], [[3], [4]]]
"""The bags of each rank."""
RAW = [[[-1, 2**63 - 1], [10**18]], [[10**18], [-(2**63), 5]]]
SQUARES = (TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD)


def batch(bags: list[list[int]]) -> KeyedJaggedTensor:
    ids = torch.tensor([i for ids in bags for i in ids])
    return KeyedJaggedTensor(
        ["f"], ids, lengths=torch.tensor([len(ids) for ids in bags])
    )


def gathered(
    model: DistributedModelParallel, mode: TrackingMode, bags: list[list[int]]
) -> dict[int, list[Any]]:
    """Returns the values of all ranks' trackers by id, after two steps."""
    tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig(tracking_mode=mode))
    for _ in range(2):
        model(batch(bags)).backward()
    mine = []
    for fqn, rows in tracker.get_unique().items():
        assert (
            fqn
            == f"tables.{'embeddings' if hasattr(model.module.tables, 'embeddings') else 'embedding_bags'}.t"
        )
        states = (
            [None] * len(rows.ids)
            if rows.states is None
            else rows.states.detach().tolist()
        )
        mine.append(dict(zip(rows.ids.tolist(), states, strict=True)))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    found: dict[int, list[Any]] = {}
    for parts in of_ranks:
        for part in parts:
            for i, state in part.items():
                found.setdefault(i, []).append(state)
    return found


def ids_and_states(
    rank: int, sharding_types: Sequence[str], modes: Sequence[TrackingMode]
) -> None:
    options = TableOptions(initializer=ConstantInit(INIT), routing="block")
    optimizer = RowWiseAdagrad(lr=LR, eps=1e-8)

    def bag(**more: Any) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"], **more
        )

    fused = {
        "t": ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        )
    }
    for mode in [mode for mode in modes if mode in (TrackingMode.ID_ONLY, *SQUARES)]:
        init = functools.partial(torch.nn.init.constant_, val=INIT)
        sharder = EmbeddingBagCollectionSharder(
            fused_params={**OPTIMIZER, "learning_rate": LR, "eps": 1e-8}
        )
        stock = distributed(
            collection(bag(init_fn=init)), sharder, fused, EmbeddingShardingPlanner
        )
        expected = gathered(stock, mode, SMALL[rank])
        for sharding_type in [kind for kind in sharding_types if kind != "column_wise"]:
            ours = recstore(collection(bag()), optimizer, options, sharding_type)
            found = gathered(ours, mode, SMALL[rank])
            assert found.keys() == expected.keys() == {1, 2, 3, 4}
            for i, states in found.items():
                assert len(states) == 1
                if mode != TrackingMode.ID_ONLY:
                    torch.testing.assert_close(states[0], expected[i][0])

    distinct = {i for bags in RAW for ids in bags for i in ids}
    for sharding_type in sharding_types:
        hashed = TableOptions(
            initializer=ConstantInit(INIT),
            routing="hash" if sharding_type == "row_wise" else "block",
        )
        for bags in (True, False):
            for mode in modes:
                if bags and mode == TrackingMode.EMBEDDING:
                    continue
                module = (
                    collection(bag())
                    if bags
                    else sequences(sequence("t", ["f"], dim=8))
                )
                model = recstore(module, optimizer, hashed, sharding_type)
                found = gathered(model, mode, RAW[rank])
                assert found.keys() == distinct
                columns = 2 if sharding_type == "column_wise" else 1
                assert all(len(states) == columns for states in found.values())
                if mode == TrackingMode.EMBEDDING:
                    assert all(
                        states == [[INIT] * (8 // columns)] * columns
                        for states in found.values()
                    )
                for shard in shards(model) if mode in SQUARES else []:
                    latest = shard.read_rows(shard.ids())["sum"].tolist()
                    for i, state in zip(shard.ids().tolist(), latest, strict=True):
                        assert any(
                            abs(state - one) <= 1e-6 * abs(state) for one in found[i]
                        )


def by_rows(rank: int, world_size: int) -> None:
    ids_and_states(
        rank, ["row_wise"], [TrackingMode.EMBEDDING, TrackingMode.ROWWISE_ADAGRAD]
    )


def everything(rank: int, world_size: int) -> None:
    ids_and_states(rank, ["table_wise", "row_wise", "column_wise"], list(TrackingMode))


def test_two_ranks() -> None:
    run_on_ranks(2, by_rows)


@pytest.mark.slow
def test_two_ranks_in_every_mode() -> None:
    run_on_ranks(2, everything)
