"""What belongs to one process, when that process is forked."""

from __future__ import annotations

import ctypes
import os
import weakref

_of_this_process: weakref.WeakSet[object] = weakref.WeakSet()


def leave_to_parent(thing: object) -> None:
    """Keeps processes that are forked from now on from finalizing ``thing``, even when they drop it.

    For what would wait in its destructor for locks or threads that a forked process does not have, or would write to
    its parent's files or connections.
    """
    _of_this_process.add(thing)


def _leave_all() -> None:
    for thing in _of_this_process:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_leave_all)
