"""A publication of a traced model is equal to a new export after each change of a value
that the model reads.
"""

# Not with annotations from __future__: fx, and with it TorchRec's tracer, copies them
# into code as they are.

import collections
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from torchrec_recstore.inference import DeltaPublisher, Follower, export_for_inference
from torchrec_recstore_serving.export.scriptable_modules import scriptable
from torchrec_recstore_serving.export.structure import structure_of

from ..background_models import DENSE, Pooled, batch
from ..publish.test_program import assert_follows, publish, train

SLOW = pytest.mark.slow


@dataclass(slots=True)
class Slotted:
    """Settings in an object without a ``__dict__``."""

    scale: float


class NamedList(list[float]):
    """A list with an attribute."""

    scale = 2.0


class Reading(Pooled):
    """A model that scales with a value.

    TorchScript cannot compile it, because ``read`` is a lambda.
    """

    def __init__(
        self, value: Any, read: Callable[[Any], Any], kind: str = "attribute"
    ) -> None:
        super().__init__()
        self.read = read
        if kind == "buffer":
            self.register_buffer("value", value)
        elif kind == "parameter":
            self.value = nn.Parameter(value)
        else:
            self.value = value

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.joined(dense, features) * self.read(self.value))
        return out


class Normalised(Pooled):
    """A model that normalises with buffers, and catches an error, which TorchScript
    refuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DENSE))
        self.register_buffer("std", torch.ones(DENSE))

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        try:
            normalised = (dense - self.mean) / (self.std + 1e-6)
        except ValueError:
            normalised = dense
        out: Tensor = self.over(self.joined(dense, features))
        return out + normalised.sum(1, keepdim=True)


class Aliased(Normalised):
    """A model that reads its buffers from a list, so that the tracer does not see their
    attributes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.both = [self.mean, self.std]

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        try:
            normalised = (dense - self.both[0]) * torch.stack(
                [1 / self.both[1], -self.both[1]]
            )[0]
        except ValueError:
            normalised = dense
        out: Tensor = self.over(self.joined(dense, features))
        return out + normalised.sum(1, keepdim=True)


class ListOfTensors(Pooled):
    """A model with a list of tensors, which TorchScript compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.values = [torch.tensor(2.0)]

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.joined(dense, features) * self.values[0])
        return out


class WithStrides(Pooled):
    """A model with buffers whose elements are not one after the other in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "expanded", torch.full((1,), 0.5).expand(self.over.in_features)
        )
        self.register_buffer("strided", torch.arange(2.0 * self.over.in_features)[::2])

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(
            self.joined(dense, features) * self.expanded + self.strided
        )
        return out


def reading_closure() -> Reading:
    """A model that reads a list of the function that it calls."""
    held = [2.0]
    model = Reading(0, lambda _: held[0])
    model.held = held
    return model


def reading_default() -> Reading:
    """A model that reads the default of the function that it calls."""

    def scaled(_: object, scale: float = 2.0) -> float:
        return scale

    return Reading(0, scaled)


@torch.no_grad()
def fill(model: Any) -> None:
    """Changes the value of a tensor in place."""
    model.value.fill_(5.0)


@torch.no_grad()
def fill_statistics(model: Any) -> None:
    """Changes the statistics of :class:`Normalised` in place."""
    model.mean.fill_(1.0)
    model.std.fill_(5.0)


def replace(value: Any) -> Callable[[Any], None]:
    """Returns a function that replaces the value of a model."""
    return lambda model: setattr(model, "value", value)


def doubled(values: Tensor) -> Tensor:
    """Returns the double of a tensor."""
    return values * 2


SCRIPTED_DOUBLE = torch.jit.script(doubled)

# How a lambda computes with a tensor. TorchScript computes these when it serves.
COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda value: value * 2,
    "reflected": lambda value: 2 / (value - 10) + (3 - value),
    "function": lambda value: torch.relu(torch.stack([value, value + 1])).sum(),
    "item of a row": lambda value: value.reshape(1)[0],
    "parts": lambda value: torch.stack([value, value * 3]).unbind()[1],
    "branch by type": lambda value: value * 2 if isinstance(value, Tensor) else 0.0,
}
# How a lambda reads the number in a tensor. The tracer writes the number into the
# program.
READ: dict[str, Callable[[Tensor], Any]] = {
    "float": float,
    "item": lambda value: (value + 1).item(),
    "list": lambda value: value.reshape(1).tolist()[0],
    "numpy": lambda value: float(value.numpy()),
    "branch": lambda value: 2.0 if value > 3 else 0.5,
    "in place": lambda value: (value * 1).add_(1),
    "script": lambda value: SCRIPTED_DOUBLE(value),
}
# A value that the model reads, how it reads it, and how the value changes.
OBJECTS: dict[
    str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
] = {
    "int": (lambda: 2, float, replace(5)),
    "np.int64": (lambda: np.int64(2), float, replace(np.int64(5))),
    "np.float32": (lambda: np.float32(2), float, replace(np.float32(5))),
    "ndarray": (
        lambda: np.array([2.0]),
        lambda v: float(v[0]),
        lambda m: m.value.__setitem__(0, 5.0),
    ),
    "ndarray of objects": (
        lambda: np.array([2.0], dtype=object),
        lambda v: float(v[0]),
        lambda m: m.value.__setitem__(0, 5.0),
    ),
    "deque": (
        lambda: collections.deque([2.0]),
        lambda v: v[0],
        lambda m: m.value.__setitem__(0, 5.0),
    ),
    "slots": (
        lambda: Slotted(2.0),
        lambda v: v.scale,
        lambda m: setattr(m.value, "scale", 5.0),
    ),
    "attribute of a list": (
        lambda: NamedList([1.0]),
        lambda v: v.scale,
        lambda m: setattr(m.value, "scale", 5.0),
    ),
    "list": (
        lambda: [[2.0]],
        lambda v: v[0][0],
        lambda m: m.value[0].__setitem__(0, 5.0),
    ),
    "tensor in a list": (
        lambda: [torch.tensor(2.0)],
        lambda v: v[0] * 2,
        lambda m: m.value[0].fill_(5.0),
    ),
    "module in a list": (
        lambda: [nn.BatchNorm1d(1)],
        lambda v: v[0].running_mean * 2 + 1,
        lambda m: m.value[0].running_mean.fill_(5.0),
    ),
}


QUICK = (
    "float",
    "ndarray",
)
"""The cases that are not slow tests."""


def cases(by_name: Iterable[str]) -> list[Any]:
    """Returns the names of cases as parameters of a test."""
    return [pytest.param(name, marks=() if name in QUICK else SLOW) for name in by_name]


def cases_of_kind(kind: str, by_name: Iterable[str]) -> list[Any]:
    """Returns cases of tensors that a model holds in one way."""
    return [
        pytest.param(kind, *case.values, marks=case.marks) for case in cases(by_name)
    ]


@pytest.mark.parametrize(
    ("kind", "index"),
    [(Normalised, "hash"), pytest.param(Aliased, "sorted", marks=SLOW)],
)
def test_buffers_in_arithmetic(
    kind: type[nn.Module], index: str, tmp_path: Path
) -> None:
    """The program computes with the buffers. A change of their values is a delta."""
    model = kind()
    train(model)
    place = tmp_path / "published"
    with (
        DeltaPublisher(
            model, place, every_s=0, full_every_s=1e6, index=index
        ) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        assert follower.poll()
        fill_statistics(model)
        train(model, 1)
        publish(publisher)
        assert follower.poll()
        assert_follows(follower, model, tmp_path)
        assert (follower.state.fulls_loaded, follower.state.deltas_applied) == (1, 1)


@pytest.mark.parametrize(
    "kind",
    [
        "buffer",
        pytest.param("attribute", marks=SLOW),
        pytest.param("parameter", marks=SLOW),
    ],
)
def test_a_tensor_in_arithmetic(kind: str, tmp_path: Path) -> None:
    """The program computes with the tensor, in each way. A change of its value is a
    delta, which it would not be if one of them were a number in the program.
    """
    model = Reading(
        torch.tensor(2.0),
        lambda value: sum(compute(value) for compute in COMPUTED.values()),
        kind,
    )
    assert published_after_a_change(model, fill, tmp_path) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *cases_of_kind("buffer", READ),
        pytest.param("attribute", "float", marks=SLOW),
        pytest.param("attribute", "in place", marks=SLOW),
    ],
)
@pytest.mark.filterwarnings("ignore:.*without a delta")
def test_a_tensor_whose_value_is_read(kind: str, name: str, tmp_path: Path) -> None:
    """The number is part of the program, which is compiled again."""
    model = Reading(torch.tensor(2.0), READ[name], kind)
    published_after_a_change(model, fill, tmp_path)


@pytest.mark.parametrize("name", cases(OBJECTS))
@pytest.mark.filterwarnings("ignore:.*without a delta")
def test_an_object(name: str, tmp_path: Path) -> None:
    """The value of the object is part of the program, which is compiled again."""
    make, read, change = OBJECTS[name]
    published_after_a_change(Reading(make(), read), change, tmp_path)


@pytest.mark.filterwarnings("ignore:.*without a delta")
def test_variables_of_the_function_around_a_function(tmp_path: Path) -> None:
    """They are part of the program."""
    published_after_a_change(
        reading_closure(),
        lambda model: model.held.__setitem__(0, 5.0),
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without a delta")
def test_defaults_of_a_function(tmp_path: Path) -> None:
    """They are part of the program."""
    model = reading_default()
    published_after_a_change(
        model,
        lambda model: setattr(model.read, "__defaults__", (5.0,)),
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without a delta")
def test_a_list_of_tensors_that_torchscript_compiles(tmp_path: Path) -> None:
    """The list is an attribute of the compiled model, and no dense tensor."""
    published_after_a_change(
        ListOfTensors(), lambda model: model.values[0].fill_(5.0), tmp_path
    )


@pytest.mark.slow
def test_buffers_with_strides(tmp_path: Path) -> None:
    """The compiled model has contiguous copies of them, so that deltas can write them."""
    model = WithStrides()
    train(model)
    place = tmp_path / "published"
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        model.expanded = torch.full((1,), 2.0).expand(model.over.in_features)
        publish(publisher)
        assert follower.poll()
        assert_follows(follower, model, tmp_path)
        assert (follower.state.fulls_loaded, follower.state.deltas_applied) == (1, 1)


def published_after_a_change(
    model: nn.Module, change: Callable[[Any], Any], folder: Path
) -> tuple[int, int]:
    """Publishes a model before and after a change of a value, and checks the model that
    a follower then has.

    Returns:
        The number of full exports and of deltas that the follower has loaded.
    """
    folder.mkdir(exist_ok=True)
    train(model)
    place = folder / "published"
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        assert follower.poll()
        before = follower.model
        dense, features = batch(torch.Generator().manual_seed(9))
        answer = before(dense, features)
        change(model)
        publish(publisher)
        follower.poll()
        assert_follows(follower, model, folder)
        assert not torch.equal(follower.model(dense, features), answer), (
            "the change has no effect"
        )
        return follower.state.fulls_loaded, follower.state.deltas_applied


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: collections.deque([1]), id="deque"),
        pytest.param(lambda: np.arange(100), id="ndarray"),
        pytest.param(lambda: Slotted(1.0), id="slots"),
        pytest.param(lambda: collections.OrderedDict(a=1), id="ordered dict"),
        pytest.param(lambda: weakref.ref(Slotted), id="weak reference"),
        pytest.param(lambda: {1, "a", None}, id="set"),
        pytest.param(lambda: torch.strided, id="layout"),
        pytest.param(lambda: torch.contiguous_format, id="memory format"),
    ],
)
def test_an_object_that_does_not_change(value: Callable[[], Any]) -> None:
    """Its description does not change either, so that nothing is compiled again."""
    model = Reading(value(), lambda _: 1.0)
    train(model)
    structure = structure_of(scriptable(export_for_inference(model)))
    assert structure_of(scriptable(export_for_inference(model))) == structure


class Hidden:
    """An object whose contents nothing can describe."""

    def __deepcopy__(self, memo: object) -> "Hidden":
        """Returns the object."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to describe the object."""
        raise TypeError("cannot be pickled")


def test_an_object_that_cannot_be_described() -> None:
    """It is taken for changed, so that no publication is stale."""
    model = Reading(Hidden(), lambda _: 1.0)
    train(model)
    structure = structure_of(scriptable(export_for_inference(model)))
    assert structure_of(scriptable(export_for_inference(model))) != structure
