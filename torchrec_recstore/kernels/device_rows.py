"""The rows of a group of tables that are also in the memory of a device.

The host has all rows. A row of a batch is copied to the *arena* of its layout, a tensor
on the device, where kernels pool and update it. ``csrc/rows/device_slots.h`` knows
which rows are there, and which of them are newer than the host's.

A pass on the device runs under the lock of this object. Everything that can fail comes
before the native tables learn of a copy: rows that leave the device are gathered and
sent to the host first, then the arriving rows are copied up, and then
``ops.device_commit`` makes it so. The host waits for a copy only here, and never while
a native call holds a table.

Tests: tests/device/test_device_rows.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_copies import CopyTarget, streams_of
from torchrec_recstore.kernels.device_interface import (
    INTEGERS,
    NUMBERS,
    SEGMENT_FIELDS,
    ArenaLayout,
    UpdateKind,
    kernels_of,
)
from torchrec_recstore.store import Table


@dataclass
class _Arena:
    """The rows of the tables of one layout on the device."""

    layout: ArenaLayout
    kind: UpdateKind
    numbers: list[int]
    """The tables, by their numbers in the group."""
    firsts: list[int]
    """The first row of each table."""
    base: int
    """The number of the first device slot."""
    rows: Tensor
    """(rows, stride) float32."""


@dataclass
class DevicePass:
    """A training lookup on the device, for its backward."""

    slots: Tensor
    """(N,) int32, on the device: the device slot of each position."""
    offsets: Tensor
    """(F * B + 1,) int64, on the device."""
    weights: Tensor | None
    """(N,) float32, on the device."""
    segments: Tensor
    """(F, 5) int64, on the device, arena by arena."""
    ids: Tensor | None
    """(N,) int64, on the device, if rows are rounded stochastically."""
    bags: int
    """The number of bags of each feature."""
    counts: list[int]
    """The number of positions of each arena."""


@dataclass
class _Landing:
    """Rows of one table on their way to the host."""

    table: Table
    rows: Tensor
    arrived: Any = field(repr=False)
    """The event after the copy."""


class DeviceRows:
    """The device slots of a group's tables, and the copies of their rows.

    Args:
        group: The handle of the native group.
        tables: Its tables.
        feature_tables: The number of each feature's table.
        pooling: The way in which the rows of a bag are pooled.
        device: The device.
        rows: The number of device slots of each table.

    Raises:
        ValueError: The rows of a table cannot be on a device. The message names the
            table and the option.
    """

    def __init__(
        self,
        group: int,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        pooling: Literal["sum", "mean"],
        device: torch.device,
        rows: Sequence[int],
    ) -> None:
        layouts = [ArenaLayout.of(table) for table in tables]
        self.device = device
        self.lock = threading.RLock()
        self.passes = 0
        """The number of training lookups on the device so far."""
        self._group = group
        self._tables = list(tables)
        self._mean = pooling == "mean"
        self._kernels = kernels_of(device)
        self._streams = streams_of(device)
        self._last_use: Any = None
        self._fault: BaseException | None = None
        self._landings: list[_Landing] = []
        self._firsts = [0] * len(tables)
        self._arenas: list[_Arena] = []
        base = 0
        for layout in dict.fromkeys(layouts):
            numbers = [n for n, other in enumerate(layouts) if other == layout]
            arena = self._arena(layout, numbers, rows, base)
            self._arenas.append(arena)
            for number, first in zip(numbers, arena.firsts, strict=True):
                self._firsts[number] = base + first
            base += len(arena.rows)
        self._columns = sum(len(tables[n].columns) for n in feature_tables)
        self._features = self._features_of_arenas(feature_tables)
        for number, table in enumerate(tables):
            ops.table_make_device_slots(table.handle, rows[number])
            table.device_rows = self

    def _arena(
        self, layout: ArenaLayout, numbers: list[int], rows: Sequence[int], base: int
    ) -> _Arena:
        firsts = []
        end = 0
        for number in numbers:
            firsts.append(end)
            end += rows[number]
        tables = [self._tables[number] for number in numbers]
        shape = (end, layout.stride)
        return _Arena(
            layout=layout,
            kind=UpdateKind.of(layout, tables),
            numbers=numbers,
            firsts=firsts,
            base=base,
            rows=torch.empty(shape, dtype=torch.float32, device=self.device),
        )

    def _features_of_arenas(
        self, feature_tables: Sequence[int]
    ) -> list[list[tuple[int, int, int]]]:
        """Returns the features of each arena: their number, their first column in the
        output, and their table.
        """
        column = 0
        features: list[list[tuple[int, int, int]]] = [[] for _ in self._arenas]
        for feature, number in enumerate(feature_tables):
            for place, arena in enumerate(self._arenas):
                if number in arena.numbers:
                    features[place].append((feature, column, number))
            column += len(self._tables[number].columns)
        return features

    def training_lookup(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, to: CopyTarget
    ) -> tuple[Tensor, Tensor, DevicePass | None]:
        """Looks up a batch for training.

        Returns the pooled rows on the device, or on the host if the rows do not fit on
        the device; the context for :meth:`update`; and the pass, None on the host.
        """
        with self.lock:
            self._check()
            context = ops.group_begin(self._group, ids, offsets, weights)
            self._land()
            slots = self._streams.pinned(ids.shape, torch.int32)
            if not ops.device_plan(context, self._firsts, slots):
                self.settle_pass(context)
                return ops.device_read_on_host(context), context, None
            self._carry_out(context)
            batch = self._batch_up(ids, offsets, weights, slots)
            out = torch.empty(
                (batch.bags, self._columns), dtype=to.dtype, device=self.device
            )
            for arena, segments in self._parts(batch.segments):
                self._kernels.pool(
                    arena.layout,
                    arena.rows,
                    arena.base,
                    None,
                    batch.slots,
                    batch.offsets,
                    batch.weights,
                    segments,
                    batch.bags,
                    self._mean,
                    out,
                )
            self._used()
            self.passes += 1
            return out, context, batch

    def update(
        self, context: Tensor, batch: DevicePass, grad: Tensor, rates: Sequence[float]
    ) -> None:
        """Updates the rows of a pass on the device.

        ``grad``, (B, columns), is the gradient of the output, on the device.
        """
        with self.lock:
            self._check()
            ops.device_plan_refresh(context)
            self._carry_out(context)
            self._run_update(batch, grad.contiguous(), rates)
            ops.device_updated(context)

    def _run_update(
        self, batch: DevicePass, grad: Tensor, rates: Sequence[float]
    ) -> None:
        numbers, integers = ops.device_settings(
            self._group, list(rates), NUMBERS, INTEGERS
        )
        numbers, integers = self._up(numbers), self._up(integers)
        positions = batch.slots.shape
        sources = torch.empty(positions, dtype=torch.int64, device=self.device)
        scales = torch.empty(positions, dtype=torch.float32, device=self.device)
        tables = torch.empty(positions, dtype=torch.int32, device=self.device)
        self._kernels.locate(
            batch.offsets,
            batch.weights,
            batch.segments,
            batch.bags,
            self._mean,
            sources,
            scales,
            tables,
        )
        keys, order = self._kernels.sort(batch.slots)
        begin = 0
        for arena, count in zip(self._arenas, batch.counts, strict=True):
            self._kernels.update(
                arena.kind,
                arena.rows,
                arena.base,
                keys,
                order,
                begin,
                begin + count,
                sources,
                scales,
                tables,
                grad,
                numbers,
                integers,
                batch.ids if arena.kind.is_stochastic else None,
                None,
                None,
            )
            begin += count
        self._used()

    def lookup_on_host(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Looks up a batch for training, from the host's rows.

        Returns the output on the host and the context for an update on the host.
        """
        with self.lock:
            self._check()
            context = ops.group_begin(self._group, ids, offsets, weights)
            self.settle_pass(context)
            rows = ops.device_read_on_host(context)
            return rows if out is None else out.copy_(rows), context

    @contextmanager
    def settled(self, table: Table, ids: Tensor | None) -> Iterator[None]:
        """Calls :meth:`settle`, and keeps rows from changing on the device meanwhile."""
        with self.lock:
            self.settle(table, ids)
            yield

    @contextmanager
    def settled_batch(self, ids: Tensor, offsets: Tensor | None) -> Iterator[None]:
        """Like :meth:`settled`, for the rows of a batch."""
        with self.lock:
            for table, table_ids in zip(
                self._tables,
                ops.group_table_ids(self._group, ids, offsets),
                strict=True,
            ):
                self.settle(table, table_ids)
            yield

    def _check(self) -> None:
        """Raises RuntimeError if a copy has failed in between, so that rows on the
        device are lost.
        """
        if self._fault is not None:
            names = ", ".join(table.name for table in self._tables)
            raise RuntimeError(
                f"tables {names}: a copy to the device failed earlier, so that the rows"
                " there are lost: load the last checkpoint in a new process"
            ) from self._fault

    def settle(self, table: Table, ids: Tensor | None) -> None:
        """Brings the host's rows of ``ids``, (N,) int64, or all rows of a table up to
        date.
        """
        with self.lock:
            self._check()
            self._land()
            dirty = ops.device_dirty(table.handle, ids)
            self._bring([(self._tables.index(table), dirty)])

    def settle_pass(self, context: Tensor) -> None:
        """Brings the host's rows of a pass up to date."""
        with self.lock:
            self._check()
            self._land()
            self._bring(list(enumerate(ops.device_dirty_of_pass(context))))

    def _bring(self, dirty: list[tuple[int, Tensor]]) -> None:
        landings = []
        for number, slots in dirty:
            if len(slots):
                landings.append((number, slots, self._down(number, slots)))
        for number, slots, landing in landings:
            landing.arrived.synchronize()
            ops.device_settle(self._tables[number].handle, slots, landing.rows)

    def _land(self) -> None:
        """Writes the rows that have left the device to the host."""
        while self._landings:
            landing = self._landings[0]
            landing.arrived.synchronize()
            ops.device_land(landing.table.handle, landing.rows)
            del self._landings[0]

    def _carry_out(self, context: Tensor) -> None:
        """Copies what the plans say, and makes it so. If it fails, nothing changes."""
        self._wait_for_use()
        landings = []
        arriving = []
        try:
            for number, table in enumerate(self._tables):
                targets, leaving = ops.device_planned(table.handle)
                if len(leaving):
                    landings.append(self._down(number, leaving))
                if len(targets):
                    arena, first = self._place(number)
                    rows = self._staged(number, targets)
                    arriving.append((arena, self._up(targets + first), rows))
        except BaseException:
            ops.device_abort(context)
            raise
        # All rows that leave have been gathered, so that others can take their places.
        try:
            for arena, targets, rows in arriving:
                self._kernels.scatter(arena.rows, targets, rows)
            self._used()
            ops.device_commit(context)
        except BaseException as error:
            self._fault = error
            raise
        self._landings.extend(landings)

    def _staged(self, number: int, targets: Tensor) -> Tensor:
        """Returns the rows that a table's plan copies, on the device."""
        arena, _ = self._place(number)
        shape = (len(targets), arena.layout.stride)
        staged = self._streams.pinned(shape, torch.float32)
        ops.device_stage(self._tables[number].handle, staged)
        return self._pinned_up(staged)

    def _down(self, number: int, slots: Tensor) -> _Landing:
        """Sends rows of a table to the host."""
        self._wait_for_use()
        arena, first = self._place(number)
        shape = (len(slots), arena.layout.stride)
        gathered = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._kernels.gather(arena.rows, self._up(slots + first), gathered)
        rows = self._streams.pinned(shape, torch.float32)
        rows.copy_(gathered, non_blocking=True)
        arrived = self._streams.event()
        arrived.record(self._streams.current())
        self._used()
        return _Landing(self._tables[number], rows, arrived)

    def _place(self, number: int) -> tuple[_Arena, int]:
        """Returns the arena of a table, and the table's first row in it."""
        arena = next(arena for arena in self._arenas if number in arena.numbers)
        return arena, arena.firsts[arena.numbers.index(number)]

    def _batch_up(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, slots: Tensor
    ) -> DevicePass:
        """Copies what kernels need of a batch to the device."""
        features = sum(map(len, self._features))
        bags = (len(offsets) - 1) // max(features, 1)
        segments = []
        counts = []
        for arena, of_arena in zip(self._arenas, self._features, strict=True):
            for feature, column, number in of_arena:
                segments.append((feature * bags, bags, column, self._columns, number))
            end = arena.base + len(arena.rows)
            counts.append(int(((slots >= arena.base) & (slots < end)).sum()))
        is_stochastic = any(arena.kind.is_stochastic for arena in self._arenas)
        return DevicePass(
            slots=self._pinned_up(slots),
            offsets=self._up(offsets.long()),
            weights=None if weights is None else self._up(weights.detach()),
            segments=self._up(
                torch.tensor(segments, dtype=torch.int64).view(-1, SEGMENT_FIELDS)
            ),
            ids=self._up(ids) if is_stochastic else None,
            bags=bags,
            counts=counts,
        )

    def _parts(self, segments: Tensor) -> list[tuple[_Arena, Tensor]]:
        """Returns the arenas that the features use, with their segments."""
        parts = []
        begin = 0
        for arena, of_arena in zip(self._arenas, self._features, strict=True):
            if of_arena:
                parts.append((arena, segments[begin : begin + len(of_arena)]))
            begin += len(of_arena)
        return parts

    def _up(self, values: Tensor) -> Tensor:
        staged = self._streams.pinned(values.shape, values.dtype).copy_(values)
        return self._pinned_up(staged)

    def _pinned_up(self, staged: Tensor) -> Tensor:
        copy = torch.empty(staged.shape, dtype=staged.dtype, device=self.device)
        return copy.copy_(staged, non_blocking=True)

    def _wait_for_use(self) -> None:
        """Lets the current stream wait for the last kernel that used an arena."""
        if self._last_use is not None:
            self._streams.current().wait_event(self._last_use)

    def _used(self) -> None:
        self._last_use = self._streams.event()
        self._last_use.record(self._streams.current())
