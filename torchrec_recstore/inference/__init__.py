"""Trained models as static, quantised, scripted ones that need nothing of this project to run: docs/serving.md.

Names are imported when first used, so that exporting a checkpoint does without TorchRec's sharding.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrec_recstore.inference.export import export_for_inference
    from torchrec_recstore.inference.served_model import scriptable

_MODULES = {
    "export_for_inference": "export",
    "scriptable": "served_model",
}

__all__ = ["export_for_inference", "scriptable"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
