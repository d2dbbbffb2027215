"""Writes the rows of a shard from a snapshot into the files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import FileInfo, write_tensors
from torchrec_recstore.checkpoint.info import (
    CheckpointInfo,
    PartInfo,
    TableInfo,
    write_metadata,
)
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.store import Part, Snapshot, Table, TableState
from torchrec_recstore.store.parts import PART_BYTES, rows_in
from torchrec_recstore.utils import warn_user

Progress = Callable[[int, int], object]
"""A callback with two arguments: the number of rows that are done, and the number of
all rows of this rank's shards.
"""

_LONGEST_NAME = 100
# docs/performance.md compares the time of a training step at several values.
_POLITE_NICENESS = 15


def part_rows(
    dim: int,
    dtype: torch.dtype,
    optimizer: Optimizer,
) -> int:
    """Returns the number of rows of a part."""
    return rows_in(PART_BYTES, dim, dtype, optimizer)


def reporting(progress: Progress | None, total: int) -> Callable[[int], object]:
    """Returns a function that counts rows and calls ``progress``.

    It adds to the number of rows that are done, of ``total``.
    """
    done = 0

    def add(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    return add


def warn_of_nonfinite(name: str, count: int) -> None:
    """Warns that a number of saved rows of a table are not finite."""
    warn_user(
        f"table {name!r}: {count:,} of the saved rows have NaN or infinity, and so have"
        " their lookups: go back to a checkpoint without them, and set"
        ' TableOptions(nonfinite="skip"), which leaves a row as it is when its gradient'
        " is not finite"
    )


class PartWriter:
    """A writer of one rank's files.

    A thread, of low priority if ``polite``, writes one while the next is prepared.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        polite: bool = False,
    ) -> None:
        # The number of rows that are not finite, by the name of the table and the first
        # column of the shard. Tables without such rows are left out.
        self.nonfinite: Counter[tuple[str, int]] = Counter()
        self._files: dict[str, FileInfo] = {}
        self._directory = directory
        self._rank = rank
        self._polite = polite
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="checkpoint-files",
            initializer=lower_priority if polite else None,
        )
        self._pending: Future[None] | None = None

    def rows(
        self,
        name: str,
        table: Table,
        snapshot: Snapshot,
        on_rows: Callable[[int], object] = lambda count: None,
    ) -> tuple[PartInfo, ...]:
        """Writes all rows of a snapshot, and counts those that are not finite.

        ``on_rows`` is called with each part's number of rows.
        """
        size = part_rows(table.dim, table.dtype, table.optimizer)
        parts: list[PartInfo] = []
        while len(snapshot) > 0:
            part = snapshot.read(min(size, len(snapshot)), polite=self._polite)
            nonfinite_count = int((~part.is_finite()).sum())
            if nonfinite_count:
                self.nonfinite[name, table.columns.start] += nonfinite_count
            parts.append(self.part(name, len(parts), part))
            on_rows(len(part))
        return tuple(parts)

    def ids(
        self,
        name: str,
        table: Table,
        kind: str,
        ids: Tensor,
    ) -> tuple[PartInfo, ...]:
        """Writes ids without rows. The ids are in ascending order."""
        if not len(ids):
            return ()
        files = []
        pieces = torch.split(ids, PART_BYTES // ids.element_size())
        for number, piece in enumerate(pieces):
            suffix = f"{number:05d}-{kind}"
            files.append(
                self._ids_file(
                    name,
                    table.columns,
                    suffix,
                    {"ids": piece},
                )
            )
        return tuple(files)

    def sightings(
        self,
        name: str,
        table: Table,
        state: TableState,
    ) -> tuple[str, ...]:
        """Writes the counts of a shard's admission, and returns the name of the file.

        Without counts there is none.
        """
        tensors = {}
        for key, value in state.tensors().items():
            if key.startswith("sighting_"):
                tensors[key] = value
        if not tensors:
            return ()
        begin = table.columns.start
        file = f"{_file_name(name)}-{self._rank:05d}-{begin}-sightings.safetensors"
        self._submit(file, tensors)
        return (file,)

    def part(self, name: str, number: int, part: Part) -> PartInfo:
        """Writes the part with this number of a shard.

        Its ids ascend, and it must not change before :meth:`close`.
        """
        return self._ids_file(
            name,
            part.columns,
            f"{number:05d}",
            part.tensors(),
        )

    def _ids_file(
        self,
        name: str,
        columns: range,
        suffix: str,
        tensors: dict[str, Tensor],
    ) -> PartInfo:
        shard = f"{self._rank:05d}-{columns.start}-{columns.stop}"
        file = f"{_file_name(name)}-{shard}-{suffix}.safetensors"
        self._submit(file, tensors)
        ids = tensors["ids"]
        return PartInfo(
            file=file,
            rank=self._rank,
            columns=(columns.start, columns.stop),
            rows=len(ids),
            first_id=int(ids[0]),
            last_id=int(ids[-1]),
        )

    def tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Writes the tensors into a file. Without tensors there is no file."""
        if tensors:
            self._submit(name, _unshared(tensors))

    def close(self) -> dict[str, FileInfo]:
        """Waits until all files are written; returns their sizes and checksums.

        The result is by the names of the files.
        """
        try:
            self._collect()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
        return self._files

    def _submit(self, name: str, tensors: dict[str, Tensor]) -> None:
        self._collect()
        if self._thread is not None:
            try:
                self._pending = self._thread.submit(self._write, name, tensors)
                return
            except RuntimeError:
                # Python starts no thread once the process is ending. This one is not
                # used again, because its queue can still have this call.
                self._thread = None
        self._write(name, tensors)

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        self._files[name] = write_tensors(self._directory / name, tensors)

    def _collect(self) -> None:
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()


def lower_priority() -> None:
    """Lowers the priority of the calling thread."""
    # On Linux each thread has its own niceness. POSIX defines one niceness for the
    # whole process.
    thread = threading.get_native_id()
    os.setpriority(
        os.PRIO_PROCESS,
        thread,
        max(_POLITE_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)),
    )


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies each tensor that shares memory with an earlier one.

    safetensors refuses such tensors, for example tied weights.
    """
    unshared: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return unshared


def _file_name(table: str) -> str:
    name = quote(table, safe="")
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(table.encode()).hexdigest()
    return f"{name[:_LONGEST_NAME]}~{digest[:16]}"


@dataclass
class SavedShard:
    """A shard that is being saved, in the state of one moment."""

    name: str  # of the table in the checkpoint
    table: Table
    snapshot: Snapshot  # In a delta, of the rows that have changed.
    options: TableOptions  # without the cold store
    state: TableState
    removal: Literal["left", "stay"] = "left"
    # (N,) int64, ascending: the ids of a delta that left or stay
    listed: Tensor | None = None


def write_shard(
    writer: PartWriter,
    shard: SavedShard,
    on_rows: Callable[[int], object] = lambda count: None,
) -> TableInfo:
    """Writes a shard's rows, listed ids and counts of admission.

    Returns its metadata.
    """
    table = shard.table
    parts = writer.rows(shard.name, table, shard.snapshot, on_rows)
    removed: tuple[PartInfo, ...] = ()
    sightings: tuple[str, ...] = ()
    # All column shards hold the same ids: the first one writes what belongs to ids.
    is_first = table.columns.start == 0
    if is_first:
        if shard.listed is not None:
            removed = writer.ids(
                shard.name,
                table,
                shard.removal,
                shard.listed,
            )
        sightings = writer.sightings(shard.name, table, shard.state)
    return TableInfo(
        dim=table.dim,
        dtype=str(table.dtype).removeprefix("torch."),
        optimizer=table.optimizer,
        options=shard.options,
        rows=shard.snapshot.table_rows if is_first else 0,
        steps=shard.state.steps,
        optimizer_steps=shard.state.optimizer_steps,
        columns=((table.columns.start, table.columns.stop),),
        parts=parts,
        removal=shard.removal,
        removed=removed,
        sightings=sightings,
        times=shard.state.times,
    )


def finish(
    destination: Destination,
    info: CheckpointInfo,
    training_state: Any,
) -> CheckpointInfo:
    """Writes the metadata, publishes the checkpoint, and returns the metadata.

    The result has the checksum.
    """
    checksum = write_metadata(destination.staging, info, training_state)
    destination.publish()
    return replace(info, checksum=checksum)
