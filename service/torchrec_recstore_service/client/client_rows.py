"""How a client reads and updates rows, with the initial rows that an ``init_func`` makes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_recstore_service.client.backend import Backend, InitialRows, NoInitialRow
from torchrec_recstore_service.client.initial_rows import InitialRowMaker
from torchrec_recstore_service.wire.table_spec import TableSpec

_ATTEMPTS = 10  # of an update whose rows are deleted by other clients before the update is carried out

Read = tuple[Tensor | None, Tensor]
"""(N,) bool, which ids have a row, or None for all; and the rows of these ids."""


class ClientRows:
    """Reads and updates the rows of tables. ``makers`` has the maker of each table with an ``init_func``, by name."""

    def __init__(self) -> None:
        self.makers: dict[str, InitialRowMaker] = {}

    def reader(self, tables: Backend, name: str, spec: TableSpec, ids: Tensor) -> Callable[[], Read]:
        """Returns a function that reads the rows of ``ids``, (N,) int64. It may be called in any thread."""
        if spec.initial_rows:
            return lambda: tables.found_rows(name, ids)
        return lambda: (None, tables.pull(name, ids))

    def whole(self, name: str, spec: TableSpec, ids: Tensor, read: Read) -> Tensor:
        """Returns (N, dim): the rows that were read, and initial rows for the ids without a row.

        The initial rows are made in the caller's thread, because making them seeds torch's default generator.
        """
        found, rows = read
        if found is None or bool(found.all()):
            return rows
        missing, places = torch.unique(ids[~found], return_inverse=True)
        whole = rows.new_empty(len(ids), rows.shape[1])
        whole[found] = rows
        whole[~found] = self._maker(name, spec).rows(missing)[places]
        return whole

    def update(self, tables: Backend, name: str, spec: TableSpec, ids: Tensor, grads: Tensor) -> None:
        """Updates rows. See :meth:`Backend.update`; the initial rows of ids without a row are sent with the update."""
        for attempt in range(_ATTEMPTS):
            initial = None
            if spec.initial_rows:
                # After a refused attempt, initial rows are sent for all ids: the next attempt then lacks none.
                missing = torch.unique(ids[~tables.exists(name, ids)] if attempt == 0 else ids)
                initial = self._initial_rows(name, spec, missing)
            try:
                tables.update(name, ids, grads, initial)
                return
            except NoInitialRow as error:  # a row was deleted between exists and update
                if error.pending is None or attempt + 1 == _ATTEMPTS:
                    raise
                ids, grads = ids[error.pending], grads[error.pending]

    def _initial_rows(self, name: str, spec: TableSpec, ids: Tensor) -> InitialRows | None:
        """Returns the distinct ``ids`` with their initial rows, or None if there are no ids."""
        return (ids, self._maker(name, spec).rows(ids).float()) if len(ids) else None

    def _maker(self, name: str, spec: TableSpec) -> InitialRowMaker:
        maker = self.makers.get(name)
        if maker is None or maker.digest != spec.initial_rows:
            raise NoInitialRow(name)
        return maker
