"""The rows of RecStore tables in ``state_dict`` and in the state of the fused
optimizer.

Tests: tests/checkpoint/test_state_dict.py, tests/sharders/test_state_writes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_recstore import ops
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
WEIGHTS, _STATES = "state_dict", "fused_optimizer.state_dict"


@dataclass(eq=False, repr=False)
class RowState:
    """A table's optimizer state and bookkeeping, whose methods TorchRec's
    ``KeyedOptimizer`` calls (torchrec 1.8.0).

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
        layout = ShardLayout(self.name, self.shards, self.env, with_state=True)
        rows = [self._read(shard.table) for shard in self.shards]
        by_kind = {"element": layout.by_column, "row": layout.by_column_shard}
        starts = torch.tensor([columns.start for columns in layout.column_shards])
        plain = {
            "columns": starts,
            "rows": torch.tensor([layout.rows]),
            **layout.state.tensors(),
        }
        return {
            "id": layout.by_row(of_shard["id"] for of_shard in rows),
            **{key: self._given(value) for key, value in plain.items()},
            "last_step": layout.by_row(of_shard["last_step"] for of_shard in rows),
            frequency_key(self.options): layout.by_row(
                of_shard["frequency"] for of_shard in rows
            ),
            **{
                key: by_kind[kind](of_shard[key] for of_shard in rows)
                for key, kind in self._states.items()
            },
        }

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
        by_row = ("id", "last_step", COUNTS_KEY, SCORES_KEY)
        state = {
            k: gathered_rows(v, self.env) if k in by_row else v
            for k, v in state.items()
        }
        with refused_together(self.env):
            _check_row_count(
                self.name, state["rows"], len(torch.as_tensor(state["id"]))
            )
            whole = TableState.from_tensors(state)
            parts = [self._part(shard, state) for shard in self.shards]
        for shard, part in zip(self.shards, parts, strict=True):
            # The state must be set before rows are written, because eviction chooses
            # rows by it.
            shard.table.set_state(whole.owned(shard.owned))
            shard.table.write(part)
        self.copies.forget(self.name, _STATES)

    def forget_copies(self) -> None:
        """Ends the check for writes to the tensors that ``state_dict`` returned, after
        all rows were replaced.
        """
        for what in (WEIGHTS, _STATES):
            self.copies.forget(self.name, what)

    def check_keys(self, state: Mapping[str, object]) -> None:
        """Raises ``ValueError`` if an optimizer state lacks a key.

        The message names the table and the keys.
        """
        self._check_present(
            (
                "id",
                "columns",
                "rows",
                "steps",
                "optimizer_steps",
                "last_step",
                *self._states,
            ),
            state,
        )

    def check_bookkeeping(self, state: Mapping[str, object]) -> None:
        """Raises ``ValueError`` like :meth:`check_keys` if a key of the clocks and the
        stamps is missing.
        """
        self._check_present(("id", "steps", "optimizer_steps", "last_step"), state)

    def _check_present(self, keys: Sequence[str], state: Mapping[str, object]) -> None:
        missing = [key for key in keys if key not in state]
        if COUNTS_KEY not in state and SCORES_KEY not in state:
            missing.append(frequency_key(self.options))
        if missing:
            raise ValueError(
                f"RecStore table {self.name!r}: the optimizer state has no"
                f" {', '.join(missing)}"
            )

    def _part(self, shard: LocalShard, state: Mapping[str, Value]) -> Part:
        """Returns the rows in ``state``, whose (R,) entries are plain tensors, that
        belong to a shard.
        """
        whole_ids = torch.as_tensor(state["id"])
        positions = owned_positions(shard, whole_ids)
        part = shard.table.part(whole_ids[positions])
        part.rows["frequency"] = torch.zeros(len(positions), dtype=torch.int64)
        for name, key in {
            "last_step": "last_step",
            "frequency": frequency_key(self.options),
        }.items():
            if key not in state:  # The state has frequencies of the other kind.
                continue
            if state[key].shape != whole_ids.shape:
                raise ValueError(
                    f"RecStore table {self.name!r}: {key} is of shape"
                    f" {tuple(state[key].shape)}, but there are {len(whole_ids)} ids"
                )
            part.rows[name] = state[key][positions]
        starts = torch.as_tensor(state["columns"]).tolist()
        for key, kind in self._states.items():
            source = WholeRows(
                f"RecStore table {self.name!r}: {key}", state[key], whole_ids
            )
            width = self.dim if kind == "element" else len(starts)
            if source.shape[1] != width:
                raise ValueError(
                    f"RecStore table {self.name!r}: {key} is of shape {source.shape},"
                    f" not {width} columns"
                )
            part.rows[key] = (
                source.rows(shard, part.columns)
                if kind == "element"
                else _row_wise(shard, source, starts)
            )
        return part

    def _given(self, copy: Tensor) -> Tensor:
        return self.copies.give(self.name, _STATES, copy)

    def _read(self, table: Table) -> dict[str, Tensor]:
        """Returns the ids, the optimizer state and the stamps of all rows, without the
        weights.
        """
        parts: dict[str, list[Tensor]] = {
            key: [] for key in ("id", *self._states, *STAMPS)
        }
        for part in table.parts():
            for key, values in parts.items():
                values.append(part.ids if key == "id" else part.rows[key])
        return {key: self._given(torch.cat(values)) for key, values in parts.items()}


def _row_wise(shard: LocalShard, source: WholeRows, starts: Sequence[int]) -> Tensor:
    """Returns a row-wise state of a shard, (n,), from that of column shards, (R, C),
    which begin at ``starts``.

    It is the column-weighted mean of the states that cover the shard's columns.
    """
    columns = shard.table.columns
    if source.is_sharded:
        # If the state has another column split than the model, there is no such place,
        # and rows() raises an error.
        place = starts.index(columns.start) if columns.start in starts else len(starts)
        return source.rows(shard, range(place, place + 1)).squeeze(1)
    values = source.rows(shard, range(len(starts)))
    edges = pairwise([*starts, shard.table.dim])
    overlaps = [
        len(range(max(start, columns.start), min(end, columns.stop)))
        for start, end in edges
    ]
    covering = [i for i, overlap in enumerate(overlaps) if overlap]
    return column_weighted_mean(
        [values[:, i].contiguous() for i in covering], [overlaps[i] for i in covering]
    )


def _check_row_count(name: str, saved: Value, loaded: int) -> None:
    # torch.distributed.checkpoint refuses it itself, but a user's load planner may read
    # as many rows as the model has.
    rows = int(torch.as_tensor(saved)[0])
    if rows != loaded:
        raise ValueError(
            f"RecStore table {name!r}: the state has the weights or ids of {loaded}"
            f" rows, and was saved with {rows} rows. torch.distributed.checkpoint.load"
            " reads as many rows as the model has: call load_distributed_state of"
            " torchrec_recstore in its place, or load_distributed_checkpoint(model,"
            " checkpoint_id)"
        )


def _export_weights(table: RowState) -> tuple[Tensor, Tensor]:
    """Returns copies of a table's ``weight``, (R, dim) of its dtype, and ``weight_id``,
    (R,) int64.

    Collective.
    """
    layout = ShardLayout(table.name, table.shards, table.env)
    ids = [shard.table.ids() for shard in table.shards]
    weights = [
        shard.table.lookup(i) for shard, i in zip(table.shards, ids, strict=True)
    ]
    given = [
        [table.copies.give(table.name, WEIGHTS, part) for part in parts]
        for parts in (weights, ids)
    ]
    whole = layout.by_column(given[0], layout.dtype)
    whole.ids = whole_ids = layout.by_row(given[1])
    return whole, whole_ids


def _checked_weights(
    name: str, shards: Sequence[LocalShard], weight: Value, ids: Tensor | None
) -> WholeRows:
    """Checks weights, (R, dim), that replace a table's rows.

    ``ids`` are those of :class:`WholeRows`.
    """
    check_not_shared(shards)
    source = WholeRows(f"RecStore table {name!r}: weight", weight, ids)
    for shard in shards:
        if shard.table.dim != source.shape[1]:
            raise ValueError(
                f"RecStore table {name!r}: weight is of shape {source.shape}, the"
                f" table's dim is {shard.table.dim}"
            )
        source.check(shard, shard.table.columns)
    return source


def check_not_shared(shards: Sequence[LocalShard]) -> None:
    """Raises ``ValueError`` if the rows of a table are in a shared cold store, so that
    others use them.
    """
    for shard in shards:
        shard.table.check_unshared("others' rows would be replaced")


def replace_rows(shards: Sequence[LocalShard], source: WholeRows) -> None:
    """Replaces the rows of a table's shards by those of ``source``, and resets
    optimizer states.
    """
    for shard in shards:
        rows = source.rows(shard, shard.table.columns)
        shard.table.remove(shard.table.ids())
        shard.table.insert_all(source.ids[owned_positions(shard, source.ids)], rows)
        ops.finish_updates()
        with ops.native_errors(f"table {shard.table.name!r}"):
            ops.table_set_optimizer_steps(shard.table.handle, 0)


@dataclass(eq=False, repr=False)
class ModuleState:
    """The rows of a sharded module's RecStore tables in its ``state_dict``, and their
    states in its fused optimizer.
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
        self, name: str, checksum: str, base: str | None, *, is_complete: bool = True
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
        """Forgets the deltas that were made after a checkpoint whose rows replace
        theirs.
        """
        bases = self._bases.get(name, {})
        for delta in [delta for delta, base in bases.items() if base == checksum]:
            del bases[delta]
            self._had.get(name, set()).discard(delta)
            self._forget_deltas_of(name, delta)

    def has_had_rows_of(self, name: str, checksum: str) -> bool:
        """Returns whether a table has had the rows of a checkpoint, which it may have
        changed since.
        """
        return checksum in self._had.get(name, ())

    def has_had_delta_of(self, name: str, checksum: str) -> bool:
        """Returns whether a table has had rows of a delta of a checkpoint."""
        return checksum in self._bases.get(name, {}).values()

    def forget_rows_of(self, name: str) -> None:
        """Notes that all rows of a table were replaced."""
        self._had.pop(name, None)
        self._bases.pop(name, None)

    def forget_replaced(self, name: str) -> None:
        """Notes that all rows and states of a table were replaced, so that copies of
        them may be written to.
        """
        self.forget_rows_of(name)
        self.tables[name].forget_copies()

    @property
    def shards(self) -> dict[str, Sequence[LocalShard]]:
        """The shards of each table on this rank, by the table's name."""
        return {name: table.shards for name, table in self.tables.items()}

    @property
    def emits_rows(self) -> bool:
        """Whether ``state_dict`` of the module and its fused optimizer has the rows,
        and loading it replaces them.
        """
        return all(table.emits_rows for table in self.tables.values())

    @emits_rows.setter
    def emits_rows(self, emits: bool) -> None:
        for table in self.tables.values():
            table.emits_rows = emits

    def load(self, state_dict: dict[str, Value], prefix: str) -> None:
        """Loads the rows in ``state_dict``, and replaces them there by empty parameters
        for TorchRec.

        Collective.

        Raises ValueError if weights do not fit, or if the rows are in a shared cold
        store or on servers; then no table has changed.
        """
        for name, dim in self.remote.items():
            key = self.weight_key(prefix, name)
            if self.emits_rows and key in state_dict:
                raise ValueError(rows_not_loaded(key))
            state_dict[key] = without_rows_to_load(placeholder_parameter(name, dim))
        keys = {name: self.weight_key(prefix, name) for name in self.shards}
        if self.emits_rows:
            given = [
                each
                for key in keys.values()
                for each in (key, f"{key}_id", f"{key}_rows")
                if each in state_dict
            ]
            if any(of_rank != given for of_rank in all_gathered(given, self.env)):
                raise ValueError(
                    "the ranks load other entries of RecStore tables: pass the whole"
                    " state on every rank, because broadcast_from_rank0=True sends no"
                    " ids, or call load_distributed_checkpoint"
                )
            found = {name: key for name, key in keys.items() if key in state_dict}
            ids = {
                name: state_dict.pop(f"{key}_id", None) for name, key in found.items()
            }
            counts = {
                name: state_dict.pop(f"{key}_rows", None) for name, key in found.items()
            }
            whole_ids = {
                name: None if i is None else gathered_rows(i, self.env)
                for name, i in ids.items()
            }
            with refused_together(self.env):
                for name, count in counts.items():
                    if count is not None:
                        _check_row_count(name, count, state_dict[found[name]].size(0))
                sources = {
                    name: _checked_weights(
                        name, self.tables[name].shards, state_dict[key], whole_ids[name]
                    )
                    for name, key in found.items()
                }
            for name, source in sources.items():
                replace_rows(self.tables[name].shards, source)
                self.forget_rows_of(name)
                self.copies.forget(name, WEIGHTS)
        for name, key in keys.items():
            if key in state_dict or not self.emits_rows:
                state_dict[key] = without_rows_to_load(
                    placeholder_parameter(name, self.tables[name].dim)
                )

    def optimizer_with_states(self, optimizer: CombinedOptimizer) -> CombinedOptimizer:
        """Returns the module's fused optimizer, which has the tables of this rank, with
        the states of all tables.
        """
        # Saving is collective for each table, so every rank must have all tables, in
        # the same order.
        parameters, states, others = {}, {}, []
        tables = {
            self.weight_key("", name): table for name, table in self.tables.items()
        }
        for key, table in tables.items():
            found = [
                handle.params[key]
                for _, handle in optimizer.optimizers
                if key in handle.params
            ]
            if found:
                parameters[key] = found[0]
            else:
                parameters[key] = placeholder_parameter(
                    table.name, table.dim, frozen=table.options.frozen
                )
            states[parameters[key]] = {"rows": table}
            group = self._groups.setdefault(
                table.optimizer, {"params": [], "lr": table.optimizer.lr}
            )
            group["params"].append(parameters[key])
        for path, handle in optimizer.optimizers:
            own = [tables[key] for key in handle.params if key in tables]
            if own:
                handle.param_groups = [self._groups[own[0].optimizer]]
                self._handles.append(handle)
            else:
                others.append((path, handle))
        of_module = BackwardOptimizer(parameters, states, list(self._groups.values()))
        self._handles.append(of_module)
        return CombinedOptimizer([*others, ("", of_module)])

    def take_over(self, fresh: ModuleState) -> None:
        """Replaces the tables by those of a module of the same tables with another
        plan.
        """
        # The parameter groups stay, with their learning rates: optimizers and
        # schedulers of the user refer to them.
        kept = {id(fresh._groups[key]): group for key, group in self._groups.items()}
        for handle in fresh._handles:
            handle.param_groups = [kept[id(group)] for group in handle.param_groups]
        for key, group in self._groups.items():
            group["params"][:] = fresh._groups[key]["params"]
        self._handles = fresh._handles
        self.copies, self.tables, self.marks = fresh.copies, fresh.tables, {}

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
        check_applied(
            (shard.table for shards in self.shards.values() for shard in shards),
            saves=True,
        )
        for name, table in self.tables.items():
            key = self.weight_key(prefix, name)
            weights, ids = _export_weights(table)
            rows = self.copies.give(name, WEIGHTS, torch.tensor([weights.size(0)]))
            state_dict |= {key: weights, f"{key}_id": ids, f"{key}_rows": rows}
