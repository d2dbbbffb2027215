"""The names of ``torchrec-recstore-serving``, which exports trained models and serves
them.

See docs/serving.md.

Tests: tests/test_plugins.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore.plugins import is_installed, missing, plugin
from torchrec_recstore.utils import warn_user

if TYPE_CHECKING:
    from torchrec_recstore_serving import *  # noqa: F403


def __getattr__(name: str) -> object:
    # With the __path__ of the other package, Python would import its modules a second
    # time, below this one.
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__all__" and not is_installed("serving"):
        warn_user(f"torchrec_recstore.inference has no names: {missing('serving')}")
        return []
    return getattr(plugin("serving"), name)


def __dir__() -> list[str]:
    names = set(globals())
    if is_installed("serving"):
        names.update(
            name for name in dir(plugin("serving")) if not name.startswith("_")
        )
    return sorted(names)
