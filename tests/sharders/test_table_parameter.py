"""Torch functions of a table's parameter: they need no rows, or they are refused.

None does nothing in silence.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import (
    get_overridable_functions,
    get_testing_overrides,
    resolve_name,
)

from tests.checkpoint import models
from torchrec_recstore import RecStoreEmbeddingBag, table_parameter
from torchrec_recstore.modules import SparseSGD
from torchrec_recstore.table_parameter import TableParameter

DIM = 3
IDS = torch.tensor([1, 2, 2**60])
BAGS = torch.tensor([0, 1])


def new_parameter() -> TableParameter:
    return TableParameter(torch.empty(0, DIM), table="user")


WRITES: dict[str, Callable[[TableParameter], Any]] = {
    "foreach_mul": lambda p: torch._foreach_mul_([p], 0.5),
    "foreach_copy": lambda p: torch._foreach_copy_([p], [torch.zeros(0, DIM)]),
    "foreach_lerp": lambda p: torch._foreach_lerp_(
        [p.detach()], [torch.zeros(0, DIM)], 0.1
    ),
    "ema": lambda p: get_ema_multi_avg_fn(0.9)([p.detach()], [torch.zeros(0, DIM)], 1),
    "out": lambda p: torch.add(torch.ones(0, DIM), 1, out=p.data),
    "keyword": lambda p: torch.sigmoid_(input=p),
    "operator": lambda p: torch.ops.aten.mul_(p, 2),
    "overload": lambda p: torch.ops.aten.mul_.Scalar(p, 2),
    "method of the class": lambda p: Tensor.uniform_(p),
    "a view": lambda p: p.view(-1).fill_(1),
    "a clone": lambda p: p.detach().clone().mul_(0.9),
    "another device": lambda p: p.to("meta").zero_(),
    "another dtype": lambda p: p.double().zero_(),
    "another table": lambda p: p.data.copy_(new_parameter().data),
    "a column": lambda p: p.data.__setitem__((slice(None), 0), 1.0),
    "initialization": lambda p: nn.init.constant_(tensor=p, val=1.0),
}

READS: dict[str, Callable[[TableParameter], Any]] = {
    "torch.norm": torch.norm,
    "torch.sum": torch.sum,
    "linalg.norm": torch.linalg.norm,
    "product": lambda p: p * p,
    "right operand": lambda p: 2 * p,
    "matrix product": lambda p: p @ torch.ones(DIM),
    "right matrix": lambda p: torch.ones(1, DIM) @ p.T,
    "mse_loss": lambda p: F.mse_loss(p, torch.zeros(0, DIM)),
    "second argument": lambda p: F.mse_loss(torch.zeros(0, DIM), p),
    "linear": lambda p: F.linear(torch.ones(2, DIM), p),
    "embedding": lambda p: F.embedding(torch.tensor([0]), p),
    "penalty of a view": lambda p: p.view(-1).pow(2).sum(),
    "einsum": lambda p: torch.einsum("ij,ij->", p, p),
    "get_total_norm": lambda p: nn.utils.get_total_norm([p]),
    "foreach_norm": lambda p: torch._foreach_norm([p]),
    "cat": lambda p: torch.cat([torch.ones(1, DIM), p]),
    "stack": lambda p: torch.stack([p, p]),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "numpy": np.asarray,
    "iteration": list,
    "comparison": lambda p: torch.equal(p, torch.zeros(0, DIM)),
    "copied into another": lambda p: torch.zeros(0, DIM).copy_(p),
    "added to another": lambda p: torch.zeros(0, DIM).add_(p, alpha=0.1),
    "keyword": lambda p: torch.mean(input=p),
    "copy for an average": lambda p: p.detach().clone().cpu().sum(),
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(
        torch.sum, p, use_reentrant=False
    ),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_refused(write: str) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"table 'user': \w+ would change no row.*load_dense_weights.*numel\(\)",
    ):
        WRITES[write](new_parameter())


@pytest.mark.parametrize("read", READS)
def test_reads_are_refused(read: str) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"table 'user': \w+ would read no row.*export_dense_weights.*numel\(\)",
    ):
        READS[read](new_parameter())


def test_a_compiled_read_is_refused() -> None:
    torch._dynamo.reset()
    parameter = new_parameter()

    def penalized(loss: Tensor) -> Tensor:
        width = parameter.shape[1] if parameter.requires_grad else 0
        return loss + width + parameter.square().sum()

    with pytest.raises(RuntimeError, match="table 'user': square would read no row"):
        torch.compile(penalized, backend="aot_eager")(torch.ones(1))


ARGUMENTS: list[Callable[[Tensor], Any]] = [
    lambda p: p,
    lambda p: [p],
    lambda p: 0,
    lambda p: 1.0,
    lambda p: True,
    lambda p: (0, DIM),
    lambda p: torch.zeros(0, DIM),
    lambda p: torch.zeros(0, DIM, dtype=torch.int64),
]
"""They make arguments of a torch function. The first two contain the parameter."""

OUT_OF_REACH = {
    # They return before they call anything of the subclass, and warn that the tensor
    # has no element.
    "torch.nn.init.kaiming_normal",
    "torch.nn.init.kaiming_normal_",
    "torch.nn.init.orthogonal",
    "torch.nn.init.orthogonal_",
    # It makes another tensor an alias of the parameter, and asks the other one only.
    "torch.Tensor.set_",
}
"""The functions that do not let a subclass refuse them."""


def torch_functions() -> dict[Any, str]:
    """Returns the functions of torch, and the methods and properties of tensors, with
    their names.
    """
    functions = dict.fromkeys(get_testing_overrides())
    for overridable in get_overridable_functions().values():
        functions |= dict.fromkeys(overridable)
    names = {function: str(resolve_name(function)) for function in functions}
    for name, function in inspect.getmembers(torch, callable):
        if name.startswith("_foreach"):
            names[function] = f"torch.{name}"
    for module in (nn.init, nn.utils):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("_"):
                continue
            names[function] = f"{module.__name__}.{name}"
    return names


def calls_of(parameter: TableParameter, most: int) -> Iterator[list[Any]]:
    """Yields lists of up to ``most`` arguments, each with the parameter."""
    with_parameter = set(ARGUMENTS[:2])
    for count in range(1, most + 1):
        for makers in itertools.product(ARGUMENTS, repeat=count):
            if with_parameter.intersection(makers):
                yield [make(parameter) for make in makers]


def outcome(function: Any, most: int) -> object:
    """Calls a function with up to ``most`` arguments until it is refused or returns
    something.

    Returns:
        The refusal, the returned object, or NotImplemented if all arguments were wrong.
    """
    parameter = new_parameter()
    for arguments in calls_of(parameter, most):
        try:
            result = function(*arguments)
        except Exception as error:
            if "table 'user':" in str(error):
                return error
        else:
            if result is not NotImplemented:
                return result
    return NotImplemented


@pytest.mark.parametrize("most", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_no_function_of_torch_is_silent(most: int) -> None:
    refused = set()
    for function, name in torch_functions().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = outcome(function, most)
        if isinstance(result, RuntimeError):
            refused.add(name)
        elif result is not NotImplemented and name not in OUT_OF_REACH:
            assert (
                function in table_parameter._WITHOUT_ROWS | table_parameter._ALIASES
            ), name
            if function in table_parameter._ALIASES and isinstance(result, Tensor):
                assert isinstance(result, table_parameter._Unwritable), name
    assert refused >= {
        "torch._foreach_mul_",
        "torch.functional.norm",
        "torch.Tensor.__getitem__",
    }
    assert not refused & OUT_OF_REACH


def test_metadata_and_aliases() -> None:
    parameter = new_parameter()
    assert (parameter.shape, parameter.dtype, parameter.numel(), len(parameter)) == (
        (0, DIM),
        torch.float32,
        0,
        0,
    )
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter in {parameter: 1}
    assert parameter.to("cpu") is parameter
    assert (
        parameter.view_as(parameter).grad_fn.next_functions[0][0].variable is parameter
    )  # type: ignore[union-attr]
    for alias in (
        parameter.expand_as(parameter),
        parameter.clone(),
        parameter.view(-1),
    ):
        assert type(alias) is table_parameter._Unwritable
        assert alias.grad_fn.next_functions[0][0].variable is parameter
        assert alias.detach().grad_fn is None
    assert type(torch.zeros_like(parameter)) is Tensor
    assert repr(parameter).startswith("Parameter containing:")
    parameter.grad = torch.zeros(0, DIM)
    assert type(parameter.grad) is Tensor


BORROWING: dict[str, Callable[[Tensor, TableParameter], Tensor]] = {
    "to": lambda x, p: x.to(p),
    "a copy": lambda x, p: x.to(p, copy=True),
    "type_as": lambda x, p: x.type_as(p),
    "expand_as": lambda x, p: x.expand_as(p),
    "view_as": lambda x, p: x[:0].view_as(p),
}
"""They read only the dtype, the device or the shape of the parameter, and return the
rows of another tensor.
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("borrow", BORROWING)
def test_a_tensor_that_borrows_metadata_stays_readable_and_writable(
    borrow: str, dtype: torch.dtype
) -> None:
    parameter = new_parameter()
    tensor = torch.ones(1, DIM, dtype=dtype)
    for lender in (parameter, parameter.data):
        result = BORROWING[borrow](tensor, lender)
        assert type(tensor) is Tensor
        assert type(result) is Tensor
        assert result.sum() == result.numel()
        assert result.mul(2).sum() == 2 * result.numel()
    assert tensor.add_(1).sum() == 2 * DIM
    with pytest.raises(RuntimeError, match="table 'user': sum would read no row"):
        parameter.to(tensor).sum()
    with pytest.raises(RuntimeError, match="table 'user': sum would read no row"):
        torch.clone(input=parameter).sum()


@pytest.mark.parametrize(
    "options", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
)
def test_optimizers_skip_the_parameters_of_tables(
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, bool],
    one_rank: None,
) -> None:
    model = models.recstore()
    bags = RecStoreEmbeddingBag(100, DIM)
    layer = nn.Linear(DIM, 1)
    parameters = [*model.parameters(), *bags.parameters(), *layer.parameters()]
    optimizer = optimizer_class(parameters, lr=0.1, weight_decay=0.1, **options)  # type: ignore[call-arg]
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        models.train(model, steps=1)
        scaler.scale(layer(bags(IDS, BAGS)).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        nn.utils.clip_grad_value_(parameters, 1.0)
        before = layer.weight.clone()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(layer.weight, before)
    assert sum(parameter.numel() for parameter in parameters) == 24 + 1 + DIM + 1
    gradients = torch.autograd.grad(
        layer(bags(IDS, BAGS)).sum(), parameters, allow_unused=True
    )
    assert [gradient is not None for gradient in gradients[-2:]] == [True, True]


def test_an_optimizer_does_not_take_collected_gradients() -> None:
    bags = RecStoreEmbeddingBag(100, DIM, fused=False)
    optimizer = torch.optim.AdamW(bags.parameters(), foreach=True)
    bags(IDS, BAGS).sum().backward()
    with pytest.raises(
        RuntimeError,
        match=rf"table '{bags.table.name}': _foreach_mul_ would change no row",
    ):
        optimizer.step()
    sparse = SparseSGD([bags], lr=0.1)
    before = bags(IDS, BAGS).detach()
    sparse.step()
    assert not torch.equal(bags(IDS, BAGS), before)


@pytest.mark.parametrize(
    "average", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"]
)
def test_averaged_models_with_tables_are_refused(average: Any) -> None:
    model = nn.Sequential(
        RecStoreEmbeddingBag(100, DIM, name="user"), nn.Linear(DIM, 1)
    )
    averaged = AveragedModel(model, multi_avg_fn=average)
    with pytest.raises(
        RuntimeError,
        match=r"table 'user': copy_ would change no row.*average of weights",
    ):
        averaged.update_parameters(model)
    dense = AveragedModel(model[1], multi_avg_fn=average)
    for _ in range(2):
        dense.update_parameters(model[1])


def test_a_step_does_not_call_the_parameter(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    original = table_parameter._Unwritable.__torch_function__

    def counted(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls[func.__name__] += 1
        return original(func, types, args, kwargs)

    model = models.recstore()
    bags = RecStoreEmbeddingBag(100, DIM)
    monkeypatch.setattr(
        table_parameter._Unwritable, "__torch_function__", staticmethod(counted)
    )
    models.train(model, steps=1)
    bags(IDS, BAGS).sum().backward()
    assert not calls
    bags.weight.numel()
    assert calls == {"numel": 1}


def test_an_alias_without_gradient_is_detached_in_place() -> None:
    weight = RecStoreEmbeddingBag(10, 4).weight
    for alias in (weight.data, weight.detach()):
        assert alias.detach_() is alias
        assert not alias._is_view()
