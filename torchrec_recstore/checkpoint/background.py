"""Checkpoints that are written beside training, and what becomes of them when the process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from torchrec_recstore.checkpoint.info import CheckpointInfo

# Those that are being written, and those that have failed and that nobody has asked for yet.
_open: set[AsyncSave] = set()


class AsyncSave:
    """A checkpoint that is being written beside training; see :func:`torchrec_recstore.async_save`.

    Args:
        path: of the checkpoint.
        write: writes it.
    """

    def __init__(self, path: Path, write: Callable[[], CheckpointInfo]) -> None:
        self._path = path
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        # A daemon, so that an interrupt at the end of the process is not followed by another wait for it.
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint", daemon=True)
        _open.add(self)
        try:
            self._thread.start()
        except RuntimeError:
            _open.discard(self)
            raise

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return not self._thread.is_alive()

    def wait(self) -> CheckpointInfo:
        """Waits until the checkpoint is whole on every rank.

        Raises:
            OSError, MemoryError, RuntimeError: it could not be written; there is nothing at its path. MemoryError:
                there was no room to keep the rows that training changed meanwhile.
        """
        self._thread.join()
        _open.discard(self)
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self._info

    def _write(self, write: Callable[[], CheckpointInfo]) -> None:
        try:
            self._info = write()
            _open.discard(self)
        except BaseException as error:  # it belongs to whoever asks, see below
            traceback.clear_frames(error.__traceback__)  # which hold copies of tensors
            note = f"This is the error of async_save to {self._path}, whose wait() had not been called."
            error.__notes__ = [note]  # add_note, which Python 3.10 lacks
            self._error = error


def raise_unasked() -> None:
    """Raises the error of an :func:`torchrec_recstore.async_save` that has failed and was not waited for, once."""
    for save in list(_open):
        if save._error is not None:
            _open.discard(save)
            raise save._error


def _finish() -> None:
    """Lets the process end when its checkpoints are written, and tells of those that are not."""
    failed = False
    for save in list(_open):
        why: str | None
        try:
            save._thread.join()
            why = None if save._error is None else "".join(traceback.format_exception(save._error))
        except KeyboardInterrupt:
            why = "It was being written when the process was interrupted.\n"
        if why is not None:
            print(f"async_save: the checkpoint {save._path} has not been written.\n{why}", file=sys.stderr, flush=True)
            failed = True
    if failed:
        atexit.register(_leave)


def _leave() -> None:
    """Ends the process with status 1."""
    # Nothing else changes the status of an interpreter that has begun to end. The exit functions of others come first.
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


# Not atexit: before its functions are called, the threads of concurrent.futures, which write the files, are ended by a
# function that was registered like this one. The last one to be registered is called first. Private; checked on
# Python 3.11.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_open.clear)
