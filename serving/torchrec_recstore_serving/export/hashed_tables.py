"""Served tables that search ids by hash, in the native library of
:mod:`torchrec_recstore_serving.export.native_library`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_recstore_serving.export.native_library import load_library
from torchrec_recstore_serving.export.row_formats import TYPE_NUMBERS
from torchrec_recstore_serving.export.sorted_tables import ServedTable


class HashedTable(ServedTable):
    """A served table whose ids and rows are in an object of the native library, in any
    row format.

    A copy of a scripted module shares the rows with the original, and takes little time
    and memory. The copy may be changed while other threads call the original. See
    :class:`ServedTable`; the methods are the same.

    Args:
        name: The table's name.
        dim: The number of columns.
        row_format: A name in :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
        ids: (R,) int64. The ids, without duplicates.
        rows: (R + 1, ...). The rows in the row format, after a first row for ids
            without a row.
    """

    def __init__(
        self, name: str, dim: int, row_format: str, ids: Tensor, rows: Tensor
    ) -> None:
        nn.Module.__init__(self)
        load_library()
        self.name = name
        self.dim = dim
        self.row_format = row_format
        self.has_ids = True
        self.version = ""
        self.attributes = ""
        self.native = torch.classes.recstore.ServedTable(
            TYPE_NUMBERS.get(row_format, 0), dim, ids.contiguous(), rows.contiguous()
        )

    def has_rows(self, values: Tensor) -> Tensor:
        """Returns whether each of (N,) raw ids has a row: (N,) bool."""
        return self.native.contains(values)  # type: ignore[no-any-return]

    def lookup(self, values: Tensor) -> Tensor:
        """Returns the rows of (N,) raw ids: (N, dim) float32."""
        return self.native.lookup(values)  # type: ignore[no-any-return]

    def pooled(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool
    ) -> Tensor:
        """Pools the rows of bags of ids.

        See :meth:`ServedTable.pooled`; the arguments are the same.
        """
        return self.native.pooled(values, lengths, weights, mean)  # type: ignore[no-any-return]

    @torch.jit.export
    def raw_ids(self) -> Tensor:
        """Returns the ids in ascending order: (R,) int64."""
        return self.native.ids()  # type: ignore[no-any-return]

    @torch.jit.export
    def stored_rows(self) -> Tensor:
        """Returns the rows in the row format, in the order of their ids, after the row
        for ids without a row.
        """
        return torch.cat(
            [self.native.missing_row(), self.native.stored(self.native.ids())]
        )

    @torch.jit.export
    def row_like(self) -> Tensor:
        """Returns the row for ids without a row: (1, ...) in the row format."""
        return self.native.missing_row()  # type: ignore[no-any-return]

    @torch.jit.export
    def row_count(self) -> int:
        """Returns the number of rows, without the row for ids without a row."""
        return self.native.count()  # type: ignore[no-any-return]

    @torch.jit.export
    def size_bytes(self) -> int:
        """Returns the size of the index and the rows in bytes."""
        return self.native.bytes()  # type: ignore[no-any-return]

    @torch.jit.export
    def give_rows_of(self, table: str, values: Tensor, found: list[Tensor]) -> None:
        """Appends to ``found``, if this table has the name ``table``: the rows of ids
        in the row format, and (N,) bool.

        The second tensor says which of the ids have a row. The third tensor is the row
        for ids without a row.
        """
        if table == self.name:
            found.append(self.native.stored(values))
            found.append(self.native.contains(values))
            found.append(self.native.missing_row())

    @torch.jit.export
    def give_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Adds the checksum of the rows in memory to ``tensors``, with the name that
        the version is computed with.
        """
        tensors[self.name + "/checksum"] = torch.tensor(
            [self.native.recomputed_checksum()]
        )

    @torch.jit.export
    def give_tensors_after(
        self, delta: dict[str, Tensor], tensors: dict[str, Tensor]
    ) -> None:
        """Adds the checksum of the rows after a delta to ``tensors``.

        See :meth:`give_tensors`.
        """
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
        self, delta: dict[str, Tensor], tensors: dict[str, Tensor]
    ) -> None:
        """Makes the rows after a delta, which :meth:`take_delta` uses, and adds their
        checksum to ``tensors``.
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
        self, delta: dict[str, Tensor], ids: dict[str, Tensor], rows: dict[str, Tensor]
    ) -> None:
        """Changes the rows to those that :meth:`prepare_delta` has made.

        The other arguments are not used.
        """
        self.native.commit()

    @torch.jit.export
    def end_delta(self) -> None:
        """Frees what only the rows before :meth:`take_delta` need."""
        self.native.end()

    @torch.jit.export
    def replace_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """Inserts or replaces rows, and removes other rows.

        See :meth:`ServedTable.replace_rows`.
        """
        self.native.prepare(ids, rows, removed)
        self.native.commit()
        self.native.end()


def check_index(index: str, rows: str = "memory") -> None:
    """Refuses an invalid value of ``index`` or ``rows``, and ``"hash"`` if the native
    library cannot be loaded.

    Raises:
        TypeError, ValueError, ImportError: ``index`` or ``rows`` cannot be used.
    """
    of_rows = ("memory", "mapped", "servers")
    for name, value, values in (
        ("index", index, ("sorted", "hash")),
        ("rows", rows, of_rows),
    ):
        accepted = (
            f"{name} must be "
            + ", ".join(f'"{each}"' for each in values[:-1])
            + f' or "{values[-1]}"'
        )
        if not isinstance(value, str):
            raise TypeError(f"{accepted}, got {type(value).__name__}")
        if value not in values:
            raise ValueError(f"{accepted}, got {value!r}")
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


def mapped_tables(model: nn.Module, rows: str) -> list[HashedTable]:
    """Returns the tables of a served model whose rows a process maps from the model's
    file.
    """
    return [
        module
        for module in model.modules()
        if rows == "mapped" and isinstance(module, HashedTable)
    ]


def hashed(model: nn.Module) -> nn.Module:
    """Replaces the tables of a served model that search sorted ids by tables that
    search by hash.

    Args:
        model: The model. It is changed and returned. TorchRec's own tables, in which
            row i is id i, stay as they are.
    """
    made: dict[int, HashedTable] = {}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if (
                isinstance(child, ServedTable)
                and child.has_ids
                and not isinstance(child, HashedTable)
            ):
                if id(child) not in made:
                    made[id(child)] = HashedTable(
                        child.name,
                        child.dim,
                        child.row_format,
                        child.raw_ids(),
                        child.rows,
                    )
                module._modules[name] = made[id(child)]
    return model
