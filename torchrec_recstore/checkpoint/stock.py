"""Converts RecStore tables to and from dense tensors and TorchRec's own tables.

Row i is id i.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore import optim
from torchrec_recstore.options import check_int
from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.sharders.layout import ShardLayout, WholeRows
from torchrec_recstore.sharders.model_tables import (
    ModelTable,
    recstore_tables,
    rows_left_out,
    tables_named,
)
from torchrec_recstore.sharders.row_state import WEIGHTS, check_not_shared, replace_rows
from torchrec_recstore.store import TableState

_Key = TypeVar("_Key", bound=Hashable)
_TensorKind = tuple[tuple[int, ...], torch.dtype]
"""The shape and the data type of a tensor."""
# The optimizers whose step depends on the number of updates.
_STOCK = (optim.SGD, optim.Adagrad, optim.Adam)
_CHUNK = 1 << 18  # rows with their states


def load_dense_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Writes dense weights into RecStore tables: row i becomes id i. Collective.

    Other rows do not change. New rows start with zero optimizer state, and existing
    rows keep their optimizer state.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or any module that
            contains them.
        weights: (rows, dim) floating-point tensors by table name, the same on every
            rank. If several collections have a table of the same name, the key is the
            collection's path in the model, a dot, and the table's name.

    Raises:
        ValueError: A table is unknown, several tables have the name, or a tensor has
            another shape. No row has changed.
        TypeError: A value is not a floating-point tensor. Both errors are raised on
            every rank.
    """
    tables = tables_named(model, weights)
    for name, tensor in weights.items():
        _check_dense(name, tensor, tables[name].dim)

    for name, tensor in weights.items():
        table = tables[name]
        for shard in table.shards:
            columns = shard.table.columns
            cut = slice(columns.start, columns.stop)
            for begin in range(0, tensor.shape[0], _CHUNK):
                part = tensor[begin : begin + _CHUNK].detach()
                ids = torch.arange(begin, begin + part.shape[0])
                owned = shard.owned(ids)
                rows = part[owned, cut].to("cpu", torch.float32)
                shard.table.insert_all(ids[owned], rows)
        table.state.copies.forget(table.config_name, WEIGHTS)


def _check_dense(name: str, tensor: object, dim: int) -> None:
    """Raises TypeError or ValueError if dense weights do not fit a table."""
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise TypeError(
            f"weights of table {name!r} must be a floating-point tensor, got {kind}"
        )
    if not tensor.is_floating_point():
        raise TypeError(
            f"weights of table {name!r} must be a floating-point tensor, got"
            f" {tensor.dtype}"
        )
    if tensor.dim() != 2 or tensor.shape[1] != dim:
        raise ValueError(
            f"weights of table {name!r} must have the shape (rows, {dim}), got"
            f" {tuple(tensor.shape)}"
        )


def export_dense_weights(
    model: nn.Module,
    table_name: str,
    num_rows: int,
) -> Tensor:
    """Returns the rows of the ids below ``num_rows``, (num_rows, dim) float32.

    An id without a row has zeros.

    Collective.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or any module that
            contains them.
        table_name: The name of a RecStore table; see :func:`load_dense_weights`.
        num_rows: The number of rows, at least 0.

    Raises:
        ValueError: The table is unknown, several tables have the name, or ``num_rows``
            is negative, on every rank.
    """
    table = tables_named(model, [table_name])[table_name]
    check_int("num_rows", num_rows, 0)
    with refused_together(table.state.env):
        table.state.copies.check()
    exported = _exported(table, num_rows, {"weight": "element"})
    return exported["weight"]


def stock_state_dict(
    model: nn.Module,
    num_rows: Mapping[str, int],
    *,
    leave_out: bool = False,
) -> dict[str, Any]:
    """Returns the ``state_dict`` of the unsharded model with TorchRec's own tables.

    Every rank has all of it.

    Collective.

    ``unsharded_model.load_state_dict(result)`` loads it, and :func:`load_into_stock`
    loads it into a sharded model.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or any module that
            contains them.
        num_rows: The number of rows of each RecStore table in the result, which is
            ``num_embeddings`` of TorchRec's table, by table name. See
            :func:`load_dense_weights` for the names.
        leave_out: Whether rows of ids outside [0, num_rows) are left out. Otherwise
            they are an error. Default: False.

    Returns:
        For each RecStore table a (num_rows, dim) tensor of the table's dtype, with
        zeros for ids without a row; for tables of TorchRec's kernels whole tensors; all
        other entries as in ``model.state_dict()``.

    Raises:
        ValueError: A table is unknown or has no number of rows, a number is negative,
            or a table has ids outside [0, num_rows), on every rank.
    """
    counts = _counted_tables(model, num_rows, leave_out)
    with rows_left_out(model):
        state = model.state_dict()

    sharded = {key: value for key, value in state.items() if _is_sharded(value)}
    plain = gathered(sharded, _env(counts))
    state.update(plain)

    for table, rows in counts.items():
        dtype = ShardLayout(table.name, table.state.shards, table.state.env).dtype
        weights = export_dense_weights(model, table.name, rows)
        state[table.weight_key] = weights.to(dtype)
    return state


def stock_optimizer_state_dict(
    model: DistributedModelParallel,
    num_rows: Mapping[str, int],
    *,
    leave_out: bool = False,
) -> dict[str, Any]:
    """Returns ``fused_optimizer.state_dict()`` of TorchRec's tables in plain tensors.

    Every rank has all of it.

    Collective.

    Element-wise states are (num_rows, dim), and row-wise states are (num_rows,). The
    row-wise state of a table with column shards is their column-weighted mean. An id
    without a row has zeros. The number of updates, which Adam and LAMB use, is not part
    of the result.

    Args:
        model: The model.
        num_rows: The number of rows of each RecStore table; see
            :func:`stock_state_dict`.
        leave_out: See :func:`stock_state_dict`. Default: False.

    Returns:
        ``{"state": states}``, where ``states[key][name]`` is the state of that name of
        the table whose weights have that key in ``state_dict``.

    Raises:
        ValueError: See :func:`stock_state_dict`; or a table's optimizer is not one of
            TorchRec's fused optimizers.
    """
    counts = _counted_tables(model, num_rows, leave_out)
    env = _env(counts)
    stock_names = {table.weight_key: _stock_names(table) for table in counts}
    stock_states: dict[str, Any] = {}
    with rows_left_out(model):
        fused_states = model.fused_optimizer.state_dict()["state"]
        for key, states in fused_states.items():
            if key not in stock_names:
                stock_states[key] = states

    result: dict[str, dict[str, Tensor]] = {}
    for rank_keys in all_gathered(list(stock_states), env):
        for key in rank_keys:
            result[key] = {}

    parts: dict[tuple[str, str], Any] = {}
    for key, states in stock_states.items():
        for name, value in states.items():
            parts[key, name] = value
    for (key, name), value in gathered(parts, env).items():
        result[key][name] = value

    for table, rows in counts.items():
        kinds = optim.state_names(table.state.optimizer)
        exported = _exported(table, rows, kinds)
        table_states: dict[str, Tensor] = {}
        for name, stock_name in stock_names[table.weight_key].items():
            table_states[stock_name] = exported[name]
        result[table.weight_key] = table_states
    return {"state": result}


def load_stock_state_dict(
    model: DistributedModelParallel,
    state_dict: Mapping[str, Any],
    optimizer_state_dict: Mapping[str, Any] | None = None,
    *,
    optimizer_steps: int | None = None,
) -> None:
    """Loads the state of the same model with TorchRec's own tables: row i becomes id i.

    Collective.

    The rows of each table are replaced. Without ``optimizer_state_dict`` their
    optimizer state starts at zero. After an error the model is unchanged.

    Args:
        model: The model with RecStore tables.
        state_dict: The ``state_dict`` of the unsharded model, or of a sharded model of
            which this process holds all shards. It is the same on every rank.
        optimizer_state_dict: ``fused_optimizer.state_dict()`` of the sharded model, or
            the result of :func:`stock_optimizer_state_dict`. Default: None.
        optimizer_steps: The number of updates so far, which the bias correction of Adam
            and LAMB uses. TorchRec's state does not contain it.

    Raises:
        ValueError: An entry is missing, unknown or of another shape, a table has
            another dim or optimizer, or ``optimizer_steps`` is needed and missing.
    """
    tables = {table.weight_key: table for table in recstore_tables(model)}
    if optimizer_state_dict is not None and "state" not in optimizer_state_dict:
        raise ValueError(
            'the stock optimizer state has no "state": pass'
            " model.fused_optimizer.state_dict()"
        )
    with rows_left_out(model):
        model_state = model.state_dict()
        fused_states = model.fused_optimizer.state_dict()["state"]

    row_states: dict[str, dict[str, Tensor]] = {}
    stock_pairs: list[tuple[Any, Tensor]] = []
    with refused_together(_env(tables.values())):
        for table in tables.values():
            check_not_shared(table.state.shards)
        plain = _checked_weights(tables, state_dict, model_state)
        if optimizer_state_dict is not None:
            new_states = optimizer_state_dict["state"]
            for key, table in tables.items():
                row_states[key] = _checked_states(
                    table,
                    new_states.get(key, {}),
                    len(plain[key]),
                    _column_starts(state_dict[key]),
                    optimizer_steps,
                )
            stock_keys = fused_states.keys() - tables
            stock_states = {key: fused_states[key] for key in stock_keys}
            stock_pairs = _checked_pairs(new_states, stock_states, model_state)

    stock_entries: dict[str, Any] = {}
    for key, value in plain.items():
        if key not in tables:
            stock_entries[key] = _in_shards(value, model_state[key])
    with rows_left_out(model):
        model.load_state_dict(stock_entries)
    for value, plain_state in stock_pairs:
        fill(value, plain_state)
    for key, table in tables.items():
        replace_rows(table.state.shards, WholeRows(key, plain[key], None))
        table.module.recstore_state.forget_replaced(table.config_name)
        if key in row_states:
            table.state.load_state_dict(row_states[key])


def load_into_stock(
    model: DistributedModelParallel,
    state_dict: Mapping[str, Any],
    optimizer_state_dict: Mapping[str, Any] | None = None,
) -> None:
    """Loads plain tensors into a sharded model with TorchRec's own tables. Collective.

    After an error the model is unchanged. The number of updates that Adam and LAMB
    count does not change; call ``model.fused_optimizer.set_optimizer_step(steps)`` to
    set it.

    Args:
        model: The model without RecStore tables, sharded in any way.
        state_dict: The result of :func:`stock_state_dict`, the same on every rank.
        optimizer_state_dict: The result of :func:`stock_optimizer_state_dict`. Default:
            None, no change of it.

    Raises:
        ValueError: An entry is missing, unknown or of another shape, or the model has
            RecStore tables.
    """
    names = sorted(table.name for table in recstore_tables(model))
    if names:
        listed = ", ".join(map(repr, names))
        raise ValueError(f"{listed} are RecStore tables: call load_stock_state_dict")
    load_stock_state_dict(model, state_dict, optimizer_state_dict)


def _is_sharded(value: object) -> bool:
    return isinstance(value, ShardedTensor | DTensor)


def _local_parts(value: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields this rank's parts of a tensor: the offsets of each part, and the part.

    The parts share its memory.
    """
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    elif isinstance(value, DTensor):
        local = value.to_local()
        if not isinstance(local, LocalShardsWrapper):
            raise ValueError(
                "a DTensor without TorchRec's LocalShardsWrapper is not a table of"
                " TorchRec"
            )
        parts = zip(local.local_offsets(), local.local_shards(), strict=True)
        for offsets, part in parts:
            yield tuple(offsets), part.detach()
    else:
        yield (0,) * value.dim(), value.detach()


def _column_starts(weight: Any) -> list[int]:
    """Returns the first column of each column shard of a table's weights."""
    starts: set[int] = set()
    for offsets, _ in _local_parts(weight):
        starts.add(offsets[1])
    return sorted(starts)


def to_plain(key: str, value: Any) -> Tensor:
    """Returns a plain tensor for a sharded one.

    Raises a ValueError that names ``key`` if another process holds a part.
    """
    if not _is_sharded(value):
        return value.detach()  # type: ignore[no-any-return]
    plain, n_local = _filled(value)
    if n_local != plain.numel():
        raise ValueError(
            f"{key} is sharded over several processes: convert it in a process that"
            " holds all its shards"
        )
    return plain


def gathered(values: Mapping[_Key, Any], env: ShardingEnv) -> dict[_Key, Tensor]:
    """Gathers plain tensors from the parts of all ranks, on every rank. Collective."""
    # A rank without a part of a tensor may lack its key, which is the case in
    # TorchRec's optimizer states.
    local_kinds: dict[_Key, _TensorKind] = {}
    for key, value in values.items():
        size = tuple(value.size())
        local_kinds[key] = (size, value.dtype)
    kinds: dict[_Key, _TensorKind] = {}
    for rank_kinds in all_gathered(local_kinds, env):
        kinds.update(rank_kinds)

    plain: dict[_Key, Tensor] = {}
    for key, (size, dtype) in kinds.items():
        if key in values:
            tensor, _ = _filled(values[key])
        else:
            tensor = torch.zeros(size, dtype=dtype)
        _summed(tensor, env)
        plain[key] = tensor
    return plain


def _summed(value: Tensor, env: ShardingEnv) -> None:
    """Replaces ``value`` by its sum over all ranks. Collective."""
    group = env.process_group
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(value, group=group)


def fill(value: Any, plain: Tensor) -> None:
    """Copies a plain tensor into this rank's parts of ``value``.

    Each column shard gets a copy of a row-wise state.
    """
    for offsets, part in _local_parts(value):
        # TorchRec 1.8.0 concatenates the row-wise states of column shards.
        if part.dim() == 1:
            rows = max(1, plain.shape[0])
            offsets = (offsets[0] % rows,)
        cut = _cut(offsets, part)
        part.copy_(plain[cut])


def _in_shards(plain: Any, model_value: Any) -> Any:
    """Returns a value to load in the place of a value of the model's state.

    If the model's tensor is sharded, the plain tensor is copied into its parts.
    """
    if not _is_sharded(model_value):
        return plain
    fill(model_value, plain)
    return model_value


def _filled(value: Any) -> tuple[Tensor, int]:
    """Returns a plain tensor with this rank's parts, and the number of their cells.

    Other cells are 0.
    """
    plain = torch.zeros(value.size(), dtype=value.dtype)
    n_local = 0
    for offsets, part in _local_parts(value):
        cut = _cut(offsets, part)
        plain[cut] = part.cpu()
        n_local += part.numel()
    return plain, n_local


def _cut(offsets: tuple[int, ...], part: Tensor) -> tuple[slice, ...]:
    """Returns the index of a part in the whole tensor."""
    slices = []
    for begin, size in zip(offsets, part.shape, strict=True):
        slices.append(slice(begin, begin + size))
    return tuple(slices)


def _stock_names(table: ModelTable) -> dict[str, str]:
    """Returns TorchRec's names of a table's optimizer states by our names.

    TorchRec lacks some optimizers.
    """
    optimizer = table.state.optimizer
    names = list(optim.state_names(optimizer))
    is_of_stock = isinstance(optimizer, _STOCK)
    if isinstance(optimizer, optim.AdamW):
        is_of_stock = False
    has_momentum = isinstance(optimizer, optim.SGD) and bool(names)
    if has_momentum or not is_of_stock:
        raise ValueError(
            f"table {table.name!r}: TorchRec's fused tables have no optimizer"
            f" {optimizer}"
        )

    stock_names = {name: f"{table.config_name}.{name}" for name in names}
    if names:  # TorchRec calls the first state so for each optimizer.
        stock_names[names[0]] = f"{table.config_name}.momentum1"
    return stock_names


def _checked_states(
    table: ModelTable,
    stock_states: Mapping[str, Any],
    num_rows: int,
    starts: Sequence[int],
    optimizer_steps: int | None,
) -> dict[str, Tensor]:
    """Checks TorchRec's state of a table, and converts it to a RowState's.

    ``starts`` has the first column of each column shard.
    """
    names = _stock_names(table)
    label = f"table {table.name!r}: the stock optimizer state"
    _check_keys(label, stock_states, names.values())
    optimizer = table.state.optimizer
    if optimizer_steps is None and isinstance(optimizer, optim.Adam):
        raise ValueError(
            f"table {table.name!r}: {type(optimizer).__name__} needs optimizer_steps"
        )

    # TorchRec's tables have no clock: the rows count as new in the present step.
    steps = max((shard.table.steps for shard in table.state.shards), default=0)
    clocks = TableState(steps, optimizer_steps or 0)
    state = {
        "id": torch.arange(num_rows),
        "columns": torch.tensor(starts),
        "rows": torch.tensor([num_rows]),
        "last_step": torch.full((num_rows,), steps),
        "frequency": torch.zeros(num_rows, dtype=torch.int64),
        **clocks.tensors(),
    }
    column_shards = len(starts)
    for name, kind in optim.state_names(optimizer).items():
        stock_name = names[name]
        value = to_plain(stock_name, stock_states[stock_name])
        if kind == "element":
            expected: tuple[int, ...] = (num_rows, table.dim)
        else:
            expected = (num_rows * column_shards,)
            if tuple(value.shape) == (num_rows,):
                value = value.repeat(column_shards)

        shape = tuple(value.shape)
        if shape != expected:
            raise ValueError(
                f"{stock_name} is of shape {shape}, the table needs {expected}"
            )
        if kind == "row":
            # TorchRec 1.8.0 concatenates the row-wise states of column shards.
            value = value.view(column_shards, num_rows).T
        state[name] = value
    return state


def _check_keys(
    label: str,
    keys: Iterable[str],
    expected: Iterable[str],
) -> None:
    missing = sorted(set(expected) - set(keys))
    unknown = sorted(set(keys) - set(expected))
    if missing:
        raise ValueError(f"{label} has no {_first_three(missing)}")
    if unknown:
        raise ValueError(
            f"{label} has {_first_three(unknown)}, which the model does not have"
        )


def _first_three(keys: Sequence[str]) -> str:
    listed = ", ".join(keys[:3])
    more = len(keys) - 3
    if more > 0:
        return f"{listed} and {more} more"
    return listed


def _env(tables: Iterable[ModelTable]) -> ShardingEnv:
    for table in tables:
        return table.state.env
    return whole_environment()


def _checked_weights(
    tables: Mapping[str, ModelTable],
    state_dict: Mapping[str, Any],
    model_state: Mapping[str, Any],
) -> dict[str, Any]:
    """Checks a stock ``state_dict``, and returns it with plain tensors."""
    _check_keys("the stock state_dict", state_dict, model_state)
    plain = {}
    for key, value in state_dict.items():
        if isinstance(value, Tensor):
            plain[key] = to_plain(key, value)
        else:
            plain[key] = value

    for key, value in plain.items():
        if key not in tables:
            model_value = model_state[key]
            if isinstance(model_value, Tensor):
                _check_shape(key, value, model_value)
            continue
        table = tables[key]
        if value.dim() != 2 or value.shape[1] != table.dim:
            shape = tuple(value.shape)
            raise ValueError(
                f"table {table.name!r}: {key} is of shape {shape}, and the table's dim"
                f" is {table.dim}"
            )
    return plain


def _checked_pairs(
    new_states: Mapping[str, Mapping[str, Any]],
    model_states: Mapping[str, Mapping[str, Any]],
    model_keys: Mapping[str, object],
) -> list[tuple[Any, Tensor]]:
    """Pairs this rank's states of TorchRec's fused tables with the tensors to copy.

    The mappings are by the keys of the weights.
    """
    unknown = [key for key in new_states if key not in model_keys]
    _check_keys("the stock optimizer state", unknown, [])
    pairs = []
    for key, states in model_states.items():
        label = f"{key}: the stock optimizer state"
        new_states_of_key = new_states.get(key, {})
        _check_keys(label, new_states_of_key, states)
        for name, value in states.items():
            plain = to_plain(name, new_states_of_key[name])
            if not _is_row_wise_multiple(value, plain):
                _check_shape(name, plain, value)
            pairs.append((value, plain))
    return pairs


def _is_row_wise_multiple(value: Any, plain: Tensor) -> bool:
    """Returns whether a state has the length of C row-wise states, for some C.

    The row-wise states of C column shards are C times as long as that of the table.
    """
    if plain.dim() != 1 or value.dim() != 1 or len(plain) == 0:
        return False
    length = value.size()[0]
    return bool(length % len(plain) == 0)


def _check_shape(key: str, value: Any, model_value: Any) -> None:
    shape = tuple(value.size())
    expected = tuple(model_value.size())
    if shape != expected:
        raise ValueError(
            f"{key} is of shape {shape}, and of shape {expected} in the model"
        )


def _counted_tables(
    model: nn.Module,
    num_rows: Mapping[str, int],
    leave_out: bool,
) -> dict[ModelTable, int]:
    """Returns the model's RecStore tables with their numbers of rows.

    No table may have an id outside, unless they are left out.
    """
    counts: dict[ModelTable, int] = {}
    for name, table in tables_named(model, num_rows).items():
        counts[table] = num_rows[name]
    tables = recstore_tables(model)
    missing = [repr(table.name) for table in tables if table not in counts]
    if missing:
        listed = ", ".join(missing)
        raise ValueError(f"num_rows has no number for RecStore table {listed}")

    for table, rows in counts.items():
        check_int(f"num_rows of table {table.name!r}", rows, 0)
        outside_of_rank = 0
        for shard in table.state.shards:
            if shard.table.columns.start == 0:
                ids = shard.table.ids()
                is_outside = (ids < 0) | (ids >= rows)
                outside_of_rank += int(is_outside.sum())
        outside = sum(all_gathered(outside_of_rank, table.state.env))
        if outside and not leave_out:
            raise ValueError(
                f"table {table.name!r} has {outside} ids outside [0, {rows}):"
                " leave_out=True leaves out their rows"
            )
    return {table: counts[table] for table in tables}


def _exported(
    table: ModelTable,
    num_rows: int,
    kinds: Mapping[str, optim.StateKind],
) -> dict[str, Tensor]:
    """Returns the weights or the optimizer states of the ids below ``num_rows``."""
    # Cells of other ranks' shards stay 0.
    dense: dict[str, Tensor] = {}
    for name, kind in kinds.items():
        shape = (num_rows, table.dim) if kind == "element" else (num_rows,)
        dense[name] = torch.zeros(shape)

    for shard in table.state.shards:
        columns = shard.table.columns
        cut = slice(columns.start, columns.stop)
        share_of_columns = len(columns) / table.dim

        ids = shard.table.ids()
        is_owned = shard.owned(ids)  # A shared cold store contains rows of all ranks.
        ids = ids[is_owned]
        is_exported = (ids >= 0) & (ids < num_rows)
        for part in torch.split(ids[is_exported], _CHUNK):
            if "weight" in kinds:
                weights = shard.table.lookup(part)
                rows = {"weight": weights.float()}
            else:
                rows = shard.table.read_rows(part)
            for name, kind in kinds.items():
                if kind == "element":
                    dense[name][part, cut] = rows[name]
                else:
                    # the column-weighted mean of the column shards
                    dense[name][part] += rows[name] * share_of_columns

    for value in dense.values():
        _summed(value, table.state.env)
    return dense
