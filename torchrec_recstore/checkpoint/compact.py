"""A chain of checkpoints folded into one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

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

Shards = list[dict[str, Tensor]]


def compact_checkpoint(path: str | Path, output: str | Path) -> CheckpointInfo:
    """Folds a delta and all that it is a delta of into one full checkpoint, which loads to the same bits.

    It needs neither a model nor a process group, nor memory for a table: rows are merged as they are read. The
    checkpoints that it reads stay as they are. What loaded or saved the chain has neither loaded nor saved its
    ``output``: load that first to save deltas of it.

    Args:
        path: the delta's directory; a full checkpoint is copied.
        output: the new directory; it is whole or not there.

    Returns:
        What ``output`` holds.

    Raises:
        FileNotFoundError: there is no checkpoint, or one is missing that it is a delta of.
        FileExistsError: there is something at ``output``.
        BlockingIOError: another process is writing to ``output``, or is replacing one of the chain.
        CheckpointError: a file is missing or damaged, or the format is another version's.
        OSError: a file cannot be written.
    """
    with folding(path, output) as (chain, destination):
        check_files(chain)
        return compact_chain(chain, destination)


@contextmanager
def folding(path: str | Path, output: str | Path) -> Iterator[tuple[list[CheckpointInfo], Destination]]:
    """The chain of ``path``, which stays as it is meanwhile, and where it is folded into.

    Raises:
        FileNotFoundError, FileExistsError, BlockingIOError, CheckpointError: as :func:`compact_checkpoint`.
    """
    if os.path.lexists(output):
        raise FileExistsError(f"{output} exists already: name a path that does not")
    chain = read_chain(path)
    with Destination(Path(os.path.abspath(output)), bases=chain) as destination:
        yield chain, destination


def compact_chain(
    chain: Sequence[CheckpointInfo], destination: Destination, on_rows: Callable[[int], object] = lambda count: None
) -> CheckpointInfo:
    """:func:`compact_checkpoint` of a chain whose files have been checked.

    Args:
        chain: as :func:`folding` gives it.
        destination: likewise.
        on_rows: called with the number of rows folded since its last call.
    """
    staging = destination.stage()
    writer = PartWriter(staging, rank=0)
    try:
        tables = {name: _compact_table(chain, name, writer, on_rows) for name in chain[-1].tables}
    finally:
        files = writer.close()
    newest = chain[-1]
    counted = [file.file for table in newest.tables.values() for file in table.sightings]
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
    for number, (ids, shards) in enumerate(_resized(FoldedTable(chain, name, columns), size)):
        parts += [writer.part(name, c, number, {"ids": ids, **shard}) for c, shard in zip(columns, shards, strict=True)]
        on_rows(len(ids))
    return replace(table, columns=tuple(columns), parts=tuple(parts), removal="left", removed=())


def _resized(folded: FoldedTable, size: int) -> Iterator[tuple[Tensor, Shards]]:
    """Windows of ``size`` rows, the last one of what is left: those of a save of the whole table by one rank."""
    held: list[tuple[Tensor, Shards]] = []
    count = 0
    while (bound := folded.bound()) is not None:
        held.append(folded.take(bound))
        count += len(held[-1][0])
        while count >= size:
            ids, shards = _joined(held)
            yield ids[:size], [{key: rows[:size] for key, rows in shard.items()} for shard in shards]
            held = [(ids[size:], [{key: rows[size:] for key, rows in shard.items()} for shard in shards])]
            count -= size
    if count:
        yield _joined(held)


def _joined(windows: Sequence[tuple[Tensor, Shards]]) -> tuple[Tensor, Shards]:
    shards = zip(*(shards for _, shards in windows), strict=True)
    return torch.cat([ids for ids, _ in windows]), [
        {key: torch.cat([rows[key] for rows in shard]) for key in shard[0]} for shard in shards
    ]


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
