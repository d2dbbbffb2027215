"""The file of tables of ``recstore plan``: what a user says about tables, besides what was measured of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torchrec_recstore.optim import OPTIMIZERS, Optimizer
from torchrec_recstore.planner.forecasts import DTYPES, ForecastTable
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.row_types import MOST_COLUMNS


@dataclass(frozen=True)
class StatedTable:
    """What a file says about a table. A field is None, or empty, if the file does not say it.

    Args:
        features: The names of the columns of a Parquet sample that have the ids of the table.
        dim: The number of columns of the table.
        dtype: The data type of the rows: ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"int8"``.
        rows: The number of rows that the table has now.
        rows_per_day: The number of rows by which it grows in a day.
        max_rows: The largest number of rows in memory, as in ``TableOptions``.

    Raises:
        ValueError: A value is not valid. The message names the field.
    """

    features: tuple[str, ...] = ()
    dim: int | None = None
    dtype: str | None = None
    rows: int | None = None
    rows_per_day: float | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.features, tuple) or not all(isinstance(each, str) for each in self.features):
            raise ValueError(f"features must be a list of columns, got {self.features!r}")
        if len(set(self.features)) < len(self.features):
            raise ValueError(f"features has a column twice: {list(self.features)}")
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name, least in (("dim", 1), ("rows", 0), ("rows_per_day", -math.inf), ("max_rows", 1)):
            value = getattr(self, name)
            kinds = (int, float) if name == "rows_per_day" else (int,)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value < least:
                what = "a finite number" if name == "rows_per_day" else f"a whole number from {least}"
                raise ValueError(f"{name} must be {what}, got {value!r}")
        if self.dim is not None and self.dim > MOST_COLUMNS:
            raise ValueError(f"dim must be at most 2**24, got {self.dim}")


@dataclass(frozen=True)
class TableFile:
    """A file of tables.

    Args:
        path: The path of the file, for messages.
        tables: What the file says about each table.
        optimizer: The optimizer of all tables. None if the file does not say it.
    """

    path: str
    tables: Mapping[str, StatedTable]
    optimizer: Optimizer | None = None

    def with_saved(self, saved: Mapping[str, ForecastTable]) -> dict[str, ForecastTable]:
        """Returns the tables of this file and of a checkpoint. What this file says counts first.

        Args:
            saved: The tables of a checkpoint, or none.

        Raises:
            ValueError: The number of columns or the optimizer of a table is not known. The message names the table.
        """
        optimizer = self.optimizer or next((each.optimizer for each in saved.values()), None)
        found = {}
        for name in dict.fromkeys((*saved, *self.tables)):
            stated, table = self.tables.get(name, StatedTable()), saved.get(name)
            if table is None:
                for field, value in (("dim", stated.dim), ("optimizer", optimizer)):
                    if value is None:
                        raise ValueError(
                            f"{self.path}: the {field} of table {name!r} is not known: state {field}, or pass a "
                            "checkpoint of the table as SOURCE"
                        )
                assert stated.dim is not None
                assert optimizer is not None
                table = ForecastTable(stated.dim, optimizer)
            found[name] = ForecastTable(
                dim=stated.dim or table.dim,
                optimizer=self.optimizer or table.optimizer,
                dtype=stated.dtype or table.dtype,
                options=replace(table.options, max_rows=stated.max_rows or table.options.max_rows),
            )
        return found

    def statistics(self, steps_per_day: float | None) -> dict[str, TableStatistics]:
        """Returns the rows of the tables, and their growth.

        Args:
            steps_per_day: The number of steps in a day. None leaves out the growth.
        """
        return {
            name: TableStatistics(
                rows=table.rows,
                rows_per_step=(
                    None if table.rows_per_day is None or steps_per_day is None else table.rows_per_day / steps_per_day
                ),
            )
            for name, table in self.tables.items()
        }


def read_table_file(path: str | os.PathLike[str]) -> TableFile:
    """Reads a file of tables.

    The file is a JSON object with ``tables``, which has an object with the fields of :class:`StatedTable` for each
    table, and ``optimizer``, an object with the ``name`` of a class of :mod:`torchrec_recstore.optim` and the arguments
    of the class.

    Raises:
        OSError: The file cannot be read.
        ValueError: A field is unknown or not valid. The message names the file, the table and the field.
    """
    try:
        document: Any = json.loads(Path(path).read_bytes())
        _check_object("it", document, ("tables", "optimizer"))
        if not document.get("tables"):
            raise ValueError("it has no tables")
        _check_object("tables", document["tables"])
        tables = {}
        for name, entry in document["tables"].items():
            _check_object(f"table {name!r}", entry, [each.name for each in fields(StatedTable)])
            try:
                tables[name] = StatedTable(**{field: _as_tuple(value) for field, value in entry.items()})
            except ValueError as error:
                raise ValueError(f"table {name!r}: {error}") from error
        return TableFile(
            os.fspath(path), tables, _optimizer(document["optimizer"]) if "optimizer" in document else None
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _optimizer(document: Any) -> Optimizer:
    kind = OPTIMIZERS.get(str(document.get("name"))) if isinstance(document, dict) else None
    if kind is None:
        raise ValueError(f"optimizer must be an object whose name is one of {', '.join(OPTIMIZERS)}, got {document!r}")
    _check_object("optimizer", document, ("name", *(each.name for each in fields(kind))))
    made: Optimizer = kind(**{field: _as_tuple(value) for field, value in document.items() if field != "name"})
    return made


def _as_tuple(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value  # the lists of JSON


def _check_object(where: str, value: object, known: Collection[str] | None = None) -> None:
    # A user writes this file. An unknown field is therefore a mistake, and not a field of a newer version.
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got {value!r}")
    for field in value:
        if known is not None and field not in known:
            raise ValueError(f"{where} has the unknown field {field!r}: the fields are {', '.join(known)}")
