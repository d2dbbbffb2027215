"""Passes on a device: what kernels need of a batch, and the kernels of a lookup and of
an update in their order.

Rows are in the arenas before a kernel of this module runs, and the caller has the lock
of the arenas. Nothing here waits for the device.

Tests: tests/device/test_device_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore.kernels.device_arenas import Arena, Arenas
from torchrec_recstore.kernels.device_copies import Arriving
from torchrec_recstore.kernels.device_interface import (
    SEGMENT_FIELDS,
    DeviceKernels,
)
from torchrec_recstore.kernels.device_lookups import HostBatch, Lookups


@dataclass
class Settings:
    """The settings of an update of all tables; see ``device_interface``."""

    numbers: Tensor
    integers: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Returns the tensors, for a packed copy."""
        return {"numbers": self.numbers, "integers": self.integers}

    def equals(self, other: Settings) -> bool:
        """Returns whether the settings have the same bits."""
        same_numbers = torch.equal(
            self.numbers.view(torch.int32), other.numbers.view(torch.int32)
        )
        return same_numbers and torch.equal(self.integers, other.integers)


@dataclass
class PackedSegments:
    """The segments of a batch, arena by arena."""

    fields: Tensor
    """(S, 5) int64."""
    of_arenas: list[int]
    """The number of segments of each arena."""
    positions: list[int]
    """The number of positions of each arena."""
    most_bags: int
    """The largest number of bags of a segment."""


@dataclass
class DevicePass:
    """What kernels need of a batch on the device. A training lookup has it until its
    backward.
    """

    memory: list[Tensor]
    """The memory of the tensors of this pass on the device."""
    slots: Tensor
    """(N,) int32: the number of each position's row; see ``device_interface``."""
    staging: list[Tensor | None]
    """By arena, the rows of numbers below -1, (n, stride) float32."""
    offsets: Tensor | None
    """(bags + 1,) int32. None if each bag has one position."""
    weights: Tensor | None
    """(N,) float32."""
    segments: Tensor
    """(S, 5) int64, arena by arena."""
    packed: PackedSegments
    """The same on the host."""
    ids: Tensor | None
    """(N,) int64, if rows are rounded stochastically."""
    settings: Settings | None
    """The settings that an update needs if nothing changes until then. None for an
    evaluation.
    """
    numbers: Tensor | None
    """``settings.numbers`` on the device."""
    integers: Tensor | None
    """``settings.integers`` on the device."""


@dataclass
class PreparedUpdate:
    """An update of which nothing has changed yet."""

    grad: Tensor
    """The gradient of the output, contiguous."""
    numbers: Tensor
    integers: Tensor
    sources: Tensor
    scales: Tensor
    tables: Tensor
    keys: Tensor
    order: Tensor
    sums: list[Tensor]
    """The memory of the kernels, by arena."""
    failed: Tensor | None = None
    """(tables + 1,) int32, if a table has ``nonfinite="raise"``."""
    failed_on_host: Arriving | None = None
    weight_gradients: Arriving | None = None
    """(N,) float32, on its way to the host."""


class Passes:
    """Runs the kernels of passes.

    Args:
        lookups: The lookups of the group.
        arenas: The arenas of the tables.
        kernels: The kernels of the device.
        device: The device.
    """

    def __init__(
        self,
        lookups: Lookups,
        arenas: Arenas,
        kernels: DeviceKernels,
        device: torch.device,
    ) -> None:
        self._lookups = lookups
        self._arenas = arenas
        self._kernels = kernels
        self._device = device

    def segments(
        self, batch: HostBatch, slots: Tensor, *, all_on_device: bool
    ) -> PackedSegments:
        """Returns the segments of a batch.

        ``slots``, (N,) int32, are the numbers of the positions' rows, on the host.
        ``all_on_device`` says that none of them is negative, which takes long to find.
        """
        of_arenas: list[list[tuple[int, ...]]] = [[] for _ in self._arenas.all]
        positions = [0] * len(self._arenas.all)
        most_bags = 0
        for segment in self._lookups.segments(batch):
            number = self._arenas.of_table[segment.table]
            of_arenas[number].append(segment.fields)
            positions[number] += segment.positions
            most_bags = max(most_bags, segment.bags)
        if not all_on_device and bool((slots < 0).any()):
            positions = [int(arena.has(slots).sum()) for arena in self._arenas.all]
        fields = [segment for part in of_arenas for segment in part]
        return PackedSegments(
            fields=torch.tensor(fields, dtype=torch.int64).view(-1, SEGMENT_FIELDS),
            of_arenas=[len(part) for part in of_arenas],
            positions=positions,
            most_bags=most_bags,
        )

    def _parts(self, batch: DevicePass) -> Iterator[tuple[int, Arena, Tensor]]:
        """Yields the number of each arena that a batch uses, the arena, and the
        segments.
        """
        begin = 0
        for number, count in enumerate(batch.packed.of_arenas):
            if count:
                segments = batch.segments[begin : begin + count]
                yield number, self._arenas.all[number], segments
            begin += count

    def pool(
        self, batch: DevicePass, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Returns the output of a lookup."""
        out = torch.empty(shape, dtype=dtype, device=self._device)
        for number, arena, segments in self._parts(batch):
            self._kernels.pool(
                arena.layout,
                arena.rows,
                arena.base,
                batch.staging[number],
                batch.slots,
                batch.offsets,
                batch.weights,
                segments,
                batch.packed.most_bags,
                self._lookups.mean,
                out,
            )
        return out

    def prepare(
        self,
        batch: DevicePass,
        grad: Tensor,
        numbers: Tensor,
        integers: Tensor,
    ) -> PreparedUpdate:
        """Locates the gradient of each position, and sorts the positions.

        ``numbers`` and ``integers`` are the settings on the device.
        """
        positions = batch.slots.shape
        sources = torch.empty(positions, dtype=torch.int64, device=self._device)
        scales = torch.empty(positions, dtype=torch.float32, device=self._device)
        tables = torch.empty(positions, dtype=torch.int32, device=self._device)
        self._kernels.locate(
            batch.offsets,
            batch.weights,
            batch.segments,
            batch.packed.most_bags,
            self._lookups.mean,
            sources,
            scales,
            tables,
        )
        keys, order = self._kernels.sort(batch.slots)
        sums = []
        for arena, count in zip(self._arenas.all, batch.packed.positions, strict=True):
            sums.append(self._kernels.new_sums(arena.kind, count, self._device))
        return PreparedUpdate(
            grad=grad.contiguous(),
            numbers=numbers,
            integers=integers,
            sources=sources,
            scales=scales,
            tables=tables,
            keys=keys,
            order=order,
            sums=sums,
        )

    def check_finite(self, batch: DevicePass, update: PreparedUpdate) -> None:
        """Looks for gradients that are not finite, of tables that raise an error."""
        tables = len(self._arenas.of_table)
        failed = torch.zeros(tables + 1, dtype=torch.int32, device=self._device)
        for _, arena, segments in self._parts(batch):
            self._kernels.check_finite(
                update.grad,
                segments,
                batch.packed.most_bags,
                arena.layout.columns,
                update.integers,
                failed,
            )
        update.failed = failed
        update.failed_on_host = Arriving(failed)

    def weight_gradients(self, batch: DevicePass, update: PreparedUpdate) -> None:
        """Computes the gradients of the per-sample weights, with the rows of now."""
        out = torch.empty(batch.slots.shape, dtype=torch.float32, device=self._device)
        for number, arena, segments in self._parts(batch):
            self._kernels.weight_gradients(
                arena.kind,
                arena.rows,
                arena.base,
                batch.staging[number],
                batch.slots,
                batch.offsets,
                segments,
                batch.packed.most_bags,
                self._lookups.mean,
                update.grad,
                update.numbers,
                out,
            )
        update.weight_gradients = Arriving(out)

    def update(
        self,
        batch: DevicePass,
        update: PreparedUpdate,
        skipped: Tensor | None,
        *,
        compile_only: bool = False,
    ) -> None:
        """Updates the rows, and adds to ``skipped``, (tables,) int64, the number of
        those that are left as they are because their gradient is not finite.
        """
        # Numbers below 0, of positions without a device slot, come first.
        begin = len(batch.slots) - sum(batch.packed.positions)
        for arena, count, sums in zip(
            self._arenas.all, batch.packed.positions, update.sums, strict=True
        ):
            self._kernels.update(
                arena.kind,
                arena.rows,
                arena.base,
                update.keys,
                update.order,
                begin,
                begin + count,
                update.sources,
                update.scales,
                update.tables,
                update.grad,
                update.numbers,
                update.integers,
                batch.ids if arena.kind.is_stochastic else None,
                update.failed,
                skipped if arena.kind.skips_nonfinite else None,
                sums,
                compile_only=compile_only,
            )
            begin += count
