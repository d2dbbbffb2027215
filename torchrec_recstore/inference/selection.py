"""Which rows of a table are exported, and what ids without one read as."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_recstore.options import LFU, ConstantInit, Initializer, TableOptions, UniformInit


def aged(frequency: Tensor, last_step: Tensor, steps: int, options: TableOptions) -> Tensor:
    """Frequencies as eviction sees them now: csrc/row_kernels.h, aged_frequency.

    Args:
        frequency: (N,) int64, as they were at the rows' last steps.
        last_step: (N,) int64.
        steps: of the table by now.
        options: of the table.
    """
    half_life = options.eviction.half_life_steps if isinstance(options.eviction, LFU) else None
    if half_life is None:
        return frequency
    halvings = (steps // half_life - last_step // half_life).clamp(0, 63)
    return frequency >> halvings


def check_selection(min_frequency: int, top_rows: int | None) -> None:
    """Refuses a choice of rows that makes no sense.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    for name, value, least in (("min_frequency", min_frequency, 0), ("top_rows", top_rows, 1)):
        if value is None and name == "top_rows":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_counted(name: str, rows: int, steps: int, min_frequency: int, top_rows: int | None) -> None:
    """Refuses a choice by frequency among rows that no training step has counted.

    Args:
        name: of the table.
        rows: of it.
        steps: training lookups that it has seen.
        min_frequency: as asked for.
        top_rows: likewise.

    Raises:
        ValueError: they were only loaded, inserted, or updated by id.
    """
    if rows and not steps and (min_frequency or top_rows is not None):
        raise ValueError(
            f"table {name!r} has rows and no training step has looked any up, so that their frequencies are not known: "
            "leave out min_frequency and top_rows"
        )


def selected(frequency: Tensor, min_frequency: int, top_rows: int | None) -> Tensor:
    """Which rows are exported.

    Args:
        frequency: (R,) int64, by ascending id.
        min_frequency: steps that have looked a row up, at least.
        top_rows: how many rows stay of those: the most frequent ones, of equals those of the least ids.

    Returns:
        Places, ascending.
    """
    places = (frequency >= min_frequency).nonzero().squeeze(1)
    if top_rows is None or len(places) <= top_rows:
        return places
    order = frequency[places].argsort(descending=True, stable=True)
    return places[order[:top_rows]].sort().values


def missing_row(initializer: Initializer, options: TableOptions, dim: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """What an id without a row reads as.

    Args:
        initializer: of the table.
        options: of the table.
        dim: columns.
        dtype: of the table's rows.

    Returns:
        (dim,) float32, and whether an evaluation reads the same: with ``missing="init"`` only where all initial rows
        are alike.
    """
    if options.missing == "zeros":
        return torch.zeros(dim), True
    value = _only_value(initializer)
    if value is None:
        return torch.zeros(dim), False
    return torch.full((dim,), value).to(dtype).float(), True


def _only_value(initializer: Initializer) -> float | None:
    if isinstance(initializer, ConstantInit):
        return initializer.value
    if isinstance(initializer, UniformInit):
        return initializer.low if initializer.low == initializer.high else None
    return initializer.mean if initializer.std == 0 else None
