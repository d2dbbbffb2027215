"""Loads RecStore tables from checkpoints of ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
from torch.distributed.checkpoint.state_dict_loader import load
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.reader import held_rows, overlap
from torchrec_recstore.checkpoint.stock import fill
from torchrec_recstore.checkpoint.warm_start import (
    RowFunction,
    RowsWithoutState,
    WarmStart,
    named,
)
from torchrec_recstore.optim import StateKind, state_names
from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.sharders.layout import owned_positions
from torchrec_recstore.sharders.model_tables import (
    ModelTable,
    recstore_tables,
    rows_left_out,
    tables_named,
)
from torchrec_recstore.store import Part, Table, TableState
from torchrec_recstore.store.parts import (
    COUNTS_KEY,
    SCORES_KEY,
    frequency_key,
    zero_states,
)
from torchrec_recstore.store.table import check_replaceable, exchange_all
from torchrec_recstore.store.table_state import STATE_KEYS

# The entries of a table's state with a number for each row.
_BY_ROW = ("id", "last_step", COUNTS_KEY, SCORES_KEY)


def load_distributed_checkpoint(
    model: DistributedModelParallel,
    checkpoint_id: str | Path,
    *,
    strict: bool = True,
    optimizer: bool = True,
    tables: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    rows: Mapping[str, RowFunction] | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
) -> None:
    """Loads a checkpoint that ``dcp.save`` or ``dcp.async_save`` wrote, at any world
    size and sharding.

    Collective.

    ``dcp.load`` needs tensors of the right size, and the number of rows of a RecStore
    table is only known from the checkpoint. This function finds the states of the model
    and of its fused optimizer with any keys, nested ones too::

        dcp.save({"model": model.state_dict(), "opt": model.fused_optimizer.state_dict()}, checkpoint_id=path)

    A table that was saved from TorchRec's own kernels can be loaded too: row i becomes
    id i. Its optimizer state has another form and counts as missing;
    ``load_stock_state_dict`` converts it. Every rank reads all pieces of each RecStore
    table of which it has a shard (a RecStore table is saved in pieces of at most 2**18
    rows), and keeps the rows of its shards in new tables. These replace the model's
    tables when every rank has succeeded.

    Args:
        model: The model.
        checkpoint_id: The checkpoint's directory.
        strict: Whether the checkpoint must have all tables and other tensors of the
            model, and the optimizer state of every table whose optimizer has a state.
            If False, missing tables and tensors keep their values, and a missing
            optimizer state starts at zero. Default: True.
        optimizer: Whether the states of the fused optimizer and the numbers of updates
            are loaded. If False, the states of RecStore tables start at zero, and those
            of TorchRec's own tables stay as they are. Default: True.
        tables: See :func:`torchrec_recstore.load_checkpoint`.
        rename: See :func:`torchrec_recstore.load_checkpoint`. A table of another
            collection is named by the path of the collection in the saved model, a dot
            and the table's name.
        rows: See :func:`torchrec_recstore.load_checkpoint`.
        model_key: The key of the model's state in the saved dict, with a dot between
            nested keys, or ``""`` if the state was saved alone. Default: None, the key
            that has most of the model's entries. If several keys have equally many:
            ``model``, then ``""``.
        optimizer_key: The key of the fused optimizer's state. Default: None, the key
            that has most of its entries. If several keys have equally many:
            ``optimizer``.

    Raises:
        FileNotFoundError: There is no checkpoint at ``checkpoint_id``.
        TypeError: ``optimizer``, ``tables``, ``rename`` or ``rows`` is of another type,
            or a function returns no tensor.
        ValueError: The checkpoint lacks a RecStore table of the model or its optimizer
            state, or has no entry of the model; a table has another dim; an optimizer
            state is incomplete or does not fit the rows; several keys have the state; a
            file is missing or too short; or for ``tables``, ``rename`` and ``rows`` see
            :func:`torchrec_recstore.load_checkpoint`. No table has changed.
    """
    warm = WarmStart.checked(optimizer, tables, rename, rows)
    if not (Path(checkpoint_id) / ".metadata").exists():
        raise FileNotFoundError(
            f"there is no checkpoint of torch.distributed.checkpoint at {checkpoint_id}"
        )
    tensors = _SavedTensors(checkpoint_id)
    stock = _StockEntries(model, optimizer=warm.optimizer)
    env = whole_environment()
    stock_keys = stock.state_keys(env)
    loaded: list[tuple[Table, Table]] = []
    with refused_together(env):
        sources = _TableKeys(model, warm)
        prefix = _prefix(
            tensors.saved,
            {*sources.likely_keys, *stock.weights},
            "model_key",
            model_key,
        )
        if prefix is None:
            fix = "load_distributed_state loads the state of an optimizer alone"
            raise ValueError(
                f"the checkpoint {checkpoint_id} has no table and no tensor of the"
                f" model: {fix}"
            )
        saved_keys = _without_prefix(tensors.saved, prefix)
        keys = sources.in_checkpoint(saved_keys, strict=strict)
        state_keys = set(stock_keys)
        for key in [*keys.values(), *sources.likely_keys]:
            state_keys.add(f"{key}.rows.id")
        states_prefix = _prefix(
            tensors.saved,
            state_keys,
            "optimizer_key",
            optimizer_key,
        )
        if warm.tables is None and not strict:
            for table in list(keys):
                # A table that a function makes must be in the checkpoint.
                if keys[table] not in saved_keys and table not in sources.functions:
                    del keys[table]
        tensors.check_files()
        saved_tables = []
        for table, key in keys.items():
            without_state = None
            if not warm.optimizer or table.state.options.frozen:
                without_state = RowsWithoutState(
                    table.name,
                    table.state.optimizer,
                    tensors.saved_dim(prefix + key),
                    table.dim,
                    sources.functions.get(table),
                )
            states_begin = f"{states_prefix}{key}.rows."
            saved_tables.append(
                _SavedTable(tensors, table, prefix + key, states_begin, without_state)
            )
        for saved_table in saved_tables:
            saved_table.check()
        if strict and warm.optimizer:
            saved_states: set[str] = set()
            if states_prefix is not None:
                saved_states = _without_prefix(tensors.saved, states_prefix)
            needed = stock_keys if warm.tables is None else set()
            _check_states(keys, needed, saved_states)
        for saved_table in saved_tables:
            loaded += saved_table.loaded()
        check_replaceable(old for old, _ in loaded)
    if warm.tables is None:
        stock.load(checkpoint_id, prefix, states_prefix, strict=strict)
    exchange_all(loaded)
    for table in keys:
        table.module.recstore_state.forget_replaced(table.config_name)


def _without_prefix(keys: Iterable[str], prefix: str) -> set[str]:
    """Returns the keys that begin with the prefix, without it."""
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


class _StockEntries:
    """The entries of the states of a model and of its fused optimizer that do not
    belong to RecStore tables. DCP loads them into the model's own tensors.
    """

    def __init__(self, model: DistributedModelParallel, *, optimizer: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self.weights: dict[str, Any] = {}
        # The states of TorchRec's own tables, by the keys of their weights. Without
        # optimizer, no states are loaded.
        self._states: dict[str, Any] = {}
        recstore_keys = {table.weight_key for table in recstore_tables(model)}
        with rows_left_out(model):
            for key, value in model.state_dict().items():
                if key not in recstore_keys:
                    self.weights[key] = value
            self._all_states = model.fused_optimizer.state_dict()["state"]
        if optimizer:
            for key, states in self._all_states.items():
                if states and key not in recstore_keys:
                    self._states[key] = states

    def state_keys(self, env: ShardingEnv) -> set[str]:
        """Returns the keys of the optimizer states of all ranks. Collective."""
        keys: set[str] = set()
        for key, states in self._states.items():
            for name in states:
                keys.add(f"{key}.{name}")
        # A rank only has the keys of its shards.
        return set().union(*all_gathered(keys, env))

    def load(
        self,
        checkpoint_id: str | Path,
        prefix: str,
        states_prefix: str | None,
        *,
        strict: bool,
    ) -> None:
        """Loads the entries, whose keys have these prefixes in the checkpoint.

        Collective.
        """
        state: dict[str, Any] = {}
        for key, value in self.weights.items():
            state[prefix + key] = value
        if states_prefix is not None:
            for key, states in self._states.items():
                state[states_prefix + key] = states
        if state:
            load(
                state,
                checkpoint_id=checkpoint_id,
                planner=DefaultLoadPlanner(allow_partial_load=not strict),
            )
        with rows_left_out(self._model):
            self._model.load_state_dict(
                {key: state[prefix + key] for key in self.weights}
            )
            if states_prefix is not None and self._optimizer:
                new_states = dict(self._all_states)
                for key in self._states:
                    new_states[key] = state[states_prefix + key]
                self._model.fused_optimizer.load_state_dict({"state": new_states})


class _TableKeys:
    """The keys of the weights of RecStore tables in a checkpoint, without the prefix of
    the model's state.
    """

    def __init__(self, model: DistributedModelParallel, warm: WarmStart) -> None:
        self._warm = warm
        self._chosen = recstore_tables(model)
        if warm.tables is not None:
            self._chosen = list(tables_named(model, warm.tables).values())
        renamed = tables_named(model, warm.rename.values())
        self._sources: dict[ModelTable, str] = {}
        for source, target in warm.rename.items():
            self._sources[renamed[target]] = source
        self.functions: dict[ModelTable, RowFunction] = {}
        for name, table in tables_named(model, warm.rows).items():
            self.functions[table] = warm.rows[name]
        for table in self._sources:
            if table not in self._chosen:
                raise warm.not_chosen("rename", table.name)
        for table in self.functions:
            if table not in self._chosen:
                raise warm.not_chosen("rows", table.name)
        self.likely_keys = {self._likely_key(table) for table in self._chosen}
        """The keys if tables were renamed within their collections."""

    def in_checkpoint(self, saved: Set[str], *, strict: bool) -> dict[ModelTable, str]:
        """Returns the key of each table that is loaded.

        Raises ValueError if a table that is renamed is not in ``saved``, or its name
        belongs to several tables; or if a table that must be loaded, which with
        ``strict`` is every table, has no source because of a renaming.
        """
        keys = {}
        for table, source in self._sources.items():
            keys[table] = self._renamed_key(table, source, saved)
        renamed_keys = set(keys.values())
        for table in self._chosen:
            if table in keys:
                continue
            if table.weight_key in renamed_keys:
                if strict or self._warm.tables is not None or table in self.functions:
                    raise self._warm.without_source(table.name)
                continue
            keys[table] = table.weight_key
        return keys

    def _likely_key(self, table: ModelTable) -> str:
        source = self._sources.get(table)
        return table.weight_key if source is None else table.key_of(source)

    def _renamed_key(self, table: ModelTable, source: str, saved: Set[str]) -> str:
        if table.key_of(source) in saved:
            return table.key_of(source)
        keys_by_name: dict[str, list[str]] = {}
        for key in sorted(saved):
            for name in _table_names(key):
                keys_by_name.setdefault(name, []).append(key)
        matching_keys = keys_by_name.get(source, [])
        if not matching_keys:
            raise ValueError(
                f"rename: the checkpoint has no table {source!r}; it has"
                f" {named(keys_by_name)}. The keys of rename are names in the"
                " checkpoint, and the values are names in the model"
            )
        if len(matching_keys) > 1:
            raise ValueError(
                f"rename: the checkpoint has several tables {source!r}: name one of"
                f" {', '.join(matching_keys)} by the path of its collection, a dot and"
                " its name"
            )
        return matching_keys[0]


def _table_names(key: str) -> set[str]:
    """Returns the name and the full name of the table that has its weights under this
    key; no names if the key is not of the weights of a table.
    """
    names: set[str] = set()
    for container in (".embedding_bags.", ".embeddings."):
        path, _, parameter = f".{key}".rpartition(container)
        name = parameter.removesuffix(".weight")
        if parameter.endswith(".weight") and "." not in name:
            path = path.removeprefix(".").removesuffix("._embedding_bag_collection")
            names.add(name)
            names.add(f"{path}.{name}" if path else name)
    return names


def load_distributed_state(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | Path,
    **arguments: Any,
) -> None:
    """Loads a checkpoint into a ``state_dict``, as
    ``torch.distributed.checkpoint.load`` does.

    Collective.

    It replaces ``dcp.load`` where a framework calls it, with a load planner of its own
    or with DCP's. The entries of RecStore tables become plain tensors of the saved
    sizes, so that every rank holds all rows of the state until it has loaded it;
    :func:`load_distributed_checkpoint` needs less memory. Either the model or the
    checkpoint can have TorchRec's own tables: row i is id i, an id without a row reads
    as zeros, and optimizer states are not converted. Raises ValueError if one of these
    tables in ``state_dict`` has no row for an id of the checkpoint.

    Args:
        state_dict: The state of a model or of an optimizer, or a dict with such states.
            It is changed in place.
        checkpoint_id: The checkpoint's directory.
        arguments: The other arguments of ``torch.distributed.checkpoint.load``.
    """
    reader = arguments.get("storage_reader") or FileSystemReader(checkpoint_id)
    saved = reader.read_metadata().state_dict_metadata
    stock_tables = list(_sized(state_dict, "", saved))
    load(state_dict, checkpoint_id=checkpoint_id, **arguments)
    for module_state, key, value in stock_tables:
        ids = module_state.pop(f"{key}_id")
        rows = module_state[key]
        table = torch.zeros(value.size())
        module_state[key] = value
        outside = int(((ids < 0) | (ids >= len(table))).sum())
        if outside:
            raise ValueError(
                f"{key}: the checkpoint has {outside} ids outside [0, {len(table)}),"
                " and row i is id i"
            )
        table[ids] = rows.float()
        fill(value, table)


def _sized(
    state: dict[str, Any],
    prefix: str,
    saved: Mapping[str, Any],
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Gives the entries of RecStore tables the saved keys and sizes.

    Yields the entries of TorchRec's own tables that RecStore tables replace: the dict
    that has the entry, its key, and its value.
    """
    for key, value in list(state.items()):
        name = prefix + key
        # the optimizer state of a table
        if isinstance(value, dict) and f"{name}.columns" in saved:
            states = {}
            for saved_key, entry in saved.items():
                if saved_key.startswith(f"{name}."):
                    states[saved_key.removeprefix(f"{name}.")] = _empty(entry)
            state[key] = states
        elif isinstance(value, dict):
            yield from _sized(value, f"{name}.", saved)
        elif name in saved and (f"{key}_rows" in state or f"{name}_id" in saved):
            if state.pop(f"{key}_rows", None) is None:
                yield state, key, value
            state.pop(f"{key}_id", None)
            state[key] = _empty(saved[name])
            if f"{name}_id" in saved:
                state[f"{key}_id"] = _empty(saved[f"{name}_id"])


def _empty(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


class _SavedTensors:
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
            file_bytes[name] = max(file_bytes.get(name, 0), end)
        for name, saved_bytes in file_bytes.items():
            file = self._path / name
            if not file.exists():
                raise ValueError(f"the checkpoint has lost a file: {file}")
            if file.stat().st_size < saved_bytes:
                raise ValueError(
                    f"{file} has {file.stat().st_size} bytes, and had {saved_bytes}"
                    " when it was saved"
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
        """Returns the shape of the tensor with this key; an empty shape if there is no
        such tensor.
        """
        return tuple(getattr(self.saved.get(key), "size", ()))

    def saved_dim(self, key: str) -> int:
        """Returns the number of columns of the tensor with this key; 0 if there is no
        such tensor, or if it has no columns.
        """
        shape = self.shape(key)
        return shape[1] if len(shape) > 1 else 0

    def row_ranges(self, key: str) -> list[range]:
        """Returns the range of rows of each saved piece.

        Reads of other ranges would read some pieces repeatedly.
        """
        pieces: set[tuple[int, int]] = set()
        for chunk in self.saved[key].chunks:
            pieces.add((chunk.offsets[0], chunk.sizes[0]))
        return [range(begin, begin + size) for begin, size in sorted(pieces) if size]

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
            n_rows, *width = self.shape(key)
            read_rows = range(n_rows) if rows is None else rows
            tensors[key] = torch.empty(
                (len(read_rows), *width),
                dtype=self.saved[key].properties.dtype,
            )
            offsets = torch.Size([read_rows.start, *[0] * len(width)])
            chunk = ChunkStorageMetadata(offsets, tensors[key].size())
            items += create_read_items_for_chunk_list(key, self.saved[key], [chunk])
        self._reader.read_data(LoadPlan(items), _Into(tensors)).wait()
        return {name: tensors[key] for name, key in keys.items()}


class _Into(DefaultLoadPlanner):
    """A load planner that reads into given tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensors[index.fqn]


class _SavedTable:
    """The data in a checkpoint for a RecStore table of the model, which is loaded into
    new tables.
    """

    def __init__(
        self,
        tensors: _SavedTensors,
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
        if f"{weight_key}_id" in tensors.saved:
            self._weights["weight_id"] = f"{weight_key}_id"
        self._states: dict[str, str] = {}
        for key in tensors.saved:
            if not key.startswith(states_begin):
                continue
            name = key.removeprefix(states_begin)
            # Without the states of the optimizer, the clocks and stamps remain.
            if without_state is None or name in (*_BY_ROW, *STATE_KEYS):
                self._states[name] = key

    def check(self) -> None:
        """Refuses a table if the checkpoint lacks a part of it, or if the dim or the
        shape of a state differs.
        """
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
        for name, key in {**self._weights, **self._states}.items():
            self._tensors.check_whole(key)
            saved_shape = self._tensors.shape(key)
            if name in expected_shapes and saved_shape != expected_shapes[name]:
                raise ValueError(
                    f"{label}: {name} is of shape {saved_shape} in the checkpoint, not"
                    f" {expected_shapes[name]}"
                )

    def _expected_shapes(
        self,
        weight_shape: tuple[int, ...],
    ) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors of a table whose weights have this shape,
        after a check that no state is missing.
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
            shapes[name] = weight_shape if kind == "element" else by_row + column_shards
        return shapes

    def loaded(self) -> list[tuple[Table, Table]]:
        """Reads the table, and returns each of this rank's shards with a new table that
        holds the shard's new rows.
        """
        pairs = [(shard, shard.table.empty_copy()) for shard in self._state.shards]
        state_keys = {}
        for name, key in self._states.items():
            if name in STATE_KEYS:
                state_keys[name] = key
        state = TableState.from_tensors(self._tensors.read(state_keys))
        if self._without_state is not None:
            state = self._without_state.state(state)
        for shard, fresh in pairs:
            fresh.set_state(state.owned(shard.owned))
        written_rows = [0] * len(pairs)
        for parts in self._parts() if pairs else ():
            for number, (shard, fresh) in enumerate(pairs):
                positions = owned_positions(shard, parts[0].ids)
                fresh.write(self._shard_rows(parts, positions, fresh.columns))
                written_rows[number] += len(positions)
        for n_written, (_, fresh) in zip(written_rows, pairs, strict=True):
            if held_rows(fresh) not in (None, n_written):
                raise ValueError(
                    f"table {self._state.name!r}: the checkpoint has an id several"
                    " times"
                )
        return [(shard.table, fresh) for shard, fresh in pairs]

    def _shard_rows(
        self,
        parts: Sequence[Part],
        positions: Tensor,
        columns: range,
    ) -> Part:
        """Returns the rows at some positions of the parts, for a shard with these
        columns.
        """
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
        """Yields the rows piece by piece: for each column shard that was saved, a part
        with the same ids.
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
        starts = [0]
        if state_keys and self._without_state is None:
            columns_key = {"columns": self._states["columns"]}
            starts = self._tensors.read(columns_key)["columns"].tolist()
        shard_columns = [range(*ends) for ends in pairwise([*starts, self._dim])]
        ids_key = self._weights.get("weight_id", self._weights["weight"])
        for piece in self._tensors.row_ranges(ids_key):
            rows = self._tensors.read(self._weights, piece)
            states = self._tensors.read(state_keys, piece)
            ids = rows.get("weight_id", torch.arange(piece.start, piece.stop))
            if states and not torch.equal(states["id"], ids):
                raise ValueError(
                    f"table {self._state.name!r}: the optimizer state in the checkpoint"
                    " is of other ids than the weights"
                )
            if not state_keys:  # one column shard, whose state starts at zero
                states = zero_states(self._state.optimizer, len(ids), self._dim)
            parts = []
            for number, columns in enumerate(shard_columns):
                parts.append(self._part(ids, number, columns, rows["weight"], states))
            yield parts

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
                rows[name] = states[name].view(len(ids), -1)[:, number]
        return Part(ids, columns, rows)


def _prefix(
    saved: Iterable[str],
    keys: set[str],
    argument: str,
    user_key: str | None,
) -> str | None:
    """Finds the prefix with which a checkpoint has most of the model's keys; None if it
    has none of them.

    Dots join the keys of nested dicts. ``user_key`` is the value of ``argument``, which
    is ``"model_key"`` or ``"optimizer_key"``.
    """
    if argument == "model_key":
        owner = "the model"
        preferred: tuple[str, ...] = ("model.", "")
    else:
        owner = "its fused optimizer"
        preferred = ("optimizer.state.",)
    counts = _prefix_counts(saved, keys)
    if user_key is None:
        highest = max(counts.values(), default=0)
        candidates = [prefix for prefix, count in counts.items() if count == highest]
    else:
        user_prefixes = (f"{user_key}." if user_key else "", f"{user_key}.state.")
        candidates = [prefix for prefix in counts if prefix in user_prefixes]
        if not candidates:
            raise ValueError(
                f"{argument}={user_key!r}: the checkpoint has {owner} under the keys"
                f" {_named(counts)}"
            )
    for prefix in preferred:
        if prefix in candidates:
            return prefix
    if len(candidates) > 1:
        raise ValueError(
            f"the checkpoint has {owner} under the keys {_named(candidates)}: set"
            f" {argument} to one of them"
        )
    return candidates[0] if candidates else None


def _prefix_counts(saved: Iterable[str], keys: set[str]) -> Counter[str]:
    """Returns how many of ``keys`` the checkpoint has with each prefix."""
    counts: Counter[str] = Counter()
    for saved_key in saved:
        names = saved_key.split(".")
        for depth in range(len(names)):
            key = ".".join(names[depth:])
            if key in keys:
                counts[saved_key.removesuffix(key)] += 1
    return counts


def _named(prefixes: Iterable[str]) -> str:
    """Returns the keys of the user's dict that have these prefixes, for an error."""
    keys = []
    for prefix in prefixes:
        keys.append(repr(prefix.removesuffix(".").removesuffix(".state")))
    return ", ".join(sorted(keys)) or "no key"


def _check_states(
    keys: Mapping[ModelTable, str],
    stock_keys: set[str],
    saved_states: set[str],
) -> None:
    """Refuses a checkpoint that lacks the state of a table whose optimizer has one."""
    fix = (
        "save model.fused_optimizer.state_dict() with the model, or let it start at"
        " zero with strict=False"
    )
    for table, weight_key in keys.items():
        has_states = bool(state_names(table.state.optimizer))
        if has_states and f"{weight_key}.rows.id" not in saved_states:
            raise ValueError(
                "the checkpoint has no optimizer state of RecStore table"
                f" {table.name!r}: {fix}"
            )
    for key in sorted(stock_keys - saved_states):
        raise ValueError(f"the checkpoint has no optimizer state {key}: {fix}")
