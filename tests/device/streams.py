"""Streams, events and pinned memory of the simulated device.

What may run late runs late.

A copy that does not block is queued on the current stream. It runs when the host waits
for an event that was recorded after it, when the stream is waited for, or when an
operator of a stream that comes after it uses its memory. Until then, the host's side of
a copy to the host has nonsense in it. :func:`delays` lets copies run earlier, at random
moments, and some events say that they have not happened.

Operators run at once. Each stream knows what it comes after, by a vector clock, and the
memory of each tensor knows which range was read and written by which stream and when.
These mistakes raise :class:`Race`:

- a stream reads or writes what another stream has written, or writes what another one
  reads, and no event is between them
- the host changes a pinned buffer before a copy from it or to it has ended
- memory on the device is freed while a stream that is not the one that allocated it
  uses it: torch gives the memory away at once

A wait of the host counts for all of its threads and for all that they launch later.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIMULATION = "the simulated device"
"""What a profile of torch calls the work of the device itself."""

NONSENSE = 0x7F  # each byte of memory that has not been copied yet


class Race(RuntimeError):
    """The result of a program depends on how fast its streams are."""


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
"""What has happened: ``("copy", Copy)``, ``("kernel", name, stream)``, ``("record",
event, stream)``, ``("wait", stream, event)``, ``("host waits", event)`` and
``("synchronize", stream)``, which blocks the host for all that the stream has been
given.

Tests add marks.
"""


@dataclass
class Counts:
    """What a part of a program has given the device to do."""

    up: list[int] = field(default_factory=list)
    """The bytes of each copy to the device."""
    down: list[int] = field(default_factory=list)
    """The bytes of each copy to the host."""
    kernels: list[str] = field(default_factory=list)
    """The name of each kernel."""

    def named(self, prefix: str) -> list[str]:
        """Returns the kernels whose names begin with the prefix."""
        return [name for name in self.kernels if name.startswith(prefix)]


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts copies, bytes and kernels while the caller runs a part of a program.

    The counts are complete at the end.
    """
    counts = Counts()
    begin = len(order)
    yield counts
    for entry in order[begin:]:
        if entry[0] == "kernel":
            counts.kernels.append(entry[1])
        if entry[0] == "copy":
            sizes = counts.up if entry[1].way == "up" else counts.down
            sizes.append(entry[1].bytes)


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

    def launch(self) -> None:
        """Begins work of the host on this stream: it comes after all that the host has
        waited for.
        """
        _run_some()
        _take_maximum(self.clock, _host)

    def wait_event(self, event: Event) -> None:
        with _lock:
            order.append(("wait", self.name, event.name))
            _take_maximum(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        with _lock:
            order.append(("synchronize", self.name))
            _host_waits(dict(self.clock))


class Event:
    """An event: the point of a stream where it was last recorded."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.name = f"event {Event.made}"
        self.clock: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = _stream() if stream is None else stream
        with _lock:
            stream.launch()
            stream.tick()
            self.clock = dict(stream.clock)
            order.append(("record", self.name, stream.name))

    def wait(self, stream: Stream | None = None) -> None:
        (_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Returns whether the event has happened.

        With :func:`delays`, an event of which nothing is queued may also be late.
        """
        with _lock:
            _run_some()
            if _is_late() or _due(self.clock, remove=False):
                return False
            _take_maximum(_host, self.clock)
            return True

    def synchronize(self) -> None:
        with _lock:
            order.append(("host waits", self.name))
            _host_waits(self.clock)


_default = Stream("default")
_aside = Stream("aside")
_upward = Stream("up")
_downward = Stream("down")
_streams = [_default, _aside, _upward, _downward]
_local = threading.local()
_lock = threading.RLock()
_host: dict[Stream, int] = {}
_pinned: dict[int, Memory] = {}
_freed_in_use: list[str] = []
_random: random.Random | None = None
_failure: Failure | None = None


def _take_maximum(clock: dict[Stream, int], other: dict[Stream, int]) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _stack() -> list[Stream]:
    return getattr(_local, "stack", [])


def _stream() -> Stream:
    return (_stack() or [_default])[-1]


def current() -> str:
    """The name of the current stream of this thread."""
    return _stream().name


def new_stream(name: str) -> Stream:
    """Returns a new stream."""
    stream = Stream(name)
    _streams.append(stream)
    return stream


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Runs queued copies at random moments, and lets events be late at random."""
    global _random
    _random = random.Random(seed)
    try:
        yield
    finally:
        _random = None


def forget() -> None:
    """Drops what has been queued and has not run, after a program that is refused."""
    with _lock:
        for stream in _streams:
            stream.queue.clear()
            _take_maximum(_host, stream.clock)
        _freed_in_use.clear()


@dataclass
class Failure:
    """A copy that is going to fail: the number of copies before it, and whether it has
    failed.
    """

    copies_before: int
    has_happened: bool = False


@contextmanager
def failing(copies_before: int) -> Iterator[Failure]:
    """Lets one copy raise MemoryError before it is queued, after ``copies_before``
    others.
    """
    global _failure
    failure = Failure(copies_before)
    _failure = failure
    try:
        yield failure
    finally:
        _failure = None


@contextmanager
def resumed(failure: Failure) -> Iterator[None]:
    """Counts the copies of a failure that has not happened yet further."""
    global _failure
    _failure = failure
    try:
        yield
    finally:
        _failure = None


def _fail_if_due() -> None:
    failure = _failure
    if failure is None or failure.has_happened:
        return
    if failure.copies_before == 0:
        failure.has_happened = True
        raise MemoryError("the device has no memory for a copy")
    failure.copies_before -= 1


def _is_late() -> bool:
    return _random is not None and _random.random() < 0.5


def _run_some() -> None:
    """With :func:`delays`, runs the first copies of random streams."""
    if _random is None:
        return
    for stream in _streams:
        while stream.queue and not _is_late():
            stream.queue.popleft()[1]()


def _due(clock: dict[Stream, int], *, remove: bool) -> list[Callable[[], None]]:
    """Returns what the streams have been given up to these times and have not run."""
    due = []
    for stream, time in clock.items():
        queued = [run for at, run in stream.queue if at <= time]
        due.extend(queued)
        if remove:
            for _ in queued:
                stream.queue.popleft()
    return due


def _run_until(clock: dict[Stream, int]) -> None:
    with _lock:
        for run in _due(clock, remove=True):
            run()


def _host_waits(clock: dict[Stream, int]) -> None:
    _run_until(clock)
    _take_maximum(_host, clock)
    check_freed()


def check_freed() -> None:
    """Raises :class:`Race` if memory has been freed while a stream used it."""
    if _freed_in_use:
        raise Race(_freed_in_use.pop())


class Access(NamedTuple):
    """A use of the bytes from ``begin`` to ``end``, exclusive, of memory."""

    stream: Stream
    time: int
    begin: int
    end: int
    writes: bool

    def is_before(self, clock: dict[Stream, int]) -> bool:
        return clock.get(self.stream, 0) >= self.time


class Memory:
    """Memory on the device, or pinned memory: which stream has used which bytes, and
    the copies that have not run.
    """

    def __init__(self) -> None:
        self._home = _stream()
        self._accesses: list[Access] = []
        self._queued: list[int] = [0]
        self._recorded: set[Stream] = set()
        self._is_pinned = False

    @classmethod
    def pinned(cls) -> Memory:
        """Returns memory of the host that torch gives away only after the copies that
        use it.
        """
        memory = cls()
        memory._is_pinned = True
        return memory

    def use(self, begin: int, end: int, *, writes: bool) -> None:
        """The current stream uses bytes of the memory, after the copies that come
        before it have run.
        """
        stream = _stream()
        with _lock:
            check_freed()
            stream.launch()
            for access in self._accesses:
                overlaps = access.begin < end and begin < access.end
                if not overlaps or not (writes or access.writes):
                    continue
                if not access.is_before(stream.clock):
                    raise Race(_conflict(stream, access, writes))
            if self._queued[0]:
                _run_until(stream.clock)
            self._note(Access(stream, stream.tick(), begin, end, writes))

    def _note(self, new: Access) -> None:
        """Adds an access, without those that come before it and add nothing."""
        remaining = []
        for access in self._accesses:
            is_inside = new.begin <= access.begin and access.end <= new.end
            is_of_stream = access.stream is new.stream and access.writes == new.writes
            if not is_inside or not (new.writes or is_of_stream):
                remaining.append(access)
        self._accesses = [*remaining, new]

    def counted(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a copy that is counted as long as it is queued.

        The copy does not keep the memory.
        """
        queued = self._queued
        queued[0] += 1

        def copy() -> None:
            queued[0] -= 1
            run()

        return copy

    def record_stream(self, stream: Stream) -> None:
        """Keeps the memory, when it is freed, until the stream has used it."""
        self._recorded.add(stream)

    def __del__(self) -> None:
        if self._is_pinned:
            return
        for access in self._accesses:
            is_waited_for = access.is_before(self._home.clock) or access.is_before(
                _host
            )
            if not is_waited_for and access.stream not in self._recorded:
                _freed_in_use.append(
                    f"memory of stream {self._home.name} is freed while stream"
                    f" {access.stream.name} uses it"
                )
                return


def _conflict(stream: Stream, access: Access, writes: bool) -> str:
    now, before = (
        "writes" if is_write else "reads" for is_write in (writes, access.writes)
    )
    return (
        f"stream {stream.name} {now} memory that stream {access.stream.name} {before},"
        " and waits for no event of it"
    )


class CopyEnds(NamedTuple):
    """One end of a copy: its memory, None for pageable memory of the host, and the
    range of its bytes there.
    """

    memory: Memory | None
    begin: int
    end: int


def copy(
    record: Copy,
    on_device: CopyEnds,
    run: Callable[[], Any],
    host: Tensor,
) -> None:
    """Queues a copy, or runs it at once if it blocks.

    Args:
        record: What is recorded of the copy.
        on_device: Its end on the device.
        run: Copies.
        host: The tensor on the host.
    """
    is_down = record.way == "down"
    with _lock:
        _fail_if_due()
        copies.append(record)
        order.append(("copy", record))
        on_host = CopyEnds(pinned_memory(host), *span(host))
        used = [(on_device, not is_down), (on_host, is_down)]
        memories = []
        for end, writes in used:
            if end.memory is not None:
                end.memory.use(end.begin, end.end, writes=writes)
                memories.append(end.memory)
        stream = _stream()
        if record.blocking:
            order.append(("synchronize", record.stream))
            _run_until(stream.clock)
            run()
            _host_waits(dict(stream.clock))
            return
        late = _checked_copy(run, host, is_down)
        for memory in memories:
            late = memory.counted(late)
        stream.queue.append((stream.tick(), late))


def _checked_copy(
    run: Callable[[], Any], host: Tensor, is_down: bool
) -> Callable[[], None]:
    """Returns a copy that raises if the host has changed its buffer in the meantime."""
    if is_down:
        if host.is_contiguous():
            host.view(torch.uint8).fill_(NONSENSE)
        else:
            host.fill_(NONSENSE)
    with torch.profiler.record_function(SIMULATION):
        before = host.clone()

    def copy() -> None:
        is_unchanged = _same_bytes(before, host)
        run()
        if not is_unchanged:
            way = "to" if is_down else "from"
            raise Race(
                f"the host has changed a buffer before a copy {way} it has ended"
            )

    return copy


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(
        one.contiguous().flatten().view(torch.uint8),
        other.contiguous().flatten().view(torch.uint8),
    )


def span(values: Tensor) -> tuple[int, int]:
    """Returns the range of bytes of a tensor in its storage."""
    begin = values.storage_offset() * values.itemsize
    if values.numel() == 0:
        return begin, begin
    last = sum(
        (size - 1) * stride
        for size, stride in zip(values.shape, values.stride(), strict=True)
    )
    return begin, begin + (last + 1) * values.itemsize


def pinned_memory(tensor: Tensor) -> Memory | None:
    """Returns the pinned memory of a tensor, or None if it is pageable."""
    return _pinned.get(tensor.untyped_storage().data_ptr())


def is_pinned(tensor: Tensor) -> bool:
    """Whether the tensor is in memory of :meth:`DeviceStreams.pinned`."""
    return pinned_memory(tensor) is not None


class DeviceStreams:
    """The device's implementation of
    ``torchrec_recstore.kernels.device_copies.DeviceStreams``.
    """

    def __init__(self, device: torch.device) -> None:
        self.side_stream = _aside
        self.up_stream = _upward
        self.down_stream = _downward

    def current(self) -> Stream:
        return _stream()

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        _local.stack = [*_stack(), stream]
        try:
            yield
        finally:
            _local.stack = _stack()[:-1]

    def event(self) -> Event:
        return Event()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        address = tensor.untyped_storage().data_ptr()
        if address:
            _pinned[address] = Memory.pinned()
            # The tensor may be freed while a copy has not run: the copy keeps the
            # memory, as torch's allocator does.
            weakref.finalize(tensor.untyped_storage(), _pinned.pop, address, None)
        return tensor

    def keep(self, tensor: Any, stream: Stream) -> None:
        tensor.memory.record_stream(stream)


def same(one: Any, other: Any) -> bool:
    """Returns whether results are equal, tensors in dictionaries and lists too."""
    return difference(one, other) == ""


def difference(one: Any, other: Any, place: str = "results") -> str:
    """Returns the first place where results differ, and what is there; "" if they are
    equal.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return "" if torch.equal(one, other) else f"{place}: {one} and {other}"
    if isinstance(one, dict) and one.keys() == other.keys():
        parts = [(key, one[key], other[key]) for key in one]
    elif isinstance(one, list) and len(one) == len(other):
        parts = [
            (number, *pair) for number, pair in enumerate(zip(one, other, strict=True))
        ]
    else:
        return "" if one == other else f"{place}: {one} and {other}"
    for key, of_one, of_other in parts:
        of_part = difference(of_one, of_other, f"{place}[{key!r}]")
        if of_part:
            return of_part
    return ""
