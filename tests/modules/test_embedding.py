"""``RecStoreEmbedding`` against ``torch.nn.Embedding``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchrec_recstore.modules import RecStoreEmbedding, SparseSGD
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import TableOptions

ROWS, DIM = 7, 3


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    padding=st.none() | st.integers(-ROWS, ROWS - 1),
    by_frequency=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_as_torch(
    shape: list[int], padding: int | None, by_frequency: bool, dtype: torch.dtype
) -> None:
    weight = torch.randn(ROWS, DIM)
    arguments: dict[str, Any] = {
        "padding_idx": padding,
        "scale_grad_by_freq": by_frequency,
    }
    stock = nn.Embedding(ROWS, DIM, _weight=weight.clone(), **arguments)
    ours = RecStoreEmbedding(
        ROWS, DIM, _weight=weight, optimizer=SGD(lr=1.0), **arguments
    )
    ids = torch.randint(0, ROWS, shape, dtype=dtype)
    outs = stock(ids), ours(ids)
    assert torch.equal(*outs)
    grad = torch.randn_like(outs[0])
    for out in outs:
        out.backward(grad)
    assert stock.weight.grad is not None
    updated = ours.table.lookup(torch.arange(ROWS))
    torch.testing.assert_close(
        updated, weight - stock.weight.grad, rtol=1e-5, atol=1e-6
    )
    assert torch.equal(ours.eval()(ids), updated[ids.long()])


def test_new_ids_get_rows() -> None:
    emb = RecStoreEmbedding(4, DIM)
    ids = torch.tensor([[7, -1], [2**62, 7]])
    out = emb(ids)
    assert torch.equal(emb.table.ids(), torch.tensor([-1, 7, 2**62]))
    assert torch.equal(out[0, 0], out[1, 1])
    out.sum().backward()
    assert not torch.equal(emb.eval()(ids), out)
    assert torch.equal(emb(torch.tensor(3)), torch.zeros(DIM))
    assert len(emb.table) == 3


@pytest.mark.parametrize("missing", ["zeros", "init"])
def test_padding_is_zeros_and_never_gets_a_row(missing: Any) -> None:
    emb = RecStoreEmbedding(
        4, DIM, padding_idx=2**40, options=TableOptions(missing=missing)
    )
    ids = torch.tensor([2**40, 1, 2**40])
    out = emb(ids)
    assert torch.equal(out[[0, 2]], torch.zeros(2, DIM))
    out.sum().backward()
    assert torch.equal(emb.table.ids(), torch.tensor([1]))
    emb(ids[:1]).sum().backward()


@pytest.mark.parametrize(
    "arguments",
    [{}, {"fused": False}, {"padding_idx": 1}, {"scale_grad_by_freq": True}],
)
def test_the_output_may_be_changed_in_place(arguments: dict[str, Any]) -> None:
    """Outputs can be changed in place, as in torch.

    Models often add positions in this way.
    """
    weight, ids, positions = (
        torch.randn(ROWS, DIM),
        torch.tensor([1, 3, 1]),
        torch.randn(3, DIM),
    )
    emb = RecStoreEmbedding(
        ROWS, DIM, _weight=weight, optimizer=SGD(lr=1.0), **arguments
    )
    stock = nn.Embedding(
        ROWS,
        DIM,
        _weight=weight.clone(),
        **{k: v for k, v in arguments.items() if k != "fused"},
    )
    for module in (emb, stock):
        out = module(ids)
        out += positions
        (out.relu_() ** 2).sum().backward()
    if not emb.fused:
        SparseSGD(lr=1.0).step([emb])
    assert stock.weight.grad is not None
    torch.testing.assert_close(
        emb.table.lookup(torch.arange(ROWS)), weight - stock.weight.grad
    )


def test_from_pretrained() -> None:
    weight = torch.randn(4, DIM)
    emb = RecStoreEmbedding.from_pretrained(weight, padding_idx=2)
    assert not emb.weight.requires_grad
    assert torch.equal(emb(torch.arange(4)), weight)
    with pytest.raises(ValueError, match="embeddings must have the shape"):
        RecStoreEmbedding.from_pretrained(weight[0])


def test_positional_arguments_are_those_of_torch() -> None:
    arguments = (
        9,
        DIM,
        2,
        None,
        2.0,
        True,
        True,
        torch.randn(9, DIM),
        True,
        "cpu",
        torch.float32,
    )
    stock, ours = nn.Embedding(*arguments), RecStoreEmbedding(*arguments)
    for name in stock.__constants__:
        assert getattr(ours, name) == getattr(stock, name)
    assert stock.weight.requires_grad is ours.weight.requires_grad is False


def test_bad_input() -> None:
    emb = RecStoreEmbedding(4, DIM)
    for ids, got in (
        (torch.ones(2), "torch.float32"),
        (torch.ones(2, dtype=torch.int16), "torch.int16"),
    ):
        with pytest.raises(
            TypeError, match=f"input must be an int32 or int64 tensor, got {got}"
        ):
            emb(ids)
    with pytest.raises(ValueError, match="max_norm"):
        RecStoreEmbedding(4, DIM, max_norm=2.0)


@pytest.mark.slow
def test_needs_torch_alone() -> None:
    code = (
        "import sys; sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\nimport"
        " torch\nfrom torchrec_recstore import RecStoreEmbedding, RecStoreEmbeddingBag,"
        " SparseAdamW\nemb = RecStoreEmbedding(4, 2,"
        " fused=False)\nemb(torch.tensor([-5])).sum().backward()\nSparseAdamW().step([emb])\nRecStoreEmbeddingBag(4,"
        " 2)(torch.tensor([[1, 2]])).sum().backward()\ntry:\n    from"
        " torchrec_recstore.modules import RecStoreEmbeddingCollection\nexcept"
        " ImportError as error:\n    print('torchrec' in str(error))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "True\n"
