"""Typed wrappers of the native ops ``torch.ops.recstore_ops.*``, and their fake versions.

Tensors are on the CPU. The native side checks every argument again: no input crashes the process.

Raises:
    ImportError: on import, where the native extension has not been built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import ConstantInit, Initializer, NormalInit, UniformInit

try:
    from torchrec_recstore import _C  # noqa: F401  (importing it registers the ops)
except ImportError as error:
    raise ImportError(
        "the native extension torchrec_recstore._C is missing or does not fit this torch "
        f"({torch.__version__}, needs 2.11 or later): run `make build` in the repository, or "
        "`pip install --no-build-isolation .` with torch installed"
    ) from error

_ops = torch.ops.recstore_ops
_INVALID = "recstore invalid argument: "
_NO_MEMORY = "recstore out of memory: "
_OPTIMIZERS: tuple[type, ...] = (SGD, Adagrad, RowWiseAdagrad)  # in the order of csrc/config.h, OptimizerKind


@contextmanager
def native_errors(who: str) -> Iterator[None]:
    """Gives native errors their Python type and the name of who called.

    Raises:
        ValueError: an argument broke the contract.
        MemoryError: memory could not be had; nothing has changed.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if text.startswith(_INVALID):
            raise ValueError(f"{who}: {text.removeprefix(_INVALID)}") from None
        if text.startswith(_NO_MEMORY) or "std::bad_alloc" in text:
            raise MemoryError(f"{who}: out of memory: {text.removeprefix(_NO_MEMORY)}") from None
        raise


def _initializer_numbers(initializer: Initializer) -> tuple[int, float, float, float]:
    """The kind (csrc/config.h, InitKind) and its numbers."""
    if isinstance(initializer, UniformInit):
        return 0, initializer.low, initializer.high, 0.0
    if isinstance(initializer, NormalInit):
        return 1, initializer.mean, initializer.std, initializer.truncate_std or 0.0
    if isinstance(initializer, ConstantInit):
        return 2, initializer.value, 0.0, 0.0
    raise TypeError(f"unknown initializer {type(initializer).__name__}")


def table_create(
    name: str, columns: range, seed: int, missing: str, initializer: Initializer, optimizer: Optimizer
) -> int:
    """Makes a table that holds ``columns`` of each row; returns its handle, to be given to :func:`table_destroy`."""
    eps = 0.0 if isinstance(optimizer, SGD) else optimizer.eps
    numbers = _initializer_numbers(initializer)
    kind = _OPTIMIZERS.index(type(optimizer))
    with native_errors(f"table '{name}'"):
        handle = _ops.table_create(
            name, columns.start, columns.stop, seed, missing == "init", *numbers, kind, eps, optimizer.weight_decay
        )
    return cast(int, handle)


table_destroy = cast(Callable[[int], None], _ops.table_destroy.default)
"""Frees a table. A handle that is unknown is ignored."""

table_lookup = cast(Callable[[int, Tensor, bool], Tensor], _ops.table_lookup.default)
"""(table, ids (N,) int64, train) -> (N, columns) float32."""

table_update = cast(Callable[[int, Tensor, Tensor, float], None], _ops.table_update.default)
"""(table, ids (N,) int64, grads (N, columns) float32, learning rate)."""

table_insert = cast(Callable[[int, Tensor, Tensor], None], _ops.table_insert.default)
"""(table, ids (N,) int64, weights (N, columns) float32)."""

table_remove = cast(Callable[[int, Tensor], Tensor], _ops.table_remove.default)
"""(table, ids (N,) int64) -> () int64: number of rows removed."""

table_contains = cast(Callable[[int, Tensor], Tensor], _ops.table_contains.default)
"""(table, ids (N,) int64) -> (N,) bool."""

table_ids = cast(Callable[[int], Tensor], _ops.table_ids.default)
"""(table) -> (rows,) int64, ascending."""

table_stats = cast(Callable[[int], list[int]], _ops.table_stats.default)
"""(table) -> rows, bytes, lookups, misses, inserts, updates, steps."""

group_destroy = cast(Callable[[int], None], _ops.group_destroy.default)
"""Forgets a group; its tables stay. A handle that is unknown is ignored."""

group_forward = cast(
    Callable[[int, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]], _ops.group_forward.default
)
"""(group, ids (N,) int64, offsets (features * B + 1,) int32 or int64, weights (N,) float32 or None, train)
-> pooled (B, columns) float32, and the context for :func:`group_backward` (empty without train).

While the context lives, the slots that the forward found are not reused."""

group_backward = cast(Callable[[Tensor, Tensor, Sequence[float], bool], Tensor], _ops.group_backward.default)
"""(context, grad (B, columns) float32, learning rate of each table, weight_grads)
-> per-sample weights' gradient (N,) float32, empty without weight_grads. Updates the rows."""


def group_create(
    tables: Sequence[int], feature_tables: Sequence[int], routings: Sequence[tuple[int, int, int, bool]], mean: bool
) -> int:
    """Joins tables that are looked up in one call.

    Args:
        tables: handles.
        feature_tables: for each feature the position of its table in ``tables``.
        routings: for each table (block_rows, world_size, rank, mixed); a world_size of 0 leaves ids as they are.
        mean: pool by mean, else by sum.
    """
    flat = [int(number) for routing in routings for number in routing]
    with native_errors("group"):
        return cast(int, _ops.group_create(list(tables), list(feature_tables), flat, mean))


rows_forward = cast(
    Callable[[Sequence[int], Tensor, Sequence[int], bool], tuple[Tensor, list[Tensor]]], _ops.rows_forward.default
)
"""(groups of one feature, ids (N,) int64, counts: ids of each group, train)
-> rows (sum of counts * columns,) float32, and each group's context for :func:`group_backward` (none without train)."""

mix_ids = cast(Callable[[Tensor, bool], Tensor], _ops.mix_ids.default)
"""(ids (N,) int64, inverse) -> (N,) int64: a bijection without a pattern in its low bits, or its inverse."""


def instruction_set() -> str:
    """The instruction set that the row loops run on: ``"baseline"``, ``"avx2"`` or ``"avx512"``."""
    return cast(str, _ops.instruction_set())


# Fake versions: shapes alone, for torch.compile and opcheck. What depends on a table's state is symbolic.


def _symbolic_size() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


def _fake_lookup(table: int, ids: Tensor, train: bool) -> Tensor:
    return ids.new_empty((ids.shape[0], _symbolic_size()), dtype=torch.float32)


def _fake_write(table: int, ids: Tensor, rows: Tensor, learning_rate: float = 0.0) -> None:
    return None


def _fake_remove(table: int, ids: Tensor) -> Tensor:
    return ids.new_empty(())


def _fake_contains(table: int, ids: Tensor) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.bool)


def _fake_forward(group: int, ids: Tensor, offsets: Tensor, weights: Tensor | None, train: bool) -> tuple[Tensor, ...]:
    out = ids.new_empty((_symbolic_size(), _symbolic_size()), dtype=torch.float32)
    return out, ids.new_empty((1 if train else 0,))


def _fake_backward(context: Tensor, grad: Tensor, learning_rates: Sequence[float], weight_grads: bool) -> Tensor:
    return grad.new_empty((_symbolic_size() if weight_grads else 0,))


def _fake_rows(groups: Sequence[int], ids: Tensor, counts: Sequence[int], train: bool) -> tuple[Tensor, list[Tensor]]:
    out = ids.new_empty((_symbolic_size(),), dtype=torch.float32)
    return out, [ids.new_empty((1,)) for _ in groups] if train else []


def _fake_mix(ids: Tensor, inverse: bool) -> Tensor:
    return ids.new_empty(ids.shape)


_FAKES: dict[str, Callable[..., object]] = {
    "table_lookup": _fake_lookup,
    "table_update": _fake_write,
    "table_insert": _fake_write,
    "table_remove": _fake_remove,
    "table_contains": _fake_contains,
    "group_forward": _fake_forward,
    "group_backward": _fake_backward,
    "rows_forward": _fake_rows,
    "mix_ids": _fake_mix,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"recstore_ops::{_name}", _fake)
