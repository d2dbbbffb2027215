"""``RecStoreEmbeddingBag`` against ``torch.nn.EmbeddingBag``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchrec_recstore.modules import RecStoreEmbeddingBag, SparseSGD
from torchrec_recstore.optim import SGD, RowWiseAdagrad
from torchrec_recstore.options import ConstantInit, TableOptions

ROWS, DIM = 7, 3
SOME = torch.tensor([5, -1, 2**62, 5])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Generates arguments, with empty bags, duplicate ids in a bag, and rows of few
    values, so that there are ties.
    """
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    lines = draw(st.booleans())
    if lines:
        width = draw(st.integers(1, 4))
        lengths = [width] * draw(st.integers(1, 4))
    else:
        lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    ids = torch.tensor(
        draw(
            st.lists(
                st.integers(0, ROWS - 1), min_size=sum(lengths), max_size=sum(lengths)
            )
        )
    )
    padding = draw(st.none() | st.integers(-ROWS, ROWS - 1))
    last = draw(st.booleans())
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return {
        "mode": mode,
        "padding_idx": padding,
        "include_last_offset": last,
        "input": ids.to(dtype).reshape(len(lengths), -1) if lines else ids.to(dtype),
        "offsets": None if lines else (ends if last else ends[:-1]).to(dtype),
        "weighted": mode == "sum" and draw(st.booleans()),
        "ties": draw(st.booleans()),
    }


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_as_torch(case: dict[str, Any]) -> None:
    arguments = {
        key: case[key] for key in ("mode", "padding_idx", "include_last_offset")
    }
    weight = (
        torch.randint(-1, 2, (ROWS, DIM)).float()
        if case["ties"]
        else torch.randn(ROWS, DIM)
    )
    stock = nn.EmbeddingBag(ROWS, DIM, _weight=weight.clone(), **arguments)
    ours = RecStoreEmbeddingBag(
        ROWS, DIM, _weight=weight, optimizer=SGD(lr=1.0), **arguments
    )
    weights = (
        [torch.randn(case["input"].shape).requires_grad_() for _ in range(2)]
        if case["weighted"]
        else [None] * 2
    )
    if case["weighted"]:
        weights[1].data.copy_(weights[0].data)
    outs = [
        module(case["input"], case["offsets"], of_ids)
        for module, of_ids in zip((stock, ours), weights, strict=True)
    ]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(outs[0])
    for out in outs:
        out.backward(grad)
    assert stock.weight.grad is not None
    updated = ours.table.lookup(torch.arange(ROWS))
    torch.testing.assert_close(
        updated, weight - stock.weight.grad, rtol=1e-5, atol=1e-6
    )
    if case["weighted"]:
        torch.testing.assert_close(
            weights[1].grad, weights[0].grad, rtol=1e-5, atol=1e-6
        )
    with torch.no_grad():
        stock.weight.copy_(updated)
    torch.testing.assert_close(
        ours.eval()(case["input"], case["offsets"], weights[1]),
        stock(case["input"], case["offsets"], weights[1]),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 5])
def test_gradients_by_frequency(mode: Any, padding: int | None) -> None:
    """The gradients are those of ``nn.Embedding`` and torch's docs. torch 2.13's bags
    divide by other counts on CPU.
    """
    weight = torch.randn(ROWS, DIM)
    ids, offsets = torch.tensor([3, 1, 3, 5, 3, 1]), torch.tensor([0, 3])
    stock = nn.Embedding(ROWS, DIM, _weight=weight.clone(), scale_grad_by_freq=True)
    ours = RecStoreEmbeddingBag(
        ROWS,
        DIM,
        None,
        2.0,
        True,
        mode,
        _weight=weight,
        padding_idx=padding,
        optimizer=SGD(lr=1.0),
    )
    bags = [
        bag[bag != (-1 if padding is None else padding)] for bag in (ids[:3], ids[3:])
    ]
    expected = torch.stack(
        [
            getattr(stock(torch.cat(bags)).split([len(b) for b in bags])[i], mode)(0)
            for i in (0, 1)
        ]
    )
    out = ours(ids, offsets)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    grad = torch.randn(2, DIM)
    out.backward(grad)
    expected.backward(grad)
    assert stock.weight.grad is not None
    torch.testing.assert_close(
        ours.table.lookup(torch.arange(ROWS)),
        weight - stock.weight.grad,
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_new_ids_get_rows(mode: Any) -> None:
    bags = RecStoreEmbeddingBag(4, DIM, mode=mode)
    out = bags(SOME, torch.tensor([0, 3]))
    assert torch.equal(bags.table.ids(), torch.tensor([-1, 5, 2**62]))
    rows = bags.table.lookup(SOME)
    expected = {
        "sum": rows[:3].sum(0),
        "mean": rows[:3].mean(0),
        "max": rows[:3].amax(0),
    }[mode]
    torch.testing.assert_close(out, torch.stack([expected, rows[3]]))
    before = bags.table.lookup(SOME)
    out.sum().backward()
    assert not torch.equal(bags.table.lookup(SOME), before)
    bags.eval()
    assert torch.equal(bags(torch.tensor([[99]])), torch.zeros(1, DIM))
    assert len(bags.table) == 3


def test_two_modules_differ_and_a_seed_repeats_them() -> None:
    def rows() -> Tensor:
        return RecStoreEmbeddingBag(4, DIM, mode="sum")(
            torch.arange(500)[:, None]
        ).detach()

    torch.manual_seed(3)
    first, second = rows(), rows()
    torch.manual_seed(3)
    assert torch.equal(rows(), first)
    assert not torch.equal(first, second)
    # The same distribution as in torch: normal, mean 0, standard deviation 1.
    assert abs(float(first.std()) - 1) < 0.1
    assert abs(float(first.mean())) < 0.1


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_nothing_to_pool(mode: Any, last: bool) -> None:
    bags = RecStoreEmbeddingBag(4, DIM, mode=mode, include_last_offset=last)
    none = torch.empty(0, dtype=torch.int64)
    for offsets in (
        none if not last else torch.tensor([0]),
        torch.zeros(2 + last, dtype=torch.int64),
    ):
        out = bags(none, offsets)
        assert torch.equal(out, torch.zeros(len(offsets) - last, DIM))
        out.sum().backward()
    assert torch.equal(bags(torch.empty(2, 0, dtype=torch.int32)), torch.zeros(2, DIM))
    assert len(bags.table) == 0


def test_ids_behind_the_last_offset_are_in_no_bag() -> None:
    bags = RecStoreEmbeddingBag(4, DIM, mode="sum", include_last_offset=True)
    bags(SOME, torch.tensor([0, 1, 2]), torch.ones(4))
    assert torch.equal(bags.table.ids(), torch.tensor([-1, 5]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_the_output_may_be_changed_in_place(mode: Any, fused: bool) -> None:
    """Outputs can be changed in place in training and in evaluation, as in torch."""
    bags = RecStoreEmbeddingBag(
        4, DIM, mode=mode, fused=fused, name="t", optimizer=SGD(lr=1.0)
    )
    plain = RecStoreEmbeddingBag(4, DIM, mode=mode, name="t", optimizer=SGD(lr=1.0))
    changed = bags(SOME, torch.tensor([0, 3]))
    changed *= 2.0
    changed.relu_().sum().backward()
    (plain(SOME, torch.tensor([0, 3])) * 2.0).relu().sum().backward()
    if not fused:
        SparseSGD(lr=1.0).step([bags])
    assert torch.equal(bags.table.lookup(SOME), plain.table.lookup(SOME))
    if mode == "sum":
        weights = [torch.ones(4, requires_grad=True) for _ in range(2)]
        out = bags.eval()(SOME, torch.tensor([0, 3]), weights[0])
        out *= 2.0
        out.sum().backward()
        (plain.eval()(SOME, torch.tensor([0, 3]), weights[1]) * 2.0).sum().backward()
        assert torch.equal(weights[0].grad, weights[1].grad)  # type: ignore[arg-type]


def test_a_nested_input_is_bags() -> None:
    bags = RecStoreEmbeddingBag(4, DIM, mode="sum")
    nested = torch.nested.nested_tensor([SOME[:3], SOME[3:]], layout=torch.jagged)
    out = bags(nested)
    assert torch.equal(out, bags(SOME, torch.tensor([0, 3])))


def test_weights_have_gradients_without_training() -> None:
    """Per-sample weights get gradients in evaluation and with frozen rows, as in torch."""
    bags = RecStoreEmbeddingBag(4, DIM, mode="sum", optimizer=SGD(lr=0.1))
    bags(SOME, torch.tensor([0, 3]))
    rows = bags.table.lookup(SOME)
    for frozen in (False, True):
        bags.train(frozen).requires_grad_(not frozen)
        weights = torch.rand(4, requires_grad=True)
        out = bags(SOME, torch.tensor([0, 3]), weights)
        grad = torch.randn(2, DIM)
        out.backward(grad)
        torch.testing.assert_close(weights.grad, (rows * grad[[0, 0, 0, 1]]).sum(1))
    assert torch.equal(bags.table.lookup(SOME), rows)
    assert not bags(SOME, torch.tensor([0, 3])).requires_grad


def test_frozen_rows_stay_and_none_are_made() -> None:
    weight = torch.randn(4, DIM)
    for module in (
        RecStoreEmbeddingBag.from_pretrained(weight),
        RecStoreEmbeddingBag(4, DIM, _weight=weight),
    ):
        module.requires_grad_(False)
        assert not module(torch.tensor([[1, 9]])).requires_grad
        assert torch.equal(module.table.ids(), torch.arange(4))
    assert RecStoreEmbeddingBag.from_pretrained(
        weight, freeze=False, mode="sum"
    ).weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_rows(dtype: torch.dtype) -> None:
    weight = torch.randn(4, DIM).to(dtype)
    stock = nn.EmbeddingBag(4, DIM, mode="sum", _weight=weight)
    ours = RecStoreEmbeddingBag(4, DIM, mode="sum", _weight=weight)
    out = ours(torch.tensor([[1, 2]]))
    assert out.dtype is dtype
    torch.testing.assert_close(out, stock(torch.tensor([[1, 2]])), rtol=1e-2, atol=1e-2)
    out.sum().backward()
    assert RecStoreEmbeddingBag(4, DIM, dtype=dtype).table.dtype is dtype


def test_8_bit_rows() -> None:
    weight = torch.randn(4, DIM)
    ours = RecStoreEmbeddingBag(4, DIM, mode="sum", _weight=weight, dtype=torch.int8)
    out = ours(torch.tensor([[1, 2]]))
    assert ours.table.dtype is torch.int8
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, weight[1:3].sum(0, keepdim=True), rtol=0, atol=0.05)
    out.sum().backward()


def test_the_learning_rate_can_be_changed() -> None:
    bags = RecStoreEmbeddingBag(
        4, 1, mode="sum", optimizer=SGD(lr=0.5), options=TableOptions(ConstantInit(0.0))
    )
    for lr in (0.5, 0.125):
        bags.learning_rate = lr
        bags(SOME[:1], torch.tensor([0])).sum().backward()
    assert float(bags.table.lookup(SOME[:1])) == -0.625
    with pytest.raises(ValueError, match=r"SGD\.lr"):
        bags.learning_rate = -1.0
    assert bags.learning_rate == 0.125


def test_positional_arguments_are_those_of_torch() -> None:
    arguments = (
        9,
        DIM,
        None,
        2.0,
        False,
        "sum",
        True,
        torch.randn(9, DIM),
        True,
        2,
        "cpu",
        torch.float32,
    )
    stock, ours = nn.EmbeddingBag(*arguments), RecStoreEmbeddingBag(*arguments)
    for name in stock.__constants__:
        assert getattr(ours, name) == getattr(stock, name)
    assert repr(ours).replace("RecStore", "") == repr(stock)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, r"max_norm=1\.0 is not supported", {"max_norm": 1.0}),
        (ValueError, "mode must be", {"mode": "min"}),
        (
            ValueError,
            "scale_grad_by_freq must be False",
            {"mode": "max", "scale_grad_by_freq": True},
        ),
        (ValueError, "sparse must be False", {"mode": "max", "sparse": True}),
        (ValueError, "_weight must have the shape", {"_weight": torch.randn(3, DIM)}),
        (ValueError, "padding_idx must be at least -4, got -5", {"padding_idx": -5}),
        (TypeError, "padding_idx must be an int", {"padding_idx": 1.0}),
        (ValueError, "dtype must be one of", {"dtype": torch.float64}),
        (ValueError, "device must be cpu or meta, got cuda", {"device": "cuda"}),
        (TypeError, "embedding_dim must be an int", {"embedding_dim": 1.5}),
        (ValueError, r"RowWiseAdagrad\.lr", {"lr": -1.0}),
        (
            ValueError,
            r"lr=0\.5 disagrees",
            {"lr": 0.5, "optimizer": RowWiseAdagrad(lr=0.1)},
        ),
        (TypeError, "optimizer must be one of", {"optimizer": torch.optim.SGD}),
        (TypeError, "options must be TableOptions", {"options": {}}),
        (TypeError, "fused must be a bool", {"fused": 1}),
    ],
)
def test_bad_arguments(
    error: type[Exception], match: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        RecStoreEmbeddingBag(**{"num_embeddings": 4, "embedding_dim": DIM, **arguments})


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (
            TypeError,
            "input must be an int32 or int64 tensor, got torch.float32",
            [torch.ones(2, 2)],
        ),
        (TypeError, "input must be an int32 or int64 tensor, got list", [[1, 2]]),
        (ValueError, "offsets must be given", [SOME]),
        (ValueError, "offsets must be None", [SOME[None], torch.tensor([0])]),
        (
            ValueError,
            r"input must have the shape \(B, L\) or \(N,\)",
            [SOME[None, None]],
        ),
        (
            ValueError,
            r"offsets must have the shape \(B,\)",
            [SOME, torch.zeros(1, 1, dtype=torch.int64)],
        ),
        (TypeError, "offsets must be an int32 or int64 tensor", [SOME, torch.zeros(1)]),
        (ValueError, "offsets must ascend from 0", [SOME, torch.tensor([1])]),
        (ValueError, "offsets must ascend from 0", [SOME, torch.tensor([0, 3, 2])]),
        (ValueError, "offsets must ascend from 0", [SOME, torch.tensor([0, 5])]),
        (
            ValueError,
            "per_sample_weights must have the shape",
            [SOME, torch.tensor([0]), torch.ones(3)],
        ),
        (
            TypeError,
            "per_sample_weights must be of a floating",
            [SOME, torch.tensor([0]), SOME],
        ),
    ],
)
def test_bad_input(error: type[Exception], match: str, arguments: list[Any]) -> None:
    bags = RecStoreEmbeddingBag(4, DIM, mode="sum")
    with pytest.raises(error, match=match):
        bags(*arguments)
    assert bags.table.stats().steps == 0
    with pytest.raises(NotImplementedError, match="mode='sum'"):
        RecStoreEmbeddingBag(4, DIM)(SOME, torch.tensor([0]), torch.ones(4))
