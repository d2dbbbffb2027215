"""What a table does beyond holding rows: plain frozen dataclasses, hashable, no torch.

The plan carries a :class:`TableOptions` to every rank, so all of this must pickle and compare by value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MAX_INIT_ROWS = 2**20
"""Ceiling of ``n`` in the default ``uniform(+-sqrt(1/n))``: a hint of 2**40 must not mean rows of zeros."""


def _check_finite(owner: object, **values: float) -> None:
    for field, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{type(owner).__name__}.{field} must be finite, got {value}")


@dataclass(frozen=True)
class UniformInit:
    """New weights uniform in [low, high).

    Raises:
        ValueError: a bound is not finite, or ``low > high``.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_finite(self, low=self.low, high=self.high)
        if self.low > self.high:
            raise ValueError(f"UniformInit.low must not exceed high, got low={self.low}, high={self.high}")


@dataclass(frozen=True)
class NormalInit:
    """New weights normal with ``mean`` and ``std``; with ``truncate_std=t`` limited to ``mean +- t * std``.

    Raises:
        ValueError: a value is not finite, ``std`` is negative or ``truncate_std`` is not positive.
    """

    mean: float = 0.0
    std: float = 1.0
    truncate_std: float | None = None

    def __post_init__(self) -> None:
        _check_finite(self, mean=self.mean, std=self.std)
        if self.std < 0:
            raise ValueError(f"NormalInit.std must not be negative, got {self.std}")
        if self.truncate_std is not None and not self.truncate_std > 0:
            raise ValueError(f"NormalInit.truncate_std must be positive, got {self.truncate_std}")


@dataclass(frozen=True)
class ConstantInit:
    """New weights all equal to ``value``.

    Raises:
        ValueError: ``value`` is not finite.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self, value=self.value)


Initializer = UniformInit | NormalInit | ConstantInit


@dataclass(frozen=True)
class TableOptions:
    """How one table makes and reads rows.

    Args:
        initializer: weights of a new row. ``None``: the config's ``weight_init_min/max`` where the user set
            them, else uniform in ``+-sqrt(1/n)`` (see :func:`default_initializer`).
        seed: with the table's name, the id and the global column it decides a new row's weights, nothing else does.
        expected_rows: the planner's estimate of resident rows over all ranks.
        routing: how sharding by rows spreads ids over ranks: ``"block"`` is TorchRec's own split by ranges of
            ``num_embeddings``, ``"hash"`` spreads any pattern of ids evenly. Without effect on other sharding types.
        missing: what an evaluation lookup reads for an id without a row: ``"zeros"`` or its initial row, ``"init"``.

    Raises:
        ValueError: a value makes no sense; the message names the field.
        TypeError: a field is of the wrong type; the message names the field.
    """

    initializer: Initializer | None = None
    seed: int = 0
    expected_rows: int | None = None
    routing: Literal["block", "hash"] = "block"
    missing: Literal["zeros", "init"] = "zeros"

    def __post_init__(self) -> None:
        if self.initializer is not None and not isinstance(self.initializer, UniformInit | NormalInit | ConstantInit):
            raise TypeError(
                "TableOptions.initializer must be UniformInit, NormalInit or ConstantInit, "
                f"got {type(self.initializer).__name__}"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"TableOptions.seed must be an int, got {type(self.seed).__name__}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"TableOptions.seed must fit 64 bits, got {self.seed}")
        if self.expected_rows is not None:
            if isinstance(self.expected_rows, bool) or not isinstance(self.expected_rows, int):
                raise TypeError(f"TableOptions.expected_rows must be an int, got {type(self.expected_rows).__name__}")
            if self.expected_rows < 1:
                raise ValueError(f"TableOptions.expected_rows must be at least 1, got {self.expected_rows}")
        if self.routing not in ("block", "hash"):
            raise ValueError(f"TableOptions.routing must be 'block' or 'hash', got {self.routing!r}")
        if self.missing not in ("zeros", "init"):
            raise ValueError(f"TableOptions.missing must be 'zeros' or 'init', got {self.missing!r}")


def resident_rows(options: TableOptions, num_embeddings: int | None) -> int:
    """Rows that a table is expected to hold over all ranks: ``expected_rows``, else the hint, at most 2**20."""
    if options.expected_rows is not None:
        return options.expected_rows
    return MAX_INIT_ROWS if num_embeddings is None else min(num_embeddings, MAX_INIT_ROWS)


def default_initializer(options: TableOptions, num_embeddings: int | None = None) -> Initializer:
    """The table's initializer, or uniform in ``+-sqrt(1/n)`` with ``n`` from :func:`resident_rows`, never above 2**20.

    Source: ``EmbeddingBagConfig.get_weight_init_max`` (torchrec 1.8.0), with n bounded.
    """
    if options.initializer is not None:
        return options.initializer
    bound = math.sqrt(1.0 / min(resident_rows(options, num_embeddings), MAX_INIT_ROWS))
    return UniformInit(-bound, bound)
