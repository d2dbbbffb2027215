"""A sequence model that replaces TorchRec's
``torchrec.distributed.tests.test_sequence_model``, for its test models.

``torchrec.distributed.test_utils.test_sharding`` imports that module, which the wheel
of torchrec 1.8.0 does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.test_utils.test_model import (
    ModelInput,
    TestDenseArch,
    TestSparseNNBase,
)
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from .sharders import SequenceSharder, StockSequenceSharder
from .tables import STOCK

TestEmbeddingCollectionSharder = StockSequenceSharder if STOCK else SequenceSharder

__all__ = ["TestEmbeddingCollectionSharder", "TestSequenceSparseNN"]

LONGEST = 20
"""The number of rows of a sequence that the model reads.

Shorter sequences are padded with zeros.
"""


class SequenceArch(nn.Module):
    """The rows of each sequence, concatenated: (B, features * LONGEST * dim)."""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        names: Sequence[str],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.ec = EmbeddingCollection(
            tables=list(tables), device=device, need_indices=True
        )
        self.names = list(names)

    def forward(self, features: Any) -> Tensor:
        rows = self.ec(features)
        filled = [
            torch.ops.fbgemm.jagged_2d_to_dense(
                rows[name].values(), rows[name].offsets(), LONGEST
            )
            for name in self.names
        ]
        return torch.cat([sequences.flatten(1) for sequences in filled], dim=1)


class TestSequenceSparseNN(TestSparseNNBase):
    """A dense layer on the float features, the sequences, and a layer on both."""

    __test__ = False

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        weighted_tables: list[EmbeddingConfig] | None = None,
        num_float_features: int = 10,
        embedding_groups: Mapping[str, list[str]] | None = None,
        dense_device: torch.device | None = None,
        sparse_device: torch.device | None = None,
        feature_processor_modules: dict[str, nn.Module] | None = None,
    ) -> None:
        super().__init__(
            tables=tables,
            weighted_tables=weighted_tables,
            embedding_groups=embedding_groups,
            dense_device=dense_device,
            sparse_device=sparse_device,
        )
        names = next(
            iter((embedding_groups or {}).values()),
            [f for t in tables for f in t.feature_names],
        )
        width = LONGEST * sum(
            table.embedding_dim * len(table.feature_names) for table in tables
        )
        self.dense = TestDenseArch(
            device=dense_device, num_float_features=num_float_features
        )
        self.sparse = SequenceArch(tables, names, sparse_device)
        self.over = nn.Linear(
            self.dense.linear.out_features + width, 16, device=dense_device
        )

    def forward(self, input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:
        dense = self.dense(input.float_features)
        # A rank with fewer sequences has as many float features as the other ranks.
        sequences = self.sparse(input.idlist_features)
        sequences = nn.functional.pad(sequences, (0, 0, 0, len(dense) - len(sequences)))
        # Rows are multiplied by ten, so that a wrong row changes the prediction by more
        # than the tolerance.
        over = self.over(torch.cat([dense, 10 * sequences], dim=1))
        prediction = torch.sigmoid(over.mean(dim=1))
        if not self.training:
            return prediction
        return (
            nn.functional.binary_cross_entropy_with_logits(prediction, input.label),
            prediction,
        )
