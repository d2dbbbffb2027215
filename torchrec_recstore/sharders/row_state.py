"""The rows of RecStore tables in ``state_dict`` and in the fused optimizer's state.

Tests: tests/checkpoint/test_state_dict.py, tests/sharders/test_state_writes.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_recstore.modules.table_module import (
    rows_not_loaded,
    warn_of_rows_on_servers,
)
from torchrec_recstore.optim import Optimizer, StateKind, state_names
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.sharders.kernel import BackwardOptimizer, placeholder_parameter
from torchrec_recstore.sharders.layout import (
    LocalShard,
    ShardLayout,
    Value,
    WholeRows,
    gathered_rows,
    owned_positions,
)
from torchrec_recstore.store import Part, Table, TableState
from torchrec_recstore.store.parts import (
    COUNTS_KEY,
    SCORES_KEY,
    STAMPS,
    column_weighted_mean,
    frequency_key,
)
from torchrec_recstore.store.table import check_applied
from torchrec_recstore.table_parameter import GivenCopies, without_rows_to_load

# The methods that return copies of a table's weights and ids, and of its optimizer
# state, for error messages.
WEIGHTS = "state_dict"
_STATES = "fused_optimizer.state_dict"

# The entries of a table's optimizer state that load_state_dict needs as a whole.
_BY_ROW = ("id", "last_step", COUNTS_KEY, SCORES_KEY)
# The entries that the clocks and the stamps of a table need.
_BOOKKEEPING = ("id", "steps", "optimizer_steps", "last_step")


@dataclass(eq=False, repr=False)
class RowState:
    """A table's optimizer state and bookkeeping.

    TorchRec's ``KeyedOptimizer`` calls the methods (torchrec 1.8.0).

    The state of a table with ``R`` rows, ``D`` columns and ``C`` column shards has
    these entries:

    - ``id``: (R,) int64. The ids of the rows.
    - ``columns``: (C,) int64. The first column of each column shard.
    - The states of the optimizer: (R, D) for element-wise states, (R, C) for row-wise
      states.
    - ``last_step`` and ``frequency``: (R,) int64. The stamps that eviction and expiry
      use. With ``Scored()`` the key of the frequencies, which encode scores, is
      ``encoded_score``.
    - ``rows``: (1,) int64. R.
    - The tensors of :class:`torchrec_recstore.store.TableState`: the table's clocks,
      and the counts of its admission.
    """

    name: str
    dim: int  # The number of columns of the whole table.
    shards: Sequence[LocalShard]  # The table's shards on this rank.
    env: ShardingEnv
    optimizer: Optimizer
    # Of the whole table; the options of a shard have only its part of max_rows.
    options: TableOptions
    # The tensors that the states of the module's tables have returned.
    copies: GivenCopies
    # Whether state_dict returns the state and load_state_dict loads it.
    emits_rows: bool = True

    @property
    def _states(self) -> dict[str, StateKind]:
        return state_names(self.optimizer)

    def state_dict(self) -> dict[str, Value]:
        """Returns a copy of the optimizer state. Collective."""
        if not self.emits_rows:
            return {}
        self.copies.check_usable()
        layout = ShardLayout(
            self.name,
            self.shards,
            self.env,
            with_state=True,
        )
        starts = [columns.start for columns in layout.column_shards]
        of_table = {
            "columns": torch.tensor(starts),
            "rows": torch.tensor([layout.rows]),
            **layout.state.tensors(),
        }
        shards = [self._read(shard.table) for shard in self.shards]

        def of_shards(key: str) -> list[Tensor]:
            return [tensors[key] for tensors in shards]

        state: dict[str, Value] = {}
        state["id"] = layout.by_row(of_shards("id"))
        for key, tensor in of_table.items():
            state[key] = self._give(tensor)
        state["last_step"] = layout.by_row(of_shards("last_step"))
        frequencies = layout.by_row(of_shards("frequency"))
        state[frequency_key(self.options)] = frequencies

        for key, kind in self._states.items():
            tensors = of_shards(key)
            if kind == "element":
                state[key] = layout.by_column(tensors)
            else:
                state[key] = layout.by_column_shard(tensors)
        return state

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        """Loads the state into the rows of the table. Collective.

        Frequencies of the other kind than the table's, scores or counts, become 0.

        Raises ValueError if the state does not fit or an id has no row; then no row has
        changed.
        """
        if not self.emits_rows:
            return
        self.check_keys(state)
        # The gathering is collective, so every rank takes part, also ranks without a
        # shard.
        state = dict(state)
        for key in state:
            if key in _BY_ROW:
                state[key] = gathered_rows(state[key], self.env)

        with refused_together(self.env):
            ids = torch.as_tensor(state["id"])
            _check_row_count(self.name, state["rows"], len(ids))
            table_state = TableState.from_tensors(state)
            parts = [self._part(shard, state) for shard in self.shards]

        for shard, part in zip(self.shards, parts, strict=True):
            # The state must be set before rows are written, because eviction chooses
            # rows by it.
            shard_state = table_state.owned(shard.owned)
            shard.table.set_state(shard_state)
            shard.table.write(part)
        self.copies.forget(self.name, _STATES)

    def forget_copies(self) -> None:
        """Ends the check for writes to the tensors that ``state_dict`` returned.

        It is called after all rows were replaced.
        """
        for description in (WEIGHTS, _STATES):
            self.copies.forget(self.name, description)

    def check_keys(self, state: Mapping[str, object]) -> None:
        """Raises ``ValueError`` if an optimizer state lacks a key.

        The message names the table and the keys.
        """
        keys = [
            "id",
            "columns",
            "rows",
            "steps",
            "optimizer_steps",
            "last_step",
            *self._states,
        ]
        self._check_present(keys, state)

    def check_bookkeeping(self, state: Mapping[str, object]) -> None:
        """Raises ``ValueError`` if a key of the clocks and the stamps is missing."""
        self._check_present(_BOOKKEEPING, state)

    def _check_present(self, keys: Sequence[str], state: Mapping[str, object]) -> None:
        missing = [key for key in keys if key not in state]
        if COUNTS_KEY not in state and SCORES_KEY not in state:
            missing.append(frequency_key(self.options))
        if missing:
            listed = ", ".join(missing)
            raise ValueError(
                f"RecStore table {self.name!r}: the optimizer state has no {listed}"
            )

    def _part(self, shard: LocalShard, state: Mapping[str, Value]) -> Part:
        """Returns the rows in ``state`` that belong to a shard.

        The (R,) entries of ``state`` are plain tensors.
        """
        whole_ids = torch.as_tensor(state["id"])
        positions = owned_positions(shard, whole_ids)
        part = shard.table.part(whole_ids[positions])
        last_steps = self._stamps(state, "last_step", whole_ids)
        part.rows["last_step"] = last_steps[positions]

        key = frequency_key(self.options)
        if key in state:
            frequencies = self._stamps(state, key, whole_ids)
            part.rows["frequency"] = frequencies[positions]
        else:  # The state has frequencies of the other kind.
            no_frequencies = torch.zeros(len(positions), dtype=torch.int64)
            part.rows["frequency"] = no_frequencies

        starts = torch.as_tensor(state["columns"]).tolist()
        for key, kind in self._states.items():
            description = f"RecStore table {self.name!r}: {key}"
            source = WholeRows(description, state[key], whole_ids)
            if kind == "element":
                width = self.dim
            else:
                width = len(starts)
            if source.shape[1] != width:
                raise ValueError(
                    f"{description} is of shape {source.shape}, not {width} columns"
                )
            if kind == "element":
                part.rows[key] = source.rows(shard, part.columns)
            else:
                part.rows[key] = _row_wise(shard, source, starts)
        return part

    def _stamps(
        self,
        state: Mapping[str, Value],
        key: str,
        ids: Tensor,
    ) -> Tensor:
        """Returns an entry of ``state`` that has a number for each of ``ids``, (R,)."""
        stamps = torch.as_tensor(state[key])
        if stamps.shape != ids.shape:
            raise ValueError(
                f"RecStore table {self.name!r}: {key} is of shape"
                f" {tuple(stamps.shape)}, but there are {len(ids)} ids"
            )
        return stamps

    def _give(self, copy: Tensor) -> Tensor:
        return self.copies.give(self.name, _STATES, copy)

    def _read(self, table: Table) -> dict[str, Tensor]:
        """Returns the ids, the optimizer state and the stamps of all rows."""
        ids: list[Tensor] = []
        columns: dict[str, list[Tensor]] = {}
        for key in (*self._states, *STAMPS):
            columns[key] = []
        for part in table.parts():
            ids.append(part.ids)
            for key, values_of_parts in columns.items():
                values_of_parts.append(part.rows[key])

        tensors = {}
        tensors["id"] = self._give(torch.cat(ids))
        for key, values_of_parts in columns.items():
            values = torch.cat(values_of_parts)
            tensors[key] = self._give(values)
        return tensors


def _row_wise(
    shard: LocalShard,
    source: WholeRows,
    starts: Sequence[int],
) -> Tensor:
    """Returns a row-wise state of a shard, (n,), from that of column shards, (R, C).

    The column shards begin at ``starts``.

    It is the column-weighted mean of the states that cover the shard's columns.
    """
    columns = shard.table.columns
    if source.is_sharded:
        # If the state has another column split than the model, there is no such place,
        # and rows() raises an error.
        place = len(starts)
        if columns.start in starts:
            place = starts.index(columns.start)
        states = source.rows(shard, range(place, place + 1))
        return states.squeeze(1)

    values = source.rows(shard, range(len(starts)))
    covering: list[Tensor] = []
    widths: list[int] = []
    edges = pairwise([*starts, shard.table.dim])
    for place, (start, end) in enumerate(edges):
        first_common = max(start, columns.start)
        end_common = min(end, columns.stop)
        if first_common < end_common:
            covering.append(values[:, place].contiguous())
            widths.append(end_common - first_common)
    return column_weighted_mean(covering, widths)


def _check_row_count(name: str, saved: Value, loaded: int) -> None:
    # torch.distributed.checkpoint refuses it itself, but a user's load planner may read
    # as many rows as the model has.
    saved_rows = torch.as_tensor(saved)
    rows = int(saved_rows[0])
    if rows != loaded:
        raise ValueError(
            f"RecStore table {name!r}: the state has the weights or ids of {loaded}"
            f" rows, and was saved with {rows} rows. torch.distributed.checkpoint.load"
            " reads as many rows as the model has: call load_distributed_state of"
            " torchrec_recstore in its place, or load_distributed_checkpoint(model,"
            " checkpoint_id)"
        )


def _export_weights(table: RowState) -> tuple[Tensor, Tensor]:
    """Returns copies of a table's ``weight`` and ``weight_id``.

    They are (R, dim) of the table's dtype, and (R,) int64.

    Collective.
    """
    layout = ShardLayout(table.name, table.shards, table.env)
    ids: list[Tensor] = []
    weights: list[Tensor] = []
    for shard in table.shards:
        shard_ids = shard.table.ids()
        shard_weights = shard.table.lookup(shard_ids)
        ids.append(table.copies.give(table.name, WEIGHTS, shard_ids))
        weights.append(table.copies.give(table.name, WEIGHTS, shard_weights))
    all_weights = layout.by_column(weights, layout.dtype)
    all_ids = layout.by_row(ids)
    all_weights.ids = all_ids
    return all_weights, all_ids


def _checked_weights(
    name: str,
    shards: Sequence[LocalShard],
    weight: Value,
    ids: Tensor | None,
) -> WholeRows:
    """Checks weights, (R, dim), that replace a table's rows.

    ``ids`` are those of :class:`WholeRows`.
    """
    check_not_shared(shards)
    source = WholeRows(f"RecStore table {name!r}: weight", weight, ids)
    for shard in shards:
        table = shard.table
        if table.dim != source.shape[1]:
            raise ValueError(
                f"RecStore table {name!r}: weight is of shape {source.shape}, the"
                f" table's dim is {table.dim}"
            )
        source.check(shard, table.columns)
    return source


def check_not_shared(shards: Sequence[LocalShard]) -> None:
    """Raises ``ValueError`` if the rows of a table are in a shared cold store.

    Others use these rows.
    """
    for shard in shards:
        shard.table.check_unshared("others' rows would be replaced")


def replace_rows(shards: Sequence[LocalShard], source: WholeRows) -> None:
    """Replaces the rows of a table's shards, and resets optimizer states.

    ``source`` has the new rows.
    """
    for shard in shards:
        table = shard.table
        rows = source.rows(shard, table.columns)
        positions = owned_positions(shard, source.ids)
        new_ids = source.ids[positions]

        old_ids = table.ids()
        table.remove(old_ids)
        table.insert_all(new_ids, rows)
        table.set_optimizer_steps(0)


@dataclass(eq=False, repr=False)
class ModuleState:
    """The rows of a sharded module's tables in its states.

    The states are its ``state_dict`` and that of its fused optimizer.
    """

    # The name of the module's attribute with TorchRec's tables: embedding_bags or
    # embeddings.
    container: str
    # All RecStore tables of the plan by name, in the same order on every rank.
    tables: Mapping[str, RowState]
    env: ShardingEnv
    copies: GivenCopies  # The tensors that the states of the tables have returned.
    # The dims of the tables on servers, by name. state_dict does not contain them.
    remote: dict[str, int]
    # The marks of each table's shards, by table name, for each saved or loaded
    # checkpoint, by its checksum.
    marks: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    # The tables that a save has named because their rows are not finite.
    nonfinite_tables: set[str] = field(default_factory=set)
    # The checksums of the checkpoints whose rows each table has had since its rows were
    # replaced, by table name.
    _had: dict[str, set[str]] = field(default_factory=dict)
    # The checksum of the base of each delta that each table has had rows of, by table
    # name and checksum of the delta.
    _bases: dict[str, dict[str, str]] = field(default_factory=dict)
    _groups: dict[Optimizer, dict[str, Any]] = field(default_factory=dict)
    _handles: list[FusedOptimizer] = field(default_factory=list)

    def weight_key(self, prefix: str, name: str) -> str:
        """Returns the key of a table's weights in ``state_dict``."""
        return f"{prefix}{self.container}.{name}.weight"

    def note_rows_of(
        self,
        name: str,
        checksum: str,
        base: str | None,
        *,
        is_complete: bool = True,
    ) -> None:
        """Notes that a table has been saved to a checkpoint, or has got the rows of it.

        Args:
            name: The name of the table.
            checksum: The checksum of the checkpoint.
            base: The checksum of the base, if the checkpoint is a delta.
            is_complete: Whether the table has got the rows of the base before. Default:
                True.
        """
        self._forget_deltas_of(name, checksum)
        if is_complete:
            self._had.setdefault(name, set()).add(checksum)
        if base is not None:
            self._bases.setdefault(name, {})[checksum] = base

    def _forget_deltas_of(self, name: str, checksum: str) -> None:
        """Forgets the deltas of a checkpoint whose rows replace those of the deltas."""
        bases = self._bases.get(name, {})
        checksums_had = self._had.get(name, set())
        deltas = [delta for delta, base in bases.items() if base == checksum]
        for delta in deltas:
            del bases[delta]
            checksums_had.discard(delta)
            self._forget_deltas_of(name, delta)

    def has_had_rows_of(self, name: str, checksum: str) -> bool:
        """Returns whether a table has had the rows of a checkpoint.

        It may have changed them since.
        """
        return checksum in self._had.get(name, ())

    def has_had_delta_of(self, name: str, checksum: str) -> bool:
        """Returns whether a table has had rows of a delta of a checkpoint."""
        bases = self._bases.get(name, {})
        return checksum in bases.values()

    def forget_rows_of(self, name: str) -> None:
        """Notes that all rows of a table were replaced."""
        self._had.pop(name, None)
        self._bases.pop(name, None)

    def forget_replaced(self, name: str) -> None:
        """Notes that all rows and states of a table were replaced.

        Copies of them may be written to.
        """
        self.forget_rows_of(name)
        self.tables[name].forget_copies()

    @property
    def shards(self) -> dict[str, Sequence[LocalShard]]:
        """The shards of each table on this rank, by the table's name."""
        return {name: table.shards for name, table in self.tables.items()}

    @property
    def emits_rows(self) -> bool:
        """Whether states have the rows, and loading them replaces the rows.

        The states are those of the module and of its fused optimizer.
        """
        return all(table.emits_rows for table in self.tables.values())

    @emits_rows.setter
    def emits_rows(self, emits: bool) -> None:
        for table in self.tables.values():
            table.emits_rows = emits

    def load(self, state_dict: dict[str, Value], prefix: str) -> None:
        """Loads the rows in ``state_dict``, and puts empty parameters in their place.

        Collective.

        Raises ValueError if weights do not fit, or if the rows are in a shared cold
        store or on servers; then no table has changed.
        """
        for name, dim in self.remote.items():
            key = self.weight_key(prefix, name)
            if self.emits_rows and key in state_dict:
                raise ValueError(rows_not_loaded(key))
            placeholder = placeholder_parameter(name, dim)
            state_dict[key] = without_rows_to_load(placeholder)

        keys = {name: self.weight_key(prefix, name) for name in self.tables}
        if self.emits_rows:
            self._check_same_entries(keys.values(), state_dict)
            self._replace_rows(keys, state_dict)

        for name, key in keys.items():
            if key in state_dict or not self.emits_rows:
                dim = self.tables[name].dim
                placeholder = placeholder_parameter(name, dim)
                state_dict[key] = without_rows_to_load(placeholder)

    def _check_same_entries(
        self,
        keys: Iterable[str],
        state_dict: Mapping[str, Value],
    ) -> None:
        """Raises ValueError if the ranks load entries of other tables. Collective."""
        present: list[str] = []
        for key in keys:
            entries = (key, f"{key}_id", f"{key}_rows")
            present += [entry for entry in entries if entry in state_dict]
        for entries_of_rank in all_gathered(present, self.env):
            if entries_of_rank != present:
                raise ValueError(
                    "the ranks load other entries of RecStore tables: pass the whole"
                    " state on every rank, because broadcast_from_rank0=True sends no"
                    " ids, or call load_distributed_checkpoint"
                )

    def _replace_rows(
        self,
        keys: Mapping[str, str],
        state_dict: dict[str, Value],
    ) -> None:
        """Replaces the rows of the tables whose weights are in ``state_dict``.

        Their ids and counts are removed there.

        Collective.
        """
        names = [name for name, key in keys.items() if key in state_dict]
        ids: dict[str, Tensor | None] = {}
        row_counts: dict[str, Value | None] = {}
        for name in names:
            row_counts[name] = state_dict.pop(f"{keys[name]}_rows", None)
            table_ids = state_dict.pop(f"{keys[name]}_id", None)
            if table_ids is not None:
                table_ids = gathered_rows(table_ids, self.env)
            ids[name] = table_ids

        sources: dict[str, WholeRows] = {}
        with refused_together(self.env):
            for name in names:
                row_count = row_counts[name]
                if row_count is not None:
                    weights = state_dict[keys[name]]
                    _check_row_count(name, row_count, weights.size(0))
            for name in names:
                sources[name] = _checked_weights(
                    name,
                    self.tables[name].shards,
                    state_dict[keys[name]],
                    ids[name],
                )

        for name, source in sources.items():
            replace_rows(self.tables[name].shards, source)
            self.forget_rows_of(name)
            self.copies.forget(name, WEIGHTS)

    def optimizer_with_states(self, optimizer: CombinedOptimizer) -> CombinedOptimizer:
        """Returns the module's fused optimizer with the states of all tables.

        ``optimizer`` has the tables of this rank.
        """
        # Saving is collective for each table, so every rank must have all tables, in
        # the same order.
        tables: dict[str, RowState] = {}
        for name, table in self.tables.items():
            key = self.weight_key("", name)
            tables[key] = table

        of_this_rank: dict[str, nn.Parameter] = {}
        for _, handle in reversed(optimizer.optimizers):
            of_this_rank.update(handle.params)

        parameters: dict[str, nn.Parameter] = {}
        states: dict[nn.Parameter, dict[str, RowState]] = {}
        for key, table in tables.items():
            parameter = of_this_rank.get(key)
            if parameter is None:
                parameter = placeholder_parameter(
                    table.name,
                    table.dim,
                    frozen=table.options.frozen,
                )
            parameters[key] = parameter
            states[parameter] = {"rows": table}
            new_group = {"params": [], "lr": table.optimizer.lr}
            group = self._groups.setdefault(table.optimizer, new_group)
            group["params"].append(parameter)

        optimizers = []
        for path, handle in optimizer.optimizers:
            recstore_keys = [key for key in handle.params if key in tables]
            if recstore_keys:
                # The tables of a kernel have the same optimizer.
                kernel_optimizer = tables[recstore_keys[0]].optimizer
                handle.param_groups = [self._groups[kernel_optimizer]]
                self._handles.append(handle)
            else:
                optimizers.append((path, handle))

        groups = list(self._groups.values())
        of_module = BackwardOptimizer(parameters, states, groups)
        self._handles.append(of_module)
        optimizers.append(("", of_module))
        return CombinedOptimizer(optimizers)

    def take_over(self, fresh: ModuleState) -> None:
        """Replaces the tables by those of a module with another plan."""
        # The parameter groups stay, with their learning rates: optimizers and
        # schedulers of the user refer to them.
        groups_by_id: dict[int, dict[str, Any]] = {}
        for optimizer, group in self._groups.items():
            new_group = fresh._groups[optimizer]
            groups_by_id[id(new_group)] = group
            group["params"][:] = new_group["params"]
        for handle in fresh._handles:
            groups = [groups_by_id[id(group)] for group in handle.param_groups]
            handle.param_groups = groups

        self._handles = fresh._handles
        self.copies = fresh.copies
        self.tables = fresh.tables
        self.marks = {}

    def add_rows(
        self,
        module: nn.Module,
        state_dict: dict[str, Value],
        prefix: str,
        metadata: object,
    ) -> None:
        """Adds the rows to the ``state_dict`` of the module, as a hook of it.

        Collective.
        """
        for name in self.remote:
            state_dict.pop(self.weight_key(prefix, name), None)
        if self.remote and self.emits_rows:
            warn_of_rows_on_servers()
        if not self.emits_rows:
            return

        with refused_together(self.env):
            self.copies.check()
        tables: list[Table] = []
        for shards in self.shards.values():
            tables += [shard.table for shard in shards]
        check_applied(tables, saves=True)

        for name, table in self.tables.items():
            key = self.weight_key(prefix, name)
            weights, ids = _export_weights(table)
            row_count = torch.tensor([weights.size(0)])
            state_dict[key] = weights
            state_dict[f"{key}_id"] = ids
            state_dict[f"{key}_rows"] = self.copies.give(name, WEIGHTS, row_count)
