"""Dense weights are loaded into RecStore tables and exported from them."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.workers import run_on_ranks
from torchrec_recstore.checkpoint import export_dense_weights, load_dense_weights

from . import models


def there_and_back(sharding: str) -> None:
    model = models.recstore(sharding)
    models.train(model, low=500, high=600)
    weights = torch.randn(300, models.DIM, generator=torch.Generator().manual_seed(7))
    load_dense_weights(model, {"user": weights})
    assert torch.equal(export_dense_weights(model, "user", 300), weights)
    beyond = export_dense_weights(model, "user", 600)
    assert torch.equal(beyond[:300], weights)
    assert beyond[300:500].count_nonzero() == 0
    # Rows of ids that are not in the tensor do not change.
    assert beyond[500:].count_nonzero() > 0


def two_ranks(rank: int, world_size: int) -> None:
    for sharding in ("row_wise", "column_wise"):
        there_and_back(sharding)


def test_there_and_back(one_rank: None) -> None:
    there_and_back("table_wise")
    run_on_ranks(2, two_ranks)


def test_errors_change_nothing(one_rank: None) -> None:
    model = models.recstore()
    models.train(model)
    before = models.shards(model)
    with pytest.raises(
        ValueError, match="no RecStore table 'stranger'; it has 'user', 'item'"
    ):
        load_dense_weights(
            model,
            {
                "user": torch.zeros(3, models.DIM),
                "stranger": torch.zeros(3, models.DIM),
            },
        )
    with pytest.raises(
        ValueError, match=r"table 'item' must have the shape \(rows, 8\), got \(3, 7\)"
    ):
        load_dense_weights(
            model, {"user": torch.zeros(3, models.DIM), "item": torch.zeros(3, 7)}
        )
    with pytest.raises(TypeError, match="table 'user' must be a floating-point tensor"):
        load_dense_weights(
            model, {"user": torch.zeros(3, models.DIM, dtype=torch.int64)}
        )
    with pytest.raises(ValueError, match="num_rows must be at least 0"):
        export_dense_weights(model, "user", -1)
    for (_, _, ids, rows), (_, _, ids_now, rows_now) in zip(
        before, models.shards(model), strict=True
    ):
        assert torch.equal(ids, ids_now)
        assert torch.equal(rows["weight"], rows_now["weight"])
