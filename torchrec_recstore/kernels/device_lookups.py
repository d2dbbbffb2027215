"""The lookups of groups whose rows are also in the memory of a device: with bags, and
without.

Both kinds of lookups describe a batch as segments, the bags of one feature each. The
native lookup has one pass, or one for each table.

Tests: tests/device/test_device_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_interface import SEGMENT_FIELDS
from torchrec_recstore.store import Table


@dataclass(frozen=True)
class HostBatch:
    """A batch of a group, on the host. ``TableGroup`` explains the members."""

    ids: Tensor
    offsets: Tensor | None
    counts: Sequence[int]
    weights: Tensor | None

    @property
    def has_bags_of_one(self) -> bool:
        """Whether each bag has one position. The offsets are valid.

        For a training lookup ``ops.device_has_bags_of_one`` tells it without another
        look at the offsets.
        """
        if self.offsets is None:
            return True
        if len(self.offsets) - 1 != len(self.ids):
            return False
        return bool((self.offsets[1:] > self.offsets[:-1]).all())


class Segment(NamedTuple):
    """The bags of one feature."""

    first_bag: int
    bags: int
    element: int
    """The element of the flat output at which the first bag begins."""
    stride: int
    """The number of elements between bags."""
    table: int
    positions: int
    """The number of positions of the bags."""

    @property
    def fields(self) -> tuple[int, ...]:
        """The numbers of a segment in ``device_interface``."""
        return self[:SEGMENT_FIELDS]


class Lookups(Protocol):
    """The lookups of a group."""

    groups: list[int]
    """The handles of the native groups, one for each pass of a lookup."""
    mean: bool
    """Whether bags are pooled by their mean."""

    def begin(self, batch: HostBatch) -> Tensor:
        """Begins a training lookup and returns its context, (passes,) int64."""

    def output_shape(self, batch: HostBatch) -> tuple[int, ...]:
        """Returns the shape of the output."""

    def segments(self, batch: HostBatch) -> list[Segment]:
        """Returns the segments of a batch, in the order of its ids."""

    def ids_of_tables(self, batch: HostBatch) -> list[Tensor]:
        """Returns the raw ids of each table, (n,) int64, feature by feature."""

    def in_batch_order(self, batch: HostBatch, values: Sequence[Tensor]) -> Tensor:
        """Returns a value for each position of a batch, (N,), from the values for the
        ids of :meth:`ids_of_tables`.
        """


class BagLookups:
    """The lookups of a group that pools bags; see :class:`Lookups`.

    Args:
        group: The handle of the native group.
        tables: Its tables.
        feature_tables: The number of each feature's table.
        mean: Whether bags are pooled by their mean.
    """

    def __init__(
        self,
        group: int,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        mean: bool,
    ) -> None:
        self.groups = [group]
        self.mean = mean
        self._tables = len(tables)
        self._feature_tables = list(feature_tables)
        columns = [len(tables[number].columns) for number in feature_tables]
        self._first_columns = list(accumulate(columns, initial=0))
        self._columns = self._first_columns.pop()

    def begin(self, batch: HostBatch) -> Tensor:
        """See :class:`Lookups`."""
        assert batch.offsets is not None
        return ops.group_begin(self.groups[0], batch.ids, batch.offsets, batch.weights)

    def output_shape(self, batch: HostBatch) -> tuple[int, ...]:
        """See :class:`Lookups`."""
        return self._bags(batch), self._columns

    def segments(self, batch: HostBatch) -> list[Segment]:
        """See :class:`Lookups`."""
        bags = self._bags(batch)
        begins = self._begins(batch)
        segments = []
        for feature, table in enumerate(self._feature_tables):
            segment = Segment(
                first_bag=feature * bags,
                bags=bags,
                element=self._first_columns[feature],
                stride=self._columns,
                table=table,
                positions=begins[feature + 1] - begins[feature],
            )
            segments.append(segment)
        return segments

    def ids_of_tables(self, batch: HostBatch) -> list[Tensor]:
        """See :class:`Lookups`."""
        return ops.group_table_ids(self.groups[0], batch.ids, batch.offsets)

    def in_batch_order(self, batch: HostBatch, values: Sequence[Tensor]) -> Tensor:
        """See :class:`Lookups`."""
        begins = self._begins(batch)
        first_values = [0] * self._tables
        parts = []
        for feature, table in enumerate(self._feature_tables):
            first = first_values[table]
            end = first + begins[feature + 1] - begins[feature]
            parts.append(values[table][first:end])
            first_values[table] = end
        return torch.cat(parts)

    def _begins(self, batch: HostBatch) -> list[int]:
        """Returns the position at which each feature begins, and N."""
        assert batch.offsets is not None
        bags = self._bags(batch)
        if bags == 0:
            return [0] * (len(self._feature_tables) + 1)
        return batch.offsets[::bags].tolist()

    def _bags(self, batch: HostBatch) -> int:
        """Returns the number of bags of each feature."""
        assert batch.offsets is not None
        return (len(batch.offsets) - 1) // max(len(self._feature_tables), 1)


class RowLookups:
    """The lookups of a group without pooling; see :class:`Lookups`.

    Args:
        groups: The handle of the native group of each table.
        tables: The tables.
    """

    def __init__(self, groups: Sequence[int], tables: Sequence[Table]) -> None:
        self.groups = list(groups)
        self.mean = False
        self._columns = [len(table.columns) for table in tables]

    def begin(self, batch: HostBatch) -> Tensor:
        """See :class:`Lookups`."""
        return ops.rows_begin_each(self.groups, batch.ids, batch.counts)

    def output_shape(self, batch: HostBatch) -> tuple[int, ...]:
        """See :class:`Lookups`."""
        elements = 0
        for count, columns in zip(batch.counts, self._columns, strict=True):
            elements += count * columns
        return (elements,)

    def segments(self, batch: HostBatch) -> list[Segment]:
        """See :class:`Lookups`. Each position is a bag."""
        segments = []
        position = 0
        element = 0
        for table, count in enumerate(batch.counts):
            columns = self._columns[table]
            segments.append(Segment(position, count, element, columns, table, count))
            position += count
            element += count * columns
        return segments

    def ids_of_tables(self, batch: HostBatch) -> list[Tensor]:
        """See :class:`Lookups`."""
        raw_ids = []
        ids_of_tables = torch.split(batch.ids, list(batch.counts))
        for group, ids in zip(self.groups, ids_of_tables, strict=True):
            raw_ids.extend(ops.group_table_ids(group, ids, None))
        return raw_ids

    def in_batch_order(self, batch: HostBatch, values: Sequence[Tensor]) -> Tensor:
        """See :class:`Lookups`."""
        return torch.cat(list(values))
