"""A model on a GPU with rows in host memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.modules.collections import IDS, bag_tables, batch, sequence_tables
from torchrec_recstore.modules import (
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_input_comes_from_the_gpu_and_output_goes_there() -> None:
    """The results and the gradients of per-sample weights are equal to those on the CPU."""
    for weighted in (False, True):
        first, second = (RecStoreEmbeddingBagCollection(bag_tables(), is_weighted=weighted) for _ in range(2))
        second.to("cuda")
        assert second.device.type == "cpu"
        given = batch(0, weighted)
        moved = batch(0, weighted).to(torch.device("cuda"))
        outs = first(given).values(), second(moved).values()
        assert outs[1].device.type == "cuda"
        for out in outs:
            (out**2).sum().backward()
        assert torch.equal(outs[0], outs[1].cpu())
        assert torch.equal(first.eval()(given).values(), second.eval()(moved).values().cpu())
    sequences = [RecStoreEmbeddingCollection(sequence_tables()) for _ in range(2)]
    rows = sequences[0](given), sequences[1](moved)
    for name in rows[0]:
        assert torch.equal(rows[0][name].values(), rows[1][name].values().cpu())
        assert rows[1][name].lengths().device.type == "cuda"


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_modules_of_one_table(mode: str) -> None:
    model = nn.Sequential(RecStoreEmbedding(9, 4), nn.Linear(4, 4)).cuda()
    model(IDS.cuda()).sum().backward()
    assert len(model[0].table) == len(IDS)
    bags = RecStoreEmbeddingBag(9, 4, mode=mode).cuda()  # type: ignore[arg-type]
    weights = torch.rand(10, device="cuda", requires_grad=True) if mode == "sum" else None
    out = bags(IDS.cuda(), torch.tensor([0, 4], device="cuda"), weights)
    assert out.device.type == "cuda"
    out.sum().backward()
    assert weights is None or weights.grad is not None
