"""Lazy imports, warnings, errors and forked processes, for all packages of
torchrec_recstore, without torch.

Tests: tests/test_warnings.py, tests/test_star_imports.py.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType, MappingProxyType, ModuleType

from torchrec_recstore.installing import install
from torchrec_recstore.plugins import is_installed, plugin

_OURS = (
    "torchrec_recstore",
    "torchrec_recstore_service",
    "torchrec_recstore_serving",
)
_NOT_THE_USERS = (
    *_OURS,
    "torchrec",
    "torch",
    "typing_extensions",
    "importlib",
)
_TORCHREC = ("torchrec", "fbgemm_gpu")
_of_this_process: weakref.WeakSet[object] = weakref.WeakSet()


def ceil_div(dividend: int, divisor: int) -> int:
    """Returns a quotient, rounded up."""
    return -(-dividend // divisor)


def aligned(size: int, alignment: int) -> int:
    """Returns the least multiple of ``alignment`` that is not less than ``size``."""
    return ceil_div(size, alignment) * alignment


def lazy_names(
    package: str,
    modules: Mapping[str, str],
    plugins: Mapping[str, str] = MappingProxyType({}),
    *,
    public: Sequence[str],
    with_torchrec: Collection[str] = (),
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package that imports its public
    names when they are first used.

    ``__getattr__`` also returns ``__all__``. Neither ``__all__`` nor ``__dir__`` has a
    name of what is not installed, so that ``from package import *``, ``help`` and
    completion work. The name itself raises an error that says what to install.

    Args:
        package: The name of the package.
        modules: The module in the package that defines each name.
        plugins: The plugin that defines each name of another distribution. Default:
            none.
        public: The names of ``__all__`` if everything is installed.
        with_torchrec: The names in ``modules`` that need TorchRec. Default: none.
    """
    namespace = vars(sys.modules[package])

    def absent() -> set[str]:
        names = set() if _has_torchrec() else set(with_torchrec)
        for name, owner in plugins.items():
            if not is_installed(owner):
                names.add(name)
        return names

    def get(name: str) -> object:
        if name == "__all__":
            left_out = absent()
            return [
                public_name for public_name in public if public_name not in left_out
            ]
        if name in plugins:
            value = getattr(plugin(plugins[name]), name)
        elif name in modules:
            module = _imported(f"{package}.{modules[name]}", name)
            value = getattr(module, name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value
        return value

    def names() -> list[str]:
        return sorted({*namespace, *modules, *plugins, "__all__"} - absent())

    return get, names


def _has_torchrec() -> bool:
    return all(_can_be_found(name) for name in _TORCHREC)


def _can_be_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (
        ModuleNotFoundError,
        ValueError,
    ):  # ValueError: a module without a specification is in its place.
        return False


def _imported(module: str, name: str) -> ModuleType:
    """Imports the module of a public name, or raises an error that says how to install
    TorchRec.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _TORCHREC or _can_be_found(missing):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {missing}, which is not installed: {install('torchrec')};"
            " docs/install.md has the commands for a machine without a GPU",
            name=error.name,
        ) from error


class StorageError(RuntimeError):
    """The base class of the errors of cold stores and parameter servers.

    The message says which one, and why.
    """


class RecStoreWarning(UserWarning):
    """The category of all warnings of this package, for warning filters."""


def warn_user(message: str) -> None:
    """Issues a warning at the user's line: the nearest caller outside this package,
    torch and TorchRec.

    The message has the cause and the fix. Python shows the same text once per line, so
    that one without the name of a table, a step or an id is shown once for a whole
    model.
    """
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames.
    while (
        frame.f_back is not None and _module_of(frame).split(".")[0] in _NOT_THE_USERS
    ):
        frame = frame.f_back
    # warnings.warn cannot be used: with a stacklevel, it skips some frames of an import,
    # and Python 3.10 and 3.11 lack its argument skip_file_prefixes.
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

    It is for objects whose destructor waits for locks or threads, which a forked
    process does not have, or writes to files or connections, which belong to the
    parent.
    """
    _of_this_process.add(thing)


def _leave_all() -> None:
    for thing in _of_this_process:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_leave_all)
