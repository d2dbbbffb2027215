"""Copies of batches and rows between the host and a device, on streams of their own.

Kernels of a batch run on the current stream, *C*. Copies to the device, and the kernels
that move rows into and out of arenas, run on the stream *U*. Copies to the host run on
the stream *D*. The order is:

- U waits for the last use of an arena on C before it moves rows.
- D waits for U before it copies rows that U has gathered.
- C waits for U before it uses an arena, or memory that U has copied.

What goes up with a batch is packed into one copy, and the rows that arrive are another
one, whatever the number of tables. The rows that leave are one copy down.

Memory that a stream has allocated and another stream uses is recorded for the other
stream, so that torch does not give it away too early.

Tests: tests/device/test_transfers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore.kernels.device_copies import streams_of

ALIGNMENT = 16
"""The bytes to which each tensor of a packed copy is aligned."""


@dataclass
class PackedUp:
    """Tensors on the device that have arrived in one copy."""

    memory: Tensor
    """(bytes,) uint8. The memory of all of them."""
    parts: dict[str, Tensor]


@dataclass
class Landing:
    """Rows on their way to the host, in one copy."""

    rows: Tensor
    """(floats,) float32, in pinned memory."""
    arrived: Any
    """The event after the copy."""

    def wait(self) -> Tensor:
        """Waits for the copy, and returns the rows."""
        self.arrived.synchronize()
        return self.rows


class DeviceTransfers:
    """The copies of the groups of a device, and the streams on which they run.

    The caller has a lock, so that one thread at a time uses the object.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = streams_of(device)
        self._last_use: Any = None
        """The event after the last kernel on C that used an arena."""

    def new_arena(self, shape: Sequence[int]) -> Tensor:
        """Returns memory for rows, float32, that every stream may use."""
        arena = torch.empty(tuple(shape), dtype=torch.float32, device=self.device)
        self._streams.keep(arena, self._streams.up_stream)
        # The memory may have been used on C before it was given to the arena.
        self._note_use()
        return arena

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor in pinned memory, without values."""
        return self._streams.pinned(shape, dtype)

    @contextmanager
    def computing(self, memory: Sequence[Tensor] = ()) -> Iterator[None]:
        """Runs kernels of C that use arenas, and memory that U has copied.

        Args:
            memory: The memory that U has allocated: results of :meth:`copied_up` and
                ``PackedUp.memory``.
        """
        stream = self._streams.current()
        # This also selects the device for the kernels of this thread.
        with self._streams.entered(stream):
            up_is_done = self._streams.event()
            up_is_done.record(self._streams.up_stream)
            stream.wait_event(up_is_done)
            if self._last_use is not None:
                stream.wait_event(self._last_use)
            for tensor in memory:
                self._streams.keep(tensor, stream)
            try:
                yield
            finally:
                self._note_use()

    def _note_use(self) -> None:
        self._last_use = self._streams.event()
        self._last_use.record(self._streams.current())

    def new_rows(self, floats: int) -> Tensor:
        """Returns memory for rows, (floats,) float32, of the current stream."""
        return torch.empty(floats, dtype=torch.float32, device=self.device)

    @contextmanager
    def moving_rows(self) -> Iterator[None]:
        """Runs kernels of U that move rows into and out of arenas."""
        stream = self._streams.up_stream
        with self._streams.entered(stream):
            if self._last_use is not None:
                stream.wait_event(self._last_use)
            yield

    def copied_up(self, staged: Tensor) -> Tensor:
        """Returns a copy on the device of a tensor in pinned memory."""
        with self._streams.entered(self._streams.up_stream):
            copy = torch.empty(staged.shape, dtype=staged.dtype, device=self.device)
            if staged.numel():
                copy.copy_(staged, non_blocking=True)
        return copy

    def up(self, parts: Mapping[str, Tensor]) -> PackedUp:
        """Copies tensors of the host to the device, all of them in one copy."""
        places = {}
        end = 0
        for name, part in parts.items():
            places[name] = end
            end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        staged = self.pinned((end,), torch.uint8)
        for name, part in parts.items():
            _view_of(staged, places[name], part).copy_(part)
        memory = self.copied_up(staged)
        copies = {
            name: _view_of(memory, places[name], part) for name, part in parts.items()
        }
        return PackedUp(memory, copies)

    def down(self, rows: Tensor) -> Landing:
        """Copies rows that U has gathered, (floats,) float32, to the host."""
        gathered = self._streams.event()
        gathered.record(self._streams.up_stream)
        stream = self._streams.down_stream
        stream.wait_event(gathered)
        self._streams.keep(rows, stream)
        landed = self.pinned(rows.shape, rows.dtype)
        with self._streams.entered(stream):
            landed.copy_(rows, non_blocking=True)
        arrived = self._streams.event()
        arrived.record(stream)
        return Landing(landed, arrived)


def _view_of(memory: Tensor, begin: int, like: Tensor) -> Tensor:
    """Returns a view of memory, (bytes,) uint8, with the shape and dtype of ``like``."""
    flat = memory[begin : begin + like.nbytes]
    return flat.view(like.dtype).view(like.shape)
