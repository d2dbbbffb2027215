"""Files of tables and of hosts: what they may say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchrec_recstore import SGD, Adam, RowWiseAdagrad
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore.planner import TableStatistics
from torchrec_recstore.planner.forecast_inputs import (
    ForecastTable,
    Machines,
    StatedTable,
    read_machines,
    read_table_file,
)

FULL = {
    "features": ["a", "b"],
    "dim": 8,
    "dtype": "float16",
    "rows": 10,
    "rows_per_day": 2.5,
    "max_rows": 30,
}


def test_a_file_with_everything(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text(
        json.dumps(
            {"optimizer": {"name": "Adam", "betas": [0.5, 0.9]}, "tables": {"t": FULL}}
        )
    )
    file = read_table_file(path)
    assert file.optimizer == Adam(betas=(0.5, 0.9))
    assert file.tables == {"t": StatedTable(("a", "b"), 8, "float16", 10, 2.5, 30)}
    assert file.statistics(5.0) == {"t": TableStatistics(rows=10, rows_per_step=0.5)}
    assert file.statistics(None) == {"t": TableStatistics(rows=10)}
    made = ForecastTable(
        8, Adam(betas=(0.5, 0.9)), "float16", TableOptions(max_rows=30)
    )
    assert file.with_saved({}) == {"t": made}


def test_a_file_beside_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    bounded = TableOptions(max_rows=7, eviction=LRU())
    saved = {
        name: ForecastTable(16, RowWiseAdagrad(lr=0.3), "bfloat16", bounded)
        for name in ("a", "b")
    }
    path.write_text(
        json.dumps({"tables": {"b": {"dim": 4, "max_rows": 9}, "c": {"dim": 2}}})
    )
    assert read_table_file(path).with_saved(saved) == {
        "a": saved["a"],
        "b": ForecastTable(
            4,
            RowWiseAdagrad(lr=0.3),
            "bfloat16",
            TableOptions(max_rows=9, eviction=LRU()),
        ),
        "c": ForecastTable(2, RowWiseAdagrad(lr=0.3)),
    }
    path.write_text(json.dumps({"optimizer": {"name": "SGD"}, "tables": {"a": {}}}))
    assert {
        table.optimizer for table in read_table_file(path).with_saved(saved).values()
    } == {SGD()}
    path.write_text(json.dumps({"tables": {"c": {"dim": 2}}}))
    with pytest.raises(
        ValueError,
        match=r"tables\.json: the optimizer of table 'c' is not known: state optimizer",
    ):
        read_table_file(path).with_saved({})


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], r"it must be a JSON object, got \[\]"),
        ({}, "it has no tables"),
        ({"tables": {}}, "it has no tables"),
        ({"tables": [1]}, r"tables must be a JSON object, got \[1\]"),
        ({"t": FULL}, "it has the unknown field 't': the fields are tables, optimizer"),
        ({"tables": {"t": 8}}, "table 't' must be a JSON object, got 8"),
        (
            {"tables": {"t": {"dims": 8}}},
            (
                "table 't' has the unknown field 'dims': the fields are features, dim,"
                " dtype"
            ),
        ),
        (
            {"tables": {"t": {"dim": 0}}},
            "table 't': dim must be a whole number from 1, got 0",
        ),
        (
            {"tables": {"t": {"dim": 8.0}}},
            "table 't': dim must be a whole number from 1, got 8.0",
        ),
        (
            {"tables": {"t": {"dim": 2**24 + 1}}},
            r"table 't': dim must be at most 2\*\*24, got 16777217",
        ),
        (
            {"tables": {"t": {"rows": True}}},
            "table 't': rows must be a whole number from 0, got True",
        ),
        (
            {"tables": {"t": {"rows_per_day": "5"}}},
            "table 't': rows_per_day must be a finite number, got '5'",
        ),
        (
            {"tables": {"t": {"max_rows": 0}}},
            "table 't': max_rows must be a whole number from 1, got 0",
        ),
        (
            {"tables": {"t": {"dtype": "fp16"}}},
            "table 't': dtype must be one of float32, float16, bfloat16, int8, got",
        ),
        (
            {"tables": {"t": {"features": "a"}}},
            "table 't': features must be a list of columns, got 'a'",
        ),
        (
            {"tables": {"t": {"features": ["a", "a"]}}},
            "table 't': features has a column twice: ",
        ),
        (
            {"tables": {"t": FULL}, "optimizer": "SGD"},
            "optimizer must be an object whose name is one of SGD, .*'SGD'",
        ),
        (
            {"tables": {"t": FULL}, "optimizer": {"name": ["SGD"]}},
            "optimizer must be an object whose name is one of",
        ),
        (
            {"tables": {"t": FULL}, "optimizer": {"name": "SGD", "rate": 1}},
            (
                "optimizer has the unknown field 'rate': the fields are name,"
                " max_gradient, max_gradient_norm, lr"
            ),
        ),
        (
            {"tables": {"t": FULL}, "optimizer": {"name": "SGD", "lr": -1}},
            "SGD.lr must be finite and not negative",
        ),
    ],
)
def test_what_is_refused(document: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"tables\.json: {says}"):
        read_table_file(path)


def test_topology_files(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    document: dict[str, object] = {
        "ranks_per_host": 8,
        "memory_per_rank_bytes": 64_000_000_000,
        "within_host_bytes_per_s": 1e10,
        "between_hosts_bytes_per_s": 3.125e9,
    }
    path.write_text(json.dumps(document))
    assert read_machines(path) == Machines(8, 64_000_000_000, 1e10, 3.125e9)
    path.write_text(
        json.dumps(
            {**document, "table_wise_ms": 0, "row_wise_ms": 1.5, "latency_ms": 0.025}
        )
    )
    assert read_machines(path).sharding_type_ms == {"table_wise": 0, "row_wise": 1.5}
    assert read_machines(path).latency_ms == 0.025
    for change, says in (
        ({"ranks_per_host": 0}, "ranks_per_host must be a whole number above 0, got 0"),
        (
            {"memory_per_rank_bytes": 1.5},
            "memory_per_rank_bytes must be a whole number above 0, got 1.5",
        ),
        (
            {"within_host_bytes_per_s": "10G"},
            "within_host_bytes_per_s must be a finite number above 0, got '10G'",
        ),
        (
            {"row_wise_ms": -1},
            "row_wise_ms must be a finite number of at least 0, got -1",
        ),
        (
            {"latency_ms": -0.1},
            "latency_ms must be a finite number of at least 0, got -0.1",
        ),
        ({"latency": 1}, "'latency'"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(ValueError, match=rf"hosts\.json: .*{says}"):
            read_machines(path)
    path.write_text('{"ranks_per_host": 8}')
    with pytest.raises(
        ValueError, match=r"hosts\.json: it has no field 'memory_per_rank_bytes'"
    ):
        read_machines(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"hosts\.json: it is not a JSON object"):
        read_machines(path)
