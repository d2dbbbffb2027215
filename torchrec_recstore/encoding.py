"""Conversion of Python values to JSON and tensors, and back. Nothing is pickled.

Files of a newer version of this package are refused, with an error that names the
unknown part.

Tests: tests/checkpoint/test_save.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_recstore import options
from torchrec_recstore.optim import OPTIMIZERS

_CLASSES: dict[str, Any] = {
    **OPTIMIZERS,
    **{
        name: value
        for name, value in vars(options).items()
        if isinstance(value, type) and is_dataclass(value)
    },
}


def not_known(what: str) -> str:
    """Returns the message of the error that a file has an unknown part.

    ``what`` is the beginning of the sentence.
    """
    from torchrec_recstore import __version__

    return (
        f"{what}, which torchrec_recstore {__version__} does not know: a newer version"
        " wrote it; upgrade with: pip install --upgrade torchrec-recstore"
    )


def check_fields(
    where: str, found: Collection[str], known: Any, optional: Collection[str] = ()
) -> None:
    """Checks the names of the fields of an entry of a file.

    ``where`` is the name of the entry, for the message.

    ``known`` are names, or a dataclass: its fields with a default are optional, because
    a later version may have added them. Raises ValueError if the entry has a field that
    is not ``known``, or lacks one that is not ``optional``.
    """
    if is_dataclass(known):
        optional = [
            field.name for field in fields(known) if field.default is not MISSING
        ]
        known = [field.name for field in fields(known)]
    for name in found:
        if name not in known:
            raise ValueError(not_known(f"{where} has the field {name!r}"))
    for name in known:
        if name not in found and name not in optional:
            raise ValueError(f"{where} has no field {name!r}")


def encode(value: object, tensors: dict[str, Tensor], where: str = "") -> Any:
    """Converts a value to a form that ``json`` can write. :func:`decode` converts it
    back.

    The value is None, a bool, int, float or str, a tensor, a dataclass of
    :mod:`torchrec_recstore.optim` or ``options``, or a list, tuple or dict of these;
    keys of a dict are str or int. Its tensors are added to ``tensors``, by paths such
    as "/a/0"; ``where`` is the path to the value. Raises TypeError, which names the
    path, if a part has another type. A field whose metadata has ``saved=False`` is
    always left out. A field with other metadata, which earlier versions do not know, is
    left out if it has its default.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # float() is for numpy's floats, which have another repr.
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        _check_tensor(value, where)
        name = where
        # two tensors have the same path, as in {"a/b": x, "a": {"b": y}}
        while name in tensors:
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, list):
        return [encode(item, tensors, f"{where}/{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode(list(value), tensors, where)}
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(
                    f"training_state{where} has a key of type {type(key).__name__}:"
                    " only str and int are saved"
                )
        items = [
            (key, encode(item, tensors, f"{where}/{key}"))
            for key, item in value.items()
        ]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if plain else {"$dict": [list(item) for item in items]}
    if is_dataclass(value) and _CLASSES.get(type(value).__name__) is type(value):
        saved = [f for f in fields(value) if f.metadata.get("saved", True)]
        kept = [
            f.name
            for f in saved
            if not f.metadata or getattr(value, f.name) != f.default
        ]
        return {
            "$type": type(value).__name__,
            **{k: encode(getattr(value, k), tensors, f"{where}/{k}") for k in kept},
        }
    raise TypeError(
        f"training_state{where} is of type {type(value).__name__}, which cannot be"
        " saved: pass plain values and tensors"
    )


def _check_tensor(tensor: Tensor, where: str) -> None:
    kind = type(tensor).__name__ if type(tensor) not in (Tensor, nn.Parameter) else None
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout)
    elif tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
        kind = f"{tensor.device.type} {tensor.dtype}"
    if kind is not None:
        raise TypeError(
            f"training_state{where} is a tensor of type {kind}, which cannot be saved:"
            " pass a plain tensor"
        )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that :func:`encode` has converted, from what ``json`` has read
    and the tensors.

    Raises ValueError if a type or a field is unknown, or if a field without a default
    or a tensor is missing.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tensor" in value:
        if value["$tensor"] not in tensors:
            raise ValueError(f"there is no tensor {value['$tensor']!r}")
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(decode(value["$tuple"], tensors))
    if "$dict" in value:
        return {key: decode(item, tensors) for key, item in value["$dict"]}
    if "$type" in value:
        known = _CLASSES.get(value["$type"])
        if known is None:
            raise ValueError(
                not_known(f"there is a value of the type {value['$type']!r}")
            )
        values = {
            key: decode(item, tensors) for key, item in value.items() if key != "$type"
        }
        _refuse_unsaved(value["$type"], known, values)
        check_fields(f"a value of the type {value['$type']!r}", values, known)
        return known(**values)
    return {key: decode(item, tensors) for key, item in value.items()}


def _refuse_unsaved(name: str, known: Any, values: Mapping[str, Any]) -> None:
    """Refuses a field that :func:`encode` never writes: the code of a ``RowOptimizer``,
    which a table would run.
    """
    for field in fields(known):
        if not field.metadata.get("saved", True) and field.name in values:
            raise ValueError(
                f"a value of the type {name!r} has the field {field.name!r}, which"
                " files never have, because it is code: the file was not written by"
                " this package"
            )
