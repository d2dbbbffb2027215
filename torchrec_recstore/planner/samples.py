"""Statistics of tables from a sample of training rows in a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torchrec import KeyedJaggedTensor

from torchrec_recstore.planner.forecasts import ForecastTable, table_config
from torchrec_recstore.planner.statistics import TableStatistics, measure_statistics


def sample_statistics(
    tables: Mapping[str, ForecastTable],
    columns: Mapping[str, Sequence[str]],
    parquet: str | os.PathLike[str],
    batch_size: int,
    samples_per_step: int,
) -> dict[str, TableStatistics]:
    """Measures tables with the rows of a Parquet file, on this machine. See :func:`measure_statistics`.

    The rows of a table and their growth are those of a training on the file that begins with empty tables: ``rows``
    is the number of distinct ids of the file, and ``rows_per_step`` that of the ids which only the second half of the
    batches has, for each step of this half. With one batch, ``rows_per_step`` is None.

    Args:
        tables: The tables by name.
        columns: The columns of ids of each table that is measured: integers, strings, or lists of them. A missing value
            is no id.
        parquet: The file. Its last rows that are less than a batch do not count.
        batch_size: The rows of a batch.
        samples_per_step: The samples of a step, in which the growth is counted.

    Raises:
        OSError: The file cannot be read.
        ValueError: The package pyarrow is missing, a column is missing or has no ids, or there is no whole
            batch of rows.
    """
    names = list(dict.fromkeys(name for each in columns.values() for name in each))
    batches = list(_batches(Path(parquet), names, batch_size))
    if not batches:
        raise ValueError(f"{parquet} has no whole batch of {batch_size} rows")
    later = len(batches) // 2
    steps = later * batch_size / samples_per_step
    found: dict[str, TableStatistics] = {}
    for name, features in columns.items():
        config = table_config(name, tables[name], features)
        (measured,) = measure_statistics([config], batches, tables[name].optimizer).values()
        rows = _distinct(batches, features)
        growth = (rows - _distinct(batches[:-later], features)) / steps if later else None
        found[name] = replace(measured, rows=rows, rows_per_step=growth)
    return found


def _distinct(batches: Sequence[KeyedJaggedTensor], features: Sequence[str]) -> int:
    return len(torch.unique(torch.cat([batch[name].values() for batch in batches for name in features])))


def _batches(path: Path, names: list[str], batch_size: int) -> Iterator[KeyedJaggedTensor]:
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError("pyarrow is missing: pip install 'torchrec-recstore[parquet]'") from None
    with path.open("rb") as opened:
        try:
            file = pq.ParquetFile(opened)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is not a Parquet file: {error}") from error
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
