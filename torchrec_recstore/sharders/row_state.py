"""The rows of RecStore tables in ``state_dict`` and in the state of the fused optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_recstore.modules.remote_table_module import rows_not_loaded, warn_of_rows_on_servers
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders.fused_optimizers import ModuleOptimizer, placeholder_parameter
from torchrec_recstore.sharders.gather import refused_together
from torchrec_recstore.sharders.layout import (
    LocalShard,
    ShardLayout,
    Value,
    WholeRows,
    gathered_rows,
    owned_positions,
    whole_state,
)
from torchrec_recstore.store import Part, Table, TableState
from torchrec_recstore.store.exchange import warn_of_pending_passes
from torchrec_recstore.store.parts import STAMPS, column_weighted_mean
from torchrec_recstore.table_parameter import GivenCopies

WEIGHTS = "state_dict"
"""The name of the method that returns copies of a table's weights and ids, for error messages."""

_STATES = "fused_optimizer.state_dict"


class ShardedRows(ShardedTensor):
    """A sharded (R, dim) tensor of the rows of a table.

    ``gather`` returns a dense tensor, as for TorchRec's own tables. Pickling, copying and cloning make a
    ``ShardedTensor``.
    """

    _table: str
    _ids: ShardedTensor
    _env: ShardingEnv

    @classmethod
    def of(cls, table: str, weights: ShardedTensor, ids: ShardedTensor, env: ShardingEnv) -> ShardedRows:
        """Changes the class of ``weights`` to this class, and returns it.

        Args:
            table: The name of the table, for errors.
            weights: (R, dim). The weights, sharded as the table.
            ids: (R,) int64. The ids of the rows, sharded as the table.
            env: The environment of the sharded module.
        """
        # The functions of torch 2.13 that make a tensor from shards and their metadata only make a ShardedTensor.
        weights.__class__ = cls
        assert isinstance(weights, ShardedRows)
        weights._table, weights._ids, weights._env = table, ids, env
        return weights

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes the row of id i to row i of ``out``, and zeros to the rows of other ids. Collective.

        TorchRec's ``state_dict_gather`` calls this method with the weight of an unsharded model.

        Args:
            dst: The rank that gets the rows. Default: 0.
            out: (N, dim). A tensor on the rank ``dst``, None on other ranks.
            enforce_dtype: Has no effect. Rows are converted to the dtype of ``out``.
            dtype: Has no effect.

        Raises:
            ValueError: ``out`` is missing or has another dim, or the table has ids outside [0, N). The error is raised
                on every rank, and ``out`` does not change.
        """
        mine = dist.get_rank(self._process_group) == dst
        what = f"RecStore table {self._table!r}"
        with refused_together(self._env):
            if mine and (out is None or out.dim() != 2 or out.shape[1] != self.size(1)):
                shape = "None" if out is None else tuple(out.shape)
                raise ValueError(f"{what}: out must have the shape (rows, {self.size(1)}), got {shape}")
        ids = torch.empty(self._ids.size(), dtype=torch.int64) if mine else None
        rows = torch.empty(self.size(), dtype=self.dtype) if mine else None
        if self.size(0):
            self._ids.gather(dst, ids, dtype=torch.int64)
            super().gather(dst, rows, dtype=self.dtype)
        with refused_together(self._env):
            if out is None or ids is None or rows is None:
                return
            outside = int(((ids < 0) | (ids >= len(out))).sum())
            if outside:
                raise ValueError(
                    f"{what} has {outside} ids outside [0, {len(out)}), and row i of the gathered tensor is the row of "
                    "id i: stock_state_dict(model, num_rows, leave_out=True) leaves these rows out; local_shards() and "
                    "weight_id have all rows"
                )
            with torch.no_grad():
                out.zero_()
                out[ids.to(out.device)] = rows.to(out)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = ShardedTensor._init_from_local_shards_and_global_metadata(
            self.local_shards(), self.metadata(), process_group=self._process_group
        )
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class RowState:
    """A table's optimizer state and bookkeeping, which TorchRec's ``KeyedOptimizer`` saves and loads.

    ``KeyedOptimizer`` calls ``state_dict`` and ``load_state_dict`` of objects in its state (torchrec 1.8.0). The state
    of a table with ``R`` rows, ``D`` columns and ``C`` column shards has these entries:

    - ``id``: (R,) int64. The ids of the rows.
    - ``columns``: (C,) int64. The first column of each column shard.
    - The states of the optimizer: (R, D) for element-wise states, (R, C) for row-wise states.
    - ``last_step`` and ``frequency``: (R,) int64. The stamps that eviction and expiry use.
    - ``rows``: (1,) int64. R.
    - The tensors of :class:`torchrec_recstore.store.TableState`: the table's clocks, and the counts of its admission.

    Args:
        name: The name of the table.
        dim: The number of columns of the whole table.
        shards: The table's shards on this rank.
        env: The environment of the sharded module.
        optimizer: The optimizer of the table.
        options: The options of the whole table. (The options of a shard have only its part of ``max_rows``.)
        copies: The tensors that the states of the module's tables have returned.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        shards: Sequence[LocalShard],
        env: ShardingEnv,
        optimizer: Optimizer,
        options: TableOptions,
        copies: GivenCopies,
    ) -> None:
        self.name = name
        self.copies = copies
        self.dim = dim
        self.shards = shards
        self.env = env
        self.optimizer = optimizer
        self.options = options
        self.emits_rows = True
        """Whether :meth:`state_dict` returns the state and :meth:`load_state_dict` loads it."""
        self._states = state_names(optimizer)

    def state_dict(self) -> dict[str, Value]:
        """Returns a copy of the optimizer state. Collective."""
        if not self.emits_rows:
            return {}
        self.copies.check_usable()
        layout = ShardLayout(self.name, self.shards, self.env)
        ids = [shard.table.ids() for shard in self.shards]
        rows = [self._read(shard.table) for shard in self.shards]
        rows = [{key: self._given(value) for key, value in of_shard.items()} for of_shard in rows]
        starts = [columns.start for columns in layout.column_shards]
        state: dict[str, Value] = {
            "id": layout.rowed(map(self._given, ids)),
            "columns": self._given(torch.tensor(starts)),
            "rows": self._given(torch.tensor([layout.rows])),
            **{key: self._given(value) for key, value in whole_state(self.shards, self.env).tensors().items()},
            **{key: layout.rowed([r[key] for r in rows]) for key in STAMPS},
        }
        for key, kind in self._states.items():
            if kind == "element":
                state[key] = layout.sharded([r[key] for r in rows], lambda columns: columns, layout.dim)
            else:
                parts = [r[key].unsqueeze(1) for r in rows]
                state[key] = layout.sharded(parts, lambda c: _position(starts.index(c.start)), len(starts))
        return state

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        """Loads the state into the rows of the table. After an error, no row has changed. Collective.

        If the state has another column split, a row-wise state becomes the column-weighted mean of the states that
        cover the shard's columns.

        Raises:
            ValueError: A key is missing, a shape does not fit, or an id has no row. Load the state of the model first.
        """
        if not self.emits_rows:
            return
        self.check_keys(state)
        # The gathering is collective, so every rank takes part, also ranks without a shard.
        state = {k: gathered_rows(v, self.env) if k in ("id", *STAMPS) else v for k, v in state.items()}
        with refused_together(self.env):
            check_row_count(self.name, state["rows"], len(torch.as_tensor(state["id"])))
            whole = TableState.from_tensors(state)
            parts = [self.part_of(shard, state) for shard in self.shards]
        for shard, part in zip(self.shards, parts, strict=True):
            # The state must be set before rows are written, because eviction chooses rows by it.
            shard.table.set_state(whole.owned(shard.owned))
            shard.table.write(part)
        self.copies.forget(self.name, _STATES)

    def forget_copies(self) -> None:
        """Ends the check for writes to the tensors that ``state_dict`` returned, after all rows were replaced."""
        for what in (WEIGHTS, _STATES):
            self.copies.forget(self.name, what)

    def check_keys(self, state: Mapping[str, object]) -> None:
        """Checks that an optimizer state has all keys.

        Raises:
            ValueError: A key is missing; the message names the table and the keys.
        """
        keys = ("id", "columns", "rows", "steps", "optimizer_steps", *STAMPS, *self._states)
        missing = [key for key in keys if key not in state]
        if missing:
            raise ValueError(f"RecStore table {self.name!r}: the optimizer state has no {', '.join(missing)}")

    def part_of(self, shard: LocalShard, state: Mapping[str, Value]) -> Part:
        """Returns the rows in ``state`` that belong to a shard, with the shard's weights and the state's other values.

        Args:
            shard: A shard of this table.
            state: A state as :meth:`state_dict` returns it, of all or some rows of the table. The (R,) entries must be
                plain tensors.

        Raises:
            ValueError: A shape does not fit, or an id has no row.
        """
        whole_ids = torch.as_tensor(state["id"])
        positions = owned_positions(shard, whole_ids)
        part = shard.table.part(whole_ids[positions])
        for key in STAMPS:
            if state[key].shape != whole_ids.shape:
                raise ValueError(
                    f"RecStore table {self.name!r}: {key} is of shape {tuple(state[key].shape)}, but there are "
                    f"{len(whole_ids)} ids"
                )
            part.rows[key] = state[key][positions]
        starts = torch.as_tensor(state["columns"]).tolist()
        for key, kind in self._states.items():
            source = WholeRows(f"RecStore table {self.name!r}: {key}", state[key], whole_ids)
            width = self.dim if kind == "element" else len(starts)
            if source.shape[1] != width:
                raise ValueError(f"RecStore table {self.name!r}: {key} is of shape {source.shape}, not {width} columns")
            part.rows[key] = self._state_of(shard, source, kind, starts)
        return part

    def _given(self, copy: Tensor) -> Tensor:
        return self.copies.give(self.name, _STATES, copy)

    def _read(self, table: Table) -> dict[str, Tensor]:
        """Returns the optimizer state and the stamps of all rows, without the weights."""
        parts: dict[str, list[Tensor]] = {key: [] for key in (*self._states, *STAMPS)}
        for part in table.parts():
            for key, values in parts.items():
                values.append(part.rows[key])
        return {key: torch.cat(values) for key, values in parts.items()}

    def _state_of(self, shard: LocalShard, source: WholeRows, kind: str, starts: Sequence[int]) -> Tensor:
        columns = shard.table.columns
        if kind == "element":
            return source.rows(shard, columns)
        if not source.is_sharded:
            return _mean(source.rows(shard, range(len(starts))), starts, shard.table)
        # If the state has another column split than the model, there is no such position, and rows() raises an error.
        position = starts.index(columns.start) if columns.start in starts else len(starts)
        return source.rows(shard, _position(position)).squeeze(1)


def check_row_count(name: str, saved: Value, loaded: int) -> None:
    """Refuses a state that has been loaded into tensors of another number of rows than were saved.

    ``torch.distributed.checkpoint`` refuses that itself, but a load planner of a user's own may read as many rows as
    the model has.

    Args:
        name: The name of the table.
        saved: (1,) int64. The number of rows of the table when the state was made.
        loaded: The number of rows of the state.

    Raises:
        ValueError: The numbers differ.
    """
    rows = int(torch.as_tensor(saved)[0])
    if rows != loaded:
        raise ValueError(
            f"RecStore table {name!r}: the state has the weights or ids of {loaded} rows, and was saved with {rows} "
            "rows. torch.distributed.checkpoint.load reads as many rows as the model has: load a checkpoint with "
            "torchrec_recstore.load_distributed_checkpoint(model, checkpoint_id)"
        )


def export_weights(
    name: str, shards: Sequence[LocalShard], env: ShardingEnv, copies: GivenCopies
) -> tuple[ShardedRows, ShardedTensor]:
    """Returns copies of a table's ``weight``, (R, dim) of its dtype, and ``weight_id``, (R,) int64. Collective.

    Args:
        name: The name of the table.
        shards: The table's shards on this rank.
        env: The environment of the sharded module.
        copies: The object that watches the returned tensors for writes.
    """
    layout = ShardLayout(name, shards, env)
    ids = [shard.table.ids() for shard in shards]
    weights = [shard.table.lookup(i) for shard, i in zip(shards, ids, strict=True)]
    given_weights, given_ids = ([copies.give(name, WEIGHTS, part) for part in parts] for parts in (weights, ids))
    whole_ids = layout.rowed(given_ids)
    whole = layout.sharded(given_weights, lambda columns: columns, layout.dim, layout.dtype)
    return ShardedRows.of(name, whole, whole_ids, env), whole_ids


def checked_weights(name: str, shards: Sequence[LocalShard], weight: Value, ids: Tensor | None) -> WholeRows:
    """Checks weights that replace a table's rows, and returns them for :func:`replace_rows`.

    Args:
        name: The name of the table.
        shards: The table's shards on this rank.
        weight: (R, dim), any floating-point dtype. The weights, which are rounded to the table's dtype.
        ids: (R,) int64. The ids of the rows. None: row i is the row of id i, as in TorchRec's own tables.

    Raises:
        ValueError: A shape or dtype does not fit the table, or ``weight`` is sharded in another way. Or the rows are in
            a shared cold store, so that this model must not replace them.
    """
    check_not_shared(shards)
    source = WholeRows(f"RecStore table {name!r}: weight", weight, ids)
    for shard in shards:
        if shard.table.dim != source.shape[1]:
            raise ValueError(
                f"RecStore table {name!r}: weight is of shape {source.shape}, the table's dim is {shard.table.dim}"
            )
        source.check(shard, shard.table.columns)
    return source


def check_not_shared(shards: Sequence[LocalShard]) -> None:
    """Checks that :func:`replace_rows` may replace the rows of a table.

    Raises:
        ValueError: The rows are in a shared cold store.
    """
    for shard in shards:
        shard.table.check_unshared("others' rows would be replaced")


def replace_rows(shards: Sequence[LocalShard], source: WholeRows) -> None:
    """Replaces the rows of a table's shards with the result of :func:`checked_weights`, and resets optimizer states."""
    for shard in shards:
        rows = source.rows(shard, shard.table.columns)
        shard.table.remove(shard.table.ids())
        shard.table.insert_all(source.ids[owned_positions(shard, source.ids)], rows)
        shard.table.set_state(replace(shard.table.state(), optimizer_steps=0))


def _position(index: int) -> range:
    return range(index, index + 1)


def _mean(values: Tensor, starts: Sequence[int], table: Table) -> Tensor:
    """Returns the mean of a row-wise state (R, C) over the column shards that cover the table's columns: (R,)."""
    ends = [*starts[1:], table.dim]
    columns = table.columns
    overlaps = [
        max(0, min(end, columns.stop) - max(start, columns.start)) for start, end in zip(starts, ends, strict=True)
    ]
    covering = [i for i, overlap in enumerate(overlaps) if overlap]
    return column_weighted_mean([values[:, i].contiguous() for i in covering], [overlaps[i] for i in covering])


class ModuleState:
    """The rows of a sharded module's RecStore tables in its ``state_dict``, and their states in its fused optimizer.

    Args:
        module: The sharded module.
        container: The name of the module's attribute with TorchRec's tables: ``embedding_bags`` or ``embeddings``.
        tables: All RecStore tables of the plan by name, in the same order on every rank.
        env: The environment of the module.
        copies: The tensors that the states of the tables have returned.
        remote: The dims of the tables whose rows are on servers, by name. ``state_dict`` does not contain them.
    """

    def __init__(
        self,
        module: nn.Module,
        container: str,
        tables: Mapping[str, RowState],
        env: ShardingEnv,
        copies: GivenCopies,
        remote: Mapping[str, int],
    ) -> None:
        self.copies = copies
        self.remote = dict(remote)
        self.tables = tables
        self.shards: dict[str, Sequence[LocalShard]] = {name: table.shards for name, table in tables.items()}
        """The shards of each table on this rank."""
        self.container = container
        self.env = env
        self._groups: dict[Optimizer, dict[str, Any]] = {}
        self._handles: list[FusedOptimizer] = []
        self.marks: dict[str, dict[str, list[int]]] = {}
        """The marks of each table's shards, by table name, for each saved or loaded checkpoint, by its checksum."""
        module._register_state_dict_hook(self._add_rows)  # type: ignore[no-untyped-call]

    @property
    def emits_rows(self) -> bool:
        """Whether ``state_dict`` of the module and its fused optimizer has the rows, and loading it replaces them."""
        return all(table.emits_rows for table in self.tables.values())

    @emits_rows.setter
    def emits_rows(self, emits: bool) -> None:
        for table in self.tables.values():
            table.emits_rows = emits

    def load(self, state_dict: dict[str, Value], prefix: str) -> None:
        """Loads the rows in ``state_dict`` into the tables. Collective.

        In ``state_dict``, empty parameters replace the rows, because TorchRec's loading expects one parameter for each
        table.

        Raises:
            ValueError: See :func:`checked_weights`. No table of the module has changed.
        """
        for name, dim in self.remote.items():
            key = f"{prefix}{self.container}.{name}.weight"
            if self.emits_rows and key in state_dict:
                raise ValueError(rows_not_loaded(key))
            state_dict[key] = placeholder_parameter(name, dim)
        keys = {name: f"{prefix}{self.container}.{name}.weight" for name in self.shards}
        if self.emits_rows:
            found = {name: key for name, key in keys.items() if key in state_dict}
            ids = {name: state_dict.pop(f"{key}_id", None) for name, key in found.items()}
            counts = {name: state_dict.pop(f"{key}_rows", None) for name, key in found.items()}
            whole_ids = {name: None if i is None else gathered_rows(i, self.env) for name, i in ids.items()}
            with refused_together(self.env):
                for name, count in counts.items():
                    if count is not None:
                        check_row_count(name, count, state_dict[found[name]].size(0))
                sources = {
                    name: checked_weights(name, self.shards[name], state_dict[key], whole_ids[name])
                    for name, key in found.items()
                }
            for name, source in sources.items():
                replace_rows(self.shards[name], source)
                self.copies.forget(name, WEIGHTS)
        for name, key in keys.items():
            if key in state_dict or not self.emits_rows:
                state_dict[key] = placeholder_parameter(name, self.tables[name].dim)

    def optimizer_with_states(self, optimizer: CombinedOptimizer) -> CombinedOptimizer:
        """Returns the fused optimizer with the state of every table on every rank.

        Args:
            optimizer: The fused optimizer of the module, which has the tables of this rank.
        """
        # Saving is collective for each table, so every rank must have all tables, in the same order.
        parameters, states = {}, {}
        keys = {f"{self.container}.{name}.weight": name for name in self.tables}
        for key, name in keys.items():
            found = [handle.params[key] for _, handle in optimizer.optimizers if key in handle.params]
            parameters[key] = found[0] if found else placeholder_parameter(name, self.tables[name].dim)
            states[parameters[key]] = {"rows": self.tables[name]}
            group = self._groups.setdefault(
                self.tables[name].optimizer, {"params": [], "lr": self.tables[name].optimizer.lr}
            )
            group["params"].append(parameters[key])
        others = []
        for path, handle in optimizer.optimizers:
            names = [keys[key] for key in handle.params if key in keys]
            if names:
                handle.param_groups = [self._groups[self.tables[names[0]].optimizer]]
                self._handles.append(handle)
            else:
                others.append((path, handle))
        of_module = ModuleOptimizer(parameters, states, list(self._groups.values()))
        self._handles.append(of_module)
        return CombinedOptimizer([*others, ("", of_module)])

    def take_over(self, fresh: ModuleState) -> None:
        """Replaces the tables by those of a module of the same tables with another plan.

        The parameter groups stay, with their learning rates: optimizers and schedulers of the user refer to them.
        """
        kept = {id(fresh._groups[key]): group for key, group in self._groups.items()}
        for handle in fresh._handles:
            handle.param_groups = [kept[id(group)] for group in handle.param_groups]
        for key, group in self._groups.items():
            group["params"][:] = fresh._groups[key]["params"]
        self._handles = fresh._handles
        self.copies, self.tables, self.shards, self.marks = fresh.copies, fresh.tables, fresh.shards, {}

    def _add_rows(self, module: nn.Module, state_dict: dict[str, Value], prefix: str, metadata: object) -> None:
        for name in self.remote:
            state_dict.pop(f"{prefix}{self.container}.{name}.weight", None)
        if self.remote and self.emits_rows:
            warn_of_rows_on_servers()
        if not self.emits_rows:
            return
        with refused_together(self.env):
            self.copies.check()
        warn_of_pending_passes(shard.table for shards in self.shards.values() for shard in shards)
        for name, shards in self.shards.items():
            key = f"{prefix}{self.container}.{name}.weight"
            weights, ids = export_weights(name, shards, self.env, self.copies)
            rows = self.copies.give(name, WEIGHTS, torch.tensor([weights.size(0)]))
            state_dict |= {key: weights, f"{key}_id": ids, f"{key}_rows": rows}
