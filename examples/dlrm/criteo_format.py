"""The Criteo line format: whole lines of bytes in, arrays out, and the exact fault of a bad line.

A line is a label (0 or 1), 13 integers I1..I13 and 26 hexadecimal ids C1..C26, separated by tabs; every field but the
label may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

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
"""A longer line is a bad row: a file without newlines must not fill the memory."""

_SCHEMA = {name: pl.Int64 if name in DENSE_NAMES else pl.String for name in COLUMNS}
_ALPHABET = b"0123456789abcdefABCDEF-\t\n"
_GOOD_LINE = re.compile(rb"[01](?:\t(?:-?[0-9]+)?){13}(?:\t[0-9a-fA-F]{0,16}){26}")
_INTEGER = re.compile(rb"(?:-?[0-9]+)?")
_HEX = re.compile(rb"[0-9a-fA-F]{0,16}")
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_INT64 = range(-(2**63), 2**63)


class BadRowError(DataError):
    """A line that is no Criteo row; the message names file, line (from 1) and, where one is to blame, the column."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Parsed rows.

    Attributes:
        labels: (n,) int32, 0 or 1.
        dense: (n, 13) float32, ``log(max(x, -2) + 3)`` of the integers; an empty field counts as 0.
        ids: (n, 26) int64, the hexadecimal ids as they are; 64-bit ids wrap to negative, an empty field is 0.
    """

    labels: npt.NDArray[np.int32]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.labels[part], self.dense[part], self.ids[part])


def concat(parts: list[Rows]) -> Rows:
    """Joins the parts, in order, into one."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.ids for part in parts]),
    )


def transform_dense(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """``log(max(x, -2) + 3)``.

    TorchRec's reader shifts by the minimum of the file, which a stream does not know, and takes the log. The log's
    published minimum is -3 in one column, and log(0) is no feature value, so values below -2 count as -2.

    Args:
        values: any shape, int64.

    Returns:
        Same shape, float32.
    """
    # Through float first: -2 + 3 is safe in int64, the other end of the range is not.
    shifted: npt.NDArray[np.float32] = np.maximum(values, -2).astype(np.float32) + np.float32(3)
    return np.log(shifted)


def parse_fast(data: bytes) -> Rows | None:
    """Parses whole lines at full speed, or not at all.

    Args:
        data: lines, each ended by LF alone.

    Returns:
        The rows, or None where anything needs a closer look; a returned result is exact.
    """
    if data.translate(None, _ALPHABET):
        return None
    buffer = np.frombuffer(data, np.uint8)
    # The alphabet leaves tab and newline as the only bytes below "-".
    ends = np.flatnonzero(buffer < ord("-"))
    num_rows = data.count(b"\n")
    if len(ends) != num_rows * len(COLUMNS) or (buffer[ends[len(COLUMNS) - 1 :: len(COLUMNS)]] != ord("\n")).any():
        return None
    lengths = np.diff(ends, prepend=-1).reshape(num_rows, len(COLUMNS)) - 1
    labels = buffer[ends[:: len(COLUMNS)] - 1] - np.uint8(ord("0"))
    if (lengths[:, 0] != 1).any() or (labels > 1).any() or (lengths[:, -NUM_IDS:] > 16).any():
        return None
    if np.diff(ends[len(COLUMNS) - 1 :: len(COLUMNS)], prepend=-1).max(initial=0) > MAX_LINE_BYTES:
        return None
    try:
        frame = pl.read_csv(data, has_header=False, separator="\t", quote_char=None, schema=_SCHEMA)
        frame = frame.select(
            pl.col(DENSE_NAMES).fill_null(0),
            pl.col(ID_NAMES).str.to_integer(base=16, dtype=pl.UInt64).fill_null(0),
        )
    except pl.exceptions.PolarsError:
        return None
    dense = np.empty((NUM_DENSE, num_rows), np.int64)
    ids = np.empty((NUM_IDS, num_rows), np.int64)
    for column, name in enumerate(DENSE_NAMES):
        dense[column] = frame[name].to_numpy()
    for column, name in enumerate(ID_NAMES):
        ids[column] = frame[name].to_numpy().view(np.int64)
    return Rows(labels.astype(np.int32), np.ascontiguousarray(transform_dense(dense).T), ids.T)


def find_fault(line: bytes) -> tuple[str | None, str] | None:
    """Says what is wrong with a line: its first bad column, and why.

    Args:
        line: one line without its end.

    Returns:
        (column, reason), or None for a good line; the column is None where the fault is the whole line's.
    """
    fields = line.split(b"\t")
    if len(line) > MAX_LINE_BYTES:
        return None, f"the line is longer than {MAX_LINE_BYTES} bytes"
    if len(fields) != len(COLUMNS):
        return None, f"expected {len(COLUMNS)} tab-separated columns, found {len(fields)}"
    if fields[0] not in (b"0", b"1"):
        return "label", f"expected 0 or 1, found {_show(fields[0])}"
    for name, field in zip(DENSE_NAMES, fields[1:], strict=False):
        if not _INTEGER.fullmatch(field):
            return name, f"expected an integer or nothing, found {_show(field)}"
        if _integer(field) not in _INT64:
            return name, f"{_show(field)} is outside int64"
    for name, field in zip(ID_NAMES, fields[-NUM_IDS:], strict=True):
        if not _HEX.fullmatch(field):
            return name, f"expected 1 to 16 hexadecimal digits or nothing, found {_show(field)}"
    return None


def _show(field: bytes) -> str:
    text = field.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _integer(field: bytes) -> int:
    # int() refuses more than 4300 digits; leading zeros may be that many.
    digits = field.removeprefix(b"-").lstrip(b"0")[:20] or b"0"
    return -int(digits) if field.startswith(b"-") else int(digits)


def _parse_slow(lines: list[bytes]) -> Rows:
    fields = [line.split(b"\t") for line in lines]
    dense = np.array([[_integer(field) for field in row[1:-NUM_IDS]] for row in fields], np.int64)
    ids = np.array([[int(field or b"0", 16) for field in row[-NUM_IDS:]] for row in fields], np.uint64)
    labels = np.array([int(row[0]) for row in fields], np.int32)
    return Rows(labels, transform_dense(dense.reshape(-1, NUM_DENSE)), ids.reshape(-1, NUM_IDS).view(np.int64))


def parse(data: bytes, on_bad: Callable[[int, str | None, str], None]) -> Rows:
    """Parses whole lines; the bad ones are reported and left out.

    Args:
        data: lines, ended by LF or CRLF; the last may lack its end.
        on_bad: called with (index of the line in ``data``, column or None, reason) for every bad line; may raise.

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
        # One match of the whole line is many times faster than its fields; a number of 19 digits may overflow.
        plain = len(line) < 1024 and _GOOD_LINE.fullmatch(line) and not _LONG_NUMBER.search(line)
        fault = None if plain else find_fault(line)
        if fault is None:
            good.append(line)
        else:
            on_bad(index, *fault)
    rows = parse_fast(b"".join(line + b"\n" for line in good))
    return rows if rows is not None else _parse_slow(good)
