"""Tests of batches, which do not depend on the number of ranks, and of the reader
thread, which ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from criteo import ID_NAMES, Rows
from generator import Generator
from sources import batches_of_rank, cut, read_ahead
from torchrec.datasets.utils import Batch


class Pieces:
    """A source that yields its rows in pieces of given sizes."""

    path, bad_rows = "pieces", 0

    def __init__(self, rows: Rows, piece_rows: int) -> None:
        self.all = rows
        self.num_rows = len(rows)
        self.piece_rows = piece_rows

    def rows(self, start: int, stop: int) -> Iterator[Rows]:
        for first in range(start, stop, self.piece_rows):
            yield self.all[first : min(first + self.piece_rows, stop)]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return next(iter(Generator(1003, 0).rows(0, 1003)))


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def batches_of(
    rows: Rows,
    piece_rows: int,
    rank: int = 0,
    world_size: int = 1,
    modulo: int | None = None,
) -> list[Batch]:
    pieces = Pieces(rows, piece_rows).rows(0, len(rows))
    return list(read_ahead(batches_of_rank(cut(pieces, 100), rank, world_size, modulo)))


@pytest.mark.parametrize("piece_rows", [1, 7, 99, 100, 101, 350, 5000])
def test_batches_do_not_depend_on_the_pieces(rows: Rows, piece_rows: int) -> None:
    batches = list(cut(Pieces(rows, piece_rows).rows(0, len(rows)), 100))
    assert [len(batch) for batch in batches] == [100] * 10 + [3]
    assert np.array_equal(np.concatenate([batch.ids for batch in batches]), rows.ids)
    assert np.array_equal(
        np.concatenate([batch.dense for batch in batches]), rows.dense
    )
    assert np.array_equal(
        np.concatenate([batch.labels for batch in batches]), rows.labels
    )


def test_step_holds_one_id_a_feature_and_sample(rows: Rows) -> None:
    batch = batches_of(rows, 350)[1]
    assert batch.dense_features.shape == (100, 13)
    assert batch.dense_features.dtype == torch.float32
    assert batch.labels.tolist() == rows.labels[100:200].tolist()
    sparse = batch.sparse_features
    assert sparse.keys() == list(ID_NAMES)
    assert sparse.stride() == 100
    assert sparse.values().dtype == torch.int64
    for feature, name in enumerate(ID_NAMES):
        assert sparse[name].values().tolist() == rows.ids[100:200, feature].tolist()
        assert sparse[name].lengths().tolist() == [1] * 100


def test_modulo_is_never_negative(rows: Rows) -> None:
    values = (
        batches_of(rows, 350, modulo=1000)[0].sparse_features["C1"].values().tolist()
    )
    assert values == [int(x) % 1000 for x in rows.ids[:100, 0]]


def test_ranks_share_every_batch_in_order(rows: Rows) -> None:
    whole = batches_of(rows, 350)
    parts = [batches_of(rows, 350, rank, 4) for rank in range(4)]
    # The last three samples cannot be split over four ranks.
    assert [len(part) for part in parts] == [10] * 4
    for batch, *shares in zip(whole[:10], *parts, strict=True):
        assert torch.equal(torch.cat([share.labels for share in shares]), batch.labels)
        assert torch.equal(
            torch.cat([share.dense_features for share in shares]), batch.dense_features
        )
    assert [len(batches_of(rows, 350, rank, 2)[-1].labels) for rank in range(2)] == [
        1,
        2,
    ]
    even = [
        list(batches_of_rank(cut([rows], 100), rank, 2, even=True))[-1]
        for rank in range(2)
    ]
    assert [batch.labels.tolist() for batch in even] == [
        rows.labels[1000:1001].tolist(),
        rows.labels[1001:1002].tolist(),
    ]


def test_error_of_the_reader_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("line 3")

    seen = []
    with pytest.raises(ValueError, match="line 3"):
        seen.extend(read_ahead(items()))
    assert seen == [1, 2]
    assert not reader_threads()


def test_thread_and_source_end_with_an_early_stop() -> None:
    made, closed = [], threading.Event()

    def items() -> Iterator[int]:
        try:
            for number in range(10**9):
                made.append(number)
                yield number
        finally:
            closed.set()

    ahead = read_ahead(items(), depth=4)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    deadline = time.monotonic() + 5
    while len(made) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(made) == 8, "three taken, four waiting, one in the hand"
    ahead.close()
    assert closed.is_set()
    assert not reader_threads()
