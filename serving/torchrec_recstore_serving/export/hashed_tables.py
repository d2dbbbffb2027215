"""Served tables that search ids by hash, in the native library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_recstore_serving.export.model_table import NativeTable, TableWithRows
from torchrec_recstore_serving.export.native_library import load_library
from torchrec_recstore_serving.export.row_formats import TYPE_NUMBERS
from torchrec_recstore_serving.export.sorted_tables import ServedTable


class HashedTable(NativeTable, TableWithRows):
    """A served table whose ids and rows are in an object of the native library.

    It has rows of any row format.

    A copy of a scripted module shares the rows with the original, and takes little time
    and memory. The copy may be changed while other threads call the original.

    Args:
        name: The table's name.
        dim: The number of columns.
        row_format: A name in
            :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
        ids: (R,) int64. The ids, without duplicates.
        rows: (R + 1, ...). The rows in the row format, after a first row for ids
            without a row.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        row_format: str,
        ids: Tensor,
        rows: Tensor,
    ) -> None:
        load_library()
        super().__init__(name, dim, row_format, has_ids=True)
        self.native = torch.classes.recstore.ServedTable(
            TYPE_NUMBERS.get(row_format, 0),
            dim,
            ids.contiguous(),
            rows.contiguous(),
        )

    @torch.jit.export
    def raw_ids(self) -> Tensor:
        """See :meth:`TableWithRows.raw_ids`."""
        return self.native.ids()  # type: ignore[no-any-return]

    @torch.jit.export
    def stored_rows(self) -> Tensor:
        """See :meth:`TableWithRows.stored_rows`."""
        rows = self.native.stored(self.native.ids())
        return torch.cat([self.native.missing_row(), rows])

    @torch.jit.export
    def row_like(self) -> Tensor:
        """See :meth:`TableWithRows.row_like`."""
        return self.native.missing_row()  # type: ignore[no-any-return]

    @torch.jit.export
    def row_count(self) -> int:
        """See :meth:`ModelTable.row_count`."""
        return self.native.count()  # type: ignore[no-any-return]

    @torch.jit.export
    def size_bytes(self) -> int:
        """See :meth:`ModelTable.size_bytes`. The size of the index counts, too."""
        return self.native.bytes()  # type: ignore[no-any-return]

    @torch.jit.export
    def give_rows_of(self, table: str, values: Tensor, results: list[Tensor]) -> None:
        """Appends three tensors to ``results``, if this table has the name ``table``.

        They are the rows of the ids in the row format, whether each id has a row, (N,)
        bool, and the row for ids without a row.
        """
        if table == self.name:
            results.append(self.native.stored(values))
            results.append(self.native.contains(values))
            results.append(self.native.missing_row())

    @torch.jit.export
    def give_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See :meth:`ModelTable.give_tensors`. The tensor is the checksum of the rows
        in memory.
        """
        checksum = self.native.recomputed_checksum()
        tensors[self.name + "/checksum"] = torch.tensor([checksum])

    @torch.jit.export
    def give_tensors_after(
        self,
        delta: dict[str, Tensor],
        tensors: dict[str, Tensor],
    ) -> None:
        """See :meth:`ModelTable.give_tensors_after`."""
        checksum: int = self.native.checksum()
        if self.name + "/ids" in delta:
            checksum = self.native.checksum_after(
                delta[self.name + "/ids"],
                delta[self.name + "/rows"],
                delta[self.name + "/removed"],
            )
        tensors[self.name + "/checksum"] = torch.tensor([checksum])

    @torch.jit.export
    def prepare_delta(
        self,
        delta: dict[str, Tensor],
        tensors: dict[str, Tensor],
    ) -> None:
        """Makes the rows after a delta, and adds their checksum to ``tensors``.

        :meth:`take_delta` uses the rows.
        """
        checksum: int = self.native.checksum()
        self.native.abandon()
        if self.name + "/ids" in delta:
            checksum = self.native.prepare(
                delta[self.name + "/ids"],
                delta[self.name + "/rows"],
                delta[self.name + "/removed"],
            )
        tensors[self.name + "/checksum"] = torch.tensor([checksum])

    @torch.jit.export
    def take_delta(
        self,
        delta: dict[str, Tensor],
        ids: dict[str, Tensor],
        rows: dict[str, Tensor],
    ) -> None:
        """Changes the rows to those that :meth:`prepare_delta` has made.

        The arguments are not used.
        """
        self.native.commit()

    @torch.jit.export
    def end_delta(self) -> None:
        """See :meth:`ModelTable.end_delta`."""
        self.native.end()

    @torch.jit.export
    def replace_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """See :meth:`TableWithRows.replace_rows`."""
        self.native.prepare(ids, rows, removed)
        self.native.commit()
        self.native.end()


_INDEXES = ("sorted", "hash")
_PLACES_OF_ROWS = ("memory", "mapped", "servers")


def check_index(index: str, rows: str = "memory") -> None:
    """Refuses a value of ``index`` or ``rows`` that is invalid or cannot be used.

    ``"hash"`` needs the native library.

    Raises:
        TypeError, ValueError, ImportError: ``index`` or ``rows`` cannot be used.
    """
    _check_choice("index", index, _INDEXES)
    _check_choice("rows", rows, _PLACES_OF_ROWS)
    if rows == "mapped" and index != "hash":
        raise ValueError(
            'rows="mapped" needs index="hash": the library of the hash index maps the'
            " rows"
        )
    if rows == "servers" and index != "hash":
        raise ValueError(
            'rows="servers" needs index="hash": the library of the hash index reads the'
            " rows"
        )
    if index == "hash":
        load_library()


def _check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    *first_choices, last_choice = [f'"{choice}"' for choice in choices]
    accepted = f"{argument} must be {', '.join(first_choices)} or {last_choice}"
    if not isinstance(value, str):
        raise TypeError(f"{accepted}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{accepted}, got {value!r}")


def mapped_tables(model: nn.Module, rows: str) -> list[HashedTable]:
    """Returns the tables whose rows a process maps from the model's file."""
    if rows != "mapped":
        return []
    return [module for module in model.modules() if isinstance(module, HashedTable)]


def hashed(model: nn.Module) -> nn.Module:
    """Replaces the tables of a served model by tables that search ids by hash.

    Args:
        model: The model. It is changed and returned. TorchRec's own tables, in which
            row i is id i, stay as they are.
    """
    hashed_tables: dict[int, HashedTable] = {}
    for module in list(model.modules()):
        for name, table in list(module._modules.items()):
            if not isinstance(table, ServedTable) or not table.has_ids:
                continue
            if id(table) not in hashed_tables:
                hashed_tables[id(table)] = HashedTable(
                    name=table.name,
                    dim=table.dim,
                    row_format=table.row_format,
                    ids=table.raw_ids(),
                    rows=table.rows,
                )
            module._modules[name] = hashed_tables[id(table)]
    return model
