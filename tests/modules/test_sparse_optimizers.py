"""Updates outside of backward: ``fused=False`` with ``SparseSGD``,
``SparseRowWiseAdagrad`` and ``SparseAdamW``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import PoolingType

from tests.modules.collections import bag_tables, batch, sequence_tables
from torchrec_recstore.modules import (
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseAdamW,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from torchrec_recstore.modules.table_module import TableModule
from torchrec_recstore.optim import SGD, AdamW, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import (
    LRU,
    ConstantInit,
    MinFrequency,
    RocksDBStore,
    TableOptions,
)

SPARSE: list[tuple[str, Callable[..., Any], Optimizer]] = [
    ("sum", lambda: SparseSGD(lr=0.1, momentum=0.9), SGD(0.1, momentum=0.9)),
    ("mean", lambda: SparseRowWiseAdagrad(lr=0.1, eps=1e-3), RowWiseAdagrad(0.1, 1e-3)),
    ("weighted", lambda: SparseAdamW(lr=0.1, betas=(0.8, 0.9)), AdamW(0.1, (0.8, 0.9))),
    ("weighted mean", lambda: SparseSGD(lr=0.1), SGD(0.1)),
    (
        "sequence",
        lambda: SparseRowWiseAdagrad(lr=0.1, weight_decay=0.1),
        RowWiseAdagrad(0.1, weight_decay=0.1),
    ),
]


def tables_of(model: nn.Module) -> list[TableModule]:
    return [module for module in model.modules() if isinstance(module, TableModule)]


def assert_same_rows(first: nn.Module, second: nn.Module) -> None:
    for one, other in zip(tables_of(first), tables_of(second), strict=True):
        assert len(one.table) > 0
        state, others = one.state_dict(), other.state_dict()
        assert list(state) == list(others)
        for key, value in others.items():
            assert torch.equal(state[key], value), key


def loss_of(out: Any) -> Tensor:
    parts = (
        [out.values()]
        if hasattr(out, "length_per_key")
        else [out[name].values() for name in sorted(out)]
    )
    return sum((part**2).sum() for part in parts)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "sparse", "fused"), SPARSE, ids=[kind for kind, _, _ in SPARSE]
)
def test_a_step_a_pass_is_the_fused_update(
    kind: str, sparse: Callable[[], Any], fused: Optimizer
) -> None:
    """Rows, also evicted rows, and gradients of per-sample weights are equal bit for
    bit.
    """
    options = {
        "t1": TableOptions(admission=MinFrequency(2, counter_bytes=2**12)),
        "t2": TableOptions(max_rows=8, eviction=LRU()),
    }

    def model(**more: Any) -> nn.Module:
        if kind == "sequence":
            return RecStoreEmbeddingCollection(
                sequence_tables(), options=options, **more
            )
        pooling = PoolingType.MEAN if "mean" in kind else PoolingType.SUM
        return RecStoreEmbeddingBagCollection(
            bag_tables(pooling), is_weighted="weighted" in kind, options=options, **more
        )

    outside, inside = model(fused=False), model(optimizer=fused)
    optimizer = sparse()
    for step in range(6):
        grads = []
        for module in (outside, inside):
            given = batch(step, "weighted" in kind, batch_size=4)
            loss_of(module(given)).backward()
            grads.append(given.weights().grad if "weighted" in kind else torch.zeros(0))
        optimizer.step([outside])
        assert torch.equal(*grads)
    if kind == "sequence":
        assert int(outside.embeddings["t2"].table.stats().evicted) > 0  # type: ignore[operator, index, union-attr]
    assert_same_rows(outside, inside)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_modules_of_one_table(mode: Any, by_frequency: bool) -> None:
    by_frequency = by_frequency and mode != "max"
    arguments = {"mode": mode, "scale_grad_by_freq": by_frequency, "padding_idx": 3}
    outside = RecStoreEmbeddingBag(9, 4, fused=False, name="t", **arguments)
    inside = RecStoreEmbeddingBag(9, 4, optimizer=SGD(lr=0.1), name="t", **arguments)
    emb_outside = RecStoreEmbedding(
        9, 4, fused=False, name="t", padding_idx=3, scale_grad_by_freq=by_frequency
    )
    emb_inside = RecStoreEmbedding(
        9, 4, 3, None, 2.0, by_frequency, optimizer=SGD(lr=0.1), name="t"
    )
    optimizer = SparseSGD([nn.ModuleList([outside, emb_outside])], lr=0.1)
    ids, offsets = torch.tensor([5, -1, 3, 5, 2**62, 5]), torch.tensor([0, 0, 4])
    for _ in range(2):
        for module in (outside, inside):
            (module(ids, offsets) ** 2).sum().backward()
        for emb in (emb_outside, emb_inside):
            (emb(ids) ** 2).sum().backward()
        optimizer.step()
    assert_same_rows(outside, inside)
    assert_same_rows(emb_outside, emb_inside)


def test_passes_before_a_step_are_summed() -> None:
    """An id of several passes is updated once, with the sum.

    With AdamW, two updates would give other rows.
    """
    ids = torch.tensor([5, -1, 5]), torch.tensor([2**62, 5])
    emb = RecStoreEmbedding(9, 3, fused=False, _weight=torch.randn(9, 3))
    stock = nn.Parameter(
        torch.cat([emb(i).detach() for i in (torch.tensor([-1, 5, 2**62]),)])
    )
    reference, optimizer = torch.optim.AdamW([stock], lr=0.1), SparseAdamW(lr=0.1)
    for _ in range(3):
        reference.zero_grad()
        for some in ids:
            (emb(some) ** 3).sum().backward()
            (
                stock[torch.searchsorted(torch.tensor([-1, 5, 2**62]), some)] ** 3
            ).sum().backward()
        before = emb.table.stats().updates
        optimizer.step([emb])
        reference.step()
        assert emb.table.stats().updates - before == 3
    assert emb.table.optimizer_steps == 3
    torch.testing.assert_close(
        emb.table.lookup(torch.tensor([-1, 5, 2**62])),
        stock.detach(),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("way", ["optimizer", "module", "model", "torch", "step"])
def test_gradients_are_zeroed_by_whoever_does_it(way: str) -> None:
    emb = RecStoreEmbedding(9, 3, fused=False)
    model = nn.Sequential(emb, nn.Linear(3, 1))
    optimizer = SparseSGD([model], lr=1.0)
    model(torch.tensor([1])).sum().backward()
    {
        "optimizer": lambda: optimizer.zero_grad([model]),
        "module": emb.zero_grad,
        "model": model.zero_grad,
        "torch": torch.optim.SGD(model.parameters(), lr=0.1).zero_grad,
        "step": optimizer.step,
    }[way]()
    before = emb.table.lookup(torch.tensor([1, 2]))
    optimizer.step()
    assert torch.equal(emb.table.lookup(torch.tensor([1, 2])), before)
    model(torch.tensor([2])).sum().backward()
    optimizer.step()
    after = emb.table.lookup(torch.tensor([1, 2]))
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("kind", [RecStoreEmbedding, RecStoreEmbeddingBag])
def test_a_gradient_may_be_used_again_before_the_step(kind: Any) -> None:
    module = kind(9, 3, fused=False, options=TableOptions(ConstantInit(0.0)))
    out = module(torch.tensor([[1], [2]]))
    grad = torch.ones_like(out)
    out.backward(grad)
    grad.fill_(torch.nan)
    SparseSGD(lr=1.0).step([module])
    assert torch.equal(module.table.lookup(torch.tensor([1, 2])), -torch.ones(2, 3))


def test_what_is_fused_or_frozen_is_not_stepped() -> None:
    fused, outside = RecStoreEmbedding(9, 3), RecStoreEmbedding(9, 3, fused=False)
    optimizer = SparseSGD(lr=1.0)
    outside(torch.tensor([1])).sum().backward()
    before = outside.table.lookup(torch.tensor([1]))
    for modules, match in (
        ([outside, fused], "fused=False"),
        ([nn.Linear(1, 1)], "at least one eager RecStore module"),
    ):
        with pytest.raises(ValueError, match=match):
            optimizer.step(modules)
    with pytest.raises(ValueError, match="at least one eager RecStore module"):
        optimizer.step()
    for bad in (outside, [1], 0.1):
        with pytest.raises(TypeError, match="modules must be a list of torch modules"):
            optimizer.step(bad)  # type: ignore[arg-type]
    assert torch.equal(outside.table.lookup(torch.tensor([1])), before)
    outside.requires_grad_(False)
    assert not outside(torch.tensor([1])).requires_grad
    with pytest.raises(ValueError, match=r"SGD\.lr"):
        SparseSGD(lr=-1.0)


def test_the_optimizer_may_change_until_there_is_state() -> None:
    emb = RecStoreEmbedding(9, 3, fused=False, optimizer=RowWiseAdagrad(lr=0.1))
    emb(torch.tensor([1, 2])).sum().backward()
    rows = emb.table.lookup(torch.tensor([1, 2]))
    adamw = SparseAdamW([emb], lr=0.1)
    assert torch.equal(emb.table.lookup(torch.tensor([1, 2])), rows)
    assert emb.table.steps == 1
    adamw.step()
    with pytest.raises(
        ValueError, match="has been updated by AdamW, whose state does not fit SGD"
    ):
        SparseSGD(lr=0.1).step([emb])
    state = emb.table.read_rows(torch.tensor([1, 2]))
    emb(torch.tensor([1, 2])).sum().backward()
    adamw.lr = 0.0
    adamw.step()  # Another learning rate does not need a new table.
    assert torch.equal(emb.table.lookup(torch.tensor([1, 2])), state["weight"])
    SparseAdamW([emb], lr=0.1, weight_decay=0.5)
    moved = emb.table.read_rows(torch.tensor([1, 2]))
    assert emb.table.optimizer_steps == 2
    assert torch.equal(
        moved["exp_avg_sq"] > state["exp_avg_sq"], torch.ones(2, 3, dtype=torch.bool)
    )


def test_rows_that_have_left_memory_are_stepped(tmp_path: Any) -> None:
    options = TableOptions(
        ConstantInit(0.0), max_rows=2, cold_store=RocksDBStore(str(tmp_path))
    )
    emb = RecStoreEmbedding(9, 1, fused=False, options=options)
    for first in (0, 2, 4):
        emb(torch.arange(first, first + 2)).sum().backward()
    optimizer = SparseSGD(lr=1.0)
    # A step is one update and needs all of its rows in memory.
    with pytest.raises(ValueError, match="max_rows"):
        optimizer.step([emb])
    assert emb.collected is not None  # The failed step can be repeated.
    assert len(emb.collected[0]) == 6
    optimizer.zero_grad([emb])
    emb(torch.tensor([0, 1])).sum().backward()
    # The graph is freed at once, so that a row of the pass can be evicted.
    emb(torch.tensor([5]))
    emb(torch.tensor([4]))
    optimizer.step([emb])
    assert torch.equal(
        emb.table.lookup(torch.arange(6))[:, 0], torch.tensor([-1.0, -1, 0, 0, 0, 0])
    )


def test_gradients_changed_in_place_are_refused() -> None:
    module, optimizer = RecStoreEmbedding(10, 4, fused=False), SparseSGD(lr=0.1)
    module(torch.arange(3)).sum().backward()
    module.zero_grad(set_to_none=False)
    with pytest.raises(ValueError, match=r"weight\.grad has been changed in place"):
        optimizer.step([module])
    module.zero_grad()
    module(torch.arange(3)).sum().backward()
    optimizer.step([module])
    assert module.table.stats().updates == 3


def test_a_batch_s_tensor_may_be_filled_with_the_next_before_the_step() -> None:
    module, optimizer = RecStoreEmbedding(10, 4, fused=False), SparseSGD(lr=0.1)
    ids = torch.arange(3)
    for _ in range(2):
        module(ids).sum().backward()
        ids += 3
    before = module.eval()(torch.arange(6))
    optimizer.step([module])
    torch.testing.assert_close(module(torch.arange(6)), before - 0.1)
