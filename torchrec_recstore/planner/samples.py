"""Statistics of tables from a sample of training rows in a Parquet file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torchrec import KeyedJaggedTensor

from torchrec_recstore.encoding import check_fields
from torchrec_recstore.planner.forecasts import ForecastTable, table_config
from torchrec_recstore.planner.statistics import TableStatistics, measure_statistics


def read_features(path: str | os.PathLike[str], tables: Mapping[str, ForecastTable]) -> dict[str, list[str]]:
    """Reads a JSON object with the list of columns, the features, of each table.

    Raises:
        OSError: The file cannot be read.
        ValueError: A table is missing or unknown, or has no list of names. The message names the file and the table.
    """
    try:
        document: Any = json.loads(Path(path).read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        check_fields("it", document, list(tables), list(tables))
        for name, columns in document.items():
            if not isinstance(columns, list) or not columns or not all(isinstance(each, str) for each in columns):
                raise ValueError(f"table {name!r} must have a list of columns, got {columns!r}")
        return document
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def sample_statistics(
    tables: Mapping[str, ForecastTable],
    columns: Mapping[str, Sequence[str]],
    parquet: str | os.PathLike[str],
    batch_size: int,
) -> dict[str, TableStatistics]:
    """Measures tables with the rows of a Parquet file, on this machine. See :func:`measure_statistics`.

    Args:
        tables: The tables by name.
        columns: The columns of ids of each table: integers, strings, or lists of them. A missing value is no id.
        parquet: The file. Its last rows that are less than a batch do not count.
        batch_size: The rows of a batch.

    Raises:
        OSError: The file cannot be read.
        ValueError: The package pyarrow is missing, a column is missing or has no ids, or there is no whole
            batch of rows.
    """
    names = list(dict.fromkeys(name for each in columns.values() for name in each))
    batches = list(_batches(Path(parquet), names, batch_size))
    if not batches:
        raise ValueError(f"{parquet} has no whole batch of {batch_size} rows")
    found: dict[str, TableStatistics] = {}
    for name, table in tables.items():
        found |= measure_statistics([table_config(name, table, columns[name])], batches, table.optimizer)
    return found


def _batches(path: Path, names: list[str], batch_size: int) -> Iterator[KeyedJaggedTensor]:
    try:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError("pyarrow is missing: pip install 'torchrec-recstore[parquet]'") from None
    with path.open("rb") as opened:
        file = pq.ParquetFile(opened)
        if missing := [name for name in names if name not in file.schema_arrow.names]:
            raise ValueError(f"{path} has no column {missing[0]!r}")
        for batch in file.iter_batches(batch_size, columns=names):
            if batch.num_rows < batch_size:
                continue
            ids: list[int] = []
            lengths = []
            for name in names:
                for value in batch.column(name).to_pylist():
                    bag = value if isinstance(value, list) else [] if value is None else [value]
                    ids += [_id(name, each) for each in bag]
                    lengths.append(len(bag))
            yield KeyedJaggedTensor(
                names, torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor(lengths, dtype=torch.int32)
            )


def _id(column: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"column {column!r} has the id {value}, and ids are signed integers of 64 bits")
        return value
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must have integers, strings, or lists of them, got {value!r}")
    unsigned = xxhash.xxh3_64_intdigest(value.encode())  # as examples/common/parquet.py does
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned
