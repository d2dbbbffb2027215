"""Writes the rows of a served model beside the model in its file, so that processes map
them instead of reading them.

The file is the zip file that ``torch.jit.save`` writes, with one record more for each
table: the lines of the index and the rows, as they are in memory. The native library
finds the records by their name.

Tests: tests/serving/export/test_mapped_files.py.
"""

from __future__ import annotations

import secrets
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: the lines of the index are cache lines
_BLOCK_BYTES = 8 << 20
_LOCAL_HEADER_BYTES = 30  # of a zip file, before the name of the record
_ZIP64_BYTES = 20  # of the extra field that zipfile adds
_PADDING = 0x4246  # the number of the extra field with which torch aligns records, too


@contextmanager
def rows_apart(tables: Sequence[Any]) -> Iterator[dict[str, list[Tensor]]]:
    """Makes ``torch.jit.save`` write the tables without their rows, until the end of
    the context.

    Args:
        tables: Modules or compiled modules of
            :class:`torchrec_recstore_serving.export.hashed_tables.HashedTable`.

    Yields:
        The tensors of each record that :func:`append_records` then adds to the file, by
        the name of the record.
    """
    identity = secrets.token_hex(16)
    names = [f"rows/{identity}/{number}" for number, _ in enumerate(tables)]
    try:
        yield {
            name: table.native.write_apart(name)
            for name, table in zip(names, tables, strict=True)
        }
    finally:
        for table in tables:
            table.native.write_within()


def append_records(path: Path, records: dict[str, list[Tensor]]) -> None:
    """Adds records to a file that ``torch.jit.save`` has written.

    Raises:
        OSError: The file cannot be written.
    """
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        for name, tensors in records.items():
            record = zipfile.ZipInfo(f"{folder}/{name}")
            header = _LOCAL_HEADER_BYTES + len(record.filename) + _ZIP64_BYTES + 4
            padding = -(archive.start_dir + header) % _ALIGNMENT
            record.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
            with archive.open(record, "w", force_zip64=True) as file:
                for tensor in tensors:
                    for block in tensor.view(-1).view(torch.uint8).split(_BLOCK_BYTES):  # type: ignore[no-untyped-call]
                        file.write(memoryview(block.numpy()))
