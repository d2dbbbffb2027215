"""The rows of tables that one call reads or writes, and the order of their bytes.

Tests: tests/service/test_several_tables.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.protocol import PART_IDS

_ALIGNMENT = 4


class Piece(NamedTuple):
    """The rows ``begin`` to ``end - 1`` of one table of a call."""

    table: int
    begin: int
    end: int


def aligned(place: int) -> int:
    """Returns the first place from ``place`` on, in the stream of a call's rows, at
    which the rows of a table begin.
    """
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def places_of_tables(
    row_bytes: Sequence[int],
    counts: Sequence[int],
) -> tuple[list[int], int]:
    """Returns where the rows of each table begin in the stream of a call's rows, and
    the size of the stream.
    """
    begins = []
    end = 0
    for size, count in zip(row_bytes, counts, strict=True):
        begin = aligned(end)
        begins.append(begin)
        end = begin + size * count
    return begins, end


def pieces(
    row_bytes: Sequence[int],
    counts: Sequence[int],
    most_bytes: int,
    *,
    most_ids: int = PART_IDS,
    most_tables: int | None = None,
) -> Iterator[list[Piece]]:
    """Divides the rows of a call into parts.

    Each part has at least one row, and begins at an aligned place of the stream.

    Args:
        row_bytes: The size in bytes of the rows of each table.
        counts: The number of rows of each table.
        most_bytes: The largest size in bytes of a part.
        most_ids: The largest number of ids of a part.
        most_tables: The largest number of tables of a part. Default: None, no limit.

    Yields:
        The pieces of a part, in order. A call without rows has one part without pieces.
    """
    if len(counts) == 1:
        count = counts[0]
        if count <= most_ids and count * row_bytes[0] <= most_bytes:  # most calls
            yield [Piece(0, 0, count)] if count else []
            return
    part: list[Piece] = []
    size = 0
    ids = 0
    for table, (bytes_of_row, count) in enumerate(zip(row_bytes, counts, strict=True)):
        begin = 0
        # rows, so that the next part begins at an aligned place
        least = 2 if bytes_of_row % _ALIGNMENT else 1
        while begin < count:
            size = aligned(size)
            room = min((most_bytes - size) // max(1, bytes_of_row), most_ids - ids)
            if room < count - begin:
                room -= room % least
            if part and (room <= 0 or len(part) == most_tables):
                yield part
                part = []
                size = 0
                ids = 0
                continue
            end = min(count, begin + max(room, least))
            part.append(Piece(table, begin, end))
            size += (end - begin) * bytes_of_row
            ids += end - begin
            begin = end
    if part or not any(counts):
        yield part


class TableRows:
    """The rows of one or several tables that one call reads or writes.

    Args:
        tables: The names of the tables.
        ids: (N,) int64. The ids of all tables, table by table.
        counts: The number of ids of each table.
        rows: For each table, (n, row bytes) uint8, contiguous. The rows to send, or the
            memory of the rows to read.
        places: (N,) int64. The index of the row of each id in the rows of all tables
            together, ascending. Default: None, the rows are in the order of the ids,
            and there are no others.
        zeros: For each table, whether an id without a row reads as zeros. Default: (),
            which means that every id without a row reads as its initial row.
        learning_rates: For each table, the learning rate of an update, or None for that
            of the table's optimizer. Default: (), which means None for all tables.
    """

    def __init__(
        self,
        tables: Sequence[str],
        ids: Tensor,
        counts: Sequence[int],
        rows: Sequence[Tensor],
        places: Tensor | None = None,
        zeros: Sequence[bool] = (),
        learning_rates: Sequence[float | None] = (),
    ) -> None:
        self.tables = tables
        self.ids = ids
        self.counts = counts
        self.rows = rows
        self.places = places
        self.zeros = zeros
        self.learning_rates = learning_rates
        self.row_bytes = [table_rows.shape[1] for table_rows in rows]
        self.label = tables[0] if tables else ""
        """The name of the table, or of the first of several tables, for errors."""
        self.is_plain = (
            len(tables) == 1 and True not in zeros and learning_rates in ((), [None])
        )
        """Whether a header with the name of a table is enough: the call is for one
        table, without further settings.
        """
        # where the rows of each table begin in the stream, and its ids in `ids`
        if self.is_plain:  # most calls
            self._row_begins = [0]
            self._id_begins = [0]
            self.size = self.row_bytes[0] * counts[0]
        else:
            self._row_begins, self.size = places_of_tables(self.row_bytes, counts)
            self._id_begins = [0, *itertools.accumulate(counts)]

    def headers(self, pieces: Iterable[Piece] | None = None) -> list[pb.TableIds]:
        """Returns what the header of a call says of each table.

        Args:
            pieces: The rows of the call. Default: None, all rows.
        """
        if pieces is None:
            pieces = [Piece(table, 0, count) for table, count in enumerate(self.counts)]
        headers = []
        for table, begin, end in pieces:
            rate = self.learning_rates[table] if self.learning_rates else None
            header = pb.TableIds(
                table=self.tables[table],
                ids=end - begin,
                zeros=bool(self.zeros) and self.zeros[table],
                learning_rate=rate,
            )
            headers.append(header)
        return headers

    def part(self, part: Sequence[Piece] | None) -> tuple[Tensor, int, int]:
        """Returns the ids of a part, (n,) int64, and where its rows begin in the
        stream, and their size in bytes.

        Args:
            part: The pieces of the part. None: all rows of the call.
        """
        if part is None:
            return self.ids, 0, self.size
        if not part:
            return self.ids[:0], 0, 0
        first = part[0]
        last = part[-1]
        id_begin = self._id_begins[first.table] + first.begin
        id_end = self._id_begins[last.table] + last.end
        row_begin = self._place(first.table, first.begin)
        row_end = self._place(last.table, last.end)
        return self.ids[id_begin:id_end], row_begin, row_end - row_begin

    def _place(self, table: int, row: int) -> int:
        """Returns where a row of a table begins in the stream."""
        return self._row_begins[table] + row * self.row_bytes[table]

    def reads(
        self,
        run: str,
        most_bytes: int,
        most_ids: int,
        most_tables: int | None = None,
    ) -> Iterator[tuple[pb.PullHeader, Tensor, int, int]]:
        """Divides a read of the rows into calls.

        Args:
            run: The name of the server's run.
            most_bytes: The largest size in bytes of the rows of a call.
            most_ids: The largest number of ids of a call.
            most_tables: The largest number of tables of a call. Default: None, no
                limit.

        Yields:
            The header of a call, its ids, (n,) int64, where its rows begin in the
            stream, and their size in bytes.
        """
        # most calls
        if self.is_plain and self.ids.numel() <= most_ids and self.size <= most_bytes:
            yield pb.PullHeader(table=self.label, epoch=run), self.ids, 0, self.size
            return
        for part in pieces(
            self.row_bytes,
            self.counts,
            most_bytes,
            most_ids=most_ids,
            most_tables=most_tables,
        ):
            header = pb.PullHeader(epoch=run)
            if self.is_plain:
                header.table = self.label
            else:
                header.tables.extend(self.headers(part))
            yield (header, *self.part(part))

    def put(self, window: npt.NDArray[np.uint8], place: int) -> int:
        """Writes rows that have been received to the memory of the rows.

        Args:
            window: (bytes,) uint8. The rows, which lie together in the stream.
            place: The place in the stream after the rows that were received before.

        Returns:
            The place after these rows. -1 if they do not fit.
        """
        if not len(window):
            return place
        place = aligned(place)
        end = place + len(window)
        if end > self.size:
            return -1
        memory = self.window(place, len(window))
        if memory is not None:
            memory[:] = window
            return end
        try:
            with ops.native_errors("rows"):
                row_ops.rows_put(
                    self.rows,
                    self.places,
                    self.counts,
                    torch.from_numpy(window),
                    place,
                )
        except ValueError:
            return -1
        return end

    def window(self, place: int, size: int) -> npt.NDArray[np.uint8] | None:
        """Returns the memory of the rows at ``place`` in the stream, (size,) uint8, if
        they lie there in one piece.
        """
        if len(self.rows) > 1 or self.places is not None:
            return None
        row_bytes = self.row_bytes[0]
        if size % row_bytes or place % row_bytes:
            return None
        return self.rows[0].numpy().reshape(-1)[place : place + size]

    def stream(self) -> npt.NDArray[np.uint8]:
        """Returns the stream of all rows, (size,) uint8: the memory of the rows if they
        lie there in one piece.
        """
        if self.size and len(self.rows) == 1 and self.places is None:
            return self.rows[0].numpy().reshape(-1)
        stream = row_ops.rows_empty(1, self.size)[0]
        self.take(stream, 0)
        return stream.numpy()

    def take(self, window: Tensor, place: int) -> None:
        """Writes the rows of the stream that begin at ``place`` to memory, ``window``,
        (bytes,) uint8.
        """
        if len(window):
            row_ops.rows_take(
                self.rows,
                self.places,
                self.counts,
                window,
                place,
            )
