"""Tables as they are served: ids, rows and the way from the ones to the others, for TorchScript and ``torch.export``.

Once scripted nothing here needs this package, and float32 rows need torch alone. A forward reads buffers and writes
none, so any number of threads may run it; none may run beside :meth:`ServedTable.replace_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrec_recstore.inference.row_formats import TYPE_NUMBERS

_LAST_ID = 2**63 - 1


def id_buffer(ids: Tensor) -> Tensor:
    """Ids for :func:`rows_of_ids`.

    Args:
        ids: (R,) int64, ascending.

    Returns:
        (R + 1,): with the greatest int64 behind them, so that a search always ends on an entry.
    """
    return torch.cat([ids, torch.full((1,), _LAST_ID, dtype=torch.int64)])


def check_ids(values: Tensor) -> None:
    """Refuses what are no ids.

    Raises:
        ValueError: another shape or data type.
    """
    if values.dim() != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError("values must be integers of shape (N,)")


@torch.fx.wrap
def rows_of_ids(ids: Tensor, values: Tensor) -> Tensor:
    """Where ids have their rows.

    Args:
        ids: (R + 1,) of :func:`id_buffer`.
        values: (N,) raw ids, any integer type.

    Returns:
        (N,) int64: 1 + the place among ``ids``, or 0 for an id that is not among them.
    """
    wanted = values.to(torch.int64)
    places = torch.searchsorted(ids, wanted)
    found = (ids[places] == wanted) & (places < ids.shape[0] - 1)
    return torch.where(found, places + 1, torch.zeros_like(places))


@torch.fx.wrap
def rows_of_numbers(rows: int, values: Tensor) -> Tensor:
    """Row numbers of a table of TorchRec's own; 0 where there is no such row, as FBGEMM's bounds check has it."""
    wanted = values.to(torch.int64)
    return torch.where((wanted >= 0) & (wanted < rows), wanted, torch.zeros_like(wanted))


@torch.fx.wrap
def offsets_of(lengths: Tensor) -> Tensor:
    """(bags + 1,) int64 of (bags,) lengths."""
    return F.pad(lengths.to(torch.int64).cumsum(0), [1, 0])


@torch.fx.wrap
def pooled_in_order(weight: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
    """Sums or means of bags, to the bit those of RecStore's kernels.

    Args:
        weight: (R, dim) floating point.
        rows: (N,) int64.
        offsets: (bags + 1,).
        weights: (N,) of each, or None.
        mean: divide by the length of the bag.

    Returns:
        (bags, dim) float32.
    """
    if weights is not None:
        # nn.EmbeddingBag multiplies and adds in one rounding, RecStore's kernels in two (torch 2.13).
        weight = F.embedding(rows, weight).float() * weights.to(torch.float32).unsqueeze(1)
        rows = torch.arange(rows.shape[0], device=rows.device)
    out = F.embedding_bag(
        rows, weight.float(), offsets.to(torch.int64), norm_type=2.0, mode="sum", include_last_offset=True
    )
    if mean:
        lengths = (offsets[1:] - offsets[:-1]).clamp(min=1)
        out = out / lengths.unsqueeze(1).to(out.dtype)
    return out


def check_tensor(delta: dict[str, Tensor], key: str, tensor: Tensor, known: list[str]) -> None:
    """Refuses a delta whose tensor :func:`take_tensor` cannot copy, and appends its key to ``known`` where it has one.

    Raises:
        ValueError: the message names it.
    """
    if key in delta:
        known.append(key)
        if delta[key].shape != tensor.shape or delta[key].dtype != tensor.dtype:
            raise ValueError(key + " is of another shape or data type in the delta")


def take_tensor(delta: dict[str, Tensor], key: str, tensor: Tensor) -> None:
    """Copies a tensor of a delta, where it has one of that key, to the model's."""
    if key in delta:
        tensor.detach().copy_(delta[key])


class ServedTable(nn.Module):
    """One table of float32 rows, and what :class:`ServedQuantTable` has in common with it.

    Args:
        name: the table's.
        dim: columns.
        row_format: of :data:`torchrec_recstore.inference.row_formats.FORMATS`.
        ids: (R,) int64, ascending; None for a table of TorchRec's own, where row i is id i.
        rows: (R + 1, ...) in the row format, the first one for ids that have none; (R, ...) without ids.
    """

    if TYPE_CHECKING:  # TorchScript would read them
        ids: Tensor
        rows: Tensor

    def __init__(self, name: str, dim: int, row_format: str, ids: Tensor | None, rows: Tensor) -> None:
        super().__init__()
        self.name = name
        self.dim = dim
        self.row_format = row_format
        self.has_ids = ids is not None
        self.version = ""
        self.attributes = ""
        self.register_buffer("ids", torch.empty(0, dtype=torch.int64) if ids is None else id_buffer(ids))
        self.register_buffer("rows", rows)

    def row_numbers(self, values: Tensor) -> Tensor:
        """(N,) int64 places in ``rows`` of (N,) raw ids."""
        if self.has_ids:
            return rows_of_ids(self.ids, values)
        return rows_of_numbers(self.rows.shape[0], values)

    def lookup(self, values: Tensor) -> Tensor:
        """(N, dim) float32 rows of (N,) raw ids."""
        return F.embedding(self.row_numbers(values), self.rows)

    def pooled(self, values: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
        """(bags, dim) float32 of (N,) raw ids, whose bags are of ``lengths``, (bags,), and their weights, (N,)."""
        return pooled_in_order(self.rows, self.row_numbers(values), offsets_of(lengths), weights, mean)

    @torch.jit.export
    def raw_ids(self) -> Tensor:
        """(R,) int64, ascending; none of a table of TorchRec's own."""
        return self.ids[:-1]

    @torch.jit.export
    def give_ids(self, table: str, found: list[Tensor]) -> None:
        """Appends :meth:`raw_ids` where this is the table of that name."""
        if table == self.name:
            found.append(self.raw_ids())

    @torch.jit.export
    def give_rows(self, table: str, found: list[Tensor]) -> None:
        """Appends ``rows`` where this is the table of that name."""
        if table == self.name:
            found.append(self.rows)

    @torch.jit.export
    def give_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Adds the table's tensors, by what ``version_of`` calls them."""
        tensors[self.name + "/ids"] = self.ids
        tensors[self.name + "/rows"] = self.rows

    @torch.jit.export
    def check_delta(self, delta: dict[str, Tensor], known: list[str]) -> None:
        """Refuses a delta that :meth:`take_delta` cannot take, and appends the keys of this table to ``known``.

        Raises:
            ValueError: a key is missing, or as for :meth:`check_rows`.
        """
        if self.name + "/ids" in delta:
            keys = [self.name + "/ids", self.name + "/rows", self.name + "/removed"]
            for key in keys:
                known.append(key)
                if key not in delta:
                    raise ValueError("the delta has no " + key)
            self.check_rows(delta[keys[0]], delta[keys[1]], delta[keys[2]])

    @torch.jit.export
    def take_delta(self, delta: dict[str, Tensor], ids: dict[str, Tensor], rows: dict[str, Tensor]) -> None:
        """Applies a delta.

        Args:
            delta: that :meth:`check_delta` has passed.
            ids: those of tables that have done so already, by name; another copy of this one may be among them, and
                shares its tensors then.
            rows: likewise.
        """
        if self.name + "/ids" not in delta:
            return
        if self.name not in ids:
            self.replace_rows(delta[self.name + "/ids"], delta[self.name + "/rows"], delta[self.name + "/removed"])
            ids[self.name] = self.ids
            rows[self.name] = self.rows
        self.ids = ids[self.name]
        self.rows = rows[self.name]

    @torch.jit.export
    def check_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """Refuses what :meth:`replace_rows` cannot take.

        Raises:
            ValueError: shapes or data types that are not this table's, or an id twice; the message names it.
        """
        if rows.dim() != 2 or rows.shape[1] != self.rows.shape[1] or rows.dtype != self.rows.dtype:
            raise ValueError("table " + self.name + ": the delta's rows are of another dim or data type")
        if ids.dim() != 1 or ids.dtype != torch.int64 or ids.shape[0] != rows.shape[0]:
            raise ValueError("table " + self.name + ": the delta has not an int64 id for each row")
        if removed.dim() != 1 or removed.dtype != torch.int64:
            raise ValueError("table " + self.name + ": the delta's removed ids are no vector of int64")
        every = torch.cat([ids, removed]).sort()[0]
        if torch.any(every[1:] == every[:-1]).item():
            raise ValueError("table " + self.name + ": the delta has an id more than once")
        if not self.has_ids and (removed.shape[0] > 0 or torch.any((ids < 0) | (ids >= self.rows.shape[0])).item()):
            raise ValueError("table " + self.name + " is TorchRec's own, and the delta has rows beyond it")

    @torch.jit.export
    def replace_rows(self, ids: Tensor, rows: Tensor, removed: Tensor) -> None:
        """Gives ids new rows and forgets others; what :meth:`check_rows` has passed.

        Args:
            ids: (N,) int64, each once.
            rows: (N, ...) theirs, in the row format.
            removed: (M,) int64, none of them among ``ids``.
        """
        if not self.has_ids:
            self.rows = self.rows.index_copy(0, ids, rows)
            return
        before = self.ids[:-1]
        stays = torch.logical_not(torch.isin(before, torch.cat([ids, removed])))
        ids, order = torch.cat([before[stays], ids]).sort()
        self.rows = torch.cat([self.rows[:1], torch.cat([self.rows[1:][stays], rows])[order]])
        self.ids = torch.cat([ids, self.ids[-1:]])


class ServedQuantTable(ServedTable):
    """One table of float16, int8 or int4 rows, read by the op of TorchRec's quantised modules."""

    def __init__(self, name: str, dim: int, row_format: str, ids: Tensor | None, rows: Tensor) -> None:
        super().__init__(name, dim, row_format, ids, rows)
        self._type_number = TYPE_NUMBERS[row_format]

    def lookup(self, values: Tensor) -> Tensor:
        """(N, dim) float32 rows of (N,) raw ids."""
        return self._read(values, torch.arange(values.shape[0] + 1, device=values.device), None, 2)

    def pooled(self, values: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
        """(bags, dim) float32 of (N,) raw ids, whose bags are of ``lengths``, (bags,), and their weights, (N,)."""
        return self._read(values, offsets_of(lengths), weights, 1 if mean else 0)

    def _read(self, values: Tensor, offsets: Tensor, weights: Tensor | None, pooling: int) -> Tensor:
        dims = [self.dim if self._type_number == number else 0 for number in range(4)]
        out: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.rows.view(-1),
            uvm_weights=torch.empty(0, dtype=torch.uint8),
            weights_placements=torch.tensor([3], dtype=torch.int32),  # EmbeddingLocation.HOST
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


def served_table(name: str, dim: int, row_format: str, ids: Tensor | None, rows: Tensor) -> ServedTable:
    """The table of that row format; arguments as for :class:`ServedTable`."""
    kind = ServedTable if row_format == "float32" else ServedQuantTable
    return kind(name, dim, row_format, ids, rows)


class ServedTables(nn.Module):
    """Tables alone, over plain tensors.

    Args:
        tables: any number.
    """

    def __init__(self, tables: Sequence[ServedTable]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Sums of the rows of bags of ids.

        Args:
            values: (N,) raw ids, any integer type: the bags of the first table, then those of the second, ...
            lengths: (T, B) ids of each of B bags of each of T tables, or flat.

        Returns:
            (B, sum of dims) float32, table by table.

        Raises:
            ValueError: values are no integers, or lengths are not those of ``values``.
        """
        check_ids(values)
        count = len(self.tables)
        if lengths.is_floating_point() or lengths.numel() % count != 0:
            raise ValueError("lengths must be integers, for each bag of each table")
        lengths = lengths.reshape(count, -1).to(torch.int64)
        # The op of quantised rows would read beyond values.
        beyond = torch.any((lengths < 0) | (lengths > values.shape[0])).item()
        if beyond or int(lengths.sum().item()) != values.shape[0]:
            raise ValueError("lengths must not be negative and add up to the number of values")
        counts: list[int] = lengths.sum(1).tolist()
        outputs: list[Tensor] = []
        first = 0
        for number, table in enumerate(self.tables):
            outputs.append(table.pooled(values[first : first + counts[number]], lengths[number], None, False))  # type: ignore[operator]
            first += counts[number]
        return torch.cat(outputs, dim=1)

    @torch.jit.export
    def lookup(self, table: str, values: Tensor) -> Tensor:
        """(N, dim) float32 rows of (N,) raw ids of one table.

        Raises:
            ValueError: there is no such table, or values are no integers.
        """
        check_ids(values)
        for each in self.tables:
            if each.name == table:
                rows: Tensor = each.lookup(values)  # type: ignore[operator]
                return rows
        raise ValueError("there is no table " + table)
