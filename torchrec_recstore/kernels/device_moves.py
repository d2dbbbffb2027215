"""The rows that move between the host and the arenas of a group.

A move has two steps. Everything that can fail comes first: the rows that arrive are
copied up, and the rows that leave are gathered and sent to the host. Then the arriving
rows are spread over the arenas, and ``ops.device_commit_moves`` tells the native tables.
Rows on their way to the host *land* before the next plan. The host waits for a copy only
here, and never while a native call holds a table.

Tests: tests/device/test_transfers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_arenas import Arena, Arenas
from torchrec_recstore.kernels.device_interface import DeviceKernels
from torchrec_recstore.kernels.device_transfers import DeviceTransfers, Landing
from torchrec_recstore.store import Table

PART_FLOATS = 1 << 24
"""The most floats of rows that are copied to the host at once, when all rows of a table
are brought there: 64 MB of the device, and of pinned memory."""


@dataclass
class Staging:
    """Rows that kernels read beside the arenas."""

    rows: list[int]
    """The number of rows of each arena's staging."""
    write: Callable[[int, Tensor], None]
    """Writes the rows of an arena, given by its number, to (n, stride) float32."""


@dataclass
class Sent:
    """What has been copied to the device."""

    parts: dict[str, Tensor]
    staging: list[Tensor | None]
    """By arena, the staged rows, (n, stride) float32. None if there are none."""
    memory: list[Tensor]
    """The memory of all of them."""


@dataclass
class _RowsUp:
    """Rows on the device that have arrived in one copy."""

    flat: Tensor
    """(floats,) float32: the rows of the plans, and then the staging of each arena."""
    staging: list[Tensor | None]


class DeviceMoves:
    """Moves rows between the host and the arenas of a group.

    The caller has the lock of the rows on the device. Rows are counted table by table,
    in the order of the arenas.

    Args:
        tables: The tables of the group.
        arenas: Their arenas.
        kernels: The kernels of the device.
        transfers: The copies of the group.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        arenas: Arenas,
        kernels: DeviceKernels,
        transfers: DeviceTransfers,
    ) -> None:
        self._arenas = arenas.all
        self._kernels = kernels
        self._transfers = transfers
        self._names = ", ".join(table.name for table in tables)
        self._order = arenas.order
        self._firsts = []
        """The first row of each table in its arena, in this order."""
        self._strides = []
        for arena in arenas.all:
            self._firsts.extend(arena.firsts)
            self._strides.extend([arena.layout.stride] * len(arena.numbers))
        self._handles = [tables[number].handle for number in self._order]
        self._landing: Landing | None = None
        self._fault: BaseException | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the rows on the device are lost."""
        return self._fault is not None

    @contextmanager
    def changing_rows(self) -> Iterator[None]:
        """Runs kernels that change rows, and tells the native tables of it.

        If one of them fails, the rows are neither the old ones nor the new ones.
        """
        try:
            yield
        except BaseException as error:
            self._fault = error
            raise

    def check(self) -> None:
        """Raises RuntimeError if the rows on the device are lost."""
        if self._fault is not None:
            raise RuntimeError(
                f"tables {self._names}: a copy to the device, or a kernel there, failed"
                f" earlier ({type(self._fault).__name__}), so that the rows there are"
                " lost: load the last checkpoint in a new process"
            ) from self._fault

    def abort(self) -> None:
        """Ends the plans of the tables, of which nothing has been carried out."""
        ops.device_abort_moves(self._handles)

    def land(self) -> None:
        """Writes the rows that have left the device to the host."""
        if self._landing is not None:
            ops.device_land_moves(self._handles, self._landing.wait())
            self._landing = None

    def bring(self, dirty: Mapping[int, Tensor]) -> None:
        """Copies rows to the host, in parts of up to ``PART_FLOATS``, and writes them.

        Args:
            dirty: The dirty device slots of some tables, by the number of the table.
        """
        for part in self._parts(dirty):
            self._bring(part)

    def _parts(self, dirty: Mapping[int, Tensor]) -> Iterator[dict[int, Tensor]]:
        """Splits the device slots of some tables into parts of a bounded size."""
        part: dict[int, Tensor] = {}
        room = PART_FLOATS
        for number, stride in zip(self._order, self._strides, strict=True):
            if number not in dirty or len(dirty[number]) == 0:
                continue
            for slots in torch.split(dirty[number], max(1, PART_FLOATS // stride)):
                floats = len(slots) * stride
                if part and floats > room:
                    yield part
                    part = {}
                    room = PART_FLOATS
                part[number] = slots
                room -= floats
        if part:
            yield part

    def _bring(self, dirty: Mapping[int, Tensor]) -> None:
        """Copies rows to the host, all of them in one copy, and writes them."""
        counts = []
        slots = []
        for number, first in zip(self._order, self._firsts, strict=True):
            table_slots = dirty.get(number)
            counts.append(0 if table_slots is None else len(table_slots))
            if table_slots is not None:
                slots.append(table_slots + first)
        sent = self._transfers.up({"slots": torch.cat(slots)})
        landing = self._send_down(counts, sent.parts["slots"])
        rows = self._by_table(landing.wait(), counts)
        for place, number in enumerate(self._order):
            if counts[place]:
                handle = self._handles[place]
                ops.device_settle(handle, dirty[number], rows[place])

    def send(self, parts: Mapping[str, Tensor], staging: Staging | None) -> Sent:
        """Copies tensors of the host and staged rows to the device."""
        sent = self._transfers.up(parts)
        rows = self._rows_up([0] * len(self._order), staging)
        return Sent(sent.parts, rows.staging, [sent.memory, rows.flat])

    def carry_out(
        self,
        parts: Mapping[str, Tensor] | None = None,
        staging: Staging | None = None,
    ) -> Sent:
        """Copies what the plans of the tables say, and makes it so.

        If it fails before the arenas change, the plans have ended and nothing has
        changed.

        Args:
            parts: Tensors of the host that go to the device in the same copy.
            staging: Rows that go to the device with the arriving rows.
        """
        try:
            targets, leaving, counts = ops.device_moves(self._handles, self._firsts)
            arriving_counts, leaving_counts = counts.tolist()
            slots = {"arriving": targets, "leaving": leaving}
            sent = self._transfers.up({**slots, **(parts or {})})
            rows = self._rows_up(arriving_counts, staging)
            landing = None
            if len(leaving):
                landing = self._send_down(leaving_counts, sent.parts["leaving"])
            arriving = sent.parts["arriving"]
            self._scatter(arriving_counts, arriving, rows.flat, compile_only=True)
        except BaseException:
            self.abort()
            raise
        # All rows that leave have been gathered, so that others can take their places.
        with self.changing_rows():
            self._scatter(arriving_counts, arriving, rows.flat)
            ops.device_commit_moves(self._handles)
        if landing is not None:
            self._landing = landing
        return Sent(sent.parts, rows.staging, [sent.memory, rows.flat])

    def _rows_up(self, counts: Sequence[int], staging: Staging | None) -> _RowsUp:
        """Copies the rows of the plans, and the staged ones, to the device."""
        staged_rows = [0] * len(self._arenas) if staging is None else staging.rows
        arriving = self._floats(counts)
        floats = arriving
        for arena, rows in zip(self._arenas, staged_rows, strict=True):
            floats += rows * arena.layout.stride
        on_host = self._transfers.pinned((floats,), torch.float32)
        if arriving:
            ops.device_stage_moves(self._handles, on_host[:arriving])
        begin = arriving
        spans = []
        for number, rows in enumerate(staged_rows):
            end = begin + rows * self._arenas[number].layout.stride
            spans.append((begin, end))
            if rows:
                assert staging is not None
                staging.write(number, on_host[begin:end].view(rows, -1))
            begin = end
        flat = self._transfers.copied_up(on_host)
        staged: list[Tensor | None] = []
        for (begin, end), rows in zip(spans, staged_rows, strict=True):
            staged.append(flat[begin:end].view(rows, -1) if rows else None)
        return _RowsUp(flat, staged)

    def _floats(self, counts: Sequence[int]) -> int:
        """Returns the number of floats of rows."""
        floats = 0
        for count, stride in zip(counts, self._strides, strict=True):
            floats += count * stride
        return floats

    def _by_table(self, flat: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Returns the rows of each table, (n, stride), of a flat tensor."""
        parts = []
        begin = 0
        for count, stride in zip(counts, self._strides, strict=True):
            end = begin + count * stride
            parts.append(flat[begin:end].view(count, stride))
            begin = end
        return parts

    def _by_arena(
        self, slots: Tensor, flat: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[Arena, Tensor, Tensor]]:
        """Returns the arenas that have some of the rows, with the slots and the rows,
        (n, stride).
        """
        place = 0
        first = 0
        begin = 0
        for arena in self._arenas:
            tables = len(arena.numbers)
            count = sum(counts[place : place + tables])
            end = begin + count * arena.layout.stride
            if count:
                of_arena = flat[begin:end].view(count, arena.layout.stride)
                yield arena, slots[first : first + count], of_arena
            place += tables
            first += count
            begin = end

    def _scatter(
        self,
        counts: Sequence[int],
        slots: Tensor,
        rows: Tensor,
        *,
        compile_only: bool = False,
    ) -> None:
        """Spreads rows that have arrived over the arenas."""
        if len(slots) == 0:
            return
        with self._transfers.moving_rows():
            for arena, arena_slots, arena_rows in self._by_arena(slots, rows, counts):
                self._kernels.scatter(
                    arena.rows, arena_slots, arena_rows, compile_only=compile_only
                )

    def _send_down(self, counts: Sequence[int], slots: Tensor) -> Landing:
        """Gathers rows and sends them to the host."""
        with self._transfers.moving_rows():
            gathered = self._transfers.new_rows(self._floats(counts))
            for arena, arena_slots, rows in self._by_arena(slots, gathered, counts):
                self._kernels.gather(arena.rows, arena_slots, rows)
        return self._transfers.down(gathered)
