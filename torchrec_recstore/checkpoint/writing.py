"""What every save does, of a model or of plain tables: a shard's files, and the name when all are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, SightingsInfo, TableInfo, write_metadata
from torchrec_recstore.checkpoint.parts import PartWriter
from torchrec_recstore.checkpoint.sightings import sparse
from torchrec_recstore.options import TableOptions
from torchrec_recstore.store import Snapshot, Table


@dataclass
class SavedShard:
    """A shard that is being saved, as it was at one moment.

    Args:
        name: The table's name in the checkpoint.
        table: the shard.
        snapshot: of its rows; of a delta, of those that have changed.
        options: of the whole table, without its cold store.
        sightings: what its admission has counted.
        ids: all that have a row, where they are listed instead of those that left.
    """

    name: str
    table: Table
    snapshot: Snapshot
    options: TableOptions
    sightings: tuple[Tensor, int]
    ids: Tensor | None = None


def write_shard(
    writer: PartWriter,
    shard: SavedShard,
    removal: Literal["left", "stay"] = "left",
    *,
    delta: bool = False,
    on_rows: Callable[[int], object] = lambda count: None,
) -> TableInfo:
    """Writes a shard's rows and what else belongs to it.

    Args:
        writer: of this rank's files.
        shard: to be read to its end.
        removal: of a delta: which ids it lists.
        delta: whether the checkpoint is one.
        on_rows: called after every part with its rows.

    Returns:
        What this shard adds to what the checkpoint says of the table.
    """
    table = shard.table
    first = table.columns.start == 0  # column shards hold the same ids
    removed: tuple[PartInfo, ...] = ()
    if delta and first:
        ids = shard.snapshot.left if removal == "left" else shard.ids
        assert ids is not None
        removed = writer.ids(shard.name, table, removal, ids)
    sightings: tuple[SightingsInfo, ...] = ()
    cells, taken = shard.sightings
    if cells.shape[2] > 0 and first:
        sightings = (SightingsInfo(writer.sightings(shard.name, table, sparse(cells)), cells.shape[2], taken),)
    return TableInfo(
        dim=table.dim,
        dtype=str(table.dtype).removeprefix("torch."),
        optimizer=table.optimizer,
        options=shard.options,
        rows=shard.snapshot.table_rows if first else 0,
        steps=shard.snapshot.steps,
        optimizer_steps=shard.snapshot.optimizer_steps,
        columns=((table.columns.start, table.columns.stop),),
        parts=writer.rows(shard.name, table, shard.snapshot, on_rows),
        removal=removal,
        removed=removed,
        sightings=sightings,
    )


def finish(destination: Destination, info: CheckpointInfo, training_state: Any) -> CheckpointInfo:
    """Writes the metadata beside the files, which are there, and gives the checkpoint its name.

    Args:
        destination: of the checkpoint.
        info: of the checkpoint, without its checksum.
        training_state: as :func:`torchrec_recstore.checkpoint.encoding.encode` gives it.

    Raises:
        OSError: that cannot be done; what was at its path is there still.
    """
    checksum = write_metadata(destination.staging, info, training_state)
    destination.publish()
    return replace(info, checksum=checksum)
