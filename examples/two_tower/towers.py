"""The two-tower model: the inner product of a user's vector and an item's vector ranks items for the user."""

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
    """A tower, which turns lists of ids into a vector: two dense layers on the concatenated pooled embeddings.

    Args:
        features: The names of the features. Each feature has its own table.
        dim: The width of the embeddings and of the vector.
        num_embeddings: The declared number of rows of every table.
    """

    def __init__(self, features: Sequence[str], dim: int, num_embeddings: int) -> None:
        super().__init__()
        self.features = list(features)
        bound = 1 / math.sqrt(dim)  # set explicitly, so that stock and RecStore tables begin alike
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
        # The embeddings are read by key, because a sharded collection returns them in another order.
        pooled = self.embeddings(ids).to_dict()
        return nn.functional.normalize(self.layers(torch.cat([pooled[name] for name in self.features], dim=1)))


class TwoTower(nn.Module):
    """A model of a tower for users and a tower for items.

    Args:
        user_features: The names of the features of users.
        item_features: The names of the features of items.
        dim: The width of the embeddings and of the vectors.
        num_embeddings: The declared number of rows of every table.
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
    """Returns the mean cross-entropy of each user's own item among all items of the batch.

    A popular item is a wrong answer in a batch more often than a rare item. To correct this bias, the logarithm of the
    item's share of all interactions is subtracted from its score.
    Source: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019.

    Args:
        users: (B, dim). The vectors of the users.
        items: (B, dim). The vector of the item of each user.
        item_places: (B,) int64. The number of each item. Another sample with the same item is not a wrong answer and is
            left out.
        log_shares: (B,). The logarithm of each item's share of the interactions.
    """
    scores = users @ items.T / TEMPERATURE - log_shares
    own = torch.eye(len(users), dtype=torch.bool)
    again = (item_places[:, None] == item_places[None, :]) & ~own
    return nn.functional.cross_entropy(scores.masked_fill(again, -math.inf), torch.arange(len(users)))
