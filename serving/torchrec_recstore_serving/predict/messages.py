"""Arguments and results of served models in messages of gRPC and in JSON.

The messages are those of predictor.proto.

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
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_MOST_DIMENSIONS = 16
_MOST_ARGUMENTS = 1024
_NO_BAGS = "each feature must have a list of bags, which are lists of ids"
_GREATEST = torch.finfo(torch.float32).max
_JSON_KINDS = {
    dict: "an object",
    list: "a list",
    type(None): "null",
}
_NO_IDS = torch.empty(0, dtype=torch.int64)
_INTEGERS = "ids and lengths are integers"
_NO_FLOATS = (
    f"{_INTEGERS}: send 20000001, not 20000001.0, because floats do not hold every id"
)
_NO_TEXTS = (
    f"{_INTEGERS}, and this is a text: send the integer that the text had as an id in"
    " training"
)
_NO_INTEGER = {float: _NO_FLOATS, str: _NO_TEXTS}
"""Why a value is no id, by its type. Other types have no more to say."""


def array_of(tensor: Tensor) -> Any:
    """Returns a tensor as an ``Array`` of predictor.proto."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return pb.Array(
        dtype=dtype,
        shape=list(tensor.shape),
        data=to_bytes(tensor),
    )


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
    byte_count = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or byte_count != len(array.data):
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
    weights: Tensor | None = None
    if jagged.HasField("weights"):
        weights = tensor_of(jagged.weights, f"{name}.weights")
    lengths = tensor_of(jagged.lengths, f"{name}.lengths")
    values = tensor_of(jagged.values, f"{name}.values")
    return bags(jagged.keys, values, lengths, weights, name)


def bags(
    keys: Any,
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    name: str,
) -> JaggedArgument:
    """Returns the argument of this name for a ``KeyedJaggedTensor``.

    Raises:
        ValueError: The parts do not fit each other.
    """
    if not keys or lengths.dim() != 1 or len(lengths) % len(keys):
        raise ValueError(
            f"{name} must have keys, and one length for each key and example"
        )
    return JaggedArgument(
        keys=tuple(keys),
        values=values,
        lengths=lengths.view(len(keys), -1),
        weights=weights,
    )


def arguments_of_json(
    arguments: Mapping[str, Any],
    jagged: Mapping[str, tuple[str, int]],
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
    names_of_vectors = set(jagged)
    for lengths_name, _ in jagged.values():
        names_of_vectors.add(lengths_name)
    values: dict[str, Value] = {}
    for name, value in arguments.items():
        if name in names_of_vectors:
            values[name] = _vector(value, name, "")
        else:
            values[name] = value_of_json(value, name)
    return values


def value_of_json(value: Any, name: str) -> Value:
    """Returns an argument of a JSON document; see :func:`arguments_of_json`.

    Raises:
        ValueError: The value has another form. The message names the argument and the
            place in it.
    """
    if not isinstance(value, dict):
        return _tensor(value, name)
    if "values" in value and "lengths" in value:
        return _bags_of_parts(value, name)
    return _bags_by_feature(value, name)


def _bags_of_parts(value: dict[str, Any], name: str) -> JaggedArgument:
    """Returns the argument of the parts of a ``KeyedJaggedTensor``."""
    keys = value.get("keys")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _refused(
            name,
            ".keys",
            keys,
            "it must be a list of the names of the features",
        )
    values = _vector(value["values"], name, ".values")
    lengths = _vector(value["lengths"], name, ".lengths")
    weights: Tensor | None = None
    if value.get("weights") is not None:
        weights = _vector(
            value["weights"],
            name,
            ".weights",
            integers=False,
        )
    return bags(keys, values, lengths, weights, name)


def _bags_by_feature(value: dict[str, Any], name: str) -> JaggedArgument:
    """Returns the argument of the bags of each feature."""
    for feature, rows in value.items():
        if not isinstance(rows, list):
            raise _refused(name, f"[{feature!r}]", rows, _NO_BAGS)
        for number, bag in enumerate(rows):
            if not isinstance(bag, list):
                raise _refused(name, f"[{feature!r}][{number}]", bag, _NO_BAGS)
    row_counts = {len(rows) for rows in value.values()}
    if len(row_counts) != 1:
        raise ValueError(
            f"the argument {name!r}: each feature must have one bag for each example"
        )
    all_bags = list(chain.from_iterable(value.values()))
    bag_lengths = [len(bag) for bag in all_bags]
    lengths = torch.tensor(bag_lengths, dtype=torch.int64)
    all_ids = list(chain.from_iterable(all_bags))
    try:
        ids = _vector(all_ids, name, "")
    except ValueError:
        for feature, rows in value.items():
            for number, bag in enumerate(rows):
                # raises the error with its place
                _vector(bag, name, f"[{feature!r}][{number}]")
        raise
    return bags(list(value), ids, lengths, None, name)


def not_finite(outputs: Mapping[str, Tensor]) -> str | None:
    """Returns a message about the first number of a result that JSON cannot hold.

    It is NaN or infinity.

    None: no such.
    """
    for name, tensor in outputs.items():
        is_bad = ~torch.isfinite(tensor.double())
        if is_bad.any():
            indices = is_bad.nonzero()[0].tolist()
            number = float(tensor[tuple(indices)])
            place = _indices(indices) or "its only place"
            return (
                f"the model returns {number} in {name!r} at {place}, which JSON has not"
            )
    return None


def place_of_float(value: Any) -> str:
    """Returns the place and the text of the first float in nested lists of JSON."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            place = place_of_float(entry)
            if place:
                return f"[{index}]{place}"
        return ""
    return f": {value!r}" if isinstance(value, float) else ""


def _tensor(value: Any, name: str) -> Tensor:
    """Converts nested lists of numbers.

    All lists of one depth must have the same length, which is not 0.
    """
    if not isinstance(value, list):
        raise _refused(
            name,
            "",
            value,
            "it must be a list, with an entry for each example",
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
        sizes = [len(entry) if isinstance(entry, list) else -1 for entry in level]
        if len(set(sizes)) > 1 or sizes[0] == 0:
            raise _uneven(name, level, sizes, shape)
        shape.append(sizes[0])
        level = list(chain.from_iterable(level))
    tensor = _numbers(
        level,
        kinds,
        name,
        lambda number: _place(number, shape),
    )
    return tensor.view(shape)


def _uneven(
    name: str,
    level: list[Any],
    sizes: list[int],
    shape: list[int],
) -> ValueError:
    """Returns the error about lists of one depth that are no part of a tensor.

    Args:
        name: The name of the argument.
        level: The entries of this depth.
        sizes: Their lengths, -1 for a number.
        shape: The lengths of the lists of the depths before.
    """
    wrong = 0
    if len(set(sizes)) > 1:
        wrong = _first(sizes, lambda size: size != sizes[0])
    if not isinstance(level[wrong], list) or not isinstance(level[0], list):
        return _refused(
            name,
            _place(wrong, shape),
            level[wrong],
            "there are lists and numbers at one depth",
        )
    if sizes[0] == 0:
        return _refused(
            name,
            _place(0, shape),
            [],
            "an empty list does not tell the shape and the dtype",
        )
    return ValueError(
        f"the argument {name!r} has {sizes[wrong]} entries at"
        f" {_place(wrong, shape)}, and {sizes[0]} at {_place(0, shape)}: lists"
        " of one depth must have the same length"
    )


def _vector(
    value: Any,
    name: str,
    place: str,
    *,
    integers: bool = True,
) -> Tensor:
    """Converts a list of integers to int64, or a list of numbers to float32.

    An empty list is an empty vector.
    """
    if not isinstance(value, list):
        kind = "integers" if integers else "numbers"
        raise _refused(
            name,
            place,
            value,
            f"it must be a list of {kind}",
        )
    if not value:
        return _NO_IDS if integers else _NO_IDS.float()
    kinds = set(map(type, value))
    if not integers and kinds == {int}:
        kinds = {int, float}
    if integers and kinds != {int}:
        wrong = _first(value, lambda entry: type(entry) is not int)
        reason = _NO_INTEGER.get(type(value[wrong]), _INTEGERS)
        raise _refused(name, f"{place}[{wrong}]", value[wrong], reason)
    return _numbers(value, kinds, name, lambda i: f"{place}[{i}]")


def _numbers(
    numbers: list[Any],
    kinds: set[type],
    name: str,
    place: Callable[[int], str],
) -> Tensor:
    """Converts a list of numbers to a vector.

    It is int64 for integers, bool for truth values, otherwise float32.
    """
    if kinds == {bool}:
        return torch.tensor(numbers)
    if not kinds <= {int, float}:
        wrong = _first(numbers, lambda entry: type(entry) not in (int, float))
        raise _refused(
            name,
            place(wrong),
            numbers[wrong],
            "it must be a number",
        )
    if kinds == {int}:
        try:
            return torch.tensor(numbers, dtype=torch.int64)
        except (RuntimeError, ValueError, OverflowError):
            wrong = _first(numbers, lambda number: not -(2**63) <= number < 2**63)
            raise _refused(
                name,
                place(wrong),
                numbers[wrong],
                "int64 does not hold it",
            ) from None
    # torch raises an error for a number that float32 does not hold. Here it is infinity.
    # The condition stands here, because a call for each number takes as long again.
    tensor = torch.tensor(
        [
            number if -_GREATEST <= number <= _GREATEST else math.inf
            for number in numbers
        ]
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


def _first(entries: list[Any], is_wrong: Callable[[Any], bool]) -> int:
    """Returns the position of the first entry that is wrong."""
    for position, entry in enumerate(entries):
        if is_wrong(entry):
            return position
    raise AssertionError("no entry is wrong")


def _refused(name: str, place: str, value: Any, reason: str) -> ValueError:
    """Returns the error about a value at a place of an argument."""
    text = _JSON_KINDS.get(type(value)) or repr(value)[:40]
    if value == []:
        text = "[]"
    return ValueError(f"the argument {name!r} has {text} at {name}{place}: {reason}")


def _place(number: int, shape: Sequence[int]) -> str:
    """Returns the indices of the entry with this number among all entries of a depth."""
    indices = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        indices.append(index)
    return _indices(indices[::-1])


def _indices(place: Sequence[int]) -> str:
    return "".join(f"[{index}]" for index in place)
