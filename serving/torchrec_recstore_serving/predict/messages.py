"""Arguments and results of served models in messages of predictor.proto and in JSON
documents.

Tests: tests/serving/predict/test_predictor.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore_service.wire.protocol import from_bytes, to_bytes
from torchrec_recstore_serving.predict import predictor_pb2 as pb
from torchrec_recstore_serving.predict.requests import JaggedArgument, Value

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
_MOST_DIMENSIONS = 16
_MOST_ARGUMENTS = 1024
_NO_BAGS = "each feature must have a list of bags, which are lists of ids"
_GREATEST = torch.finfo(torch.float32).max
_NO_IDS = torch.empty(0, dtype=torch.int64)
_SEND_INTEGERS = (
    "ids and lengths are integers: send 20000001, not 20000001.0, because floats do not"
    " hold every id"
)


def array_of(tensor: Tensor) -> Any:
    """Returns a tensor as an ``Array`` of predictor.proto."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return pb.Array(dtype=dtype, shape=list(tensor.shape), data=to_bytes(tensor))


def tensor_of(array: Any, name: str) -> Tensor:
    """Returns an ``Array`` of predictor.proto as a tensor.

    Raises:
        ValueError: The array is damaged. The message has its ``name``.
    """
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(
            f"{name} has the unknown dtype {array.dtype!r}: use one of"
            f" {', '.join(_DTYPES)}"
        )
    shape = list(array.shape)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(
        array.data
    ):
        raise ValueError(
            f"{name} of shape {shape} and dtype {array.dtype} does not have"
            f" {len(array.data)} bytes"
        )
    return from_bytes([array.data], dtype).view(shape)


def value_of(argument: Any, name: str) -> Value:
    """Returns an ``Argument`` of predictor.proto.

    Raises:
        ValueError: The argument is damaged. The message has its ``name``.
    """
    kind = argument.WhichOneof("value")
    if kind is None:
        raise ValueError(f"the argument {name!r} is empty")
    if kind == "array":
        return tensor_of(argument.array, name)
    jagged = argument.jagged
    weights = (
        tensor_of(jagged.weights, f"{name}.weights")
        if jagged.HasField("weights")
        else None
    )
    lengths = tensor_of(jagged.lengths, f"{name}.lengths")
    return bags(
        jagged.keys, tensor_of(jagged.values, f"{name}.values"), lengths, weights, name
    )


def bags(
    keys: Any, values: Tensor, lengths: Tensor, weights: Tensor | None, name: str
) -> JaggedArgument:
    """Returns the argument of this name for a ``KeyedJaggedTensor``.

    Raises:
        ValueError: The parts do not fit each other.
    """
    if not keys or lengths.dim() != 1 or len(lengths) % len(keys):
        raise ValueError(
            f"{name} must have keys, and one length for each key and example"
        )
    return JaggedArgument(tuple(keys), values, lengths.view(len(keys), -1), weights)


def arguments_of_json(
    arguments: Mapping[str, Any], jagged: Mapping[str, tuple[str, int]]
) -> dict[str, Value]:
    """Returns the arguments of a JSON document by name.

    Nested lists of numbers are a tensor: int64 if all are integers, else float32. An
    object has the bags of each feature, ``{"user": [[7, 8], [9]], "item": [[1], []]}``,
    or the keys ``keys``, ``values``, ``lengths`` and perhaps ``weights`` of a
    ``KeyedJaggedTensor``. The ids and the lengths of bags must be integers of JSON.

    Args:
        arguments: The arguments by name.
        jagged: See :func:`torchrec_recstore_serving.predict.requests.request_of`.

    Raises:
        ValueError: An argument has another form. The message names the argument and the
            place in it.
    """
    if len(arguments) > _MOST_ARGUMENTS:  # Each becomes a tensor, and a model has few.
        raise ValueError(
            f"a request may have at most {_MOST_ARGUMENTS} arguments, got"
            f" {len(arguments)}"
        )
    vectors = {*jagged, *(lengths for lengths, _ in jagged.values())}
    return {
        name: (
            _vector(value, name, "") if name in vectors else value_of_json(value, name)
        )
        for name, value in arguments.items()
    }


def value_of_json(value: Any, name: str) -> Value:
    """Returns an argument of a JSON document; see :func:`arguments_of_json`.

    Raises:
        ValueError: The value has another form. The message names the argument and the
            place in it.
    """
    if not isinstance(value, dict):
        return _tensor(value, name)
    if "values" in value and "lengths" in value:
        keys = value.get("keys")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise _refused(
                name, ".keys", keys, "it must be a list of the names of the features"
            )
        values, lengths = (
            _vector(value[part], name, f".{part}") for part in ("values", "lengths")
        )
        given = value.get("weights")
        weights = (
            None if given is None else _vector(given, name, ".weights", integers=False)
        )
        return bags(keys, values, lengths, weights, name)
    for feature, rows in value.items():
        if not isinstance(rows, list):
            raise _refused(name, f"[{feature!r}]", rows, _NO_BAGS)
        for number, bag in enumerate(rows):
            if not isinstance(bag, list):
                raise _refused(name, f"[{feature!r}][{number}]", bag, _NO_BAGS)
    if len({len(rows) for rows in value.values()}) != 1:
        raise ValueError(
            f"the argument {name!r}: each feature must have one bag for each example"
        )
    flat = [each for rows in value.values() for bag in rows for each in bag]
    lengths = torch.tensor(
        [len(bag) for rows in value.values() for bag in rows], dtype=torch.int64
    )
    try:
        ids = _vector(flat, name, "")
    except ValueError:
        for feature, rows in value.items():
            for number, bag in enumerate(rows):
                # raises the error with its place
                _vector(bag, name, f"[{feature!r}][{number}]")
        raise
    return bags(list(value), ids, lengths, None, name)


def not_finite(outputs: Mapping[str, Tensor]) -> str | None:
    """Returns a message about the first number of a result that JSON does not have: NaN
    or infinity.

    None: no such.
    """
    for name, tensor in outputs.items():
        bad = ~torch.isfinite(tensor.double())
        if bad.any():
            place = bad.nonzero()[0].tolist()
            found = float(tensor[tuple(place)])
            return (
                f"the model returns {found} in {name!r} at"
                f" {_indices(place) or 'its only place'}, which JSON has not"
            )
    return None


def place_of_float(value: Any) -> str:
    """Returns the place and the text of the first float in nested lists of JSON."""
    if isinstance(value, list):
        for place, each in enumerate(value):
            found = place_of_float(each)
            if found:
                return f"[{place}]{found}"
        return ""
    return f": {value!r}" if isinstance(value, float) else ""


def _tensor(value: Any, name: str) -> Tensor:
    """Converts nested lists of numbers.

    All lists of one depth must have the same length, which is not 0.
    """
    if not isinstance(value, list):
        raise _refused(
            name, "", value, "it must be a list, with an entry for each example"
        )
    shape: list[int] = []
    level: list[Any] = [value]
    # level has the entries of one depth, which become those of the next depth
    while True:
        kinds = set(map(type, level))
        if list not in kinds:
            break
        if len(shape) == _MOST_DIMENSIONS:
            raise ValueError(
                f"the argument {name!r} has lists within lists at"
                f" {_indices([0] * len(shape))}: a tensor has at most"
                f" {_MOST_DIMENSIONS} dimensions"
            )
        sizes = [len(each) if isinstance(each, list) else -1 for each in level]
        if len(set(sizes)) > 1 or sizes[0] == 0:
            wrong = next((i for i, size in enumerate(sizes) if size != sizes[0]), 0)
            if not isinstance(level[wrong], list) or not isinstance(level[0], list):
                raise _refused(
                    name,
                    _place(wrong, shape),
                    level[wrong],
                    "there are lists and numbers at one depth",
                )
            if sizes[0] == 0:
                raise _refused(
                    name,
                    _place(0, shape),
                    [],
                    "an empty list does not tell the shape and the dtype",
                )
            raise ValueError(
                f"the argument {name!r} has {sizes[wrong]} entries at"
                f" {_place(wrong, shape)}, and {sizes[0]} at {_place(0, shape)}: lists"
                " of one depth must have the same length"
            )
        shape.append(sizes[0])
        level = list(chain.from_iterable(level))
    return _numbers(level, kinds, name, lambda i: _place(i, shape)).view(shape)


def _vector(value: Any, name: str, where: str, *, integers: bool = True) -> Tensor:
    """Converts a list of integers to int64, or a list of numbers to float32.

    An empty list is an empty vector.
    """
    if not isinstance(value, list):
        raise _refused(
            name,
            where,
            value,
            (
                "it must be a list of integers"
                if integers
                else "it must be a list of numbers"
            ),
        )
    if not value:
        return _NO_IDS if integers else _NO_IDS.float()
    kinds = set(map(type, value))
    if not integers and kinds == {int}:
        kinds = {int, float}
    if integers and kinds != {int}:
        wrong = next(i for i, each in enumerate(value) if type(each) is not int)
        raise _refused(name, f"{where}[{wrong}]", value[wrong], _SEND_INTEGERS)
    return _numbers(value, kinds, name, lambda i: f"{where}[{i}]")


def _numbers(
    numbers: list[Any], kinds: set[type], name: str, place: Callable[[int], str]
) -> Tensor:
    """Converts a list of numbers to a vector: int64 for integers, bool for truth
    values, otherwise float32.
    """
    if kinds == {bool}:
        return torch.tensor(numbers)
    if not kinds <= {int, float}:
        wrong = next(
            i for i, each in enumerate(numbers) if type(each) not in (int, float)
        )
        raise _refused(name, place(wrong), numbers[wrong], "it must be a number")
    if kinds == {int}:
        try:
            return torch.tensor(numbers, dtype=torch.int64)
        except (RuntimeError, ValueError, OverflowError):
            wrong = next(
                i for i, each in enumerate(numbers) if not -(2**63) <= each < 2**63
            )
            raise _refused(
                name, place(wrong), numbers[wrong], "int64 does not hold it"
            ) from None
    tensor = torch.tensor(
        [each if -_GREATEST <= each <= _GREATEST else math.inf for each in numbers]
    )
    if not bool(torch.isfinite(tensor).all()):
        wrong = int((~torch.isfinite(tensor)).nonzero()[0])
        raise _refused(
            name,
            place(wrong),
            numbers[wrong],
            "it must be finite, and float32 must hold it",
        )
    return tensor


def _refused(name: str, where: str, value: Any, why: str) -> ValueError:
    """Returns the error about a value at a place of an argument."""
    text = {dict: "an object", list: "a list", type(None): "null"}.get(
        type(value)
    ) or repr(value)[:40]
    return ValueError(
        f"the argument {name!r} has {'[]' if value == [] else text} at {name}{where}:"
        f" {why}"
    )


def _place(number: int, shape: Sequence[int]) -> str:
    """Returns the indices of the entry with this number among all entries of a depth."""
    indices = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        indices.append(index)
    return _indices(indices[::-1])


def _indices(place: Sequence[int]) -> str:
    return "".join(f"[{each}]" for each in place)
