"""TorchRec's delta tracker returns the same for RecStore tables and stock tables on the
same batches, for any id.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints

from torchrec_recstore.optim import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import TableOptions, UniformInit
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreSharder,
)
from torchrec_recstore.store import Table

from .models import bag, batch, collection, sequence, sequences

pytestmark = pytest.mark.usefixtures("one_rank")

LR = 0.1
DEFAULT = TableOptions()
BATCHES = [
    {"f": [[1, 2, 1], [3]], "g": [[4], [2]]},
    {"f": [[3], []], "g": [[9], [1, 4]]},
    {"f": [[7], [1]], "g": [[], [7]]},
]
RAW = {1: -(2**63), 2: 2**63 - 1, 3: -1, 4: 10**18 + 7, 7: 5, 9: -12345}
"""The ids of any size that replace the ids of the batches."""
SQUARES = [TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD]


def features(step: int, raw: bool = False) -> Any:
    return batch(
        **{
            name: [[RAW[i] if raw else i for i in b] for b in bags]
            for name, bags in BATCHES[step].items()
        }
    )


class Model(nn.Module):
    """A model with tables and a dense parameter.

    TorchRec makes no tracker for a model without one.
    """

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out = self.tables(features)
        out = out.wait() if hasattr(out, "wait") else out
        parts = (
            out.to_dict().values()
            if hasattr(out, "to_dict")
            else [jagged.values() for jagged in out.values()]
        )
        return sum(((part * self.scale - 1) ** 2).sum() for part in parts)  # type: ignore[return-value]


def distributed(
    module: nn.Module,
    sharder: Any,
    constraints: dict[str, ParameterConstraints],
    kind: Any = RecStorePlanner,
) -> DistributedModelParallel:
    model = Model(module)
    ranks = dist.get_world_size()
    topology = Topology(world_size=ranks, local_world_size=ranks, compute_device="cpu")
    plan = kind(topology=topology, constraints=constraints).collective_plan(
        model, [sharder], dist.group.WORLD
    )
    return DistributedModelParallel(model, plan=plan, sharders=[sharder])


def recstore(
    module: nn.Module,
    optimizer: Optimizer,
    options: TableOptions = DEFAULT,
    sharding_type: str = "table_wise",
) -> Any:
    sequential = isinstance(module, EmbeddingCollection)
    kind = RecStoreEmbeddingCollectionSharder if sequential else RecStoreSharder
    (config,) = (
        module.embedding_configs() if sequential else module.embedding_bag_configs()
    )
    constraint = RecStoreConstraints(
        sharding_types=[sharding_type], options=options, min_partition=4
    )
    return distributed(module, kind(optimizer=optimizer), {config.name: constraint})


def shards(model: DistributedModelParallel) -> list[Table]:
    return list(model.module.tables.recstore_tables())


def deltas(
    model: DistributedModelParallel, mode: TrackingMode, raw: bool = False
) -> list[dict[int, Any]]:
    """Returns the tracker's values of the table ``t`` by id, after two batches and
    after a third batch.
    """
    tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig(tracking_mode=mode))
    given = []
    for steps in ((0, 1), (2,)):
        for step in steps:
            model(features(step, raw)).backward()
        fqn, rows = next(iter(tracker.get_unique().items()))
        assert fqn.endswith(".t")
        states = (
            [None] * len(rows.ids)
            if rows.states is None
            else rows.states.detach().tolist()
        )
        given.append(dict(zip(rows.ids.tolist(), states, strict=True)))
    return given


def assert_close(found: list[dict[int, Any]], expected: list[dict[int, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for i, state in one.items():
            if state is not None:
                torch.testing.assert_close(
                    torch.tensor(state), torch.tensor(other[i]), atol=1e-6, rtol=1e-5
                )


def pairs(bags: bool) -> tuple[DistributedModelParallel, DistributedModelParallel]:
    """Returns a model with a RecStore table and a model with a stock table.

    The tables have the same rows.
    """
    if bags:
        unsharded, kind = (
            (lambda: collection(bag("t", ["f", "g"], rows=10), device="cpu")),
            EmbeddingBagCollectionSharder,
        )
    else:
        unsharded, kind = (
            (lambda: sequences(sequence("t", ["f", "g"], rows=10), device="cpu")),
            EmbeddingCollectionSharder,
        )
    sharder = kind(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": LR,
        }
    )
    fused = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused"]
    )
    theirs = distributed(unsharded(), sharder, {"t": fused}, EmbeddingShardingPlanner)
    ours = recstore(unsharded(), RowWiseAdagrad(lr=LR, eps=1e-8))
    (weight,) = (
        value for key, value in theirs.state_dict().items() if key.endswith(".t.weight")
    )
    shards(ours)[0].insert(torch.arange(10), weight.local_shards()[0].tensor.detach())
    return ours, theirs


@pytest.mark.parametrize("bags", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize(
    "mode",
    [TrackingMode.ID_ONLY, TrackingMode.EMBEDDING, *SQUARES],
    ids=lambda mode: mode.value,
)
def test_it_gives_what_it_gives_of_stock_tables(bags: bool, mode: TrackingMode) -> None:
    ours, theirs = pairs(bags)
    if bags and mode == TrackingMode.EMBEDDING:
        for model in (ours, theirs):
            with pytest.raises(
                AssertionError, match="EBC's lookup returns pooled embeddings"
            ):
                deltas(model, mode)
        return
    expected = deltas(theirs, mode)
    assert [sorted(rows) for rows in expected] == [[1, 2, 3, 4, 9], [1, 7]]
    assert_close(deltas(ours, mode), expected)


SHARDINGS = ["table_wise", "row_wise", "column_wise"]


def raw_model(
    bags: bool, sharding_type: str, routing: Any = "block"
) -> DistributedModelParallel:
    options = TableOptions(
        initializer=UniformInit(-1.0, 1.0),
        routing=routing if sharding_type == "row_wise" else "block",
    )
    module = (
        collection(bag("t", ["f", "g"], dim=8))
        if bags
        else sequences(sequence("t", ["f", "g"], dim=8))
    )
    return recstore(module, Adagrad(lr=LR), options, sharding_type)


@pytest.mark.parametrize("routing", ["block", "hash"])
@pytest.mark.parametrize("sharding_type", SHARDINGS)
@pytest.mark.parametrize("bags", [True, False], ids=["bags", "sequences"])
def test_raw_ids_and_the_states_of_the_rows(
    bags: bool, sharding_type: str, routing: str
) -> None:
    """Compares the tracker in every mode with values of the tables: first values, last
    values and differences.
    """
    for mode in TrackingMode:
        if bags and mode == TrackingMode.EMBEDDING:
            continue
        model = raw_model(bags, sharding_type, routing)
        parts = shards(model)
        assert len(parts) == (2 if sharding_type == "column_wise" else 1)
        tracker = model.init_torchrec_delta_tracker(
            DeltaTrackerConfig(tracking_mode=mode)
        )

        def states(ids: Tensor, name: str, parts: list[Table] = parts) -> Tensor:
            return torch.cat([shard.read_rows(ids)[name] for shard in parts], dim=1)

        before: dict[int, Tensor] = {}
        last: dict[int, Tensor] = {}
        for step in (0, 1):
            given = features(step, raw=True)
            for i in given.values().tolist():
                one = torch.tensor([i])
                weight = torch.cat([shard.lookup(one) for shard in parts], dim=1)
                known = bool(parts[0].contains(one).all())
                last[i] = states(one, "sum")[0] if known else torch.zeros(8)
                if i not in before:
                    before[i] = weight[0] if known else torch.empty(0)
            model(given).backward()
        ((_, rows),) = tracker.get_unique().items()
        assert (
            sorted(rows.ids.tolist())
            == sorted(before)
            == sorted({RAW[i] for i in (1, 2, 3, 4, 9)})
        )
        for i, state in zip(
            rows.ids.tolist(),
            rows.states if rows.states is not None else [None] * 5,
            strict=True,
        ):
            if mode == TrackingMode.EMBEDDING:
                fresh = raw_model(bags, sharding_type, routing)
                first = torch.cat(
                    [s.lookup(torch.tensor([i]), train=True) for s in shards(fresh)],
                    dim=1,
                )
                torch.testing.assert_close(state, first[0])
            elif mode == TrackingMode.MOMENTUM_LAST:
                torch.testing.assert_close(state, last[i].norm())
            elif mode in SQUARES:
                torch.testing.assert_close(
                    state, states(torch.tensor([i]), "sum")[0].mean()
                )
                assert state > 0


def test_several_tables_of_one_group_and_stock_ones_beside() -> None:
    constraints: dict[str, ParameterConstraints] = {
        "a": RecStoreConstraints(sharding_types=["table_wise"]),
        "b": RecStoreConstraints(sharding_types=["table_wise"]),
        "c": ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        ),
    }
    sharder = RecStoreSharder(
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR}
    )
    for mode in (TrackingMode.ID_ONLY, *SQUARES):
        module = collection(
            bag("a", ["f"], dim=4),
            bag("b", ["f", "g"], dim=8),
            bag("c", ["h"], rows=10),
        )
        model = distributed(module, sharder, constraints)
        tracker = model.init_torchrec_delta_tracker(
            DeltaTrackerConfig(tracking_mode=mode)
        )
        model(batch(f=[[-1, 2]], g=[[3]], h=[[4]])).backward()
        rows = tracker.get_unique()
        assert {
            fqn.split(".")[-1]: sorted(unique.ids.tolist())
            for fqn, unique in rows.items()
        } == {
            "a": [-1, 2],
            "b": [-1, 2, 3],
            "c": [4],
        }
        for fqn, unique in rows.items():
            assert mode == TrackingMode.ID_ONLY or bool((unique.states > 0).all()), fqn


def test_a_mode_without_its_state_is_refused() -> None:
    refusals = [
        (TrackingMode.MOMENTUM_LAST, SGD(lr=LR), "a state, such"),
        (
            TrackingMode.MOMENTUM_DIFF,
            SGD(lr=LR, momentum=0.9),
            "a state of squared gradients, such",
        ),
        (
            TrackingMode.ROWWISE_ADAGRAD,
            SGD(lr=LR),
            "a state of squared gradients, such",
        ),
    ]
    for mode, optimizer, needs in refusals:
        model = recstore(collection(bag("t_user")), optimizer)
        with pytest.raises(
            ValueError,
            match=(
                f"'t_user': the tracking mode {mode.name} needs an optimizer with"
                f" {needs}"
            ),
        ):
            model.init_torchrec_delta_tracker(DeltaTrackerConfig(tracking_mode=mode))
    model = recstore(collection(bag("t_user")), Adam(lr=LR))
    model.init_torchrec_delta_tracker(
        DeltaTrackerConfig(tracking_mode=TrackingMode.MOMENTUM_DIFF)
    )


def test_a_table_that_is_skipped_is_not_tracked() -> None:
    model = DistributedModelParallel(
        Model(collection(bag("a", ["f"]), bag("b", ["g"]))),
        sharders=[RecStoreSharder()],
    )
    tracker = model.init_torchrec_delta_tracker(DeltaTrackerConfig(fqns_to_skip=["b"]))
    model(batch(f=[[1]], g=[[2]])).backward()
    assert {fqn: ids.tolist() for fqn, ids in tracker.get_unique_ids().items()} == {
        "tables.embedding_bags.a": [1]
    }
