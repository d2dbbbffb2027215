"""Requests to a served model, and how several requests become one batch.

Tests: tests/serving/predict/test_predictor.py, tests/serving/predict/test_requests.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# what served lookups say about ids; see sorted_tables.integers and served_table.cpp
_NO_INTEGERS = "must be integers"
FLOAT_IDS = "ids must be integers"
"""The beginning of the error of a model that got ids of another type."""
# The last line of the error of TorchScript for a key that a dict lacks.
_NO_KEY = "KeyError: "


@dataclass(frozen=True)
class JaggedArgument:
    """A ``KeyedJaggedTensor``, or plain tensors with the same contents.

    Args:
        keys: The names of the features. Empty for plain tensors.
        values: (N,) The ids of all bags: feature by feature, and example by example.
        lengths: (features, examples) The length of each bag.
        weights: (N,) float32, or None.
    """

    keys: tuple[str, ...]
    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        for part, tensor in (("values", self.values), ("lengths", self.lengths)):
            if not _are_integers(tensor):
                raise ValueError(
                    f"the {part} of bags must be integers, got {tensor.dtype}"
                )
        if self.values.dim() != 1 or self.lengths.dim() != 2:
            raise ValueError(
                "values must have one dimension, and lengths must be a multiple of the"
                " number of features"
            )
        total = int(self.lengths.sum())
        if bool((self.lengths < 0).any()) or total != len(self.values):
            raise ValueError(
                f"the lengths are {total} in total, and there are"
                f" {len(self.values)} values"
            )
        if self.weights is not None and self.weights.shape != self.values.shape:
            raise ValueError(
                f"there are {len(self.values)} values and {self.weights.numel()}"
                " weights"
            )

    def kind(self) -> Hashable:
        """Returns what arguments must have in common to be joined."""
        return (
            self.keys,
            self.values.dtype,
            self.lengths.shape[0],
            self.lengths.dtype,
            self.weights is None,
        )


Value = Tensor | JaggedArgument


@dataclass(frozen=True)
class Request:
    """The arguments of one call.

    Args:
        arguments: The arguments of the model's ``forward`` by name. Each tensor has one
            row for each example.
        examples: The number of examples. None: the tensors have no common number of
            rows, so that the request cannot be answered together with others.
    """

    arguments: Mapping[str, Value]
    examples: int | None

    def kind(self) -> Hashable:
        """Returns what requests must have in common to become one batch."""
        kinds: list[Hashable] = []
        for name, value in sorted(self.arguments.items()):
            if isinstance(value, JaggedArgument):
                kinds.append((name, value.kind()))
            else:
                kinds.append((name, value.dtype, value.shape[1:]))
        return tuple(kinds)


def request_of(
    arguments: Mapping[str, Value],
    jagged: Mapping[str, tuple[str, int]],
) -> Request:
    """Makes a request.

    Args:
        arguments: The arguments by name.
        jagged: The names of plain tensors that are the ids of bags. For each name, the
            name of the argument with the lengths of the bags, and the number of
            features.

    Raises:
        ValueError: An argument is missing, or its shape does not fit.
    """
    joined: dict[str, Value] = dict(arguments)
    for name, (lengths_name, features) in jagged.items():
        values = joined.get(name)
        lengths = joined.pop(lengths_name, None)
        if not isinstance(values, Tensor) or not isinstance(lengths, Tensor):
            raise ValueError(
                f"the arguments {name!r} and {lengths_name!r} must be tensors"
            )
        if lengths.dim() != 1 or len(lengths) % features:
            raise ValueError(
                f"{lengths_name!r} must be a vector with a multiple of {features}"
                " lengths"
            )
        joined[name] = JaggedArgument((), values, lengths.view(features, -1))
    counts = {_examples_of(value) for value in joined.values()}
    examples = counts.pop() if len(counts) == 1 else None
    return Request(joined, examples)


def _examples_of(value: Value) -> int | None:
    """Returns the number of examples of an argument. None: a tensor without rows."""
    if isinstance(value, JaggedArgument):
        return value.lengths.shape[1]
    return value.shape[0] if value.dim() else None


def merged(requests: Sequence[Request]) -> Request:
    """Makes one request of several of the same kind, in their order."""
    first = requests[0]
    if len(requests) == 1:
        return first
    arguments: dict[str, Value] = {}
    for name, value in first.arguments.items():
        parts = [request.arguments[name] for request in requests]
        if isinstance(value, JaggedArgument):
            bags = [part for part in parts if isinstance(part, JaggedArgument)]
            arguments[name] = _merged_bags(bags)
        else:
            tensors = [part for part in parts if isinstance(part, Tensor)]
            arguments[name] = torch.cat(tensors)
    return Request(arguments, sum(request.examples or 0 for request in requests))


def _merged_bags(parts: Sequence[JaggedArgument]) -> JaggedArgument:
    first = parts[0]
    counts = [part.lengths.sum(1).tolist() for part in parts]
    weights: Tensor | None = None
    if first.weights is not None:
        weights_of_parts = [part.weights for part in parts if part.weights is not None]
        weights = _joined_by_feature(weights_of_parts, counts)
    return JaggedArgument(
        keys=first.keys,
        values=_joined_by_feature([part.values for part in parts], counts),
        lengths=torch.cat([part.lengths for part in parts], dim=1),
        weights=weights,
    )


def _joined_by_feature(
    tensors: Sequence[Tensor],
    counts: Sequence[Sequence[int]],
) -> Tensor:
    """Joins the ids or weights of several arguments, feature by feature.

    Args:
        tensors: For each argument, (N,). The ids or weights of all bags.
        counts: For each argument, the number of ids of each feature.
    """
    split_tensors = [
        torch.split(tensor, counts_of_tensor)  # type: ignore[arg-type]
        for tensor, counts_of_tensor in zip(tensors, counts, strict=True)
    ]
    pieces: list[Tensor] = []
    for of_feature in zip(*split_tensors, strict=True):
        pieces.extend(of_feature)
    return torch.cat(pieces)


def call(
    model: torch.jit.ScriptModule,
    request: Request,
    jagged: Mapping[str, tuple[str, int]],
) -> dict[str, Tensor]:
    """Calls a served model, and returns the tensors of its result by name.

    Raises:
        TypeError: The result has other things than tensors.
        ValueError: The model refuses its arguments.
        Exception: The model fails.
    """
    arguments = _call_arguments(request, jagged)
    with torch.inference_mode():
        try:
            result = model(**arguments)
        except Exception as error:
            lacking = _lacking_feature(error, model, request, jagged)
            refusal = _refusal(error, request, arguments, lacking)
            raise refusal or error from error
    return _outputs(result)


def _call_arguments(
    request: Request,
    jagged: Mapping[str, tuple[str, int]],
) -> dict[str, object]:
    """Returns the arguments of the model's ``forward`` by name."""
    arguments: dict[str, object] = {}
    for name, value in request.arguments.items():
        if not isinstance(value, JaggedArgument):
            arguments[name] = value
        elif name in jagged:
            lengths_name, _ = jagged[name]
            arguments[name] = value.values
            arguments[lengths_name] = value.lengths.reshape(-1)
        else:
            # Models of plain tensors are served without TorchRec.
            from torchrec import KeyedJaggedTensor

            arguments[name] = KeyedJaggedTensor(
                list(value.keys),
                value.values,
                lengths=value.lengths.reshape(-1),
                weights=value.weights,
            )
    return arguments


def _last_line(error: Exception) -> str:
    """Returns the last line of an error of TorchScript, which has the cause."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else ""


def _lacking_feature(
    error: Exception,
    model: torch.jit.ScriptModule,
    request: Request,
    jagged: Mapping[str, tuple[str, int]],
) -> str | None:
    """Returns the feature that a model reads and a request lacks.

    A ``KeyError`` of TorchScript does not say whether the dict without the key is that
    of the features or another one of the model. The model is therefore called again,
    with empty bags for this feature.

    None: the error has another cause.
    """
    last_line = _last_line(error)
    _, _, key = last_line.partition(_NO_KEY)
    if not key:
        return None
    arguments = dict(request.arguments)
    has_features = False
    for name, value in request.arguments.items():
        if isinstance(value, JaggedArgument) and value.keys:
            if key in value.keys:
                return None
            has_features = True
            no_ids = torch.zeros_like(value.lengths[:1])
            arguments[name] = replace(
                value,
                keys=(*value.keys, key),
                lengths=torch.cat([value.lengths, no_ids]),
            )
    if not has_features:
        return None
    complete = Request(arguments, request.examples)
    try:
        model(**_call_arguments(complete, jagged))
    except Exception as other_error:
        if _last_line(other_error) == last_line:
            return None
    return key


def _refusal(
    error: Exception,
    request: Request,
    arguments: Mapping[str, object],
    lacking_feature: str | None,
) -> ValueError | None:
    """Returns the error of a model that refuses its arguments.

    TorchScript has raised a ``ValueError``, or the arguments lack a feature.

    None: another error.
    """
    last_line = _last_line(error)
    tensors = {
        name: value for name, value in arguments.items() if isinstance(value, Tensor)
    }
    floats = [name for name, tensor in tensors.items() if not _are_integers(tensor)]
    if floats and _NO_INTEGERS in last_line:
        return ValueError(
            f"{FLOAT_IDS}, and the argument(s) {', '.join(map(repr, floats))} hold"
            " floats"
        )
    features = {
        name: value.keys
        for name, value in request.arguments.items()
        if isinstance(value, JaggedArgument) and value.keys
    }
    of_arguments = [
        f"{name!r} of shape {list(tensor.shape)}" for name, tensor in tensors.items()
    ]
    for name, keys in features.items():
        of_arguments.append(f"{name!r} with the features {', '.join(map(repr, keys))}")
    refused = f"the model refuses its arguments ({'; '.join(of_arguments)}):"
    if lacking_feature is not None:
        return ValueError(
            f"{refused} it reads the feature {lacking_feature!r}, which they lack"
        )
    kind, _, cause = last_line.partition("ValueError: ")
    if kind != "builtins.":
        return None
    return ValueError(f"{refused} {cause}")


def _are_integers(tensor: Tensor) -> bool:
    return not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )


def _outputs(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"output": result}
    if isinstance(result, tuple | list):
        result = dict(enumerate(result))
    outputs = result.values() if isinstance(result, dict) else []
    if outputs and all(isinstance(output, Tensor) for output in outputs):
        return {str(name): output for name, output in result.items()}
    raise TypeError(
        f"the model returns {type(result).__name__}: it must return tensors, or a tuple"
        " or dict of tensors"
    )


def split(
    outputs: Mapping[str, Tensor],
    requests: Sequence[Request],
) -> list[dict[str, Tensor]] | None:
    """Splits the result of a merged request.

    None: the tensors do not have one row for each example.
    """
    if len(requests) == 1:
        return [dict(outputs)]
    counts = [request.examples or 0 for request in requests]
    total = sum(counts)
    parts: list[dict[str, Tensor]] = [{} for _ in requests]
    for name, output in outputs.items():
        if output.dim() == 0 or output.shape[0] != total:
            return None
        for part, rows in zip(parts, torch.split(output, counts), strict=True):
            part[name] = rows
    return parts
