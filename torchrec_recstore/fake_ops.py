"""The fake versions of the native ops, for torch.compile and opcheck, and the
registration of ops in Python.

The fake versions compute shapes only. A size that depends on a table is symbolic.

Tests: tests/test_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _exported(table: int, ids: Tensor) -> tuple[Tensor, ...]:
    n, columns = ids.shape[0], _size()
    floats = [
        ids.new_empty(shape, dtype=torch.float32)
        for shape in ((n, columns), (_size(), n, columns), (n,))
    ]
    return *floats, ids.new_empty(n), ids.new_empty(n)


_FAKES: dict[str, Callable[..., object]] = {
    **dict.fromkeys(
        (
            "table_read",
            "table_update",
            "table_insert",
            "table_import",
            "table_set_sightings",
        ),
        _nothing,
    ),
    **dict.fromkeys(
        (
            "table_bring_back",
            "table_note_cold",
            "table_begin_refilter",
            "table_keep_cold",
        ),
        _nothing,
    ),
    **dict.fromkeys(
        (
            "table_end_refilter",
            "table_note_left",
            "group_prefetch",
            "group_accumulated_backward",
        ),
        _nothing,
    ),
    **dict.fromkeys(
        ("rows_read", "rows_update", "rows_put", "rows_take", "ssd_put", "ssd_delete"),
        _nothing,
    ),
    **dict.fromkeys(
        (
            "table_contains",
            "table_may_be_cold",
            "table_admits",
            "table_evict",
            "table_may_be_kept",
        ),
        _flags,
    ),
    **dict.fromkeys(("table_absent", "table_leaving", "rows_begin"), _some_ids),
    "table_lookup": lambda table, ids, train: ids.new_empty(
        (ids.shape[0], _size()), dtype=torch.float32
    ),
    "table_remove": lambda table, ids: ids.new_empty(()),
    "table_add_left": _nothing,
    "table_set_scores": lambda table, ids, scores: ids.new_empty(()),
    "table_score_images": lambda table, ids, scores, images: images.new_empty(
        images.shape
    ),
    "table_export": _exported,
    "table_images": lambda table, ids: ids.new_empty(
        (ids.shape[0], _size()), dtype=torch.uint8
    ),
    "ssd_get": lambda store, ids: (
        _flags(store, ids),
        ids.new_empty((_size(), _size()), dtype=torch.uint8),
    ),
    "group_table_ids": lambda group, ids, offsets: [_some_ids(group, ids)],
    "group_read": _pooled,
    "group_forward": lambda group, ids, *more: (
        _pooled(group, ids),
        ids.new_empty(int(more[-1])),
    ),
    "group_backward": lambda context, grad, rates, weights: grad.new_empty(
        (_size() if weights else 0,)
    ),
    "group_weight_gradients": lambda context, grad: grad.new_empty(_size()),
    "rows_forward": lambda groups, ids, counts, train: (
        ids.new_empty(_size(), dtype=torch.float32),
        ids.new_empty(len(groups) if train else 0),
    ),
    "ids_split": lambda ids, tables, owners, n: (
        *(ids.new_empty(ids.shape) for _ in range(2)),
        ids.new_empty(n, len(tables)),
    ),
    "ids_distinct": lambda ids, counts: (
        ids.new_empty(_size()),
        ids.new_empty(ids.shape),
        ids.new_empty(len(counts)),
    ),
    "mix_ids": lambda ids, inverse: ids.new_empty(ids.shape),
}

_ON_TENSORS = (
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
