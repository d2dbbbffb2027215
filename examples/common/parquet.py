"""Reads batches from Parquet files: ids as a ``KeyedJaggedTensor``, numbers and labels
as tensors.

    dataset = ParquetDataset(
        "clicks/",
        ids=["user", "item", "history"],
        dense=["price"],
        label="click",
        batch_size=512,
    )
    for epoch in range(2):
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


class _RowGroup(NamedTuple):
    """A row group of a file."""

    file: Path
    number: int
    rows: int


class ParquetDataset(IterableDataset[Batch]):
    """Batches of the rows of Parquet files.

    The batches are sharded over the ranks and over the workers of a ``DataLoader``. All
    ranks get the same number of batches, and each row is in one batch of one rank.
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
        self.ids = list(ids)
        self.dense = list(dense)
        self.label = label
        self.batch_size = batch_size
        self.seed = seed
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._groups: list[_RowGroup] = []
        for file in files:
            self._groups += self._groups_of(file)
        self.num_rows = sum(group.rows for group in self._groups)
        if self.num_rows // self.ranks < max(len(self), 1):
            raise ValueError(
                f"{path} has {self.num_rows} rows: too few for batches of {batch_size}"
                " on each rank"
            )
        self._epoch = 0
        self._yielded_batches = 0

    def _groups_of(self, file: Path) -> list[_RowGroup]:
        metadata = pq.read_metadata(file)
        columns = metadata.schema.to_arrow_schema().names
        missing = {*self.ids, *self.dense, self.label} - set(columns)
        if missing:
            raise ValueError(f"{file} has no column {sorted(missing)[0]!r}")
        groups = []
        for number in range(metadata.num_row_groups):
            rows = metadata.row_group(number).num_rows
            groups.append(_RowGroup(file, number, rows))
        return groups

    def __len__(self) -> int:
        """Returns the number of batches of an epoch, which is the same on every rank."""
        most_rows_of_rank = math.ceil(self.num_rows / self.ranks)
        return math.ceil(most_rows_of_rank / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of an epoch.

        The next iteration begins with its first batch.
        """
        self._epoch = epoch
        self._yielded_batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this worker.

        It is the epoch, and the number of batches that the worker has yielded.
        """
        return {
            "epoch": self._epoch,
            "done": self._yielded_batches,
            "of": self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a position.

        Raises:
            ValueError: The position is of other files, of another batch size or seed,
                or of another number of ranks.
        """
        if state["of"] != self._identity():
            raise ValueError(
                f"the position is of another data set or job: {state['of']}, and this"
                f" one is {self._identity()}"
            )
        self._epoch = state["epoch"]
        self._yielded_batches = state["done"]

    def _identity(self) -> dict[str, Any]:
        """Returns what must be equal when an iteration is continued at a position."""
        return {
            "rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "ranks": self.ranks,
        }

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of this worker from the present position on."""
        steps = self._steps_of_worker()[self._yielded_batches :]
        if steps:
            begins = self._begins()
            pieces = self._rows(begins[steps.start], begins[steps.stop])
            pending = next(pieces)
            for step in steps:
                size = begins[step + 1] - begins[step]
                while pending.num_rows < size:
                    pending = pa.concat_tables([pending, next(pieces)])
                self._yielded_batches += 1
                yield self._batch(pending.slice(0, size))
                pending = pending.slice(size)
        self._yielded_batches = 0

    def _steps_of_worker(self) -> range:
        """Returns the steps whose batches this worker yields. They are neighbours."""
        info = get_worker_info()
        if info is None:
            return range(len(self))
        begin = len(self) * info.id // info.num_workers
        end = len(self) * (info.id + 1) // info.num_workers
        return range(begin, end)

    def _begins(self) -> list[int]:
        """Returns the row at which each batch of this rank begins, and the end."""
        first = self.num_rows * self.rank // self.ranks
        end = self.num_rows * (self.rank + 1) // self.ranks
        rank_rows = end - first
        steps = len(self)
        begins = []
        for step in range(steps + 1):
            begins.append(first + rank_rows * step // steps)
        return begins

    def _rows(self, begin: int, end: int) -> Iterator[pa.Table]:
        """Yields the rows from ``begin`` to ``end`` in the order of the epoch."""
        order = np.arange(len(self._groups))
        if self.seed is not None:
            random = np.random.default_rng([self.seed, self._epoch])
            order = random.permutation(len(self._groups))
        columns = [*self.ids, *self.dense, self.label]
        place = 0
        for index in order.tolist():
            group = self._groups[index]
            part_begin = max(begin - place, 0)
            part_end = min(end - place, group.rows)
            place += group.rows
            if part_begin >= part_end:
                continue
            with pq.ParquetFile(group.file) as file:
                table = file.read_row_group(
                    group.number,
                    columns=columns,
                    use_threads=False,
                )
            if self.seed is None:
                yield table.slice(part_begin, part_end - part_begin)
            else:
                random = np.random.default_rng([self.seed, self._epoch, index])
                row_order = random.permutation(group.rows)
                yield table.take(row_order[part_begin:part_end])

    def _batch(self, table: pa.Table) -> Batch:
        values_of_columns = []
        lengths_of_columns = []
        for name in self.ids:
            values, lengths = _lists(name, table[name].combine_chunks())
            values_of_columns.append(values)
            lengths_of_columns.append(lengths)
        ids = KeyedJaggedTensor(
            self.ids,
            torch.cat(values_of_columns),
            lengths=torch.cat(lengths_of_columns),
        )
        labels = torch.from_numpy(_numbers(table[self.label]))
        if self.dense:
            numbers = [torch.from_numpy(_numbers(table[name])) for name in self.dense]
            dense = torch.stack(numbers, dim=1)
        else:
            dense = torch.empty(len(labels), 0)
        return Batch(ids, dense, labels)


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    floats = column.cast(pa.float32(), safe=False).fill_null(0)
    return np.array(floats.to_numpy())


def _lists(name: str, column: pa.Array) -> tuple[Tensor, Tensor]:
    """Returns the ids of a column, one row after another, and their numbers.

    The second tensor has the number of ids of each row.
    """
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.list_value_length(column).fill_null(0)
        values = column.flatten()
        if values.null_count:
            raise ValueError(f"column {name!r} has a list with a missing id")
    else:
        lengths = column.is_valid()
        values = column.drop_null()
    ids = _int64(name, values)
    id_counts = np.array(lengths.cast(pa.int64()))
    return torch.from_numpy(ids), torch.from_numpy(id_counts)


def _int64(name: str, values: pa.Array) -> np.ndarray:
    """Returns the ids of a column of integers or strings."""
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
    encoded = values.dictionary_encode()
    words = encoded.dictionary.to_pylist()
    hashes = [xxhash.xxh3_64_intdigest(word.encode()) for word in words]
    ids_of_words = np.array(hashes, np.uint64).view(np.int64)
    return ids_of_words[np.array(encoded.indices)]
