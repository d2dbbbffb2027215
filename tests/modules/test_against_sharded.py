"""The eager modules are the reference of the sharded ones: the same rows and the same
output, to the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec import PoolingType

from tests.modules.collections import bag_tables, batch, sequence_tables
from tests.sharders.models import collection, sequences, sharded, tables
from torchrec_recstore.modules import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.optim import SGD, Adam, Ftrl, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import LRU, MinFrequency, NormalInit, TableOptions

OPTIONS = {
    "t0": TableOptions(seed=3, initializer=NormalInit(0.0, 0.1)),
    "t1": TableOptions(admission=MinFrequency(2, counter_bytes=2**12), missing="init"),
    "t2": TableOptions(max_rows=8, eviction=LRU()),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("optimizer", "pooling", "weighted", "sharding_type"),
    [
        (RowWiseAdagrad(lr=0.1), PoolingType.SUM, True, "table_wise"),
        (RowWiseAdagrad(lr=0.1), PoolingType.SUM, True, "row_wise"),
        (Adam(lr=0.1), PoolingType.SUM, False, "row_wise"),
        # Row-wise sharding divides sums later, so its means are not equal bit for bit.
        (SGD(lr=0.1, momentum=0.9), PoolingType.MEAN, False, "table_wise"),
    ],
)
def test_bags(
    optimizer: Optimizer, pooling: PoolingType, weighted: bool, sharding_type: str
) -> None:
    ebc = collection(*bag_tables(pooling), is_weighted=weighted)
    other = sharded(
        ebc, options=OPTIONS, optimizer=optimizer, sharding_type=sharding_type
    )
    eager = RecStoreEmbeddingBagCollection(
        bag_tables(pooling), is_weighted=weighted, optimizer=optimizer, options=OPTIONS
    )
    for step in range(6):
        outs = []
        for model in (other, eager):
            for training in (False, True):
                model.train(training)
                given = batch(step, weighted, batch_size=3)
                # Its input distribution has no gradient for them.
                if weighted and model is other:
                    given._weights = given.weights().detach()
                out = model(given)
                pooled = (out.wait() if model is other else out).to_dict()
                outs.append(pooled)
            sum((pooled[name] ** 2).sum() for name in sorted(pooled)).backward()  # type: ignore[union-attr]
        for mine, sharded_out in zip(
            outs[len(outs) // 2 :], outs[: len(outs) // 2], strict=True
        ):
            assert all(
                torch.equal(mine[name], sharded_out[name]) for name in sharded_out
            )
    assert_same_tables(tables(other), eager.embedding_bags)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Ftrl(lr=0.1, l1=1e-3)])
def test_sequences(optimizer: Optimizer) -> None:
    options = {**OPTIONS, "t2": TableOptions(max_rows=10, eviction=LRU())}
    other = sharded(sequences(*sequence_tables()), options=options, optimizer=optimizer)
    eager = RecStoreEmbeddingCollection(
        sequence_tables(), optimizer=optimizer, options=options
    )
    for step in range(6):
        outs: list[dict[str, Any]] = [other(batch(step)).wait(), eager(batch(step))]
        for out in outs:
            sum((out[name].values() ** 2).sum() for name in sorted(out)).backward()  # type: ignore[union-attr]
        assert all(
            torch.equal(outs[0][name].values(), outs[1][name].values())
            for name in outs[1]
        )
    assert_same_tables(tables(other), eager.embeddings)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_a_state_goes_from_one_to_the_other(sharding_type: str) -> None:
    """Returns the weights and their ids, the only entries of a table in a sharded
    module's state_dict.
    """
    other = sharded(
        collection(*bag_tables()), optimizer=SGD(lr=0.1), sharding_type=sharding_type
    )
    eager = RecStoreEmbeddingBagCollection(bag_tables(), optimizer=SGD(lr=0.1))
    for step, model in enumerate((other, eager)):
        out = model(batch(step))
        (out.wait() if model is other else out).values().sum().backward()
    fresh = RecStoreEmbeddingBagCollection(bag_tables(), optimizer=SGD(lr=0.1))
    result = fresh.load_state_dict(other.state_dict(), strict=False)
    assert {key.rsplit(".", 1)[1] for key in result.missing_keys} == {
        *("last_step", "frequency", "steps", "optimizer_steps")
    }
    assert_same_weights(fresh, other)
    other.load_state_dict(eager.state_dict(), strict=False)
    assert_same_weights(eager, other)


def assert_same_weights(eager: Any, other: Any) -> None:
    for name, module in eager.embedding_bags.items():
        ids = module.table.ids()
        assert len(ids) > 0
        assert torch.equal(ids, tables(other)[name].ids())
        assert torch.equal(module.table.lookup(ids), tables(other)[name].lookup(ids))


def assert_same_tables(sharded_tables: Any, modules: Any) -> None:
    """Compares rows, optimizer state, bookkeeping and counts."""
    for name, module in modules.items():
        other, mine = sharded_tables[name], module.table
        assert len(mine) > 0
        assert torch.equal(mine.ids(), other.ids())
        rows, others = mine.read_rows(mine.ids()), other.read_rows(other.ids())
        assert all(torch.equal(rows[key], others[key]) for key in others)
        assert mine.stats() == other.stats()
        assert mine.optimizer_steps == other.optimizer_steps
