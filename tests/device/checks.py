"""What the device refuses or does late, and what is raised when.

Each program says in words what it has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.device import streams
from torchrec_recstore import SGD, Table, ops
from torchrec_recstore.kernels import PooledGroup, device_copies
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
    staged = of_device.pinned((3,), torch.float32).fill_(6.0)
    there = torch.empty(3, device=device)
    there.copy_(staged, non_blocking=True)
    staged.fill_(7.0)
    said.append(
        "what the host writes after it has queued a copy goes up:"
        f" {there.cpu()[0].item()}"
    )
    made = tensor + 1
    try:
        with of_device.side_stream:
            buffer.copy_(made, non_blocking=True)
    except streams.Race:
        said.append("a stream that does not wait for another one is refused")
    return said


def streams_of_torch(device: torch.device) -> list[str]:
    """The calls that ``Arriving`` makes, with streams of torch.

    Those of a device in Python do nothing.

    Their events cannot be waited for.
    """
    of_torch = device_copies.DeviceStreams(device)
    event = of_torch.event()
    event.record(of_torch.current())
    of_torch.side_stream.wait_event(event)
    with of_torch.side_stream:
        event.record(of_torch.side_stream)
    return [
        str(
            isinstance(event, torch.Event)
            and isinstance(of_torch.current(), torch.Stream)
        )
    ]


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
    """Somebody changes a gradient after backward, on a stream that does not wait for
    the copy to the host.
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


CHECKS: dict[str, Callable[[torch.device], list[str]]] = {
    "late_copies": late_copies,
    "streams_of_torch": streams_of_torch,
    "failing_updates": failing_updates,
    "changed_gradients": changed_gradients,
    "misuse": misuse,
}
