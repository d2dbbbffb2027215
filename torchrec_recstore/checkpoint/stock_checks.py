"""What state of a stock TorchRec model must be like to go into another model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.whole import whole
from torchrec_recstore.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    state_names,
)
from torchrec_recstore.sharders.model_tables import ModelTable

_COUNTING = (Adam, PartialRowWiseAdam, LAMB, PartialRowWiseLAMB)
_STOCK = (SGD, Adagrad, RowWiseAdagrad, *_COUNTING)


def stock_names(table: ModelTable) -> dict[str, str]:
    """TorchRec's names of a table's states, by ours.

    Raises:
        ValueError: TorchRec's fused tables have no such optimizer.
    """
    optimizer = table.state.optimizer
    names = list(state_names(optimizer))
    if not isinstance(optimizer, _STOCK) or (isinstance(optimizer, SGD) and names):
        raise ValueError(f"table {table.name!r}: TorchRec's fused tables have no {optimizer}")
    return {name: f"{table.config_name}.{name if i else 'momentum1'}" for i, name in enumerate(names)}


def checked_states(
    table: ModelTable, given: Mapping[str, Any], num_rows: int, starts: Sequence[int], optimizer_steps: int | None
) -> dict[str, Tensor]:
    """A RecStore table's optimizer state as ``TableState.load_state_dict`` takes it.

    Args:
        table: of the model.
        given: TorchRec's state of the table.
        num_rows: of the table there.
        starts: where its column shards begin there.
        optimizer_steps: updates so far.

    Raises:
        ValueError: a state is missing, unknown or of another shape, or ``optimizer_steps`` is needed.
    """
    names = stock_names(table)
    check_keys(f"table {table.name!r}: the stock optimizer state", given, names.values())
    if optimizer_steps is None and isinstance(table.state.optimizer, _COUNTING):
        raise ValueError(f"table {table.name!r}: {type(table.state.optimizer).__name__} needs optimizer_steps")
    state = {
        "id": torch.arange(num_rows),
        "columns": torch.tensor(starts),
        "steps": torch.tensor([optimizer_steps or 0]),
    }
    for name, kind in state_names(table.state.optimizer).items():
        value = whole(names[name], given[names[name]])
        shape = (num_rows, table.dim) if kind == "element" else (num_rows * len(starts),)
        if kind == "row" and tuple(value.shape) == (num_rows,):
            value = value.repeat(len(starts))
        if tuple(value.shape) != shape:
            raise ValueError(f"{names[name]} is of shape {tuple(value.shape)}, the table needs {shape}")
        # TorchRec 1.8.0 puts the row-wise states of column shards one behind the other.
        state[name] = value if kind == "element" else value.view(len(starts), num_rows).T
    return state


def check_keys(what: str, given: Iterable[str], expected: Iterable[str]) -> None:
    """Refuses other keys than the expected ones.

    Raises:
        ValueError: a key is missing or unknown.
    """
    missing, unknown = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    if missing:
        raise ValueError(f"{what} has no {_some(missing)}")
    if unknown:
        raise ValueError(f"{what} has {_some(unknown)}, which the model has not")


def check_shape(key: str, value: Any, own: Any, row_wise_states: bool = False) -> None:
    """Refuses a tensor of another shape than the model's own.

    Args:
        key: names the tensor in the error.
        value: the new one.
        own: the model's; anything goes where this is no tensor.
        row_wise_states: whether ``own`` may be several times as long as ``value``, once for each column shard.

    Raises:
        ValueError: the shapes differ.
    """
    if not isinstance(own, Tensor):
        return
    shape, expected = tuple(value.size()), tuple(own.size())
    if row_wise_states and len(shape) == len(expected) == 1 and shape[0] and expected[0] % shape[0] == 0:
        return
    if shape != expected:
        raise ValueError(f"{key} is of shape {shape}, the model's of {expected}")


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
