"""Warnings at the line of the user's that caused them."""

from __future__ import annotations

import sys
import warnings


class RecStoreWarning(UserWarning):
    """What this package warns of, for filters."""


_NOT_THE_USERS = ("torchrec_recstore", "torchrec", "torch")


def warn_user(message: str) -> None:
    """Warns at the nearest calling line that is neither of this package nor of torch or TorchRec.

    Python shows a text once a line, so that a ``message`` that names the cause, and no table, step or id, comes once
    for a whole model.

    Args:
        message: cause and fix.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RecStoreWarning, stacklevel=level)
