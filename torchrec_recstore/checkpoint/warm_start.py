"""What a load takes over: a choice of tables, other names, rows without states.

Tests: tests/checkpoint/test_warm_start.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.store import Part, TableState
from torchrec_recstore.store.parts import STAMPS, zero_states

RowFunction = Callable[[Tensor], Tensor]
"""A function of weights, (n, dim of the checkpoint) float32, that returns (n, dim of
the model) float32.
"""

_BATCH_ROWS = 1 << 16  # The largest number of rows in one call of a user's function.


@dataclass(frozen=True)
class WarmStart:
    """The arguments of a load that say what it takes over.

    See :func:`torchrec_recstore.load_checkpoint`.

    Args:
        optimizer: Whether the optimizer states and the number of updates are loaded.
        tables: The names of the tables that are loaded. None: all tables.
        rename: The names in the model, by the names in the checkpoint.
        rows: The functions that make the rows of a table, by the name of the table in
            the model.
    """

    optimizer: bool = True
    tables: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, RowFunction] = field(default_factory=dict)

    @staticmethod
    def checked(
        optimizer: bool,
        tables: Iterable[str] | None,
        rename: Mapping[str, str] | None,
        rows: Mapping[str, RowFunction] | None,
    ) -> WarmStart:
        """Checks the arguments of a load.

        Raises TypeError or ValueError, which names the argument.
        """
        if not isinstance(optimizer, bool):
            raise TypeError(f"optimizer must be a bool, got {type(optimizer).__name__}")
        names = None if tables is None else _checked_names(tables)
        _check_mapping("rename", rename)
        _check_mapping("rows", rows)
        renamed = dict(rename or {})
        functions = dict(rows or {})
        for target in renamed.values():
            if not isinstance(target, str):
                raise TypeError(
                    f"rename must map names to names, got the value {target!r}"
                )
        source_of: dict[str, str] = {}
        for source, target in renamed.items():
            if target in source_of:
                raise ValueError(
                    f"rename: {source_of[target]!r} and {source!r} of the checkpoint"
                    f" cannot both be loaded into {target!r}"
                )
            source_of[target] = source
        for name, function in functions.items():
            if not callable(function):
                raise TypeError(
                    f"rows[{name!r}] must be a function, got {type(function).__name__}"
                )
        if functions and optimizer:
            raise ValueError(
                "rows: the optimizer states in the checkpoint do not fit the rows that"
                f" a function makes for table {next(iter(functions))!r}: set"
                " optimizer=False (with tables=[...] for these tables alone)"
            )
        return WarmStart(optimizer, names, renamed, functions)

    def not_chosen(self, argument: str, name: str) -> ValueError:
        """Returns the error for a table of an argument that ``tables`` does not have.

        The argument is ``rename`` or ``rows``.
        """
        return ValueError(
            f"{argument} has table {name!r}, which is not in"
            f" tables={list(self.tables or ())}"
        )

    def without_source(self, name: str) -> ValueError:
        """Returns the error for a table that lost its source by a renaming.

        The table of its name in the checkpoint is loaded into another table.
        """
        return ValueError(
            f"rename: the checkpoint's table {name!r} is renamed, so that nothing is"
            f" loaded into the table {name!r} here: rename another table to it, or"
            " leave it out with tables=[...]"
        )

    def saved_names(
        self,
        names: Sequence[tuple[str, ...]],
        saved: Iterable[str],
    ) -> list[str | None]:
        """Returns the name in the checkpoint of each table of the model.

        A name is None if the checkpoint does not have the table.

        Args:
            names: For each table its names. The first one that the checkpoint has is
                used.
            saved: The names of the tables in the checkpoint.

        Raises:
            ValueError: The checkpoint does not have a table that is renamed. The
                message names the known ones.
        """
        saved_names = set(saved)
        for source in self.rename:
            if source not in saved_names:
                raise ValueError(
                    f"rename: the checkpoint has no table {source!r}; it has"
                    f" {named(saved_names)}. The keys of rename are names in the"
                    " checkpoint, and the values are names in the model"
                )
        by_target = {target: source for source, target in self.rename.items()}
        same_names = saved_names - self.rename.keys()
        sources: list[str | None] = []
        for table_names in names:
            candidates = [by_target[name] for name in table_names if name in by_target]
            candidates += [name for name in table_names if name in same_names]
            sources.append(candidates[0] if candidates else None)
        return sources


@dataclass(frozen=True)
class RowsWithoutState:
    """The rows of a saved table without their optimizer states.

    The states start as those of new rows.

    Args:
        name: The name of the table in the model.
        optimizer: The optimizer of the table in the model.
        saved_dim: The number of columns in the checkpoint.
        dim: The number of columns in the model.
        function: The function that makes the rows. None: the rows are those of the
            checkpoint.
    """

    name: str
    optimizer: Optimizer
    saved_dim: int
    dim: int
    function: RowFunction | None = None

    def source_columns(self, columns: range) -> range:
        """Returns the saved columns that a shard with these columns is made of."""
        if self.function is None:
            return columns
        return range(self.saved_dim)

    def part(self, saved: Part, columns: range) -> Part:
        """Returns the rows of a shard, made of saved rows and their stamps.

        The saved rows have the columns of :meth:`source_columns`.
        """
        weight = saved.rows["weight"]
        if self.function is not None:
            converted = self._converted(self.function, saved.weights)
            cut = slice(columns.start, columns.stop)
            weight = converted[:, cut]
        rows = zero_states(self.optimizer, len(saved), len(columns))
        rows["weight"] = weight
        for name in STAMPS:
            rows[name] = saved.rows[name]
        return Part(saved.ids, columns, rows)

    def state(self, saved: TableState) -> TableState:
        """Returns the saved clocks and sightings, and no updates."""
        return replace(saved, optimizer_steps=0)

    def _converted(self, function: RowFunction, weights: Tensor) -> Tensor:
        """Calls the function in batches, and returns (N, dim) float32."""
        results = [torch.empty(0, self.dim)]
        batches = torch.split(weights, _BATCH_ROWS) if len(weights) else ()
        for batch in batches:
            with torch.no_grad():
                # A copy, because the weights can be a mapped file, and the function can
                # write to its argument.
                result = function(batch.to(torch.float32, copy=True))
            self._check(result, len(batch))
            results.append(result)
        return torch.cat(results)

    def _check(self, result: object, rows: int) -> None:
        expected = (
            f"rows[{self.name!r}] must return a float32 tensor of shape ({rows},"
            f" {self.dim}) on the CPU"
        )
        if not isinstance(result, Tensor):
            raise TypeError(f"{expected}, got {type(result).__name__}")
        if tuple(result.shape) != (rows, self.dim):
            raise ValueError(f"{expected}, got the shape {tuple(result.shape)}")
        if result.dtype is not torch.float32 or result.device.type != "cpu":
            raise ValueError(f"{expected}, got {result.dtype} on {result.device}")
        if not bool(result.isfinite().all()):
            raise ValueError(
                f"rows[{self.name!r}] has returned weights that are NaN or infinite"
            )


def named(names: Iterable[str]) -> str:
    """Returns the names for an error message."""
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def _checked_names(tables: Iterable[str]) -> tuple[str, ...]:
    if isinstance(tables, str) or not isinstance(tables, Iterable):
        raise TypeError(f"tables must be a list of names, got {type(tables).__name__}")
    names = tuple(tables)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"tables must be a list of names, got {name!r} in it")
        if names.count(name) > 1:
            raise ValueError(f"tables: {name!r} is named twice")
    return names


def _check_mapping(argument: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{argument} must be a dict by the names of tables, got"
            f" {type(value).__name__}"
        )
    for name in value:
        if not isinstance(name, str):
            raise TypeError(
                f"{argument} must be a dict by the names of tables, got the key"
                f" {name!r}"
            )
