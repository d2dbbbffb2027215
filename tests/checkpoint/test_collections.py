"""Checkpoints of other collections, of two collections in a model, and of a single
sharded module.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreSharder,
    load_checkpoint,
    save_checkpoint,
    table_stats,
)
from torchrec_recstore.sharders.model_tables import recstore_tables

pytestmark = pytest.mark.usefixtures("one_rank")
META = torch.device("meta")
BATCH = KeyedJaggedTensor(
    keys=["a", "b"],
    values=torch.tensor([1, -(2**60), 5, 1, 7]),
    lengths=torch.tensor([2, 1, 1, 1]),
)


class Both(nn.Module):
    """A model with a sequence collection and a pooled collection."""

    def __init__(self, second: str) -> None:
        super().__init__()
        sequence = [
            EmbeddingConfig(
                name="seq", embedding_dim=4, num_embeddings=10, feature_names=["a", "b"]
            )
        ]
        pooled = [
            EmbeddingBagConfig(
                name=second, embedding_dim=8, num_embeddings=10, feature_names=["b"]
            )
        ]
        self.sequence = EmbeddingCollection(tables=sequence, device=META)
        self.pooled = EmbeddingBagCollection(tables=pooled, device=META)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the sum of all outputs."""
        rows = self.sequence(features)
        return (
            torch.stack([rows[key].values().sum() for key in ("a", "b")]).sum()
            + self.pooled(features).values().sum()
        )


def build(second: str = "bag") -> DistributedModelParallel:
    sharders = [RecStoreEmbeddingCollectionSharder(), RecStoreSharder()]
    return DistributedModelParallel(
        Both(second), sharders=sharders, device=torch.device("cpu")
    )


def rows_of(model: nn.Module) -> list[torch.Tensor]:
    shards = [s.table for t in recstore_tables(model) for s in t.shards]
    return [
        value
        for table in shards
        for value in (table.ids(), *table.read_rows(table.ids()).values())
    ]


def test_two_collections_and_each_alone(tmp_path: Path) -> None:
    model, other = build(), build()
    for _ in range(2):
        model(BATCH).backward()
    save_checkpoint(model, tmp_path / "saved")
    load_checkpoint(other, tmp_path / "saved")
    assert {name: stats.rows for name, stats in table_stats(other).items()} == {
        "seq": 4,
        "bag": 2,
    }
    assert all(
        torch.equal(one, two)
        for one, two in zip(rows_of(model), rows_of(other), strict=True)
    )
    save_checkpoint(model.module.sequence, tmp_path / "alone")
    third = build()
    load_checkpoint(third.module.sequence, tmp_path / "alone")
    assert {name: stats.rows for name, stats in table_stats(third).items()} == {
        "seq": 4,
        "bag": 0,
    }
