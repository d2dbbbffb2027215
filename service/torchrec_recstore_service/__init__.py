"""Parameter servers for RecStore tables, and the client of tables by name.

Names are imported when they are first used, so that the command ``recstore`` starts
without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_recstore.utils import lazy_names

if TYPE_CHECKING:
    from torchrec_recstore_service.recstore_compat import RecStoreClient, get_kv_client
    from torchrec_recstore_service.wire.protocol import (
        NoInitialRow,
        ServerRestartedError,
        ServerSetError,
        ServiceError,
    )

__version__ = "0.2.0"

__all__ = [
    "NoInitialRow",
    "RecStoreClient",
    "ServerRestartedError",
    "ServerSetError",
    "ServiceError",
    "get_include",
    "get_kv_client",
]


def get_include() -> str:
    """Returns the path of the directory with ``recstore_client.h``, for C++ programs
    that call parameter servers.
    """
    return str(Path(__file__).parent / "include")


__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "NoInitialRow": "wire.protocol",
        "RecStoreClient": "recstore_compat",
        "ServerRestartedError": "wire.protocol",
        "ServerSetError": "wire.protocol",
        "ServiceError": "wire.protocol",
        "get_kv_client": "recstore_compat",
    },
    public=__all__,
)
