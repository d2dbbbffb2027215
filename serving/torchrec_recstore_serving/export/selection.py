"""Selects and reads the rows of a table that are exported.

Tests: tests/serving/export/test_delta.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.options import (
    LFU,
    ConstantInit,
    Initializer,
    Scored,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.store import Table
from torchrec_recstore.utils import warn_user
from torchrec_recstore_serving.export.model_table import ModelTable
from torchrec_recstore_serving.export.row_formats import packed

_PIECE_ROWS = 1 << 16  # The number of rows that are read and packed at a time.
# The key of a table's rows in the state_dict of a collection; its group is the name.
_WEIGHT_OF_COLLECTION = re.compile(r"\bcollection\.embedding(?:_bag)?s\.(.+)\.weight$")


def aged(
    frequency: Tensor,
    last_step: Tensor,
    steps: int,
    options: TableOptions,
) -> Tensor:
    """Returns the rows' frequencies at the present step.

    They are halved for each half-life since their last step.

    The function ``aged_frequency`` in csrc/row_loops/row_loops.h computes the same for
    eviction.

    Args:
        frequency: (N,) int64. The frequencies at the rows' last steps.
        last_step: (N,) int64. The steps at which the rows were last looked up.
        steps: The number of training steps of the table.
        options: The table's options.
    """
    if not isinstance(options.eviction, LFU):
        return frequency
    half_life = options.eviction.half_life_steps
    if half_life is None:
        return frequency
    halvings = (steps // half_life - last_step // half_life).clamp(0, 63)
    return frequency >> halvings


@dataclass(frozen=True)
class Selection:
    """Which rows of the RecStore tables are exported.

    Args:
        min_frequency: The minimum frequency of an exported row. Default: 0.
        top_rows: The maximum number of exported rows of each table. The rows of the
            highest frequency are selected, and among equal frequencies the smallest
            ids. Default: None, no limit.

    Raises:
        TypeError, ValueError: A value is invalid. The message names the argument.
    """

    min_frequency: int = 0
    top_rows: int | None = None

    def __post_init__(self) -> None:
        _check_at_least("min_frequency", self.min_frequency, 0)
        if self.top_rows is not None:
            _check_at_least("top_rows", self.top_rows, 1)

    @property
    def is_everything(self) -> bool:
        """Whether all rows are exported, so that no frequencies are needed."""
        return not self.min_frequency and self.top_rows is None

    def check_counted(self, name: str, rows: int, steps: int) -> None:
        """Refuses a selection by frequency if no training step has counted frequencies.

        Args:
            name: The table's name.
            rows: The number of rows of the table.
            steps: The number of training lookups of the table.

        Raises:
            ValueError: The rows were only loaded, inserted, or updated by id.
        """
        if rows and not steps and not self.is_everything:
            raise ValueError(
                f"table {name!r} has rows that no training step has looked up, so that"
                " their frequencies are not known: leave out min_frequency and top_rows"
            )

    def check_counts(self, name: str, options: TableOptions) -> None:
        """Refuses a selection by frequency of a table that has scores instead.

        Raises:
            ValueError: ``options.eviction`` is ``Scored()``. The message has the
                table's ``name``.
        """
        if isinstance(options.eviction, Scored) and not self.is_everything:
            raise ValueError(
                f"table {name!r} evicts by scores (eviction={options.eviction!r}), so"
                " that the frequencies of its rows are not counted: leave out"
                " min_frequency and top_rows"
            )

    def positions(self, frequency: Tensor) -> Tensor:
        """Selects the rows that are exported.

        Args:
            frequency: (R,) int64. The frequencies of the rows in ascending order of
                their ids.

        Returns:
            (N,) int64. The positions of the selected rows, in ascending order.
        """
        positions = (frequency >= self.min_frequency).nonzero().squeeze(1)
        if self.top_rows is None or len(positions) <= self.top_rows:
            return positions
        order = frequency[positions].argsort(descending=True, stable=True)
        return positions[order[: self.top_rows]].sort().values


def _check_at_least(argument: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{argument} must be at least {least}, got {value}")


def missing_row(
    initializer: Initializer,
    options: TableOptions,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, bool]:
    """Returns the row that ids without a row read in the exported table.

    Args:
        initializer: The table's initializer.
        options: The table's options.
        dim: The number of columns.
        dtype: The data type of the table's rows.

    Returns:
        (dim,) float32; and whether the model reads the same row in evaluation mode.
        With ``missing="init"`` it does so only if all initial rows are equal.
    """
    if options.missing == "zeros":
        return torch.zeros(dim), True
    value = _only_value(initializer)
    if value is None:
        return torch.zeros(dim), False
    row = torch.full((dim,), value)
    return row.to(value_dtype(dtype)).float(), True


def warn_of_initial_rows(names: Sequence[str]) -> None:
    """Warns once about tables whose ids without a row read as initial rows.

    Args:
        names: The names of the tables. Without names there is no warning.
    """
    if names:
        warn_user(
            f"table(s) {', '.join(map(repr, names))} have missing='init': an id without"
            " a row reads as its initial row in the model, and as zeros in the"
            " exported model"
        )


def is_untrained(rows: int, steps: int, updates: int) -> bool:
    """Returns whether training has made none of a table's rows.

    Rows that were inserted or loaded, and not looked up in training mode, count as
    trained.

    Args:
        rows: The number of rows of the table.
        steps: The number of training lookups of the table.
        updates: The number of updates of the table.
    """
    return rows == 0 or (steps > 0 and updates == 0)


def warn_if_untrained(untrained: Mapping[str, bool]) -> None:
    """Warns if no RecStore table of a model was trained.

    Args:
        untrained: Whether each RecStore table is untrained, by its name. Without
            tables there is no warning.
    """
    if untrained and all(untrained.values()):
        warn_user(
            "the exported model was never trained: no update has changed a row of"
            f" table(s) {', '.join(map(repr, sorted(untrained)))}. Train the model or"
            " load a checkpoint before the export"
        )


def warn_unless_finite(
    model: nn.Module,
    changed: Mapping[str, Tensor] | None = None,
) -> None:
    """Warns once about all tables and dense tensors that have NaN or infinity.

    The rows of other formats than float32 are not searched:
    :func:`torchrec_recstore_serving.export.row_formats.packed` refuses them.

    Args:
        model: The static model.
        changed: (N, dim) float32. By table, the rows that have changed, if ``model``
            has no rows. Default: None.
    """
    names: list[str] = []
    for table_name, rows in (changed or {}).items():
        if not _is_finite(rows):
            names.append(f"table {table_name!r}")
    table_names = {
        f"{path}.rows": module.name
        for path, module in model.named_modules()
        if isinstance(module, ModelTable)
    }
    for key, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or _is_finite(tensor):
            continue
        weight = _WEIGHT_OF_COLLECTION.search(key)
        if weight is not None:
            names.append(f"table {weight[1]!r}")
        elif key in table_names:
            names.append(f"table {table_names[key]!r}")
        else:
            names.append(key)
    if names:
        warn_user(
            f"the exported model has NaN or infinity in {', '.join(names)}, and so have"
            " its predictions: go back to a checkpoint without them, and lower the"
            " learning rate or clip the gradients"
        )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # torch.isfinite does not know float8
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    # without a mask of this size
    extremes = torch.stack(tensor.detach().aminmax())
    return bool(torch.isfinite(extremes).all())


def _only_value(initializer: Initializer) -> float | None:
    """Returns the value of all initial weights. None: they differ."""
    if isinstance(initializer, ConstantInit):
        return initializer.value
    if isinstance(initializer, UniformInit):
        return initializer.low if initializer.low == initializer.high else None
    return initializer.mean if initializer.std == 0 else None


@dataclass(frozen=True)
class _GatheredRows:
    """The rows of one shard or of all shards of a table.

    Args:
        ids: (R,) int64. The ids in ascending order.
        rows: (R + 1, ...). The rows in the row format. The first row is the row for ids
            without a row.
        frequency: (R,) int64. The frequencies of the rows; see :func:`aged`.
        steps: The number of training steps of the table.
        updates: The number of updates of the table.
        columns: The columns of the table that the rows have.
    """

    ids: Tensor
    rows: Tensor
    frequency: Tensor
    steps: int
    updates: int
    columns: slice


def whole_table(
    name: str,
    shards: Iterable[Table],
    missing: Tensor,
    env: ShardingEnv | None,
    row_format: str = "float32",
    marks: dict[Table, int] | None = None,
) -> _GatheredRows:
    """Reads all rows of a table, also those in its cold store.

    The table does not change.

    The call is collective if the table is sharded. Rows are packed while they are read,
    so that a table with one shard only needs memory for the result.

    Args:
        name: The table's name.
        shards: The shards of this rank.
        missing: (dim,) float32. The row for ids without a row, with all columns of the
            table.
        env: The environment of the ranks that hold the other shards. None if this
            process holds all shards.
        row_format: A name in :data:`torchrec_recstore_serving.export.row_formats.FORMATS`. It
            must be float32 if the table is sharded by column.
        marks: The change mark of each shard of this rank is added to it. Default: None.
    """
    marks = {} if marks is None else marks
    parts: list[_GatheredRows] = []
    with nullcontext() if env is None else refused_together(env):
        for shard in shards:
            parts.append(_part(shard, missing, row_format, marks))
    if env is not None:
        parts_of_ranks = all_gathered(parts, env)
        parts = [part for parts_of_rank in parts_of_ranks for part in parts_of_rank]
        del parts_of_ranks
    if len(parts) == 1:
        return parts[0]
    ids = torch.cat([part.ids for part in parts]).unique()  # type: ignore[no-untyped-call]
    steps = max(part.steps for part in parts)
    updates = max(part.updates for part in parts)
    first = packed(name, missing[None], row_format)
    rows = first.new_empty(len(ids) + 1, first.shape[1])
    rows[:1] = first
    frequency = torch.zeros(len(ids), dtype=torch.int64)
    while parts:  # Each part is released after it has been copied.
        part = parts.pop()
        positions = torch.searchsorted(ids, part.ids)
        columns = part.columns if row_format == "float32" else slice(None)
        rows[1:][positions, columns] = part.rows[1:]
        # All column shards have the same frequencies.
        frequency[positions] = part.frequency
        del part
    return _GatheredRows(
        ids=ids,
        rows=rows,
        frequency=frequency,
        steps=steps,
        updates=updates,
        columns=slice(0, len(missing)),
    )


def _part(
    shard: Table,
    missing: Tensor,
    row_format: str,
    marks: dict[Table, int],
) -> _GatheredRows:
    """Reads the rows of one shard."""
    columns = slice(shard.columns.start, shard.columns.stop)
    first = packed(shard.name, missing[None, columns], row_format)
    with shard.snapshot() as snapshot:
        marks[shard] = snapshot.mark
        count = len(snapshot)
        ids = torch.empty(count, dtype=torch.int64)
        frequency = torch.empty(count, dtype=torch.int64)
        rows = first.new_empty(count + 1, first.shape[1])
        rows[:1] = first
        for begin in range(0, count, _PIECE_ROWS):
            read = snapshot.read(min(_PIECE_ROWS, count - begin))
            end = begin + len(read)
            ids[begin:end] = read.ids
            rows[1:][begin:end] = packed(shard.name, read.weights, row_format)
            frequency[begin:end] = aged(
                frequency=read.rows["frequency"],
                last_step=read.rows["last_step"],
                steps=snapshot.steps,
                options=shard.options,
            )
        return _GatheredRows(
            ids=ids,
            rows=rows,
            frequency=frequency,
            steps=snapshot.steps,
            updates=snapshot.optimizer_steps,
            columns=columns,
        )
