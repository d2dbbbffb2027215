"""Reads batches from Parquet files: ids as a ``KeyedJaggedTensor``, numbers and labels
as tensors.

    dataset = ParquetDataset("clicks/", ids=["user", "item", "history"],
    dense=["price"], label="click", batch_size=512) for epoch in range(2):
        dataset.set_epoch(epoch)
        for batch in StatefulDataLoader(dataset, batch_size=None, num_workers=2):
            ...

A column of ids contains integers, strings, or lists of them. Only distinct strings and
row groups are Python objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torchrec import KeyedJaggedTensor


class Batch(NamedTuple):
    """A batch of rows.

    Attributes:
        ids: The ids, by column. A missing value is an empty list of ids.
        dense: (B, columns) float32. Missing values are 0.
        labels: (B,) float32.
    """

    ids: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor


class ParquetDataset(IterableDataset[Batch]):
    """Batches of the rows of Parquet files, sharded over the ranks and over the workers
    of a ``DataLoader``.

    All ranks get the same number of batches, and each row is in one batch of one rank.
    The sizes of a rank's batches differ by at most one row and are at most
    ``batch_size``. Memory holds one or two row groups for each worker.

    A ``StatefulDataLoader`` of torchdata saves and loads the position. Without it,
    :meth:`state_dict` has the position after the last batch of an iteration in this
    process.

    Args:
        path: A file, or a folder whose files end with ``.parquet``.
        ids: The columns of ids: integers, strings, or lists of them. A string's id is
            its 64-bit hash (XXH3).
        dense: The columns of numbers.
        label: The column of labels.
        batch_size: The largest number of rows of a batch on each rank.
        seed: The seed of the order. An epoch visits the row groups, and the rows of
            each group, in another order than the other epochs. None: the order of the
            files.

    Raises:
        ValueError: There is no file, a column is missing, or there are too few rows for
            a row in each batch.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        ids: Sequence[str],
        label: str,
        batch_size: int,
        dense: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        path = Path(path)
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} contains no .parquet file")
        self.ids, self.dense, self.label = list(ids), list(dense), label
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.ranks = (
            (dist.get_rank(), dist.get_world_size())
            if dist.is_initialized()
            else (0, 1)
        )
        # file, number of the group, rows
        self._groups: list[tuple[Path, int, int]] = []
        for file in files:
            metadata = pq.read_metadata(file)
            if missing := {*ids, *dense, label} - set(
                metadata.schema.to_arrow_schema().names
            ):
                raise ValueError(f"{file} has no column {sorted(missing)[0]!r}")
            self._groups += [
                (file, n, metadata.row_group(n).num_rows)
                for n in range(metadata.num_row_groups)
            ]
        self.num_rows = sum(rows for _, _, rows in self._groups)
        if self.num_rows // self.ranks < max(len(self), 1):
            raise ValueError(
                f"{path} has {self.num_rows} rows: too few for batches of {batch_size}"
                " on each rank"
            )
        self._epoch, self._done = 0, 0

    def __len__(self) -> int:
        """Returns the number of batches of an epoch, which is the same on every rank."""
        return math.ceil(math.ceil(self.num_rows / self.ranks) / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of an epoch.

        The next iteration begins with its first batch.
        """
        self._epoch, self._done = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: the epoch, and the number of batches that this worker
        has yielded.
        """
        return {"epoch": self._epoch, "done": self._done, "of": self._of()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a position.

        Raises:
            ValueError: The position is of other files, of another batch size or seed,
                or of another number of ranks.
        """
        if state["of"] != self._of():
            raise ValueError(
                f"the position is of another data set or job: {state['of']}, and this"
                f" one is {self._of()}"
            )
        self._epoch, self._done = state["epoch"], state["done"]

    def _of(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "ranks": self.ranks,
        }

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of this worker from the present position on."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        steps = len(self)
        # a worker has neighbouring batches
        own = range(steps * worker // workers, steps * (worker + 1) // workers)
        first, end = (
            self.num_rows * each // self.ranks for each in (self.rank, self.rank + 1)
        )
        bounds = [first + (end - first) * step // steps for step in range(steps + 1)]
        own = own[self._done :]
        if own:
            pieces = self._rows(bounds[own.start], bounds[own.stop])
            held = next(pieces)
            for step in own:
                size = bounds[step + 1] - bounds[step]
                while held.num_rows < size:
                    held = pa.concat_tables([held, next(pieces)])
                self._done += 1
                yield self._batch(held.slice(0, size))
                held = held.slice(size)
        self._done = 0

    def _rows(self, begin: int, end: int) -> Iterator[pa.Table]:
        """Yields the rows from ``begin`` to ``end`` in the order of the epoch."""
        order = np.arange(len(self._groups))
        if self.seed is not None:
            order = np.random.default_rng([self.seed, self._epoch]).permutation(
                len(self._groups)
            )
        place = 0
        for group in order.tolist():
            file, number, rows = self._groups[group]
            part = slice(max(begin - place, 0), min(end - place, rows))
            place += rows
            if part.start >= part.stop:
                continue
            with pq.ParquetFile(file) as opened:
                columns = [*self.ids, *self.dense, self.label]
                table = opened.read_row_group(
                    number, columns=columns, use_threads=False
                )
            if self.seed is None:
                yield table.slice(part.start, part.stop - part.start)
            else:
                yield table.take(
                    np.random.default_rng([self.seed, self._epoch, group]).permutation(
                        rows
                    )[part]
                )

    def _batch(self, table: pa.Table) -> Batch:
        parts = [_lists(name, table[name].combine_chunks()) for name in self.ids]
        values, lengths = (torch.cat(each) for each in zip(*parts, strict=True))
        ids = KeyedJaggedTensor(self.ids, values, lengths=lengths)
        dense = [torch.from_numpy(_numbers(table[name])) for name in self.dense]
        labels = torch.from_numpy(_numbers(table[self.label]))
        return Batch(
            ids,
            torch.stack(dense, dim=1) if dense else torch.empty(len(labels), 0),
            labels,
        )


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    return np.array(column.cast(pa.float32(), safe=False).fill_null(0).to_numpy())


def _lists(name: str, column: pa.Array) -> tuple[Tensor, Tensor]:
    """Returns the ids of a column, one row after another, and the number of ids of each
    row.
    """
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths, values = pc.list_value_length(column).fill_null(0), column.flatten()
        if values.null_count:
            raise ValueError(f"column {name!r} has a list with a missing id")
    else:
        lengths, values = column.is_valid(), column.drop_null()
    return torch.from_numpy(_int64(name, values)), torch.from_numpy(
        np.array(lengths.cast(pa.int64()))
    )


def _int64(name: str, values: pa.Array) -> np.ndarray:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_integer(values.type):
        # uint64 wraps, so that each value keeps its own id
        return np.array(values).astype(np.int64)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise ValueError(
            f"column {name!r} has values of type {values.type}: ids are integers or"
            " strings"
        )
    coded = values.dictionary_encode()
    hashes = [
        xxhash.xxh3_64_intdigest(word.encode()) for word in coded.dictionary.to_pylist()
    ]
    return np.array(hashes, np.uint64).view(np.int64)[np.array(coded.indices)]
