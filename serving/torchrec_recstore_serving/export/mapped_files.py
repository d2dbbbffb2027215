"""Writes the rows of a served model beside the model in its file.

Processes map them instead of reading them.

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
_PADDING_HEADER = struct.Struct("<HH")  # this number, and the size of the padding


@contextmanager
def rows_apart(tables: Sequence[Any]) -> Iterator[dict[str, list[Tensor]]]:
    """Makes ``torch.jit.save`` write the tables without their rows, in a context.

    Args:
        tables: Modules or compiled modules of
            :class:`torchrec_recstore_serving.export.hashed_tables.HashedTable`.

    Yields:
        The tensors of each record that :func:`append_records` then adds to the file, by
        the name of the record.
    """
    identity = secrets.token_hex(16)
    records: dict[str, list[Tensor]] = {}
    try:
        for number, table in enumerate(tables):
            name = f"rows/{identity}/{number}"
            records[name] = table.native.write_apart(name)
        yield records
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
            header_bytes = (
                _LOCAL_HEADER_BYTES
                + len(record.filename)
                + _ZIP64_BYTES
                + _PADDING_HEADER.size
            )
            padding_bytes = -(archive.start_dir + header_bytes) % _ALIGNMENT
            padding = _PADDING_HEADER.pack(_PADDING, padding_bytes)
            record.extra = padding + bytes(padding_bytes)
            with archive.open(record, "w", force_zip64=True) as file:
                for tensor in tensors:
                    data = tensor.view(-1).view(torch.uint8)
                    for block in data.split(_BLOCK_BYTES):  # type: ignore[no-untyped-call]
                        file.write(memoryview(block.numpy()))
