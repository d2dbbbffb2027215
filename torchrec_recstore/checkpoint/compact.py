"""Folds a chain of checkpoints into one full checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import FileInfo, check_file
from torchrec_recstore.checkpoint.fold import FoldedTable, check_files, common_columns, tables_named
from torchrec_recstore.checkpoint.info import (
    DENSE,
    TRAINING_STATE,
    CheckpointInfo,
    PartInfo,
    TableInfo,
    read_chain,
)
from torchrec_recstore.checkpoint.writer import PartWriter, finish, part_rows
from torchrec_recstore.encoding import encode
from torchrec_recstore.store import Part


def compact_checkpoint(path: str | Path, output: str | Path) -> CheckpointInfo:
    """Folds a delta and its bases into one full checkpoint, which loads to the same bits.

    The function needs no model, no process group and no memory for a table: rows are merged while they are read. The
    checkpoints of the chain are not changed. A model that has saved or loaded the chain must load ``output`` before it
    can save deltas of ``output``.

    Args:
        path: The delta's directory. A full checkpoint is copied.
        output: The directory of the new checkpoint. It is complete or does not exist.

    Returns:
        The metadata of the new checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint at ``path``, or the base of a delta is missing.
        FileExistsError: ``output`` exists.
        BlockingIOError: Another process is writing to ``output``, or is replacing a checkpoint of the chain.
        CheckpointError: A file is missing or damaged, or the format is that of another version.
        OSError: A file cannot be written.
    """
    with folding(path, output) as (chain, destination):
        check_files(chain)
        return compact_chain(chain, destination)


@contextmanager
def folding(path: str | Path, output: str | Path) -> Iterator[tuple[list[CheckpointInfo], Destination]]:
    """Yields the chain of ``path``, locked against changes, and the destination at ``output``.

    Raises:
        FileNotFoundError, FileExistsError, BlockingIOError, CheckpointError: See :func:`compact_checkpoint`.
    """
    if os.path.lexists(output):
        raise FileExistsError(f"{output} exists already: name a path that does not")
    chain = read_chain(path)
    with Destination(Path(os.path.abspath(output)), bases=chain) as destination:
        yield chain, destination


def compact_chain(
    chain: Sequence[CheckpointInfo], destination: Destination, on_rows: Callable[[int], object] = lambda count: None
) -> CheckpointInfo:
    """Folds a chain whose files have been checked. See :func:`compact_checkpoint`.

    Args:
        chain: The chain that :func:`folding` yields.
        destination: The destination that :func:`folding` yields.
        on_rows: A callback that is called with the number of rows folded since the last call.

    Returns:
        The metadata of the new checkpoint.
    """
    staging = destination.stage()
    writer = PartWriter(staging, rank=0)
    try:
        tables = {name: _compact_table(chain, name, writer, on_rows) for name in chain[-1].tables}
    finally:
        files = writer.close()
    newest = chain[-1]
    counted = [file for table in newest.tables.values() for file in table.sightings]
    for name in (DENSE, TRAINING_STATE, *counted):
        if name in newest.files:
            files[name] = newest.files[name]
            _copy(newest.path / name, staging / name, files[name])
    info = replace(newest, path=destination.path, tables=tables, files=files, delta_of=None)
    return finish(destination, info, encode(newest.training_state, {}))


def _compact_table(
    chain: Sequence[CheckpointInfo], name: str, writer: PartWriter, on_rows: Callable[[int], object]
) -> TableInfo:
    table = chain[-1].tables[name]
    columns = common_columns(tables_named(name, chain))
    parts: list[PartInfo] = []
    size = part_rows(table.dim, getattr(torch, table.dtype), table.optimizer)
    for number, shards in enumerate(_resized(FoldedTable(chain, name, columns), size)):
        parts += [writer.part(name, number, part) for part in shards]
        on_rows(len(shards[0]))
    edges = tuple((each.start, each.stop) for each in columns)
    return replace(table, columns=edges, parts=tuple(parts), removal="left", removed=())


def _resized(folded: FoldedTable, size: int) -> Iterator[list[Part]]:
    """Yields the rows in windows of ``size`` rows, so that the parts are those of a save by one rank."""
    held: list[list[Part]] = []
    count = 0
    for window in folded:
        held.append(window)
        count += len(window[0])
        while count >= size:
            shards = _concatenated(held)
            yield [part.take(slice(0, size)) for part in shards]
            held = [[part.take(slice(size, None)) for part in shards]]
            count -= size
    if count:
        yield _concatenated(held)


def _concatenated(windows: Sequence[Sequence[Part]]) -> list[Part]:
    return [Part.concatenated(of_columns) for of_columns in zip(*windows, strict=True)]


def _copy(source: Path, target: Path, expected: FileInfo) -> None:
    with source.open("rb") as of:
        try:
            with target.open("wb") as to:
                shutil.copyfileobj(of, to)
                to.flush()
                os.fsync(to.fileno())
        except OSError as error:
            raise OSError(error.errno, f"cannot be written: {error.strerror}", os.fspath(target)) from error
    check_file(target, expected)
