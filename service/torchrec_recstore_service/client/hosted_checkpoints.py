"""Saves and loads the tables of one process, in the format of ``save_checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.fold import check_rows
from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo
from torchrec_recstore.checkpoint.reader import check_fits, held_rows, load_rows
from torchrec_recstore.checkpoint.writer import PartWriter, SavedShard, finish, write_shard
from torchrec_recstore.encoding import encode
from torchrec_recstore.row_types import ROW_DTYPES
from torchrec_recstore.store import Table
from torchrec_recstore.store.parts import Owned
from torchrec_recstore_service.wire.table_spec import TableSpec

_SPECS = "served_tables"  # key in the training state: the JSON of each table's specification, by table name


def write_tables(
    shards: Sequence[SavedShard],
    specs: Mapping[str, TableSpec],
    destination: Destination,
    more: Mapping[str, Any] | None = None,
) -> CheckpointInfo:
    """Writes a checkpoint from snapshots of tables, with low priority, while the tables stay in use.

    Args:
        shards: The snapshots, one shard for each table.
        specs: The specification of each table, by table name.
        destination: The destination of the checkpoint.
        more: Further values of the training state. Default: None.

    Raises:
        OSError: A file cannot be written. Nothing new is left at the path of ``destination``.
    """
    tables: dict[str, TableInfo] = {}
    writer = PartWriter(destination.stage(), 0, polite=True)
    try:
        for shard in shards:
            tables[shard.name] = write_shard(writer, shard)
    finally:
        files = writer.close()
    step = max((table.steps for table in tables.values()), default=0)
    info = CheckpointInfo(path=destination.path, step=step, world_size=1, tables=tables, files=files, dense=())
    state = {_SPECS: {name: spec.to_json() for name, spec in specs.items()}, **(more or {})}
    return finish(destination, info, encode(state, {}))


def saved_specs(info: CheckpointInfo) -> dict[str, TableSpec]:
    """Returns the specification of each table of a checkpoint, by table name.

    For a checkpoint of a model, the specifications are derived from the model's tables.

    Raises:
        CheckpointError: The specifications are damaged, or do not match the rows of the checkpoint.
    """
    state = info.training_state
    written = state.get(_SPECS) if isinstance(state, dict) else None
    if not isinstance(written, dict):
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in ROW_DTYPES}
        return {
            name: TableSpec(saved.dim, dtypes[saved.dtype], saved.optimizer, saved.options)
            for name, saved in info.tables.items()
        }
    if written.keys() != info.tables.keys():
        lacking = ", ".join(map(repr, sorted(written.keys() ^ info.tables.keys())))
        raise CheckpointError(
            f"{info.path} has only the rows or only the specification of {lacking}: the checkpoint is incomplete"
        )
    try:
        specs = {name: TableSpec.from_json(text) for name, text in written.items()}
        for name, spec in specs.items():
            check_fits(name, info.tables[name], info.path, spec.dim, spec.optimizer, "its specification")
    except ValueError as error:
        raise CheckpointError(f"{info.path}: the specifications of its tables are invalid: {error}") from error
    return specs


def check_loadable(info: CheckpointInfo, saved: Mapping[str, TableSpec], present: Mapping[str, TableSpec]) -> None:
    """Checks that the tables of a process can be replaced by those of a checkpoint.

    Args:
        info: The metadata of the checkpoint.
        saved: The specifications of the tables in the checkpoint, by table name.
        present: The specifications of the tables in the process, by table name.

    Raises:
        ValueError: A table of the process that is not temporary is not in the checkpoint, or has another specification
            there; or a temporary table is in the checkpoint.
    """
    for name, spec in sorted(present.items()):
        if spec.temporary:
            if name in saved:
                raise ValueError(
                    f"table {name!r} is a temporary table in this process, but the checkpoint {info.path} contains it"
                )
            continue
        if name not in saved:
            raise ValueError(f"the checkpoint {info.path} has no table {name!r}, but this process has it")
        check_fits(name, info.tables[name], info.path, spec.dim, spec.optimizer, "this process")
        if saved[name].initial_rows != spec.initial_rows:
            raise ValueError(f"table {name!r} was made with another init_func in the checkpoint {info.path}")
        if saved[name].shard != spec.shard:
            (part, parts), (own, own_parts) = saved[name].shard, spec.shard
            raise ValueError(
                f"the checkpoint {info.path} has part {part + 1} of {parts} of table {name!r}, "
                f"but this process has part {own + 1} of {own_parts}"
            )


def loaded_tables(
    chain: Sequence[CheckpointInfo], empty: Mapping[str, Callable[[], Table]], owned: Owned | None = None
) -> dict[str, Table]:
    """Creates tables with the rows of a checkpoint and returns them by name.

    Args:
        chain: The checkpoint and its bases. See :func:`torchrec_recstore.checkpoint.info.read_chain`.
        empty: For each table name, a function that creates the empty table.
        owned: A function that selects the ids that belong to the tables. Default: None, all ids do.

    Raises:
        CheckpointError, MemoryError, ColdStoreError: See :func:`torchrec_recstore.checkpoint.reader.load_rows`.
    """
    tables: dict[str, Table] = {}
    try:
        for name, make in empty.items():
            tables[name] = make()
            load_rows(tables[name], name, chain, owned)
            if owned is None:
                check_rows(chain, name, held_rows(tables[name]))
    except BaseException:
        for table in tables.values():
            table.close()
        raise
    return tables
