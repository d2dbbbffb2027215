"""What the device refuses or does late, and what is raised when.

Each program says in words what it has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.device import streams
from torchrec_recstore import SGD, Table, ops
from torchrec_recstore.kernels import PooledGroup, SequenceGroup, device_copies
from torchrec_recstore.kernels.device_copies import CopyTarget


def late_copies(device: torch.device) -> list[str]:
    said, of_device = [], streams.DeviceStreams(device)
    tensor = torch.full((3,), 5.0).to(device)
    buffer = of_device.pinned((3,), torch.float32)
    buffer.copy_(tensor, non_blocking=True)
    event = of_device.event()
    event.record(of_device.current())
    before = buffer[0].item()
    event.synchronize()
    seen = "nonsense" if before > 1e38 else before
    said.append(
        f"the host sees {seen} before it waits, and {buffer[0].item()} afterwards"
    )
    has_happened = set()
    for seed in range(20):
        value = tensor.cpu()[0].item()
        with streams.delays(seed):
            buffer.copy_(tensor, non_blocking=True)
            event.record(of_device.current())
            has_happened.add(event.query())
            tensor.neg_()  # after the copy, on the same stream
            event.synchronize()
            assert buffer[0].item() == value
    said.append(f"at random, an event has happened: {sorted(has_happened)}")
    return said


class Program:
    """Uses of one tensor and one pinned buffer by two streams."""

    def __init__(self, device: torch.device) -> None:
        self.streams = streams.DeviceStreams(device)
        self.tensor: Tensor | None = torch.ones(4, 3).to(device)
        self.buffer = self.streams.pinned((3,), torch.float32).fill_(6.0)
        self.streams.current().synchronize()

    def read_aside(self, row: int = 0) -> None:
        assert self.tensor is not None
        with self.streams.entered(self.streams.side_stream):
            self.buffer.copy_(self.tensor[row], non_blocking=True)

    def write_aside(self, row: int = 0) -> None:
        assert self.tensor is not None
        with self.streams.entered(self.streams.side_stream):
            self.tensor[row].copy_(self.buffer, non_blocking=True)

    def read(self, row: int = 0) -> None:
        assert self.tensor is not None
        self.tensor[row].sum()

    def write(self, row: int = 0) -> None:
        assert self.tensor is not None
        self.tensor[row].fill_(2.0)

    def free(self) -> None:
        self.tensor = None

    def change_buffer(self) -> None:
        self.buffer.fill_(7.0)

    def wait(self) -> None:
        """Each stream waits for what the other one has been given."""
        self.streams.current().wait_stream(self.streams.side_stream)
        self.streams.side_stream.wait_stream(self.streams.current())

    def host_waits(self) -> None:
        """The host waits for both streams."""
        self.streams.side_stream.synchronize()
        self.streams.current().synchronize()


MISTAKES: dict[str, tuple[str, str]] = {
    "read after write": ("write", "read_aside"),
    "read after a copy up": ("write_aside", "read"),
    "write after read": ("read_aside", "write"),
    "copy up after read": ("read", "write_aside"),
    "write after write": ("write_aside", "write"),
    "freed while it is read": ("read_aside", "free"),
    "freed while it is written": ("write_aside", "free"),
}
"""Two uses of a tensor by two streams, which need an event between them."""


def mistakes(device: torch.device) -> dict[str, list[str]]:
    """What the device says of each mistake, of the same uses with an event of the
    streams or a wait of the host between them, and of uses of two rows of the tensor.
    """
    messages: dict[str, list[str]] = {}
    for name, (first, second) in MISTAKES.items():
        messages[name] = [
            _message_of(device, [first, *between, second])
            for between in ([], ["wait"], ["host_waits"])
        ]
        if second != "free":
            program = Program(device)
            getattr(program, first)(0)
            getattr(program, second)(1)
            messages[name].append("nothing")
    for first in ("read_aside", "write_aside"):
        messages[f"{first}, and the host changes the buffer"] = [
            _message_of(device, [first, *between, "change_buffer"])
            for between in ([], ["wait"], ["host_waits"])
        ]
    return messages


def _message_of(device: torch.device, uses: list[str]) -> str:
    program = Program(device)
    try:
        for use in uses:
            getattr(program, use)()
        program.host_waits()
    except streams.Race as race:
        return str(race)
    finally:
        streams.forget()
    return "nothing"


def failures(device: torch.device) -> list[tuple[str, int, bool]]:
    """For a failure of each of three copies: the error, the number of copies that were
    queued, and whether a step without a failure comes next.
    """
    outcomes = []
    rows = PooledGroup([Table(4, optimizer=SGD(lr=1.0))], [0], "sum")
    step = partial(
        rows, torch.arange(2), torch.arange(3), to=CopyTarget(device, torch.float32)
    )
    for copies_before in range(3):
        streams.copies.clear()
        error = "none"
        with streams.failing(copies_before) as failure:
            try:
                _train(step)
            except MemoryError as raised:
                error = str(raised)
            assert failure.has_happened == (error != "none")
        queued = len(streams.copies)
        ops.finish_updates()
        updates = rows.tables[0].stats().updates
        _train(step)
        outcomes.append((error, queued, rows.tables[0].stats().updates > updates))
    return outcomes


def counts(device: torch.device) -> dict[str, Any]:
    """Counts of a program with known copies and kernels."""
    staged = streams.DeviceStreams(device).pinned((5,), torch.float32).fill_(1.0)
    with streams.counted() as seen:
        rows = torch.empty(5, device=device)
        rows.copy_(staged, non_blocking=True)
        half = (rows[1:3] * 2).view(2, 1)
        half.to("cpu")
    return {"up": seen.up, "down": seen.down, "kernels": seen.kernels}


LARGE = 256 * 32
"""The elements of the output in :func:`host_copies`, which nothing else has."""


def host_copies(device: torch.device) -> dict[str, tuple[int, list[str]]]:
    """How often the host copies rows and gradients on their way in a step, and the
    copies over the bus.
    """
    ids = torch.arange(256)
    copies_of = {}
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        to = CopyTarget(device, dtype)
        bags = PooledGroup([Table(32, optimizer=SGD(lr=1.0))], [0], "sum")
        rows = SequenceGroup([Table(32, optimizer=SGD(lr=1.0))])
        accumulated = PooledGroup(
            [Table(32, optimizer=SGD(lr=1.0))], [0], "sum", accumulation_steps=2
        )
        look_ups = {
            "bags": partial(bags, ids, torch.arange(257), to=to),
            "accumulated bags": partial(accumulated, ids, torch.arange(257), to=to),
            "sequences": partial(rows, ids, [256], to=to),
        }
        for kind, look_up in look_ups.items():
            copies_of[f"{name} {kind}"] = _host_copies_of(partial(_train, look_up))
            copies_of[f"{name} {kind}, evaluation"] = _host_copies_of(
                partial(look_up, train=False)
            )
    return copies_of


def _train(look_up: Callable[..., Tensor]) -> None:
    out = look_up(train=True)
    out.backward(torch.ones_like(out))
    ops.finish_updates()


def _host_copies_of(step: Callable[[], object]) -> tuple[int, list[str]]:
    step()
    streams.copies.clear()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        step()
    large = [copy for copy in streams.copies if math.prod(copy.shape) == LARGE]
    calls = [event for event in profile.events() if _is_large_copy(event)]
    # Each copy over the bus is such a call, too.
    return len(calls) - len(large), [copy.way for copy in large]


def _is_large_copy(event: Any) -> bool:
    """Whether an event of a profile is a copy of an output, a clone or a cast, that the
    program itself has called.
    """
    shapes = event.input_shapes
    if event.name != "aten::copy_" or not shapes or math.prod(shapes[0]) != LARGE:
        return False
    callers = []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        callers.append(event.name)
    return "aten::copy_" not in callers and streams.SIMULATION not in callers


def streams_of_torch(device: torch.device) -> list[str]:
    """The calls that ``Arriving`` makes, with streams of torch.

    Those of a device in Python do nothing.

    Their events cannot be waited for.
    """
    of_torch = device_copies.DeviceStreams(device)
    event = of_torch.event()
    event.record(of_torch.current())
    of_torch.side_stream.wait_event(event)
    with of_torch.entered(of_torch.side_stream):
        event.record(of_torch.side_stream)
        # Groups of several threads enter the same stream at the same time.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_enter, of_torch).result()
    return [
        str(
            isinstance(event, torch.Event)
            and isinstance(of_torch.current(), torch.Stream)
        )
    ]


def _enter(of_torch: device_copies.DeviceStreams) -> None:
    with of_torch.entered(of_torch.side_stream):
        of_torch.event().record(of_torch.side_stream)


def failing_updates(device: torch.device) -> list[str]:
    said, to = [], CopyTarget(device, torch.float32)
    ids, offsets = torch.arange(2), torch.arange(3)
    tables = [
        Table(4, optimizer=SGD(lr=1.0), name=name) for name in ("t_user", "t_item")
    ]
    failing, other = (PooledGroup([table], [0], "sum") for table in tables)
    failing.update = _fail  # type: ignore[method-assign, assignment]
    before = tables[1].lookup(ids, train=True)
    outputs = [
        group(ids, offsets, train=True, to=to).sum() for group in (failing, other)
    ]
    for out in outputs:
        out.backward()
    try:
        tables[0].stats()
    except RuntimeError as error:
        said.append(str(error))
    said.append(
        f"the other table was updated: {torch.equal(tables[1].lookup(ids), before - 1)}"
    )
    other(ids, offsets, train=True, to=to).sum().backward()
    assert ops.waiting_updates
    tables[1].close()
    said.append(f"closed after the update: {not ops.waiting_updates}")
    return said


def changed_gradients(device: torch.device) -> list[str]:
    """Somebody changes a gradient after backward, before it has been used for an
    update.

    The device refuses a stream that does not wait for the copy to the host.
    """
    table, held, said = Table(4, optimizer=SGD(lr=1.0)), [], []
    group = PooledGroup([table], [0], "sum")
    for change in (False, True):
        out = group(
            torch.arange(2),
            torch.arange(3),
            train=True,
            to=CopyTarget(device, torch.float32),
        )
        out.register_hook(held.append)
        (out * 2).sum().backward()
        if change:
            try:
                held[-1].zero_()
            except streams.Race:
                said.append("the device refuses the change")
            of_device = streams.DeviceStreams(device)
            of_device.current().wait_stream(of_device.side_stream)
            held[-1].zero_()
        try:
            said.append(f"{table.stats().updates} updates")
        except RuntimeError as error:
            said.append(str(error))
    return said


def _fail(*arguments: Any) -> None:
    raise RuntimeError("t_user: the update failed")


def misuse(device: torch.device) -> list[str]:
    ids = torch.arange(3).to(device)
    said = []
    calls: list[Callable[[], object]] = [
        lambda: ops.mix_ids(ids, False),
        lambda: Table(4).lookup(ids),
    ]
    for call in calls:
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            said.append(str(error))
    return said


CHECKS: dict[str, Callable[[torch.device], Any]] = {
    "late_copies": late_copies,
    "mistakes": mistakes,
    "counts": counts,
    "failures": failures,
    "host_copies": host_copies,
    "streams_of_torch": streams_of_torch,
    "failing_updates": failing_updates,
    "changed_gradients": changed_gradients,
    "misuse": misuse,
}
