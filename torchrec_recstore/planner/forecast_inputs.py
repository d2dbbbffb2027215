"""Reads the hosts, the tables and the sample of rows for ``recstore plan``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import Topology

from torchrec_recstore.encoding import check_fields
from torchrec_recstore.installing import install
from torchrec_recstore.optim import OPTIMIZERS, Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner.refining import SHARDING_TYPE_MS
from torchrec_recstore.planner.statistics import TableStatistics, measure_statistics
from torchrec_recstore.row_types import MOST_COLUMNS
from torchrec_recstore.table_configs import ROW_DTYPES

VIRTUAL_ROWS = 2**40
"""The ``num_embeddings`` of all tables.

The measured rows count, and not this number.
"""

_DTYPES = {
    str(dtype).removeprefix("torch."): data_type
    for data_type, dtype in ROW_DTYPES.items()
}


_OF_GPUS = ("gpu_memory_per_rank_bytes", "bus_bytes_per_s")


@dataclass(frozen=True)
class Machines:
    """The hosts and the network of a job, as a topology file has them.

    Rates are bytes a second that a rank sends to ranks of its host, and to ranks of
    other hosts. ``table_wise_ms`` and ``row_wise_ms`` are as in ``SHARDING_TYPE_MS``;
    ``latency_ms`` is what a collective takes besides the time of its bytes. A rank has
    a GPU if ``gpu_memory_per_rank_bytes`` is above 0; ``bus_bytes_per_s`` is then the
    rate between the host and the GPU, each way.

    Raises ValueError, which names the field, if a number is not finite, or not above 0;
    milliseconds and the numbers of a GPU may be 0, the latter both or neither.
    """

    ranks_per_host: int
    memory_per_rank_bytes: int
    within_host_bytes_per_s: float
    between_hosts_bytes_per_s: float
    table_wise_ms: float = SHARDING_TYPE_MS["table_wise"]
    row_wise_ms: float = SHARDING_TYPE_MS["row_wise"]
    latency_ms: float = 0.0
    gpu_memory_per_rank_bytes: int = 0
    bus_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for number_field in fields(self):
            name = number_field.name
            value = getattr(self, name)
            is_whole = number_field.type == "int"
            may_be_zero = name.endswith("_ms") or name in _OF_GPUS
            if not _is_number(value, is_whole=is_whole) or not (
                0 < value < math.inf or (may_be_zero and value == 0)
            ):
                kind = "whole" if is_whole else "finite"
                bound = "of at least" if may_be_zero else "above"
                raise ValueError(
                    f"{name} must be a {kind} number {bound} 0, got {value!r}"
                )
        if bool(self.gpu_memory_per_rank_bytes) != bool(self.bus_bytes_per_s):
            raise ValueError(
                "gpu_memory_per_rank_bytes and bus_bytes_per_s must both be above 0, or"
                f" both be 0, got {self.gpu_memory_per_rank_bytes} and"
                f" {self.bus_bytes_per_s}"
            )

    @property
    def compute_device(self) -> str:
        """The type of the device of a rank's dense part."""
        return "cuda" if self.gpu_memory_per_rank_bytes else "cpu"

    @property
    def bytes_per_ms(self) -> tuple[float, float]:
        """The bytes per millisecond within a host and between hosts."""
        return (
            self.within_host_bytes_per_s / 1000,
            self.between_hosts_bytes_per_s / 1000,
        )

    @property
    def sharding_type_ms(self) -> dict[str, float]:
        """The milliseconds of a step by sharding type."""
        return {"table_wise": self.table_wise_ms, "row_wise": self.row_wise_ms}

    def topology(self, ranks: int) -> Topology:
        """Returns TorchRec's topology of a number of ranks.

        Raises ValueError if the ranks do not fill their hosts.
        """
        on_host = min(self.ranks_per_host, ranks)
        if ranks % on_host:
            raise ValueError(
                f"{ranks} ranks do not fill hosts with {on_host} ranks each: change"
                " ranks or ranks_per_host"
            )
        within_host, between_hosts = self.bytes_per_ms
        of_gpus = {}
        if self.gpu_memory_per_rank_bytes:
            of_gpus = {
                "hbm_cap": self.gpu_memory_per_rank_bytes,
                "hbm_to_ddr_mem_bw": self.bus_bytes_per_s / 1000,
            }
        return Topology(
            world_size=ranks,
            local_world_size=on_host,
            compute_device=self.compute_device,
            ddr_cap=self.memory_per_rank_bytes,
            intra_host_bw=within_host,
            inter_host_bw=between_hosts,
            **of_gpus,
        )


def _is_number(value: object, *, is_whole: bool) -> bool:
    kinds = (int,) if is_whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)


def read_machines(path: str | os.PathLike[str]) -> Machines:
    """Reads a topology file, a JSON object with the fields of :class:`Machines`.

    Raises ValueError, which names the file and the field, if a field is missing,
    unknown or not valid.
    """
    try:
        document: Any = json.loads(Path(path).read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        check_fields("it", document, Machines)
        return Machines(**document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True)
class ForecastTable:
    """A pooled table that is to be planned. All tables have the same optimizer.

    ``dtype`` is float32, float16, bfloat16 or int8. ``options.expected_rows`` has no
    effect: the rows were measured.
    """

    dim: int
    optimizer: Optimizer
    dtype: str = "float32"
    options: TableOptions = field(default_factory=TableOptions)


def table_config(
    name: str,
    table: ForecastTable,
    features: Sequence[str],
) -> EmbeddingBagConfig:
    """Returns TorchRec's config of a table.

    Raises ValueError if the name has a point.
    """
    check_name(name)
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=table.dim,
        num_embeddings=VIRTUAL_ROWS,
        feature_names=list(features),
        data_type=_DTYPES[table.dtype],
    )


def check_name(name: str) -> None:
    """Refuses the name of a checkpoint's table that TorchRec's tables cannot have."""
    if "." in name:
        raise ValueError(
            f"table {name!r} cannot be planned: the name of a TorchRec table has no"
            " '.', and a checkpoint has it in the names of tables whose names are"
            " equal in several collections"
        )


@dataclass(frozen=True)
class StatedTable:
    """What a file says about a table.

    A field is None, or empty, if the file does not say it.

    ``features`` are the columns of a Parquet sample with the table's ids, ``dtype`` is
    as in :class:`ForecastTable`, ``rows`` are those of now, and ``max_rows`` is that of
    ``TableOptions``. Raises ValueError, which names the field, if a value is not valid.
    """

    features: tuple[str, ...] = ()
    dim: int | None = None
    dtype: str | None = None
    rows: int | None = None
    rows_per_day: float | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        is_tuple = isinstance(self.features, tuple)
        if not is_tuple or not all(isinstance(name, str) for name in self.features):
            raise ValueError(
                f"features must be a list of columns, got {self.features!r}"
            )
        if len(set(self.features)) < len(self.features):
            raise ValueError(f"features has a column twice: {list(self.features)}")
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(
                f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}"
            )
        for name, least in (("dim", 1), ("rows", 0), ("max_rows", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_number(value, is_whole=True) or value < least:
                raise ValueError(
                    f"{name} must be a whole number from {least}, got {value!r}"
                )
        rows_per_day = self.rows_per_day
        if rows_per_day is not None:
            is_number = _is_number(rows_per_day, is_whole=False)
            if not is_number or not math.isfinite(rows_per_day):
                raise ValueError(
                    f"rows_per_day must be a finite number, got {rows_per_day!r}"
                )
        if self.dim is not None and self.dim > MOST_COLUMNS:
            raise ValueError(f"dim must be at most 2**24, got {self.dim}")


@dataclass(frozen=True)
class TableFile:
    """What a user says about tables, besides what was measured of them.

    ``path`` is for messages. ``optimizer``, that of all tables, is None if the file
    does not say it.
    """

    path: str
    tables: Mapping[str, StatedTable]
    optimizer: Optimizer | None = None

    def with_saved(
        self,
        saved: Mapping[str, ForecastTable],
    ) -> dict[str, ForecastTable]:
        """Returns the tables of this file and of a checkpoint, ``saved``.

        What this file says counts first.

        Raises ValueError, which names the table, if its number of columns or its
        optimizer is not known.
        """
        optimizer = self.optimizer
        if optimizer is None and saved:
            optimizer = next(iter(saved.values())).optimizer
        tables = {}
        for name in dict.fromkeys((*saved, *self.tables)):
            stated = self.tables.get(name, StatedTable())
            table = saved.get(name)
            if table is None:
                if stated.dim is None or optimizer is None:
                    missing = "dim" if stated.dim is None else "optimizer"
                    raise ValueError(
                        f"{self.path}: the {missing} of table {name!r} is not known:"
                        f" state {missing}, or pass a checkpoint of the table as SOURCE"
                    )
                table = ForecastTable(stated.dim, optimizer)
            max_rows = stated.max_rows or table.options.max_rows
            tables[name] = ForecastTable(
                dim=stated.dim or table.dim,
                optimizer=self.optimizer or table.optimizer,
                dtype=stated.dtype or table.dtype,
                options=replace(table.options, max_rows=max_rows),
            )
        return tables

    def statistics(self, steps_per_day: float | None) -> dict[str, TableStatistics]:
        """Returns the rows of the tables, and their growth.

        The growth is left out if ``steps_per_day`` is None.
        """
        statistics = {}
        for name, table in self.tables.items():
            growth = None
            if steps_per_day is not None and table.rows_per_day is not None:
                growth = table.rows_per_day / steps_per_day
            statistics[name] = TableStatistics(rows=table.rows, rows_per_step=growth)
        return statistics


def read_table_file(path: str | os.PathLike[str]) -> TableFile:
    """Reads a file of tables, a JSON object.

    ``tables`` has an object with the fields of :class:`StatedTable` for each table, and
    ``optimizer`` the ``name`` of a class of :mod:`torchrec_recstore.optim` and its
    arguments. Raises ValueError, which names the file, the table and the field, if a
    field is unknown or not valid.
    """
    try:
        document: Any = json.loads(Path(path).read_bytes())
        _check_object("it", document, ("tables", "optimizer"))
        if not document.get("tables"):
            raise ValueError("it has no tables")
        _check_object("tables", document["tables"])
        tables = {}
        known_fields = [table_field.name for table_field in fields(StatedTable)]
        for name, entry in document["tables"].items():
            _check_object(f"table {name!r}", entry, known_fields)
            try:
                tables[name] = StatedTable(**_with_tuples(entry))
            except ValueError as error:
                raise ValueError(f"table {name!r}: {error}") from error
        optimizer = None
        if "optimizer" in document:
            optimizer = _optimizer(document["optimizer"])
        return TableFile(os.fspath(path), tables, optimizer)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _optimizer(document: Any) -> Optimizer:
    kind = None
    if isinstance(document, dict):
        kind = OPTIMIZERS.get(str(document.get("name")))
    if kind is None:
        raise ValueError(
            f"optimizer must be an object whose name is one of {', '.join(OPTIMIZERS)},"
            f" got {document!r}"
        )
    names = [argument.name for argument in fields(kind)]
    _check_object("optimizer", document, ["name", *names])
    arguments = _with_tuples(document)
    del arguments["name"]
    return kind(**arguments)


def _with_tuples(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a JSON object with tuples for its lists."""
    fields_with_tuples = {}
    for name, value in document.items():
        if isinstance(value, list):
            value = tuple(value)
        fields_with_tuples[name] = value
    return fields_with_tuples


def _check_object(
    label: str,
    value: object,
    known_fields: Collection[str] | None = None,
) -> None:
    # A user writes this file. An unknown field is therefore a mistake, and not a field
    # of a newer version.
    if not isinstance(value, dict):
        raise ValueError(f"{label} must be a JSON object, got {value!r}")
    for name in value:
        if known_fields is not None and name not in known_fields:
            listed = ", ".join(known_fields)
            raise ValueError(
                f"{label} has the unknown field {name!r}: the fields are {listed}"
            )


def sample_statistics(
    tables: Mapping[str, ForecastTable],
    columns: Mapping[str, Sequence[str]],
    parquet: str | os.PathLike[str],
    batch_size: int,
    samples_per_step: int,
) -> dict[str, TableStatistics]:
    """Measures tables with the rows of a Parquet file, on this machine.

    See :func:`measure_statistics`.

    ``columns`` are the columns of ids of each table that is measured: integers,
    strings, or lists of them; a missing value is no id. Rows after the last whole batch
    do not count. The rows of a table and their growth are those of a training on the
    file that begins with empty tables: ``rows`` is the number of distinct ids of the
    file, and ``rows_per_step`` that of the ids which only the second half of the
    batches has, for each step of ``samples_per_step`` samples in this half; None with
    one batch.

    Raises ValueError if pyarrow is missing, a column is missing or has no ids, or there
    is no whole batch of rows.
    """
    names: list[str] = []
    for features in columns.values():
        for name in features:
            if name not in names:
                names.append(name)
    batches = list(_batches(Path(parquet), names, batch_size))
    if not batches:
        raise ValueError(f"{parquet} has no whole batch of {batch_size} rows")

    later = len(batches) // 2
    steps = later * batch_size / samples_per_step
    statistics: dict[str, TableStatistics] = {}
    for name, features in columns.items():
        table = tables[name]
        config = table_config(name, table, features)
        measured = measure_statistics([config], batches, table.optimizer)
        rows = _distinct(batches, features)
        growth = None
        if later:
            rows_before = _distinct(batches[:-later], features)
            growth = (rows - rows_before) / steps
        statistics[name] = replace(
            measured[name],
            rows=rows,
            rows_per_step=growth,
        )
    return statistics


def _distinct(batches: Sequence[KeyedJaggedTensor], features: Sequence[str]) -> int:
    """Returns the number of distinct ids of some features."""
    ids = []
    for batch in batches:
        for name in features:
            ids.append(batch[name].values())
    distinct_ids = torch.unique(torch.cat(ids))
    return len(distinct_ids)


def _batches(
    path: Path,
    names: list[str],
    batch_size: int,
) -> Iterator[KeyedJaggedTensor]:
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError(f"pyarrow is missing: {install('parquet')}") from None
    with path.open("rb") as opened:
        try:
            file = pq.ParquetFile(opened)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is not a Parquet file: {error}") from error
        for name in names:
            if name not in file.schema_arrow.names:
                raise ValueError(f"{path} has no column {name!r}")
        for batch in file.iter_batches(batch_size, columns=names):
            if batch.num_rows < batch_size:
                continue
            ids: list[int] = []
            lengths = []
            for name in names:
                for value in batch.column(name).to_pylist():
                    bag = _bag(value)
                    ids += [_id(name, element) for element in bag]
                    lengths.append(len(bag))
            yield KeyedJaggedTensor(
                names,
                torch.tensor(ids, dtype=torch.int64),
                lengths=torch.tensor(lengths, dtype=torch.int32),
            )


def _bag(value: object) -> list[object]:
    """Returns the ids of a cell of a Parquet file."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _id(column: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise ValueError(
                f"column {column!r} has the id {value}, and ids are signed integers of"
                " 64 bits"
            )
        return value
    if not isinstance(value, str):
        raise ValueError(
            f"column {column!r} must have integers, strings, or lists of them, got"
            f" {value!r}"
        )
    # as examples/common/parquet.py does
    unsigned = xxhash.xxh3_64_intdigest(value.encode())
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned
