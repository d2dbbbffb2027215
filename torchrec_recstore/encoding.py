"""Python values as JSON and tensors, and back. Nothing is pickled.

Files that a newer version of this package has written are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrec_recstore import optim, options


def not_known(what: str) -> str:
    """The message of an error.

    Args:
        what: is in a file and not known, such as ``"metadata.json has the field 'x'"``.
    """
    from torchrec_recstore import __version__

    return (
        f"{what}, which torchrec_recstore {__version__} does not know: a newer version wrote it; install that: "
        "pip install --upgrade torchrec-recstore"
    )


def check_fields(where: str, found: Collection[str], known: Collection[str], needed: Collection[str] = ()) -> None:
    """Compares the fields of an entry of a file with those that this version knows.

    Args:
        where: names the entry in the message.
        found: names of its fields.
        known: names of the fields that it may have.
        needed: names of the fields that it must have.

    Raises:
        ValueError: it has a field that this version does not know, or lacks one that it must have.
    """
    for name in found:
        if name not in known:
            raise ValueError(not_known(f"{where} has the field {name!r}"))
    for name in needed:
        if name not in found:
            raise ValueError(f"{where} has no field {name!r}")


_CLASSES = {
    name: value
    for module in (optim, options)
    for name, value in vars(module).items()
    if isinstance(value, type) and is_dataclass(value)
}


def encode(value: object, tensors: dict[str, Tensor], where: str = "") -> Any:
    """What ``json`` can write of a value.

    Args:
        value: None, bool, int, float, str, tensors, dataclasses of :mod:`torchrec_recstore.optim` and ``options``;
            lists, tuples and dicts (keys: str, int) of these.
        tensors: where tensors go, under the path to them.
        where: the path to the value.

    Raises:
        TypeError: something else; the message names the path to it.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}  # a float of numpy's has another repr
    if isinstance(value, Tensor):
        _check_tensor(value, where)
        name = where
        while name in tensors:  # {"a/b": x, "a": {"b": y}}
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
                    f"training_state{where} has a key of type {type(key).__name__}: only str and int are saved"
                )
        items = [(key, encode(item, tensors, f"{where}/{key}")) for key, item in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if plain else {"$dict": [list(item) for item in items]}
    if is_dataclass(value) and _CLASSES.get(type(value).__name__) is type(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"$type": type(value).__name__, **{k: encode(v, tensors, f"{where}/{k}") for k, v in values.items()}}
    raise TypeError(
        f"training_state{where} is of type {type(value).__name__}, which is not saved: plain values and tensors are"
    )


def _check_tensor(tensor: Tensor, where: str) -> None:
    kind = type(tensor).__name__ if type(tensor) not in (Tensor, nn.Parameter) else None
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout)
    elif tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
        kind = f"{tensor.device.type} {tensor.dtype}"
    if kind is not None:
        raise TypeError(f"training_state{where} is a tensor of type {kind}, which is not saved")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        ValueError: an unknown type, a field that a type does not have or one that it lacks, or a tensor that is not
            there.
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
        known = cast(Any, _CLASSES.get(value["$type"]))
        if known is None:
            raise ValueError(not_known(f"there is a value of the type {value['$type']!r}"))
        values = {key: decode(item, tensors) for key, item in value.items() if key != "$type"}
        of_type = [field for field in fields(known) if field.init]
        needed = [field.name for field in of_type if field.default is MISSING and field.default_factory is MISSING]
        check_fields(f"a value of the type {value['$type']!r}", values, [field.name for field in of_type], needed)
        return known(**values)
    return {key: decode(item, tensors) for key, item in value.items()}
