"""Statistics of tables: what each source tells, and what the planner makes of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardingOption,
)

from tests.checkpoint import models
from tests.sharders.models import bag, collection, sequence
from torchrec_recstore import (
    SGD,
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    save_checkpoint,
    table_stats,
)
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore.planner import (
    RecStoreEnumerator,
    TableStatistics,
    combined_statistics,
    measure_statistics,
    read_statistics,
    write_statistics,
)

WORLD, BATCH = 2, 100


def topology(**more: Any) -> Topology:
    return Topology(
        world_size=WORLD, local_world_size=WORLD, compute_device="cpu", **more
    )


def option(
    table: EmbeddingBagConfig,
    measured: TableStatistics | None,
    sharding_type: str = "table_wise",
    **more: Any,
) -> ShardingOption:
    constraints: Any = {
        "t": RecStoreConstraints(sharding_types=[sharding_type], **more)
    }
    statistics = None if measured is None else {"t": measured}
    enumerator = RecStoreEnumerator(
        topology(), BATCH, constraints, statistics=statistics
    )
    (found,) = enumerator.enumerate(collection(table), [RecStoreSharder()])
    return found


def test_a_checkpoint_and_a_run_tell_rows_and_growth_and_nothing_else(
    one_rank: None, tmp_path: Path
) -> None:
    model = models.recstore()
    rows = []
    for step, distinct in ((1, 40), (2, 80)):
        models.train(model, steps=4 * step, distinct=distinct)
        save_checkpoint(model, tmp_path / f"step-{step}")
        rows.append({name: stats.rows for name, stats in table_stats(model).items()})
    one = read_statistics(tmp_path / "step-2")
    assert one == {name: TableStatistics(rows=n) for name, n in rows[1].items()}
    run = read_statistics(tmp_path)
    assert run == {
        name: TableStatistics(rows=n, rows_per_step=(n - rows[0][name]) / 8)
        for name, n in rows[1].items()
    }
    assert any(each.rows_per_step for each in run.values())
    grown = run["user"].after(1000)
    assert grown.rows == round(
        rows[1]["user"] + 1000 * (run["user"].rows_per_step or 0)
    )
    with pytest.raises(ValueError, match="rows_per_step was not measured"):
        one["user"].after(1)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        read_statistics(tmp_path / "step-3")


@pytest.mark.parametrize("kind", [bag, sequence])
def test_batches_tell_ids_and_shares(kind: Any) -> None:
    table: EmbeddingBagConfig | EmbeddingConfig = kind("t", ("a", "b"))
    batches = [
        # a: 2, 0, 1 ids; b: 1, 1, 1 ids; 5 of 6 ids are distinct
        KeyedJaggedTensor(
            ["a", "x", "b"],
            torch.tensor([1, 1, 2, 7, 3, 4, 5]),
            lengths=torch.tensor([2, 0, 1, 1, 0, 0, 1, 1, 1]),
        ),
        # a: 1, 1, 1 ids; b: 0, 0, 1 ids; 2 of 4 ids are distinct
        KeyedJaggedTensor(
            ["b", "a"],
            torch.tensor([1, 1, 1, 9]),
            lengths=torch.tensor([0, 0, 1, 1, 1, 1]),
        ),
    ]
    (found,) = measure_statistics([table], batches).values()  # type: ignore[list-item]
    assert found.ids_per_sample == (1.0, 4 / 6)
    assert found.unique_share == (5 + 2) / 10
    assert found.hottest_share == 5 / 10
    # 1 is the tenth of the ids of the first batch, and one of two of the second one
    assert found.hot_share == 1 / 2
    assert (found.rows, found.rows_per_step, found.ns_per_id) == (None, None, None)
    (timed,) = measure_statistics([table], batches, SGD(lr=0.1)).values()  # type: ignore[list-item]
    assert 10 < (timed.ns_per_id or 0) < 1e12
    with pytest.raises(ValueError, match="the batch has no feature 'b' of table 't'"):
        measure_statistics([table], [KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))])  # type: ignore[list-item]  # fmt: skip
    with pytest.raises(ValueError, match="table 't': the batches have no ids"):
        measure_statistics([table], [])  # type: ignore[list-item]


def test_statistics_are_combined_field_by_field_and_written(tmp_path: Path) -> None:
    saved = {"a": TableStatistics(rows=5), "b": TableStatistics(rows=6)}
    sampled = {
        "a": TableStatistics(rows=1, ids_per_sample=(2.0, 0.5), unique_share=0.5),
        "c": TableStatistics(),
    }
    found = combined_statistics(saved, sampled)
    assert found == {
        "a": TableStatistics(rows=5, ids_per_sample=(2.0, 0.5), unique_share=0.5),
        "b": TableStatistics(rows=6),
        "c": TableStatistics(),
    }
    write_statistics(tmp_path / "s.json", found)
    assert read_statistics(tmp_path / "s.json") == found
    assert "null" not in (tmp_path / "s.json").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "s.json: "),
        ("[]", "it is not of the format 'recstore statistics'"),
        (
            '{"format": "recstore statistics", "version": 9, "tables": {}}',
            "it is of version 9",
        ),
        (
            (
                '{"format": "recstore statistics", "version": 1, "tables": {"t": {"x":'
                " 1}}}"
            ),
            "has the field 'x'",
        ),
        (
            (
                '{"format": "recstore statistics", "version": 1, "tables": {"t":'
                ' {"rows": -1}}}'
            ),
            "rows must be at least 0",
        ),
        (
            (
                '{"format": "recstore statistics", "version": 1, "tables": {"t":'
                ' {"rows": "5"}}}'
            ),
            "rows must be finite",
        ),
        (
            (
                '{"format": "recstore statistics", "version": 1, "tables": {"t":'
                ' {"ids_per_sample": 5}}}'
            ),
            "ids_per_sample must be a list",
        ),
    ],
)
def test_a_file_that_is_not_one_of_statistics_is_refused(
    text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=r"s\.json") as error:
        read_statistics(tmp_path / "s.json")
    assert said in str(error.value)


def test_measured_rows_count_in_the_memory() -> None:
    def bytes_with(rows: int | None, **options: Any) -> int:
        measured = None if rows is None else TableStatistics(rows=rows)
        return int(
            option(
                bag("t", rows=2**40), measured, options=TableOptions(**options)
            ).total_storage.ddr
        )

    assert bytes_with(1000) == bytes_with(None, expected_rows=1000)
    assert bytes_with(1000, expected_rows=500) == bytes_with(None, expected_rows=1000)
    assert bytes_with(1000, expected_rows=2000) == bytes_with(None, expected_rows=2000)
    assert bytes_with(1000, max_rows=300, eviction=LRU()) == bytes_with(
        None, expected_rows=300
    )


def test_measured_ids_of_each_feature_count_in_inputs() -> None:
    table = bag("t", ("a", "b"))
    measured = TableStatistics(ids_per_sample=(3.0, 0.5))
    assert option(table, measured).input_lengths == [3.0, 0.5]
    assert option(table, measured, pooling_factors=[7.0, 8.0]).input_lengths == [
        7.0,
        8.0,
    ]
    with pytest.raises(ValueError, match="statistics of table 't' are of 2 feature"):
        option(table, measured, batch_sizes=[5])


def test_measured_times_replace_the_formula() -> None:
    table = bag("t", dim=64)
    for sharding_type, share, ids, sums in (
        ("table_wise", 0.0, BATCH * WORLD, 0),
        ("row_wise", 0.0, BATCH * WORLD / 2, BATCH * WORLD / 2),
        # one rank has all of the hottest id
        ("row_wise", 0.4, BATCH * WORLD * (0.4 + 0.6 / 2), BATCH * WORLD / 2),
    ):
        perfs = [
            option(
                table, TableStatistics(ns_per_id=ns, hottest_share=share), sharding_type
            )
            .shards[0]
            .perf
            for ns in (1000.0, 2000.0)
        ]
        slower = (
            perfs[1].fwd_compute
            + perfs[1].bwd_compute
            - perfs[0].fwd_compute
            - perfs[0].bwd_compute
        )
        assert slower == pytest.approx(ids * 1000 / 1e6)
        of_sums = perfs[0].fwd_compute + perfs[0].bwd_compute - slower
        assert (of_sums > 1e-9) == (sums > 0)
    by_formula = option(table, TableStatistics(rows=5)).shards[0].perf
    assert by_formula == option(table, None).shards[0].perf


def test_the_planner_balances_the_measured_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = collection(*(bag(name, (name,), dim=64, rows=10**6) for name in "abcd"))
    constraints: Any = {
        name: RecStoreConstraints(sharding_types=["table_wise"]) for name in "abcd"
    }
    cost = {"a": 9000.0, "b": 2000.0, "c": 3000.0, "d": 3500.0}
    statistics = {
        name: TableStatistics(rows=777, ns_per_id=ns) for name, ns in cost.items()
    }
    planner = RecStorePlanner(
        topology(), BATCH, constraints=constraints, statistics=statistics, debug=False
    )
    with caplog.at_level(logging.INFO, "torchrec.distributed.planner.stats"):
        plan = planner.plan(model, [RecStoreSharder()]).plan[""]
    of_a = plan["a"].ranks
    assert all(plan[name].ranks != of_a for name in "bcd")
    assert "RecStore table 'a': 777 resident rows assumed (measured)" in caplog.text
    # new rows stay as they are
    assert all(sharding.options == TableOptions() for sharding in plan.values())


def test_statistics_of_another_model_are_refused() -> None:
    planner = RecStorePlanner(
        topology(),
        statistics={"x": TableStatistics(ids_per_sample=(1.0,))},
        debug=False,
    )
    with pytest.raises(
        PlannerError,
        match=r"statistics of unknown table\(s\) 'x'; the model's tables are 't'",
    ):
        planner.plan(collection(bag("t")), [RecStoreSharder()])
    with pytest.raises(ValueError, match="pass them to the enumerator"):
        RecStorePlanner(
            topology(),
            enumerator=RecStoreEnumerator(topology()),
            statistics={"t": TableStatistics(rows=1)},
        )
    constraints: dict[str, ParameterConstraints] = {"y": ParameterConstraints()}
    with pytest.raises(PlannerError, match=r"constraints for unknown table\(s\) 'y'"):
        RecStorePlanner(topology(), constraints=constraints).plan(
            collection(bag("t")), [RecStoreSharder()]
        )


def test_the_planned_memory_is_that_of_the_tables(one_rank: None) -> None:
    """The bytes of a trained table, within 10 % of the bytes that are planned for its
    measured rows.
    """
    from tests.sharders.models import batch, sharded

    table = bag("t", dim=64, rows=2**40)
    model = sharded(collection(table))
    model(batch(f=[torch.arange(200_000).tolist()])).wait().values().sum().backward()
    stats = table_stats(model)["t"]
    planned = option(table, TableStatistics(rows=stats.rows, ids_per_sample=(0.0,)))
    assert planned.total_storage.ddr == pytest.approx(stats.bytes, rel=0.1)
