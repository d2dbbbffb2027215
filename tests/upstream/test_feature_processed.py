"""``FeatureProcessedEmbeddingBagCollection`` beside ``EmbeddingBagCollection`` in
TorchRec's shared test.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .adapted import one_start
from .models import FeatureProcessedNN, OtherModels, processed_tables, set_up
from .sharders import BagSharder, FeatureProcessedSharder

SHARDINGS = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
]


@pytest.fixture
def processed() -> Iterator[OtherModels]:
    with set_up(OtherModels()) as models:
        yield models


def check(
    processed: OtherModels, sharding: str, world_size: int, **kwargs: object
) -> None:
    kinds = (BagSharder, FeatureProcessedSharder)
    sharders = [kind(sharding, fused_params={"learning_rate": 0.1}) for kind in kinds]
    processed.check(
        sharders, sharding, world_size, FeatureProcessedNN, processed_tables(), **kwargs
    )


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_one_rank(processed: OtherModels, sharding: str) -> None:
    check(processed, sharding, 1)


@pytest.mark.slow
def test_two_ranks(processed: OtherModels) -> None:
    with one_start(2):
        for sharding in SHARDINGS:
            check(processed, sharding, 2)
