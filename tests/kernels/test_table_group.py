"""Lookups together with other features of autograd: saved-tensor hooks, checkpoints,
graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table

IDS = torch.tensor([5, -7, 2**62, 5, 1])
OFFSETS = torch.tensor([0, 2, 3, 5])
Lookup = Callable[[Tensor], Tensor]


def pooled(table: Table) -> Lookup:
    group = PooledGroup([table], [0], "mean")
    return lambda weights: group(IDS, OFFSETS, weights, train=True)


def sequence(table: Table) -> Lookup:
    group = SequenceGroup([table])
    return lambda weights: (
        group(IDS, [len(IDS)], train=True).view(-1, 4) * weights[:, None]
    )


def train(
    make: Callable[[Table], Lookup], around: Callable[[Lookup, Tensor], Tensor]
) -> list[Tensor]:
    """Trains two steps, and returns the gradients of the weights and all rows of the
    table.
    """
    with Table(4, optimizer=RowWiseAdagrad(lr=0.1)) as table:
        look_up = make(table)
        weights = torch.linspace(0.5, 1.5, len(IDS), requires_grad=True)
        for _ in range(2):
            around(look_up, weights).square().sum().backward()
        assert weights.grad is not None
        assert table.stats().updates == 2 * 4
        *state, _, _ = ops.table_export(
            table.handle, table.ids()
        )  # not what counts steps: a checkpoint makes two of one
        return [weights.grad, table.ids(), *state]


def copied_by_hooks(look_up: Lookup, weights: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return look_up(weights)


def saved_on_cpu(look_up: Lookup, weights: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return look_up(weights)


def checkpointed(look_up: Lookup, weights: Tensor) -> Tensor:
    return checkpoint(lambda given: look_up(given) * 1.0, weights, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [pooled, sequence])
@pytest.mark.parametrize("around", [copied_by_hooks, saved_on_cpu, checkpointed])
def test_hooks_and_checkpoints_change_nothing(
    make: Callable[[Table], Lookup], around: Callable[[Lookup, Tensor], Tensor]
) -> None:
    wanted = train(make, lambda look_up, weights: look_up(weights))
    assert all(map(torch.equal, train(make, around), wanted))


def test_a_reentrant_checkpoint_is_refused() -> None:
    with Table(4) as table:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            checkpoint(
                pooled(table),
                torch.ones(len(IDS), requires_grad=True),
                use_reentrant=True,
            )
        assert len(table) == 0


class Around(torch.autograd.Function):
    """Looks up in its own forward, as reentrant checkpoints of other packages do."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, look_up: Lookup) -> Tensor:
        return look_up(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def test_a_training_lookup_in_an_autograd_function_is_refused() -> None:
    with Table(4) as table:
        look_up = pooled(table)
        weights = torch.ones(len(IDS), requires_grad=True)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            Around.apply(weights, look_up)
        assert len(table) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_training_lookup_without_grad_is_an_evaluation(
    mode: Callable[[], Any],
) -> None:
    with Table(4) as table:
        look_up = pooled(table)
        with mode():
            assert not look_up(torch.ones(len(IDS))).any()
        assert len(table) == 0


@pytest.mark.parametrize("make", [pooled, sequence])
def test_slots_are_kept_as_long_as_the_graph_is_and_no_longer(
    make: Callable[[Table], Lookup],
) -> None:
    with Table(4) as table:
        out = make(table)(torch.ones(len(IDS)))
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        assert table.stats().updates == 2 * 4
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        table.remove(IDS)
        table.insert(torch.tensor([3]), torch.ones(1, 4))
        assert table.lookup(torch.tensor([3])).tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (pooled, "aot_eager"),
        (sequence, "aot_eager"),
        # No memory that a lookup of sequences reads is reused in this graph.
        pytest.param(pooled, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(make: Callable[[Table], Lookup], backend: str) -> None:
    torch._dynamo.reset()

    def around(look_up: Lookup, weights: Tensor) -> Tensor:
        # The compiled graph may reuse the memory of ids and weights after the lookup.
        return torch.compile(
            lambda given: look_up(given * 2.0) + 1.0, backend=backend, fullgraph=True
        )(weights)

    wanted = train(make, lambda look_up, weights: look_up(weights * 2.0) + 1.0)
    same = torch.equal if backend == "aot_eager" else partial(torch.allclose, rtol=1e-6)
    assert all(map(same, train(make, around), wanted))


def test_a_compiled_graph_whose_saved_state_is_copied_is_refused() -> None:
    with Table(4) as table:
        compiled = torch.compile(pooled(table), backend="aot_eager", fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            out = compiled(torch.ones(len(IDS)))
        before = ops.table_export(table.handle, table.ids())
        with pytest.raises(ValueError, match=r"tables table: .*saved-tensor hook"):
            out.sum().backward()
        assert all(
            map(torch.equal, before, ops.table_export(table.handle, table.ids()))
        )


def test_a_backward_is_not_differentiated_twice() -> None:
    with Table(4) as table:
        grad_out = torch.ones((), requires_grad=True)
        weights = torch.ones(len(IDS), requires_grad=True)
        out = PooledGroup([table], [0], "sum")(IDS, OFFSETS, weights, train=True).sum()
        (first,) = torch.autograd.grad(out, weights, grad_out, create_graph=True)
        assert table.stats().updates == 4  # the distinct ids
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.sum().backward()


def test_make_fx_keeps_the_update() -> None:
    with Table(4) as table, Table(4) as traced:
        groups = [PooledGroup([each], [0], "sum") for each in (table, traced)]

        def step(group: PooledGroup, weights: Tensor) -> Tensor:
            weights = weights.detach().requires_grad_()
            return torch.autograd.grad(
                group(IDS, OFFSETS, weights, train=True).sum(), weights
            )[0]

        trace = make_fx(
            partial(step, groups[1]), tracing_mode="fake", _allow_non_fake_inputs=True
        )
        graph = trace(torch.ones(len(IDS)))
        graph.graph.eliminate_dead_code()
        graph.recompile()
        assert len(traced) == 0
        assert torch.equal(
            graph(torch.ones(len(IDS))), step(groups[0], torch.ones(len(IDS)))
        )
        assert torch.equal(table.lookup(IDS), traced.lookup(IDS))
        assert table.stats() == traced.stats()


def test_a_trace_does_not_record_what_is_freed_meanwhile() -> None:
    dropped = [PooledGroup([Table(4)], [0], "sum"), Table(4).snapshot()]

    def free(x: Tensor) -> Tensor:
        dropped.clear()
        gc.collect()
        return x + 1

    graph = make_fx(free)(torch.ones(1))
    assert not [node for node in graph.graph.nodes if "recstore" in str(node.target)]
