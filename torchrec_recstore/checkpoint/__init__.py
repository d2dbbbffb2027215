"""Saves and loads models with RecStore tables, and converts rows to other formats.

Names are imported when they are first used, so that code that only inspects checkpoints
does not need TorchRec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_recstore.utils import lazy_names

if TYPE_CHECKING:
    from torchrec_recstore.checkpoint.apply import apply_delta as apply_delta
    from torchrec_recstore.checkpoint.background import AsyncSave as AsyncSave
    from torchrec_recstore.checkpoint.distributed import (
        load_distributed_checkpoint as load_distributed_checkpoint,
    )
    from torchrec_recstore.checkpoint.distributed import (
        load_distributed_state as load_distributed_state,
    )
    from torchrec_recstore.checkpoint.files import CheckpointError as CheckpointError
    from torchrec_recstore.checkpoint.fold import (
        compact_checkpoint as compact_checkpoint,
    )
    from torchrec_recstore.checkpoint.info import CheckpointInfo as CheckpointInfo
    from torchrec_recstore.checkpoint.info import TableInfo as TableInfo
    from torchrec_recstore.checkpoint.info import read_info as read_info
    from torchrec_recstore.checkpoint.load import load_checkpoint as load_checkpoint
    from torchrec_recstore.checkpoint.retention import keep_newest as keep_newest
    from torchrec_recstore.checkpoint.retention import newest as newest
    from torchrec_recstore.checkpoint.row_search import TopRows as TopRows
    from torchrec_recstore.checkpoint.row_search import neighbours as neighbours
    from torchrec_recstore.checkpoint.row_search import top_rows as top_rows
    from torchrec_recstore.checkpoint.save import async_save as async_save
    from torchrec_recstore.checkpoint.save import save_checkpoint as save_checkpoint
    from torchrec_recstore.checkpoint.stock import (
        export_dense_weights as export_dense_weights,
    )
    from torchrec_recstore.checkpoint.stock import (
        load_dense_weights as load_dense_weights,
    )
    from torchrec_recstore.checkpoint.stock import load_into_stock as load_into_stock
    from torchrec_recstore.checkpoint.stock import (
        load_stock_state_dict as load_stock_state_dict,
    )
    from torchrec_recstore.checkpoint.stock import (
        stock_optimizer_state_dict as stock_optimizer_state_dict,
    )
    from torchrec_recstore.checkpoint.stock import stock_state_dict as stock_state_dict

_NAMES = {
    "apply": "apply_delta",
    "background": "AsyncSave",
    "distributed": "load_distributed_checkpoint load_distributed_state",
    "files": "CheckpointError",
    "fold": "compact_checkpoint",
    "info": "CheckpointInfo TableInfo read_info",
    "load": "load_checkpoint",
    "retention": "keep_newest newest",
    "row_search": "TopRows neighbours top_rows",
    "save": "async_save save_checkpoint",
    "stock": (
        "export_dense_weights load_dense_weights load_into_stock load_stock_state_dict "
        "stock_optimizer_state_dict stock_state_dict"
    ),
}

_modules: dict[str, str] = {}
for _module, _names in _NAMES.items():
    for _name in _names.split():
        _modules[_name] = _module
_with_torchrec = [
    name
    for name, module in _modules.items()
    if module in ("apply", "distributed", "load", "save", "stock")
]
__getattr__, __dir__ = lazy_names(
    __name__,
    _modules,
    public=[*_modules],
    with_torchrec=_with_torchrec,
)
