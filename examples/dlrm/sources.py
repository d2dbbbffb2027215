"""The data of a run: opened on every rank, split by time, and the steps of a part of it."""

from __future__ import annotations

from collections.abc import Generator as ReadAhead
from itertools import pairwise

import torch.distributed as dist
from batches import BatchMaker, RowSource, Step, good_rows, read_steps
from common.command import DataError
from common.processes import progress_bar, rank_and_world_size
from criteo import CriteoFile
from generator import Generator
from settings import Settings

GENERATED_ROWS = 800_000


def open_source(settings: Settings) -> RowSource:
    """Opens the data; a file is read through once, to count its lines and check each.

    Raises:
        DataError: the file cannot be read, or see ``CriteoFile.scan``.
    """
    if settings.data is None:
        return Generator(settings.limit_rows or GENERATED_ROWS, settings.seed)
    file = CriteoFile(settings.data, skip_bad_rows=settings.skip_bad_rows, limit_rows=settings.limit_rows)
    try:
        with progress_bar(desc="checking", unit=" rows", leave=False) as bar:
            file.scan(bar.update)
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror}") from error
    return file


def open_on_all_ranks(settings: Settings) -> RowSource:
    """``open_source`` on rank 0, whose findings the others take over; an error is an error on every rank.

    Raises:
        DataError: rank 0 cannot use the data, or another rank cannot open the file.
    """
    source: RowSource | None = None
    error: str | None = None
    try:
        if dist.get_rank() == 0:
            source = open_source(settings)
        elif settings.data is not None:
            settings.data.open("rb").close()
    except DataError as caught:
        error = str(caught)
    except OSError as caught:
        error = f"{settings.data} on rank {dist.get_rank()}: {caught.strerror}"
    found: list[tuple[RowSource | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(found, (source, error))
    for _, message in found:
        if message is not None:
            raise DataError(message)
    source = found[0][0]
    assert source is not None
    return source


def splits(source: RowSource) -> tuple[range, range, range]:
    """Splits rows by time into 80 % training, 10 % validation, 10 % test.

    Raises:
        DataError: a part would be empty.
    """
    bounds = [0, source.num_rows * 8 // 10, source.num_rows * 9 // 10, source.num_rows]
    train, validation, test = (range(*pair) for pair in pairwise(bounds))
    if not (train and validation and test):
        raise DataError(f"{source.path}: {source.num_rows} rows are too few to split 80/10/10")
    return train, validation, test


def steps_of(
    settings: Settings, source: RowSource, part: range, batch_rows: int, even: bool = False
) -> ReadAhead[Step, None, None]:
    """Yields this rank's steps of a part of the log, as many as every other rank's; ``even``: see ``BatchMaker``."""
    rank, world_size = rank_and_world_size()
    return read_steps(source, part.start, part.stop, batch_rows, BatchMaker(rank, world_size, settings.modulo, even))


def steps_in_epoch(settings: Settings, source: RowSource, training: range) -> int:
    """Training steps that the ranks take in an epoch; a last one with fewer samples than ranks is left out."""
    full, rest = divmod(good_rows(source.bad_lines, training), settings.batch_size)
    return full + (rest >= dist.get_world_size())
