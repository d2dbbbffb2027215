from __future__ import annotations

import pytest
import torch

from torchrec_recstore import ops
from torchrec_recstore.kernels import BlockRouting, SequenceGroup
from torchrec_recstore.optim import SGD
from torchrec_recstore.store import Table

IDS = torch.tensor([4, -7, 4, 2**62, 4])


def two_tables() -> tuple[Table, Table, SequenceGroup]:
    wide, narrow = (
        Table(6, optimizer=SGD(lr=0.5)),
        Table(2, optimizer=SGD(lr=0.25), name="narrow"),
    )
    return wide, narrow, SequenceGroup([wide, narrow])


def test_rows_table_by_table_and_their_updates() -> None:
    wide, narrow, group = two_tables()
    out = group(IDS, [3, 2], train=True)
    before = [wide.lookup(IDS[:3]), narrow.lookup(IDS[3:])]
    assert torch.equal(out, torch.cat([rows.view(-1) for rows in before]))
    out.sum().backward()
    times = torch.tensor([2.0, 1.0, 2.0])[:, None]
    torch.testing.assert_close(wide.lookup(IDS[:3]), before[0] - 0.5 * times)
    torch.testing.assert_close(narrow.lookup(IDS[3:]), before[1] - 0.25)
    group.learning_rate = lambda: 0.0
    group(IDS, [3, 2], train=True).sum().backward()
    torch.testing.assert_close(narrow.lookup(IDS[3:]), before[1] - 0.25)
    assert group.learning_rate is not None
    assert [table.stats().steps for table in (wide, narrow)] == [2, 2]


def test_evaluation_changes_nothing() -> None:
    wide, narrow, group = two_tables()
    out = group(IDS, [5, 0], train=False)
    assert torch.equal(out, torch.zeros(30))
    assert out.requires_grad
    assert len(wide) == len(narrow) == 0


def test_batches_of_changing_size() -> None:
    table = Table(2)
    group = SequenceGroup([table])
    for count in (0, 7, 3, 100):
        out = group(torch.arange(count), [count], train=True)
        assert torch.equal(out.view(-1, 2), table.lookup(torch.arange(count)))


@pytest.mark.parametrize("rank", [0, 1])
def test_mixed_ids_are_stored_raw(rank: int) -> None:
    unsigned = [i % 2**64 for i in ops.mix_ids(IDS, False).tolist()]
    block, world = 2**63 // 3, 2
    mine = [(u // block if u < block * world else u % world) == rank for u in unsigned]
    local = [
        u - rank * block if u < block * world else u // world
        for u, m in zip(unsigned, mine, strict=True)
        if m
    ]
    table = Table(2)
    group = SequenceGroup(
        [table], routings=[BlockRouting(block, world, rank, mixed=True)]
    )
    group(torch.tensor(local, dtype=torch.int64), [len(local)], train=True)
    assert torch.equal(table.ids(), IDS[torch.tensor(mine)].unique())


def test_bad_input() -> None:
    wide, _, group = two_tables()
    for counts in ([5], [2, 2], [3, 3]):
        with pytest.raises(ValueError, match="counts"):
            group(IDS, counts, train=True)
    with pytest.raises(TypeError, match="ids must be int64"):
        group(IDS.int(), [3, 2], train=True)
    with pytest.raises(ValueError, match="routings"):
        SequenceGroup([wide], routings=[])
    assert len(wide) == 0


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_backward_needs_no_ids_of_the_caller(accumulation_steps: int) -> None:
    """The ids are freed, and their memory is reused, before the backward.

    Stochastic rounding depends on the ids.
    """
    tables = [
        Table(4, torch.bfloat16, SGD(lr=0.1), stochastic_rounding=True)
        for _ in range(2)
    ]
    kept, freed = (
        SequenceGroup([table], accumulation_steps=accumulation_steps)
        for table in tables
    )
    ids = torch.arange(100_000)
    for _ in range(accumulation_steps):
        out = kept(ids, [len(ids)], train=True)
        copy = ids.clone()
        other = freed(copy, [len(ids)], train=True)
        del copy
        torch.full((100_000,), -1)
        for rows in (out, other):
            (rows * 0.3).sum().backward()
        del out, other, rows
    assert torch.equal(*(table.lookup(ids[:1000]) for table in tables))
