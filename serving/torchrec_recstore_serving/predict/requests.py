"""Requests to a served model, and how several requests become one batch.

Tests: tests/serving/predict/test_predictor.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# what served lookups say about ids; see sorted_tables.integers and served_table.cpp
_NO_INTEGERS = "must be integers"
FLOAT_IDS = "ids must be integers"
"""The beginning of the error of a model that got ids of another type."""


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
        if bool((self.lengths < 0).any()) or int(self.lengths.sum()) != len(
            self.values
        ):
            raise ValueError(
                f"the lengths are {int(self.lengths.sum())} in total, and there are"
                f" {len(self.values)} values"
            )
        if self.weights is not None and self.weights.shape != self.values.shape:
            raise ValueError(
                f"there are {len(self.values)} values and {self.weights.numel()}"
                " weights"
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
        return tuple(
            (
                (
                    name,
                    value.keys,
                    value.values.dtype,
                    value.lengths.shape[0],
                    value.lengths.dtype,
                    value.weights is None,
                )
                if isinstance(value, JaggedArgument)
                else (name, value.dtype, value.shape[1:])
            )
            for name, value in sorted(self.arguments.items())
        )


def request_of(
    arguments: Mapping[str, Value], jagged: Mapping[str, tuple[str, int]]
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
        values, lengths = joined.get(name), joined.pop(lengths_name, None)
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
    counts = {
        (
            value.lengths.shape[1]
            if isinstance(value, JaggedArgument)
            else (value.shape[0] if value.dim() else None)
        )
        for value in joined.values()
    }
    examples = counts.pop() if len(counts) == 1 else None
    return Request(joined, examples)


def merged(requests: Sequence[Request]) -> Request:
    """Makes one request of several of the same kind, in their order."""
    first = requests[0]
    if len(requests) == 1:
        return first
    arguments: dict[str, Value] = {}
    for name, value in first.arguments.items():
        parts = [request.arguments[name] for request in requests]
        if isinstance(value, JaggedArgument):
            arguments[name] = _merged_bags(
                [part for part in parts if isinstance(part, JaggedArgument)]
            )
        else:
            arguments[name] = torch.cat(
                [part for part in parts if isinstance(part, Tensor)]
            )
    return Request(arguments, sum(request.examples or 0 for request in requests))


def _merged_bags(parts: Sequence[JaggedArgument]) -> JaggedArgument:
    first = parts[0]
    counts = [part.lengths.sum(1).tolist() for part in parts]

    def by_feature(tensors: Sequence[Tensor]) -> Tensor:
        pieces = [
            torch.split(tensor, count)
            for tensor, count in zip(tensors, counts, strict=True)
        ]
        return torch.cat(
            [
                piece[feature]
                for feature in range(len(first.lengths))
                for piece in pieces
            ]
        )

    return JaggedArgument(
        first.keys,
        by_feature([part.values for part in parts]),
        torch.cat([part.lengths for part in parts], dim=1),
        (
            None
            if first.weights is None
            else by_feature(
                [part.weights for part in parts if part.weights is not None]
            )
        ),
    )


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
    arguments: dict[str, object] = {}
    for name, value in request.arguments.items():
        if not isinstance(value, JaggedArgument):
            arguments[name] = value
        elif name in jagged:
            arguments[name], arguments[jagged[name][0]] = (
                value.values,
                value.lengths.reshape(-1),
            )
        else:
            # Models of plain tensors are served without TorchRec.
            from torchrec import KeyedJaggedTensor

            arguments[name] = KeyedJaggedTensor(
                list(value.keys),
                value.values,
                lengths=value.lengths.reshape(-1),
                weights=value.weights,
            )
    with torch.inference_mode():
        try:
            result = model(**arguments)
        except Exception as error:
            raise _refusal(error, arguments) or error from error
    return _outputs(result)


def _refusal(error: Exception, arguments: Mapping[str, object]) -> ValueError | None:
    """Returns the error of a model that refuses its arguments: a ``ValueError`` in
    TorchScript.

    None: another error.
    """
    last = (str(error).strip().splitlines() or [""])[-1]
    floats = [
        name
        for name, value in arguments.items()
        if isinstance(value, Tensor) and not _are_integers(value)
    ]
    if floats and _NO_INTEGERS in last:
        return ValueError(
            f"{FLOAT_IDS}, and the argument(s) {', '.join(map(repr, floats))} hold"
            " floats"
        )
    kind, _, cause = last.partition("ValueError: ")
    if kind != "builtins.":
        return None
    given = (
        f"{name!r} of shape {list(each.shape)}"
        for name, each in arguments.items()
        if isinstance(each, Tensor)
    )
    return ValueError(f"the model refuses its arguments ({', '.join(given)}): {cause}")


def _are_integers(tensor: Tensor) -> bool:
    return not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )


def _outputs(result: object) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"output": result}
    if isinstance(result, tuple | list):
        result = {str(place): each for place, each in enumerate(result)}
    if (
        isinstance(result, dict)
        and result
        and all(isinstance(each, Tensor) for each in result.values())
    ):
        return {str(name): each for name, each in result.items()}
    raise TypeError(
        f"the model returns {type(result).__name__}: it must return tensors, or a tuple"
        " or dict of tensors"
    )


def split(
    outputs: Mapping[str, Tensor], requests: Sequence[Request]
) -> list[dict[str, Tensor]] | None:
    """Splits the result of a merged request.

    None: the tensors do not have one row for each example.
    """
    if len(requests) == 1:
        return [dict(outputs)]
    counts = [request.examples or 0 for request in requests]
    if any(
        each.dim() == 0 or each.shape[0] != sum(counts) for each in outputs.values()
    ):
        return None
    parts = {name: torch.split(each, counts) for name, each in outputs.items()}
    return [
        {name: each[place] for name, each in parts.items()}
        for place in range(len(requests))
    ]
