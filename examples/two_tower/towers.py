"""The model: a tower for users and one for items, whose vectors' inner product ranks items for a user."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from common.sharding import table_name
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mlp import MLP

TEMPERATURE = 0.1
HIDDEN = 64


class Tower(nn.Module):
    """From lists of ids to a vector: pooled embeddings, side by side, through two layers.

    Args:
        features: names of the features, each with a table of its own.
        dim: width of the embeddings and of the vector.
        num_embeddings: declared rows of every table.
    """

    def __init__(self, features: Sequence[str], dim: int, num_embeddings: int) -> None:
        super().__init__()
        self.features = list(features)
        bound = 1 / math.sqrt(dim)  # given, and so the same for every kind of table
        tables = [
            EmbeddingBagConfig(
                name=table_name(feature),
                embedding_dim=dim,
                num_embeddings=num_embeddings,
                feature_names=[feature],
                weight_init_min=-bound,
                weight_init_max=bound,
            )
            for feature in features
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.layers = nn.Sequential(MLP(dim * len(tables), [HIDDEN]), nn.Linear(HIDDEN, dim))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Returns a unit vector for each sample, (B, dim)."""
        # By key: a sharded collection gives its embeddings in another order.
        pooled = self.embeddings(ids).to_dict()
        return nn.functional.normalize(self.layers(torch.cat([pooled[name] for name in self.features], dim=1)))


class TwoTower(nn.Module):
    """Both towers.

    Args:
        user_features: names of the users' features.
        item_features: names of the items' features.
        dim: width of embeddings and vectors.
        num_embeddings: declared rows of every table.
    """

    def __init__(
        self, user_features: Sequence[str], item_features: Sequence[str], dim: int, num_embeddings: int
    ) -> None:
        super().__init__()
        self.user = Tower(user_features, dim, num_embeddings)
        self.item = Tower(item_features, dim, num_embeddings)

    def forward(self, users: KeyedJaggedTensor, items: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors of users and items, each (B, dim)."""
        return self.user(users), self.item(items)


def in_batch_softmax(users: Tensor, items: Tensor, item_places: Tensor, log_shares: Tensor) -> Tensor:
    """Cross-entropy of each user's own item among all items of the batch.

    A popular item stands among the others more often than a rare one: taking the log of its share of all interactions
    from its score makes up for that.
    Source: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019.

    Args:
        users: (B, dim).
        items: (B, dim), the item of each user.
        item_places: (B,) which item it is; the same item again in the batch is no wrong answer, and left out.
        log_shares: (B,) log of each item's share of the interactions.
    """
    scores = users @ items.T / TEMPERATURE - log_shares
    own = torch.eye(len(users), dtype=torch.bool)
    again = (item_places[:, None] == item_places[None, :]) & ~own
    return nn.functional.cross_entropy(scores.masked_fill(again, -math.inf), torch.arange(len(users)))
