"""Tests of the Criteo reader, compared with a naive parser, and of its errors for bad
input.
"""

from __future__ import annotations

import gzip
import io
import math
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from common.command import DataError
from criteo import (
    COLUMNS,
    MAX_LINE_BYTES,
    BadRowError,
    CriteoFile,
    Rows,
    concat,
    parse,
    parse_fast,
)
from hypothesis import given, settings
from hypothesis import strategies as st

GOOD = b"\t".join(
    [b"1", *[b"%d" % i for i in range(13)], *[b"%08x" % i for i in range(26)]]
)


def naive(lines: list[bytes]) -> tuple[list[int], list[list[float]], list[list[int]]]:
    labels, dense, ids = [], [], []
    for line in lines:
        fields = line.decode("ascii").split("\t")
        labels.append(int(fields[0]))
        dense.append([math.log(max(int(x or "0"), -2) + 3) for x in fields[1:14]])
        unsigned = [int(x or "0", 16) for x in fields[14:]]
        ids.append([x - 2**64 if x >= 2**63 else x for x in unsigned])
    return labels, dense, ids


def check_equal(rows: Rows, lines: list[bytes]) -> None:
    labels, dense, ids = naive(lines)
    assert rows.labels.dtype == np.int32
    assert rows.labels.tolist() == labels
    assert rows.dense.dtype == np.float32
    assert rows.dense.shape == (len(lines), 13)
    assert np.allclose(rows.dense, np.array(dense).reshape(-1, 13), rtol=1e-6)
    assert rows.ids.dtype == np.int64
    assert rows.ids.tolist() == ids


def read_all(file: CriteoFile) -> Rows:
    file.scan()
    return concat(list(file.rows(0, file.num_rows)))


def with_field(column: str, value: bytes) -> bytes:
    fields = GOOD.split(b"\t")
    fields[COLUMNS.index(column)] = value
    return b"\t".join(fields)


def refuse(index: int, column: str, reason: str) -> None:
    raise AssertionError(f"line {index}, {column}: {reason}")


dense_fields = st.one_of(
    st.just(b""),
    st.integers(-3, 100).map(lambda x: b"%d" % x),
    st.integers(-(2**63), 2**63 - 1).map(lambda x: b"%d" % x),
    st.sampled_from(
        [
            b"-0",
            b"007",
            b"-03",
            b"0" * 30 + b"12",
            b"9223372036854775807",
            b"-9223372036854775808",
        ]
    ),
)
id_fields = st.one_of(
    st.just(b""),
    st.integers(0, 2**32 - 1).map(lambda x: b"%08x" % x),
    st.integers(0, 2**64 - 1).map(lambda x: b"%X" % x),
    st.sampled_from(
        [
            b"0",
            b"ffffffffffffffff",
            b"8000000000000000",
            b"0000000000000001",
            b"DeadBeef",
        ]
    ),
)
good_lines = st.builds(
    lambda label, dense, ids: b"\t".join([label, *dense, *ids]),
    st.sampled_from([b"0", b"1"]),
    st.lists(dense_fields, min_size=13, max_size=13),
    st.lists(id_fields, min_size=26, max_size=26),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(good_lines, min_size=1, max_size=8),
    end=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
)
def test_parse_matches_a_naive_parser(
    lines: list[bytes], end: bytes, last: bool
) -> None:
    data = end.join(lines) + (end if last else b"")
    check_equal(parse(data, refuse), lines)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(good_lines, min_size=1, max_size=3),
    position=st.integers(0, 10_000),
    noise=st.sampled_from(
        [
            b"\t",
            b"\n",
            b"\r",
            b" ",
            b"-",
            b"+",
            b"x",
            b"g",
            b'"',
            b".",
            b"\0",
            b"\xff",
            b"_",
            b"2",
        ]
    ),
    replace=st.booleans(),
)
def test_fast_path_never_guesses(
    lines: list[bytes], position: int, noise: bytes, replace: bool
) -> None:
    data = b"".join(line + b"\n" for line in lines)
    position %= len(data)
    data = data[:position] + noise + data[position + replace :]
    rows = parse_fast(data)
    if rows is not None:
        faults: list[int] = []
        slow = list(data.split(b"\n")[:-1])
        parse(data, lambda index, column, reason: faults.append(index))
        assert not faults
        check_equal(rows, slow)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    lines=st.lists(good_lines, min_size=1, max_size=12),
    chunk_bytes=st.integers(1, 700),
    end=st.sampled_from([b"\n", b"\r\n"]),
    packed=st.booleans(),
    bounds=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_any_chunk_size_and_any_part_give_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    chunk_bytes: int,
    end: bytes,
    packed: bool,
    bounds: tuple[int, int],
) -> None:
    path = tmp_path_factory.mktemp("rows") / "train.txt"
    data = end.join(lines)
    path.write_bytes(gzip.compress(data) if packed else data)
    file = CriteoFile(path, chunk_bytes=chunk_bytes)
    check_equal(read_all(file), lines)
    assert (file.num_rows, file.bad_rows) == (len(lines), 0)
    start, stop = sorted(min(bound, len(lines)) for bound in bounds)
    part = list(file.rows(start, stop))
    if part:
        check_equal(concat(part), lines[start:stop])
    else:
        assert start == stop


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        (with_field("label", b"2"), "label", "expected 0 or 1, found '2'"),
        (with_field("label", b""), "label", "expected 0 or 1"),
        (with_field("label", b"01"), "label", "expected 0 or 1"),
        (with_field("label", b"-1"), "label", "expected 0 or 1"),
        (with_field("I1", b"1.5"), "I1", "expected an integer"),
        (with_field("I7", b"-"), "I7", "expected an integer"),
        (with_field("I7", b"--1"), "I7", "expected an integer"),
        (with_field("I7", b"1-1"), "I7", "expected an integer"),
        (with_field("I3", b" 1"), "I3", "expected an integer"),
        (with_field("I3", b"+1"), "I3", "expected an integer"),
        (with_field("I3", b"a"), "I3", "expected an integer"),
        (with_field("I3", b"NaN"), "I3", "expected an integer"),
        (with_field("I3", b"0x1f"), "I3", "expected an integer"),
        (with_field("I13", b"9223372036854775808"), "I13", "outside int64"),
        (with_field("I13", b"-9223372036854775809"), "I13", "outside int64"),
        (with_field("I13", b"9" * 5000), "I13", "outside int64"),
        (with_field("C1", b"xyz"), "C1", "hexadecimal digits or nothing, found 'xyz'"),
        (with_field("C26", b"-1"), "C26", "hexadecimal"),
        (with_field("C9", b"0x1f"), "C9", "hexadecimal"),
        (with_field("C9", b"1" * 17), "C9", "hexadecimal"),
        (with_field("C9", b"0" * 17), "C9", "hexadecimal"),
        (with_field("C9", b'"1"'), "C9", "hexadecimal"),
        (with_field("C9", b"\xff\xfe"), "C9", "hexadecimal"),
        (with_field("C9", b"ab\0cd"), "C9", "hexadecimal"),
        (with_field("C9", b"ab\rcd"), "C9", "hexadecimal"),
        (with_field("C9", "\N{ARABIC-INDIC DIGIT ONE}".encode()), "C9", "hexadecimal"),
        (
            b"\t".join(GOOD.split(b"\t")[:-1]),
            None,
            "expected 40 tab-separated columns, found 39",
        ),
        (GOOD + b"\t", None, "expected 40 tab-separated columns, found 41"),
        (b"", None, "expected 40 tab-separated columns, found 1"),
        (b"\xef\xbb\xbf" + GOOD, "label", "expected 0 or 1"),
        (GOOD.replace(b"\t", b","), None, "separated by commas"),
        (b"1" * (MAX_LINE_BYTES + 10), None, "longer than"),
    ],
)
def test_bad_line_is_named_or_skipped(
    tmp_path: Path, line: bytes, column: str | None, reason: str
) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\n".join([GOOD, GOOD, line, GOOD, b""]))
    for chunk_bytes in (100, 1 << 23):
        with pytest.raises(BadRowError) as error:
            CriteoFile(
                path, chunk_bytes=chunk_bytes if len(line) < 10_000 else 1 << 19
            ).scan()
        assert str(error.value).startswith(
            f"{path}, line 3, column {column}: " if column else f"{path}, line 3: "
        )
        assert reason in str(error.value)
    file = CriteoFile(path, skip_bad_rows=True)
    check_equal(read_all(file), [GOOD] * 3)
    assert (file.num_rows, file.bad_rows) == (4, 1)


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("numbered", [True, False])
def test_the_command_for_kaggle_s_csv_makes_a_log(
    tmp_path: Path, header: bool, numbered: bool
) -> None:
    lines = [b"label," + ",".join(COLUMNS[1:]).encode()] * header + [
        GOOD.replace(b"\t", b",")
    ] * 3
    if numbered:
        lines = [
            b"Id," * (header and not at) + b"7," * (not header or at > 0) + line
            for at, line in enumerate(lines)
        ]
    (tmp_path / "train.csv").write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(BadRowError, match="as in Kaggle's CSV") as error:
        CriteoFile(tmp_path / "train.csv").scan()
    command = str(error.value).partition("by tabs: ")[2].replace("FILE", "train.csv")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    check_equal(read_all(CriteoFile(tmp_path / "train.txt")), [GOOD] * 3)


def test_two_rows_of_40_columns_in_sum_are_both_bad(tmp_path: Path) -> None:
    fields = GOOD.split(b"\t")
    path = tmp_path / "train.txt"
    path.write_bytes(
        b"\t".join(fields[:-1]) + b"\n" + b"\t".join([*fields, b"1"]) + b"\n" + GOOD
    )
    file = CriteoFile(path, skip_bad_rows=True)
    check_equal(read_all(file), [GOOD])
    assert file.bad_rows == 2


def test_limit_hides_what_comes_after(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\n".join([GOOD] * 7 + [b"rubbish"]))
    file = CriteoFile(path, limit_rows=7)
    check_equal(read_all(file), [GOOD] * 7)
    with pytest.raises(BadRowError, match="line 8: expected 40"):
        CriteoFile(path, limit_rows=8).scan()


@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0)])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.txt: the file is empty"):
        CriteoFile(path).scan()


def test_file_of_bad_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\n\n\n")
    with pytest.raises(DataError, match=r"train\.txt: no good row"):
        CriteoFile(path, skip_bad_rows=True).scan()


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train\.txt"):
        CriteoFile(tmp_path / "train.txt").scan()


def test_gzip_cut_short_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "train.txt.gz"
    packed = gzip.compress(b"\n".join([GOOD] * 100))
    for cut in (2, 5, 30, len(packed) - 9, len(packed) - 1):
        path.write_bytes(packed[:cut])
        with pytest.raises(
            DataError, match=r"train\.txt\.gz: the gzip file is truncated"
        ):
            CriteoFile(path).scan()
    path.write_bytes(packed[:-8] + b"\0" * 8)
    with pytest.raises(DataError, match=r"train\.txt\.gz: damaged gzip file"):
        CriteoFile(path).scan()


def test_gzip_of_several_members_and_padding(tmp_path: Path) -> None:
    path = tmp_path / "train.txt.gz"
    half = len(GOOD) // 2
    path.write_bytes(
        gzip.compress(GOOD[:half])
        + gzip.compress(GOOD[half:] + b"\n" + GOOD)
        + b"\0" * 100
    )
    check_equal(read_all(CriteoFile(path, chunk_bytes=50)), [GOOD, GOOD])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.txt.gz"
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write((GOOD + b"\n") * 4000)
    path.write_bytes(buffer.getvalue())  # 24 MB unpacked
    source = CriteoFile(path, chunk_bytes=1 << 18)
    tracemalloc.start()
    try:
        source.scan()
        assert sum(len(rows) for rows in source.rows(0, source.num_rows)) == 80_000
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
