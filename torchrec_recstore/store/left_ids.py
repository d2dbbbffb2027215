"""The ids whose rows have left a table.

Tests: tests/store/test_left_ids.py, tests/distributed/test_row_functions.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_recstore.store.parts import Owned


@dataclass(frozen=True, eq=False)
class LeftIds:
    """The ids whose rows have left a table: by eviction, expiry, removal, or because
    other rows were loaded.

    Args:
        ids: (N,) int64, ascending. The ids that had a row and have none now. It is
            empty unless ``complete``.
        complete: Whether these are all of the ids that have left. If False, more ids
            have left than the record can hold (``TableOptions.left_ids``), and the
            record has dropped them.
    """

    ids: Tensor
    complete: bool

    @staticmethod
    def merged(records: Iterable[LeftIds]) -> LeftIds:
        """Returns the record of a table from those of its shards, also of several
        shards with the same ids.
        """
        records = list(records)
        if not all(record.complete for record in records):
            return LeftIds(_no_ids(), complete=False)
        ids = torch.cat([_no_ids(), *(record.ids for record in records)])
        return LeftIds(torch.unique(ids), complete=True)

    def owned(self, owned: Owned | None) -> LeftIds:
        """Returns the record of the shard to which the ids for which ``owned`` is true
        belong.
        """
        if owned is None:
            return self
        return LeftIds(self.ids[owned(self.ids)], self.complete)

    def __repr__(self) -> str:
        return f"LeftIds(ids={self.ids}, complete={self.complete})"


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)
