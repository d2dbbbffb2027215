"""The figures in docs/memory.md are those of the store."""

from __future__ import annotations

import re

import torch

from tests.packages import ROOT
from torchrec_recstore import LRU, SGD, MinFrequency, Table, TableOptions

DOCUMENT = (ROOT / "docs" / "memory.md").read_text()


def test_a_row_takes_no_more_than_is_said() -> None:
    (said,) = re.findall(r"up to (\d+) for index and bookkeeping", DOCUMENT)
    table = Table(
        16,
        optimizer=SGD(lr=0.1),
        options=TableOptions(max_rows=100_000, eviction=LRU()),
    )
    for step in range(30):
        table.lookup(torch.arange(5000 * step, 5000 * (step + 1)), train=True)
    stats = table.stats()
    assert stats.rows == 100_000
    assert stats.evicted == 50_000
    assert 0 < stats.bytes / stats.rows - 16 * 4 <= int(said)


def test_sightings_of_a_generation_are_not_forgotten() -> None:
    counter_bytes, seen = 2**13, torch.arange(-20, 0)
    generation = counter_bytes // 128 * 6
    for others, fewest, most in (
        (generation - 20, 20, 20),
        (2 * generation + 50, 0, 4),
    ):
        table = Table(
            4,
            options=TableOptions(
                admission=MinFrequency(2, counter_bytes=counter_bytes)
            ),
        )
        table.lookup(seen, train=True)
        assert len(table) == 0
        table.lookup(torch.arange(others), train=True)
        table.lookup(seen, train=True)
        assert fewest <= int(table.contains(seen).sum()) <= most
