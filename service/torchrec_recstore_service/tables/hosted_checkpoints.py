"""Saves and loads the tables of one process, in the format of ``save_checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.fold import check_rows
from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo
from torchrec_recstore.checkpoint.reader import check_fits, held_rows, load_rows
from torchrec_recstore.checkpoint.warm_start import (
    RowFunction,
    RowsWithoutState,
    WarmStart,
    named,
)
from torchrec_recstore.checkpoint.writer import (
    PartWriter,
    SavedShard,
    finish,
    write_shard,
)
from torchrec_recstore.encoding import encode
from torchrec_recstore.options import not_on_servers
from torchrec_recstore.row_types import ROW_DTYPES
from torchrec_recstore.store import Table
from torchrec_recstore.store.parts import Owned
from torchrec_recstore_service.wire.table_spec import TableSpec

# key in the training state: the JSON of each table's specification, by table name
_SPECS = "served_tables"


def write_tables(
    shards: Sequence[SavedShard],
    specs: Mapping[str, TableSpec],
    destination: Destination,
    training_state: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Writes a checkpoint from snapshots of tables, with low priority, while the tables
    stay in use.

    Args:
        shards: The snapshots, one shard for each table.
        specs: The specification of each table, by table name.
        destination: The destination of the checkpoint.
        training_state: Further values of the training state. Default: None.

    Returns:
        The number of saved rows that are not finite, for each table with such rows.

    Raises:
        OSError: A file cannot be written. Nothing new is left at the path of
            ``destination``.
    """
    tables: dict[str, TableInfo] = {}
    writer = PartWriter(destination.stage(), 0, polite=True)
    try:
        for shard in shards:
            tables[shard.name] = write_shard(writer, shard)
    finally:
        files = writer.close()
    step = max((table.steps for table in tables.values()), default=0)
    info = CheckpointInfo(
        path=destination.path,
        step=step,
        world_size=1,
        tables=tables,
        files=files,
        dense=(),
    )
    state: dict[str, Any] = {
        _SPECS: {name: spec.to_json() for name, spec in specs.items()}
    }
    state.update(training_state or {})
    finish(destination, info, encode(state, {}))
    return {name: count for (name, _), count in writer.nonfinite.items()}


def saved_specs(
    info: CheckpointInfo,
    names: Iterable[str] | None = None,
) -> dict[str, TableSpec]:
    """Returns the specifications of tables of a checkpoint, by table name.

    For a checkpoint of a model, the specifications are derived from the model's tables.

    Args:
        info: The metadata of the checkpoint.
        names: The names of the tables, all of which the checkpoint has. Other tables
            may have options that servers do not have. Default: None, all tables.

    Raises:
        CheckpointError: The specifications are damaged, or do not match the rows of the
            checkpoint.
        ValueError: The checkpoint is of a model, and a table has an option that servers
            do not have.
    """
    chosen = list(info.tables if names is None else names)
    state = info.training_state
    documents = state.get(_SPECS) if isinstance(state, dict) else None
    if not isinstance(documents, dict):
        return {name: _spec_of_model(info, name) for name in chosen}
    if documents.keys() != info.tables.keys():
        lacking = ", ".join(map(repr, sorted(documents.keys() ^ info.tables.keys())))
        raise CheckpointError(
            f"{info.path} has only the rows or only the specification of {lacking}: the"
            " checkpoint is incomplete"
        )
    try:
        specs = {name: TableSpec.from_json(documents[name]) for name in chosen}
        for name, spec in specs.items():
            check_fits(
                name,
                saved=info.tables[name],
                path=info.path,
                dim=spec.dim,
                optimizer=spec.optimizer,
                owner="its specification",
                hints=False,
            )
    except ValueError as error:
        raise CheckpointError(
            f"{info.path}: the specifications of its tables are invalid: {error}"
        ) from error
    return specs


def _spec_of_model(info: CheckpointInfo, name: str) -> TableSpec:
    """Returns the specification of a table of a model's checkpoint.

    Servers keep no record of the ids that leave.
    """
    saved = info.tables[name]
    options = replace(saved.options, left_ids=None)
    reason = not_on_servers(options)
    if reason is not None:
        raise ValueError(
            f"table {name!r} of {info.path}: {reason}. Load the checkpoint into a model"
            " whose table has this policy, and save it again"
        )
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in ROW_DTYPES}
    return TableSpec(
        dim=saved.dim,
        dtype=dtypes[saved.dtype],
        optimizer=saved.optimizer,
        options=options,
    )


@dataclass(frozen=True)
class LoadedSource:
    """A table of a checkpoint that is loaded into a process, by its name there."""

    saved_name: str
    spec: TableSpec
    """The specification of the table in the checkpoint."""
    function: RowFunction | None


def sources(
    info: CheckpointInfo,
    warm: WarmStart,
    present: Iterable[str],
) -> dict[str, LoadedSource]:
    """Returns the tables that are loaded, by their names in the process.

    Args:
        info: The metadata of the checkpoint.
        warm: What the load takes over.
        present: The names of the tables in the process.

    Raises:
        CheckpointError: The specifications are damaged, or do not match the rows of the
            checkpoint.
        ValueError: A name in ``tables``, ``rename`` or ``rows`` is unknown.
    """
    names = sorted({*present, *warm.rename.values(), *info.tables})
    saved_names = warm.saved_names([(name,) for name in names], info.tables)
    chosen = {
        name: saved_name
        for name, saved_name in zip(names, saved_names, strict=True)
        if saved_name is not None
    }

    def check_in_checkpoint(argument: str, name: str) -> None:
        if name in chosen:
            return
        if name in warm.rename:
            raise warm.without_source(name)
        raise ValueError(
            f"{argument}: the checkpoint {info.path} has no table {name!r}; it has"
            f" {named(chosen)}: rename={{'name in the checkpoint': 'name here'}} loads"
            " a table of another name"
        )

    for name in warm.tables or ():
        check_in_checkpoint("tables", name)
    for name in warm.rows:
        check_in_checkpoint("rows", name)
    if warm.tables is not None:
        for name in warm.rename.values():
            if name not in warm.tables:
                raise warm.not_chosen("rename", name)
        for name in warm.rows:
            if name not in warm.tables:
                raise warm.not_chosen("rows", name)
        chosen = {name: chosen[name] for name in warm.tables}
    specs = saved_specs(info, chosen.values())
    return {
        name: LoadedSource(saved_name, specs[saved_name], warm.rows.get(name))
        for name, saved_name in chosen.items()
    }


def check_loadable(
    info: CheckpointInfo,
    loaded: Mapping[str, LoadedSource],
    present: Mapping[str, TableSpec],
    warm: WarmStart = WarmStart(),  # noqa: B008  (frozen)
) -> None:
    """Checks that the tables of a process can be replaced by those of a checkpoint.

    Args:
        info: The metadata of the checkpoint.
        loaded: The result of :func:`sources`.
        present: The specifications of the tables in the process, by table name.
        warm: What the load takes over. Tables that it does not choose are not checked.

    Raises:
        ValueError: A table of the process that is not temporary is not in the
            checkpoint, or has another specification there; or a temporary table is in
            the checkpoint.
    """
    for name, source in loaded.items():
        if name not in present and source.function is not None:
            raise ValueError(
                f"rows: there is no table {name!r} in this process: make it with its"
                " dim before the load"
            )
    for name, spec in sorted(present.items()):
        if warm.tables is not None and name not in warm.tables:
            continue
        if spec.temporary:
            if name in loaded:
                raise ValueError(
                    f"table {name!r} is a temporary table in this process, but the"
                    f" checkpoint {info.path} contains it"
                )
            continue
        if name not in loaded:
            if name in warm.rename:
                raise warm.without_source(name)
            raise ValueError(
                f"the checkpoint {info.path} has no table {name!r}, but this process"
                " has it"
            )
        _check_same_table(name, info, loaded[name], spec, warm)


def _check_same_table(
    name: str,
    info: CheckpointInfo,
    source: LoadedSource,
    spec: TableSpec,
    warm: WarmStart,
) -> None:
    """Raises ValueError if a table of the process is not that of a checkpoint."""
    check_fits(
        name,
        saved=info.tables[source.saved_name],
        path=info.path,
        dim=spec.dim if source.function is None else source.spec.dim,
        optimizer=spec.optimizer if warm.optimizer else None,
        owner="this process",
    )
    if source.spec.initial_rows != spec.initial_rows:
        raise ValueError(
            f"table {name!r} was made with another init_func in the checkpoint"
            f" {info.path}"
        )
    if source.spec.shard != spec.shard:
        saved_part, saved_parts = source.spec.shard
        part, parts = spec.shard
        raise ValueError(
            f"the checkpoint {info.path} has part {saved_part + 1} of {saved_parts}"
            f" of table {name!r}, but this process has part {part + 1} of {parts}"
        )


def loaded_tables(
    chain: Sequence[CheckpointInfo],
    empty: Mapping[str, Callable[[], Table]],
    owned: Owned | None = None,
    loaded: Mapping[str, LoadedSource] | None = None,
    warm: WarmStart = WarmStart(),  # noqa: B008  (frozen)
) -> dict[str, Table]:
    """Creates tables with the rows of a checkpoint and returns them by name.

    Args:
        chain: The checkpoint and its bases. See
            :func:`torchrec_recstore.checkpoint.info.read_chain`.
        empty: For each table name, a function that creates the empty table.
        owned: A function that selects the ids that belong to the tables. Default: None,
            all ids do.
        loaded: The result of :func:`sources`. Default: None, the tables have the names
            that they have in the checkpoint.
        warm: What the load takes over. Default: everything.

    Raises:
        CheckpointError, MemoryError, ColdStoreError: See
            :func:`torchrec_recstore.checkpoint.reader.load_rows`.
    """
    tables: dict[str, Table] = {}
    try:
        for name, make in empty.items():
            table = make()
            tables[name] = table
            saved_name = name if loaded is None else loaded[name].saved_name
            without_state = None
            if not warm.optimizer:
                function = None if loaded is None else loaded[name].function
                saved_dim = chain[-1].tables[saved_name].dim
                without_state = RowsWithoutState(
                    name=name,
                    optimizer=table.optimizer,
                    saved_dim=saved_dim,
                    dim=table.dim,
                    function=function,
                )
            expected_rows = chain[-1].tables[saved_name].rows if owned is None else 0
            load_rows(
                table,
                saved_name,
                chain,
                owned,
                without_state=without_state,
                expected_rows=expected_rows,
            )
            if owned is None:
                check_rows(chain, saved_name, held_rows(table))
    except BaseException:
        for table in tables.values():
            table.close()
        raise
    return tables
