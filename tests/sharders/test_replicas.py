"""``DMPCollection`` has replicas of tables, which RecStore does not average."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.planner import RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
)

from .models import bag, collection, sequence, sequences

pytestmark = pytest.mark.usefixtures("one_rank")


def processed() -> nn.Module:
    positions = PositionWeightedModuleCollection({"f": 3})
    return FeatureProcessedEmbeddingBagCollection(
        collection(bag("t_user"), is_weighted=True), positions
    )


@pytest.mark.parametrize(
    ("module", "sharder"),
    [
        (lambda: collection(bag("t_user")), RecStoreSharder),
        (lambda: sequences(sequence("t_user")), RecStoreEmbeddingCollectionSharder),
        (processed, RecStoreFeatureProcessedEmbeddingBagCollectionSharder),
    ],
    ids=["bags", "sequences", "processed"],
)
def test_it_is_refused_where_it_is_made(
    module: Callable[[], nn.Module],
    sharder: type[ModuleSharder[nn.Module]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # TorchRec needs an accelerator here, which is absent. The error is raised before
    # TorchRec uses it.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    model, sharders = nn.Sequential(module()), [sharder()]
    plan = RecStorePlanner(topology=Topology(world_size=1, compute_device="cuda")).plan(
        model, sharders
    )
    with pytest.raises(NotImplementedError) as refused:
        DMPCollection(
            model, torch.device("cuda"), plan, 1, 1, dist.group.WORLD, sharders=sharders
        )
    assert (
        str(refused.value)
        == "RecStore table(s) 't_user': DMPCollection would not average their replicas,"
        " which would drift apart: use DistributedModelParallel, which shards tables"
        " over all ranks and replicates the other layers, or TorchRec's own kernels"
    )
