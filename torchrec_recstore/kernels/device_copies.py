"""Copies between the host, which has the rows, and an accelerator, which has batches.

All copies go through page-locked ("pinned") host memory and do not block. torch's
allocator of pinned memory keeps the buffers, in sizes of powers of two, and does not
hand out a buffer again before the copies that use it have ended and no tensor refers to
it. The host waits for the event of a copy, and never for a stream or for the device.

A copy to the host runs on the current stream, or on a stream of its own (``beside_current``), so
that the current stream goes on in the meantime. A copy to the device runs on the
current stream, whose next kernels therefore see its result.

Tests: tests/device/test_device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrec_recstore.torch_seams import is_traced_by_dispatch


class CopyTarget(NamedTuple):
    """The device and the data type in which rows leave the host."""

    device: torch.device
    dtype: torch.dtype


class DeviceStreams:
    """The streams, the events and the pinned memory of a device of torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side_stream: Any = torch.Stream(device)
        """The stream of the copies that run beside the current stream."""
        self.up_stream: Any = torch.Stream(device)
        """The stream on which rows and batches go to the device."""
        self.down_stream: Any = torch.Stream(device)
        """The stream on which rows leave the device."""

    def current(self) -> Any:
        """Returns the current stream of this thread."""
        return torch.accelerator.current_stream(self._device)

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        """Makes a stream the current one of this thread, and its device the current
        device.

        ``with stream`` keeps in the stream itself what was current before, and threads
        share the streams of a device. Before torch's pull request 176568, a second
        thread could not enter a stream that the first one had entered.
        """
        device_index = torch.accelerator.current_device_index()
        before = self.current()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device_index)

    def event(self) -> Any:
        """Returns a new event."""
        return torch.Event(self._device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor in pinned memory, without values."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keeps the memory of a tensor on the device, when it is freed, until a stream
        has used it.
        """
        tensor.record_stream(stream)


streams_by_type: dict[str, Callable[[torch.device], DeviceStreams]] = {}
"""The streams of device types for which torch has none: of devices that are written in
Python.
"""


@cache
def streams_of(device: torch.device) -> DeviceStreams:
    """Returns the streams of a device."""
    return streams_by_type.get(device.type, DeviceStreams)(device)


class Arriving:
    """A tensor that is being copied to the host.

    The tensor on the device is kept until the copy has ended.

    With ``beside_current`` the copy runs on a stream of its own, after what the current stream
    has been given so far.
    """

    def __init__(self, tensor: Tensor, *, beside_current: bool = False) -> None:
        streams = streams_of(tensor.device)
        # The tensor itself, and not an alias: autograd does not give away a gradient
        # that somebody holds.
        self._source: Tensor | None = tensor.contiguous()
        self._version = self._source._version if beside_current else None
        self._host = streams.pinned(self._source.shape, self._source.dtype)
        stream = streams.current()
        if beside_current:
            tensor_is_ready = streams.event()
            tensor_is_ready.record(stream)
            stream = streams.side_stream
            stream.wait_event(tensor_is_ready)
        with streams.entered(stream) if beside_current else nullcontext():
            self._host.copy_(self._source, non_blocking=True)
        self._arrived = streams.event()
        self._arrived.record(stream)

    def wait(self) -> Tensor:
        """Waits for the copy, and returns the tensor on the host.

        Raises RuntimeError if the tensor has been changed since, on a stream that does
        not wait for the copy.
        """
        self._arrived.synchronize()
        is_checked = self._source is not None and self._version is not None
        if is_checked and self._source._version != self._version:  # type: ignore[union-attr]
            raise RuntimeError(
                "the gradient of RecStore rows was changed in place after backward,"
                " while it was copied to the host, so that the rows cannot be updated"
                " with it: change a clone of the gradient"
            )
        self._source = None
        return self._host


def staging(shape: Sequence[int], to: CopyTarget | None) -> Tensor | None:
    """Returns pinned memory, float32, for rows that are going to leave the host.

    A lookup writes its output there, so that the host does not copy the output once
    more. Returns None if the output stays on the host or leaves it in another data
    type, which :func:`up` converts, and for a shape with a negative size, which only a
    batch with invalid arguments has.
    """
    if to is None or to.dtype is not torch.float32 or min(shape) < 0:
        return None
    return streams_of(to.device).pinned(shape, to.dtype)


def up(rows: Tensor, to: CopyTarget, *, staged: Tensor | None = None) -> Tensor:
    """Returns a copy of rows on a device.

    The copy has been queued on the current stream. If ``rows`` is ``staged``, which is
    a result of :func:`staging`, the rows are copied from there.
    """
    if rows is not staged:
        staged = streams_of(to.device).pinned(rows.shape, to.dtype).copy_(rows)
    copy = torch.empty(rows.shape, dtype=to.dtype, device=to.device)
    return copy.copy_(staged, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors of one device on the host.

    They are copied together, in one copy, for which the call waits.

    The tensors have one dimension, and a dtype of 4 or 8 bytes each. Those that are on
    the host are returned as they are.
    """
    if tensors[0].device.type == "cpu":
        return list(tensors)
    if traced():
        return [tensor.to("cpu") for tensor in tensors]
    if len(tensors) == 1:
        return [Arriving(tensors[0]).wait()]
    # Elements of 8 bytes come first, so that each part begins where its dtype may
    # begin.
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number].itemsize)
    words = []
    for number in order:
        tensor = tensors[number].detach().contiguous()
        words.append(tensor.view(torch.int32))
    all_words = Arriving(torch.cat(words)).wait()
    copies = list(tensors)
    first = 0
    for number, tensor_words in zip(order, words, strict=True):
        end = first + len(tensor_words)
        copy_words = all_words[first:end]
        copies[number] = copy_words.view(tensors[number].dtype)
        first = end
    return copies


def to_device(rows: Tensor, to: CopyTarget) -> Tensor:
    """Returns rows on a device. In backward, their gradients are copied to the host."""
    if to.device.type == "cpu" or traced():
        return rows.to(to.device, to.dtype)
    return _ToDevice.apply(rows, to)  # type: ignore[no-any-return, no-untyped-call]


def weights_to_host(weights: Tensor) -> Tensor:
    """Returns the weights of ids, (N,), on the host.

    In backward, their gradients are copied to the device.
    """
    if weights.device.type == "cpu" or traced():
        return weights.to("cpu")
    return _ToHost.apply(weights)  # type: ignore[no-any-return, no-untyped-call]


def traced() -> bool:
    """Returns whether a graph is being made.

    A graph has plain copies, because it has no streams.
    """
    return torch.compiler.is_compiling() or is_traced_by_dispatch()


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: CopyTarget) -> Tensor:
        ctx.dtype = rows.dtype
        return up(rows, to)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return Arriving(grads[0], beside_current=True).wait().to(ctx.dtype), None


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor) -> Tensor:
        ctx.to = CopyTarget(weights.device, weights.dtype)
        return Arriving(weights).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return up(grads[0], ctx.to)
