"""Batches that carry more than an unweighted collection needs give the results of
unsharded TorchRec.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torchrec import EmbeddingConfig, KeyedJaggedTensor, PoolingType

from tests.sharders.models import collection, sharded
from torchrec_recstore import load_dense_weights

from .reference import Case
from .test_sharded_equals_unsharded import (
    COLUMN,
    GRID,
    ROW,
    TABLE,
    TABLE_ROW,
    recstore,
    three_tables,
    train_and_compare,
)
from .workers import run_on_ranks

TABLE_COLUMN = "table_column_wise"


@dataclass(frozen=True)
class GivenWeights(Case):
    """A case of an unweighted collection whose sharded model gets per-sample weights."""

    def sharded_batch(self, step: int, rank: int) -> KeyedJaggedTensor:
        plain = super().sharded_batch(step, rank)
        generator = torch.Generator().manual_seed(step)
        weights = torch.rand(len(plain.values()), generator=generator)
        return KeyedJaggedTensor(
            plain.keys(), plain.values(), weights=weights, lengths=plain.lengths()
        )


@dataclass(frozen=True)
class InAnyOrder(Case):
    """A case whose sharded model gets the features, and their inverse indices, in
    another order in each step.
    """

    def sharded_batch(self, step: int, rank: int) -> KeyedJaggedTensor:
        ordered = super().sharded_batch(step, rank)
        generator = torch.Generator().manual_seed(step + 100 * rank)
        order = torch.randperm(len(ordered.keys()), generator=generator)
        shuffled = ordered.permute(order.tolist())
        if ordered.inverse_indices_or_none() is None:
            return shuffled
        names, bags = ordered.inverse_indices()
        inverse_order = torch.randperm(len(names), generator=generator)
        return KeyedJaggedTensor(
            keys=shuffled.keys(),
            values=shuffled.values(),
            lengths=shuffled.lengths(),
            stride_per_key_per_rank=shuffled.stride_per_key_per_rank(),
            inverse_indices=(
                [names[place] for place in inverse_order.tolist()],
                bags[inverse_order],
            ),
        )


def bags_in_any_order(rank: int, world_size: int) -> None:
    for pooling in (PoolingType.MEAN, PoolingType.SUM):
        tables = three_tables(pooling)
        # A feature of two tables, and shardings in another order than that of the
        # tables.
        mixed = {"many": recstore(TABLE), "few": recstore(ROW), "also": recstore(TABLE)}
        train_and_compare(InAnyOrder(tables), mixed, rank, world_size)


def varying_bags_in_any_order(rank: int, world_size: int) -> None:
    types = (ROW, TABLE, COLUMN) if world_size == 1 else (TABLE, COLUMN)
    for pooling in (PoolingType.MEAN, PoolingType.SUM):
        for sharding_type in types:
            tables = three_tables(pooling)
            constraints = {table.name: recstore(sharding_type) for table in tables}
            train_and_compare(
                InAnyOrder(tables, varying=True), constraints, rank, world_size
            )


def bags_with_weights(rank: int, world_size: int) -> None:
    for pooling in (PoolingType.MEAN, PoolingType.SUM):
        for sharding_type in (ROW, TABLE, COLUMN, TABLE_COLUMN, TABLE_ROW, GRID):
            tables = three_tables(pooling)
            constraints = {table.name: recstore(sharding_type) for table in tables}
            train_and_compare(
                GivenWeights(tables, steps=3), constraints, rank, world_size
            )


def sequences_with_weights(rank: int, world_size: int) -> None:
    for sharding_type in (ROW, TABLE, COLUMN):
        tables = [
            EmbeddingConfig(
                name="many",
                num_embeddings=2**40,
                embedding_dim=8,
                feature_names=["f0", "f1"],
            ),
            EmbeddingConfig(
                name="few", num_embeddings=7, embedding_dim=8, feature_names=["f2"]
            ),
        ]
        constraints = {table.name: recstore(sharding_type) for table in tables}
        train_and_compare(GivenWeights(tables, steps=3), constraints, rank, world_size)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", [bags_with_weights, sequences_with_weights])
def test_weights_that_a_collection_does_not_use_change_nothing(
    scenario: Callable[[int, int], None], world_size: int
) -> None:
    run_on_ranks(world_size, scenario)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", [bags_in_any_order, varying_bags_in_any_order])
def test_features_may_come_in_another_order_than_in_the_first_batch(
    scenario: Callable[[int, int], None], world_size: int
) -> None:
    run_on_ranks(world_size, scenario)


def varying_batch(**lengths: list[int]) -> KeyedJaggedTensor:
    """Returns a batch with a stride for each feature, and without inverse indices."""
    flat_lengths = [length for of_feature in lengths.values() for length in of_feature]
    return KeyedJaggedTensor(
        keys=list(lengths),
        values=torch.arange(sum(flat_lengths)) % 7,
        lengths=torch.tensor(flat_lengths),
        stride_per_key_per_rank=[[len(of_feature)] for of_feature in lengths.values()],
    )


NEEDED = {"f0": [1, 2], "f1": [0, 3], "f2": [2, 1], "f3": [1, 1]}
EXTRA = {"x": [1, 1, 1]}


@pytest.mark.parametrize(
    "batches",
    [
        [EXTRA | NEEDED, NEEDED | EXTRA],
        [NEEDED, EXTRA | NEEDED, NEEDED],
        [EXTRA | NEEDED, NEEDED, {"x": []} | NEEDED],
    ],
    ids=["always", "later", "first"],
)
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("sharding_type", [TABLE, ROW])
@pytest.mark.usefixtures("one_rank")
def test_a_further_feature_may_have_another_stride(
    sharding_type: str, pooling: PoolingType, batches: list[dict[str, list[int]]]
) -> None:
    tables = [
        replace(table, num_embeddings=7, init_fn=None)
        for table in three_tables(pooling)
    ]
    reference = collection(*copy.deepcopy(tables), device="cpu")
    model = sharded(collection(*tables), sharding_type=sharding_type)
    for name, table in reference.embedding_bags.items():
        load_dense_weights(model, {name: table.weight.detach()})
    for lengths in batches:
        batch = varying_batch(**lengths)
        wanted = reference(batch).to_dict()
        for training in (True, False):
            pooled = model.train(training)(batch).wait().to_dict()
            assert pooled.keys() == wanted.keys()
            for name, rows in wanted.items():
                torch.testing.assert_close(pooled[name], rows, rtol=2e-6, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_a_batch_that_lacks_a_feature_is_refused_by_name() -> None:
    model = sharded(collection(*three_tables()))
    names = ["f0", "f1", "f2", "f3"]
    ids = torch.arange(4)
    lengths = torch.ones(4, dtype=torch.int64)
    wanted = model(KeyedJaggedTensor(names, ids, lengths=lengths)).wait()["f0"]
    lacking = KeyedJaggedTensor(["f0", "f1", "x", "f3"], ids, lengths=lengths)
    with pytest.raises(
        ValueError,
        match=r"the batch has no feature 'f2' of table 'few', 'f2' of table 'also'",
    ):
        model(lacking)
    inverse = names[:3], torch.zeros(3, 1, dtype=torch.int64)
    without_inverse = KeyedJaggedTensor(
        names, ids, lengths=lengths, inverse_indices=inverse
    )
    with pytest.raises(
        ValueError, match=r"the inverse indices: .* no feature 'f3' of table 'also'"
    ):
        model(without_inverse)
    # The refused batches have changed nothing.
    assert torch.equal(
        model(KeyedJaggedTensor(names, ids, lengths=lengths)).wait()["f0"], wanted
    )
