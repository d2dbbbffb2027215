"""TorchRec's own test models and batches, by cell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.distributed.test_utils.test_model import (
    ModelInput,
    TestMixedEmbeddingSparseArch,
    TestSparseNN,
)
from torchrec.modules.embedding_configs import DataType

from .cells import Cell
from .extras import with_extra

FLOATS = 10
BATCH_SIZE = 6


@dataclass
class WeightedBagConfig(EmbeddingBagConfig):
    """What ``ModelInput.generate_variable_batch_input`` looks for where it makes
    weights.
    """

    is_weighted: bool = True


@dataclass(frozen=True)
class Tables:
    """Of a cell's model: the plain ones, and those of its weighted collection."""

    plain: list[EmbeddingBagConfig] | list[EmbeddingConfig]
    weighted: list[EmbeddingBagConfig]


def tables_of(cell: Cell, *, unsharded: bool = False) -> Tables:
    """Different numbers of rows, none a multiple of the world sizes; different dims
    where the module allows them.

    Args:
        unsharded: for a model that is not sharded. There torch has no weighted mean:
            the weighted tables take the sum, and the weights of the batch are to be
            divided (``averaging``).
    """
    data_type = DataType[cell.data_type]
    if cell.sequential:
        return Tables(
            [
                EmbeddingConfig(
                    11 + 10 * i, 8, f"table_{i}", data_type, [f"feature_{i}"]
                )
                for i in range(3)
            ],
            [],
        )
    pooling = PoolingType[cell.pooling.upper()]
    plain = [
        EmbeddingBagConfig(
            11 + 10 * i,
            (8, 16)[i % 2],
            f"table_{i}",
            data_type,
            [f"feature_{i}"],
            pooling=pooling,
        )
        for i in range(3)
    ]
    if not cell.weighted:
        return Tables(plain, [])
    of_weighted = PoolingType.SUM if unsharded else pooling
    weighted: list[EmbeddingBagConfig] = [
        WeightedBagConfig(
            13 + 10 * i,
            (16, 8)[i],
            f"weighted_{i}",
            data_type,
            [f"weighted_feature_{i}"],
            pooling=of_weighted,
        )
        for i in range(2)
    ]
    return Tables(plain, weighted)


def model_of(cell: Cell, tables: Tables) -> nn.Module:
    """The unsharded model; the same weights on every call."""
    torch.manual_seed(0)
    if cell.sequential:
        return TestMixedEmbeddingSparseArch(
            tables=tables.plain, num_float_features=FLOATS
        )
    return TestSparseNN(
        tables=tables.plain, num_float_features=FLOATS, weighted_tables=tables.weighted
    )


def averaging(batch: ModelInput, *, by_weights: bool) -> ModelInput:
    """The batch whose weighted sums are TorchRec's weighted means.

    Args:
        by_weights: of tables split by rows (torchrec 1.8.0,
            ``_create_mean_pooling_divisor``): the weighted sum over the sum of the
            weights. Else, as FBGEMM has it, over the number of rows.
    """
    scores = batch.idscore_features
    lengths = scores.lengths()
    divisors = (
        torch.segment_reduce(scores.weights(), "sum", lengths=lengths)
        if by_weights
        else lengths
    )
    scores._weights = scores.weights() / divisors.repeat_interleave(lengths)
    return batch


def batches_of(
    cell: Cell, tables: Tables, step: int
) -> tuple[ModelInput, list[ModelInput]]:
    """All ranks' batch for the unsharded model, and each rank's own."""
    if cell.varying:
        return ModelInput.generate_variable_batch_input(
            average_batch_size=BATCH_SIZE,
            world_size=cell.world_size,
            num_float_features=FLOATS,
            tables=tables.plain,
            weighted_tables=tables.weighted,
            global_constant_batch=True,
            random_seed=step,
        )
    all_ranks, by_rank = ModelInput.generate(
        batch_size=BATCH_SIZE,
        world_size=cell.world_size,
        num_float_features=FLOATS,
        tables=tables.plain,
        weighted_tables=tables.weighted,
        random_seed=step,
    )
    if cell.extra:
        ranks = range(cell.world_size)
        all_ranks = with_extra(all_ranks, cell.extra, step, ranks, BATCH_SIZE)
        by_rank = [
            with_extra(by_rank[rank], cell.extra, step, [rank], BATCH_SIZE)
            for rank in ranks
        ]
    return all_ranks, by_rank
