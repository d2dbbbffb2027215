"""The arenas of a group: the tensors on a device with the rows of its tables.

Tests: tests/device/test_device_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore.kernels.device_interface import ArenaLayout, UpdateKind
from torchrec_recstore.store import Table


@dataclass
class Arena:
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

    @property
    def end(self) -> int:
        """The number after the last device slot."""
        return self.base + len(self.rows)

    def has(self, slots: Tensor) -> Tensor:
        """Returns which of ``slots``, (N,) int32, are in the arena, (N,) bool."""
        return (slots >= self.base) & (slots < self.end)


class Arenas:
    """The arenas of a group.

    Args:
        tables: The tables of the group.
        new_memory: Returns memory on the device for rows, float32, of a shape.
        rows: The number of device slots of each table.

    Raises:
        ValueError: The rows of a table cannot be on a device, or a table has no device
            slot. The message names the table and the option.
        MemoryError: The device has no memory for the rows. The message names
            the tables and the number of bytes.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        new_memory: Callable[[Sequence[int]], Tensor],
        rows: Sequence[int],
    ) -> None:
        layouts = [ArenaLayout.of(table) for table in tables]
        for table, table_rows in zip(tables, rows, strict=True):
            if table_rows < 1:
                raise ValueError(
                    f"table {table.name!r}: a group with rows on a device needs at least"
                    " one device row of each table: use a group of its own for a table"
                    " without device_rows"
                )
        self.all: list[Arena] = []
        self.of_table = [0] * len(tables)
        """The number of each table's arena."""
        self.first_slots = [0] * len(tables)
        """The number of each table's first device slot."""
        base = 0
        for layout in dict.fromkeys(layouts):
            numbers = [n for n, other in enumerate(layouts) if other == layout]
            arena = _made(tables, layout, numbers, new_memory, rows, base)
            for number, first in zip(numbers, arena.firsts, strict=True):
                self.of_table[number] = len(self.all)
                self.first_slots[number] = base + first
            self.all.append(arena)
            base = arena.end
        self.order = [number for arena in self.all for number in arena.numbers]
        """The tables in the order of the arenas."""


def _made(
    tables: Sequence[Table],
    layout: ArenaLayout,
    numbers: list[int],
    new_memory: Callable[[Sequence[int]], Tensor],
    rows: Sequence[int],
    base: int,
) -> Arena:
    firsts = []
    end = 0
    for number in numbers:
        firsts.append(end)
        end += rows[number]
    return Arena(
        layout=layout,
        kind=UpdateKind.of(layout, [tables[number] for number in numbers]),
        numbers=numbers,
        firsts=firsts,
        base=base,
        rows=_memory(tables, numbers, (end, layout.stride), new_memory),
    )


def _memory(
    tables: Sequence[Table],
    numbers: list[int],
    shape: tuple[int, int],
    new_memory: Callable[[Sequence[int]], Tensor],
) -> Tensor:
    try:
        return new_memory(shape)
    except torch.OutOfMemoryError as error:
        names = ", ".join(repr(tables[number].name) for number in numbers)
        rows, floats = shape
        raise MemoryError(
            f"tables {names}: the device has no memory for their {rows:,} device rows,"
            f" {4 * rows * floats / 2**30:.2f} GiB: use a smaller"
            f" TableOptions(device_rows=...), or more ranks: {error}"
        ) from error
