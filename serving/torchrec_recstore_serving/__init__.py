"""Exports trained models as static, scripted models that run without this package.

See docs/serving.md.

Names are imported when they are first used, so that the export of a checkpoint does not
need TorchRec's sharding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore.utils import lazy_names

if TYPE_CHECKING:
    from torchrec_recstore_serving.export.delta import DeltaInfo, read_delta
    from torchrec_recstore_serving.export.from_checkpoint import (
        export_checkpoint,
        export_checkpoint_delta,
    )
    from torchrec_recstore_serving.export.from_model import (
        export_delta,
        export_for_inference,
    )
    from torchrec_recstore_serving.export.native_library import load_library
    from torchrec_recstore_serving.export.packages import load_package, sign_package
    from torchrec_recstore_serving.export.scriptable_modules import scriptable
    from torchrec_recstore_serving.export.verification import verify
    from torchrec_recstore_serving.publish.follower import Follower, follow
    from torchrec_recstore_serving.publish.follower_state import FollowerState
    from torchrec_recstore_serving.publish.publisher import DeltaPublisher
    from torchrec_recstore_serving.retrieval.from_model import export_retrieval
    from torchrec_recstore_serving.retrieval.retrieval import Retrieval

_MODULES = {
    "DeltaInfo": "export.delta",
    "DeltaPublisher": "publish.publisher",
    "Follower": "publish.follower",
    "FollowerState": "publish.follower_state",
    "Retrieval": "retrieval.retrieval",
    "described": "export.description",
    "described_full": "publish.inspection",
    "described_publications": "publish.inspection",
    "export_checkpoint": "export.from_checkpoint",
    "export_checkpoint_delta": "export.from_checkpoint",
    "export_delta": "export.from_model",
    "export_for_inference": "export.from_model",
    "export_retrieval": "retrieval.from_model",
    "follow": "publish.follower",
    "is_program": "publish.inspection",
    "is_published": "publish.inspection",
    "load_library": "export.native_library",
    "load_package": "export.packages",
    "read_delta": "export.delta",
    "scriptable": "export.scriptable_modules",
    "sign_package": "export.packages",
    "verify": "export.verification",
}

__version__ = "0.2.0"

__all__ = [
    "DeltaInfo",
    "DeltaPublisher",
    "Follower",
    "FollowerState",
    "Retrieval",
    "export_checkpoint",
    "export_checkpoint_delta",
    "export_delta",
    "export_for_inference",
    "export_retrieval",
    "follow",
    "load_library",
    "load_package",
    "read_delta",
    "scriptable",
    "sign_package",
    "verify",
]

_WITHOUT_TORCHREC = {"FollowerState", "load_library", "verify"}
__getattr__, __dir__ = lazy_names(
    __name__,
    _MODULES,
    public=__all__,
    with_torchrec=_MODULES.keys() - _WITHOUT_TORCHREC,
)
del __all__  # __getattr__ returns it, with the names of what is installed
