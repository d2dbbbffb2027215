"""A forward takes the slots that a prefetch has resolved. tests/cpp/test_ahead.cpp
tests that they change no result.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore.store import Table

IDS = torch.arange(4096)
OFFSETS = torch.arange(4097)
COPY = IDS.nbytes + IDS.nbytes // 2  # bytes of the ids and their slots


Lookup = tuple[PooledGroup | SequenceGroup, Callable[[Tensor], Tensor]]


def _pooled(table: Table) -> Lookup:
    group = PooledGroup([table], [0], "sum")
    return group, lambda ids: group(ids, OFFSETS, train=True)  # type: ignore[no-any-return]


def _sequence(table: Table) -> Lookup:
    group = SequenceGroup([table])
    return group, lambda ids: group(ids, [len(ids)], train=True)  # type: ignore[no-any-return]


def _compiled(table: Table) -> Lookup:
    group, look_up = _pooled(table)
    return group, torch.compile(look_up, backend="aot_eager", fullgraph=True)


def _used() -> int:
    return ops.buffer_pool_bytes()[0]


def _waiting(others: int) -> int:
    """Returns the number of batches that wait, beside ``others`` bytes.

    A buffer may have a few pages more.
    """
    return round((_used() - others) / COPY)


@pytest.mark.parametrize("make", [_pooled, _sequence, _compiled])
@pytest.mark.parametrize(
    "options", [TableOptions(), TableOptions(max_rows=5000, eviction=LRU())]
)
def test_a_forward_takes_the_slots(
    make: Callable[[Table], Lookup], options: TableOptions
) -> None:
    """The memory of the pool tells whether the forward has taken them: it then uses
    their memory, and frees the ids.
    """
    table = Table(16, options=options)
    group, look_up = make(table)
    look_up(IDS)
    before = _used()
    expected = look_up(IDS)
    used = _used() - before
    rows = expected.detach().clone()
    del expected
    # The ids of a prefetch and of a forward, and the number of batches that wait before
    # and after the forward.
    flipped = IDS.flip(0)
    for prefetched, ids, waiting, left in (
        (IDS, IDS.clone(), 1, 0),
        (IDS, flipped, 1, 1),
        (flipped, flipped, 2, 0),
    ):
        group.prefetch(prefetched, [len(IDS)])
        assert _waiting(before) == waiting
        out = look_up(ids)
        assert _waiting(before + used) == left
        assert torch.equal(out.detach().view(-1, 16), rows.view(-1, 16)[ids])
        del out
    assert table.stats().inserts == table.stats().misses == 4096


def test_unused_batches_are_freed() -> None:
    table = Table(16)
    group, look_up = _pooled(table)
    look_up(IDS)
    before = _used()
    for first in range(9):
        group.prefetch(IDS + first, [len(IDS)])
        assert _waiting(before) == min(first + 1, 4)
    look_up(IDS + 7)
    for _ in range(4):
        assert _waiting(before) == 1
        look_up(IDS + 20)
    assert _used() == before
    group.prefetch(IDS, [len(IDS)])
    del group, look_up
    assert _used() == before


def test_ids_that_change_in_place() -> None:
    table = Table(16)
    group, look_up = _pooled(table)
    expected = look_up(IDS).detach().clone()
    ids = IDS.clone()
    group.prefetch(ids, [len(ids)])
    # the forward gets the same tensor, and the same ids at most positions
    ids[[1, 2]] = ids[[2, 1]]
    assert torch.equal(look_up(ids).detach(), expected[ids])
