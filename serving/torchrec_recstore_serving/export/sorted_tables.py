"""Served tables that search sorted ids, for TorchScript and ``torch.export``.

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

from torchrec_recstore_serving.export.model_table import ModelTable, TableWithRows
from torchrec_recstore_serving.export.row_formats import TYPE_NUMBERS

_LAST_ID = 2**63 - 1


def id_buffer(ids: Tensor | None) -> Tensor:
    """Makes the buffer of ids for :func:`rows_of_ids`.

    Args:
        ids: (R,) int64. The ids in ascending order. None for a table of TorchRec, in
            which row i is id i.

    Returns:
        (R + 1,) int64: the ids and the greatest int64, so that the result of a search
        is always a valid position. (0,) for a table of TorchRec.
    """
    if ids is None:
        return torch.empty(0, dtype=torch.int64)
    last_id = torch.full((1,), _LAST_ID, dtype=torch.int64)
    return torch.cat([ids, last_id])


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
    total = int(lengths.sum().item())
    if is_negative or total != values.shape[0]:
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
    values = integers(values, "values")
    positions = torch.searchsorted(ids, values)
    last_position = ids.shape[0] - 1
    has_row = (ids[positions] == values) & (positions < last_position)
    return torch.where(has_row, positions + 1, torch.zeros_like(positions))


@torch.fx.wrap
def rows_of_numbers(rows: int, values: Tensor) -> Tensor:
    """Returns row numbers for a table of TorchRec.

    The number of a row that does not exist is 0, as in FBGEMM's bounds check.
    """
    values = integers(values, "values")
    has_row = (values >= 0) & (values < rows)
    return torch.where(has_row, values, torch.zeros_like(values))


@torch.fx.wrap
def offsets_of(lengths: Tensor) -> Tensor:
    """Converts (bags,) lengths to (bags + 1,) int64 offsets."""
    return F.pad(integers(lengths, "lengths").cumsum(0), [1, 0])


@torch.fx.wrap
def pooled_in_order(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    mean: bool,
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
        factors = weights.to(torch.float32).unsqueeze(1)
        weight = F.embedding(rows, weight).float() * factors
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
    delta: dict[str, Tensor],
    key: str,
    tensor: Tensor,
    known_keys: list[str],
) -> None:
    """Refuses a delta whose tensor :func:`take_tensor` cannot copy.

    If the delta has the key, appends it to ``known_keys``.

    Raises:
        ValueError: The shape or data type differs. The message names the key.
    """
    if key in delta:
        known_keys.append(key)
        new_tensor = delta[key]
        if new_tensor.shape != tensor.shape or new_tensor.dtype != tensor.dtype:
            raise ValueError(key + " is of another shape or data type in the delta")


def take_tensor(delta: dict[str, Tensor], key: str, tensor: Tensor) -> None:
    """Copies a tensor of a delta to the model's tensor, if the delta has the key."""
    if key in delta:
        tensor.detach().copy_(delta[key])


class ServedTable(TableWithRows):
    """A served table of float32 rows.

    :class:`ServedQuantTable` is the subclass for the other row formats.

    Args:
        name: The table's name.
        dim: The number of columns.
        row_format: A name in
            :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
        ids: (R,) int64. The ids in ascending order. None for a table of TorchRec, in
            which row i is id i.
        rows: (R + 1, ...). The rows in the row format, after a first row for ids
            without a row. Without ids: (R, ...), without that first row.
    """

    if TYPE_CHECKING:  # TorchScript must not read these annotations.
        ids: Tensor
        rows: Tensor

    def __init__(
        self,
        name: str,
        dim: int,
        row_format: str,
        ids: Tensor | None,
        rows: Tensor,
    ) -> None:
        super().__init__(name, dim, row_format, has_ids=ids is not None)
        self.register_buffer("ids", id_buffer(ids))
        self.register_buffer("rows", rows)

    def row_numbers(self, values: Tensor) -> Tensor:
        """Returns the row numbers of (N,) raw ids: (N,) int64."""
        if self.has_ids:
            return rows_of_ids(self.ids, values)
        return rows_of_numbers(self.rows.shape[0], values)

    def has_rows(self, values: Tensor) -> Tensor:
        """See :meth:`ModelTable.has_rows`."""
        return self.row_numbers(values) != 0

    def lookup(self, values: Tensor) -> Tensor:
        """See :meth:`ModelTable.lookup`."""
        return F.embedding(self.row_numbers(values), self.rows)

    def pooled(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        mean: bool,
    ) -> Tensor:
        """See :meth:`ModelTable.pooled`."""
        check_lengths(values, integers(lengths, "lengths"))
        return pooled_in_order(
            self.rows,
            self.row_numbers(values),
            offsets_of(lengths),
            weights,
            mean,
        )

    @torch.jit.export
    def raw_ids(self) -> Tensor:
        """See :meth:`TableWithRows.raw_ids`."""
        return self.ids[:-1]

    @torch.jit.export
    def stored_rows(self) -> Tensor:
        """See :meth:`TableWithRows.stored_rows`."""
        return self.rows

    @torch.jit.export
    def row_like(self) -> Tensor:
        """See :meth:`TableWithRows.row_like`."""
        return self.rows[:1]

    @torch.jit.export
    def row_count(self) -> int:
        """See :meth:`ModelTable.row_count`."""
        return self.rows.shape[0] - int(self.has_ids)

    @torch.jit.export
    def size_bytes(self) -> int:
        """See :meth:`ModelTable.size_bytes`."""
        ids_bytes = self.ids.numel() * self.ids.element_size()
        rows_bytes = self.rows.numel() * self.rows.element_size()
        return ids_bytes + rows_bytes

    @torch.jit.export
    def give_rows_of(self, table: str, values: Tensor, results: list[Tensor]) -> None:
        """Appends nothing, because only hashed tables find some rows quickly."""

    @torch.jit.export
    def give_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See :meth:`ModelTable.give_tensors`. The tensors are the ids and the rows."""
        tensors[self.name + "/ids"] = self.ids
        tensors[self.name + "/rows"] = self.rows

    @torch.jit.export
    def give_tensors_after(
        self,
        delta: dict[str, Tensor],
        tensors: dict[str, Tensor],
    ) -> None:
        """See :meth:`ModelTable.give_tensors_after`."""
        self.prepare_delta(delta, tensors)

    @torch.jit.export
    def prepare_delta(
        self,
        delta: dict[str, Tensor],
        tensors: dict[str, Tensor],
    ) -> None:
        """See :meth:`ModelTable.prepare_delta`.

        The table is one of TorchRec's own: only models with a hash index prepare deltas,
        and their other tables are hashed tables.
        """
        self.give_tensors(tensors)
        if self.name + "/ids" in delta:
            tensors[self.name + "/rows"] = self.rows.index_copy(
                0,
                delta[self.name + "/ids"],
                delta[self.name + "/rows"],
            )

    @torch.jit.export
    def take_delta(
        self,
        delta: dict[str, Tensor],
        ids: dict[str, Tensor],
        rows: dict[str, Tensor],
    ) -> None:
        """See :meth:`ModelTable.take_delta`."""
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
    def end_delta(self) -> None:
        """Does nothing."""

    @torch.jit.export
    def replace_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """See :meth:`TableWithRows.replace_rows`."""
        if not self.has_ids:
            self.rows = self.rows.index_copy(0, ids, rows)
            return
        old_ids = self.ids[:-1]
        old_rows = self.rows[1:]
        changed_ids = torch.cat([ids, removed])
        stays = torch.logical_not(torch.isin(old_ids, changed_ids))
        new_ids, order = torch.cat([old_ids[stays], ids]).sort()
        new_rows = torch.cat([old_rows[stays], rows])
        self.rows = torch.cat([self.rows[:1], new_rows[order]])
        self.ids = torch.cat([new_ids, self.ids[-1:]])


class ServedQuantTable(ServedTable):
    """A served table of float16, int8 or int4 rows.

    The op of TorchRec's quantised modules looks up the rows.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        row_format: str,
        ids: Tensor | None,
        rows: Tensor,
    ) -> None:
        super().__init__(name, dim, row_format, ids, rows)
        self._type_number = TYPE_NUMBERS[row_format]

    def lookup(self, values: Tensor) -> Tensor:
        """See :meth:`ModelTable.lookup`."""
        offsets = torch.arange(values.shape[0] + 1, device=values.device)
        no_pooling = 2  # PoolingMode.NONE; TorchScript does not read it from FBGEMM
        return self._read(values, offsets, None, no_pooling)

    def pooled(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        mean: bool,
    ) -> Tensor:
        """See :meth:`ModelTable.pooled`."""
        check_lengths(values, integers(lengths, "lengths"))
        pooling = 1 if mean else 0  # PoolingMode.MEAN or PoolingMode.SUM
        return self._read(values, offsets_of(lengths), weights, pooling)

    def _read(
        self,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        pooling: int,
    ) -> Tensor:
        # The greatest dim of the tables of each row format, of which there is one.
        dims = [0, 0, 0, 0]
        dims[self._type_number] = self.dim
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
    name: str,
    dim: int,
    row_format: str,
    ids: Tensor | None,
    rows: Tensor,
) -> ServedTable:
    """Makes a table of the row format.

    See :class:`ServedTable`; the arguments are the same.
    """
    if row_format == "float32":
        return ServedTable(name, dim, row_format, ids, rows)
    return ServedQuantTable(name, dim, row_format, ids, rows)


class ServedTables(nn.Module):
    """A module of served tables whose inputs and outputs are plain tensors.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: Sequence[ModelTable]) -> None:
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
        table_count = len(self.tables)
        lengths = integers(lengths, "lengths")
        if lengths.numel() % table_count != 0:
            raise ValueError("lengths must be integers, for each bag of each table")
        lengths = lengths.reshape(table_count, -1)
        # The op of quantised rows does not check lengths: it would read memory after
        # the end of values.
        is_wrong = (lengths < 0) | (lengths > values.shape[0])
        total = int(lengths.sum().item())
        if torch.any(is_wrong).item() or total != values.shape[0]:
            raise ValueError(
                "lengths must not be negative and add up to the number of values"
            )
        counts: list[int] = lengths.sum(1).tolist()
        outputs: list[Tensor] = []
        begin = 0
        for number, table in enumerate(self.tables):
            end = begin + counts[number]
            bags = values[begin:end]
            sums = table.pooled(bags, lengths[number], None, False)  # type: ignore[operator]
            outputs.append(sums)
            begin = end
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
        for served in self.tables:
            if served.name == table:
                rows: Tensor = served.lookup(values)  # type: ignore[operator]
                return rows
        raise ValueError("there is no table " + table)
