"""The model of the example.

It has embeddings of user and item, and dense layers over them and over their product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim.optimizers import in_backward_optimizer_filter

from online.clicks import Clicks
from online.settings import Settings
from torchrec_recstore import (
    Expiry,
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    TableOptions,
    UniformInit,
)

FEATURES = ["user", "item"]
HINT_ROWS = 2**20


class Taste(nn.Module):
    """Predicts whether a user clicks an item.

    Args:
        dim: The width of the embeddings.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t_{feature}",
                embedding_dim=dim,
                num_embeddings=HINT_ROWS,
                feature_names=[feature],
            )
            for feature in FEATURES
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = nn.Sequential(
            nn.Linear(3 * dim, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )
        self._dim = dim

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the logits of clicks, (B,) float32.

        Args:
            features: One user and one item for each click.
        """
        user, item = self.bags(features).values().split(self._dim, dim=1)
        x = torch.cat([user, item, user * item], dim=1)
        return self.over(x).squeeze(1)


def features_of(clicks: Clicks) -> KeyedJaggedTensor:
    """Returns the input of the model for clicks (B,)."""
    columns = [torch.from_numpy(clicks[name].copy()) for name in FEATURES]
    values = torch.cat(columns)
    lengths = torch.ones_like(values, dtype=torch.int32)
    return KeyedJaggedTensor(
        keys=FEATURES,
        values=values,
        lengths=lengths,
    )


def build(settings: Settings) -> tuple[DistributedModelParallel, torch.optim.Adam]:
    """Shards the tables of a new model. The process group must be initialized.

    Returns:
        The model, and the optimizer of its dense layers. The embeddings are updated in
        the backward pass.
    """
    torch.manual_seed(settings.seed)
    model = Taste(settings.dim)
    # Adam, because the steps of Adagrad become smaller and smaller, so that the model
    # would not follow the drift.
    fused_params = {"optimizer": EmbOptimType.ADAM, "learning_rate": settings.lr}
    sharders: list[Any] = [RecStoreSharder(fused_params=fused_params)]
    options = TableOptions(
        initializer=UniformInit(-0.1, 0.1),
        seed=settings.seed,
        expiry=Expiry(seconds=settings.expire_s),
    )
    constraint = RecStoreConstraints(options=options)
    constraints = {f"t_{feature}": constraint for feature in FEATURES}
    topology = Topology(world_size=1, compute_device="cpu")
    planner = RecStorePlanner(topology=topology, constraints=constraints)
    group = dist.group.WORLD
    assert group is not None
    plan = planner.collective_plan(model, sharders, group)
    sharded = DistributedModelParallel(
        model,
        plan=plan,
        sharders=sharders,
        device=torch.device("cpu"),
    )
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, torch.optim.Adam(dense.values(), lr=settings.lr)
