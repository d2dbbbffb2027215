"""Served tables: modules for TorchScript and ``torch.export`` that map raw ids to rows.

The scripted modules do not need this package, and with float32 rows they need only
torch. A forward does not change buffers, so several threads may call it at the same
time. No thread may call it during :meth:`ServedTable.replace_rows`.

Tests: tests/serving/export/test_hashed_tables.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrec_recstore_serving.export.row_formats import TYPE_NUMBERS

_LAST_ID = 2**63 - 1


def id_buffer(ids: Tensor) -> Tensor:
    """Makes the buffer of ids for :func:`rows_of_ids`.

    Args:
        ids: (R,) int64. The ids in ascending order.

    Returns:
        (R + 1,) int64: the ids and the greatest int64, so that the result of a search
        is always a valid position.
    """
    return torch.cat([ids, torch.full((1,), _LAST_ID, dtype=torch.int64)])


@torch.fx.wrap
def integers(values: Tensor, name: str) -> Tensor:
    """Converts ids, lengths or offsets to int64.

    Floats are refused, because they do not hold every integer: float32 holds 20000001
    as 20000000, which is another id.

    Raises:
        ValueError: The tensor is not of an integer type. The message begins with
            ``name``.
    """
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(name + " must be integers")
    return values.to(torch.int64)


def check_ids(values: Tensor) -> None:
    """Refuses tensors that are not ids.

    Raises:
        ValueError: The tensor is not one-dimensional or does not contain integers.
    """
    if values.dim() != 1:
        raise ValueError("values must be integers of shape (N,)")
    integers(values, "values")


def check_lengths(values: Tensor, lengths: Tensor) -> None:
    """Refuses lengths of bags that do not fit the ids of the bags.

    FBGEMM's op of quantized rows does not check lengths: it would read memory after the
    end of the ids (fbgemm 1.8.0).

    Args:
        values: (N,). The ids.
        lengths: (bags,) of an integer type. The number of ids of each bag.

    Raises:
        ValueError: A length is negative, or the lengths do not add up to N. It is not
            raised in a program of ``torch.export``, which has no checks of values.
    """
    if torch.jit.is_scripting() or not torch.compiler.is_compiling():  # type: ignore[attr-defined]
        _check_lengths(values, lengths)


def _check_lengths(values: Tensor, lengths: Tensor) -> None:
    is_negative = bool(torch.any(lengths < 0).item())
    if is_negative or int(lengths.sum().item()) != values.shape[0]:
        raise ValueError(
            "lengths must not be negative and add up to the number of values"
        )


@torch.fx.wrap
def rows_of_ids(ids: Tensor, values: Tensor) -> Tensor:
    """Returns the row numbers of ids.

    Args:
        ids: (R + 1,) int64. The result of :func:`id_buffer`.
        values: (N,) of any integer type. The raw ids.

    Returns:
        (N,) int64: 1 + the position in ``ids``, or 0 for an id that is not in ``ids``.

    Raises:
        ValueError: See :func:`integers`.
    """
    wanted = integers(values, "values")
    places = torch.searchsorted(ids, wanted)
    found = (ids[places] == wanted) & (places < ids.shape[0] - 1)
    return torch.where(found, places + 1, torch.zeros_like(places))


@torch.fx.wrap
def rows_of_numbers(rows: int, values: Tensor) -> Tensor:
    """Returns row numbers for a table of TorchRec: 0 for a row that does not exist, as
    in FBGEMM's bounds check.
    """
    wanted = integers(values, "values")
    return torch.where(
        (wanted >= 0) & (wanted < rows), wanted, torch.zeros_like(wanted)
    )


@torch.fx.wrap
def offsets_of(lengths: Tensor) -> Tensor:
    """Converts (bags,) lengths to (bags + 1,) int64 offsets."""
    return F.pad(integers(lengths, "lengths").cumsum(0), [1, 0])


@torch.fx.wrap
def pooled_in_order(
    weight: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool
) -> Tensor:
    """Pools bags of rows by the sum or the mean.

    The results are bit-equal to those of RecStore's kernels.

    Args:
        weight: (R, dim) floating point. The rows.
        rows: (N,) int64. The row numbers.
        offsets: (bags + 1,) of an integer type. The offsets of the bags in ``rows``.
        weights: (N,) floating point. The weights of the rows. None: no weights.
        mean: Whether each sum is divided by the length of its bag.

    Returns:
        (bags, dim) float32.
    """
    if weights is not None:
        # nn.EmbeddingBag rounds once for a multiplication and an addition, and
        # RecStore's kernels round twice (torch 2.13).
        weight = F.embedding(rows, weight).float() * weights.to(
            torch.float32
        ).unsqueeze(1)
        rows = torch.arange(rows.shape[0], device=rows.device)
    out = F.embedding_bag(
        rows,
        weight.float(),
        offsets.to(torch.int64),
        norm_type=2.0,
        mode="sum",
        include_last_offset=True,
    )
    if mean:
        lengths = (offsets[1:] - offsets[:-1]).clamp(min=1)
        out = out / lengths.unsqueeze(1).to(out.dtype)
    return out


def check_tensor(
    delta: dict[str, Tensor], key: str, tensor: Tensor, known: list[str]
) -> None:
    """Refuses a delta whose tensor :func:`take_tensor` cannot copy.

    If the delta has the key, appends it to ``known``.

    Raises:
        ValueError: The shape or data type differs. The message names the key.
    """
    if key in delta:
        known.append(key)
        if delta[key].shape != tensor.shape or delta[key].dtype != tensor.dtype:
            raise ValueError(key + " is of another shape or data type in the delta")


def take_tensor(delta: dict[str, Tensor], key: str, tensor: Tensor) -> None:
    """Copies a tensor of a delta to the model's tensor, if the delta has the key."""
    if key in delta:
        tensor.detach().copy_(delta[key])


class ServedTable(nn.Module):
    """A served table of float32 rows. :class:`ServedQuantTable` is the subclass for the
    other row formats.

    Args:
        name: The table's name.
        dim: The number of columns.
        row_format: A name in :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
        ids: (R,) int64. The ids in ascending order. None for a table of TorchRec, in
            which row i is id i.
        rows: (R + 1, ...). The rows in the row format, after a first row for ids
            without a row. Without ids: (R, ...), without that first row.
    """

    if TYPE_CHECKING:  # TorchScript must not read these annotations.
        ids: Tensor
        rows: Tensor

    def __init__(
        self, name: str, dim: int, row_format: str, ids: Tensor | None, rows: Tensor
    ) -> None:
        super().__init__()
        self.name = name
        self.dim = dim
        self.row_format = row_format
        self.has_ids = ids is not None
        self.version = ""
        self.attributes = ""
        self.register_buffer(
            "ids", torch.empty(0, dtype=torch.int64) if ids is None else id_buffer(ids)
        )
        self.register_buffer("rows", rows)

    def row_numbers(self, values: Tensor) -> Tensor:
        """Returns the row numbers of (N,) raw ids: (N,) int64."""
        if self.has_ids:
            return rows_of_ids(self.ids, values)
        return rows_of_numbers(self.rows.shape[0], values)

    def has_rows(self, values: Tensor) -> Tensor:
        """Returns whether each of (N,) raw ids has a row: (N,) bool."""
        return self.row_numbers(values) != 0

    def lookup(self, values: Tensor) -> Tensor:
        """Returns the rows of (N,) raw ids: (N, dim) float32."""
        return F.embedding(self.row_numbers(values), self.rows)

    def pooled(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool
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
            ValueError: See :func:`integers` and :func:`check_lengths`.
        """
        check_lengths(values, integers(lengths, "lengths"))
        return pooled_in_order(
            self.rows, self.row_numbers(values), offsets_of(lengths), weights, mean
        )

    @torch.jit.export
    def raw_ids(self) -> Tensor:
        """Returns the ids in ascending order: (R,) int64, or (0,) for a table of
        TorchRec.
        """
        return self.ids[:-1]

    @torch.jit.export
    def give_ids(self, table: str, found: list[Tensor]) -> None:
        """Appends the result of :meth:`raw_ids` to ``found`` if this table has the name
        ``table``.
        """
        if table == self.name:
            found.append(self.raw_ids())

    @torch.jit.export
    def give_rows(self, table: str, found: list[Tensor]) -> None:
        """Appends the rows to ``found`` if this table has the name ``table``."""
        if table == self.name:
            found.append(self.stored_rows())

    @torch.jit.export
    def stored_rows(self) -> Tensor:
        """Returns the rows in the row format, after a first row for ids without a row
        if the table has ids.
        """
        return self.rows

    @torch.jit.export
    def row_like(self) -> Tensor:
        """Returns one row of the data type and the shape of the rows, or no row of an
        empty table of TorchRec.
        """
        return self.rows[:1]

    @torch.jit.export
    def row_count(self) -> int:
        """Returns the number of rows, without the row for ids without a row."""
        return self.rows.shape[0] - int(self.has_ids)

    @torch.jit.export
    def size_bytes(self) -> int:
        """Returns the size of the ids and the rows in bytes."""
        return (
            self.ids.numel() * self.ids.element_size()
            + self.rows.numel() * self.rows.element_size()
        )

    @torch.jit.export
    def give_rows_of(self, table: str, values: Tensor, found: list[Tensor]) -> None:
        """Appends nothing. See :meth:`HashedTable.give_rows_of`."""

    @torch.jit.export
    def give_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Adds the table's tensors to ``tensors``, with the names that the model's
        version is computed with.
        """
        tensors[self.name + "/ids"] = self.ids
        tensors[self.name + "/rows"] = self.rows

    @torch.jit.export
    def check_delta(self, delta: dict[str, Tensor], known: list[str]) -> None:
        """Refuses a delta that :meth:`take_delta` cannot apply, and appends the keys of
        this table to ``known``.

        Raises:
            ValueError: A key is missing. See :meth:`check_rows` for other errors.
        """
        if self.name + "/ids" in delta:
            keys = [self.name + "/ids", self.name + "/rows", self.name + "/removed"]
            for key in keys:
                known.append(key)
                if key not in delta:
                    raise ValueError("the delta has no " + key)
            self.check_rows(delta[keys[0]], delta[keys[1]], delta[keys[2]])

    @torch.jit.export
    def take_delta(
        self, delta: dict[str, Tensor], ids: dict[str, Tensor], rows: dict[str, Tensor]
    ) -> None:
        """Applies a delta.

        Args:
            delta: The delta. :meth:`check_delta` has accepted it.
            ids: The new ids of the tables that have already applied the delta, by name.
                If a copy of this table is among them, this table shares its tensors.
            rows: The new rows of these tables, by name.
        """
        if self.name + "/ids" not in delta:
            return
        if self.name not in ids:
            self.replace_rows(
                delta[self.name + "/ids"],
                delta[self.name + "/rows"],
                delta[self.name + "/removed"],
            )
            ids[self.name] = self.ids
            rows[self.name] = self.rows
        self.ids = ids[self.name]
        self.rows = rows[self.name]

    @torch.jit.export
    def give_tensors_after(
        self, delta: dict[str, Tensor], tensors: dict[str, Tensor]
    ) -> None:
        """Adds the tensors of :meth:`give_tensors` as they are after a delta.
        :meth:`check_delta` has accepted it.
        """
        self.prepare_delta(delta, tensors)

    @torch.jit.export
    def prepare_delta(
        self, delta: dict[str, Tensor], tensors: dict[str, Tensor]
    ) -> None:
        """Prepares :meth:`take_delta`, and does the same as :meth:`give_tensors_after`.

        The table is one of TorchRec's own; see :meth:`HashedTable.prepare_delta` for
        the other tables.
        """
        self.give_tensors(tensors)
        if self.name + "/ids" in delta:
            tensors[self.name + "/rows"] = self.rows.index_copy(
                0, delta[self.name + "/ids"], delta[self.name + "/rows"]
            )

    @torch.jit.export
    def end_delta(self) -> None:
        """Frees what only the rows before :meth:`take_delta` need."""

    @torch.jit.export
    def check_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """Refuses arguments that :meth:`replace_rows` cannot use.

        Raises:
            ValueError: A shape or a data type does not fit the table, or an id occurs
                twice. The message names the table.
        """
        mine = self.row_like()
        if (
            rows.dim() != 2
            or rows.shape[1] != mine.shape[1]
            or rows.dtype != mine.dtype
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
        every = torch.cat([ids, removed]).sort()[0]
        if torch.any(every[1:] == every[:-1]).item():
            raise ValueError(
                "table " + self.name + ": the delta has an id more than once"
            )
        if not self.has_ids and (
            removed.shape[0] > 0
            or torch.any((ids < 0) | (ids >= self.row_count())).item()
        ):
            raise ValueError(
                "table "
                + self.name
                + " is TorchRec's own, and the delta has rows beyond it"
            )

    @torch.jit.export
    def replace_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """Inserts or replaces rows, and removes other rows. :meth:`check_rows` has
        accepted the arguments.

        Args:
            ids: (N,) int64. The ids whose rows are inserted or replaced, without
                duplicates.
            rows: (N, ...). The rows of ``ids`` in the row format.
            removed: (M,) int64. The ids whose rows are removed. None of them is in
                ``ids``.
        """
        if not self.has_ids:
            self.rows = self.rows.index_copy(0, ids, rows)
            return
        before = self.ids[:-1]
        stays = torch.logical_not(torch.isin(before, torch.cat([ids, removed])))
        ids, order = torch.cat([before[stays], ids]).sort()
        self.rows = torch.cat(
            [self.rows[:1], torch.cat([self.rows[1:][stays], rows])[order]]
        )
        self.ids = torch.cat([ids, self.ids[-1:]])


class ServedQuantTable(ServedTable):
    """A served table of float16, int8 or int4 rows.

    The op of TorchRec's quantised modules looks up the rows.
    """

    def __init__(
        self, name: str, dim: int, row_format: str, ids: Tensor | None, rows: Tensor
    ) -> None:
        super().__init__(name, dim, row_format, ids, rows)
        self._type_number = TYPE_NUMBERS[row_format]

    def lookup(self, values: Tensor) -> Tensor:
        """Returns the rows of (N,) raw ids: (N, dim) float32."""
        return self._read(
            values, torch.arange(values.shape[0] + 1, device=values.device), None, 2
        )

    def pooled(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool
    ) -> Tensor:
        """Pools the rows of bags of ids.

        See :meth:`ServedTable.pooled`; the arguments are the same.
        """
        check_lengths(values, integers(lengths, "lengths"))
        return self._read(values, offsets_of(lengths), weights, 1 if mean else 0)

    def _read(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None, pooling: int
    ) -> Tensor:
        dims = [self.dim if self._type_number == number else 0 for number in range(4)]
        out: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.rows.view(-1),
            uvm_weights=torch.empty(0, dtype=torch.uint8),
            # EmbeddingLocation.HOST
            weights_placements=torch.tensor([3], dtype=torch.int32),
            weights_offsets=torch.tensor([0], dtype=torch.int64),
            weights_tys=torch.tensor([self._type_number], dtype=torch.uint8),
            D_offsets=torch.tensor([0, self.dim], dtype=torch.int32),
            total_D=self.dim,
            max_int2_D=0,
            max_int4_D=dims[3],
            max_int8_D=dims[2],
            max_float16_D=dims[1],
            max_float32_D=0,
            indices=self.row_numbers(values),
            offsets=offsets,
            pooling_mode=pooling,
            indice_weights=weights,
            output_dtype=0,  # SparseType.FP32
            row_alignment=16,
        )
        return out


def served_table(
    name: str, dim: int, row_format: str, ids: Tensor | None, rows: Tensor
) -> ServedTable:
    """Makes a table of the row format.

    See :class:`ServedTable`; the arguments are the same.
    """
    kind = ServedTable if row_format == "float32" else ServedQuantTable
    return kind(name, dim, row_format, ids, rows)


class ServedTables(nn.Module):
    """A module of served tables whose inputs and outputs are plain tensors.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: Sequence[ServedTable]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Sums the rows of bags of ids. There are B bags for each of T tables.

        Args:
            values: (N,) of any integer type. The raw ids: the bags of the first table,
                then the bags of the second table, and so on.
            lengths: (T, B) or (T * B,) of an integer type. The number of ids of each
                bag.

        Returns:
            (B, sum of dims) float32. The sums, table by table.

        Raises:
            ValueError: ``values`` are not integers, or ``lengths`` do not fit
                ``values``.
        """
        check_ids(values)
        count = len(self.tables)
        lengths = integers(lengths, "lengths")
        if lengths.numel() % count != 0:
            raise ValueError("lengths must be integers, for each bag of each table")
        lengths = lengths.reshape(count, -1)
        # The op of quantised rows does not check lengths: it would read memory after
        # the end of values.
        beyond = torch.any((lengths < 0) | (lengths > values.shape[0])).item()
        if beyond or int(lengths.sum().item()) != values.shape[0]:
            raise ValueError(
                "lengths must not be negative and add up to the number of values"
            )
        counts: list[int] = lengths.sum(1).tolist()
        outputs: list[Tensor] = []
        first = 0
        for number, table in enumerate(self.tables):
            outputs.append(
                table.pooled(  # type: ignore[operator]
                    values[first : first + counts[number]], lengths[number], None, False
                )
            )
            first += counts[number]
        return torch.cat(outputs, dim=1)

    @torch.jit.export
    def lookup(self, table: str, values: Tensor) -> Tensor:
        """Returns the rows of ids of one table.

        Args:
            table: The table's name.
            values: (N,) of any integer type. The raw ids.

        Returns:
            (N, dim) float32.

        Raises:
            ValueError: There is no such table, or ``values`` are not integers.
        """
        check_ids(values)
        for each in self.tables:
            if each.name == table:
                rows: Tensor = each.lookup(values)  # type: ignore[operator]
                return rows
        raise ValueError("there is no table " + table)
