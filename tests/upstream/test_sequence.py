"""``EmbeddingCollection`` in TorchRec's shared test."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from .adapted import one_start
from .models import OtherModels, sequence_tables, set_up
from .tables import KERNEL

from torchrec.distributed.tests import test_sequence_model  # isort: skip

SHARDINGS = ["table_wise", "column_wise", "row_wise"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "optimizer in backward": {
        "apply_optimizer_in_backward_config": {
            "embeddings": (torch.optim.SGD, {"lr": 0.2})
        }
    },
    "varying batch per rank": {"variable_batch_size": True},
    "varying batch per feature": {"variable_batch_per_feature": True},
}


FAILING = "varying batch per feature"
"""The kind that fails on one rank already."""


@pytest.fixture
def sequences() -> Iterator[OtherModels]:
    with set_up(OtherModels()) as models:
        yield models


def check(
    sequences: OtherModels,
    sharding: str,
    world_size: int,
    dedup: bool = False,
    **kwargs: Any,
) -> None:
    sharder = test_sequence_model.TestEmbeddingCollectionSharder(
        sharding, KERNEL, use_index_dedup=dedup
    )
    sequences.check(
        [sharder],
        sharding,
        world_size,
        test_sequence_model.TestSequenceSparseNN,
        sequence_tables(),
        **kwargs,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_one_rank(sequences: OtherModels, sharding: str, kind: str) -> None:
    check(sequences, sharding, 1, **KINDS[kind])


@pytest.mark.slow
def test_two_ranks() -> None:
    with one_start(2):
        for sharding, kind in product(SHARDINGS, KINDS):
            if kind != FAILING:
                with set_up(OtherModels()) as sequences:
                    check(sequences, sharding, 2, **KINDS[kind])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_index_dedup(sequences: OtherModels, sharding: str) -> None:
    check(sequences, sharding, 1, dedup=True)
