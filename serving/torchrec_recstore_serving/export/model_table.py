"""The interface of the tables in an exported model, of which there are three kinds.

:class:`ServedTable` searches sorted ids, :class:`HashedTable` searches ids by hash, and
:class:`ServerTable` reads rows on parameter servers.

Tests: tests/serving/export/test_hashed_tables.py and test_tables_on_servers.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn


class ModelTable(nn.Module):
    """A table of an exported model, which maps raw ids to rows.

    TorchScript compiles the tables. The methods that
    :mod:`torchrec_recstore_serving.export.torchscript` adds to a model call the methods
    below on every table, therefore each kind has all of them.

    Args:
        name: The table's name in the model.
        dim: The number of columns.
        row_format: A name in
            :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
        has_ids: Whether raw ids are searched. False for a table of TorchRec, in which
            row i is id i.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        row_format: str,
        has_ids: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.dim = dim
        self.row_format = row_format
        self.has_ids = has_ids
        self.version = ""
        """The version of the model that has the table."""
        self.attributes = ""
        """The checksum of that model's attributes."""

    # The model reads rows.

    def has_rows(self, values: Tensor) -> Tensor:
        """Returns whether each of (N,) raw ids has a row: (N,) bool."""
        raise NotImplementedError

    def lookup(self, values: Tensor) -> Tensor:
        """Returns the rows of (N,) raw ids: (N, dim) float32."""
        raise NotImplementedError

    def pooled(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        mean: bool,
    ) -> Tensor:
        """Pools the rows of bags of ids.

        Args:
            values: (N,) of any integer type. The raw ids, bag by bag.
            lengths: (bags,) of an integer type. The number of ids of each bag.
            weights: (N,) floating point. The weights of the ids. None: no weights.
            mean: Whether each sum is divided by the length of its bag.

        Returns:
            (bags, dim) float32.

        Raises:
            ValueError: ``values`` or ``lengths`` are not integers, a length is
                negative, or the lengths do not add up to N.
        """
        raise NotImplementedError

    # The model describes its tables, and gives their rows to the writer of a delta.

    def row_count(self) -> int:
        """Returns the number of rows in the model.

        The row for ids without a row does not count.
        """
        raise NotImplementedError

    def size_bytes(self) -> int:
        """Returns the size of the ids and the rows in the model in bytes."""
        raise NotImplementedError

    def give_ids(self, table: str, results: list[Tensor]) -> None:
        """Appends the ids to ``results`` if this table has the name ``table``.

        They are in ascending order, (R,) int64.
        """
        raise NotImplementedError

    def give_rows(self, table: str, results: list[Tensor]) -> None:
        """Appends the rows to ``results`` if this table has the name ``table``.

        They are in the row format.

        A first row for ids without a row is before them if the table has ids.
        """
        raise NotImplementedError

    def give_rows_of(self, table: str, values: Tensor, results: list[Tensor]) -> None:
        """Appends the rows of some ids to ``results``, if this table has the name.

        Only hashed tables do this: see :meth:`HashedTable.give_rows_of`.
        """
        raise NotImplementedError

    # The version of the model is computed from tensors of its tables.

    def give_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Adds tensors that determine the rows to ``tensors``.

        The version of the model is computed from these tensors and their names.
        """
        raise NotImplementedError

    def give_tensors_after(
        self,
        delta: dict[str, Tensor],
        tensors: dict[str, Tensor],
    ) -> None:
        """Adds the tensors of :meth:`give_tensors` as they are after a delta.

        :meth:`check_delta` has accepted the delta.
        """
        raise NotImplementedError

    # The model applies a delta: it checks, prepares, takes and ends it on all tables,
    # one step after the other.

    def check_delta(self, delta: dict[str, Tensor], known_keys: list[str]) -> None:
        """Refuses a delta that :meth:`take_delta` cannot apply.

        Appends the keys of this table to ``known_keys``.

        Raises:
            ValueError: The tensors of the delta do not fit the table.
        """
        raise NotImplementedError

    def prepare_delta(
        self,
        delta: dict[str, Tensor],
        tensors: dict[str, Tensor],
    ) -> None:
        """Prepares :meth:`take_delta`, and adds tensors as :meth:`give_tensors_after`."""
        raise NotImplementedError

    def take_delta(
        self,
        delta: dict[str, Tensor],
        ids: dict[str, Tensor],
        rows: dict[str, Tensor],
    ) -> None:
        """Applies a delta.

        Args:
            delta: The delta. :meth:`check_delta` has accepted it.
            ids: The new ids of the tables that have already applied the delta, by name.
                If a copy of this table is among them, this table shares its tensors.
            rows: The new rows of these tables, by name.
        """
        raise NotImplementedError

    def end_delta(self) -> None:
        """Frees what only the rows before :meth:`take_delta` need."""
        raise NotImplementedError


class NativeTable(ModelTable):
    """A table whose rows are read by ``native``, an object of the native library.

    The object also holds a version of the model for a call: its methods ``hold`` and
    ``change`` let a delta wait for the calls that run.
    """

    if TYPE_CHECKING:  # TorchScript would try to compile the annotation.
        native: Any

    def has_rows(self, values: Tensor) -> Tensor:
        """See :meth:`ModelTable.has_rows`."""
        return self.native.contains(values)  # type: ignore[no-any-return]

    def lookup(self, values: Tensor) -> Tensor:
        """See :meth:`ModelTable.lookup`."""
        return self.native.lookup(values)  # type: ignore[no-any-return]

    def pooled(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        mean: bool,
    ) -> Tensor:
        """See :meth:`ModelTable.pooled`."""
        return self.native.pooled(values, lengths, weights, mean)  # type: ignore[no-any-return]


class TableWithRows(ModelTable):
    """A table whose ids and rows are in the model, so that deltas change them."""

    def raw_ids(self) -> Tensor:
        """Returns the ids in ascending order: (R,) int64, or (0,) for a table of
        TorchRec.
        """
        raise NotImplementedError

    def stored_rows(self) -> Tensor:
        """Returns the rows in the row format, in the order of their ids.

        A first row for ids without a row is before them if the table has ids.
        """
        raise NotImplementedError

    def row_like(self) -> Tensor:
        """Returns one row of the data type and the shape of the rows.

        An empty table of TorchRec has none.

        If the table has ids, it is the row for ids without a row.
        """
        raise NotImplementedError

    def replace_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """Inserts or replaces rows, and removes other rows.

        :meth:`check_rows` has accepted the arguments.

        Args:
            ids: (N,) int64. The ids whose rows are inserted or replaced, without
                duplicates.
            rows: (N, ...). The rows of ``ids`` in the row format.
            removed: (M,) int64. The ids whose rows are removed. None of them is in
                ``ids``.
        """
        raise NotImplementedError

    @torch.jit.export
    def give_ids(self, table: str, results: list[Tensor]) -> None:
        """See :meth:`ModelTable.give_ids`."""
        if table == self.name:
            results.append(self.raw_ids())

    @torch.jit.export
    def give_rows(self, table: str, results: list[Tensor]) -> None:
        """See :meth:`ModelTable.give_rows`."""
        if table == self.name:
            results.append(self.stored_rows())

    @torch.jit.export
    def check_delta(self, delta: dict[str, Tensor], known_keys: list[str]) -> None:
        """See :meth:`ModelTable.check_delta`.

        Raises:
            ValueError: A key is missing. See :meth:`check_rows` for other errors.
        """
        ids_key = self.name + "/ids"
        rows_key = self.name + "/rows"
        removed_key = self.name + "/removed"
        if ids_key in delta:
            for key in [ids_key, rows_key, removed_key]:
                known_keys.append(key)
                if key not in delta:
                    raise ValueError("the delta has no " + key)
            self.check_rows(delta[ids_key], delta[rows_key], delta[removed_key])

    @torch.jit.export
    def check_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """Refuses arguments that :meth:`replace_rows` cannot use.

        Raises:
            ValueError: A shape or a data type does not fit the table, or an id occurs
                twice. The message names the table.
        """
        example = self.row_like()
        if (
            rows.dim() != 2
            or rows.shape[1] != example.shape[1]
            or rows.dtype != example.dtype
        ):
            raise ValueError(
                "table "
                + self.name
                + ": the delta's rows are of another dim or data type"
            )
        if ids.dim() != 1 or ids.dtype != torch.int64 or ids.shape[0] != rows.shape[0]:
            raise ValueError(
                "table " + self.name + ": the delta has not an int64 id for each row"
            )
        if removed.dim() != 1 or removed.dtype != torch.int64:
            raise ValueError(
                "table "
                + self.name
                + ": the delta's removed ids are no vector of int64"
            )
        sorted_ids = torch.cat([ids, removed]).sort()[0]
        is_repeated = sorted_ids[1:] == sorted_ids[:-1]
        if torch.any(is_repeated).item():
            raise ValueError(
                "table " + self.name + ": the delta has an id more than once"
            )
        if not self.has_ids:
            is_beyond = (ids < 0) | (ids >= self.row_count())
            if removed.shape[0] > 0 or torch.any(is_beyond).item():
                raise ValueError(
                    "table "
                    + self.name
                    + " is TorchRec's own, and the delta has rows beyond it"
                )
