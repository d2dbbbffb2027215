"""Writing the rows of shards: from a snapshot to the files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import CheckpointError, FileInfo, read_tensors, write_tensors
from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, SightingsInfo, TableInfo, write_metadata
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.options import TableOptions
from torchrec_recstore.store import Snapshot, Table
from torchrec_recstore.store.snapshot import column_weighted_mean

_GENERATIONS, _ROWS = 2, 4  # csrc/sightings.h


def sparse(cells: Tensor) -> dict[str, Tensor]:
    """The tensors of a file.

    Args:
        cells: (2, 4, N) uint8.
    """
    flat = cells.flatten()
    positions = flat.nonzero().squeeze(1)
    return {"position": positions, "count": flat[positions]}


def load_sightings(table: Table, chain: Sequence[CheckpointInfo], name: str) -> None:
    """Gives a shard with admission what a checkpoint's shards have counted, whatever their number and their memory.

    Shards have different ids, so the greater count of a cell is right for the ids of both: the cell of an id is at most
    too high. Of a larger counter cells are put together, of a smaller one they are repeated.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if table.options.admission is not None and table.options.admission.count > 1:
        table.set_sightings(*merged(chain[-1], name, table.sightings()[0].shape[2]))


def merged(info: CheckpointInfo, name: str, cells: int) -> tuple[Tensor, int]:
    """The counts of all shards as one counter of ``cells`` cells a row has them: (2, 4, cells) uint8; and sightings."""
    counts = torch.zeros(_GENERATIONS, _ROWS, cells, dtype=torch.uint8)
    taken = 0
    for saved in info.tables[name].sightings:
        tensors = read_tensors(info.path / saved.file, info.files[saved.file])
        flat = torch.zeros(_GENERATIONS * _ROWS * saved.cells, dtype=torch.uint8)
        if tensors["position"].numel() and not 0 <= int(tensors["position"].max()) < len(flat):
            raise CheckpointError(f"{info.path / saved.file} does not hold counts of {saved.cells} cells a row")
        flat[tensors["position"]] = tensors["count"]
        found = flat.view(_GENERATIONS, _ROWS, -1)
        if saved.cells > cells:  # a cell's number is the low bits of a hash
            found = found.view(_GENERATIONS, _ROWS, -1, cells).amax(dim=2)
        counts = torch.maximum(counts, found.repeat(1, 1, cells // found.shape[2]))
        taken = max(taken, saved.taken)
    return counts, taken


PART_BYTES = 32 << 20
"""Of a part, about. Two of them are in memory at a time; the format allows 256 MB."""

_LONGEST_NAME = 100
_POLITE_NICENESS = 15  # docs/performance.md has the times of a step with others


def part_rows(dim: int, dtype: torch.dtype, optimizer: Optimizer) -> int:
    """Rows of a part: the same for every column shard of a table, so that their parts hold the same ids.

    Args:
        dim: of the whole table.
        dtype: of its weights.
        optimizer: of the table.
    """
    states = state_names(optimizer).values()
    row = dim * (dtype.itemsize + 4 * sum(kind == "element" for kind in states)) + 4 * len(states) + 24
    return max(1, PART_BYTES // row)


Progress = Callable[[int, int], object]
"""Is called with the rows done and the rows of all, of this rank's shards."""


class RowCount:
    """Counts rows and tells.

    Args:
        progress: is told; None for nobody.
        total: rows that there are to do.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, rows: int) -> None:
        """So many more are done."""
        self._done += rows
        if self._progress is not None:
            self._progress(self._done, self._total)


class PartWriter:
    """Writes a rank's files in a thread of its own, one while the next is being prepared.

    Args:
        directory: where.
        rank: of the files' names.
        polite: beside training: with low priority.
    """

    def __init__(self, directory: Path, rank: int, *, polite: bool = False) -> None:
        self.files: dict[str, FileInfo] = {}
        self._directory = directory
        self._rank = rank
        self._polite = polite
        self._thread = ThreadPoolExecutor(1, "checkpoint-files", initializer=be_polite if polite else None)
        self._pending: Future[tuple[str, FileInfo]] | None = None

    def rows(
        self, name: str, table: Table, snapshot: Snapshot, on_rows: Callable[[int], object] = lambda count: None
    ) -> tuple[PartInfo, ...]:
        """Writes all rows of a snapshot of the table.

        Args:
            name: The table's name in the checkpoint.
            table: the shard.
            snapshot: of its rows, to be read to its end.
            on_rows: called after every part with its rows.
        """
        size = part_rows(table.dim, table.dtype, table.optimizer)
        columns = (table.columns.start, table.columns.stop)
        parts: list[PartInfo] = []
        while left := len(snapshot):
            ids, rows = snapshot.read(min(size, left), polite=self._polite)
            parts.append(self.part(name, columns, len(parts), {"ids": ids, **rows}))
            on_rows(len(ids))
        return tuple(parts)

    def ids(self, name: str, table: Table, kind: str, ids: Tensor) -> tuple[PartInfo, ...]:
        """Writes ids alone, which ascend."""
        pieces = torch.split(ids, PART_BYTES // ids.element_size()) if len(ids) else ()
        columns = (table.columns.start, table.columns.stop)
        return tuple(self.part(name, columns, i, {"ids": piece}, f"-{kind}") for i, piece in enumerate(pieces))

    def sightings(self, name: str, table: Table, tensors: dict[str, Tensor]) -> str:
        """Writes what the table's admission has counted; returns the file's name."""
        file = f"{_file_name(name)}-{self._rank:05d}-{table.columns.start}-sightings.safetensors"
        self._submit(file, tensors)
        return file

    def part(
        self, table: str, columns: tuple[int, int], number: int, tensors: dict[str, Tensor], kind: str = ""
    ) -> PartInfo:
        """Writes a part.

        Args:
            table: its name.
            columns: of the shard.
            number: of the part among the shard's.
            tensors: ``ids``, ascending and at least one, and rows, if any. They must not change until :meth:`close`.
            kind: what the file's name ends with beside these.
        """
        name = f"{_file_name(table)}-{self._rank:05d}-{columns[0]}-{columns[1]}-{number:05d}{kind}.safetensors"
        self._submit(name, tensors)
        ids = tensors["ids"]
        return PartInfo(name, self._rank, columns, len(ids), int(ids[0]), int(ids[-1]))

    def tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Writes a file, if there are tensors for it."""
        if tensors:
            self._submit(name, _unshared(tensors))

    def close(self) -> dict[str, FileInfo]:
        """Waits for the last file; returns all of them.

        Raises:
            OSError: one could not be written.
        """
        try:
            self._collect()
        finally:
            self._thread.shutdown()
        return self.files

    def _submit(self, name: str, tensors: dict[str, Tensor]) -> None:
        self._collect()
        self._pending = self._thread.submit(lambda: (name, write_tensors(self._directory / name, tensors)))

    def _collect(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            name, info = pending.result()
            self.files[name] = info


def be_polite() -> None:
    """Gives the calling thread a low priority."""
    # Linux: a thread's own niceness, which POSIX would have to be the process's.
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(_POLITE_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, but no two in the same memory: tied weights, which safetensors refuses."""
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return found


def _file_name(table: str) -> str:
    name = quote(table, safe="")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}~{hashlib.sha256(table.encode()).hexdigest()[:16]}"


def joined_rows(
    pieces: Sequence[tuple[range, dict[str, Tensor]]], columns: range, states: Mapping[str, str]
) -> dict[str, Tensor]:
    """The rows of a shard out of those of the column shards that cover it.

    A row-wise state becomes the column-weighted mean of theirs, or a copy where there is but one.

    Args:
        pieces: columns and rows (:meth:`Table.read_rows`, the same ids) of each covering shard, ascending.
        columns: of the wanted shard.
        states: of the optimizer, see :func:`torchrec_recstore.optim.state_names`.
    """
    cuts = [slice(max(c.start, columns.start) - c.start, min(c.stop, columns.stop) - c.start) for c, _ in pieces]
    first = pieces[0][1]

    def joined(name: str) -> Tensor:
        parts = [rows[name][:, cut] for (_, rows), cut in zip(pieces, cuts, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def mean(name: str) -> Tensor:
        return column_weighted_mean([rows[name] for _, rows in pieces], [cut.stop - cut.start for cut in cuts])

    rows = {name: joined(name) if kind == "element" else mean(name) for name, kind in states.items()}
    return {"weight": joined("weight"), **rows, "last_step": first["last_step"], "frequency": first["frequency"]}


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
        training_state: as :func:`torchrec_recstore.encoding.encode` gives it.

    Raises:
        OSError: that cannot be done; what was at its path is there still.
    """
    checksum = write_metadata(destination.staging, info, training_state)
    destination.publish()
    return replace(info, checksum=checksum)
