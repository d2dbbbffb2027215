"""Parts are taken, cut and joined by columns, concatenated, sorted, divided by owners
and turned into bytes.
"""

from __future__ import annotations

import pytest
import torch

from torchrec_recstore.optim import (
    SGD,
    Adam,
    Optimizer,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    state_names,
)
from torchrec_recstore.row_types import ROW_DTYPES
from torchrec_recstore.store import Part, Table, TableState
from torchrec_recstore.store.table_state import Sightings

DIM = 7


def part(
    optimizer: Optimizer,
    dtype: torch.dtype = torch.float32,
    rows: int = 20,
    columns: range | None = None,
) -> Part:
    table = Table(DIM, dtype, optimizer, columns=columns)
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0)) - 5
    for step in range(3):
        table.lookup(ids[: rows - step], train=True)
        grads = torch.randn(
            rows, len(table.columns), generator=torch.Generator().manual_seed(step)
        )
        table.update(ids, grads)
    return table.part(table.ids())


def assert_same(one: Part, other: Part) -> None:
    assert one.columns == other.columns
    assert one.tensors().keys() == other.tensors().keys()
    for key, value in one.tensors().items():
        assert other.tensors()[key].dtype is value.dtype
        assert torch.equal(other.tensors()[key], value), key


@pytest.mark.parametrize("rows", [0, 1, 20])
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), RowWiseAdagrad(0.1), PartialRowWiseAdam(0.1)], ids=repr
)
def test_bytes_take_and_concatenate(
    optimizer: Optimizer, dtype: torch.dtype, rows: int
) -> None:
    whole = part(optimizer, dtype).take(slice(0, rows))
    assert_same(Part.from_bytes(Part.packed([whole])[0]), whole)
    shuffled = whole.take(
        torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    )
    data, sizes = Part.packed([whole, shuffled])
    assert_same(Part.from_bytes(data[sizes[0] :]).sorted(), whole)
    assert Part.packed([])[1] == []
    odd = whole.owned(lambda ids: ids % 2 == 1)
    even = whole.owned(lambda ids: ids % 2 == 0)
    assert len(odd) + len(even) == rows
    assert_same(Part.concatenated([odd, even]).sorted(), whole)
    assert whole.owned(None) is whole
    below, above = whole.up_to(3)
    assert bool((below.ids <= 3).all())
    assert bool((above.ids > 3).all())
    assert_same(Part.concatenated([below, above]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_columns_are_cut_and_joined(dtype: torch.dtype) -> None:
    whole = part(Adam(0.1), dtype)
    cut = [whole.cut(columns) for columns in (range(2), range(2, 3), range(3, 7))]
    assert_same(Part.joined(reversed(cut), range(DIM)), whole)
    assert_same(Part.joined(cut, range(1, 5)), whole.cut(range(1, 5)))
    assert whole.cut(range(-1, DIM + 3)) is whole
    with pytest.raises(ValueError, match="lack some of the columns 0 to 6"):
        Part.joined(cut[1:], range(DIM))
    with pytest.raises(ValueError, match="lack some of the columns"):
        Part.joined([cut[0], cut[0], *cut[1:]], range(DIM))
    with pytest.raises(ValueError, match="different rows"):
        Part.joined([cut[0], cut[1].take(torch.arange(20).flip(0)), cut[2]], range(DIM))


def test_row_wise_states_of_column_shards_become_their_mean() -> None:
    shards = [
        part(RowWiseAdagrad(0.1), columns=columns)
        for columns in (range(2), range(2, 7))
    ]
    joined = Part.joined(shards, range(DIM))
    assert torch.equal(
        joined.rows["weight"],
        torch.cat([shard.rows["weight"] for shard in shards], dim=1),
    )
    mean = shards[0].rows["sum"] * (2 / 7) + shards[1].rows["sum"] * (5 / 7)
    torch.testing.assert_close(joined.rows["sum"], mean)
    assert_same(Part.joined(shards, range(2, 4)), shards[1].cut(range(2, 4)))


def test_columns_of_8_bit_rows_keep_their_scale() -> None:
    whole = part(SGD(0.1), torch.int8)
    cut = [whole.cut(range(3)), whole.cut(range(3, DIM))]
    assert torch.equal(torch.cat([each.weights for each in cut], dim=1), whole.weights)
    # float32
    assert torch.equal(Part.joined(cut, range(DIM)).rows["weight"], whole.weights)
    assert_same(whole.stored_as(torch.int8), whole)
    assert whole.stored_as(torch.float16).rows["weight"].dtype is torch.float16


def test_states_of_shards_merge_and_are_divided() -> None:
    def seen(*ids: int) -> Sightings:
        return Sightings(
            torch.tensor(ids), torch.ones(len(ids)).byte(), torch.zeros(len(ids)).byte()
        )

    states = [
        TableState(5, 4, (1, 100, 0, 0, 0, 0, 0), seen(1, 3)),
        TableState(7, 4, (1, 90, 0, 0, 0, 0, 0), seen(2)),
        TableState(6),
    ]
    merged = TableState.merged(states)
    assert (merged.steps, merged.optimizer_steps, merged.times) == (
        7,
        4,
        (1, 100, 0, 0, 0, 0, 0),
    )
    again = TableState.from_tensors({**merged.tensors(), "another": torch.ones(3)})
    assert again.sightings is not None
    assert again.sightings.ids.tolist() == [1, 3, 2]
    assert (again.steps, again.optimizer_steps, again.times) == (
        merged.steps,
        merged.optimizer_steps,
        merged.times,
    )
    owned = merged.owned(lambda ids: ids > 1).sightings
    assert owned is not None
    assert owned.ids.tolist() == [3, 2]
    assert TableState.merged([]).tensors().keys() == {"steps", "optimizer_steps"}
    for key, value, message in (
        (
            "steps",
            torch.tensor(1),
            r"steps must be torch.int64 of shape \(1,\), got torch.int64 of shape \(\)",
        ),
        ("times", torch.ones(3), r"times must be torch.int64 of shape \(T,\)"),
        (
            "sighting_counts",
            torch.ones(2).byte(),
            r"sighting_counts must be torch.uint8 of shape \(3,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            TableState.from_tensors({**merged.tensors(), key: value})
    lacking = {
        key: value
        for key, value in merged.tensors().items()
        if key != "sighting_counts"
    }
    with pytest.raises(ValueError, match="the sightings have no sighting_counts"):
        TableState.from_tensors(lacking)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(dtype: torch.dtype, value: float) -> None:
    rows = part(RowWiseAdagrad(), dtype)
    assert bool(rows.is_finite().all())
    weights = rows.weights.clone()
    weights[3, 2] = value
    weights[7] = value
    spoiled = Part(rows.ids, rows.columns, {**rows.rows, "weight": weights}).stored_as(
        dtype
    )
    expected = torch.ones(len(rows), dtype=torch.bool)
    expected[[3, 7]] = False
    assert torch.equal(spoiled.is_finite(), expected)


def test_states_that_are_not_finite() -> None:
    rows_optimizer = RowWiseAdagrad()
    rows = part(rows_optimizer)
    (name,) = state_names(rows_optimizer)
    state = rows.rows[name].clone()
    state[5] = torch.inf
    spoiled = Part(rows.ids, rows.columns, {**rows.rows, name: state})
    assert (~spoiled.is_finite()).nonzero().flatten().tolist() == [5]


def test_large_sums_are_finite() -> None:
    """The sum of finite weights can overflow."""
    rows = part(SGD())
    weights = torch.full_like(rows.rows["weight"], torch.finfo(torch.float32).max)
    large = Part(rows.ids, rows.columns, {**rows.rows, "weight": weights})
    assert bool(large.is_finite().all())
