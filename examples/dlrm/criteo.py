"""Reads the Criteo click log as a stream of arrays.

The log is ``train.txt`` of the Kaggle challenge, plain or gzip. It is read in blocks of
bytes, so the memory use does not depend on the size of the file.

    source = CriteoFile("train.txt")
    source.scan()                                   # counts and checks all lines
    for rows in source.rows(0, source.num_rows):
        rows.labels, rows.dense, rows.ids
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import FileIO

import numpy as np
import numpy.typing as npt
import polars as pl
from common.command import DataError

NUM_DENSE = 13
NUM_IDS = 26
DENSE_NAMES = tuple(f"I{i}" for i in range(1, NUM_DENSE + 1))
ID_NAMES = tuple(f"C{i}" for i in range(1, NUM_IDS + 1))
COLUMNS = ("label", *DENSE_NAMES, *ID_NAMES)

MAX_LINE_BYTES = 1 << 20
"""The longest line in bytes.

A longer line is a bad row, so that a file without newlines does not fill the memory.
"""

CHUNK_BYTES = 8 << 20

_SCHEMA = dict.fromkeys(COLUMNS, pl.String)
_SCHEMA |= dict.fromkeys(DENSE_NAMES, pl.Int64)
_ALPHABET = b"0123456789abcdefABCDEF-\t\n"
_GOOD_LINE = re.compile(rb"[01](?:\t(?:-?[0-9]+)?){13}(?:\t[0-9a-fA-F]{0,16}){26}")
_INTEGER = re.compile(rb"(?:-?[0-9]+)?")
_HEX = re.compile(rb"[0-9a-fA-F]{0,16}")
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_INT64 = range(-(2**63), 2**63)


class BadRowError(DataError):
    """A line is not a Criteo row.

    The message names the file, the line (counted from 1) and the column, if known.
    """


@dataclass(frozen=True, slots=True)
class Rows:
    """Parsed rows.

    Attributes:
        labels: (n,) int32. The labels, 0 or 1.
        dense: (n, 13) float32. ``log(max(x, -2) + 3)`` of the integer features. An
            empty field counts as 0.
        ids: (n, 26) int64. The hexadecimal ids, unchanged. Ids of 2**63 and above wrap
            to negative numbers. An empty field is 0.
    """

    labels: npt.NDArray[np.int32]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(
            self.labels[part],
            self.dense[part],
            self.ids[part],
        )


def concat(parts: list[Rows]) -> Rows:
    """Concatenates parts in their order."""
    if len(parts) == 1:
        return parts[0]
    labels = [part.labels for part in parts]
    dense = [part.dense for part in parts]
    ids = [part.ids for part in parts]
    return Rows(
        np.concatenate(labels),
        np.concatenate(dense),
        np.concatenate(ids),
    )


def transform_dense(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns ``log(max(x, -2) + 3)``.

    TorchRec's reader subtracts the minimum of the file before the logarithm. A stream
    does not know its minimum. The published minimum of the click log is -3 in one
    column, which would give log(0), so values below -2 count as -2.

    Args:
        values: int64, any shape. The integer features.

    Returns:
        float32, the same shape.
    """
    # The sum is computed in float32, because it could overflow in int64.
    limited = np.maximum(values, -2).astype(np.float32)
    shifted: npt.NDArray[np.float32] = limited + np.float32(3)
    return np.log(shifted)


def parse_fast(data: bytes) -> Rows | None:
    """Parses complete lines with the fast parser.

    It handles only data without any unusual line.

    Args:
        data: The lines. Each line ends with LF.

    Returns:
        The rows, or None if the slow parser is needed. Returned rows are exact.
    """
    if data.translate(None, _ALPHABET):
        return None
    buffer = np.frombuffer(data, np.uint8)
    # Tab and newline are the only bytes below "-" in the alphabet.
    field_ends = np.flatnonzero(buffer < ord("-"))
    num_rows = data.count(b"\n")
    if len(field_ends) != num_rows * len(COLUMNS):
        return None
    num_columns = len(COLUMNS)
    line_ends = field_ends[num_columns - 1 :: num_columns]
    if (buffer[line_ends] != ord("\n")).any():
        return None
    field_bytes = np.diff(field_ends, prepend=-1)  # with the tab or the newline
    lengths = field_bytes.reshape(num_rows, num_columns) - 1
    label_lengths = lengths[:, 0]
    id_lengths = lengths[:, -NUM_IDS:]
    label_ends = field_ends[::num_columns]
    labels = buffer[label_ends - 1] - np.uint8(ord("0"))
    if (label_lengths != 1).any() or (labels > 1).any():
        return None
    if (id_lengths > 16).any():
        return None
    line_bytes = np.diff(line_ends, prepend=-1)
    if line_bytes.max(initial=0) > MAX_LINE_BYTES:
        return None
    frame = _frame_of(data)
    if frame is None:
        return None
    dense = np.empty((NUM_DENSE, num_rows), np.int64)
    ids = np.empty((NUM_IDS, num_rows), np.int64)
    for column, name in enumerate(DENSE_NAMES):
        dense[column] = frame[name].to_numpy()
    for column, name in enumerate(ID_NAMES):
        ids[column] = frame[name].to_numpy().view(np.int64)
    return Rows(
        labels.astype(np.int32),
        np.ascontiguousarray(transform_dense(dense).T),
        ids.T,
    )


def _frame_of(data: bytes) -> pl.DataFrame | None:
    """Returns the columns as integers, or None if polars cannot read them."""
    integers = pl.col(ID_NAMES).str.to_integer(base=16, dtype=pl.UInt64)
    try:
        frame = pl.read_csv(
            data,
            has_header=False,
            separator="\t",
            quote_char=None,
            schema=_SCHEMA,
        )
        return frame.select(
            pl.col(DENSE_NAMES).fill_null(0),
            integers.fill_null(0),
        )
    except pl.exceptions.PolarsError:
        return None


def find_fault(line: bytes) -> tuple[str | None, str] | None:
    """Finds the first bad column of a line.

    Args:
        line: The line without its line ending.

    Returns:
        (column, reason), or None for a good line. The column is None if the whole line
        is bad.
    """
    fields = line.split(b"\t")
    if len(line) > MAX_LINE_BYTES:
        return None, f"the line is longer than {MAX_LINE_BYTES} bytes"
    commas = line.count(b",")
    if len(fields) == 1 and commas in (len(COLUMNS) - 1, len(COLUMNS)):
        # The first column may be the number of the row.
        cut = " | cut -d , -f 2-" if commas == len(COLUMNS) else ""
        tail = "" if line[:1].isdigit() else " | tail -n +2"
        reason = (
            "the columns are separated by commas, as in Kaggle's CSV, and must be"
            f" separated by tabs: cat FILE{tail}{cut} | tr , '\\t' > train.txt"
        )
        return None, reason
    if len(fields) != len(COLUMNS):
        reason = f"expected {len(COLUMNS)} tab-separated columns, found {len(fields)}"
        return None, reason
    if fields[0] not in (b"0", b"1"):
        return "label", f"expected 0 or 1, found {_show(fields[0])}"
    for name, field in zip(DENSE_NAMES, fields[1:], strict=False):
        if not _INTEGER.fullmatch(field):
            return name, f"expected an integer or nothing, found {_show(field)}"
        if _integer(field) not in _INT64:
            return name, f"{_show(field)} is outside int64"
    for name, field in zip(ID_NAMES, fields[-NUM_IDS:], strict=True):
        if not _HEX.fullmatch(field):
            reason = (
                f"expected 1 to 16 hexadecimal digits or nothing, found {_show(field)}"
            )
            return name, reason
    return None


def _show(field: bytes) -> str:
    text = field.decode("utf-8", "backslashreplace")
    if len(text) > 40:
        text = text[:40] + "..."
    return repr(text)


def _integer(field: bytes) -> int:
    # int() refuses more than 4300 digits, and a field may have more leading zeros.
    digits = field.removeprefix(b"-").lstrip(b"0")
    number = int(digits[:20] or b"0")
    if field.startswith(b"-"):
        return -number
    return number


def _parse_slow(lines: list[bytes]) -> Rows:
    labels = []
    dense = []
    ids = []
    for line in lines:
        label, *fields = line.split(b"\t")
        dense_fields = fields[:NUM_DENSE]
        id_fields = fields[NUM_DENSE:]
        labels.append(int(label))
        dense.append([_integer(field) for field in dense_fields])
        ids.append([int(field or b"0", 16) for field in id_fields])
    # reshape, because there may be no line
    dense_rows = np.array(dense, np.int64).reshape(-1, NUM_DENSE)
    id_rows = np.array(ids, np.uint64).reshape(-1, NUM_IDS)
    return Rows(
        labels=np.array(labels, np.int32),
        dense=transform_dense(dense_rows),
        ids=id_rows.view(np.int64),
    )


def parse(data: bytes, on_bad: Callable[[int, str | None, str], None]) -> Rows:
    """Parses complete lines. Bad lines are reported and left out.

    Args:
        data: The lines, which end with LF or CRLF. The last line may have no line
            ending.
        on_bad: A function that is called with (index of the line in ``data``, column or
            None, reason) for every bad line. It may raise.

    Returns:
        The good rows.
    """
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").removesuffix(b"\r")
    if data and not data.endswith(b"\n"):
        data += b"\n"
    rows = parse_fast(data)
    if rows is not None:
        return rows
    good = []
    for index, line in enumerate(data.split(b"\n")[:-1]):
        # One match of the whole line is many times faster than checking each field.
        # Numbers of 19 digits may overflow and are checked by find_fault.
        is_plain = (
            len(line) < 1024
            and _GOOD_LINE.fullmatch(line)
            and not _LONG_NUMBER.search(line)
        )
        fault = None if is_plain else find_fault(line)
        if fault is None:
            good.append(line)
        else:
            column, reason = fault
            on_bad(index, column, reason)
    good_data = b"".join(line + b"\n" for line in good)
    rows = parse_fast(good_data)
    if rows is None:
        rows = _parse_slow(good)
    return rows


def _is_gzip(path: str) -> bool:
    with open(path, "rb", buffering=0) as file:
        return file.read(2) == b"\x1f\x8b"


def _read_blocks(path: str, offset: int, block_bytes: int) -> Iterator[bytes]:
    """Yields the content from ``offset``.

    A gzip file is decompressed; its ``offset`` must be 0.
    """
    is_gzip = _is_gzip(path)
    with open(path, "rb", buffering=0) as file:
        if is_gzip:
            try:
                yield from _unpack(file, path, block_bytes)
            except zlib.error as error:
                raise DataError(f"{path}: damaged gzip file: {error}") from error
        else:
            file.seek(offset)
            while block := file.read(block_bytes):
                yield block


def _unpack(file: FileIO, path: str, block_bytes: int) -> Iterator[bytes]:
    """Yields the decompressed content of a gzip file.

    zlib is used directly, because GzipFile of Python 3.11 reads only 8 KiB at a time,
    through two more layers.
    """
    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
    packed = b""
    while True:
        packed = packed or file.read(1 << 20)
        if not packed:
            break
        if member.eof:
            # More members may follow. Zeros between members are padding, as in
            # GzipFile.
            packed = packed.lstrip(b"\0")
            if not packed:
                continue
            member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        block = member.decompress(packed, block_bytes)
        if block:
            yield block
        packed = member.unconsumed_tail or member.unused_data
    if not member.eof:
        raise DataError(f"{path}: the gzip file is truncated")


def _read_lines(
    path: str,
    offset: int,
    block_bytes: int,
) -> Iterator[tuple[bytes, int]]:
    """Yields (complete lines, offset of their end).

    Only the last line of the file may have no line ending.
    """
    incomplete = b""
    for block in _read_blocks(path, offset, block_bytes):
        complete_bytes = block.rfind(b"\n") + 1
        if complete_bytes:
            yield incomplete + block[:complete_bytes], offset + complete_bytes
            incomplete = block[complete_bytes:]
        else:
            # One byte over the limit is enough to recognize the line as bad.
            incomplete = (incomplete + block)[: MAX_LINE_BYTES + 1]
        offset += len(block)
    if incomplete:
        yield incomplete, offset


def _count_lines(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n"))


def _skip_lines(data: bytes, count: int) -> int:
    """Returns the position in ``data`` at which line ``count`` begins."""
    position = 0
    for _ in range(count):
        position = data.index(b"\n", position) + 1
    return position


class CriteoFile:
    """A Criteo TSV file of any size, plain or gzip.

    Call ``scan`` before ``rows``. The object is not thread-safe, but several ``rows``
    iterators may run at the same time.

    Args:
        path: The path of the file.
        skip_bad_rows: Whether bad lines are left out and counted. Default: False, a bad
            line is an error.
        limit_rows: The number of lines to read. Default: None, all lines.
        chunk_bytes: The number of bytes that are parsed at a time. Default: 8 MiB.

    Attributes:
        num_rows: The number of lines, including bad lines, up to ``limit_rows``.
        bad_lines: The numbers of the bad lines, counted from 0, ascending.
        fingerprint: A text that identifies the content. It does not depend on the
            file's name and compression.
        marks: The (line, byte offset) pairs at which reading can begin. A gzip file has
            only the first pair.
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
        """The number of bad lines."""
        return len(self.bad_lines)

    def scan(self, on_progress: Callable[[int], None] = lambda num_lines: None) -> None:
        """Reads the whole file once, and counts and checks all lines.

        No training then starts on a bad file.

        Args:
            on_progress: A function that is called after every chunk with the number of
                its lines.

        Raises:
            BadRowError: A line is bad, and ``skip_bad_rows`` is False.
            DataError: The file has no good line, or a gzip file is damaged or
                truncated.
            OSError: The file cannot be read.
        """
        first = 0
        begin = 0
        checksum = 0
        num_rows = 0
        marks = []
        bad_lines = array("q")

        def on_bad(
            index: int,
            column: str | None,
            reason: str,
        ) -> None:
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
            fault = "no good row" if num_rows else "the file is empty"
            raise DataError(f"{self.path}: {fault}")
        self.num_rows = num_rows
        self.bad_lines = bad_lines
        self.fingerprint = f"{num_rows:,} rows of checksum {checksum:08x}"
        # The offsets count uncompressed bytes, so reading of a gzip file can only begin
        # at its start.
        self.marks = marks[:1] if _is_gzip(self.path) else marks

    def rows(self, start: int, stop: int) -> Iterator[Rows]:
        """Yields the good rows of lines ``[start, stop)``, counted from 0, in chunks.

        Raises:
            BadRowError: A line is bad, and ``skip_bad_rows`` is False.
        """
        for first, data, _ in self._chunks(start, stop):
            yield parse(data, partial(self._on_bad, first))

    def _chunks(self, start: int, stop: int | None) -> Iterator[tuple[int, bytes, int]]:
        """Yields lines ``[start, stop)`` in chunks.

        A chunk is (number of the first line, complete lines, offset of their end).
        """
        mark = bisect_right(self.marks, (start, sys.maxsize)) - 1
        first, offset = self.marks[mark]
        for data, end in _read_lines(self.path, offset, self.chunk_bytes):
            if stop is not None and first >= stop:
                return
            num_lines = _count_lines(data)
            last = first + num_lines
            if stop is not None and last > stop:
                end_byte = _skip_lines(data, stop - first)
                data = data[:end_byte]
            if start < last and first < start:
                begin_byte = _skip_lines(data, start - first)
                data = data[begin_byte:]
            if start < last:
                yield max(first, start), data, end
            first = last

    def _on_bad(
        self,
        first: int,
        index: int,
        column: str | None,
        reason: str,
    ) -> None:
        if not self.skip_bad_rows:
            place = f"line {first + index + 1}"
            if column:
                place += f", column {column}"
            raise BadRowError(f"{self.path}, {place}: {reason}")
