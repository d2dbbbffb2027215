"""docs/comparison.md: facts on others have sources, what it says was tried is tried,
and its column on us is true.
"""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import NoEvictionPolicy
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.packages import ROOT
from torchrec_recstore.triples import release

DOCUMENT = (ROOT / "docs" / "comparison.md").read_text()
CPU = torch.device("cpu")
VIRTUAL = [
    "key_value",
    "ssd_virtual_table",
    "dram_virtual_table",
    "dram_ssd_virtual_table",
]


def section(title: str) -> str:
    (text,) = re.findall(
        rf"^## {title}\n(.*?)(?=^## |\Z)", DOCUMENT, flags=re.DOTALL | re.MULTILINE
    )
    return str(text)


def rows_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]
    ]


def test_every_mark_has_a_source_and_every_source_a_use() -> None:
    text, _, sources = DOCUMENT.partition("## Sources")
    used = set(re.findall(r"\]\[(\w+)\]", text))
    listed = set(re.findall(r"\[(\w+)\](?!:)", sources.partition("\n[d1]: ")[0]))
    linked = dict(
        re.findall(r"^\[(\w+)\]: (https://\S+)$", sources, flags=re.MULTILINE)
    )
    assert used == listed == linked.keys()
    for link in linked.values():
        pinned = re.search(
            r"/blob/[0-9a-f]{40}/|/project/[\w-]+/1\.8\.0/$|/issues/\d+$", link
        )
        assert pinned, f"{link} has neither a commit nor a version"


def test_every_cell_on_others_has_a_source() -> None:
    for row in rows_of(section("Side by side")):
        assert len(row) == 6, row
        for cell in row[2:]:
            assert (
                re.search(r"\]\[\w+\]", cell)
                or "not found" in cell
                or "(#tried-here)" in cell
            ), (row[0], cell)


def by_hand(
    module: nn.Module, sharder: ModuleSharder[nn.Module], kernel: str, rows: int
) -> DistributedModelParallel:
    shard = ShardMetadata(
        shard_sizes=[rows, 16], shard_offsets=[0, 0], placement="rank:0/cpu"
    )
    sharding = ParameterSharding(
        "row_wise", kernel, ranks=[0], sharding_spec=EnumerableShardingSpec([shard])
    )
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"t": sharding})})
    return DistributedModelParallel(module, plan=plan, sharders=[sharder], device=CPU)


def collection(rows: int, **more: object) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=16, num_embeddings=rows, feature_names=["f"], **more
    )
    return EmbeddingBagCollection([config], device=torch.device("meta"))


def virtual(kernel: str) -> EmbeddingBagCollection:
    more = {
        "use_virtual_table": True,
        "total_num_buckets": 4,
        "virtual_table_eviction_policy": NoEvictionPolicy(),
    }
    return collection(2**20, **(more if "virtual" in kernel else {}))


@pytest.mark.parametrize("kernel", VIRTUAL)
def test_virtual_tables_are_not_planned_on_a_cpu(one_rank: None, kernel: str) -> None:
    assert f"`{kernel}`" in section("Tried here")
    constraints = {
        "t": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=[kernel])
    }
    topology = Topology(world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, debug=False
    )
    with pytest.raises(
        RuntimeError, match="No available sharding type and compute kernel combination"
    ):
        planner.collective_plan(
            virtual(kernel), [EmbeddingBagCollectionSharder()], dist.group.WORLD
        )


@pytest.mark.parametrize("kernel", VIRTUAL)
def test_virtual_tables_are_not_made_on_a_cpu(one_rank: None, kernel: str) -> None:
    expected, message = AssertionError, "Torch not compiled with CUDA enabled"
    if kernel == "dram_ssd_virtual_table":
        expected = ValueError
        before = release(version("torchrec")) < (1, 8)  # the document is about 1.8.0
        message = (
            "Compute kernel not supported"
            if before
            else "only supports the embedding cache"
        )
    elif torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA")
    with pytest.raises(expected, match=message):
        by_hand(virtual(kernel), EmbeddingBagCollectionSharder(), kernel, 2**20)


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_sorted_managed_collision_on_a_cpu(one_rank: None, optimizer: str) -> None:
    ebc = collection(8)
    sorted_ids = MCHManagedCollisionModule(
        8, CPU, LRU_EvictionPolicy(), eviction_interval=2, input_hash_size=2**62
    )
    managed = ManagedCollisionCollection({"t": sorted_ids}, ebc.embedding_bag_configs())
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType[optimizer], "learning_rate": 0.01}
    )
    assert sharder.sharding_types("cpu") == []
    model = by_hand(
        ManagedCollisionEmbeddingBagCollection(ebc, managed), sharder, "fused", 8
    )
    for step in range(4):
        ids = KeyedJaggedTensor(
            ["f"], torch.arange(3) + 2**40 + 3 * step, lengths=torch.tensor([3])
        )
        if optimizer == "EXACT_ROWWISE_ADAGRAD" and step == 1:
            assert "`fbgemm::reset_weight_momentum`" in section("Tried here")
            with pytest.raises(NotImplementedError, match="reset_weight_momentum"):
                model(ids)
            return
        pooled, _ = model(ids)
        pooled.values().sum().backward()
    assert pooled.values().shape == (1, 16)


def test_hashed_managed_collision_does_not_train_on_a_cpu() -> None:
    module = HashZchManagedCollisionModule(
        zch_size=16, device=CPU, total_num_buckets=4
    ).train()
    with pytest.raises(
        RuntimeError, match="Expected readonly to be true, but got false"
    ):
        module(
            {"t": JaggedTensor(torch.tensor([7, 2**40, 5]), lengths=torch.tensor([3]))}
        )
