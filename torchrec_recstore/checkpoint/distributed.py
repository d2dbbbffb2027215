"""Loads RecStore tables from checkpoints of ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
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

from torchrec_recstore.checkpoint.reader import held_rows, overlap
from torchrec_recstore.checkpoint.stock import fill
from torchrec_recstore.checkpoint.warm_start import (
    RowFunction,
    RowsWithoutState,
    WarmStart,
    named,
)
from torchrec_recstore.optim import state_names
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
    every_table = recstore_tables(model)
    mine = {table.weight_key for table in every_table}
    env = whole_environment()
    with rows_left_out(model):
        weights = {
            key: value for key, value in model.state_dict().items() if key not in mine
        }
        own_states = model.fused_optimizer.state_dict()["state"]
    stock_states: dict[str, Any] = {}
    if warm.optimizer:
        stock_states = {
            key: states
            for key, states in own_states.items()
            if key not in mine and states
        }
    of_stock = {
        f"{key}.{name}" for key, states in stock_states.items() for name in states
    }
    # A rank only has the keys of its shards.
    of_stock = {key for keys in all_gathered(of_stock, env) for key in keys}
    loaded: list[tuple[Table, Table]] = []
    with refused_together(env):
        sources = _TableKeys(model, warm)
        prefix = _prefix(
            tensors.saved, {*sources.likely_keys, *weights}, "model_key", model_key
        )
        if prefix is None:
            fix = "load_distributed_state loads the state of an optimizer alone"
            raise ValueError(
                f"the checkpoint {checkpoint_id} has no table and no tensor of the"
                f" model: {fix}"
            )
        saved_keys = {
            key.removeprefix(prefix) for key in tensors.saved if key.startswith(prefix)
        }
        keys = sources.in_checkpoint(saved_keys, strict=strict)
        of_tables = {f"{key}.rows.id" for key in [*keys.values(), *sources.likely_keys]}
        states_prefix = _prefix(
            tensors.saved, of_tables | of_stock, "optimizer_key", optimizer_key
        )
        if warm.tables is None and not strict:
            # A table that a function makes must be in the checkpoint.
            keys = {
                t: key
                for t, key in keys.items()
                if prefix + key in tensors.saved or t in sources.functions
            }
        tensors.check_files()
        saved_tables = []
        for table, key in keys.items():
            conversion = None
            if not warm.optimizer or table.state.options.frozen:
                saved_dim = (*tensors.shape(prefix + key), 0, 0)[1]
                function = sources.functions.get(table)
                conversion = RowsWithoutState(
                    table.name, table.state.optimizer, saved_dim, table.dim, function
                )
            saved_tables.append(
                _SavedTable(
                    tensors,
                    table,
                    prefix + key,
                    f"{states_prefix}{key}.rows.",
                    conversion,
                )
            )
        for saved in saved_tables:
            saved.check()
        if strict and warm.optimizer:
            found = [
                key
                for key in tensors.saved
                if states_prefix is not None and key.startswith(states_prefix)
            ]
            names = {key.removeprefix(states_prefix or "") for key in found}
            _check_states(keys, of_stock if warm.tables is None else (), names)
        for saved in saved_tables:
            loaded += saved.loaded()
        check_replaceable(old for old, _ in loaded)
    if warm.tables is None:
        # DCP loads all entries except the RecStore tables, into the model's own
        # tensors.
        state: dict[str, Any] = {prefix + key: value for key, value in weights.items()}
        if states_prefix is not None:
            state |= {
                states_prefix + key: states for key, states in stock_states.items()
            }
        if state:
            load(
                state,
                checkpoint_id=checkpoint_id,
                planner=DefaultLoadPlanner(allow_partial_load=not strict),
            )
        with rows_left_out(model):
            model.load_state_dict({key: state[prefix + key] for key in weights})
            if states_prefix is not None and warm.optimizer:
                new = {key: state[states_prefix + key] for key in stock_states}
                model.fused_optimizer.load_state_dict({"state": {**own_states, **new}})
    exchange_all(loaded)
    for table in keys:
        table.module.recstore_state.forget_replaced(table.config_name)


class _TableKeys:
    """The keys of the weights of RecStore tables in a checkpoint, without the prefix of
    the model's state.
    """

    def __init__(self, model: DistributedModelParallel, warm: WarmStart) -> None:
        self._warm = warm
        self._chosen = recstore_tables(model)
        if warm.tables is not None:
            self._chosen = list(tables_named(model, warm.tables).values())
        sources = {target: source for source, target in warm.rename.items()}
        renamed = tables_named(model, warm.rename.values())
        self._sources = {table: sources[target] for target, table in renamed.items()}
        self.functions = {
            table: warm.rows[name]
            for name, table in tables_named(model, warm.rows).items()
        }
        for argument, tables in (("rename", self._sources), ("rows", self.functions)):
            for table in tables:
                if table not in self._chosen:
                    raise warm.not_chosen(argument, table.name)
        self.likely_keys = {self._likely_key(table) for table in self._chosen}
        """The keys if tables were renamed within their collections."""

    def in_checkpoint(self, saved: Set[str], *, strict: bool) -> dict[ModelTable, str]:
        """Returns the key of each table that is loaded.

        Raises ValueError if a table that is renamed is not in ``saved``, or its name
        belongs to several tables; or if a table that must be loaded, which with
        ``strict`` is every table, has no source because of a renaming.
        """
        keys = {
            table: self._renamed_key(table, source, saved)
            for table, source in self._sources.items()
        }
        taken = set(keys.values())
        for table in self._chosen:
            if table in keys:
                continue
            if table.weight_key in taken:
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
        known: dict[str, list[str]] = {}
        for key in sorted(saved):
            for container in (".embedding_bags.", ".embeddings."):
                path, _, rest = f".{key}".rpartition(container)
                name = rest.removesuffix(".weight")
                if rest.endswith(".weight") and "." not in name:
                    path = path.removeprefix(".").removesuffix(
                        "._embedding_bag_collection"
                    )
                    full_name = f"{path}.{name}" if path else name
                    for known_name in {name, full_name}:
                        known.setdefault(known_name, []).append(key)
        matching = known.get(source, [])
        if not matching:
            raise ValueError(
                f"rename: the checkpoint has no table {source!r}; it has"
                f" {named(known)}. The keys of rename are names in the checkpoint, and"
                " the values are names in the model"
            )
        if len(matching) > 1:
            raise ValueError(
                f"rename: the checkpoint has several tables {source!r}: name one of"
                f" {', '.join(matching)} by the path of its collection, a dot and its"
                " name"
            )
        return matching[0]


def load_distributed_state(
    state_dict: dict[str, Any], *, checkpoint_id: str | Path, **arguments: Any
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
    saved = (
        (arguments.get("storage_reader") or FileSystemReader(checkpoint_id))
        .read_metadata()
        .state_dict_metadata
    )
    stock = list(_sized(state_dict, "", saved))
    load(state_dict, checkpoint_id=checkpoint_id, **arguments)
    for of_module, key, value in stock:
        ids, rows, table = (
            of_module.pop(f"{key}_id"),
            of_module[key],
            torch.zeros(value.size()),
        )
        of_module[key] = value
        if outside := int(((ids < 0) | (ids >= len(table))).sum()):
            raise ValueError(
                f"{key}: the checkpoint has {outside} ids outside [0, {len(table)}),"
                " and row i is id i"
            )
        table[ids] = rows.float()
        fill(value, table)


def _sized(
    state: dict[str, Any], prefix: str, saved: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Gives the entries of RecStore tables the saved keys and sizes.

    Yields the ones that TorchRec's own tables had.
    """

    def empty(entry: TensorStorageMetadata) -> Tensor:
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    for key, value in list(state.items()):
        name = prefix + key
        # the optimizer state of a table
        if isinstance(value, dict) and f"{name}.columns" in saved:
            state[key] = {
                k[len(name) + 1 :]: empty(saved[k])
                for k in saved
                if k.startswith(f"{name}.")
            }
        elif isinstance(value, dict):
            yield from _sized(value, f"{name}.", saved)
        elif name in saved and (f"{key}_rows" in state or f"{name}_id" in saved):
            if state.pop(f"{key}_rows", None) is None:
                yield state, key, value
            state.pop(f"{key}_id", None)
            state |= {
                key + end: empty(saved[name + end])
                for end in ("", "_id")
                if name + end in saved
            }


class _SavedTensors:
    """A reader of the tensors of a checkpoint of DCP, which can read ranges of rows."""

    def __init__(self, checkpoint_id: str | Path) -> None:
        self._path = Path(checkpoint_id)
        self._reader = FileSystemReader(checkpoint_id)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        # of each entry, by key
        self.saved: Mapping[str, Any] = self._metadata.state_dict_metadata

    def check_files(self) -> None:
        """Refuses a checkpoint with a file that is missing or too short."""
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            ends[stored.relative_path] = max(
                ends.get(stored.relative_path, 0), stored.offset + stored.length
            )
        for name, end in ends.items():
            file = self._path / name
            if not file.exists():
                raise ValueError(f"the checkpoint has lost a file: {file}")
            if file.stat().st_size < end:
                raise ValueError(
                    f"{file} has {file.stat().st_size} bytes, and had {end} when it was"
                    " saved"
                )

    def check_whole(self, key: str) -> None:
        """Refuses a tensor of which the checkpoint lacks a piece.

        DCP would leave that piece uninitialized.
        """
        entry = self.saved[key]
        if not isinstance(entry, TensorStorageMetadata):
            return  # The check of its shape refuses what is not a tensor.
        stored = {(index.offset, index.fqn) for index in self._metadata.storage_data}
        pieces = [chunk for chunk in entry.chunks if (chunk.offsets, key) in stored]
        if sum(chunk.sizes.numel() for chunk in pieces) != entry.size.numel():
            raise ValueError(f"the checkpoint {self._path} lacks pieces of {key}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of the tensor with this key; an empty shape if there is no
        such tensor.
        """
        return tuple(getattr(self.saved.get(key), "size", ()))

    def row_ranges(self, key: str) -> list[range]:
        """Returns the range of rows of each saved piece.

        Reads of other ranges would read some pieces repeatedly.
        """
        pieces = {
            (chunk.offsets[0], chunk.sizes[0]) for chunk in self.saved[key].chunks
        }
        return [range(begin, begin + size) for begin, size in sorted(pieces) if size]

    def read(
        self, keys: Mapping[str, str], rows: range | None = None
    ) -> dict[str, Tensor]:
        """Reads the same range of rows, or all rows, of several tensors, whose keys are
        given by their names.
        """
        into, items = {}, []
        for key in keys.values():
            length, *width = self.shape(key)
            wanted = range(length) if rows is None else rows
            into[key] = torch.empty(
                (len(wanted), *width), dtype=self.saved[key].properties.dtype
            )
            chunk = ChunkStorageMetadata(
                torch.Size([wanted.start, *(0 for _ in width)]), into[key].size()
            )
            items += create_read_items_for_chunk_list(key, self.saved[key], [chunk])
        self._reader.read_data(LoadPlan(items), _Into(into)).wait()
        return {name: into[key] for name, key in keys.items()}


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
        self._dim = (
            table.dim
            if without_state is None or without_state.function is None
            else without_state.saved_dim
        )
        self._state_names = (
            {} if without_state is not None else state_names(table.state.optimizer)
        )
        self._weights = {"weight": weight_key}
        if f"{weight_key}_id" in tensors.saved:
            self._weights["weight_id"] = f"{weight_key}_id"
        self._states = {}
        for key in tensors.saved:
            name = key.removeprefix(states_begin)
            # Without the states of the optimizer, the clocks and stamps remain.
            if key.startswith(states_begin) and (
                without_state is None or name in (*_BY_ROW, *STATE_KEYS)
            ):
                self._states[name] = key

    def check(self) -> None:
        """Refuses a table if the checkpoint lacks a part of it, or if the dim or the
        shape of a state differs.
        """
        what, weight_key = f"table {self._state.name!r}", self._weights["weight"]
        shape = self._tensors.shape(weight_key)
        if weight_key not in self._tensors.saved:
            raise ValueError(f"the checkpoint has no RecStore {what} ({weight_key})")
        if len(shape) != 2 or shape[1] != self._dim:
            raise ValueError(
                f"{what} is of shape {shape} in the checkpoint, its dim in the model is"
                f" {self._state.dim}: a function in rows={{...}}, with optimizer=False,"
                " can make rows of the other dim"
            )
        rows = shape[:1]
        expected: dict[str, tuple[int, ...]] = {"weight_id": rows}
        if self._states:
            columns: tuple[int, ...] = ()
            if self._without_state is None:
                self._state.check_keys(self._states)
                columns = self._tensors.shape(self._states["columns"])
            else:
                self._state.check_bookkeeping(self._states)
            expected.update(dict.fromkeys(_BY_ROW, rows))
            for key, kind in self._state_names.items():
                expected[key] = shape if kind == "element" else rows + columns
        for key, stored in {**self._weights, **self._states}.items():
            self._tensors.check_whole(stored)
            found = self._tensors.shape(stored)
            if found != expected.get(key, found):
                raise ValueError(
                    f"{what}: {key} is of shape {found} in the checkpoint, not"
                    f" {expected[key]}"
                )

    def loaded(self) -> list[tuple[Table, Table]]:
        """Reads the table, and returns each of this rank's shards with a new table that
        holds the shard's new rows.
        """
        pairs = [(shard, shard.table.empty_copy()) for shard in self._state.shards]
        state = TableState.from_tensors(
            self._tensors.read(
                {k: v for k, v in self._states.items() if k in STATE_KEYS}
            )
        )
        if self._without_state is not None:
            state = self._without_state.state(state)
        for shard, fresh in pairs:
            fresh.set_state(state.owned(shard.owned))
        written = [0] * len(pairs)
        for parts in self._parts() if pairs else ():
            for number, (shard, fresh) in enumerate(pairs):
                mine = owned_positions(shard, parts[0].ids)
                columns = fresh.columns
                if self._without_state is not None:
                    columns = self._without_state.source_columns(columns)
                covering = [part for part in parts if overlap(part.columns, columns)]
                rows = Part.joined([part.take(mine) for part in covering], columns)
                if self._without_state is not None:
                    rows = self._without_state.part(rows, fresh.columns)
                fresh.write(rows)
                written[number] += len(mine)
        if any(
            held_rows(fresh) not in (None, count)
            for count, (_, fresh) in zip(written, pairs, strict=True)
        ):
            raise ValueError(
                f"table {self._state.name!r}: the checkpoint has an id several times"
            )
        return [(shard.table, fresh) for shard, fresh in pairs]

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
        states = {key: stored for key, stored in self._states.items() if key in names}
        starts = [0]
        if states and self._without_state is None:
            starts = self._tensors.read({"columns": self._states["columns"]})[
                "columns"
            ].tolist()
        columns = [range(first, last) for first, last in pairwise([*starts, self._dim])]
        for piece in self._tensors.row_ranges(
            self._weights.get("weight_id", self._weights["weight"])
        ):
            rows, its_states = (
                self._tensors.read(self._weights, piece),
                self._tensors.read(states, piece),
            )
            ids = rows.get("weight_id", torch.arange(piece.start, piece.stop))
            if its_states and not torch.equal(its_states["id"], ids):
                what = f"table {self._state.name!r}"
                raise ValueError(
                    f"{what}: the optimizer state in the checkpoint is of other ids"
                    " than the weights"
                )
            if not states:  # one column shard, whose state starts at zero
                its_states = zero_states(self._state.optimizer, len(ids), self._dim)
            yield [
                self._part(ids, number, each, rows["weight"], its_states)
                for number, each in enumerate(columns)
            ]

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
        rows = {
            "weight": weight[:, cut].to(torch.float32),
            "last_step": states["last_step"],
        }
        frequencies = states.get(frequency_key(self._state.options))
        rows["frequency"] = (
            torch.zeros_like(ids) if frequencies is None else frequencies
        )
        for name, kind in self._state_names.items():
            rows[name] = (
                states[name][:, cut]
                if kind == "element"
                else states[name].view(len(ids), -1)[:, number]
            )
        return Part(ids, columns, rows)


def _prefix(
    saved: Iterable[str], keys: set[str], argument: str, given: str | None
) -> str | None:
    """Finds the prefix with which a checkpoint has most of the model's keys; None if it
    has none of them.

    Dots join the keys of nested dicts. ``given`` is the prefix that the user has set
    with ``argument``, if any.
    """
    of_model = argument == "model_key"
    what, preferred = (
        ("the model", ("model.", ""))
        if of_model
        else ("its fused optimizer", ("optimizer.state.",))
    )
    times: Counter[str] = Counter()
    for key in saved:
        begins = [0, *(at + 1 for at, letter in enumerate(key) if letter == ".")]
        times.update(key[:begin] for begin in begins if key[begin:] in keys)
    known = [prefix for prefix, count in times.items() if count == max(times.values())]
    if given is not None:
        known = [
            p
            for p in times
            if p == (f"{given}." if given else "") or p == f"{given}.state."
        ]
        if not known:
            raise ValueError(
                f"{argument}={given!r}: the checkpoint has {what} under the keys"
                f" {_named(times)}"
            )
    for prefix in preferred:
        if prefix in known:
            return prefix
    if len(known) > 1:
        raise ValueError(
            f"the checkpoint has {what} under the keys {_named(known)}: set {argument}"
            " to one of them"
        )
    return known[0] if known else None


def _named(prefixes: Iterable[str]) -> str:
    return (
        ", ".join(
            sorted(repr(p.removesuffix(".").removesuffix(".state")) for p in prefixes)
        )
        or "no key"
    )


def _check_states(
    keys: Mapping[ModelTable, str], of_stock: Iterable[str], found: set[str]
) -> None:
    """Refuses a checkpoint that lacks the state of a table whose optimizer has one."""
    fix = (
        "save model.fused_optimizer.state_dict() with the model, or let it start at"
        " zero with strict=False"
    )
    for table, weight_key in keys.items():
        if state_names(table.state.optimizer) and f"{weight_key}.rows.id" not in found:
            raise ValueError(
                "the checkpoint has no optimizer state of RecStore table"
                f" {table.name!r}: {fix}"
            )
    for key in sorted(set(of_stock) - found):
        raise ValueError(f"the checkpoint has no optimizer state {key}: {fix}")
