"""Public names that are imported when first used, so that a part works where another part's imports are missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


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
