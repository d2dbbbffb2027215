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
from torchrec_recstore.installing import install
from torchrec_recstore.optim import OPTIMIZERS

_CLASSES: dict[str, Any] = dict(OPTIMIZERS)
for _name, _value in vars(options).items():
    if isinstance(_value, type) and is_dataclass(_value):
        _CLASSES[_name] = _value


def not_known(beginning: str) -> str:
    """Returns the message of the error that a file has an unknown part.

    ``beginning`` is that of the sentence.
    """
    from torchrec_recstore import __version__

    return (
        f"{beginning}, which torchrec_recstore {__version__} does not know: a newer"
        f" version wrote it; upgrade with: {install(flags='--upgrade')}"
    )


def check_fields(
    entry: str,
    field_names: Collection[str],
    valid: Any,
    optional: Collection[str] = (),
) -> None:
    """Checks the names of the fields of an entry of a file.

    Args:
        entry: The name of the entry, for the message.
        field_names: The names of the fields that the entry has.
        valid: The names of the fields that it may have, or a dataclass. The fields of a
            dataclass with a default are optional, because a later version may have
            added them.
        optional: The names of the fields that it may lack. Default: none.

    Raises:
        ValueError: The entry has a field that is not ``valid``, or lacks one that is
            not ``optional``.
    """
    if is_dataclass(valid):
        class_fields = fields(valid)
        valid = [field.name for field in class_fields]
        optional = [f.name for f in class_fields if f.default is not MISSING]
    for name in field_names:
        if name not in valid:
            raise ValueError(not_known(f"{entry} has the field {name!r}"))
    for name in valid:
        if name not in field_names and name not in optional:
            raise ValueError(f"{entry} has no field {name!r}")


def encode(
    value: object,
    tensors: dict[str, Tensor],
    path: str = "",
) -> Any:
    """Converts a value to a form that ``json`` can write. :func:`decode` converts it
    back.

    The value is None, a bool, int, float or str, a tensor, a dataclass of
    :mod:`torchrec_recstore.optim` or ``options``, or a list, tuple or dict of these;
    keys of a dict are str or int. Its tensors are added to ``tensors``, by paths such
    as "/a/0"; ``path`` is the path to the value. Raises TypeError, which names the
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
        _check_tensor(value, path)
        name = path
        # two tensors have the same path, as in {"a/b": x, "a": {"b": y}}
        while name in tensors:
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, list):
        return [encode(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode(list(value), tensors, path)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if is_dataclass(value) and _CLASSES.get(type(value).__name__) is type(value):
        return _encode_dataclass(value, tensors, path)
    raise TypeError(
        f"training_state{path} is of type {type(value).__name__}, which cannot be"
        " saved: pass plain values and tensors"
    )


def _encode_mapping(
    mapping: Mapping[Any, object],
    tensors: dict[str, Tensor],
    path: str,
) -> dict[str, Any]:
    for key in mapping:
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise TypeError(
                f"training_state{path} has a key of type {type(key).__name__}:"
                " only str and int are saved"
            )
    encoded = {}
    for key, value in mapping.items():
        encoded[key] = encode(value, tensors, f"{path}/{key}")
    if all(isinstance(key, str) and not key.startswith("$") for key in mapping):
        return encoded
    # JSON has no other keys than strings, and "$" marks what this module writes
    return {"$dict": [list(item) for item in encoded.items()]}


def _encode_dataclass(
    value: Any,
    tensors: dict[str, Tensor],
    path: str,
) -> dict[str, Any]:
    encoded = {"$type": type(value).__name__}
    for field in fields(value):
        field_value = getattr(value, field.name)
        is_saved = field.metadata.get("saved", True)
        # earlier versions do not know the field
        is_left_out = bool(field.metadata) and field_value == field.default
        if is_saved and not is_left_out:
            field_path = f"{path}/{field.name}"
            encoded[field.name] = encode(field_value, tensors, field_path)
    return encoded


def _check_tensor(tensor: Tensor, path: str) -> None:
    kind: str | None = None
    if type(tensor) not in (Tensor, nn.Parameter):
        kind = type(tensor).__name__
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout)
    elif tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
        kind = f"{tensor.device.type} {tensor.dtype}"
    if kind is not None:
        raise TypeError(
            f"training_state{path} is a tensor of type {kind}, which cannot be saved:"
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
        return _decode_dataclass(value, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def _decode_dataclass(encoded: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    name = encoded["$type"]
    dataclass_type = _CLASSES.get(name)
    if dataclass_type is None:
        raise ValueError(not_known(f"there is a value of the type {name!r}"))
    arguments = {}
    for key, item in encoded.items():
        if key != "$type":
            arguments[key] = decode(item, tensors)
    _refuse_unsaved(name, dataclass_type, arguments)
    check_fields(
        f"a value of the type {name!r}",
        arguments,
        dataclass_type,
    )
    return dataclass_type(**arguments)


def _refuse_unsaved(
    name: str,
    dataclass_type: Any,
    values: Mapping[str, Any],
) -> None:
    """Refuses a field that :func:`encode` never writes: the code of a ``RowOptimizer``,
    which a table would run.
    """
    for field in fields(dataclass_type):
        if not field.metadata.get("saved", True) and field.name in values:
            raise ValueError(
                f"a value of the type {name!r} has the field {field.name!r}, which"
                " files never have, because it is code: the file was not written by"
                " this package"
            )
