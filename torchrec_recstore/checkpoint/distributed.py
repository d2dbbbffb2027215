"""Loads RecStore tables from checkpoints of ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.checkpoint.distributed_reader import SavedTable, SavedTensors
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
from torchrec_recstore.sharders.model_tables import (
    ModelTable,
    recstore_tables,
    rows_left_out,
    tables_named,
)
from torchrec_recstore.store import Table
from torchrec_recstore.store.table import check_replaceable, exchange_all


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
    """Loads a checkpoint of ``dcp.save`` or ``dcp.async_save``, at any world size.

    The sharding may be another one, too.

    Collective.

    ``dcp.load`` needs tensors of the right size, and the number of rows of a RecStore
    table is only known from the checkpoint. This function finds the states of the model
    and of its fused optimizer with any keys, nested ones too::

        state = {
            "model": model.state_dict(),
            "opt": model.fused_optimizer.state_dict(),
        }
        dcp.save(state, checkpoint_id=path)

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
    tensors = SavedTensors(checkpoint_id)
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
            saved_table = SavedTable(
                tensors,
                table,
                weight_key=prefix + key,
                states_begin=f"{states_prefix}{key}.rows.",
                without_state=sources.without_state(
                    table,
                    saved_dim=tensors.saved_dim(prefix + key),
                ),
            )
            saved_tables.append(saved_table)
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
    """The entries of a model's state that do not belong to RecStore tables.

    They include the states of its fused optimizer. DCP loads them into the model's own
    tensors.
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
            weights = {key: state[prefix + key] for key in self.weights}
            self._model.load_state_dict(weights)
            if states_prefix is not None and self._optimizer:
                new_states = dict(self._all_states)
                for key in self._states:
                    new_states[key] = state[states_prefix + key]
                self._model.fused_optimizer.load_state_dict({"state": new_states})


class _TableKeys:
    """The keys of the weights of RecStore tables in a checkpoint.

    They are without the prefix of the model's state.
    """

    def __init__(self, model: DistributedModelParallel, warm: WarmStart) -> None:
        self._warm = warm
        self._chosen = recstore_tables(model)
        if warm.tables is not None:
            self._chosen = list(tables_named(model, warm.tables).values())

        renamed = tables_named(model, warm.rename.values())
        self._sources: dict[ModelTable, str] = {}
        for source, target in warm.rename.items():
            table = renamed[target]
            self._sources[table] = source
        tables_with_functions = tables_named(model, warm.rows)
        self.functions: dict[ModelTable, RowFunction] = {}
        for name, table in tables_with_functions.items():
            self.functions[table] = warm.rows[name]

        for table in self._sources:
            if table not in self._chosen:
                raise warm.not_chosen("rename", table.name)
        for table in self.functions:
            if table not in self._chosen:
                raise warm.not_chosen("rows", table.name)
        self.likely_keys = {self._likely_key(table) for table in self._chosen}
        """The keys if tables were renamed within their collections."""

    def without_state(
        self,
        table: ModelTable,
        saved_dim: int,
    ) -> RowsWithoutState | None:
        """Returns how the rows are read if their optimizer states are not loaded."""
        if self._warm.optimizer and not table.state.options.frozen:
            return None
        return RowsWithoutState(
            table.name,
            table.state.optimizer,
            saved_dim,
            table.dim,
            self.functions.get(table),
        )

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
        if source is None:
            return table.weight_key
        return table.key_of(source)

    def _renamed_key(
        self,
        table: ModelTable,
        source: str,
        saved: Set[str],
    ) -> str:
        likely_key = table.key_of(source)
        if likely_key in saved:
            return likely_key

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
            listed = ", ".join(matching_keys)
            raise ValueError(
                f"rename: the checkpoint has several tables {source!r}: name one of"
                f" {listed} by the path of its collection, a dot and its name"
            )
        return matching_keys[0]


def _table_names(key: str) -> set[str]:
    """Returns the name and the full name of the table with its weights under a key.

    Other keys have no names.
    """
    names: set[str] = set()
    for container in (".embedding_bags.", ".embeddings."):
        path, _, parameter = f".{key}".rpartition(container)
        name = parameter.removesuffix(".weight")
        if parameter.endswith(".weight") and "." not in name:
            path = path.removeprefix(".").removesuffix("._embedding_bag_collection")
            names.add(name)
            if path:
                names.add(f"{path}.{name}")
    return names


def load_distributed_state(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | Path,
    **arguments: Any,
) -> None:
    """Loads a checkpoint into a ``state_dict``, in place of ``dcp.load``.

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
        is_outside = (ids < 0) | (ids >= len(table))
        outside = int(is_outside.sum())
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
        nested_prefix = f"{name}."
        # the optimizer state of a table
        if isinstance(value, dict) and f"{name}.columns" in saved:
            states = {}
            for saved_key, entry in saved.items():
                if saved_key.startswith(nested_prefix):
                    state_key = saved_key.removeprefix(nested_prefix)
                    states[state_key] = _empty(entry)
            state[key] = states
        elif isinstance(value, dict):
            yield from _sized(value, nested_prefix, saved)
        elif name in saved:
            saved_ids = saved.get(f"{name}_id")
            row_count = state.pop(f"{key}_rows", None)
            if saved_ids is None and row_count is None:
                continue  # no RecStore table, neither here nor there
            if row_count is None:
                yield state, key, value
            state.pop(f"{key}_id", None)
            state[key] = _empty(saved[name])
            if saved_ids is not None:
                state[f"{key}_id"] = _empty(saved_ids)


def _empty(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _prefix(
    saved: Iterable[str],
    keys: set[str],
    argument: str,
    user_key: str | None,
) -> str | None:
    """Finds the prefix with which a checkpoint has most of the model's keys.

    The result is None if the checkpoint has none of them.

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
