"""A device in Python, whose memory is not host memory: tensors on it have null data
pointers, and copies are counted.

:func:`register` makes the device ``sim`` of this process. Its tensors have no storage
that the host could read. Their values are in another tensor, which only the operators
of torch, FBGEMM and TorchRec see, as on an accelerator. An operator of this package
that gets a tensor on the device fails. A copy between host and device is recorded, and
runs as late as the streams of :mod:`tests.device.streams` allow.

Its kernels for rows are those of the reference, on the values of its tensors. Each call
is a use of the memory of its arguments by the current stream.

Source: ``_setup_privateuseone_for_python_backend`` (torch 2.13), which makes a backend
of PrivateUse1 in Python. It gives the device no streams, no events and no pinned
memory, so that this package gets them from ``streams_by_type``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.device import streams
from tests.device.streams import Copy, Memory, copies
from torchrec_recstore.kernels import device_copies, device_interface
from torchrec_recstore.kernels.reference_kernels import ReferenceKernels

NAME = "sim"
__all__ = ["NAME", "Copy", "DeviceTensor", "copies", "register"]

_libraries: list[torch.library.Library] = []


class DeviceTensor(torch.Tensor):
    """A tensor on the device.

    Its values are in ``values``, a tensor on the host that only this module uses.
    """

    @staticmethod
    def __new__(
        cls,
        values: torch.Tensor,
        memory: Memory | None = None,
        span: tuple[int, int] | None = None,
    ) -> DeviceTensor:
        tensor = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
        tensor.__class__ = cls
        return tensor  # type: ignore[no-any-return]

    def __init__(
        self,
        values: torch.Tensor,
        memory: Memory | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        # The tensor says that it is contiguous. A view that is not is a copy here:
        # writes through it are lost.
        self.values_on_device = values.contiguous()
        self.is_copy_of_a_view = self.values_on_device is not values
        self.memory = Memory() if memory is None else memory
        self.span = streams.span(values) if span is None else span
        """The range of the tensor's bytes in its memory."""

    def use(self, *, writes: bool) -> None:
        """The current stream reads or writes the tensor."""
        self.memory.use(*self.span, writes=writes)

    def end_of_copy(self) -> streams.CopyEnds:
        """Returns this tensor as one end of a copy."""
        return streams.CopyEnds(self.memory, *self.span)

    __torch_function__ = torch._C._disabled_torch_function_impl


def register() -> torch.device:
    """Makes the device, once for a process, and returns it."""
    if not _libraries:
        from torch.utils.backend_registration import (
            _DummyBackendModule,
            _setup_privateuseone_for_python_backend,
        )

        class Module(_DummyBackendModule):  # type: ignore[misc]
            """The module ``torch.sim``, with what TorchRec's pipelines ask of every
            device.
            """

            def current_stream(self) -> streams.Stream:
                return streams.DeviceStreams(torch.device(NAME)).current()

        _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
        every, aten = (
            torch.library.Library("_", "IMPL"),
            torch.library.Library("aten", "IMPL"),
        )
        _libraries.extend((every, aten))
        every.fallback(_run, "PrivateUse1")
        aten.impl("_to_copy", _to_copy, "PrivateUse1")
        aten.impl("_copy_from", _copy_from, "PrivateUse1")
        aten.impl("copy_", _copy_, "PrivateUse1")
        aten.impl("empty.memory_format", _empty, "PrivateUse1")
        aten.impl("empty_strided", _empty_strided, "PrivateUse1")
        aten.impl("as_strided", _as_strided, "PrivateUse1")
        aten.impl("_local_scalar_dense", _item, "PrivateUse1")
        for name in ("detach", "alias"):
            aten.impl(
                name,
                lambda tensor: DeviceTensor(
                    tensor.values_on_device, tensor.memory, tensor.span
                ),
                "PrivateUse1",
            )
        if hasattr(torch.ops.fbgemm, "batch_index_select_dim0"):
            _register_gradients()
        # The collectives of TorchRec, which gloo runs on the values.
        c10d = torch.library.Library("c10d", "IMPL")
        _libraries.append(c10d)
        for name in ("alltoall_base_", "_reduce_scatter_base_", "_allgather_base_"):
            collective = getattr(torch.ops.c10d, name).default
            c10d.impl(name, partial(_run, collective), "PrivateUse1")
        # torch's autograd of this view makes a plain tensor of it. No program here
        # differentiates it.
        aten.impl("view.dtype", _view_as_dtype, "AutogradPrivateUse1")
        # An operator of Python, such as those of graphs, runs below autograd, where the
        # views of torch are plain tensors too.
        aten.impl(
            "view.dtype", _view_below_autograd, "ADInplaceOrView", with_keyset=True
        )
        device_copies.streams_by_type[NAME] = streams.DeviceStreams
        device_interface.kernels_by_type[NAME] = SimulatedKernels
    return torch.device(NAME, 0)


def _register_gradients() -> None:
    """Gives the tensors of the device a gradient in the operators of FBGEMM whose own
    functions for autograd (fbgemm-gpu 1.8.0) give them none.
    """
    fbgemm = torch.library.Library("fbgemm", "IMPL")
    simulated = torch.library.Library("simulated", "DEF")
    _libraries.extend((fbgemm, simulated))
    fbgemm.impl("batch_index_select_dim0", _SelectedBags.apply, "AutogradPrivateUse1")
    simulated.define(
        "select_bags(Tensor inputs, Tensor indices, int[] counts, int[] rows,"
        " int[] columns, bool permuted) -> Tensor"
    )
    simulated.impl("select_bags", torch.ops.fbgemm.batch_index_select_dim0, "CPU")
    simulated.define(
        "select_gradient(Tensor grad, Tensor indices, int inputs, int[] counts,"
        " int[] rows, int[] columns, bool permuted) -> Tensor"
    )
    simulated.impl("select_gradient", _select_gradient, "CPU")
    fbgemm.impl(
        "permute_pooled_embs_auto_grad_split",
        _PermutedColumns.apply,
        "AutogradPrivateUse1",
    )


class _SelectedBags(torch.autograd.Function):
    """FBGEMM's op that repeats the bags of a batch of variable sizes."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        indices: torch.Tensor,
        counts: list[int],
        rows: list[int],
        columns: list[int],
        permuted: bool = False,
    ) -> torch.Tensor:
        ctx.indices = indices
        ctx.sizes = (inputs.numel(), counts, rows, columns, permuted)
        selected: torch.Tensor = torch.ops.simulated.select_bags(
            inputs, indices, counts, rows, columns, permuted
        )
        return selected

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = torch.ops.simulated.select_gradient(
            grads[0].contiguous(), ctx.indices, *ctx.sizes
        )
        return grad, None, None, None, None, None


def _select_gradient(
    grad: torch.Tensor,
    indices: torch.Tensor,
    inputs: int,
    counts: list[int],
    rows: list[int],
    columns: list[int],
    permuted: bool,
) -> torch.Tensor:
    """Returns the gradient that FBGEMM's op has on the host."""
    with torch.enable_grad():
        leaf = torch.zeros(inputs, requires_grad=True)
        selected = torch.ops.fbgemm.batch_index_select_dim0(
            leaf, indices, counts, rows, columns, permuted
        )
        (gradient,) = torch.autograd.grad(selected, leaf, grad)
    return gradient


class _PermutedColumns(torch.autograd.Function):
    """FBGEMM's op that puts the columns of shards in order."""

    @staticmethod
    def forward(
        ctx: Any,
        pooled: torch.Tensor,
        offset_dims: torch.Tensor,
        permutation: torch.Tensor,
        inverse_offset_dims: torch.Tensor,
        inverse_permutation: torch.Tensor,
    ) -> torch.Tensor:
        order = (offset_dims, permutation)
        inverse = (inverse_offset_dims, inverse_permutation)
        ctx.lists = (*inverse, *order)
        permuted: torch.Tensor = torch.ops.fbgemm.permute_pooled_embs_split(
            pooled, *order, *inverse
        )
        return permuted

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        grad = torch.ops.fbgemm.permute_pooled_embs_split(
            grads[0].contiguous(), *ctx.lists
        )
        return grad, None, None, None, None


PREFIX = "rows."
"""The beginning of the names of these kernels in ``streams.order``."""

WRITTEN: dict[str, tuple[str, ...]] = {
    "gather": ("out",),
    "scatter": ("arena",),
    "pool": ("out",),
    "locate": ("sources", "scales", "tables"),
    "sort": (),
    "weight_gradients": ("out",),
    "check_finite": ("failed",),
    "update": ("arena", "skipped"),
}
"""The arguments that each kernel writes."""

LAUNCHES = {"update": 2}
"""The number of kernels of a call, 1 unless it is here."""


_failing_kernel: str | None = None


@contextmanager
def failing_kernel(name: str | None) -> Iterator[None]:
    """Lets each launch of a kernel raise RuntimeError, or only ``"compiling NAME"``, and
    with ``new_sums``, that there is no memory.
    """
    global _failing_kernel
    _failing_kernel = name
    try:
        yield
    finally:
        _failing_kernel = None


class SimulatedKernels:
    """``DeviceKernels`` of the device."""

    def __init__(self) -> None:
        self._reference = ReferenceKernels()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in WRITTEN:
            raise AttributeError(name)
        return partial(self._launch, name)

    def new_sums(
        self, kind: device_interface.UpdateKind, positions: int, device: torch.device
    ) -> torch.Tensor:
        """See ``DeviceKernels.new_sums``."""
        if _failing_kernel == "new_sums":
            raise torch.OutOfMemoryError("out of memory")
        return torch.empty(1, device=device)

    def _launch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("compile_only", False):
            if _failing_kernel == f"compiling {name}":
                raise RuntimeError(f"the kernel {name} was not compiled")
            return None
        if name == _failing_kernel:
            raise RuntimeError(f"the kernel {name} has failed")
        kernel = getattr(self._reference, name)
        arguments = inspect.signature(kernel).bind(*args, **kwargs).arguments
        values = {}
        for argument, value in arguments.items():
            values[argument] = value
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, DeviceTensor):
                raise NotImplementedError(f"{name} got {argument} on the host")
            writes = argument in WRITTEN[name]
            if writes and value.is_copy_of_a_view:
                raise NotImplementedError(f"{name} got {argument} that is no memory")
            value.use(writes=writes)
            values[argument] = value.values_on_device
        result = kernel(**values)
        for _ in range(LAUNCHES.get(name, 1)):
            streams.order.append(("kernel", PREFIX + name, streams.current()))
        if result is None:
            return None
        tensors = tuple(DeviceTensor(output) for output in result)
        for tensor in tensors:
            tensor.use(writes=True)
        return tensors


def _values(value: Any) -> Any:
    return value.values_on_device if isinstance(value, DeviceTensor) else value


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator of torch, FBGEMM or TorchRec on the values of its device
    tensors.
    """
    written = _written(op, args, kwargs)
    for tensor in written:
        if tensor.is_copy_of_a_view:
            raise NotImplementedError(f"{op} writes to a view that is not contiguous")
    if op.namespace.startswith("recstore"):
        raise NotImplementedError(
            f"{op} got a tensor on the device, whose memory the host cannot read"
        )
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    values = tree_map(_values, args)
    named = {
        key: tree_map(_values, value)
        for key, value in kwargs.items()
        if key != "device"
    }
    is_view = _is_view(op)
    if is_view:
        result = op(*values, **named)
        is_view = all(view.is_contiguous() for view in tree_leaves(result))
    if not is_view:
        for tensor in tensors:
            tensor.use(writes=any(tensor is other for other in written))
        result = op(*values, **named)
    device = kwargs.get("device")
    is_to_host = device is not None and torch.device(device).type == "cpu"
    inputs = {id(_values(leaf)): leaf for leaf in leaves}
    owners = {_storage(tensor.values_on_device): tensor for tensor in tensors}
    owners.pop(0, None)  # empty tensors

    def out(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            return value
        if id(value) in inputs:  # changed in place
            return inputs[id(value)]
        if is_to_host:
            return value
        return _output(value, owners.get(_storage(value)))

    if not is_view:
        streams.order.append(("kernel", str(op), streams.current()))
    return tree_map(out, result)


def _written(op: Any, args: Any, kwargs: Any) -> list[DeviceTensor]:
    """Returns the tensors on the device that an operator writes."""
    written = []
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, DeviceTensor):
                written.append(leaf)
    return written


def _is_view(op: Any) -> bool:
    """Whether an operator returns its argument in another shape, and moves nothing."""
    return any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in op._schema.arguments
    )


def _output(values: torch.Tensor, owner: DeviceTensor | None) -> DeviceTensor:
    """Returns an output of an operator, which may be a view of an input, its owner."""
    if owner is None:
        tensor = DeviceTensor(values)
        tensor.use(writes=True)
        return tensor
    # The copy of a view does not know where its parts are in the memory.
    span = owner.span if owner.is_copy_of_a_view else None
    return DeviceTensor(values, owner.memory, span)


def _storage(values: torch.Tensor) -> int:
    return values.untyped_storage().data_ptr()


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Copies between the host and the device: at once, or when the stream is waited
    for.
    """
    if isinstance(target, DeviceTensor):
        way, host, on_device = "up", source, target
    else:
        assert isinstance(source, DeviceTensor)
        way, host, on_device = "down", target, source
    size = source.numel() * source.element_size()
    values, into = _values(source), _values(target)
    streams.copy(
        Copy(
            way,
            size,
            tuple(source.shape),
            source.dtype,
            not non_blocking,
            streams.is_pinned(host),
            streams.current(),
        ),
        on_device.end_of_copy(),
        partial(_move, values, into),
        host,
    )


def _move(values: torch.Tensor, into: torch.Tensor) -> None:
    with torch.profiler.record_function(streams.SIMULATION):
        into.copy_(values)


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
    to = tensor.device.type if device is None else torch.device(device).type
    if to == tensor.device.type:
        assert isinstance(tensor, DeviceTensor)
        tensor.use(writes=False)
        streams.order.append(("kernel", "aten._to_copy", streams.current()))
        return _output(
            tensor.values_on_device.to(dtype or tensor.dtype, copy=True), None
        )
    # The device casts, so that the copy has the dtype of the result, as long as it is
    # on its way up.
    source = (
        tensor.to(dtype) if dtype is not None and dtype is not tensor.dtype else tensor
    )
    values = torch.empty(tensor.shape, dtype=source.dtype)
    target = DeviceTensor(values) if to == NAME else values
    _copy(source, target, non_blocking)
    return target


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if isinstance(target, DeviceTensor) and target.is_copy_of_a_view:
        raise NotImplementedError("copy_ writes to a view that is not contiguous")
    if source.device.type != target.device.type:
        _copy(source, target, non_blocking)
        return target
    assert isinstance(source, DeviceTensor)
    assert isinstance(target, DeviceTensor)
    source.use(writes=False)
    target.use(writes=True)
    streams.order.append(("kernel", "aten.copy_", streams.current()))
    target.values_on_device.copy_(source.values_on_device)
    return target


def _copy_(
    target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    return _copy_from(source, target, non_blocking)


def _as_strided(
    tensor: DeviceTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    # Slices of slices come here with the offset in the tensor, which says that its own
    # offset is 0.
    values = tensor.values_on_device
    view = values.as_strided(
        size, stride, values.storage_offset() + (storage_offset or 0)
    )
    if not view.is_contiguous():
        tensor.use(writes=False)
    return _output(view, tensor)


def _view_as_dtype(tensor: DeviceTensor, dtype: torch.dtype) -> torch.Tensor:
    return _output(tensor.values_on_device.view(dtype), tensor)


def _view_below_autograd(
    keys: torch._C.DispatchKeySet, tensor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    if isinstance(tensor, DeviceTensor):
        return _view_as_dtype(tensor, dtype)
    below = keys & torch._C._after_ADInplaceOrView_keyset
    view: torch.Tensor = torch.ops.aten.view.dtype.redispatch(below, tensor, dtype)
    return view


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
    size: Any,
    stride: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    return DeviceTensor(
        torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype())
    )


def _item(tensor: torch.Tensor) -> Any:
    found = torch.empty(tensor.shape, dtype=tensor.dtype)
    _copy(tensor, found, False)
    return found.item()
