"""Eager modules in compiled functions: lookups are outside of the graph, and training
is the same as without it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag, SparseSGD
from torchrec_recstore.optim import RowWiseAdagrad

IDS = torch.tensor([3, -4, 2**62, 3, 8])
OFFSETS = torch.tensor([0, 2, 4])


def train(fused: bool, compiled: bool) -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    bags = RecStoreEmbeddingBag(
        1000, 4, fused=fused, **({"optimizer": RowWiseAdagrad(lr=0.1)} if fused else {})
    )
    over = nn.Linear(4, 1)

    def loss_of(ids: Tensor) -> Tensor:
        return (over(bags(ids, OFFSETS)) - 1).square().mean()

    sparse = None if fused else SparseSGD([bags], lr=0.1)
    step = torch.compile(loss_of, backend="aot_eager") if compiled else loss_of
    losses = []
    for shift in range(4):
        loss = step(IDS + shift)
        loss.backward()
        if sparse is not None:
            sparse.step()
        losses.append(loss.item())
    return losses, bags(torch.arange(-5, 12), torch.arange(17)).detach()


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_equals_eager(fused: bool) -> None:
    (wanted, rows), (losses, compiled_rows) = train(fused, False), train(fused, True)
    assert len(set(wanted)) == 4
    assert losses == wanted
    assert torch.equal(compiled_rows, rows)


def test_a_whole_graph_is_refused_by_name() -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RecStoreSharder"):
        torch.compile(RecStoreEmbedding(1000, 4), backend="aot_eager", fullgraph=True)(
            IDS
        )


def test_traced_gradients_that_python_would_collect_are_refused() -> None:
    rows = RecStoreEmbedding(1000, 4, fused=False)
    with pytest.raises(NotImplementedError, match="fused=True"):
        make_fx(rows, tracing_mode="fake", _allow_non_fake_inputs=True)(IDS)
