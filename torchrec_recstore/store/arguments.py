"""Checks of the arguments that users pass to a table or a client, and operations on
sets of ids.

Tests: tests/store/test_table.py, tests/project/test_errors_document.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrec_recstore.ops import RowTensors
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions, check_int
from torchrec_recstore.row_types import (
    MOST_COLUMNS,
    ROW_DTYPES,
    STATE_TYPES,
    as_stored,
    stored_columns,
    value_dtype,
)


def among(ids: Tensor, ascending: Tensor) -> Tensor:
    """Returns which of ``ids``, (N,) int64, are in the set ``ascending``, (M,): (N,)
    bool.

    ``torch.isin`` is slower.
    """
    if not len(ascending):
        return torch.zeros_like(ids, dtype=torch.bool)
    return (
        ascending[torch.searchsorted(ascending, ids).clamp_(max=len(ascending) - 1)]
        == ids
    )


def check_ids(ids: object, where: str = "") -> None:
    """Raises TypeError or ValueError, which begins with ``where``, if ``ids`` is not
    (N,) int64 on the CPU.
    """
    if (
        isinstance(ids, Tensor)
        and ids.dtype is torch.int64
        and ids.dim() == 1
        and ids.is_cpu
    ):
        return  # most calls; the messages below take longer
    if not isinstance(ids, Tensor) or ids.dtype is not torch.int64:
        raise TypeError(f"{where}ids must be an int64 tensor, got {_kind(ids)}")
    if ids.dim() != 1:
        raise ValueError(f"{where}ids must have the shape (N,), got {tuple(ids.shape)}")
    raise ValueError(f"{where}ids must be on the CPU, got {ids.device}")


def check_scores(
    scores: object,
    ids: Tensor,
    where: str = "",
) -> None:
    """Raises TypeError or ValueError, which begins with ``where``, if ``scores`` is not
    (N,) float32 and finite.
    """
    if not isinstance(scores, Tensor) or scores.dtype is not torch.float32:
        raise TypeError(f"{where}scores must be a float32 tensor, got {_kind(scores)}")
    if scores.shape != ids.shape:
        raise ValueError(
            f"{where}scores must have the shape of ids, {tuple(ids.shape)}, got"
            f" {tuple(scores.shape)}"
        )
    if not scores.is_cpu:
        raise ValueError(f"{where}scores must be on the CPU, got {scores.device}")
    if not bool(scores.isfinite().all()):
        raise ValueError(
            f"{where}scores must be finite, got {float(scores[~scores.isfinite()][0])}"
        )


def check_rows(
    rows: object,
    argument: str,
    shape: tuple[int, int],
    dtypes: Sequence[torch.dtype],
    where: str = "",
) -> None:
    """Raises TypeError or ValueError if ``rows`` is not a tensor of one of the dtypes
    and of the shape, on the CPU.

    The message begins with ``where``, and names ``argument`` and the dtypes in their
    order.
    """
    if (
        isinstance(rows, Tensor)
        and rows.dtype in dtypes
        and rows.shape == shape
        and rows.is_cpu
    ):
        return
    names = " or ".join(
        dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)
    )
    if not isinstance(rows, Tensor) or rows.dtype not in dtypes:
        raise TypeError(
            f"{where}{argument} must be a {names} tensor, got {_kind(rows)}"
        )
    if tuple(rows.shape) != shape:
        raise ValueError(
            f"{where}{argument} must have the shape {shape}, got {tuple(rows.shape)}"
        )
    raise ValueError(f"{where}{argument} must be on the CPU, got {rows.device}")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _check_weights(
    weight: object,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Returns the stored weights (``row_types.py``) of values, (N, columns) float32 or
    ``dtype``, or stored weights.
    """
    if (
        dtype is torch.int8
        and isinstance(weight, Tensor)
        and weight.dtype is torch.uint8
    ):
        check_rows(
            weight,
            "weight",
            (shape[0], stored_columns(dtype, shape[1])),
            [torch.uint8],
        )
    else:
        check_rows(
            weight,
            "weight",
            shape,
            [torch.float32, value_dtype(dtype)],
        )
    assert isinstance(weight, Tensor)
    return as_stored(weight.detach(), dtype)


def check_whole_rows(
    rows: Mapping[str, Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    states: Mapping[str, str],
) -> RowTensors:
    """Returns the rows of :meth:`Table.write_rows` in the form of ``ops.table_import``,
    or raises its errors.

    ``shape`` is that of the weights, (N, columns); ``states`` are those of
    ``optim.state_names``.
    """
    if not isinstance(rows, Mapping):
        raise TypeError(
            f"rows must be a mapping as read_rows returns it, got {type(rows).__name__}"
        )
    expected = ["weight", *states, "last_step", "frequency"]
    if set(rows) != set(expected):
        raise ValueError(
            f"rows must have the keys {', '.join(expected)}, got {', '.join(rows)}"
        )
    elements = [name for name, kind in states.items() if kind == "element"]
    weight = _check_weights(rows["weight"], shape, dtype)
    for name in elements:
        check_rows(
            rows[name],
            name,
            shape,
            [torch.float32],
        )
    for name in expected:
        if (
            name not in elements
            and name != "weight"
            and tuple(rows[name].shape) != shape[:1]
        ):
            raise ValueError(
                f"{name} must have the shape ({shape[0]},), got"
                f" {tuple(rows[name].shape)}"
            )
    row_wise = [rows[name] for name, kind in states.items() if kind == "row"] or [
        torch.zeros(shape[0])
    ]
    of_elements = [rows[name].detach() for name in elements]
    stacked = torch.stack(of_elements) if of_elements else torch.empty(0, *shape)
    return (
        weight,
        stacked,
        row_wise[0].detach().float(),
        rows["last_step"],
        rows["frequency"],
    )


def plain_rows(rows: Tensor) -> Tensor:
    """Returns ``rows`` as float32 outside of autograd."""
    rows = rows.detach() if rows.requires_grad else rows
    return rows if rows.dtype is torch.float32 else rows.float()


def check_time(unix_seconds: object) -> int:
    """Returns a time in microseconds since 1970.

    Raises TypeError or ValueError if it is not a time.
    """
    if isinstance(unix_seconds, bool) or not isinstance(unix_seconds, int | float):
        raise TypeError(
            f"unix_seconds must be a number, got {type(unix_seconds).__name__}"
        )
    if not 0 <= unix_seconds < 2**42:
        raise ValueError(
            f"unix_seconds must be a time in seconds since 1970, got {unix_seconds}"
        )
    return round(unix_seconds * 1e6)


def check_table(
    dim: object,
    dtype: object,
    optimizer: object,
    options: object,
    name: object,
    columns: object,
    stochastic_rounding: object,
    state_dtype: object,
) -> None:
    """Raises TypeError or ValueError, which name the argument, if an argument of a
    :class:`Table` is not valid.
    """
    dim = check_int("dim", dim, 1, MOST_COLUMNS)
    if dtype not in ROW_DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(map(str, ROW_DTYPES))}, got {dtype}"
        )
    if stochastic_rounding is not None and not isinstance(stochastic_rounding, bool):
        raise TypeError(
            "stochastic_rounding must be a bool or None, got"
            f" {type(stochastic_rounding).__name__}"
        )
    if stochastic_rounding is False and dtype is torch.int8:
        raise ValueError(
            "stochastic_rounding=False is not supported for rows of torch.int8: updates"
            " that are smaller than half a step of a row would be lost. Leave it out"
        )
    if state_dtype not in STATE_TYPES:
        raise ValueError(
            f"state_dtype must be one of {', '.join(map(str, STATE_TYPES))}, got"
            f" {state_dtype}"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be one of torchrec_recstore.optim, got"
            f" {type(optimizer).__name__}"
        )
    if not isinstance(options, TableOptions):
        raise TypeError(f"options must be TableOptions, got {type(options).__name__}")
    if options.servers is not None:
        raise ValueError(
            "options.servers must be None for a table in this process: use"
            " RecStoreSharder, or an eager collection with client=RecStoreClient([...])"
        )
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if columns is not None:
        _check_columns(columns, dim)


def _check_columns(columns: object, dim: int) -> None:
    if not isinstance(columns, range):
        raise TypeError(f"columns must be a range, got {type(columns).__name__}")
    if columns.step != 1 or not 0 <= columns.start < columns.stop <= dim:
        raise ValueError(
            f"columns must be a range of step 1 within range({dim}), got {columns}"
        )
