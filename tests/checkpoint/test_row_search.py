"""Tests of looks at rows: ``top_rows`` and ``neighbours``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrec_recstore import (
    LFU,
    Adagrad,
    Scored,
    Table,
    TableOptions,
    neighbours,
    save_checkpoint,
    top_rows,
)
from torchrec_recstore.checkpoint import row_search

from . import models


def trained(
    dtype: torch.dtype = torch.float32, options: TableOptions | None = None
) -> Table:
    table = Table(
        6, dtype, optimizer=Adagrad(lr=0.5), name="t", options=options or TableOptions()
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        ids = torch.randint(-40, 40, (25,), generator=generator).abs() * 7 - 99
        ids = ids[ids % (step + 2) > 0] if step else ids
        table.lookup(ids, train=True)
        table.update(ids, torch.randn(len(ids), 6, generator=generator))
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float16])
@pytest.mark.parametrize("by", ["frequency", "last_step", "norm"])
def test_top_rows_of_a_table(
    by: row_search.By, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_search, "_BLOCK_ROWS", 7)
    table = trained(dtype)
    before = table.stats()
    found = top_rows(table, by=by, count=9)
    ids = table.ids()
    rows = table.read_rows(ids)
    weights = table.lookup(ids).float()
    columns = {
        "frequency": rows["frequency"].tolist(),
        "last_step": rows["last_step"].tolist(),
        "norm": weights.norm(dim=1).tolist(),
    }
    order = sorted(range(len(ids)), key=lambda at: (-columns[by][at], int(ids[at])))
    assert found.ids.tolist() == [int(ids[at]) for at in order[:9]]
    for name, values in columns.items():
        assert found.columns[name].tolist() == pytest.approx(
            [values[at] for at in order[:9]]
        )
    assert (found.rows, found.steps, found.added, found.gone) == (
        len(ids),
        12,
        None,
        None,
    )
    assert found.quantiles["norm"][1.0] == pytest.approx(max(columns["norm"]))
    assert (
        found.quantiles["frequency"][0.5] == sorted(columns["frequency"])[len(ids) // 2]
    )
    assert table.stats() == before  # a look changes nothing


def test_scores_are_no_frequencies() -> None:
    table = Table(6, options=TableOptions(max_rows=9, eviction=Scored()))
    table.lookup(torch.arange(5), train=True)
    table.set_scores(torch.arange(5), torch.arange(5).float())
    found = top_rows(table, count=3)
    assert found.columns["frequency"].tolist() == [0, 0, 0]
    assert found.ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_neighbours_of_a_table(
    metric: row_search.Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_search, "_BLOCK_ROWS", 7)
    table = trained()
    ids = table.ids()
    weights = dict(zip(ids.tolist(), table.lookup(ids), strict=True))
    mine = int(ids[5])
    row = weights.pop(mine)
    near = {
        "cosine": lambda other: float(
            torch.nn.functional.cosine_similarity(row, other, dim=0)
        ),
        "dot": lambda other: float(row @ other),
        "l2": lambda other: -float((row - other).norm()),
    }[metric]
    wanted = sorted(weights, key=lambda id: -near(weights[id]))[:6]
    found, values = neighbours(table, mine, count=6, metric=metric)
    assert found.tolist() == wanted
    sign = -1 if metric == "l2" else 1
    assert values.tolist() == pytest.approx(
        [sign * near(weights[id]) for id in wanted], abs=1e-5
    )


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise"])
def test_checkpoints_and_what_has_changed_since(
    one_rank: None, tmp_path: Path, sharding_type: str
) -> None:
    options = TableOptions(max_rows=40, eviction=LFU())
    model = models.recstore(sharding_type, options=options)
    models.train(model)
    save_checkpoint(model, tmp_path / "one")
    old = {int(id): row for id, row in _rows(model, "item").items()}
    models.train(model, steps=8, distinct=80)
    save_checkpoint(model, tmp_path / "two", delta_of=tmp_path / "one")
    new = _rows(model, "item")
    found = top_rows(
        tmp_path / "two", "item", by="drift", since=tmp_path / "one", count=1000
    )
    assert (found.added, found.gone) == (
        len(new.keys() - old.keys()),
        len(old.keys() - new.keys()),
    )
    drifts = {id: float((new[id] - old[id]).norm()) for id in new.keys() & old.keys()}
    told = dict(zip(found.ids.tolist(), found.columns["drift"].tolist(), strict=True))
    assert told.keys() == new.keys()
    for id in new:
        assert (
            told[id] == pytest.approx(drifts[id], abs=1e-6)
            if id in drifts
            else told[id] != told[id]
        )
    known = [told[id] for id in found.ids.tolist() if id in drifts]
    assert known == sorted(known, reverse=True)
    # new rows come last
    assert found.ids.tolist()[: len(drifts)] == [
        id for id in found.ids.tolist() if id in drifts
    ]
    nearest = neighbours(tmp_path / "two", next(iter(new)), "item", count=3)[0].tolist()
    assert set(nearest) < new.keys()


def test_drift_reads_windows_of_both_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    from torchrec_recstore.checkpoint import fold

    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "one")
    models.train(model, steps=8, distinct=80)
    save_checkpoint(model, tmp_path / "two")
    whole = top_rows(
        tmp_path / "two", "item", by="drift", since=tmp_path / "one", count=1000
    )
    monkeypatch.setattr(fold, "_LEAST_ROWS", 3)
    monkeypatch.setattr(fold, "_WINDOW_BYTES", 1)
    parts = top_rows(
        tmp_path / "two", "item", by="drift", since=tmp_path / "one", count=1000
    )
    assert torch.equal(parts.ids, whole.ids)
    assert torch.equal(
        parts.columns["drift"].nan_to_num(), whole.columns["drift"].nan_to_num()
    )
    assert (parts.added, parts.gone, parts.quantiles) == (
        whole.added,
        whole.gone,
        whole.quantiles,
    )


def test_what_cannot_be_done_is_said(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "one")
    table = trained()
    for says, call in {
        "name one of its tables: item, user": lambda: top_rows(tmp_path / "one"),
        "there is no table 'x': item, user": lambda: neighbours(
            tmp_path / "one", 1, "x"
        ),
        "by='heat' is not one of frequency, last_step, norm, drift": lambda: top_rows(
            table, by="heat"
        ),  # type: ignore[arg-type]
        "count must be at least 1, not 0": lambda: top_rows(table, count=0),
        "by='drift' compares with an earlier checkpoint": lambda: top_rows(
            table, by="drift"
        ),
        "since= compares two checkpoints": lambda: top_rows(
            table, by="drift", since=tmp_path / "one"
        ),
        "id 5 has no row in Table": lambda: neighbours(table, 5),
        "metric='x' is not one of cosine, dot, l2": lambda: neighbours(
            table, 5, metric="x"
        ),  # type: ignore[arg-type]
        "the source is a table": lambda: top_rows(table, "t"),
    }.items():
        with pytest.raises(ValueError, match=says.replace("(", r"\(")):
            call()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        top_rows(tmp_path / "none")


def _rows(model: object, name: str) -> dict[int, torch.Tensor]:
    shards = model.module.sparse.recstore_state.shards[name]  # type: ignore[attr-defined]
    tables = [shard.table for shard in shards]
    ids = tables[0].ids()
    weights = torch.cat([table.lookup(ids) for table in tables], dim=1)
    return dict(zip(ids.tolist(), weights, strict=True))
