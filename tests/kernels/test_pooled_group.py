from __future__ import annotations

import gc
from typing import Literal

import pytest
import torch

from torchrec_recstore.kernels import BlockRouting, PooledGroup
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import MinFrequency, TableOptions
from torchrec_recstore.store import Table

IDS = torch.tensor([4, -7, 4, 2**62, 9])
OFFSETS = torch.tensor([0, 2, 2, 5])


def _group(missing: str = "zeros", pooling: str = "sum") -> tuple[Table, PooledGroup]:
    table = Table(6, optimizer=SGD(lr=0.5), options=TableOptions(missing=missing))  # type: ignore[arg-type]
    return table, PooledGroup([table], [0], pooling)  # type: ignore[arg-type]


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("missing", ["zeros", "init"])
def test_evaluation_changes_nothing(
    missing: str, pooling: str, offsets_dtype: torch.dtype
) -> None:
    table, group = _group(missing, pooling)
    table.lookup(torch.tensor([4]), train=True)
    before = table.stats()
    out = group(IDS, OFFSETS.to(offsets_dtype), train=False)
    with torch.no_grad():
        assert torch.equal(group(IDS, OFFSETS, train=True), out)
    assert out.requires_grad
    assert table.stats() == before
    rows = table.lookup(IDS)
    bags = [rows[:2], rows[2:2], rows[2:]]
    expected = torch.stack(
        [bag.sum(0) / (max(len(bag), 1) if pooling == "mean" else 1) for bag in bags]
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-7)


def test_training_makes_rows_and_backward_updates_them() -> None:
    table, group = _group()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    out = group(IDS, OFFSETS, weights, train=True)
    rows = table.lookup(IDS)
    assert table.ids().tolist() == [-7, 4, 9, 2**62]
    grad = torch.randn(3, 6)
    out.backward(grad)
    bag = torch.tensor([0, 0, 2, 2, 2])
    torch.testing.assert_close(weights.grad, (grad[bag] * rows).sum(1))
    expected = rows - 0.5 * grad[bag] * weights.detach()[:, None]
    torch.testing.assert_close(table.lookup(IDS)[[1, 3, 4]], expected[[1, 3, 4]])
    torch.testing.assert_close(
        table.lookup(IDS)[0], rows[0] - 0.5 * (grad[0] * 1.0 + grad[2] * 3.0)
    )


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_weighted_bags_against_autograd_in_float64(
    pooling: Literal["sum", "mean"], accumulation_steps: int
) -> None:
    bags, lr = 300, 0.5
    generator = torch.Generator().manual_seed(1)
    # The admission of the second table refuses one id in four. A lookup of such an id
    # returns its initial row, which is used in the gradient of the weights and is not
    # updated.
    options = [TableOptions(), TableOptions(admission=MinFrequency(2))]
    tables = [
        Table(dim, optimizer=SGD(lr=lr), options=each, name=f"t{dim}")
        for dim, each in zip((17, 64), options, strict=True)
    ]
    features = [0, 1, 1]
    seen = torch.arange(0, 90)
    tables[1].lookup(seen, train=True)
    group = PooledGroup(
        tables, features, pooling, accumulation_steps=accumulation_steps
    )
    initial = Table(64, name="t64")  # every row
    lengths = torch.randint(0, 6, (len(features) * bags,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = torch.randint(0, 120, (int(offsets[-1]),), generator=generator)
    given = torch.rand(len(ids), generator=generator) + 0.5
    grad = torch.randn(bags, 17 + 64 + 64, generator=generator)

    weights = given.clone().requires_grad_()
    out = group(ids, offsets, weights, train=True)
    everything = torch.arange(120)
    before = [tables[0].lookup(everything), initial.lookup(everything, train=True)]
    rows = [each.double().requires_grad_() for each in before]
    expected_weights = given.double().requires_grad_()
    bag_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    parts = []
    for feature, table in enumerate(features):
        here = slice(int(offsets[feature * bags]), int(offsets[(feature + 1) * bags]))
        picked = rows[table][ids[here]] * expected_weights[here, None]
        pooled = torch.zeros(bags, picked.shape[1], dtype=torch.float64)
        pooled = pooled.index_add(0, bag_of[here] - feature * bags, picked)
        if pooling == "mean":
            pooled = pooled / lengths[
                feature * bags : (feature + 1) * bags, None
            ].clamp(min=1)
        parts.append(pooled)
    expected = torch.cat(parts, 1)
    torch.testing.assert_close(
        out.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5
    )

    expected.backward(grad.double())
    out.backward(grad)
    assert weights.grad is not None
    assert expected_weights.grad is not None
    torch.testing.assert_close(
        weights.grad.double(), expected_weights.grad, rtol=1e-5, atol=1e-5
    )
    updated = [table.contains(everything) for table in tables]
    # the update comes with a second pass, here of no gradient
    if accumulation_steps == 2:
        group(ids, offsets, given, train=True).backward(torch.zeros_like(grad))
    for table, row, old, which in zip(tables, rows, before, updated, strict=True):
        assert row.grad is not None
        after = old.double() - lr * row.grad
        torch.testing.assert_close(
            table.lookup(everything)[which].double(), after[which], rtol=1e-5, atol=1e-5
        )


def test_learning_rate_is_read_in_backward() -> None:
    table, group = _group()
    out = group(IDS, OFFSETS, train=True)
    before = table.lookup(IDS)
    group.learning_rate = lambda: 0.0
    out.sum().backward()
    assert torch.equal(table.lookup(IDS), before)


def test_several_pending_passes_and_accumulation() -> None:
    table, group = _group()
    outs = [group(IDS + i, OFFSETS, train=True) for i in range(3)]
    before = table.lookup(IDS)
    table.remove(IDS)
    group(IDS + 1000, OFFSETS, train=True)  # takes no slot of the pending passes
    fresh = table.lookup(IDS + 1000)
    for out in outs:
        out.sum().backward()
    assert torch.equal(table.lookup(IDS + 1000), fresh)
    assert not table.contains(IDS).any()
    assert torch.equal(table.lookup(IDS, train=True), before)


def test_a_graph_that_is_dropped_releases_its_pass() -> None:
    table, group = _group()
    for step in range(100):
        group(IDS + 10 * step, OFFSETS, train=True)
        table.remove(IDS + 10 * step)
    gc.collect()
    assert table.stats().bytes < Table(6).stats().bytes + 100 * 64


def test_outputs_are_recycled_only_when_nobody_holds_them() -> None:
    table, group = _group()
    kept = [group(IDS, OFFSETS, train=False) for _ in range(5)]
    view = group(IDS, OFFSETS, train=True)[1:]
    copies = [out.clone() for out in (*kept, view)]
    for _ in range(20):
        table.insert(IDS, torch.randn(5, 6))
        group(IDS, OFFSETS, train=False)
    for out, copy in zip((*kept, view), copies, strict=True):
        assert torch.equal(out, copy)


def test_routing_is_undone() -> None:
    raw = torch.tensor([0, 5, 9, 10, 17, -1, 2**63 - 1, -(2**63), 12345678901])
    block, world = 5, 3
    unsigned = [i % 2**64 for i in raw.tolist()]
    for rank in range(world):
        mine = [
            u
            for u in unsigned
            if (u // block if u < block * world else u % world) == rank
        ]
        local = [u - rank * block if u < block * world else u // world for u in mine]
        table = Table(2)
        group = PooledGroup(
            [table], [0], "sum", routings=[BlockRouting(block, world, rank)]
        )
        local_ids = torch.tensor(
            [u - 2**64 if u >= 2**63 else u for u in local], dtype=torch.int64
        )
        group(local_ids, torch.arange(len(mine) + 1), train=True)
        assert set(table.ids().tolist()) == {
            u - 2**64 if u >= 2**63 else u for u in mine
        }


@pytest.mark.parametrize(
    ("ids", "offsets", "weights", "error", "names"),
    [
        (IDS.int(), OFFSETS, None, TypeError, "ids must be int64"),
        (IDS[None], OFFSETS, None, ValueError, "ids"),
        (IDS, OFFSETS.float(), None, TypeError, "offsets"),
        (IDS, OFFSETS[:-1], None, ValueError, "offsets"),
        (IDS, torch.tensor([0, 3, 2, 5]), None, ValueError, "offsets must ascend"),
        (IDS, torch.tensor([0, 9, 9, 5]), None, ValueError, "offsets"),
        (IDS, torch.tensor([1, 2, 3, 5]), None, ValueError, "offsets"),
        (IDS, torch.empty(0, dtype=torch.int64), None, ValueError, "offsets"),
        (IDS, OFFSETS, torch.ones(4), ValueError, "weights"),
        (IDS, OFFSETS, torch.ones(5).double(), TypeError, "weights"),
    ],
)
@pytest.mark.parametrize("train", [True, False])
def test_bad_batches_change_nothing(
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    error: type[Exception],
    names: str,
    train: bool,
) -> None:
    table, group = _group()
    with pytest.raises(error, match=names):
        group(ids, offsets, weights, train=train)
    assert len(table) == 0
    assert table.stats().steps == 0


def test_offsets_changed_in_place_do_not_matter() -> None:
    table, group = _group()
    offsets = OFFSETS.clone()
    out = group(IDS, offsets, train=True)
    dropped = group(IDS, offsets, train=True)
    rows = table.lookup(IDS)
    offsets[1:] = 10**9
    assert table.stats().lookups == 8
    del dropped
    out.backward(torch.ones(3, 6))
    torch.testing.assert_close(
        table.lookup(IDS), rows - 0.5 * torch.tensor([2.0, 1, 2, 1, 1])[:, None]
    )


def test_offsets_that_go_back_for_another_feature() -> None:
    tables = [Table(dim, name=str(dim)) for dim in (64, 1, 1)]
    group = PooledGroup(tables, [0, 1, 2], "sum")
    begins = torch.arange(2048) * 2
    offsets = torch.cat(
        [begins, torch.full((2048,), 4096), begins, torch.tensor([4096])]
    )
    with pytest.raises(ValueError, match="offsets must ascend"):
        group(torch.arange(4096), offsets, train=True)
    assert [len(table) for table in tables] == [0, 0, 0]


def test_weights_changed_in_place_are_refused() -> None:
    table, group = _group()
    weights = torch.ones(5)
    out = group(IDS, OFFSETS, weights, train=True)
    before = table.lookup(IDS)
    weights[0] = 7.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert torch.equal(table.lookup(IDS), before)


def test_closed_table_in_a_group() -> None:
    table, group = _group()
    out = group(IDS, OFFSETS, train=True)
    table.close()
    with pytest.raises(ValueError, match="closed"):
        group(IDS, OFFSETS, train=True)
    with pytest.raises(ValueError, match="closed"):
        out.sum().backward()


def test_arguments_of_a_group() -> None:
    table = Table(4)
    with pytest.raises(ValueError, match="pooling"):
        PooledGroup([table], [0], "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="feature_tables"):
        PooledGroup([table], [1], "sum")
    with pytest.raises(ValueError, match="routings"):
        PooledGroup([table], [0], "sum", routings=[])
    with pytest.raises(ValueError, match="rank"):
        BlockRouting(5, 2, 2)


def test_prefetched_rows_are_those_that_a_forward_makes() -> None:
    tables = [Table(4, name=name) for name in ("one", "other")]
    plain = [Table(4, name=name) for name in ("one", "other")]
    ids, offsets = torch.tensor([5, -1, 5, 2**62]), torch.tensor([0, 2, 3, 4, 4])
    group = PooledGroup(tables, [0, 1], "sum")
    group.prefetch(ids, [3, 1])
    assert [table.ids().tolist() for table in tables] == [[-1, 5], [2**62]]
    outs = [
        k(ids, offsets, train=True) for k in (group, PooledGroup(plain, [0, 1], "sum"))
    ]
    assert torch.equal(*outs)
    assert [table.stats() for table in tables] == [table.stats() for table in plain]
    for counts in ([4], [3, 2], [5, -1]):
        with pytest.raises(ValueError, match="counts must"):
            group.prefetch(ids, counts)
