"""Tables: stores of rows by id, and their cold stores. They need torch, not TorchRec."""

from torchrec_recstore.store.cold_backends import open_cold_store
from torchrec_recstore.store.cold_store import ColdStore, ColdStoreError, SharedColdStore
from torchrec_recstore.store.snapshot import Snapshot
from torchrec_recstore.store.stats import TableStats
from torchrec_recstore.store.table import Table
from torchrec_recstore.store.writing import insert_all, write_all

__all__ = [
    "ColdStore",
    "ColdStoreError",
    "SharedColdStore",
    "Snapshot",
    "Table",
    "TableStats",
    "insert_all",
    "open_cold_store",
    "write_all",
]
