"""Opens the data of a run on every rank, splits it by time, and reads batches ahead."""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Generator as ReadAhead
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from common.command import DataError
from common.processes import on_each_rank, progress_bar, rank_and_world_size
from common.report import check_file, console_for, write_json
from criteo import ID_NAMES, NUM_IDS, CriteoFile, Rows, concat
from generator import Generator
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

if TYPE_CHECKING:
    from train import Settings

T = TypeVar("T")

READ_AHEAD_BATCHES = 32
GENERATED_ROWS = 800_000


class RowSource(Protocol):
    """The interface of ``criteo.CriteoFile`` and ``generator.Generator``."""

    path: str
    num_rows: int
    bad_rows: int
    bad_lines: Sequence[int]
    fingerprint: str

    def rows(self, start: int, stop: int) -> Iterator[Rows]:
        """Yields rows ``[start, stop)`` in pieces of any size."""
        ...


def open_source(settings: Settings) -> RowSource:
    """Opens the data, or generates it if there is no file.

    A file is read once, to count and check all lines.

    Raises:
        DataError: The file cannot be read, or ``CriteoFile.scan`` finds an error.
    """
    if settings.data is None:
        return Generator(settings.limit_rows or GENERATED_ROWS, settings.seed)
    file = CriteoFile(
        settings.data,
        skip_bad_rows=settings.skip_bad_rows,
        limit_rows=settings.limit_rows,
    )
    try:
        with progress_bar(desc="checking", unit=" rows", leave=False) as bar:
            file.scan(bar.update)
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror}") from error
    return file


def open_on_all_ranks(settings: Settings) -> RowSource:
    """Opens the data on rank 0, and returns a copy of the source on every rank.

    Collective.

    Raises:
        DataError: Rank 0 cannot use the data, or another rank cannot open the file. It
            is raised on every rank.
    """

    def open_here() -> RowSource | None:
        if dist.get_rank() == 0:
            return open_source(settings)
        try:
            if settings.data is not None:
                settings.data.open("rb").close()
        except OSError as error:
            raise DataError(
                f"{settings.data} on rank {dist.get_rank()}: {error.strerror}"
            ) from error
        return None

    return on_each_rank(open_here)[0]


def splits(source: RowSource) -> tuple[range, range, range]:
    """Splits rows by time into 80 % training, 10 % validation, 10 % test.

    Raises:
        DataError: A part would be empty.
    """
    num_rows = source.num_rows
    train_end = num_rows * 8 // 10
    validation_end = num_rows * 9 // 10
    train = range(train_end)
    validation = range(train_end, validation_end)
    test = range(validation_end, num_rows)
    if not (train and validation and test):
        raise DataError(f"{source.path}: {num_rows} rows are too few to split 80/10/10")
    return train, validation, test


def good_rows(bad_lines: Sequence[int], part: range) -> int:
    """Returns the number of good lines in a part. ``bad_lines`` must be ascending."""
    first_bad = bisect_left(bad_lines, part.start)
    end_bad = bisect_left(bad_lines, part.stop)
    return len(part) - (end_bad - first_bad)


def behind(
    bad_lines: Sequence[int],
    part: range,
    count: int,
) -> range:
    """Returns the lines of a part after its first ``count`` good rows.

    ``bad_lines`` must be ascending.
    """
    first_bad = bisect_left(bad_lines, part.start)

    def good_rows_before(number: int) -> int:
        """Counts the good rows of the part before its bad line of a number."""
        return bad_lines[first_bad + number] - part.start - number

    skipped = bisect_left(
        range(len(bad_lines) - first_bad),
        count,
        key=good_rows_before,
    )
    begin = part.start + count + skipped
    return range(min(begin, part.stop), part.stop)


def steps_in_epoch(
    settings: Settings,
    source: RowSource,
    training: range,
) -> int:
    """Returns the number of training steps in an epoch.

    A last step that has fewer samples than ranks is left out.
    """
    num_rows = good_rows(source.bad_lines, training)
    steps, last_samples = divmod(num_rows, settings.batch_size)
    _, world_size = rank_and_world_size()
    return steps + 1 if last_samples >= world_size else steps


def batches_of(
    settings: Settings,
    source: RowSource,
    part: range,
    batch_rows: int,
    even: bool = False,
) -> ReadAhead[Batch, None, None]:
    """Yields the batches of this rank for a part of the log, read ahead.

    Close the generator to stop early.

    All ranks get the same number of batches. See ``batches_of_rank`` for ``even``.
    """
    rank, world_size = rank_and_world_size()
    pieces = cut(source.rows(part.start, part.stop), batch_rows)
    return read_ahead(
        batches_of_rank(
            pieces,
            rank,
            world_size,
            modulo=settings.modulo,
            even=even,
        )
    )


def cut(pieces: Iterable[Rows], batch_rows: int) -> Iterator[Rows]:
    """Cuts pieces of any size into batches of exactly ``batch_rows`` rows.

    The last batch may be smaller.
    """
    pending: list[Rows] = []
    pending_rows = 0
    for piece in pieces:
        start = 0
        while pending_rows + len(piece) - start >= batch_rows:
            stop = start + batch_rows - pending_rows
            yield concat([*pending, piece[start:stop]])
            pending = []
            pending_rows = 0
            start = stop
        if start < len(piece):
            pending.append(piece[start:])
            pending_rows += len(piece) - start
    if pending:
        yield concat(pending)


def batches_of_rank(
    batches: Iterable[Rows],
    rank: int = 0,
    world_size: int = 1,
    modulo: int | None = None,
    even: bool = False,
) -> Iterator[Batch]:
    """Yields one rank's part of each batch.

    It is the r-th of W contiguous parts, so the training does not depend on W. A batch
    with fewer samples than ranks is left out on all ranks.

    Args:
        batches: The batches of all ranks.
        rank: The rank.
        world_size: The number of ranks.
        modulo: The divisor that ids are taken modulo of; the results are not negative.
            None: raw ids.
        even: Whether every rank gets the same number of samples. Up to W - 1 samples at
            the end of the log are then left out. Training needs it, because the
            backward pass of row-wise sharding fails on parts of different sizes
            (torchrec 1.8.0 with gloo).

    Yields:
        Dense features (B, 13) float32, labels (B,) int32, and one int64 id for each
        sample and each feature C1 to C26.
    """
    ones = torch.ones(0, dtype=torch.int32)
    for rows in batches:
        if even:
            rows = rows[: len(rows) // world_size * world_size]
        if len(rows) < world_size:
            continue
        begin = len(rows) * rank // world_size
        end = len(rows) * (rank + 1) // world_size
        rank_rows = rows[begin:end]
        # (26, B): a KeyedJaggedTensor stores one feature after another
        ids = np.ascontiguousarray(rank_rows.ids.T)
        if modulo is not None:
            ids %= modulo
        if len(ones) < ids.size:
            ones = torch.ones(ids.size, dtype=torch.int32)
        sparse = KeyedJaggedTensor(
            keys=list(ID_NAMES),
            values=torch.from_numpy(ids.reshape(-1)),
            lengths=ones[: ids.size],
            stride=len(rank_rows),
            length_per_key=[len(rank_rows)] * NUM_IDS,
        )
        dense = torch.from_numpy(rank_rows.dense)
        labels = torch.from_numpy(rank_rows.labels)
        yield Batch(dense, sparse, labels)


def read_ahead(
    items: Iterator[T],
    depth: int = READ_AHEAD_BATCHES,
) -> ReadAhead[T, None, None]:
    """Runs an iterator in a separate thread, at most ``depth`` items ahead.

    An error in the thread is raised here after the items that precede it. Closing this
    generator ends the thread and closes ``items`` if it is a generator.
    """
    # an item in a tuple, the error of the thread, or None after the last item
    ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(depth)
    stopped = threading.Event()

    def put(entry: tuple[T] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=0.05)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put((item,))
                if stopped.is_set():
                    break
            put(None)
        except BaseException as error:  # every error is passed on to the consumer
            put(error)
        finally:
            if hasattr(items, "close"):
                items.close()

    thread = threading.Thread(target=work, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            entry = ready.get()
            if entry is None:
                return
            if isinstance(entry, BaseException):
                raise entry
            yield entry[0]
    finally:
        stopped.set()
        thread.join()


def read_only(settings: Settings) -> None:
    """Reads all data, makes the batches of a training, and prints the rate.

    Raises:
        DataError: The data cannot be used, or the result cannot be written.
    """
    check_file(settings.json_out)
    source = open_source(settings)
    samples = 0
    begin = time.perf_counter()
    batches = batches_of(
        settings,
        source,
        range(source.num_rows),
        settings.batch_size,
    )
    bar = progress_bar(
        desc="reading",
        unit=" samples",
        total=source.num_rows,
        leave=False,
    )
    with bar, closing(batches):
        for batch in batches:
            samples += len(batch.labels)
            bar.update(len(batch.labels))
    rate = samples / (time.perf_counter() - begin)
    console = console_for(settings.json_out)
    console.print(
        f"{samples:,} samples read from {source.path},"
        f" {source.bad_rows:,} bad rows skipped",
        soft_wrap=True,
        highlight=False,
    )
    console.print(f"reader samples/s   {rate:,.0f}", highlight=False)
    result = {
        "data": source.path,
        "batch_size": settings.batch_size,
        "samples": samples,
        "skipped_rows": source.bad_rows,
        "reader_samples_per_second": rate,
    }
    write_json(settings.json_out, result)
