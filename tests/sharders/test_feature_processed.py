"""RecStore's kernel trains the per-sample weights of feature-processed collections."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
    table_stats,
)
from torchrec_recstore.utils import RecStoreWarning

from .models import bag, batch, collection

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTHS = {"f": 4, "g": 3}


def module(
    *tables: EmbeddingBagConfig, device: str
) -> FeatureProcessedEmbeddingBagCollection:
    positions = PositionWeightedModuleCollection(LENGTHS, device=torch.device("cpu"))
    for index, weight in enumerate(positions.parameters()):
        weight.data.copy_(torch.linspace(0.5, 1.5 + index, len(weight)))
    return FeatureProcessedEmbeddingBagCollection(
        collection(*tables, device=device, is_weighted=True), positions
    )


def kjt() -> KeyedJaggedTensor:
    return batch(f=[[1, 2, 1], [3]], g=[[], [5, 1]])


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", None])
def test_gradients_of_positions_and_rows(sharding_type: str | None) -> None:
    tables = [bag("a", ["f"], rows=10), bag("b", ["g"], rows=10, dim=8)]
    reference = module(*tables, device="cpu")
    for table in reference._embedding_bag_collection.embedding_bags.values():
        nn.init.constant_(table.weight, 0.25)
    options = TableOptions(initializer=ConstantInit(0.25))
    sharder = RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
        ebc_sharder=RecStoreSharder(fused_params={"learning_rate": 0.1})
    )
    unsharded = module(*tables, device="meta")
    plan: ShardingPlan | None = None
    if sharding_type is not None:
        constraints = {
            t.name: RecStoreConstraints(sharding_types=[sharding_type], options=options)
            for t in tables
        }
        plan = RecStorePlanner(constraints=constraints).plan(unsharded, [sharder])
    model = DistributedModelParallel(
        unsharded if plan else nn.Sequential(unsharded),
        plan=plan,
        sharders=[sharder],
        device=torch.device("cpu"),
    )
    if plan is None:
        model(kjt())
        assert table_stats(model)["a"].rows == 3
        return
    rows = torch.optim.SGD(reference._embedding_bag_collection.parameters(), lr=0.1)
    for _ in range(3):
        expected, out = (
            reference(kjt()).to_dict(),
            model(copy.deepcopy(kjt())).to_dict(),
        )
        for key in expected:
            torch.testing.assert_close(out[key], expected[key], atol=1e-6, rtol=0)
        reference.zero_grad()
        model.zero_grad()
        sum((value**2).sum() for value in expected.values()).backward()
        sum((value**2).sum() for value in out.values()).backward()
        positions = dict(model.named_parameters())
        for name, weight in reference._feature_processors.named_parameters():
            (found,) = [p for n, p in positions.items() if n.endswith(name)]
            torch.testing.assert_close(found.grad, weight.grad, atol=1e-5, rtol=0)
        rows.step()
    assert table_stats(model)["b"].rows == 2


def test_positions_are_trained_in_evaluation_as_in_training() -> None:
    unsharded = module(
        bag("a", ["f"], rows=10), bag("b", ["g"], rows=10, dim=8), device="meta"
    )
    sharder = RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
        ebc_sharder=RecStoreSharder({"learning_rate": 0.0})
    )
    model = DistributedModelParallel(
        nn.Sequential(unsharded), sharders=[sharder], device=torch.device("cpu")
    )

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(kjt()).values().square().sum().backward()
        return [
            weight.grad
            for name, weight in model.named_parameters()
            if "position" in name and weight.grad is not None
        ]

    expected = gradients()
    model.eval()
    with pytest.warns(
        RecStoreWarning, match="backward of a lookup in evaluation mode updates no row"
    ):
        found = gradients()
    assert len(found) == len(expected) == 2
    assert all(gradient.abs().max() > 0 for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_only_a_recstore_sharder_goes_inside() -> None:
    with pytest.raises(TypeError, match="EmbeddingBagCollectionSharder"):
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
            ebc_sharder=EmbeddingBagCollectionSharder()
        )
