"""The callback ``progress`` of saves and loads gets the rows that are done and all
rows, after each part.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import async_save, load_checkpoint, save_checkpoint, table_stats
from torchrec_recstore.checkpoint import writer

from . import models


def rows_of(model: DistributedModelParallel) -> int:
    return sum(stats.rows for stats in table_stats(model).values())


def check(told: list[tuple[int, int]], total: int) -> None:
    assert len(told) > 2  # There are more calls than tables.
    done = [rows for rows, _ in told]
    assert done == sorted(set(done))
    assert {of for _, of in told} == {total}
    assert done[-1] == total


def test_saves_and_loads(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 1 << 10)
    model = models.recstore()
    models.train(model)
    full = rows_of(model)
    told: list[tuple[int, int]] = []
    save_checkpoint(model, tmp_path / "full", progress=lambda *rows: told.append(rows))
    check(told, full)
    told.clear()
    async_save(
        model, tmp_path / "async", progress=lambda *rows: told.append(rows)
    ).wait()
    check(told, full)

    models.train(model, steps=3, distinct=60)
    told.clear()
    info = save_checkpoint(
        model,
        tmp_path / "delta",
        delta_of=tmp_path / "full",
        progress=lambda *rows: told.append(rows),
    )
    changed = sum(part.rows for table in info.tables.values() for part in table.parts)
    assert 0 < changed < rows_of(model)
    check(told, changed)
    told.clear()
    load_checkpoint(
        models.recstore(), tmp_path / "delta", progress=lambda *rows: told.append(rows)
    )
    check(told, full + changed)


def test_an_error_of_the_callers_leaves_all_as_it_was(
    one_rank: None, tmp_path: Path
) -> None:
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "full")
    fresh = models.recstore()

    def stop(done: int, total: int) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        load_checkpoint(fresh, tmp_path / "full", progress=stop)
    assert rows_of(fresh) == 0
    with pytest.raises(KeyError, match="stop"):
        save_checkpoint(model, tmp_path / "new", progress=stop)
    assert [
        path.name
        for path in tmp_path.iterdir()
        if "full" not in path.name and path.is_dir()
    ] == []
