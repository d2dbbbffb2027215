"""A device in Python, whose memory is not host memory: tensors on it have null data pointers, and copies are counted.

:func:`register` makes the device ``sim`` of this process. Its tensors have no storage that the host could read. Their
values are in another tensor, which only the operators of torch, FBGEMM and TorchRec see, as on an accelerator. An
operator of this package that gets a tensor on the device fails. A copy between host and device is recorded.

Source: ``_setup_privateuseone_for_python_backend`` (torch 2.13), which makes a backend of PrivateUse1 in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

NAME = "sim"


@dataclass(frozen=True)
class Copy:
    """A copy between the host and the device: ``"down"`` to the host, or ``"up"`` to the device."""

    way: str
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocking: bool


copies: list[Copy] = []
"""The copies so far, in their order. Clear the list before the step that is looked at."""

_libraries: list[torch.library.Library] = []


class DeviceTensor(torch.Tensor):
    """A tensor on the device. Its values are in ``values``, a tensor on the host that only this module uses."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> DeviceTensor:
        tensor = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
        tensor.__class__ = cls
        return tensor  # type: ignore[no-any-return]

    def __init__(self, values: torch.Tensor) -> None:
        # The tensor says that it is contiguous. A view that is not is a copy here: writes through it are lost.
        self.values_on_device = values.contiguous()
        self.is_copy_of_a_view = self.values_on_device is not values

    __torch_function__ = torch._C._disabled_torch_function_impl


def register() -> torch.device:
    """Makes the device, once for a process, and returns it."""
    if not _libraries:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(NAME)
        every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        _libraries.extend((every, aten))
        every.fallback(_run, "PrivateUse1")
        aten.impl("_to_copy", _to_copy, "PrivateUse1")
        aten.impl("_copy_from", _copy_from, "PrivateUse1")
        aten.impl("copy_", _copy_, "PrivateUse1")
        aten.impl("empty.memory_format", _empty, "PrivateUse1")
        aten.impl("empty_strided", _empty_strided, "PrivateUse1")
        aten.impl("_local_scalar_dense", _item, "PrivateUse1")
        for name in ("detach", "alias"):
            aten.impl(name, lambda tensor: DeviceTensor(tensor.values_on_device), "PrivateUse1")
    return torch.device(NAME, 0)


def _values(value: Any) -> Any:
    return value.values_on_device if isinstance(value, DeviceTensor) else value


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator of torch, FBGEMM or TorchRec on the values of its device tensors."""
    if op._schema.is_mutable:
        written = [
            given
            for given, argument in zip(args, op._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for each in torch.utils._pytree.tree_leaves(written):
            if isinstance(each, DeviceTensor) and each.is_copy_of_a_view:
                raise NotImplementedError(f"{op} writes to a view that is not contiguous")
    if op.namespace.startswith("recstore"):
        raise NotImplementedError(f"{op} got a tensor on the device, whose memory the host cannot read")
    inputs = {id(_values(each)): each for each in torch.utils._pytree.tree_leaves((args, kwargs))}
    mine, named = tree_map(_values, args), {k: tree_map(_values, v) for k, v in kwargs.items() if k != "device"}
    device = kwargs.get("device")

    def out(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            return value
        if id(value) in inputs:  # changed in place
            return inputs[id(value)]
        return value if device is not None and torch.device(device).type == "cpu" else DeviceTensor(value)

    return tree_map(out, op(*mine, **named))


def _record(way: str, tensor: torch.Tensor, blocking: bool) -> None:
    copies.append(Copy(way, tensor.numel() * tensor.element_size(), tuple(tensor.shape), tensor.dtype, blocking))


def _to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    values = _values(tensor).to(dtype or tensor.dtype, copy=True)
    to = tensor.device.type if device is None else torch.device(device).type
    if to != tensor.device.type:
        _record("up" if to == NAME else "down", values, not non_blocking)
    return DeviceTensor(values) if to == NAME else values


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(target, DeviceTensor) and target.is_copy_of_a_view:
        raise NotImplementedError("copy_ writes to a view that is not contiguous")
    if source.device.type != target.device.type:
        _record("up" if target.device.type == NAME else "down", source, not non_blocking)
    _values(target).copy_(_values(source))
    return target


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy_from(source, target, non_blocking)


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    return DeviceTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


def _item(tensor: torch.Tensor) -> Any:
    _record("down", tensor, True)
    return _values(tensor).item()
