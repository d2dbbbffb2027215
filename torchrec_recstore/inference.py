"""The names of ``torchrec-recstore-serving``, which exports trained models and serves them. See docs/serving.md.

Tests: tests/test_plugins.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore.plugins import plugin

if TYPE_CHECKING:
    from torchrec_recstore_serving import *  # noqa: F403


def __getattr__(name: str) -> object:
    # With the __path__ of the other package, Python would import its modules a second time, below this one.
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(plugin("serving"), name)


def __dir__() -> list[str]:
    return dir(plugin("serving"))
