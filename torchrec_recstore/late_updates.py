"""Updates of rows that wait for gradients from an accelerator: backward returns before they have been carried out.

Every call that reads or changes a table, its statistics included, finishes them first: ``ops.native_errors``, which
every such call enters, calls :func:`finish`. So nothing sees rows without the updates of earlier backward passes.

Tests: tests/device/test_device.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

waiting: deque[Callable[[], None]] = deque()
"""The updates that have not been carried out, in the order of their backward passes."""

_lock = threading.RLock()
_in_progress = False


def finish() -> None:
    """Carries out all updates that wait.

    Raises:
        Exception: The error of an update. The updates after it are carried out by the next call.
    """
    global _in_progress
    with _lock:
        if _in_progress:  # An update itself calls the functions that finish updates.
            return
        _in_progress = True
        try:
            while waiting:
                try:
                    waiting[0]()
                finally:
                    waiting.popleft()  # Afterwards, so that other threads wait for an update that is in progress.
        finally:
            _in_progress = False
