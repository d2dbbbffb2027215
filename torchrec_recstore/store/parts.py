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
    joined_columns,
    row_bytes,
    values,
)

PART_BYTES = 1 << 25
"""The approximate size in bytes of a part of a checkpoint.

The format allows parts of 256 MB.
"""

STAMPS = ("last_step", "frequency")
"""The names of the values per row that eviction and expiry use."""

COUNTS_KEY, SCORES_KEY = "frequency", "encoded_score"
"""The keys of frequencies that count, and of frequencies that encode scores, in the
states that ``state_dict`` returns.

A load that knows nothing of the other kind then lacks a key, and does not take scores
for counts.
"""

Owned = Callable[[Tensor], Tensor]
"""A function from (N,) int64 ids to (N,) bool: whether each id belongs to a shard."""

_ALIGNMENT = 8
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

    def take(self, which: Tensor | slice) -> Part:
        """Returns some of the rows: ``which`` are their positions, (n,) int64, or a
        mask, (N,) bool, or a slice.
        """
        return replace(
            self,
            ids=self.ids[which],
            rows={name: value[which] for name, value in self.rows.items()},
        )

    def owned(self, owned: Owned | None) -> Part:
        """Returns the rows that belong to a shard. None: all of them."""
        if owned is None:
            return self
        mine = owned(self.ids)
        return self if bool(mine.all()) else self.take(mine.nonzero().squeeze(1))

    def sorted(self) -> Part:
        """Returns the rows in ascending order of their ids."""
        return self.take(self.ids.argsort())

    def up_to(self, last_id: int) -> tuple[Part, Part]:
        """Splits a part in ascending order into the rows with ids up to ``last_id``,
        included, and the other rows.
        """
        end = int(torch.searchsorted(self.ids, last_id, right=True))
        return self.take(slice(0, end)), self.take(slice(end, None))

    def cut(self, columns: range) -> Part:
        """Returns the columns of the part that are in ``columns``, of which there is at
        least one.

        8-bit rows keep their scale and bias, and row-wise states and stamps are not
        cut, so that nothing is rounded.
        """
        first, last = (
            max(self.columns.start, columns.start),
            min(self.columns.stop, columns.stop),
        )
        if (first, last) == (self.columns.start, self.columns.stop):
            return self
        cut = slice(first - self.columns.start, last - self.columns.start)
        rows = {
            name: value[:, cut] if _is_element_wise(name, value) else value
            for name, value in self.rows.items()
        }
        return Part(
            self.ids,
            range(first, last),
            {**rows, "weight": columns_of(self.rows["weight"], cut)},
        )

    def stored_as(self, dtype: torch.dtype) -> Part:
        """Returns the rows with weights as a table of ``dtype`` stores them, rounded to
        nearest.
        """
        weight = as_stored(self.rows["weight"], dtype)
        return (
            self
            if weight is self.rows["weight"]
            else replace(self, rows={**self.rows, "weight": weight})
        )

    def with_frequencies_of(self, saved: TableOptions, options: TableOptions) -> Part:
        """Returns the rows of a table with the options ``saved``, for a table with
        ``options``.

        With ``Scored()``, the frequency of a row encodes its score, otherwise it
        counts. If only one of the tables has ``Scored()``, the frequencies become 0:
        the rows have no score, or no step has looked them up.
        """
        if isinstance(saved.eviction, Scored) == isinstance(options.eviction, Scored):
            return self
        return replace(
            self,
            rows={**self.rows, "frequency": torch.zeros(len(self), dtype=torch.int64)},
        )

    @staticmethod
    def concatenated(parts: Sequence[Part]) -> Part:
        """Returns the rows of several parts, at least one, with the same columns."""
        first = parts[0]
        if len(parts) == 1:
            return first
        rows = {
            name: torch.cat([part.rows[name] for part in parts]) for name in first.rows
        }
        return Part(torch.cat([part.ids for part in parts]), first.columns, rows)

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
        cut = sorted(
            (part.cut(columns) for part in parts), key=lambda part: part.columns.start
        )
        first = cut[0]
        if any(not torch.equal(part.ids, first.ids) for part in cut[1:]):
            raise ValueError("column shards hold different rows")
        edges = [columns.start, *(part.columns.stop for part in cut)]
        if [part.columns.start for part in cut] != edges[:-1] or edges[
            -1
        ] != columns.stop:
            raise ValueError(
                f"the rows lack some of the columns {columns.start} to"
                f" {columns.stop - 1}"
            )
        if len(cut) == 1:
            return first

        def joined(name: str, value: Tensor) -> Tensor:
            if name in STAMPS:
                return value
            every = [part.rows[name] for part in cut]
            if _is_element_wise(name, value):
                return torch.cat(every, dim=1)
            return column_weighted_mean(every, [len(part.columns) for part in cut])

        rows = {
            name: joined(name, value)
            for name, value in first.rows.items()
            if name != "weight"
        }
        return Part(
            first.ids,
            columns,
            {"weight": joined_columns([part.rows["weight"] for part in cut]), **rows},
        )

    def tensors(self) -> dict[str, Tensor]:
        """Returns ``ids`` and the rows by name, as a file of a checkpoint has them."""
        return {"ids": self.ids, **self.rows}

    @staticmethod
    def packed(parts: Sequence[Part]) -> tuple[Tensor, list[int]]:
        """Returns parts as bytes, (B,) uint8, one after the other, and the number of
        bytes of each part.
        """
        headers = [part._header() for part in parts]
        sizes = [
            _ALIGNMENT
            + _padded(len(header))
            + sum(_padded(each.nbytes) for each in part.tensors().values())
            for part, header in zip(parts, headers, strict=True)
        ]
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
        for part, header, into in zip(
            parts, headers, torch.split(whole, sizes) if sizes else (), strict=True
        ):
            into[:_ALIGNMENT].view(torch.int64)[0] = len(header)
            into[_ALIGNMENT : _ALIGNMENT + len(header)] = torch.frombuffer(
                bytearray(header), dtype=torch.uint8
            )
            at = _ALIGNMENT + _padded(len(header))
            for value in part.tensors().values():
                into[at : at + value.nbytes].view(value.dtype).view(value.shape).copy_(
                    value
                )
                at += _padded(value.nbytes)
        return whole, sizes

    def _header(self) -> bytes:
        described = [
            (name, str(v.dtype).removeprefix("torch."), list(v.shape))
            for name, v in self.tensors().items()
        ]
        return json.dumps([self.columns.start, self.columns.stop, described]).encode()

    @staticmethod
    def from_bytes(data: Tensor) -> Part:
        """Returns the part that :meth:`packed` has written.

        The part shares the memory of ``data``.

        ``data``, (B,) uint8, is contiguous, and its address is a multiple of 8.
        """
        length = int(data[:_ALIGNMENT].view(torch.int64))
        start, stop, described = json.loads(
            data[_ALIGNMENT : _ALIGNMENT + length].numpy().tobytes()
        )
        at, named = _ALIGNMENT + _padded(length), {}
        for name, dtype_name, shape in described:
            dtype = getattr(torch, dtype_name)
            size = prod(shape) * dtype.itemsize
            named[name] = data[at : at + size].view(dtype).view(shape)
            at += _padded(size)
        return Part(named.pop("ids"), range(start, stop), named)


Parts = Iterator[Part]
"""A stream of parts of a table. Their ids ascend from part to part."""


def rows_in(size: int, dim: int, dtype: torch.dtype, optimizer: Optimizer) -> int:
    """Returns the number of rows in a part of ``size`` bytes, at least 1.

    ``dim`` is that of the whole table, so that the parts of all column shards hold the
    same ids.
    """
    return max(1, size // (dim * dtype.itemsize + state_bytes(optimizer, dim) + 24))


def frequency_key(options: TableOptions) -> str:
    """Returns the key of the frequencies of a table with these options in a state."""
    return SCORES_KEY if isinstance(options.eviction, Scored) else COUNTS_KEY


def zero_states(optimizer: Optimizer, rows: int, columns: int) -> dict[str, Tensor]:
    """Returns the states and the stamps of rows that have never been updated or looked
    up.
    """
    kinds = state_names(optimizer).items()
    states = {
        name: torch.zeros((rows, columns) if kind == "element" else (rows,))
        for name, kind in kinds
    }
    return {**states, **{name: torch.zeros(rows, dtype=torch.int64) for name in STAMPS}}


def column_weighted_mean(states: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Returns the mean, weighted by ``widths``, of row-wise states, (N,) float32 each.

    One state returns as it is.
    """
    if len(states) == 1:
        return states[0]
    columns = sum(widths)
    weighted = [
        state.double() * (width / columns)
        for state, width in zip(states, widths, strict=True)
    ]
    return torch.stack(weighted).sum(0).float()


def _is_element_wise(name: str, value: Tensor) -> bool:
    return name != "weight" and value.dim() == 2


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def named_rows(optimizer: Optimizer, rows: RowTensors) -> dict[str, Tensor]:
    """Returns the tensors of :func:`torchrec_recstore.ops.table_export` in the form of
    :meth:`Table.read_rows`.
    """
    weight, elements, state, last_step, frequency = rows
    taken = iter(elements.unbind(0))
    states = {
        name: next(taken) if kind == "element" else state
        for name, kind in state_names(optimizer).items()
    }
    return {"weight": weight, **states, "last_step": last_step, "frequency": frequency}


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
        size = row_bytes(self.dtype, self.columns)
        weight = images[:, : self.columns * self.dtype.itemsize]
        # the codes are padded to whole floats, and the scale and the bias follow
        if self.dtype is torch.int8:
            weight = torch.cat([weight, images[:, size - GRID_BYTES : size]], dim=1)
        else:
            weight = as_numbers(weight, self.dtype)
        bytes_of_one = self.columns * self.state_dtype.itemsize
        elements = torch.empty(
            len(self.squares), len(images), self.columns, dtype=torch.float32
        )
        for i, is_square in enumerate(self.squares):
            elements[i] = self._states(
                images[:, size + i * bytes_of_one : size + (i + 1) * bytes_of_one],
                is_square,
            )
        state = self._states(
            images[:, self._aside : self._aside + self.state_dtype.itemsize], True
        ).squeeze(1)
        return weight, elements, state, last_steps(images), _unsigned(images[:, -4:])

    @property
    def _aside(self) -> int:
        """The place of the row-wise state.

        The element-wise states are padded to whole floats.
        """
        elements = len(self.squares) * self.columns * self.state_dtype.itemsize
        return row_bytes(self.dtype, self.columns) + -(-elements // 4) * 4

    def _states(self, part: Tensor, is_square: bool) -> Tensor:
        numbers = as_numbers(part, self.state_dtype).float()
        return (
            numbers * numbers
            if is_square and self.state_dtype is torch.float16
            else numbers
        )


def last_steps(images: Tensor) -> Tensor:
    """Returns the last step of each of N images: (N,) int64."""
    return _unsigned(images[:, -8:-4])


def last_marks(images: Tensor) -> Tensor:
    """Returns the mark after which each of N rows has changed last: (N,) int64.

    Images of shared rows have none.
    """
    return _unsigned(images[:, -12:-8])


def with_last_steps_up_to(images: Tensor, steps: int) -> Tensor:
    """Returns N images in which a last step above ``steps`` is replaced by ``steps``."""
    ahead = last_steps(images) > steps
    if not ahead.any():
        return images
    images = images.clone()
    # the last step is stored as uint32
    images[ahead, -8:-4] = torch.tensor([steps]).view(torch.uint8)[:4]
    return images


def _unsigned(part: Tensor) -> Tensor:
    return as_numbers(part, torch.int32).squeeze(1).to(torch.int64) & 0xFFFFFFFF
