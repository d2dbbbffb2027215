"""Exports trained models as static, quantised, scripted models that run without this
package.

See docs/serving.md.

Names are imported when they are first used, so that the export of a checkpoint does not
need TorchRec's sharding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore.utils import lazy_names

if TYPE_CHECKING:
    from torchrec_recstore_serving.delta import DeltaInfo, read_delta
    from torchrec_recstore_serving.export import export_delta, export_for_inference
    from torchrec_recstore_serving.follower import Follower, follow
    from torchrec_recstore_serving.follower_state import FollowerState
    from torchrec_recstore_serving.from_checkpoint import (
        export_checkpoint,
        export_checkpoint_delta,
    )
    from torchrec_recstore_serving.library import load_library
    from torchrec_recstore_serving.packages import load_package, sign_package
    from torchrec_recstore_serving.publish import DeltaPublisher
    from torchrec_recstore_serving.retrieval import Retrieval
    from torchrec_recstore_serving.retrieval_export import export_retrieval
    from torchrec_recstore_serving.served_model import scriptable
    from torchrec_recstore_serving.verification import verify

_MODULES = {
    "DeltaInfo": "delta",
    "DeltaPublisher": "publish",
    "Follower": "follower",
    "FollowerState": "follower_state",
    "Retrieval": "retrieval",
    "described": "delta",
    "export_checkpoint": "from_checkpoint",
    "export_checkpoint_delta": "from_checkpoint",
    "export_delta": "export",
    "export_for_inference": "export",
    "export_retrieval": "retrieval_export",
    "follow": "follower",
    "load_library": "library",
    "load_package": "packages",
    "read_delta": "delta",
    "scriptable": "served_model",
    "sign_package": "packages",
    "verify": "verification",
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
