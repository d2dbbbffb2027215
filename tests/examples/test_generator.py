"""Tests of the synthetic log: determinism, start at any row, and a round trip through a
file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from criteo import CriteoFile, Rows, concat
from generator import BLOCK_ROWS, Generator


def rows_of(seed: int, start: int, stop: int) -> Rows:
    return concat(list(Generator(stop, seed).rows(start, stop)))


def check_same(one: Rows, other: Rows) -> None:
    assert np.array_equal(one.labels, other.labels)
    assert one.labels.dtype == other.labels.dtype
    assert np.array_equal(one.dense, other.dense)
    assert one.dense.dtype == other.dense.dtype
    assert np.array_equal(one.ids, other.ids)
    assert one.ids.dtype == other.ids.dtype


def test_same_seed_same_rows_from_any_start() -> None:
    whole = rows_of(3, 0, 3 * BLOCK_ROWS + 100)
    assert len(whole) == 3 * BLOCK_ROWS + 100
    for start, stop in (
        (0, 1),
        (5, 17),
        (BLOCK_ROWS - 1, BLOCK_ROWS + 1),
        (BLOCK_ROWS, 2 * BLOCK_ROWS),
        (9000, 24_676),
    ):
        check_same(rows_of(3, start, stop), whole[start:stop])
    assert list(Generator(10, 3).rows(5, 5)) == []


def test_another_seed_gives_other_ids() -> None:
    one, other = rows_of(0, 0, 1000), rows_of(1, 0, 1000)
    assert set(np.unique(one.ids)) & set(np.unique(other.ids)) <= {0}


def test_lines_read_back_as_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"".join(Generator(9000, 7).lines(100, 8500)))
    file = CriteoFile(path)
    file.scan()
    assert (file.num_rows, file.bad_rows) == (8400, 0)
    check_same(concat(list(file.rows(0, 8400))), rows_of(7, 100, 8500))


def test_ids_are_skewed_signed_and_drift() -> None:
    early, late = rows_of(0, 0, 50_000), rows_of(0, 350_000, 400_000)
    assert early.ids.min() < -(2**62)
    assert early.ids.max() > 2**62
    assert 0.2 < early.labels.mean() < 0.3
    for feature in (0, 15):
        _, counts = np.unique(early.ids[:, feature], return_counts=True)
        counts[::-1].sort()
        assert counts[: len(counts) // 10].sum() > 0.5 * counts.sum()
    # A feature with few ids keeps its ids; a feature with many ids does not.
    assert np.isin(late.ids[:, 0], early.ids[:, 0]).mean() > 0.95
    assert np.isin(late.ids[:, 15], early.ids[:, 15]).mean() < 0.8


def test_labels_depend_on_the_ids() -> None:
    rows = rows_of(0, 0, 200_000)
    first, second = rows[:100_000], rows[100_000:]
    # The click rates of the ids of a feature with few ids are stable, so they are not
    # noise.
    rates = []
    for half in (first, second):
        ids = half.ids[:, 2]
        common = np.intersect1d(first.ids[:, 2], second.ids[:, 2])
        rates.append(
            [
                half.labels[ids == x].mean() if (ids == x).sum() >= 500 else np.nan
                for x in common
            ]
        )
    one, other = np.array(rates)
    both = ~np.isnan(one) & ~np.isnan(other)
    assert both.sum() >= 5
    assert np.corrcoef(one[both], other[both])[0, 1] > 0.8
