"""The fake versions of the native ops, for torch.compile and opcheck, and the
registration of ops in Python.

The fake versions compute shapes only. A size that depends on a table is symbolic.

Tests: tests/test_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType


def _size() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


def _nothing(*_: object) -> None:
    return None


def _flags(table: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.bool)


def _some_ids(table: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty(_size())


def _pooled(group: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty((_size(), _size()), dtype=torch.float32)


def _lookup(table: int, ids: Tensor, train: bool) -> Tensor:
    return ids.new_empty((ids.shape[0], _size()), dtype=torch.float32)


def _count(table: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty(())


def _exported(table: int, ids: Tensor) -> tuple[Tensor, ...]:
    rows = ids.shape[0]
    columns = _size()
    weight = ids.new_empty((rows, columns), dtype=torch.float32)
    elements = ids.new_empty((_size(), rows, columns), dtype=torch.float32)
    row_wise_state = ids.new_empty(rows, dtype=torch.float32)
    last_steps = ids.new_empty(rows)
    frequencies = ids.new_empty(rows)
    return (
        weight,
        elements,
        row_wise_state,
        last_steps,
        frequencies,
    )


def _images(table: int, ids: Tensor) -> Tensor:
    return ids.new_empty((ids.shape[0], _size()), dtype=torch.uint8)


def _scored_images(
    table: int,
    ids: Tensor,
    scores: Tensor,
    images: Tensor,
) -> Tensor:
    return images.new_empty(images.shape)


def _ssd_rows(store: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    rows = ids.new_empty((_size(), _size()), dtype=torch.uint8)
    return _flags(store, ids), rows


def _table_ids(
    group: int,
    ids: Tensor,
    offsets: Tensor | None,
) -> list[Tensor]:
    return [_some_ids(group, ids)]


def _group_forward(
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    train: bool,
) -> tuple[Tensor, Tensor]:
    return _pooled(group, ids), ids.new_empty(int(train))


def _group_forward_into(
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    train: bool,
    out: Tensor,
) -> Tensor:
    return ids.new_empty(int(train))


def _group_begin(
    group: int,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
) -> Tensor:
    return ids.new_empty(1)


def _device_plan(
    context: Tensor,
    firsts: object,
    arenas: object,
    out: Tensor,
) -> bool:
    return True


def _yes(context: Tensor) -> bool:
    return True


def _refused(context: Tensor) -> tuple[Tensor, Tensor]:
    return context.new_empty(_size()), context.new_empty(_size())


def _device_find(
    table: int,
    ids: Tensor,
    first: int,
    staged: int,
    stages_missing: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _size()
    numbers = ids.new_empty(ids.shape, dtype=torch.int32)
    return numbers, ids.new_empty(rows), ids.new_empty(rows)


def _counted(context: Tensor) -> Tensor:
    return context.new_empty(_size())


def _dirty_of_pass(context: Tensor) -> list[Tensor]:
    return [context.new_empty(_size(), dtype=torch.int32)]


def _group_backward(
    context: Tensor,
    grad: Tensor,
    rates: object,
    weight_grads: bool,
) -> Tensor:
    return grad.new_empty((_size() if weight_grads else 0,))


def _weight_gradients(context: Tensor, grad: Tensor) -> Tensor:
    return grad.new_empty(_size())


def _rows_forward(
    groups: Sequence[int],
    ids: Tensor,
    counts: object,
    train: bool,
) -> tuple[Tensor, Tensor]:
    rows = ids.new_empty(_size(), dtype=torch.float32)
    return rows, ids.new_empty(len(groups) if train else 0)


def _rows_begin_each(
    groups: Sequence[int],
    ids: Tensor,
    counts: object,
) -> Tensor:
    return ids.new_empty(len(groups))


def _rows_forward_into(
    groups: Sequence[int],
    ids: Tensor,
    counts: object,
    train: bool,
    out: Tensor,
) -> Tensor:
    return ids.new_empty(len(groups) if train else 0)


def _ids_split(
    ids: Tensor,
    tables: Sequence[int],
    owners: object,
    n: int,
) -> tuple[Tensor, Tensor, Tensor]:
    counts = ids.new_empty(n, len(tables))
    return ids.new_empty(ids.shape), ids.new_empty(ids.shape), counts


def _ids_distinct(ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    distinct_counts = ids.new_empty(len(counts))
    return ids.new_empty(_size()), ids.new_empty(ids.shape), distinct_counts


def _mixed_ids(ids: Tensor, inverse: bool) -> Tensor:
    return ids.new_empty(ids.shape)


_FAKES: dict[str, Callable[..., object]] = {
    "device_check_finite": _nothing,
    "device_dirty_of_pass": _dirty_of_pass,
    "device_find": _device_find,
    "device_has_bags_of_one": _yes,
    "device_land_moves": _nothing,
    "device_locate": _nothing,
    "device_plan": _device_plan,
    "device_plan_refresh": _counted,
    "device_pool": _nothing,
    "device_read_on_host": _nothing,
    "device_refused": _refused,
    "device_settle": _nothing,
    "device_stage_moves": _nothing,
    "device_stage_rows": _nothing,
    "device_update": _nothing,
    "device_updated": _nothing,
    "device_weight_gradients": _nothing,
    "group_accumulated_backward": _nothing,
    "group_backward": _group_backward,
    "group_begin": _group_begin,
    "group_forward": _group_forward,
    "group_forward_into": _group_forward_into,
    "group_prefetch": _nothing,
    "group_read": _pooled,
    "group_table_ids": _table_ids,
    "group_weight_gradients": _weight_gradients,
    "ids_distinct": _ids_distinct,
    "ids_split": _ids_split,
    "mix_ids": _mixed_ids,
    "rows_begin": _some_ids,
    "rows_begin_each": _rows_begin_each,
    "rows_forward": _rows_forward,
    "rows_forward_into": _rows_forward_into,
    "rows_put": _nothing,
    "rows_read": _nothing,
    "rows_take": _nothing,
    "rows_update": _nothing,
    "ssd_delete": _nothing,
    "ssd_get": _ssd_rows,
    "ssd_put": _nothing,
    "table_absent": _some_ids,
    "table_add_left": _nothing,
    "table_admits": _flags,
    "table_begin_refilter": _nothing,
    "table_bring_back": _nothing,
    "table_contains": _flags,
    "table_end_refilter": _nothing,
    "table_evict": _flags,
    "table_export": _exported,
    "table_images": _images,
    "table_import": _nothing,
    "table_insert": _nothing,
    "table_keep_cold": _nothing,
    "table_leaving": _some_ids,
    "table_lookup": _lookup,
    "table_may_be_cold": _flags,
    "table_may_be_kept": _flags,
    "table_note_cold": _nothing,
    "table_note_left": _nothing,
    "table_read": _nothing,
    "table_remove": _count,
    "table_score_images": _scored_images,
    "table_set_scores": _count,
    "table_set_sightings": _nothing,
    "table_update": _nothing,
}

_ON_TENSORS = (
    "device_check_finite",
    "device_locate",
    "device_pool",
    "device_update",
    "device_weight_gradients",
    "ids_distinct",
    "ids_split",
    "mix_ids",
    "rows_put",
    "rows_take",
    "table_read",
)
"""The ops whose results are in tensors alone.

The schema of an op states the tensors that the op changes.
"""

PYTHON_OPS = torch.library.Library("recstore_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
"""The ops that are implemented in Python; see :func:`register_python_op`."""


def register() -> None:
    """Registers the fake version of each native op.

    The ops on tables are registered as ordered effects.
    """
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"recstore_ops::{name}", fake)
        if name not in _ON_TENSORS:
            _register_effect(name)


def register_python_op(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    dispatch_key: str = "CPU",
) -> None:
    """Registers a Python op, by its schema without a namespace, and its fake version,
    as an ordered effect.
    """
    name = schema.partition("(")[0]
    PYTHON_OPS.define(schema)  # type: ignore[no-untyped-call]
    PYTHON_OPS.impl(name, implementation, dispatch_key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"recstore_ops::{name}", fake, lib=PYTHON_OPS)
    _register_effect(name)


def _register_effect(name: str) -> None:
    # The ops read and change rows, which are not tensors of a graph. As ordered
    # effects, they are neither dropped nor reordered by compilers. (torch 2.13 has no
    # public name for this.)
    _register_effectful_op(f"recstore_ops::{name}", EffectType.ORDERED)
