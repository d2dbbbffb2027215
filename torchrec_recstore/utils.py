"""Lazy imports, warnings, errors and forked processes, for all packages of torchrec_recstore, without torch.

Tests: tests/test_warnings.py.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType

from torchrec_recstore.plugins import plugin

_OURS = ("torchrec_recstore", "torchrec_recstore_service", "torchrec_recstore_serving")
_NOT_THE_USERS = (*_OURS, "torchrec", "torch", "importlib")
_of_this_process: weakref.WeakSet[object] = weakref.WeakSet()


def lazy_names(
    package: str, modules: Mapping[str, str], plugins: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package that imports its public names when they are first used.

    ``modules`` has the module in the package that defines each public name, and ``plugins`` the plugin that defines
    each name of another distribution.
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> object:
        if name in plugins:
            value = getattr(plugin(plugins[name]), name)
        elif name in modules:
            value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value
        return value

    return get, lambda: sorted({*namespace, *modules, *plugins})


class StorageError(RuntimeError):
    """The base class of the errors of cold stores and parameter servers. The message says which one, and why."""


class RecStoreWarning(UserWarning):
    """The category of all warnings of this package, for warning filters."""


def warn_user(message: str) -> None:
    """Issues a warning at the user's line: the nearest caller outside this package, torch and TorchRec.

    The message has the cause and the fix. Python shows the same text once per line, so that one without the name of a
    table, a step or an id is shown once for a whole model.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).split(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    # warnings.warn with a stacklevel cannot be used, because it skips some frames of an import.
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


def leave_to_parent(thing: object) -> None:
    """Prevents processes that are forked later from finalizing ``thing``.

    It is for objects whose destructor waits for locks or threads, which a forked process does not have, or writes to
    files or connections, which belong to the parent.
    """
    _of_this_process.add(thing)


def _leave_all() -> None:
    for thing in _of_this_process:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_leave_all)
