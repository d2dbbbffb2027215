"""Tables of one process as a checkpoint, in the format of ``save_checkpoint`` (docs/checkpoint.md), and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.encoding import encode
from torchrec_recstore.checkpoint.files import CheckpointError
from torchrec_recstore.checkpoint.info import CheckpointInfo, TableInfo
from torchrec_recstore.checkpoint.parts import PartWriter
from torchrec_recstore.checkpoint.rows import check_fits, check_rows, held_rows, load_rows
from torchrec_recstore.checkpoint.writing import SavedShard, finish, write_shard
from torchrec_recstore.ops import ROW_DTYPES
from torchrec_recstore.service.spec import TableSpec
from torchrec_recstore.store import Table

_SPECS = "served_tables"  # in the training state: by name the JSON of each specification


def write_tables(
    shards: Sequence[SavedShard], specs: Mapping[str, TableSpec], destination: Destination
) -> CheckpointInfo:
    """Writes tables as they were at one moment; beside those who use them, with low priority.

    Args:
        shards: of the tables, a shard of each.
        specs: what each table was made with, by its name.
        destination: of the checkpoint.

    Raises:
        OSError: a file cannot be written; there is nothing new at the destination's path.
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
    return finish(destination, info, encode({_SPECS: {name: spec.to_json() for name, spec in specs.items()}}, {}))


def saved_specs(info: CheckpointInfo) -> dict[str, TableSpec]:
    """What each table of a checkpoint was made with, by its name.

    Of a model's checkpoint: what says the same of its table.

    Raises:
        CheckpointError: it does not tell.
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
        raise CheckpointError(f"{info.path} has the rows or the specification of {lacking}, and lacks the other")
    try:
        specs = {name: TableSpec.from_json(text) for name, text in written.items()}
        for name, spec in specs.items():
            check_fits(name, info.tables[name], info.path, spec.dim, spec.optimizer, "its specification")
    except ValueError as error:
        raise CheckpointError(f"{info.path} does not tell what its tables are: {error}") from error
    return specs


def check_loadable(info: CheckpointInfo, saved: Mapping[str, TableSpec], present: Mapping[str, TableSpec]) -> None:
    """Refuses a checkpoint that the tables of a process cannot be replaced by.

    Args:
        info: the checkpoint's.
        saved: its tables.
        present: those of the process.

    Raises:
        ValueError: a table that is not temporary is not in it, or is another one there.
    """
    for name, spec in sorted(present.items()):
        if spec.temporary:
            if name in saved:
                raise ValueError(f"table {name!r} is a temporary one here, the checkpoint {info.path} has it")
            continue
        if name not in saved:
            raise ValueError(f"the checkpoint {info.path} has no table {name!r}, which is here")
        check_fits(name, info.tables[name], info.path, spec.dim, spec.optimizer, "this process")
        if saved[name].initial_rows != spec.initial_rows:
            raise ValueError(f"table {name!r} was made with another init_func in the checkpoint {info.path}")
        if saved[name].shard != spec.shard:
            (part, parts), (own, own_parts) = saved[name].shard, spec.shard
            raise ValueError(
                f"the checkpoint {info.path} has part {part + 1} of {parts} of table {name!r}, "
                f"and here is part {own + 1} of {own_parts}"
            )


def loaded_tables(chain: Sequence[CheckpointInfo], empty: Mapping[str, Callable[[], Table]]) -> dict[str, Table]:
    """New tables with the rows of a checkpoint, by name.

    Args:
        chain: of the checkpoint, see :func:`torchrec_recstore.checkpoint.info.read_chain`.
        empty: makes each of them.

    Raises:
        CheckpointError, MemoryError, ColdStoreError: as :func:`torchrec_recstore.checkpoint.rows.load_rows`.
    """
    tables: dict[str, Table] = {}
    try:
        for name, make in empty.items():
            tables[name] = make()
            load_rows(tables[name], name, chain)
            check_rows(chain, name, held_rows(tables[name]))
    except BaseException:
        for table in tables.values():
            table.close()
        raise
    return tables
