"""Functions that every package of torchrec_recstore uses; this module imports no torch."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import FrameType


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        modules: the module below it that each public name comes from.
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        namespace[name] = value
        return value

    return get, lambda: sorted({*namespace, *modules})


class RecStoreWarning(UserWarning):
    """What this package warns of, for filters."""


_NOT_THE_USERS = ("torchrec_recstore", "torchrec", "torch", "importlib")


def warn_user(message: str) -> None:
    """Warns at the nearest calling line that is neither of this package nor of torch or TorchRec.

    Python shows a text once a line, so that a ``message`` that names the cause, and no table, step or id, comes once
    for a whole model.

    Args:
        message: cause and fix.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).split(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    # By frame, since the stacklevel of warnings.warn leaves out some frames of an import.
    warnings.warn_explicit(
        message,
        RecStoreWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=_module_of(frame),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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
