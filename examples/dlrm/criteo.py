"""Reader of the Criteo click log: ``train.txt`` of the Kaggle challenge, plain or gzip, as a stream of arrays.

The file is read in blocks of bytes, so memory does not grow with it.

    source = CriteoFile("train.txt")
    source.scan()                                   # counts the lines and checks every one
    for rows in source.rows(0, source.num_rows):
        rows.labels, rows.dense, rows.ids
"""

from __future__ import annotations

import os
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial

from common.command import DataError
from criteo_format import MAX_LINE_BYTES, BadRowError, Rows, parse

CHUNK_BYTES = 8 << 20


def _is_gzip(path: str) -> bool:
    with open(path, "rb", buffering=0) as file:
        return file.read(2) == b"\x1f\x8b"


def _read_blocks(path: str, offset: int, block_bytes: int) -> Iterator[bytes]:
    """Yields the content from ``offset``, unpacked where it starts like gzip (``offset`` is then 0)."""
    packed_file = _is_gzip(path)
    with open(path, "rb", buffering=0) as file:
        if not packed_file:
            file.seek(offset)
            while block := file.read(block_bytes):
                yield block
            return
        # zlib by hand: GzipFile of Python 3.11 reads 8 KiB at a time through two more layers.
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        packed = b""
        try:
            while packed := packed or file.read(1 << 20):
                if member.eof:
                    # Further members may follow; zeros are padding, as in GzipFile.
                    packed = packed.lstrip(b"\0")
                    if not packed:
                        continue
                    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
                if block := member.decompress(packed, block_bytes):
                    yield block
                packed = member.unconsumed_tail or member.unused_data
        except zlib.error as error:
            raise DataError(f"{path}: damaged gzip file: {error}") from error
        if not member.eof:
            raise DataError(f"{path}: the gzip file is cut short")


def _read_lines(path: str, offset: int, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yields (whole lines, offset of their end); only the file's last line may lack its end."""
    rest = b""
    for block in _read_blocks(path, offset, block_bytes):
        offset += len(block)
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut], offset - len(block) + cut
            rest = block[cut:]
        else:
            # One byte over the limit is enough to know the line as bad.
            rest = (rest + block)[: MAX_LINE_BYTES + 1]
    if rest:
        yield rest, offset


def _count_lines(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n"))


def _skip_lines(data: bytes, count: int) -> int:
    """Returns where in ``data`` line ``count`` begins."""
    position = 0
    for _ in range(count):
        position = data.index(b"\n", position) + 1
    return position


class CriteoFile:
    """A Criteo TSV, plain or gzip, of any size.

    ``scan`` comes first. Not thread-safe in itself, but several ``rows`` iterators may run at once.

    Args:
        path: the file.
        skip_bad_rows: bad lines are left out and counted instead of being an error.
        limit_rows: only the first so many lines exist.
        chunk_bytes: how much is parsed at a time.

    Attributes:
        num_rows: lines of the file (up to ``limit_rows``), the bad ones too.
        bad_lines: numbers of the bad ones, counted from 0, ascending.
        fingerprint: tells this content from another, whatever the file's name and packing.
        marks: (line, byte offset) pairs where reading may begin; plain files only.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        skip_bad_rows: bool = False,
        limit_rows: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.path = os.fspath(path)
        self.skip_bad_rows = skip_bad_rows
        self.limit_rows = limit_rows
        self.chunk_bytes = chunk_bytes
        self.num_rows = 0
        self.bad_lines = array("q")
        self.fingerprint = ""
        self.marks: list[tuple[int, int]] = [(0, 0)]

    @property
    def bad_rows(self) -> int:
        """How many lines are bad."""
        return len(self.bad_lines)

    def scan(self, on_progress: Callable[[int], None] = lambda num_lines: None) -> None:
        """Reads the whole file once: counts the lines and checks each, so that no training starts on a bad file.

        Args:
            on_progress: called after every chunk with the number of its lines.

        Raises:
            BadRowError: a bad line, without ``skip_bad_rows``.
            DataError: no good line at all, or a gzip file that is damaged or cut short.
            OSError: the file cannot be read.
        """
        first = begin = checksum = num_rows = 0
        marks = []
        bad_lines = array("q")

        def on_bad(index: int, column: str | None, reason: str) -> None:
            bad_lines.append(first + index)
            self._on_bad(first, index, column, reason)

        for first, data, end in self._chunks(0, self.limit_rows):
            parse(data, on_bad)
            checksum = zlib.crc32(data, checksum)
            num_rows = first + _count_lines(data)
            marks.append((first, begin))
            begin = end
            on_progress(num_rows - first)
        if num_rows == len(bad_lines):
            raise DataError(f"{self.path}: {'no good row' if num_rows else 'the file is empty'}")
        self.num_rows, self.bad_lines = num_rows, bad_lines
        self.fingerprint = f"{num_rows:,} rows of checksum {checksum:08x}"
        # Offsets are of the unpacked bytes, where a packed file cannot be entered.
        self.marks = marks[:1] if _is_gzip(self.path) else marks

    def rows(self, start: int, stop: int) -> Iterator[Rows]:
        """Yields the good rows of lines ``[start, stop)``, counted from 0, chunk by chunk.

        Raises:
            BadRowError: a bad line, without ``skip_bad_rows``.
        """
        for first, data, _ in self._chunks(start, stop):
            yield parse(data, partial(self._on_bad, first))

    def _chunks(self, start: int, stop: int | None) -> Iterator[tuple[int, bytes, int]]:
        """Yields (number of the first line, whole lines, offset of their end) for lines [start, stop)."""
        first, offset = self.marks[bisect_right(self.marks, (start, sys.maxsize)) - 1]
        for data, end in _read_lines(self.path, offset, self.chunk_bytes):
            if stop is not None and first >= stop:
                return
            num_lines = _count_lines(data)
            last = first + num_lines
            if stop is not None and last > stop:
                data = data[: _skip_lines(data, stop - first)]
            if start < last and first < start:
                data = data[_skip_lines(data, start - first) :]
            if start < last:
                yield max(first, start), data, end
            first = last

    def _on_bad(self, first: int, index: int, column: str | None, reason: str) -> None:
        if not self.skip_bad_rows:
            place = f"line {first + index + 1}" + (f", column {column}" if column else "")
            raise BadRowError(f"{self.path}, {place}: {reason}")
