"""The rows of a model's table as an Arrow table, and back.

Tests: tests/sharders/test_arrow_rows.py, tests/distributed/test_arrow_rows.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_recstore.installing import install
from torchrec_recstore.optim import state_names
from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.sharders.model_tables import EagerModelTable, ModelTable
from torchrec_recstore.sharders.row_functions import table_of
from torchrec_recstore.store import Part, Table
from torchrec_recstore.store.arguments import check_ids
from torchrec_recstore.store.parts import COUNTS_KEY, frequency_key
from torchrec_recstore.store.table import PART_ROWS

ModelRows = ModelTable | EagerModelTable


def table_rows(
    model: nn.Module,
    name: str,
    *,
    ids: Tensor | None = None,
) -> Any:
    """Returns the rows of a table as an Arrow table, for notebooks and data frames.

    Collective.

    The rows of all ranks are gathered on every rank, so that a large table needs
    ``ids``, or a checkpoint and ``top_rows``. Training must not run meanwhile.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or eager modules.
        name: The name of the table, or the path of its collection, a dot and the name.
        ids: (N,) int64, on the CPU. The ids whose rows are returned, those of all
            ranks; ids without a row are left out. Default: None, all rows.

    Returns:
        A ``pyarrow.Table`` of the rows in ascending order of their ids, the same on
        every rank; for an eager module, the rows of the rank's own table. The columns
        are ``id``, int64; ``weight``, a list of ``dim`` float32; the states of the
        optimizer, such as ``exp_avg``, a list of ``dim`` float32 if they have a number
        for each column, else float32; ``last_step``, int64, the step in which the row
        was last looked up; and ``frequency``, int64, or with ``eviction=Scored()``
        ``encoded_score``, int64, which ascends with the score. A row-wise state of a
        table that is sharded by column is the mean over its shards.

    Raises:
        ImportError: pyarrow is missing.
        TypeError, ValueError: ``ids`` has another dtype or shape, or the model has no
            table of this name, or the table is on servers.
        ColdStoreError: A cold store fails.

    All of these errors are raised on every rank.
    """
    env = whole_environment()
    with refused_together(env):
        _pyarrow()
        if ids is not None:
            check_ids(ids, "table_rows: ")
        table = table_of(model, name, "table_rows")

    is_eager = isinstance(table, EagerModelTable)
    wanted = ids
    if not is_eager:
        wanted = _union(all_gathered(ids, env))
    parts: list[Part] = []
    with refused_together(env):
        parts = [_part_of(shard, wanted) for shard in table.shards]

    all_parts = parts
    if not is_eager:
        all_parts = []
        for parts_of_rank in all_gathered(parts, env):
            all_parts += parts_of_rank
    whole_rows = _joined(all_parts, table.dim)
    return _as_arrow(whole_rows, table)


def insert_rows(model: nn.Module, name: str, rows: Any) -> None:
    """Writes rows of an Arrow table into a table: the inverse of :func:`table_rows`.

    Collective.

    Each rank passes some of the rows; the rows of all ranks are written, wherever they
    belong. Of an id that several ranks pass, or that occurs several times, the last row
    counts, in the order of the ranks.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or eager modules.
        name: The name of the table, or the path of its collection, a dot and the name.
        rows: A ``pyarrow.Table``, or a data frame that exports Arrow data, such as one
            of Polars. With the columns ``id`` and ``weight`` only, a new row has zero
            optimizer state, and an existing row keeps its state. With all columns of
            :func:`table_rows`, whole rows are written, except that a ``last_step``
            above the steps of the table becomes the number of these steps. Rows that
            exceed ``max_rows`` are evicted as they arrive.

    Raises:
        ImportError: pyarrow is missing.
        TypeError, ValueError: ``rows`` is no Arrow data, a column is missing, unknown,
            of another type or has missing values, or the model has no table of this
            name, or the table is on servers. No row has changed.
        MemoryError, ColdStoreError: Memory is exhausted, or a cold store fails. Some
            rows may have been written; the call can be repeated.

    All of these errors are raised on every rank.
    """
    env = whole_environment()
    part: Part | None = None
    with refused_together(env):
        _pyarrow()
        table = table_of(model, name, "insert_rows")
        part = _from_arrow(rows, table)
    parts = all_gathered(part, env)
    with refused_together(env):
        for shard in table.shards:
            for part_of_rank in parts:
                assert part_of_rank is not None
                _write(shard, part_of_rank)


def _pyarrow() -> Any:
    """Imports pyarrow, which is optional."""
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is missing: {install('parquet')}") from error
    return pyarrow


def _union(ids_of_ranks: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the ids that a rank wants, each once. None: all rows."""
    tensors: list[Tensor] = []
    for ids in ids_of_ranks:
        if ids is None:
            return None
        tensors.append(ids)
    return torch.cat(tensors)


def _part_of(shard: LocalShard, wanted: Tensor | None) -> Part:
    """Returns the rows of a shard, those of the wanted ids if there are any."""
    table = shard.table
    if wanted is None:
        ids = table.ids()
    else:
        is_owned = shard.owned(wanted)
        ids = torch.unique(wanted[is_owned])
        has_row = table.contains(ids)
        ids = ids[has_row]

    parts = []
    for begin in range(0, max(1, len(ids)), PART_ROWS):
        end = begin + PART_ROWS
        parts.append(table.part(ids[begin:end]))
    return Part.concatenated(parts)


def _joined(parts: Sequence[Part], dim: int) -> Part:
    """Returns the whole rows of a table, in ascending order of their ids."""
    parts_of_columns: dict[range, list[Part]] = defaultdict(list)
    for part in parts:
        parts_of_columns[part.columns].append(part)
    column_shards = []
    for column_parts in parts_of_columns.values():
        column_shard = Part.concatenated(column_parts)
        column_shards.append(column_shard.sorted())
    return Part.joined(column_shards, range(dim))


def _as_arrow(part: Part, table: ModelRows) -> Any:
    """Returns whole rows as an Arrow table."""
    pyarrow = _pyarrow()
    columns = {"id": pyarrow.array(part.ids.numpy())}
    for name, values in part.rows.items():
        key = name
        if name == "weight":
            values = part.weights
        elif name == COUNTS_KEY:
            key = frequency_key(table.options)

        flat_values = values.contiguous().view(-1)
        numbers = pyarrow.array(flat_values.numpy())
        if values.dim() == 2:
            width = values.shape[1]
            numbers = pyarrow.FixedSizeListArray.from_arrays(numbers, width)
        columns[key] = numbers
    return pyarrow.table(columns)


def _from_arrow(rows: Any, table: ModelRows) -> Part:
    """Returns the rows of an Arrow table: ``weight`` alone, or whole rows."""
    pyarrow = _pyarrow()
    if not isinstance(rows, pyarrow.Table):
        if not hasattr(rows, "__arrow_c_stream__"):
            raise TypeError(
                "insert_rows: rows must be a pyarrow.Table or a data frame that exports"
                f" Arrow data, got {type(rows).__name__}"
            )
        rows = pyarrow.table(rows)

    states = state_names(table.optimizer)
    frequency = frequency_key(table.options)
    others = [*states, "last_step", frequency]
    _check_columns(rows.column_names, others, table.name)

    ids = _numbers(rows, "id", pyarrow.int64())
    tensors = {"weight": _lists(rows, "weight", table.dim)}
    if len(rows.column_names) > 2:
        for name, kind in states.items():
            if kind == "element":
                tensors[name] = _lists(rows, name, table.dim)
            else:
                tensors[name] = _numbers(rows, name, pyarrow.float32())
        tensors["last_step"] = _numbers(rows, "last_step", pyarrow.int64())
        tensors[COUNTS_KEY] = _numbers(rows, frequency, pyarrow.int64())
    return Part(ids, range(table.dim), tensors)


def _check_columns(
    names: Sequence[str],
    others: Sequence[str],
    table: str,
) -> None:
    """Checks that the columns are ``id`` and ``weight``, or those and all others."""
    expected = ["id", "weight", *others]
    listed = ", ".join(map(repr, expected))
    advice = f"pass the columns 'id' and 'weight', or all of {listed}"
    for name in names:
        if name not in expected:
            raise ValueError(
                f"insert_rows: table {table!r} has no column {name!r}: {advice}"
            )
    needed = ["id", "weight"] if len(names) <= 2 else expected
    for name in needed:
        count = names.count(name)
        if count != 1:
            raise ValueError(
                f"insert_rows: table {table!r} needs one column {name!r}, got {count}:"
                f" {advice}"
            )


def _cast(rows: Any, name: str, target: Any) -> Any:
    """Returns a column as one array of a data type.

    Raises ValueError if a value is missing, or does not fit the data type.
    """
    pyarrow = _pyarrow()
    column = rows.column(name)
    try:
        array = column.cast(target).combine_chunks()
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"insert_rows: the column {name!r} must be {target}, got {column.type}:"
            f" {error}"
        ) from error
    if isinstance(array, pyarrow.ChunkedArray):  # It has no rows.
        if array.chunks:
            array = pyarrow.concat_arrays(array.chunks)
        else:
            array = pyarrow.array([], target)

    missing = array.null_count
    if pyarrow.types.is_fixed_size_list(target):
        missing += array.flatten().null_count
    if missing:
        raise ValueError(
            f"insert_rows: the column {name!r} has {missing} missing value(s)"
        )
    return array


def _numbers(rows: Any, name: str, target: Any) -> Tensor:
    """Returns a column of numbers: (N,) of the data type."""
    pyarrow = _pyarrow()
    column_type = rows.column(name).type
    is_integer = pyarrow.types.is_integer(column_type)
    if pyarrow.types.is_integer(target) and not is_integer:
        raise ValueError(
            f"insert_rows: the column {name!r} must be {target}, got {column_type}"
        )
    array = _cast(rows, name, target)
    numbers = array.to_numpy(zero_copy_only=False)
    return torch.from_numpy(numbers.copy())


def _lists(rows: Any, name: str, dim: int) -> Tensor:
    """Returns a column of lists of ``dim`` numbers: (N, dim) float32."""
    pyarrow = _pyarrow()
    list_type = pyarrow.list_(pyarrow.float32(), dim)
    array = _cast(rows, name, list_type)
    flat = array.flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(flat.copy()).view(len(array), dim)


def _write(shard: LocalShard, part: Part) -> None:
    """Writes those of the rows that belong to a shard."""
    table: Table = shard.table
    owned = part.owned(shard.owned).cut(table.columns)
    if "last_step" not in owned.rows:
        weights = owned.rows["weight"]
        table.insert_all(owned.ids, weights.contiguous())
        return
    # A row of the future would be evicted last, and would not expire.
    last_step = owned.rows["last_step"].clamp(max=table.steps)
    rows = {**owned.rows, "last_step": last_step}
    table.write(replace(owned, rows=rows))
