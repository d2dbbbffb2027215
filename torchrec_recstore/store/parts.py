"""The forms in which rows travel to and from a table: parts, and the images of a cold
store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from torchrec_recstore.ops import RowTensors
from torchrec_recstore.optim import Optimizer, state_bytes, state_names
from torchrec_recstore.options import Scored, TableOptions
from torchrec_recstore.row_types import (
    GRID_BYTES,
    as_numbers,
    as_stored,
    columns_of,
    has_finite_sum,
    joined_columns,
    row_bytes,
    values,
)
from torchrec_recstore.utils import aligned

PART_BYTES = 1 << 25
"""The approximate size in bytes of a part of a checkpoint.

The format allows parts of 256 MB.
"""

STAMPS = ("last_step", "frequency")
"""The names of the values per row that eviction and expiry use."""

COUNTS_KEY = "frequency"
"""The key of frequencies that count in the states that ``state_dict`` returns."""

SCORES_KEY = "encoded_score"
"""The key of frequencies that encode scores.

It is another one than that of counts, so that a load that knows nothing of scores lacks
a key, and does not take scores for counts.
"""

Owned = Callable[[Tensor], Tensor]
"""A function from (N,) int64 ids to (N,) bool: whether each id belongs to a shard."""

_ALIGNMENT = 8
_ID_AND_STAMPS_BYTES = 24
STAMP_BYTES = 12
"""The bytes at the end of an image: the mark of the last change, if it has one, the
last step, and the frequency.
"""


@dataclass(frozen=True)
class Part:
    """Some rows of a table, in a range of columns.

    Args:
        ids: (N,) int64. The ids of the rows, distinct.
        columns: The columns of the rows.
        rows: The rows in the form of :meth:`Table.read_rows`: ``weight``, (N, columns)
            as a table stores it (see ``row_types.py``) or float32; the states of the
            optimizer, float32, (N, columns) if they are element-wise and (N,) if they
            are row-wise; and the stamps ``last_step`` and ``frequency``, (N,) int64.
    """

    ids: Tensor
    columns: range
    rows: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def weights(self) -> Tensor:
        """The weights: (N, columns) float32."""
        return values(self.rows["weight"])

    def is_finite(self) -> Tensor:
        """Returns whether all weights and states of each row are finite: (N,) bool."""
        finite = torch.ones(len(self), dtype=torch.bool)
        for name, stored in self.rows.items():
            if name not in STAMPS and not has_finite_sum(stored):
                cells = values(stored).isfinite()
                finite &= cells.view(len(stored), -1).all(dim=1)
        return finite

    def take(self, which: Tensor | slice) -> Part:
        """Returns some of the rows: ``which`` are their positions, (n,) int64, or a
        mask, (N,) bool, or a slice.
        """
        ids = self.ids[which]
        rows = {name: value[which] for name, value in self.rows.items()}
        return Part(ids, self.columns, rows)

    def owned(self, owned: Owned | None) -> Part:
        """Returns the rows that belong to a shard. None: all of them."""
        if owned is None:
            return self
        is_owned = owned(self.ids)
        if bool(is_owned.all()):
            return self
        return self.take(is_owned.nonzero().squeeze(1))

    def sorted(self) -> Part:
        """Returns the rows in ascending order of their ids."""
        return self.take(self.ids.argsort())

    def up_to(self, last_id: int) -> tuple[Part, Part]:
        """Splits a part in ascending order into the rows with ids up to ``last_id``,
        included, and the other rows.
        """
        end = int(torch.searchsorted(self.ids, last_id, right=True))
        first_rows = slice(0, end)
        other_rows = slice(end, None)
        return self.take(first_rows), self.take(other_rows)

    def cut(self, columns: range) -> Part:
        """Returns the columns of the part that are in ``columns``, of which there is at
        least one.

        8-bit rows keep their scale and bias, and row-wise states and stamps are not
        cut, so that nothing is rounded.
        """
        start = max(self.columns.start, columns.start)
        stop = min(self.columns.stop, columns.stop)
        common_columns = range(start, stop)
        if common_columns == self.columns:
            return self

        first = self.columns.start
        places = slice(start - first, stop - first)
        rows = {}
        for name, value in self.rows.items():
            if name == "weight":
                rows[name] = columns_of(value, places)
            elif value.dim() == 2:
                rows[name] = value[:, places]
            else:
                rows[name] = value
        return Part(self.ids, common_columns, rows)

    def stored_as(self, dtype: torch.dtype) -> Part:
        """Returns the rows with weights as a table of ``dtype`` stores them, rounded to
        nearest.
        """
        weight = as_stored(self.rows["weight"], dtype)
        if weight is self.rows["weight"]:
            return self
        return replace(self, rows={**self.rows, "weight": weight})

    def with_frequencies_of(self, saved: TableOptions, options: TableOptions) -> Part:
        """Returns the rows of a table with the options ``saved``, for a table with
        ``options``.

        With ``Scored()``, the frequency of a row encodes its score, otherwise it
        counts. If only one of the tables has ``Scored()``, the frequencies become 0:
        the rows have no score, or no step has looked them up.
        """
        had_scores = isinstance(saved.eviction, Scored)
        has_scores = isinstance(options.eviction, Scored)
        if had_scores == has_scores:
            return self
        frequency = torch.zeros(len(self), dtype=torch.int64)
        return replace(self, rows={**self.rows, "frequency": frequency})

    @staticmethod
    def concatenated(parts: Sequence[Part]) -> Part:
        """Returns the rows of several parts, at least one, with the same columns."""
        first = parts[0]
        if len(parts) == 1:
            return first
        ids = torch.cat([part.ids for part in parts])
        rows = {}
        for name in first.rows:
            rows[name] = torch.cat([part.rows[name] for part in parts])
        return Part(ids, first.columns, rows)

    @staticmethod
    def joined(parts: Iterable[Part], columns: range) -> Part:
        """Returns the rows of a shard with ``columns``, made of parts of column shards
        with the same ids in one order.

        A row-wise state is the column-weighted mean of the states of the parts. The
        weights of 8-bit rows are exact. Those of several parts, which have different
        scales, are float32.

        Raises:
            ValueError: The parts have other ids than each other, or do not cover the
                columns.
        """
        cut = [part.cut(columns) for part in parts]
        cut.sort(key=lambda part: part.columns.start)
        first = cut[0]
        for part in cut[1:]:
            if not torch.equal(part.ids, first.ids):
                raise ValueError("column shards hold different rows")

        # each part must begin where the part before it ends
        starts = [part.columns.start for part in cut]
        stops = [part.columns.stop for part in cut]
        if [*starts, columns.stop] != [columns.start, *stops]:
            last_column = columns.stop - 1
            raise ValueError(
                f"the rows lack some of the columns {columns.start} to {last_column}"
            )
        if len(cut) == 1:
            return first

        widths = [len(part.columns) for part in cut]
        rows = {}
        for name, value in first.rows.items():
            values_of_parts = [part.rows[name] for part in cut]
            if name == "weight":
                rows[name] = joined_columns(values_of_parts)
            elif name in STAMPS:
                rows[name] = value
            elif value.dim() == 2:
                rows[name] = torch.cat(values_of_parts, dim=1)
            else:
                rows[name] = column_weighted_mean(values_of_parts, widths)
        return Part(first.ids, columns, rows)

    def tensors(self) -> dict[str, Tensor]:
        """Returns ``ids`` and the rows by name, as a file of a checkpoint has them."""
        return {"ids": self.ids, **self.rows}

    @staticmethod
    def packed(parts: Sequence[Part]) -> tuple[Tensor, list[int]]:
        """Returns parts as bytes, (B,) uint8, one after the other, and the number of
        bytes of each part.
        """
        headers = [part._header() for part in parts]
        sizes = []
        for part, header in zip(parts, headers, strict=True):
            # the length of the header, the header, and the rows
            size = _ALIGNMENT + _padded(len(header))
            for value in part.tensors().values():
                size += _padded(value.nbytes)
            sizes.append(size)

        data = torch.empty(sum(sizes), dtype=torch.uint8)
        begin = 0
        for part, header, size in zip(parts, headers, sizes, strict=True):
            end = begin + size
            part._pack(header, data[begin:end])
            begin = end
        return data, sizes

    def _pack(self, header: bytes, data: Tensor) -> None:
        """Writes the length of the header, the header and the rows to bytes, (B,)
        uint8.
        """
        length = data[:_ALIGNMENT].view(torch.int64)
        length[0] = len(header)
        header_end = _ALIGNMENT + len(header)
        header_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        data[_ALIGNMENT:header_end] = header_bytes

        begin = _ALIGNMENT + _padded(len(header))
        for value in self.tensors().values():
            end = begin + value.nbytes
            target = data[begin:end].view(value.dtype)
            target.view(value.shape).copy_(value)
            begin += _padded(value.nbytes)

    def _header(self) -> bytes:
        described = []
        for name, value in self.tensors().items():
            dtype_name = str(value.dtype).removeprefix("torch.")
            described.append((name, dtype_name, list(value.shape)))
        header = [self.columns.start, self.columns.stop, described]
        return json.dumps(header).encode()

    @staticmethod
    def from_bytes(data: Tensor) -> Part:
        """Returns the part that :meth:`packed` has written.

        The part shares the memory of ``data``.

        ``data``, (B,) uint8, is contiguous, and its address is a multiple of 8.
        """
        length = int(data[:_ALIGNMENT].view(torch.int64))
        header_end = _ALIGNMENT + length
        header = data[_ALIGNMENT:header_end].numpy().tobytes()
        start, stop, described = json.loads(header)

        named = {}
        begin = _ALIGNMENT + _padded(length)
        for name, dtype_name, shape in described:
            dtype = getattr(torch, dtype_name)
            size = prod(shape) * dtype.itemsize
            end = begin + size
            values_of_rows = data[begin:end].view(dtype)
            named[name] = values_of_rows.view(shape)
            begin += _padded(size)
        ids = named.pop("ids")
        return Part(ids, range(start, stop), named)


Parts = Iterator[Part]
"""A stream of parts of a table. Their ids ascend from part to part."""


def rows_in(
    size: int,
    dim: int,
    dtype: torch.dtype,
    optimizer: Optimizer,
) -> int:
    """Returns the number of rows in a part of ``size`` bytes, at least 1.

    ``dim`` is that of the whole table, so that the parts of all column shards hold the
    same ids.
    """
    weight_bytes = dim * dtype.itemsize
    bytes_of_row = weight_bytes + state_bytes(optimizer, dim) + _ID_AND_STAMPS_BYTES
    return max(1, size // bytes_of_row)


def frequency_key(options: TableOptions) -> str:
    """Returns the key of the frequencies of a table with these options in a state."""
    return SCORES_KEY if isinstance(options.eviction, Scored) else COUNTS_KEY


def zero_states(
    optimizer: Optimizer,
    rows: int,
    columns: int,
) -> dict[str, Tensor]:
    """Returns the states and the stamps of rows that have never been updated or looked
    up.
    """
    states = {}
    for name, kind in state_names(optimizer).items():
        if kind == "element":
            states[name] = torch.zeros(rows, columns)
        else:
            states[name] = torch.zeros(rows)
    for name in STAMPS:
        states[name] = torch.zeros(rows, dtype=torch.int64)
    return states


def column_weighted_mean(states: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Returns the mean, weighted by ``widths``, of row-wise states, (N,) float32 each.

    One state returns as it is.
    """
    if len(states) == 1:
        return states[0]
    columns = sum(widths)
    weighted = []
    for state, width in zip(states, widths, strict=True):
        share_of_columns = width / columns
        weighted.append(state.double() * share_of_columns)
    return torch.stack(weighted).sum(0).float()


def _padded(size: int) -> int:
    return aligned(size, _ALIGNMENT)


def named_rows(optimizer: Optimizer, rows: RowTensors) -> dict[str, Tensor]:
    """Returns the tensors of :func:`torchrec_recstore.ops.table_export` in the form of
    :meth:`Table.read_rows`.
    """
    weight, elements, row_wise_state, last_step, frequency = rows
    element_wise_states = iter(elements.unbind(0))
    named = {"weight": weight}
    for name, kind in state_names(optimizer).items():
        if kind == "element":
            named[name] = next(element_wise_states)
        else:
            named[name] = row_wise_state
    named["last_step"] = last_step
    named["frequency"] = frequency
    return named


@dataclass(frozen=True)
class ImageLayout:
    """The layout of the images of one shard: weights, element-wise states, the row-wise
    state, and the stamps.
    """

    dtype: torch.dtype
    columns: int
    state_dtype: torch.dtype  # a float16 state of squares is stored as its square root
    # whether each element-wise state is one of squares; a row-wise state always is
    squares: tuple[bool, ...]

    def unpacked(self, images: Tensor) -> RowTensors:
        """Returns the tensors of images, (N, image bytes) uint8. States are float32."""
        weight_end = row_bytes(self.dtype, self.columns)
        weight = images[:, : self.columns * self.dtype.itemsize]
        # the codes are padded to whole floats, and the scale and the bias follow
        if self.dtype is torch.int8:
            grid = images[:, weight_end - GRID_BYTES : weight_end]
            weight = torch.cat([weight, grid], dim=1)
        else:
            weight = as_numbers(weight, self.dtype)

        elements = torch.empty(
            len(self.squares),
            len(images),
            self.columns,
            dtype=torch.float32,
        )
        begin = weight_end
        state_bytes_of_row = self.columns * self.state_dtype.itemsize
        for number, is_square in enumerate(self.squares):
            end = begin + state_bytes_of_row
            elements[number] = self._states(images[:, begin:end], is_square)
            begin = end

        # the element-wise states are padded to whole floats
        begin = weight_end + aligned(begin - weight_end, 4)
        end = begin + self.state_dtype.itemsize
        row_wise_state = self._states(images[:, begin:end], is_square=True)
        frequency = _unsigned(images[:, -4:])
        return (
            weight,
            elements,
            row_wise_state.squeeze(1),
            last_steps(images),
            frequency,
        )

    def _states(self, stored: Tensor, is_square: bool) -> Tensor:
        numbers = as_numbers(stored, self.state_dtype).float()
        if is_square and self.state_dtype is torch.float16:
            return numbers * numbers
        return numbers


def last_steps(images: Tensor) -> Tensor:
    """Returns the last step of each of N images: (N,) int64."""
    return _unsigned(images[:, -8:-4])


def last_marks(images: Tensor) -> Tensor:
    """Returns the mark after which each of N rows has changed last: (N,) int64.

    Images of shared rows have none.
    """
    return _unsigned(images[:, -12:-8])


def with_last_steps_up_to(images: Tensor, steps: int) -> Tensor:
    """Returns N images in which last steps above ``steps`` are replaced by it."""
    is_ahead = last_steps(images) > steps
    if not is_ahead.any():
        return images
    images = images.clone()
    # the last step is stored as uint32, the lower half of an int64
    step_bytes = torch.tensor([steps]).view(torch.uint8)[:4]
    images[is_ahead, -8:-4] = step_bytes
    return images


def _unsigned(part: Tensor) -> Tensor:
    signed = as_numbers(part, torch.int32).squeeze(1)
    return signed.to(torch.int64) & 0xFFFFFFFF
