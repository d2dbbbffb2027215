"""Whole tables in a checkpoint of ``torch.distributed.checkpoint`` (torch 2.13), read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchrec_recstore.checkpoint.rows import held_rows
from torchrec_recstore.optim import state_names
from torchrec_recstore.sharders.local_shard import LocalShard
from torchrec_recstore.sharders.table_state import BOOKKEEPING, TableState, set_clocks
from torchrec_recstore.sharders.whole_tensors import owned_positions
from torchrec_recstore.store import Table, insert_all, write_all


class SavedTensors:
    """The tensors of a checkpoint, whose rows can be read range by range.

    Args:
        checkpoint_id: the directory.
    """

    def __init__(self, checkpoint_id: str | Path) -> None:
        self._path = Path(checkpoint_id)
        self._reader = FileSystemReader(checkpoint_id)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self.saved: Mapping[str, Any] = self._metadata.state_dict_metadata
        """What is known of each entry, by its key."""

    def check_files(self) -> None:
        """Refuses a checkpoint that has lost data since it was written.

        Raises:
            ValueError: a file is missing or too short.
        """
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        for name, end in ends.items():
            file = self._path / name
            if not file.exists():
                raise ValueError(f"the checkpoint has lost a file: {file}")
            if file.stat().st_size < end:
                raise ValueError(f"{file} has {file.stat().st_size} bytes, the checkpoint has written {end}")

    def check_whole(self, key: str) -> None:
        """Refuses a tensor of which the checkpoint lacks a piece: it would be read as whatever is in memory.

        Raises:
            ValueError: the message names the key.
        """
        entry = self.saved[key]
        if not isinstance(entry, TensorStorageMetadata):
            return  # it has no shape either
        stored = {(index.offset, index.fqn) for index in self._metadata.storage_data}
        pieces = [chunk for chunk in entry.chunks if (chunk.offsets, key) in stored]
        if sum(chunk.sizes.numel() for chunk in pieces) != entry.size.numel():
            raise ValueError(f"the checkpoint {self._path} lacks pieces of {key}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the tensor under that key; empty where there is none."""
        return tuple(getattr(self.saved.get(key), "size", ()))

    def row_ranges(self, key: str) -> list[range]:
        """The rows that were saved in one piece, piece by piece: reading other ranges reads pieces several times."""
        pieces = {(chunk.offsets[0], chunk.sizes[0]) for chunk in self.saved[key].chunks}
        return [range(begin, begin + size) for begin, size in sorted(pieces) if size]

    def read(self, keys: Mapping[str, str], rows: range | None = None) -> dict[str, Tensor]:
        """``rows`` of several tensors, or all of them.

        Args:
            keys: by the names that the result is to have.
            rows: within each of the tensors.
        """
        into, items = {}, []
        for key in keys.values():
            length, *width = self.shape(key)
            wanted = range(length) if rows is None else rows
            into[key] = torch.empty((len(wanted), *width), dtype=self.saved[key].properties.dtype)
            chunk = ChunkStorageMetadata(torch.Size([wanted.start, *(0 for _ in width)]), into[key].size())
            items += create_read_items_for_chunk_list(key, self.saved[key], [chunk])
        self._reader.read_data(LoadPlan(items), _Into(into)).wait()
        return {name: into[key] for name, key in keys.items()}


class _Into(DefaultLoadPlanner):
    """Tensors to read into, by key."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensors[index.fqn]


class SavedTable:
    """A RecStore table of the model, in a checkpoint.

    Args:
        tensors: of the checkpoint.
        state: of the table in the model.
        weight_key: its weights' key in the checkpoint.
        states_prefix: what the keys of its optimizer state begin with, if it is there.
    """

    def __init__(self, tensors: SavedTensors, state: TableState, weight_key: str, states_prefix: str) -> None:
        self._tensors = tensors
        self._state = state
        self._weights = {"weight": weight_key}
        if f"{weight_key}_id" in tensors.saved:
            self._weights["weight_id"] = f"{weight_key}_id"
        self._states = {key.removeprefix(states_prefix): key for key in tensors.saved if key.startswith(states_prefix)}

    def check(self) -> None:
        """Refuses what :meth:`loaded` could not load.

        Raises:
            ValueError: the table is not there, lacks pieces or has another dim; its state lacks something or has
                another shape.
        """
        what, weight_key = f"table {self._state.name!r}", self._weights["weight"]
        if weight_key not in self._tensors.saved:
            raise ValueError(f"the checkpoint has no RecStore {what} ({weight_key})")
        shape = self._tensors.shape(weight_key)
        if len(shape) != 2 or shape[1] != self._state.dim:
            raise ValueError(f"{what} is of shape {shape} in the checkpoint, its dim in the model is {self._state.dim}")
        rows = shape[:1]
        expected: dict[str, tuple[int, ...]] = {"weight_id": rows}
        if self._states:
            self._state.check_keys(self._states)
            columns = self._tensors.shape(self._states["columns"])
            expected.update(dict.fromkeys(("id", *BOOKKEEPING), rows))
            for key, kind in state_names(self._state.optimizer).items():
                expected[key] = shape if kind == "element" else rows + columns
        for key, stored in {**self._weights, **self._states}.items():
            self._tensors.check_whole(stored)
            if key in expected and self._tensors.shape(stored) != expected[key]:
                raise ValueError(
                    f"{what}: {key} is of shape {self._tensors.shape(stored)} in the checkpoint, not {expected[key]}"
                )

    def loaded(self) -> list[tuple[Table, Table]]:
        """Each of this rank's shards of the table, and a new table with the rows that it is to have.

        Raises:
            ValueError: the optimizer state is of other ids than the weights, or an id is there several times.
        """
        pairs = [(shard.table, replace(shard, table=shard.table.empty_copy())) for shard in self._state.shards]
        wanted = ("columns", "steps", "clock")
        counts = self._tensors.read({key: stored for key, stored in self._states.items() if key in wanted})
        inserted = [0] * len(pairs)
        for rows, states in self._pieces() if pairs else ():
            for number, (_, fresh) in enumerate(pairs):
                inserted[number] += _insert(fresh, rows["weight_id"], rows["weight"])
                if states:
                    write_all(fresh.table, *self._state.rows_of(fresh, {**states, **counts}))
        for count, (_, fresh) in zip(inserted, pairs, strict=True):
            if held_rows(fresh.table) not in (None, count):
                raise ValueError(f"table {self._state.name!r}: the checkpoint has an id several times")
        for _, fresh in pairs if counts else ():
            set_clocks(fresh.table, counts)
        return [(table, fresh.table) for table, fresh in pairs]

    def _pieces(self) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        wanted = ("id", *BOOKKEEPING, *state_names(self._state.optimizer))
        states = {key: stored for key, stored in self._states.items() if key in wanted}
        for part in self._tensors.row_ranges(self._weights.get("weight_id", self._weights["weight"])):
            rows, its_states = self._tensors.read(self._weights, part), self._tensors.read(states, part)
            rows.setdefault("weight_id", torch.arange(part.start, part.stop))
            if its_states and not torch.equal(its_states["id"], rows["weight_id"]):
                what = f"table {self._state.name!r}"
                raise ValueError(f"{what}: the optimizer state in the checkpoint is of other ids than the weights")
            yield rows, its_states


def _insert(shard: LocalShard, ids: Tensor, weights: Tensor) -> int:
    """Inserts the rows that belong to the shard; returns their number."""
    owned = owned_positions(shard, ids)
    columns = shard.table.columns
    insert_all(shard.table, ids[owned], weights[owned, columns.start : columns.stop].to(torch.float32))
    return len(owned)
