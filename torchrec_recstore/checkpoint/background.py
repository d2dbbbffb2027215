"""Checkpoints that are written in the background, also beyond the end of the program.

The interpreter waits for threads that are no daemons before it calls exit functions.
So the thread of a checkpoint is none, and a second thread reports the checkpoints that
could not be written: it sleeps until the main thread ends.

Tests: tests/checkpoint/test_leaving.py, tests/checkpoint/test_save.py.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchrec_recstore.checkpoint.info import CheckpointInfo

# The saves that are being written, and the failed saves whose error has not been
# reported yet.
_open: set[AsyncSave] = set()
_reporter: threading.Thread | None = None


def is_saving() -> bool:
    """Returns whether this process writes a checkpoint of ``async_save``.

    Tables have snapshots meanwhile.
    """
    return any(not save.done() for save in list(_open))


def raise_unreported() -> None:
    """Raises the error of a save that failed and was not waited for, once."""
    for save in list(_open):
        error = save.unreported_error()
        if error is not None:
            _open.discard(save)
            raise error


class AsyncSave:
    """A checkpoint that is being written while training continues.

    See :func:`torchrec_recstore.async_save`.
    """

    def __init__(self, path: Path, write: Callable[[], CheckpointInfo]) -> None:
        self._path = path
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._write,
            args=(write,),
            name="checkpoint",
            daemon=False,
        )
        _open.add(self)
        try:
            self._thread.start()
        except RuntimeError:
            _open.discard(self)
            raise
        # The reporter waits only for threads that have started.
        with suppress(RuntimeError):  # Without it, the exit function reports.
            _start_reporter()

    def done(self) -> bool:
        """Returns whether :meth:`wait` would return without waiting."""
        return not self._thread.is_alive()

    def wait(self) -> CheckpointInfo:
        """Waits until all ranks have written the checkpoint; returns its metadata.

        Raises:
            OSError, RuntimeError: The checkpoint could not be written. Its path is as
                it was before the save.
            MemoryError: There was no memory for copies of the rows that training
                changed. The path is as it was.
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
        # wait(), the next save or the end of the process reports the error.
        except BaseException as error:
            # The frames hold copies of tensors.
            traceback.clear_frames(error.__traceback__)
            self._error = error

    def unreported_error(self) -> BaseException | None:
        """Returns the error of a save that has ended without :meth:`wait`.

        A note in the error names the save.
        """
        if self._error is not None:
            note = (
                f"This is the error of async_save to {self._path}, whose wait() had not"
                " been called."
            )
            self._error.__notes__ = [note]  # Python 3.10 lacks add_note.
        return self._error


def _start_reporter() -> None:
    """Starts the thread that reports failed saves at the end, unless it runs."""
    global _reporter
    if _reporter is None or not _reporter.is_alive():
        _reporter = threading.Thread(
            target=_report_at_end,
            name="checkpoint-errors",
            daemon=False,
        )
        _reporter.start()


def _report_at_end() -> None:
    """Reports the failed saves after the main thread has ended.

    An exit function would be too late in a process that multiprocessing has forked: it
    waits for threads, but does not call the functions of atexit.
    """
    threading.main_thread().join()
    for save in list(_open):
        save._thread.join()
    _report()


def _report() -> None:
    """Prints which saves are not written, and why, and makes the exit status 1."""
    for save in list(_open):
        if not save.done():
            reason = "It was being written when the process was interrupted.\n"
        elif (error := save.unreported_error()) is not None:
            reason = "".join(traceback.format_exception(error))
        else:
            continue
        _open.discard(save)
        print(
            f"async_save: the checkpoint {save._path} has not been written.\n{reason}",
            file=sys.stderr,
            flush=True,
        )
        _exit_with_status_1()


def _exit_with_status_1() -> None:
    """Makes the process end with status 1 after all exit functions have run.

    Python has no way to change the status so late, but C has: at its very end, the
    interpreter calls exit(), which calls the functions that were registered with
    __cxa_atexit. The function that was registered last is called first.
    """
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc._exit, ctypes.c_void_p(1), None)
    # _exit does not write the buffers of C's streams.
    libc.__cxa_atexit(libc.fflush, None, None)


def _report_interrupted() -> None:
    """Ends a process that was interrupted while it waited for its checkpoints.

    Otherwise a thread that runs torch while the interpreter ends would abort the
    process.
    """
    is_interrupted = is_saving()
    _report()
    if is_interrupted:
        sys.stdout.flush()
        os._exit(1)


atexit.register(_report_interrupted)
os.register_at_fork(after_in_child=_open.clear)
