"""Hides the warnings of TorchRec and torch that a correct program gets.

This module imports neither torch nor TorchRec, so that it can run before them.

Tests: tests/project/docs/test_quiet.py.
"""

from __future__ import annotations

import logging
import warnings

_LOGGERS: dict[str, tuple[str, ...]] = {
    "root": ("Could not determine LOCAL_WORLD_SIZE from environment",),
    "torch.fx._symbolic_trace": ("is_fx_tracing will return true for both",),
    "torchrec.distributed.planner.types": (
        "The topology was constructed directly rather than via",
    ),
    "torchrec.distributed.planner.storage_reservations": (
        "There is a known issue with TorchRec's dense tensor size calculation",
    ),
}
"""By logger, how the lines begin that say nothing about the program."""

_MESSAGES: tuple[tuple[str, type[Warning]], ...] = (
    ("HeuristicalStorageReservation is known to cause issues", FutureWarning),
    (r"(?s).*broadcast_buffers.* is deprecated", FutureWarning),
    ("TorchScript will treat type annotations of Tensor", UserWarning),
    (r"(?s).*torch\.jit\..* is deprecated", DeprecationWarning),
    (r"(?s).*torch\.jit\..* is not supported in Python", DeprecationWarning),
)
"""How the messages begin that say nothing about the program, with their categories.

They are regular expressions, as in :func:`warnings.filterwarnings`.
"""


class _WithoutLines(logging.Filter):
    """A filter that drops the lines of a logger that begin in one of several ways."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``."""
        return not record.getMessage().startswith(self._beginnings)


_filters: dict[str, _WithoutLines] = {}


def quiet() -> None:
    """Hides warnings of TorchRec and torch that the user of a program cannot act on.

    TorchRec and torch warn of their own internals when a model is sharded, planned or
    exported, with each kind of table. This function hides exactly these messages, which
    docs/errors.md lists. Other messages of TorchRec and torch stay, and so do all
    warnings of this package. Call this function before the model is built:

    ::

        import torchrec_recstore
        torchrec_recstore.quiet()

    A second call has no effect on loggers, and puts the filters of ``warnings`` in
    front again.
    """
    for name, beginnings in _LOGGERS.items():
        if name not in _filters:
            _filters[name] = _WithoutLines(beginnings)
            logging.getLogger(None if name == "root" else name).addFilter(
                _filters[name]
            )
    for message, category in _MESSAGES:
        warnings.filterwarnings("ignore", message=message, category=category)
