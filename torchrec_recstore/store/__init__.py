"""Tables: stores of rows by id, and their cold stores.

They need torch, not TorchRec.
"""

from torchrec_recstore.store.cold_backends import open_cold_store
from torchrec_recstore.store.cold_store import (
    ColdStore,
    ColdStoreError,
    SharedColdStore,
)
from torchrec_recstore.store.left_ids import LeftIds
from torchrec_recstore.store.parts import Part, Parts
from torchrec_recstore.store.snapshot import Snapshot
from torchrec_recstore.store.table import Table
from torchrec_recstore.store.table_state import TableState, TableStats

__all__ = [
    "ColdStore",
    "ColdStoreError",
    "LeftIds",
    "Part",
    "Parts",
    "SharedColdStore",
    "Snapshot",
    "Table",
    "TableState",
    "TableStats",
    "open_cold_store",
]
