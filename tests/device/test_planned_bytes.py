"""The planner's estimates of the bytes over the bus, against the copies that a
simulated device counted in a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.device import scenarios, simulated
from tests.device.results import results_of
from torchrec_recstore import (
    RecStoreConstraints,
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStorePlanner,
    RecStoreSharder,
    table_stats,
)
from torchrec_recstore.planner import RecStoreEnumerator
from torchrec_recstore.planner.shard_estimators import bus_bytes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(
            torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
        ),
        reason="this torch has no devices in Python",
    ),
]

BATCH, LENGTH, KEYS = 512, 3, 3
META = torch.device("meta")
CASES = ("sum", "fp16", "weighted", "sequences", "feature_processors")


def module(case: str) -> Any:
    if case == "sequences":
        return EmbeddingCollection(scenarios.sequence_tables(), device=META)
    weighted = case in ("weighted", "feature_processors")
    ebc = EmbeddingBagCollection(
        scenarios.bag_tables(), device=META, is_weighted=weighted
    )
    if case != "feature_processors":
        return ebc
    positions = dict.fromkeys(("u", "i", "j"), 2 * LENGTH)
    return FeatureProcessedEmbeddingBagCollection(
        ebc, PositionWeightedModuleCollection(positions, torch.device("cpu"))
    )


def batch(device: torch.device, weighted: bool) -> KeyedJaggedTensor:
    lengths = torch.randint(
        0, 2 * LENGTH + 1, (KEYS * BATCH,), generator=torch.Generator().manual_seed(3)
    )
    count = int(lengths.sum())
    weights = torch.rand(count) if weighted else None
    return KeyedJaggedTensor(
        ["u", "i", "j"], torch.arange(count) * 31, lengths=lengths, weights=weights
    ).to(device)


def counted_and_planned(
    case: str, compute_device: str, device: torch.device
) -> dict[str, Any]:
    """The bytes to the host and to the device: counted in the second step on the
    device, and planned for it.
    """
    params = {
        "learning_rate": 0.1,
        **({"output_dtype": DataType.FP16} if case == "fp16" else {}),
    }
    sharders: list[Any] = [
        RecStoreSharder(fused_params=params),
        RecStoreEmbeddingCollectionSharder(fused_params=params),
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
            RecStoreSharder(fused_params=params)
        ),
    ]
    constraints: dict[str, Any] = {
        "t_user": RecStoreConstraints(
            pooling_factors=[LENGTH], sharding_types=["table_wise"]
        ),
        "t_item": RecStoreConstraints(
            pooling_factors=[LENGTH] * 2, sharding_types=["table_wise"]
        ),
    }
    topology = Topology(world_size=1, local_world_size=1, compute_device=compute_device)
    model = module(case)
    enumerator = RecStoreEnumerator(topology, BATCH, constraints)
    planner = RecStorePlanner(
        topology, BATCH, enumerator, constraints=constraints, debug=False
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    planned = [
        each
        for option in enumerator.found
        for each in bus_bytes_of(option, topology, constraints, enumerator.sharder_map)
    ]
    sharded = DistributedModelParallel(
        model,
        plan=plan,
        sharders=sharders,
        device=device,
        init_data_parallel=False,
        init_parameters=False,
    )
    features = batch(device, case == "weighted")
    for _ in range(2):
        simulated.copies.clear()
        out = scenarios.outputs(sharded(features).wait())
        torch.stack(
            [(each.float() * each.float()).sum() for each in out]
        ).sum().backward()
    # TorchRec copies a few numbers of each key
    big = [each for each in simulated.copies if each.bytes > BATCH]
    return {
        "counted": tuple(
            sum(each.bytes for each in big if each.way == way) for way in ("down", "up")
        ),
        "planned": (
            sum(each.down for each in planned),
            sum(each.up for each in planned),
        ),
        "rows": sum(stats.rows for stats in table_stats(sharded).values()),
        "placements": {
            str(each.sharding_spec.shards[0].placement)
            for each in plan.plan[""].values()
        },
    }


def run(path: str) -> None:
    device = simulated.register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {case: counted_and_planned(case, "cuda", device) for case in CASES}
    found["mtia"] = counted_and_planned("sum", "mtia", device)
    torch.save(found, path)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path: Path = tmp_path_factory.mktemp("planned") / "found"
    results: dict[str, Any] = results_of(run, path)
    return results


@pytest.mark.parametrize("case", [*CASES, "mtia"])
def test_a_step_copies_the_bytes_that_were_planned(
    case: str, found: dict[str, Any]
) -> None:
    of_case = found[case]
    assert of_case["rows"] > 0
    assert of_case["placements"] == {
        "rank:0/mtia:0" if case == "mtia" else "rank:0/cuda:0"
    }
    for counted, planned in zip(of_case["counted"], of_case["planned"], strict=True):
        assert counted > 10_000
        assert planned == pytest.approx(counted, rel=0.05)


def test_half_the_bytes_of_rows_in_16_bits(found: dict[str, Any]) -> None:
    assert found["fp16"]["planned"][1] * 2 == found["sum"]["planned"][1]
