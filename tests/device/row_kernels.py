"""Programs that run the kernels for rows on the device, with steps of several streams
in and out of order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.device import simulated, streams
from tests.kernels.device_cases import SPECIAL
from tests.kernels.device_work import Case, Tables, check_case, settings_of
from torchrec_recstore.kernels.device_interface import kernels_of
from torchrec_recstore.optim import RowWiseAdagrad


class KernelsOfHostTensors:
    """The kernels of the device, for tensors on the host, which are copied to the
    device and back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels = kernels_of(device)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

        def call(*arguments: Any) -> Any:
            on_device = [self._up(argument) for argument in arguments]
            results = kernel(*on_device)
            for argument, moved in zip(arguments, on_device, strict=True):
                if isinstance(argument, Tensor):
                    argument.copy_(moved)
            return None if results is None else tuple(r.cpu() for r in results)

        return call

    def _up(self, argument: Any) -> Any:
        return argument.to(self._device) if isinstance(argument, Tensor) else argument


def bits(device: torch.device) -> list[str]:
    """Cases whose steps have the bits of the core."""
    kernels = KernelsOfHostTensors(device)
    names = ["two_tables", "bfloat16_stochastic", "hot"]
    for name in names:
        check_case(SPECIAL[name], kernels)  # type: ignore[arg-type]
    return names


class Work:
    """The uses of an arena by three streams: C computes, U copies up, D copies down."""

    def __init__(self, device: torch.device) -> None:
        self.tables = Tables(Case([RowWiseAdagrad(lr=0.1)]))
        self.kernels = kernels_of(device)
        self.device = device
        rows = self.tables.case.rows
        self.arena = self.tables.arena(torch.arange(rows)[None]).to(device)
        batch = self.tables.batch(0)
        self.offsets = batch.offsets.to(device)
        self.grad = batch.grad.to(device)
        self.slots = batch.ids.int().to(device)
        case = self.tables.case
        segment = [0, case.bags, 0, case.columns, 0]
        self.segments = torch.tensor([segment]).to(device)
        self.settings = [setting.to(device) for setting in settings_of(self.tables)]
        self.victims = torch.arange(3, dtype=torch.int32).to(device)
        shape = (3, self.tables.layout.stride)
        self.staged = torch.ones(shape).to(device)
        self.gathered = torch.empty(shape, device=device)
        self.streams = streams.DeviceStreams(device)
        self.landed = self.streams.pinned(shape, torch.float32)
        self.compute = self.streams.current()
        self.upward = self.streams.side_stream
        self.downward = streams.new_stream("down")
        self.compute.synchronize()

    def pool(self) -> None:
        case = self.tables.case
        self.kernels.pool(
            self.tables.layout,
            self.arena,
            0,
            None,
            self.slots,
            self.offsets,
            None,
            self.segments,
            case.bags,
            False,
            torch.empty((case.bags, case.columns), device=self.device),
        )

    def update(self) -> None:
        count = len(self.slots)
        sources = torch.empty(count, dtype=torch.int64, device=self.device)
        scales = torch.empty(count, device=self.device)
        numbers_of_tables = torch.empty(count, dtype=torch.int32, device=self.device)
        bags = self.tables.case.bags
        self.kernels.locate(
            self.offsets,
            None,
            self.segments,
            bags,
            False,
            sources,
            scales,
            numbers_of_tables,
        )
        keys, order = self.kernels.sort(self.slots)
        self.kernels.update(
            self.tables.kind,
            self.arena,
            0,
            keys,
            order,
            0,
            count,
            sources,
            scales,
            numbers_of_tables,
            self.grad,
            *self.settings,
            None,
            None,
            None,
            self.kernels.new_sums(self.tables.kind, count, self.arena.device),
        )

    def gather(self) -> None:
        with self.streams.entered(self.upward):
            self.kernels.gather(self.arena, self.victims, self.gathered)

    def scatter(self) -> None:
        with self.streams.entered(self.upward):
            self.kernels.scatter(self.arena, self.victims, self.staged)

    def land(self) -> None:
        with self.streams.entered(self.downward):
            self.landed.copy_(self.gathered, non_blocking=True)

    def compute_waits(self) -> None:
        self.compute.wait_stream(self.upward)

    def upward_waits(self) -> None:
        self.upward.wait_stream(self.compute)

    def downward_waits(self) -> None:
        self.downward.wait_stream(self.upward)

    def gather_waits_for_landing(self) -> None:
        self.upward.wait_stream(self.downward)


ORDERS: dict[str, tuple[list[str], str, str]] = {
    "pool, then scatter": (["pool"], "upward_waits", "scatter"),
    "update, then gather": (["update"], "upward_waits", "gather"),
    "update, then scatter": (["update"], "upward_waits", "scatter"),
    "scatter, then pool": (["scatter"], "compute_waits", "pool"),
    "scatter, then update": (["scatter"], "compute_waits", "update"),
    "gather, then update": (["gather"], "compute_waits", "update"),
    "gather, then the copy down": (["gather"], "downward_waits", "land"),
    "the copy down, then the next gather": (
        ["gather", "downward_waits", "land"],
        "gather_waits_for_landing",
        "gather",
    ),
}
"""Uses of an arena, the event that the last use needs, and the last use."""


def orders(device: torch.device) -> dict[str, tuple[str, str]]:
    """What the device says of each order without its event, and with it."""
    return {
        name: (
            _message_of(device, [*first, last]),
            _message_of(device, [*first, event, last]),
        )
        for name, (first, event, last) in ORDERS.items()
    }


def _message_of(device: torch.device, uses: list[str]) -> str:
    work = Work(device)
    try:
        for use in uses:
            getattr(work, use)()
        for stream in (work.upward, work.downward, work.compute):
            stream.synchronize()
    except streams.Race as race:
        return str(race)
    finally:
        streams.forget()
    return "nothing"


def refused(device: torch.device) -> list[str]:
    """What is said of arguments that are on the host, and the kernels of a step."""
    work = Work(device)
    messages = []
    try:
        work.kernels.gather(work.arena, torch.arange(3).int(), work.gathered)
    except NotImplementedError as error:
        messages.append(str(error))
    with streams.counted() as counts:
        work.pool()
        work.update()
    return [*messages, *counts.named(simulated.PREFIX)]


CHECKS: dict[str, Callable[[torch.device], Any]] = {
    "bits": bits,
    "orders": orders,
    "refused_by_kernels": refused,
}
