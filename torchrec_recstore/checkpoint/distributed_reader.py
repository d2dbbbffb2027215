"""Reads RecStore tables from checkpoints of ``torch.distributed.checkpoint`` (DCP).

Tests: tests/checkpoint/test_distributed.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)

from torchrec_recstore.checkpoint.reader import held_rows, overlap
from torchrec_recstore.checkpoint.warm_start import RowsWithoutState
from torchrec_recstore.optim import StateKind, state_names
from torchrec_recstore.sharders.layout import LocalShard, owned_positions
from torchrec_recstore.sharders.model_tables import ModelTable
from torchrec_recstore.store import Part, Table, TableState
from torchrec_recstore.store.parts import (
    COUNTS_KEY,
    SCORES_KEY,
    frequency_key,
    zero_states,
)
from torchrec_recstore.store.table_state import STATE_KEYS

# The entries of a table's state with a number for each row.
_BY_ROW = ("id", "last_step", COUNTS_KEY, SCORES_KEY)


class SavedTensors:
    """A reader of the tensors of a checkpoint of DCP, which can read ranges of rows."""

    def __init__(self, checkpoint_id: str | Path) -> None:
        self._path = Path(checkpoint_id)
        self._reader = FileSystemReader(checkpoint_id)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        # The metadata of each entry, by its key.
        self.saved: Mapping[str, Any] = self._metadata.state_dict_metadata

    def check_files(self) -> None:
        """Refuses a checkpoint with a file that is missing or too short."""
        file_bytes: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            end = stored.offset + stored.length
            name = stored.relative_path
            earlier_end = file_bytes.get(name, 0)
            file_bytes[name] = max(earlier_end, end)

        for name, saved_bytes in file_bytes.items():
            file = self._path / name
            if not file.exists():
                raise ValueError(f"the checkpoint has lost a file: {file}")
            size = file.stat().st_size
            if size < saved_bytes:
                raise ValueError(
                    f"{file} has {size} bytes, and had {saved_bytes} when it was saved"
                )

    def check_whole(self, key: str) -> None:
        """Refuses a tensor of which the checkpoint lacks a piece.

        DCP would leave that piece uninitialized.
        """
        entry = self.saved[key]
        if not isinstance(entry, TensorStorageMetadata):
            return  # The check of its shape refuses what is not a tensor.
        stored = {(index.offset, index.fqn) for index in self._metadata.storage_data}
        stored_elements = 0
        for chunk in entry.chunks:
            if (chunk.offsets, key) in stored:
                stored_elements += chunk.sizes.numel()
        if stored_elements != entry.size.numel():
            raise ValueError(f"the checkpoint {self._path} lacks pieces of {key}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of the tensor with this key; () if there is none."""
        return tuple(getattr(self.saved.get(key), "size", ()))

    def saved_dim(self, key: str) -> int:
        """Returns the number of columns of the tensor with this key.

        It is 0 if there is no such tensor, or if it has no columns.
        """
        shape = self.shape(key)
        if len(shape) < 2:
            return 0
        return shape[1]

    def row_ranges(self, key: str) -> list[range]:
        """Returns the range of rows of each saved piece.

        Reads of other ranges would read some pieces repeatedly.
        """
        ranges: set[range] = set()
        for chunk in self.saved[key].chunks:
            begin = chunk.offsets[0]
            size = chunk.sizes[0]
            if size:
                ranges.add(range(begin, begin + size))
        return sorted(ranges, key=lambda rows: (rows.start, rows.stop))

    def read(
        self,
        keys: Mapping[str, str],
        rows: range | None = None,
    ) -> dict[str, Tensor]:
        """Reads the same range of rows of several tensors.

        Args:
            keys: The keys of the tensors, by their names in the result.
            rows: The range of rows. Default: None, all rows.
        """
        tensors: dict[str, Tensor] = {}
        items = []
        for key in keys.values():
            saved = self.saved[key]
            n_rows, *width = self.shape(key)
            read_rows = range(n_rows) if rows is None else rows
            tensor = torch.empty(
                (len(read_rows), *width),
                dtype=saved.properties.dtype,
            )
            tensors[key] = tensor

            first_columns = [0] * len(width)
            chunk = ChunkStorageMetadata(
                offsets=torch.Size([read_rows.start, *first_columns]),
                sizes=tensor.size(),
            )
            items += create_read_items_for_chunk_list(key, saved, [chunk])

        pending = self._reader.read_data(LoadPlan(items), _Into(tensors))
        pending.wait()
        return {name: tensors[key] for name, key in keys.items()}


class _Into(DefaultLoadPlanner):
    """A load planner that reads into given tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensors[index.fqn]


class SavedTable:
    """The data in a checkpoint for a RecStore table of the model."""

    def __init__(
        self,
        tensors: SavedTensors,
        table: ModelTable,
        weight_key: str,
        states_begin: str,
        without_state: RowsWithoutState | None,
    ) -> None:
        self._tensors = tensors
        self._state = table.state
        self._without_state = without_state
        # The number of columns that the saved table must have.
        self._dim = table.dim
        self._state_names: dict[str, StateKind] = {}
        if without_state is None:
            self._state_names = state_names(table.state.optimizer)
        elif without_state.function is not None:
            self._dim = without_state.saved_dim

        self._weights = {"weight": weight_key}
        id_key = f"{weight_key}_id"
        if id_key in tensors.saved:
            self._weights["weight_id"] = id_key
        self._states: dict[str, str] = {}
        for key in tensors.saved:
            if not key.startswith(states_begin):
                continue
            name = key.removeprefix(states_begin)
            # Without the states of the optimizer, the clocks and stamps remain.
            if without_state is None or name in (*_BY_ROW, *STATE_KEYS):
                self._states[name] = key

    def check(self) -> None:
        """Refuses a table that lacks a part, or that has another dim or shape."""
        label = f"table {self._state.name!r}"
        weight_key = self._weights["weight"]
        if weight_key not in self._tensors.saved:
            raise ValueError(f"the checkpoint has no RecStore {label} ({weight_key})")
        shape = self._tensors.shape(weight_key)
        if len(shape) != 2 or shape[1] != self._dim:
            raise ValueError(
                f"{label} is of shape {shape} in the checkpoint, its dim in the model"
                f" is {self._state.dim}: a function in rows={{...}}, with"
                " optimizer=False, can make rows of the other dim"
            )
        expected_shapes = self._expected_shapes(shape)
        keys = {**self._weights, **self._states}
        for name, key in keys.items():
            self._tensors.check_whole(key)
            saved_shape = self._tensors.shape(key)
            expected_shape = expected_shapes.get(name, saved_shape)
            if saved_shape != expected_shape:
                raise ValueError(
                    f"{label}: {name} is of shape {saved_shape} in the checkpoint, not"
                    f" {expected_shape}"
                )

    def _expected_shapes(
        self,
        weight_shape: tuple[int, ...],
    ) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors of a table with these weights.

        No state may be missing.
        """
        by_row = weight_shape[:1]
        shapes = {"weight_id": by_row}
        if not self._states:
            return shapes

        column_shards: tuple[int, ...] = ()
        if self._without_state is None:
            self._state.check_keys(self._states)
            column_shards = self._tensors.shape(self._states["columns"])
        else:
            self._state.check_bookkeeping(self._states)

        for name in _BY_ROW:
            shapes[name] = by_row
        for name, kind in self._state_names.items():
            if kind == "element":
                shapes[name] = weight_shape
            else:
                shapes[name] = by_row + column_shards
        return shapes

    def loaded(self) -> list[tuple[Table, Table]]:
        """Reads the rows, and returns each shard with a new table that holds them."""
        pairs = [(shard, shard.table.empty_copy()) for shard in self._state.shards]
        state_keys = {}
        for name, key in self._states.items():
            if name in STATE_KEYS:
                state_keys[name] = key
        state_tensors = self._tensors.read(state_keys)
        state = TableState.from_tensors(state_tensors)
        if self._without_state is not None:
            state = self._without_state.state(state)
        for shard, fresh in pairs:
            fresh.set_state(state.owned(shard.owned))
        if pairs:
            self._write_rows(pairs)
        return [(shard.table, fresh) for shard, fresh in pairs]

    def _write_rows(self, pairs: Sequence[tuple[LocalShard, Table]]) -> None:
        """Writes the rows of each shard to its new table.

        Raises ValueError if an id comes several times.
        """
        written_rows = [0] * len(pairs)
        for parts in self._parts():
            ids = parts[0].ids
            for number, (shard, fresh) in enumerate(pairs):
                positions = owned_positions(shard, ids)
                rows = self._shard_rows(parts, positions, fresh.columns)
                fresh.write(rows)
                written_rows[number] += len(positions)

        for n_written, (_, fresh) in zip(written_rows, pairs, strict=True):
            if held_rows(fresh) not in (None, n_written):
                raise ValueError(
                    f"table {self._state.name!r}: the checkpoint has an id several"
                    " times"
                )

    def _shard_rows(
        self,
        parts: Sequence[Part],
        positions: Tensor,
        columns: range,
    ) -> Part:
        """Returns the rows at some positions, for a shard with these columns."""
        source_columns = columns
        if self._without_state is not None:
            source_columns = self._without_state.source_columns(columns)
        pieces = []
        for part in parts:
            if overlap(part.columns, source_columns):
                pieces.append(part.take(positions))
        rows = Part.joined(pieces, source_columns)
        if self._without_state is None:
            return rows
        return self._without_state.part(rows, columns)

    def _parts(self) -> Iterator[list[Part]]:
        """Yields the rows in pieces: for each saved column shard a part.

        The parts of a piece have the same ids.
        """
        # Frequencies of the other kind than the table's are not read.
        names = (
            "id",
            "last_step",
            frequency_key(self._state.options),
            *self._state_names,
        )
        state_keys = {}
        for name, key in self._states.items():
            if name in names:
                state_keys[name] = key

        shard_columns = self._column_shards(has_state=bool(state_keys))
        ids_key = self._weights.get("weight_id", self._weights["weight"])
        for piece in self._tensors.row_ranges(ids_key):
            rows = self._tensors.read(self._weights, piece)
            states = self._tensors.read(state_keys, piece)
            row_numbers = torch.arange(piece.start, piece.stop)
            ids = rows.get("weight_id", row_numbers)
            if states and not torch.equal(states["id"], ids):
                raise ValueError(
                    f"table {self._state.name!r}: the optimizer state in the checkpoint"
                    " is of other ids than the weights"
                )
            if not state_keys:  # one column shard, whose state starts at zero
                states = zero_states(
                    self._state.optimizer,
                    len(ids),
                    self._dim,
                )

            parts = []
            for number, columns in enumerate(shard_columns):
                part = self._part(
                    ids,
                    number,
                    columns,
                    rows["weight"],
                    states,
                )
                parts.append(part)
            yield parts

    def _column_shards(self, *, has_state: bool) -> list[range]:
        """Returns the columns of each saved column shard; one shard without a state."""
        starts = [0]
        if has_state and self._without_state is None:
            columns_key = {"columns": self._states["columns"]}
            saved = self._tensors.read(columns_key)
            starts = saved["columns"].tolist()
        shards = []
        for start, end in pairwise([*starts, self._dim]):
            shards.append(range(start, end))
        return shards

    def _part(
        self,
        ids: Tensor,
        number: int,
        columns: range,
        weight: Tensor,
        states: Mapping[str, Tensor],
    ) -> Part:
        """Returns the columns of the column shard of this number."""
        cut = slice(columns.start, columns.stop)
        frequencies = states.get(frequency_key(self._state.options))
        if frequencies is None:
            frequencies = torch.zeros_like(ids)
        rows = {
            "weight": weight[:, cut].to(torch.float32),
            "last_step": states["last_step"],
            "frequency": frequencies,
        }
        for name, kind in self._state_names.items():
            if kind == "element":
                rows[name] = states[name][:, cut]
            else:
                by_column_shard = states[name].view(len(ids), -1)
                rows[name] = by_column_shard[:, number]
        return Part(ids, columns, rows)
