"""The rows of a table as Arrow: columns, what is refused, and eager modules."""

from __future__ import annotations

import sys
from typing import Any

import polars
import pyarrow as pa
import pytest
import torch
from torch import nn

from torchrec_recstore import (
    Adam,
    RecStoreEmbeddingBag,
    Scored,
    TableOptions,
    insert_rows,
    set_scores,
    table_rows,
)
from torchrec_recstore.installing import install
from torchrec_recstore.table_fields import encoded_score

IDS = torch.tensor([5, -7, 2**62, 11])


def trained(**arguments: Any) -> nn.Module:
    """A model of one table with a row for each of ``IDS``."""
    bag = RecStoreEmbeddingBag(100, 4, name="t", optimizer=Adam(lr=0.1), **arguments)
    bag(IDS.view(2, 2)).sum().backward()
    return nn.Sequential(bag)


def test_the_columns_are_those_of_read_rows() -> None:
    model = trained()
    rows = table_rows(model, "t")
    lists = pa.list_(pa.float32(), 4)
    assert rows.schema == pa.schema(
        {
            "id": pa.int64(),
            "weight": lists,
            "exp_avg": lists,
            "exp_avg_sq": lists,
            "last_step": pa.int64(),
            "frequency": pa.int64(),
        }
    )
    ids = sorted(IDS.tolist())
    assert rows["id"].to_pylist() == ids
    expected = model[0].table.read_rows(torch.tensor(ids))
    for name, values in expected.items():
        assert rows[name].to_pylist() == values.tolist(), name


def test_some_ids() -> None:
    rows = table_rows(trained(), "t", ids=torch.tensor([11, 99, 5, 11]))
    assert rows["id"].to_pylist() == [5, 11]
    nothing = table_rows(trained(), "t", ids=torch.tensor([99]))
    assert nothing.num_rows == 0
    assert nothing.schema == rows.schema


def test_a_table_without_rows_travels() -> None:
    bag = RecStoreEmbeddingBag(100, 4, name="t")
    rows = table_rows(bag, "t")
    assert rows.num_rows == 0
    insert_rows(bag, "t", rows)
    insert_rows(bag, "t", rows.select(["id", "weight"]))
    assert len(bag.table) == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8]
)
def test_rows_come_back_as_they_were(dtype: torch.dtype) -> None:
    rows = table_rows(trained(dtype=dtype), "t")
    other = trained(dtype=dtype)
    other[0].table.remove(IDS)
    insert_rows(other, "t", rows)
    assert table_rows(other, "t").equals(rows)


def test_a_step_of_the_future_becomes_the_last_step() -> None:
    model = trained()
    rows = table_rows(model, "t")
    assert set(rows["last_step"].to_pylist()) == {1}
    place = rows.column_names.index("last_step")
    steps = pa.array([0, 1, 2, 2**31])
    insert_rows(model, "t", rows.set_column(place, "last_step", steps))
    assert table_rows(model, "t")["last_step"].to_pylist() == [0, 1, 1, 1]


def test_a_data_frame_of_polars_travels() -> None:
    model = trained()
    frame = polars.from_arrow(table_rows(model, "t"))
    assert isinstance(frame, polars.DataFrame)
    doubled = frame.with_columns(polars.col("weight") * 2.0)
    insert_rows(model, "t", doubled.select("id", "weight"))
    changed = table_rows(model, "t")
    before = torch.tensor(frame["weight"].to_list())
    assert torch.equal(torch.tensor(changed["weight"].to_pylist()), before * 2)
    for name in ("exp_avg", "exp_avg_sq"):
        assert changed[name].to_pylist() == frame[name].to_list()
    insert_rows(model, "t", frame)
    assert table_rows(model, "t").equals(frame.to_arrow().cast(changed.schema))


def test_lists_of_other_types_are_converted() -> None:
    model = trained()
    weights = pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float64()))
    ids = pa.array([5], pa.uint32())
    insert_rows(model, "t", pa.table({"id": ids, "weight": weights}))
    rows = table_rows(model, "t", ids=torch.tensor([5]))
    assert rows["weight"].to_pylist() == [[1.0, 2.0, 3.0, 4.0]]
    assert rows["exp_avg"].to_pylist() != [[0.0] * 4], "the row keeps its state"


def test_the_last_of_equal_ids_counts() -> None:
    model = trained()
    rows = pa.table({"id": [5, 6, 5], "weight": [[1.0] * 4, [2.0] * 4, [3.0] * 4]})
    insert_rows(model, "t", rows)
    read = table_rows(model, "t", ids=torch.tensor([5, 6]))
    assert read["weight"].to_pylist() == [[3.0] * 4, [2.0] * 4]
    assert read["exp_avg"].to_pylist()[1] == [0.0] * 4


def test_scores_have_a_column_of_their_own() -> None:
    options = TableOptions(max_rows=9, eviction=Scored())
    model = trained(options=options)
    set_scores(model, "t", torch.tensor([5]), torch.tensor([2.5]))
    rows = table_rows(model, "t", ids=torch.tensor([5]))
    assert rows["encoded_score"].to_pylist() == [encoded_score(2.5)]
    with pytest.raises(ValueError, match="no column 'encoded_score'"):
        insert_rows(trained(), "t", rows)
    other = trained(options=options)
    insert_rows(other, "t", rows)
    assert table_rows(other, "t", ids=torch.tensor([5])).equals(rows)


LISTS = [[1.0] * 4]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"id": [5]}, "needs one column 'weight', got 0"),
        ({"ids": [5], "weight": LISTS}, "no column 'ids'"),
        (
            {"id": [5], "weight": LISTS, "exp_avg": LISTS},
            "needs one column 'exp_avg_sq', got 0: pass the columns 'id' and"
            " 'weight', or all of 'id', 'weight', 'exp_avg', 'exp_avg_sq',"
            " 'last_step', 'frequency'",
        ),
        ({"id": [5.0], "weight": LISTS}, "column 'id' must be int64, got double"),
        ({"id": ["5"], "weight": LISTS}, "column 'id' must be int64, got string"),
        (
            {"id": pa.array([2**63], pa.uint64()), "weight": LISTS},
            "column 'id' must be int64, got uint64",
        ),
        ({"id": [None], "weight": LISTS}, "column 'id' must be int64, got null"),
        ({"id": [5, None], "weight": LISTS * 2}, "column 'id' has 1 missing"),
        ({"id": [5], "weight": [[1.0] * 3]}, "column 'weight' must be fixed_size"),
        ({"id": [5], "weight": [1.0]}, "column 'weight' must be fixed_size"),
        ({"id": [5], "weight": [[1.0, None, 1.0, 1.0]]}, "'weight' has 1 missing"),
        ({"id": [5, 6], "weight": [None, *LISTS]}, "'weight' has"),
    ],
)
def test_other_columns_are_refused(rows: dict[str, list[Any]], message: str) -> None:
    model = trained()
    before = table_rows(model, "t")
    with pytest.raises(ValueError, match=message):
        insert_rows(model, "t", pa.table(rows))
    assert table_rows(model, "t").equals(before)


def test_what_is_no_arrow_data_and_no_table_is_refused() -> None:
    model = trained()
    with pytest.raises(TypeError, match=r"must be a pyarrow\.Table .* got dict"):
        insert_rows(model, "t", {"id": [1]})
    with pytest.raises(ValueError, match="no RecStore table 'u'; it has 't'"):
        table_rows(model, "u")
    with pytest.raises(ValueError, match="no RecStore table 'u'; it has 't'"):
        insert_rows(model, "u", table_rows(model, "t"))
    with pytest.raises(TypeError, match="table_rows: ids must be"):
        table_rows(model, "t", ids=[5])  # type: ignore[arg-type]


def test_without_pyarrow_the_error_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = trained()
    rows = table_rows(model, "t")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (
        lambda: table_rows(model, "t"),
        lambda: insert_rows(model, "t", rows),
    ):
        with pytest.raises(ImportError) as caught:
            call()
        assert str(caught.value) == f"pyarrow is missing: {install('parquet')}"
