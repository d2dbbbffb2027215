"""ParquetDataset: every row once over ranks and workers, in the order of seed and
epoch, from any position.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from common.parquet import Batch, ParquetDataset
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = 103


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with row groups of up to ten rows.

    The price is the number of the row.
    """
    folder = tmp_path_factory.mktemp("clicks")
    rng = np.random.default_rng(0)
    rows = {
        "user": [None if row % 7 == 0 else f"user-{row % 11}" for row in range(ROWS)],
        "item": pa.array([row * 2**57 for row in range(ROWS)], pa.uint64()),
        "history": [
            None if row % 5 == 0 else rng.integers(-(2**62), 2**62, row % 4).tolist()
            for row in range(ROWS)
        ],
        "tags": [[f"tag-{place}" for place in range(row % 3)] for row in range(ROWS)],
        "price": [float(row) if row else None for row in range(ROWS)],
        "click": [row % 2 == 0 for row in range(ROWS)],
    }
    table = pa.table(rows)
    for number, (begin, end) in enumerate([(0, 40), (40, 41), (41, ROWS)]):
        pq.write_table(
            table.slice(begin, end - begin),
            folder / f"part-{number}.parquet",
            row_group_size=10,
        )
    return folder


def dataset(
    path: Path, *, rank: int = 0, ranks: int = 1, **changes: Any
) -> ParquetDataset:
    options: dict[str, Any] = {
        "ids": ["item"],
        "dense": ["price"],
        "label": "click",
        "batch_size": 8,
        "seed": 3,
    }
    made = ParquetDataset(path, **options | changes)
    made.rank, made.ranks = rank, ranks
    return made


def rows_of(batches: Any) -> list[int]:
    return [int(row) for batch in batches for row in batch.dense[:, 0]]


def by_hand(path: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(path.iterdir()):
        yield from pq.read_table(file).to_pylist()


def test_columns_are_ids_and_numbers(clicks: Path) -> None:
    names = ["user", "item", "history", "tags"]
    batches = list(dataset(clicks, ids=names, seed=None, batch_size=30))
    assert [len(batch.labels) for batch in batches] == [25, 26, 26, 26]
    found: dict[str, list[list[int]]] = {name: [] for name in names}
    for batch in batches:
        for name in names:
            found[name] += [ids.tolist() for ids in batch.ids[name].to_dense()]
    hashed = {
        f"{kind}-{n}": xxhash.xxh3_64_intdigest(f"{kind}-{n}".encode())
        for kind in ("user", "tag")
        for n in range(11)
    }
    for row, values in enumerate(by_hand(clicks)):
        assert found["user"][row] == (
            [] if values["user"] is None else [signed(hashed[values["user"]])]
        )
        assert found["item"][row] == [signed(values["item"])]
        assert found["history"][row] == (values["history"] or [])
        assert found["tags"][row] == [signed(hashed[tag]) for tag in values["tags"]]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [
        float(row % 2 == 0) for row in range(ROWS)
    ]
    assert torch.cat([batch.dense for batch in batches])[0].tolist() == [0.0], (
        "a missing number"
    )


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 3])
def test_each_row_is_in_one_batch_of_one_rank(
    clicks: Path, ranks: int, workers: int
) -> None:
    seen: list[int] = []
    counts = set()
    for rank in range(ranks):
        part = dataset(clicks, rank=rank, ranks=ranks)
        batches = list(StatefulDataLoader(part, batch_size=None, num_workers=workers))
        counts.add(len(batches))
        assert len(batches) == len(part)
        assert {len(batch.labels) for batch in batches} <= {6, 7, 8}
        seen += rows_of(batches)
    assert sorted(seen) == list(range(ROWS))
    assert len(counts) == 1, "the steps of a sharded model are collective"


def test_order_depends_on_seed_and_epoch_alone(clicks: Path) -> None:
    one = dataset(clicks)
    first, again = rows_of(one), rows_of(one)
    assert first == again == rows_of(dataset(clicks)) != list(range(ROWS))
    one.set_epoch(1)
    assert sorted(rows_of(one)) == list(range(ROWS))
    assert rows_of(one) != first
    assert rows_of(dataset(clicks, seed=4)) != first
    assert rows_of(dataset(clicks, seed=None)) == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_at_the_exact_row(clicks: Path, workers: int) -> None:
    def loader() -> StatefulDataLoader[Batch]:
        part = dataset(clicks, rank=1, ranks=2)
        part.set_epoch(5)
        return StatefulDataLoader(part, batch_size=None, num_workers=workers)

    whole = [rows_of([batch]) for batch in loader()]
    for taken in range(1, len(whole)):
        stopped = loader()
        batches = iter(stopped)
        for _ in range(taken):
            next(batches)
        state = stopped.state_dict()
        resumed = loader()
        resumed.load_state_dict(state)
        assert [rows_of([batch]) for batch in resumed] == whole[taken:]
        if workers:
            break  # processes take seconds


def test_resumes_without_a_loader(clicks: Path) -> None:
    whole = rows_of(dataset(clicks))
    one = dataset(clicks)
    batches = iter(one)
    taken = rows_of([next(batches), next(batches)])
    other = dataset(clicks)
    other.load_state_dict(one.state_dict())
    assert taken + rows_of(other) == whole
    assert rows_of(other) == whole, "the next iteration begins anew"


def test_what_cannot_be_read_is_named(clicks: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"contains no \.parquet file"):
        dataset(tmp_path)
    with pytest.raises(ValueError, match=r"part-0\.parquet has no column 'basket'"):
        dataset(clicks, ids=["item", "basket"])
    with pytest.raises(
        ValueError,
        match="column 'price' has values of type double: ids are integers or strings",
    ):
        next(iter(dataset(clicks, ids=["price"])))
    pq.write_table(
        pa.table({"item": [[1, None]], "click": [1], "price": [0.0]}),
        tmp_path / "one.parquet",
    )
    with pytest.raises(ValueError, match="column 'item' has a list with a missing id"):
        next(iter(dataset(tmp_path / "one.parquet")))
    with pytest.raises(
        ValueError, match=r"another data set or job: .*'ranks': 1.* is .*'ranks': 2"
    ):
        dataset(clicks, ranks=2).load_state_dict(dataset(clicks).state_dict())
