"""The rows of a group of tables that are also in the memory of a device.

The host has all rows. A row of a batch is copied to the *arena* of its layout, a tensor
on the device, where kernels pool and update it. ``csrc/rows/device_slots.h`` knows
which rows are there, and which of them are newer than the host's.

A pass on the device runs under the lock of this object. Everything that can fail comes
before the native tables learn of a copy: the arriving rows are copied up, rows that
leave the device are gathered and sent to the host, then the arriving rows are spread
over the arenas, and then ``ops.device_commit`` makes it so. If there is no memory for a
copy, the pass runs on the host. The host waits for a copy only here, and never while a
native call holds a table.

Tests: tests/device/test_device_rows.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.kernels.device_interface import (
    INTEGERS,
    NUMBERS,
    SEGMENT_FIELDS,
    ArenaLayout,
    UpdateKind,
    kernels_of,
)
from torchrec_recstore.kernels.device_transfers import (
    DeviceTransfers,
    Landing,
    PackedUp,
)
from torchrec_recstore.store import Table

MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError)
"""The errors of a device or a host that has no memory for a copy."""


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

    memory: Tensor
    """The memory of the tensors of this pass on the device."""
    slots: Tensor
    """(N,) int32, on the device: the device slot of each position."""
    offsets: Tensor | None
    """(F * B + 1,) int32, on the device. None if each bag has one position."""
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
    settings: _Settings
    """The settings that an update needs if nothing changes until then."""
    numbers: Tensor
    """``settings.numbers`` on the device."""
    integers: Tensor
    """``settings.integers`` on the device."""


@dataclass
class _Settings:
    """The settings of an update of all tables; see ``device_interface``."""

    numbers: Tensor
    integers: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Returns the tensors, for a packed copy."""
        return {"numbers": self.numbers, "integers": self.integers}

    def equals(self, other: _Settings) -> bool:
        """Returns whether the settings have the same bits."""
        same_numbers = torch.equal(
            self.numbers.view(torch.int32), other.numbers.view(torch.int32)
        )
        return same_numbers and torch.equal(self.integers, other.integers)


@dataclass
class _Rows:
    """Rows of all tables, table by table, in the order of the arenas."""

    slots: Tensor
    """(n,) int32. The rows of the arenas, from 0 in each arena."""
    counts: list[int]
    """The number of rows of each table."""


class DeviceRows:
    """The device slots of a group's tables, and the copies of their rows.

    Args:
        group: The handle of the native group.
        tables: Its tables.
        feature_tables: The number of each feature's table.
        pooling: The way in which the rows of a bag are pooled.
        device: The device.
        rows: The number of device slots of each table.
        learning_rates: Returns the learning rate of each table. It is called in each
            training lookup, so that the settings of the update are on the device when
            backward needs them.

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
        learning_rates: Callable[[], Sequence[float]],
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
        self._learning_rates = learning_rates
        self._transfers = DeviceTransfers(device)
        self._fault: BaseException | None = None
        self._landing: tuple[Landing, list[int]] | None = None
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
        self._order = [n for arena in self._arenas for n in arena.numbers]
        """The tables in the order of the arenas."""
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
        return _Arena(
            layout=layout,
            kind=UpdateKind.of(layout, tables),
            numbers=numbers,
            firsts=firsts,
            base=base,
            rows=self._transfers.new_arena((end, layout.stride)),
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
            try:
                result = self._lookup_on_device(context, ids, offsets, weights, to)
            except MEMORY_ERRORS:
                if self._fault is not None:
                    raise
                result = None
            if result is not None:
                self.passes += 1
                return result[0], context, result[1]
            self.settle_pass(context)
            return ops.device_read_on_host(context), context, None

    def _lookup_on_device(
        self,
        context: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        to: CopyTarget,
    ) -> tuple[Tensor, DevicePass] | None:
        """Returns None if the rows do not fit on the device.

        Raises one of ``MEMORY_ERRORS`` if there is no memory for a copy or the output.
        """
        slots = torch.empty(ids.shape, dtype=torch.int32)
        if not ops.device_plan(context, self._firsts, slots):
            return None
        batch = self._batch_up(context, ids, offsets, weights, slots)
        with self._transfers.computing([batch.memory]):
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
        return out, batch

    def update(
        self, context: Tensor, batch: DevicePass, grad: Tensor, rates: Sequence[float]
    ) -> None:
        """Updates the rows of a pass on the device.

        ``grad``, (B, columns), is the gradient of the output, on the device.

        Raises:
            MemoryError, torch.OutOfMemoryError: There is no memory on the device. If
                :attr:`is_lost` is false, nothing has changed, and the pass can be
                updated on the host.
        """
        with self.lock:
            self._check()
            settings = self._settings(rates)
            parts = {}
            if not settings.equals(batch.settings):
                parts = settings.parts()
            ops.device_plan_refresh(context)
            sent = self._carry_out(context, parts)
            numbers, integers = batch.numbers, batch.integers
            memory = [batch.memory]
            if parts:
                numbers, integers = sent.parts["numbers"], sent.parts["integers"]
                memory.append(sent.memory)
            with self._transfers.computing(memory):
                self._run_update(context, batch, grad.contiguous(), numbers, integers)

    def _run_update(
        self,
        context: Tensor,
        batch: DevicePass,
        grad: Tensor,
        numbers: Tensor,
        integers: Tensor,
    ) -> None:
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
        with self._changing_rows():
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
            ops.device_updated(context)

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

    @property
    def is_lost(self) -> bool:
        """Whether the rows on the device are lost."""
        return self._fault is not None

    @contextmanager
    def _changing_rows(self) -> Iterator[None]:
        """Runs kernels that change rows, and tells the native tables of it.

        If one of them fails, the rows are neither the old ones nor the new ones.
        """
        try:
            yield
        except BaseException as error:
            self._fault = error
            raise

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
        """Copies dirty rows to the host, all of them in one copy, and writes them."""
        slots_of_tables = dict(dirty)
        nothing = torch.empty(0, dtype=torch.int32)
        rows = self._rows([slots_of_tables.get(n, nothing) for n in self._order])
        if len(rows.slots) == 0:
            return
        sent = self._transfers.up({"slots": rows.slots})
        landing = self._down(rows.counts, sent.parts["slots"])
        parts = self._by_table(landing.wait(), rows.counts)
        for number, table_rows in zip(self._order, parts, strict=True):
            slots = slots_of_tables.get(number)
            if slots is not None and len(slots):
                ops.device_settle(self._tables[number].handle, slots, table_rows)

    def _land(self) -> None:
        """Writes the rows that have left the device to the host."""
        if self._landing is None:
            return
        landing, counts = self._landing
        parts = self._by_table(landing.wait(), counts)
        for place, number in enumerate(self._order):
            if counts[place]:
                ops.device_land(self._tables[number].handle, parts[place])
                counts[place] = 0
        self._landing = None

    def _carry_out(
        self, context: Tensor, parts: Mapping[str, Tensor] | None = None
    ) -> PackedUp:
        """Copies what the plans say, and makes it so. If it fails, nothing changes.

        Args:
            context: The context of the pass.
            parts: Tensors of the host that go to the device in the same copy.

        Returns:
            The parts on the device.
        """
        try:
            plans = [
                ops.device_planned(self._tables[number].handle)
                for number in self._order
            ]
            arriving = self._rows([targets for targets, _ in plans])
            leaving = self._rows([slots for _, slots in plans])
            slots = {"arriving": arriving.slots, "leaving": leaving.slots}
            sent = self._transfers.up({**slots, **(parts or {})})
            staged = self._staged(arriving.counts)
            landing = None
            if len(leaving.slots):
                landing = self._down(leaving.counts, sent.parts["leaving"])
        except BaseException:
            ops.device_abort(context)
            raise
        # All rows that leave have been gathered, so that others can take their places.
        with self._changing_rows():
            if len(arriving.slots):
                self._scatter(arriving.counts, sent.parts["arriving"], staged)
            ops.device_commit(context)
        if landing is not None:
            self._landing = (landing, leaving.counts)
        return sent

    def _rows(self, slots_of_tables: Sequence[Tensor]) -> _Rows:
        """Returns rows of the tables, given by their device slots, in the order of the
        arenas.
        """
        slots = []
        firsts = [first for arena in self._arenas for first in arena.firsts]
        for first, table_slots in zip(firsts, slots_of_tables, strict=True):
            slots.append(table_slots + first)
        return _Rows(torch.cat(slots), [len(of_table) for of_table in slots])

    def _staged(self, counts: Sequence[int]) -> Tensor:
        """Returns the rows that the plans copy, on the device."""
        staged = self._transfers.pinned((self._floats(counts),), torch.float32)
        parts = self._by_table(staged, counts)
        for number, count, part in zip(self._order, counts, parts, strict=True):
            if count:
                ops.device_stage(self._tables[number].handle, part)
        return self._transfers.copied_up(staged)

    def _floats(self, counts: Sequence[int]) -> int:
        """Returns the number of floats of rows, given by their numbers by table."""
        rows = dict(zip(self._order, counts, strict=True))
        floats = 0
        for arena in self._arenas:
            floats += arena.layout.stride * sum(rows[n] for n in arena.numbers)
        return floats

    def _by_table(self, flat: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Returns the rows of each table, (n, stride), of a flat tensor."""
        strides = []
        for arena in self._arenas:
            strides.extend([arena.layout.stride] * len(arena.numbers))
        parts = []
        begin = 0
        for count, stride in zip(counts, strides, strict=True):
            end = begin + count * stride
            parts.append(flat[begin:end].view(count, stride))
            begin = end
        return parts

    def _by_arena(
        self, slots: Tensor, flat: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[_Arena, Tensor, Tensor]]:
        """Returns the arenas that have some of the rows, with the slots and the rows,
        (n, stride).
        """
        rows = dict(zip(self._order, counts, strict=True))
        first = 0
        begin = 0
        for arena in self._arenas:
            count = sum(rows[number] for number in arena.numbers)
            end = begin + count * arena.layout.stride
            if count:
                of_arena = flat[begin:end].view(count, arena.layout.stride)
                yield arena, slots[first : first + count], of_arena
            first += count
            begin = end

    def _scatter(self, counts: Sequence[int], slots: Tensor, rows: Tensor) -> None:
        """Spreads rows that have arrived over the arenas."""
        with self._transfers.moving_rows():
            for arena, arena_slots, arena_rows in self._by_arena(slots, rows, counts):
                self._kernels.scatter(arena.rows, arena_slots, arena_rows)

    def _down(self, counts: Sequence[int], slots: Tensor) -> Landing:
        """Sends rows to the host."""
        with self._transfers.moving_rows():
            gathered = torch.empty(
                self._floats(counts), dtype=torch.float32, device=self.device
            )
            for arena, arena_slots, rows in self._by_arena(slots, gathered, counts):
                self._kernels.gather(arena.rows, arena_slots, rows)
        return self._transfers.down(gathered)

    def _settings(self, rates: Sequence[float]) -> _Settings:
        settings = ops.device_settings(self._group, list(rates), NUMBERS, INTEGERS)
        return _Settings(*settings)

    def _batch_up(
        self,
        context: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        slots: Tensor,
    ) -> DevicePass:
        """Carries out a plan, and copies what kernels need of the batch along."""
        features = sum(map(len, self._features))
        bags = (len(offsets) - 1) // max(features, 1)
        segments, counts = self._segments(offsets, bags)
        settings = self._settings(self._learning_rates())
        parts = {"slots": slots, "segments": segments, **settings.parts()}
        if not _is_one_each(offsets, len(ids)):
            parts["offsets"] = offsets.int()
        if weights is not None:
            parts["weights"] = weights.detach()
        if any(arena.kind.is_stochastic for arena in self._arenas):
            parts["ids"] = ids
        sent = self._carry_out(context, parts)
        return DevicePass(
            memory=sent.memory,
            slots=sent.parts["slots"],
            offsets=sent.parts.get("offsets"),
            weights=sent.parts.get("weights"),
            segments=sent.parts["segments"],
            ids=sent.parts.get("ids"),
            bags=bags,
            counts=counts,
            settings=settings,
            numbers=sent.parts["numbers"],
            integers=sent.parts["integers"],
        )

    def _segments(self, offsets: Tensor, bags: int) -> tuple[Tensor, list[int]]:
        """Returns the segments of all arenas, and the number of positions of each
        arena.
        """
        positions = offsets[::bags].tolist() if bags else []
        segments = []
        counts = []
        for of_arena in self._features:
            count = 0
            for feature, column, number in of_arena:
                segments.append((feature * bags, bags, column, self._columns, number))
                if bags:
                    count += positions[feature + 1] - positions[feature]
            counts.append(count)
        packed = torch.tensor(segments, dtype=torch.int64)
        return packed.view(-1, SEGMENT_FIELDS), counts

    def _parts(self, segments: Tensor) -> list[tuple[_Arena, Tensor]]:
        """Returns the arenas that the features use, with their segments."""
        parts = []
        begin = 0
        for arena, of_arena in zip(self._arenas, self._features, strict=True):
            if of_arena:
                parts.append((arena, segments[begin : begin + len(of_arena)]))
            begin += len(of_arena)
        return parts


def _is_one_each(offsets: Tensor, positions: int) -> bool:
    """Returns whether each bag has one position. The offsets are valid."""
    if len(offsets) - 1 != positions:
        return False
    return bool((offsets[1:] > offsets[:-1]).all())
