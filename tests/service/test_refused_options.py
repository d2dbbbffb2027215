"""Tests that servers refuse what the page Service lists, and that the page lists what
they refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore import (
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    RecStoreSharder,
)
from torchrec_recstore.optim import Adagrad, Optimizer, RowOptimizer
from torchrec_recstore.options import RocksDBStore, Servers, TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders.plan_entries import check_plan

PAGE = Path(__file__).parents[2] / "docs" / "service.md"
# no server listens there: a refusal calls none
NOWHERE = Servers(["127.0.0.1:1"], timeout_s=0.5)


def shard(
    optimizer: Optimizer = Adagrad(lr=0.1),  # noqa: B008  (frozen)
    *,
    sharding: str = "table_wise",
    data_type: str = "FP32",
    steps: int = 1,
    **fused_params: object,
) -> None:
    config = bag(data_type)
    model = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    constraints = {
        config.name: RecStoreConstraints(
            sharding_types=[sharding], options=TableOptions(servers=NOWHERE)
        )
    }
    sharder = RecStoreSharder(
        optimizer=optimizer, fused_params=fused_params, accumulation_steps=steps
    )
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    DistributedModelParallel(
        model, plan=plan, sharders=[sharder], device=torch.device("cpu")
    )


def bag(data_type: str = "FP32") -> EmbeddingBagConfig:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=100, feature_names=["f"]
    )
    config.data_type = DataType[data_type]
    return config


def eager(**arguments: Any) -> None:
    with RecStoreClient(["127.0.0.1:1"], timeout_s=0.5) as client:
        RecStoreEmbeddingBagCollection([bag()], client=client, **arguments)


def plan_of_ones_own() -> None:
    from torchrec_recstore.sharders.plan_entries import RecStoreParameterSharding

    entry = RecStoreParameterSharding(
        sharding_type="row_wise",
        compute_kernel=EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value,
        ranks=[0],
        options=TableOptions(servers=NOWHERE),
    )
    check_plan(bag(), entry, ["row_wise", "table_wise"], "EmbeddingBagCollection")


def cold_store() -> None:
    with RecStoreClient() as client:
        client.init_data(
            "t",
            (10, 8),
            options=TableOptions(max_rows=5, cold_store=RocksDBStore("cold")),
        )


CASES: dict[str, list[Callable[[], None]]] = {
    "a sharding type other than `table_wise`": [
        lambda sharding=sharding: shard(sharding=sharding.value)  # type: ignore[misc]
        for sharding in ShardingType
        if sharding not in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    ],
    "such a sharding type in a plan of one's own": [plan_of_ones_own],
    '`fused_params={"state_dtype": torch.float16}`': [
        lambda: shard(state_dtype=torch.float16)
    ],
    '`fused_params={"stochastic_rounding": True}` with 16-bit rows': [
        lambda: shard(data_type="FP16", stochastic_rounding=True),
        lambda: shard(data_type="BF16", stochastic_rounding=True),
    ],
    "`accumulation_steps` above 1": [lambda: shard(steps=2)],
    "`TableOptions(cold_store=...)`": [cold_store],
    "a user-defined optimizer (`RowOptimizer`)": [
        lambda: shard(RowOptimizer(name="own", step="w -= lr * g;"))
    ],
    "`state_dtype=torch.float16` of an eager collection": [
        lambda: eager(state_dtype=torch.float16)
    ],
    "`fused=False` of an eager collection": [lambda: eager(fused=False)],
    '`device="meta"` of an eager collection': [lambda: eager(device="meta")],
}


def listed() -> dict[str, str]:
    """Returns the error of each option in the page's table."""
    lines = PAGE.read_text().split("| option | error | reason |\n")[1].splitlines()[1:]
    table = lines[
        : next(number for number, line in enumerate(lines) if not line.startswith("|"))
    ]
    return {
        option.strip(): error.strip(" `")
        for _, option, error, *_ in (line.split("|") for line in table)
    }


def test_the_page_lists_every_case() -> None:
    assert set(listed()) == set(CASES)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("option", CASES)
def test_it_is_refused_by_the_error_of_the_page(option: str) -> None:
    for case in CASES[option]:
        with pytest.raises(Exception) as refused:  # noqa: PT011  (the page has the message)
            case()
        assert listed()[option] in str(refused.value)
