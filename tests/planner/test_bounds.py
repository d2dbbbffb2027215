"""The planner's estimate of a bounded table has the rows up to ``max_rows`` and the
counter of sightings.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError

from torchrec_recstore.options import LRU, MinFrequency, TableOptions
from torchrec_recstore.planner import (
    RecStoreConstraints,
    RecStoreEnumerator,
    RecStorePlanner,
)
from torchrec_recstore.sharders import RecStoreSharder

DIM, WORLD, MIB = 64, 2, 2**20
TYPES = ["table_wise", "row_wise", "column_wise", "table_row_wise"]


def collection(rows: int = 2**40) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"]
    )
    return EmbeddingBagCollection(tables=[table], device=torch.device("meta"))


def topology(**more: int) -> Topology:
    return Topology(
        world_size=WORLD, local_world_size=WORLD, compute_device="cpu", **more
    )


def bytes_of_shards(options: TableOptions, sharding_type: str) -> list[int]:
    constraints = {
        "t": RecStoreConstraints(
            options=options, sharding_types=[sharding_type], min_partition=DIM // 2
        )
    }
    (option,) = RecStoreEnumerator(topology(), 1, constraints).enumerate(
        collection(), [RecStoreSharder()]
    )
    return [shard.storage.ddr for shard in option.shards]


@pytest.mark.parametrize("sharding_type", TYPES)
def test_no_more_rows_than_max_rows_are_planned_for(sharding_type: str) -> None:
    bounded = TableOptions(expected_rows=100_000, max_rows=1000, eviction=LRU())
    few = bytes_of_shards(TableOptions(expected_rows=1000), sharding_type)
    assert bytes_of_shards(bounded, sharding_type) == few
    wide = TableOptions(expected_rows=1000, max_rows=100_000, eviction=LRU())
    assert bytes_of_shards(wide, sharding_type) == few


@pytest.mark.parametrize("sharding_type", TYPES)
def test_every_shard_has_a_counter_of_sightings(sharding_type: str) -> None:
    plain = bytes_of_shards(TableOptions(expected_rows=1000), sharding_type)
    counting = TableOptions(
        expected_rows=1000, admission=MinFrequency(2, counter_bytes=MIB)
    )
    assert len(plain) == (1 if sharding_type == "table_wise" else WORLD)
    assert bytes_of_shards(counting, sharding_type) == [size + MIB for size in plain]


@pytest.mark.parametrize("sharding_type", TYPES)
def test_every_shard_has_a_record_of_ids_that_left(sharding_type: str) -> None:
    plain = bytes_of_shards(TableOptions(expected_rows=1000), sharding_type)
    recording = TableOptions(expected_rows=1000, left_ids=MIB)
    assert bytes_of_shards(recording, sharding_type) == [
        size + 24 * MIB for size in plain
    ]


def test_a_bound_makes_a_table_fit_and_a_counter_may_not_fit() -> None:
    def plan(options: TableOptions) -> None:
        planner = RecStorePlanner(
            topology=topology(ddr_cap=1024 * MIB),
            constraints={"t": RecStoreConstraints(options=options)},
            debug=False,
        )
        planner.plan(collection(), [RecStoreSharder()])

    plan(TableOptions(expected_rows=10**9, max_rows=10**6, eviction=LRU()))
    with pytest.raises(PlannerError, match="insufficient storage"):
        plan(TableOptions(expected_rows=10**9))
    with pytest.raises(PlannerError, match="insufficient storage"):
        plan(
            TableOptions(
                expected_rows=1000, admission=MinFrequency(2, counter_bytes=2048 * MIB)
            )
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            TableOptions(expected_rows=3000, max_rows=1000, eviction=LRU()),
            "1,000 resident rows assumed (max_rows)",
        ),
        (
            TableOptions(max_rows=1000, eviction=LRU()),
            "1,000 resident rows assumed (max_rows)",
        ),
        (
            TableOptions(expected_rows=500, max_rows=1000),
            "500 resident rows assumed (expected_rows)",
        ),
    ],
)
def test_the_plan_tells_whether_the_bound_decided(
    options: TableOptions, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    planner = RecStorePlanner(
        topology=topology(),
        constraints={"t": RecStoreConstraints(options=options)},
        debug=False,
    )
    with caplog.at_level(logging.INFO, "torchrec.distributed.planner.stats"):
        planner.plan(collection(), [RecStoreSharder()])
    (line,) = [line for line in caplog.messages if line.startswith("RecStore table")]
    assert line.startswith(f"RecStore table 't': {said}; rank ")
