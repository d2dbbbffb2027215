"""Arguments and results of served models in messages of predictor.proto and in JSON documents.

Tests: tests/serving/test_predictor.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore_service.wire.protocol import from_bytes, to_bytes
from torchrec_recstore_serving import predictor_pb2 as pb
from torchrec_recstore_serving.requests import JaggedArgument, Value

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


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
        raise ValueError(f"{name} has the unknown dtype {array.dtype!r}: use one of {', '.join(_DTYPES)}")
    shape = list(array.shape)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(array.data):
        raise ValueError(f"{name} of shape {shape} and dtype {array.dtype} does not have {len(array.data)} bytes")
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
    weights = tensor_of(jagged.weights, f"{name}.weights") if jagged.HasField("weights") else None
    lengths = tensor_of(jagged.lengths, f"{name}.lengths")
    return bags(jagged.keys, tensor_of(jagged.values, f"{name}.values"), lengths, weights, name)


def bags(keys: Any, values: Tensor, lengths: Tensor, weights: Tensor | None, name: str) -> JaggedArgument:
    """Returns the argument of this name for a ``KeyedJaggedTensor``.

    Raises:
        ValueError: The parts do not fit each other.
    """
    if not keys or lengths.dim() != 1 or len(lengths) % len(keys):
        raise ValueError(f"{name} must have keys, and one length for each key and example")
    return JaggedArgument(tuple(keys), values, lengths.view(len(keys), -1), weights)


def value_of_json(value: Any, name: str) -> Value:
    """Returns an argument of a JSON document.

    A number or nested lists of numbers are a tensor: int64 if all are integers, else float32. An object has the bags of
    each feature, ``{"user": [[7, 8], [9]], "item": [[1], []]}``, or the keys ``keys``, ``values``, ``lengths`` and
    perhaps ``weights`` of a ``KeyedJaggedTensor``.

    Raises:
        ValueError: The value has another form.
    """
    try:
        if not isinstance(value, dict):
            return _tensor_of_json(value)
        if "values" in value and "lengths" in value:
            weights = None if value.get("weights") is None else torch.tensor(value["weights"], dtype=torch.float32)
            values, lengths = (torch.tensor(value[each], dtype=torch.int64) for each in ("values", "lengths"))
            return bags(value.get("keys"), values, lengths, weights, name)
        if len({len(rows) for rows in value.values()}) != 1:
            raise ValueError("each feature must have one bag for each example")
        ids = torch.tensor([each for rows in value.values() for bag in rows for each in bag], dtype=torch.int64)
        lengths = torch.tensor([len(bag) for rows in value.values() for bag in rows], dtype=torch.int64)
        return bags(list(value), ids, lengths, None, name)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the argument {name!r} cannot be read: {error}") from error


def _tensor_of_json(value: Any) -> Tensor:
    tensor = torch.tensor(value)
    return tensor.float() if tensor.is_floating_point() else tensor
