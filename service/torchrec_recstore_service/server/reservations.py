"""The turn of a save among the saves that clients make at the same time.

The first server of a set gives it.

Tests: tests/service/test_set_calls.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from torchrec_recstore_service.server.native import CallRefusedError
from torchrec_recstore_service.wire import recstore_pb2 as pb

UNPREPARED_S = 1.0
"""A save that has its turn, and has not begun to prepare for this time, gives way to
another save.
"""
SILENT_S = 30.0
"""A save that this server has prepared, and whose client it has not heard of for this
time, gives way to another.
"""
WAITING = 8
"""The number of saves that wait for their turn.

It is less than the number of threads of saves.
"""


@dataclass
class _Turn:
    id: str
    number: int
    heard: float
    busy: bool = False
    prepared: bool = False

    @property
    def left_s(self) -> float:
        """The time in seconds for which other saves have to wait, if nothing happens."""
        if self.busy:
            return SILENT_S
        patience_s = SILENT_S if self.prepared else UNPREPARED_S
        return self.heard + patience_s - time.monotonic()


class Reservations:
    """Gives saves their turn, one after the other, and their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn: _Turn | None = None
        self._waiting = 0

    def reserve(
        self,
        save_id: str,
        check: Callable[[], object],
        is_active: Callable[[], bool],
        last: Callable[[], int],
    ) -> int:
        """Waits for the turn of a save and returns its number.

        Args:
            save_id: The id of the save.
            check: A function that raises an error if the save cannot be made any more.
            is_active: A function that returns whether the client still waits.
            last: A function that returns the number of the last save of this server.

        Raises:
            CallRefusedError: Too many saves wait, or the client has gone.
        """
        with self._changed:
            if self._waiting >= WAITING:
                raise CallRefusedError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"{WAITING} saves wait already: repeat the call",
                )
            self._waiting += 1
            try:
                while True:
                    turn = self._turn
                    if turn is None or turn.id == save_id or turn.left_s <= 0:
                        break
                    self._changed.wait(min(turn.left_s, UNPREPARED_S))
                    check()
                    if not is_active():
                        raise CallRefusedError(
                            grpc.StatusCode.CANCELLED,
                            "the client does not wait any more",
                        )
            finally:
                self._waiting -= 1
            if turn is None or turn.id != save_id:
                last_number = last()
                if turn is not None:
                    last_number = max(last_number, turn.number)
                turn = _Turn(save_id, last_number + 1, time.monotonic())
                self._turn = turn
            return turn.number

    @contextmanager
    def preparing(self, saved: pb.Saved) -> Iterator[bool]:
        """Returns a context in which a save keeps its turn, if it has it."""
        with self._changed:
            turn = self._turn
            if turn is None or turn.id != saved.id or turn.number != saved.number:
                turn = None
            else:
                turn.busy = True
        try:
            yield turn is not None
        finally:
            with self._changed:
                if turn is not None:
                    turn.busy = False
                    turn.prepared = True
                    turn.heard = time.monotonic()
                    self._changed.notify_all()

    def has_turn(self, save_id: str) -> bool:
        """Returns whether it is the turn of a save."""
        with self._changed:
            return self._turn is not None and self._turn.id == save_id

    def release(self, save_id: str | None = None) -> None:
        """Ends the turn of a save. Default: None, of any save."""
        with self._changed:
            if self._turn is not None and save_id in (None, self._turn.id):
                self._turn = None
                self._changed.notify_all()
