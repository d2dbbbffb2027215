"""The tables of a model that are loaded, and their names in the checkpoint.

Tests: tests/checkpoint/test_warm_start.py, tests/checkpoint/test_apply_delta.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_recstore.checkpoint.info import CheckpointInfo
from torchrec_recstore.checkpoint.reader import check_fits
from torchrec_recstore.checkpoint.warm_start import RowsWithoutState, WarmStart, named
from torchrec_recstore.sharders.model_tables import (
    EagerModelTable,
    ModelTable,
    named_among,
)


@dataclass(frozen=True)
class Source:
    """A table of the model, and the name of the table that is loaded into it."""

    table: ModelTable | EagerModelTable
    name: str
    # The name by which the argument ``rows`` names the table, if it does.
    given_name: str | None

    def without_state(
        self,
        info: CheckpointInfo,
        warm: WarmStart,
    ) -> RowsWithoutState | None:
        """Returns how the rows are read if their optimizer states are not loaded."""
        if warm.optimizer and not self.table.options.frozen:
            return None
        function = None if self.given_name is None else warm.rows[self.given_name]
        saved_dim = info.tables[self.name].dim
        return RowsWithoutState(
            self.table.name,
            self.table.optimizer,
            saved_dim,
            self.table.dim,
            function,
        )


def find_sources(
    every_table: Sequence[ModelTable | EagerModelTable],
    warm: WarmStart,
    info: CheckpointInfo,
    *,
    strict: bool,
) -> list[Source]:
    """Returns the tables of a model that are loaded.

    Raises ValueError for names that are unknown or missing.
    """
    targets = named_among(every_table, warm.rename.values())
    functions = {
        table: name for name, table in named_among(every_table, warm.rows).items()
    }
    chosen = every_table
    if warm.tables is not None:
        chosen = list(named_among(every_table, warm.tables).values())
    for argument, of_argument in (("rename", targets.values()), ("rows", functions)):
        for table in of_argument:
            if table not in chosen:
                raise warm.not_chosen(argument, table.name)
    saved_names = warm.saved_names(
        [(table.name, table.full_name) for table in chosen],
        info.tables,
    )
    sources = []
    missing = []
    for table, saved_name in zip(chosen, saved_names, strict=True):
        if saved_name is not None:
            sources.append(Source(table, saved_name, functions.get(table)))
            continue
        must_be_loaded = warm.tables is not None or table in functions
        if table.name in warm.rename or table.full_name in warm.rename:
            if strict or must_be_loaded:
                raise warm.without_source(table.name)
            continue
        if must_be_loaded:
            raise ValueError(
                f"the checkpoint {info.path} has no table {table.name!r}; it has"
                f" {named(info.tables)}: rename={{'name in the checkpoint': 'name in"
                " the model'} loads a table of another name"
            )
        # A module without sharding may have made up the name of its table.
        missing.append(
            table.full_name if isinstance(table, EagerModelTable) else table.name
        )
    if strict and missing:
        raise ValueError(
            f"the checkpoint {info.path} has no table {min(missing)!r}: strict=False"
            " leaves the model's as it is"
        )
    if strict and warm.tables is None:
        _refuse_unloaded(sources, info)
    return sources


def _refuse_unloaded(sources: Sequence[Source], info: CheckpointInfo) -> None:
    """Raises ValueError if the checkpoint has a table that the model lacks."""
    loaded_names = {source.name for source in sources}
    unloaded_names = info.tables.keys() - loaded_names
    if unloaded_names:
        raise ValueError(
            f"the model has no RecStore table {min(unloaded_names)!r}, which the"
            f" checkpoint {info.path} has: strict=False ignores the checkpoint's table"
        )


def check_sources(
    chain: Sequence[CheckpointInfo],
    sources: Sequence[Source],
    warm: WarmStart,
    *,
    hints: bool = True,
) -> None:
    """Refuses tables with another dim or other optimizer states in a checkpoint.

    See ``check_fits``.
    """
    newest = chain[-1]
    for info in chain:
        for source in sources:
            if source.name not in info.tables:
                continue
            table = source.table
            dim = (
                table.dim
                if source.given_name is None
                else newest.tables[source.name].dim
            )
            takes_states = warm.optimizer and not table.options.frozen
            optimizer = table.optimizer if takes_states else None
            check_fits(
                source.name,
                info.tables[source.name],
                info.path,
                dim,
                optimizer,
                "the model",
                hints=hints,
            )
