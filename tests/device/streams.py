"""Streams, events and pinned memory of the simulated device.

What may run late runs late.

A copy that does not block is queued on the current stream. It runs when the host waits
for an event that was recorded after it, when the stream is waited for, or when an
operator of a stream that comes after it uses its memory. Until then, the host's side of
a copy to the host has nonsense in it. So a program that reads the host's buffer before
the copy has ended, or changes the buffer of a copy to the device too early, gets wrong
numbers.

Operators run at once. Each stream knows what it comes after, by a vector clock: an
operator or a copy that uses memory which another stream has written, without an event
between them, raises :class:`Race`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NONSENSE = 0x7F  # each byte of memory that has not been copied yet


class Race(RuntimeError):
    """A stream uses memory that another stream writes, and no event is between them."""


@dataclass(frozen=True)
class Copy:
    """A copy between the host and the device: ``"down"`` to the host, or ``"up"`` to
    the device.
    """

    way: str
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocking: bool
    pinned: bool
    stream: str


copies: list[Copy] = []
"""The copies so far, in the order in which they were queued.

Clear the list before the step that is looked at.
"""

order: list[tuple[Any, ...]] = []
"""What has happened: ``("copy", Copy)``, ``("record", event, stream)``, ``("wait",
stream, event)``, ``("host waits", event)`` and ``("synchronize", stream)``, which
blocks the host for all that the stream has been given.

Tests add marks.
"""


class Stream:
    """A stream: what has been queued and has not run, and how far it comes after each
    stream.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[Stream, int] = {self: 0}
        self.queue: deque[tuple[int, Callable[[], None]]] = deque()

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def wait_event(self, event: Event) -> None:
        order.append(("wait", self.name, event.name))
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def __enter__(self) -> Stream:
        _local.stack = [*_stack(), self]
        return self

    def __exit__(self, *error: object) -> None:
        _local.stack = _stack()[:-1]


class Event:
    """An event: the point of a stream where it was last recorded."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.name = f"event {Event.made}"
        self.clock: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        stream.tick()
        self.clock = dict(stream.clock)
        order.append(("record", self.name, stream.name))

    def synchronize(self) -> None:
        order.append(("host waits", self.name))
        _run_until(self.clock)


_default = Stream("default")
_aside = Stream("aside")
_local = threading.local()
_lock = threading.RLock()
_pinned: set[int] = set()


def _stack() -> list[Stream]:
    return getattr(_local, "stack", [])


def _stream() -> Stream:
    return (_stack() or [_default])[-1]


def current() -> str:
    """The name of the current stream of this thread."""
    return _stream().name


def _run_until(clock: dict[Stream, int]) -> None:
    """Runs what the streams have been given up to these times, in the order in which it
    was given.
    """
    with _lock:
        due = []
        for stream, time in clock.items():
            while stream.queue and stream.queue[0][0] <= time:
                due.append(stream.queue.popleft())
        for _, run in due:
            run()


class Memory:
    """Memory on the device: the last write, and whether a copy that has not run uses
    it.
    """

    def __init__(self) -> None:
        self._by: tuple[Stream, int] = (_default, 0)
        self._copies = 0

    def used(self) -> None:
        """An operator of the current stream reads or writes the memory."""
        stream, (by, time) = _stream(), self._by
        if stream.clock.get(by, 0) < time:
            raise Race(
                f"stream {stream.name} uses memory that stream {by.name} writes, and"
                " waits for no event of it"
            )
        if self._copies:
            _run_until(stream.clock)

    def written(self) -> None:
        """An operator of the current stream has written the memory."""
        self._by = (_stream(), _stream().tick())

    def queue(self, run: Callable[[], None]) -> None:
        """Queues a copy from or to the memory on the current stream."""
        self._copies += 1

        def copy() -> None:
            run()
            self._copies -= 1

        stream = _stream()
        stream.queue.append((stream.tick(), copy))


def copy(
    record: Copy, memory: Memory, run: Callable[[], Any], host: Tensor | None
) -> None:
    """Queues a copy, or runs it at once if it blocks.

    Args:
        record: What is recorded of the copy.
        memory: The memory of its tensor on the device.
        run: Copies.
        host: The tensor on the host that the copy writes, if it does.
    """
    copies.append(record)
    order.append(("copy", record))
    memory.used()
    if record.blocking:
        order.append(("synchronize", record.stream))
        _run_until(_stream().clock)
        run()
    else:
        if host is not None:
            (
                host.view(torch.uint8).fill_(NONSENSE)
                if host.is_contiguous()
                else host.fill_(NONSENSE)
            )
        memory.queue(run)
    if host is None:
        memory.written()


def is_pinned(tensor: Tensor) -> bool:
    """Whether the tensor is in memory of :meth:`DeviceStreams.pinned`."""
    return tensor.untyped_storage().data_ptr() in _pinned


class DeviceStreams:
    """The device's implementation of
    ``torchrec_recstore.kernels.device_copies.DeviceStreams``.
    """

    def __init__(self, device: torch.device) -> None:
        self.side_stream = _aside

    def current(self) -> Stream:
        return _stream()

    def event(self) -> Event:
        return Event()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        address = tensor.untyped_storage().data_ptr()
        _pinned.add(address)
        # The tensor may be freed while a copy has not run: the copy keeps the memory,
        # as torch's allocator does.
        weakref.finalize(tensor.untyped_storage(), _pinned.discard, address)
        return tensor
