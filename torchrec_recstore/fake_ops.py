"""The fake versions of the native ops, for torch.compile and opcheck, and the registration of ops in Python.

:func:`register` registers the fake versions, after the native extension has registered the ops.

The fake versions compute shapes only. A size that depends on a table is symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType


def _symbolic_size() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


def _fake_lookup(table: int, ids: Tensor, train: bool) -> Tensor:
    return ids.new_empty((ids.shape[0], _symbolic_size()), dtype=torch.float32)


def _fake_split(ids: Tensor, tables: Sequence[int], owners: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    return ids.new_empty(ids.shape), ids.new_empty(ids.shape), ids.new_empty(n, len(tables))


def _fake_distinct(ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    return ids.new_empty(_symbolic_size()), ids.new_empty(ids.shape), ids.new_empty(len(counts))


def _fake_remove(table: int, ids: Tensor) -> Tensor:
    return ids.new_empty(())


def _fake_contains(table: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.bool)


def _fake_export(table: int, ids: Tensor) -> tuple[Tensor, ...]:
    n, columns = ids.shape[0], _symbolic_size()
    floats = [
        ids.new_empty(shape, dtype=torch.float32) for shape in ((n, columns), (_symbolic_size(), n, columns), (n,))
    ]
    return floats[0], floats[1], floats[2], ids.new_empty(n), ids.new_empty(n)


def _fake_forward(group: int, ids: Tensor, offsets: Tensor, weights: Tensor | None, train: bool) -> tuple[Tensor, ...]:
    out = ids.new_empty((_symbolic_size(), _symbolic_size()), dtype=torch.float32)
    return out, ids.new_empty((1 if train else 0,))


def _fake_backward(context: Tensor, grad: Tensor, learning_rates: Sequence[float], weight_grads: bool) -> Tensor:
    return grad.new_empty((_symbolic_size() if weight_grads else 0,))


def _fake_rows(groups: Sequence[int], ids: Tensor, counts: Sequence[int], train: bool) -> tuple[Tensor, Tensor]:
    out = ids.new_empty((_symbolic_size(),), dtype=torch.float32)
    return out, ids.new_empty((len(groups) if train else 0,))


def _fake_mix(ids: Tensor, inverse: bool) -> Tensor:
    return ids.new_empty(ids.shape)


def _fake_weight_gradients(context: Tensor, grad: Tensor) -> Tensor:
    return grad.new_empty((_symbolic_size(),))


def _fake_ids(table: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty(_symbolic_size())


def _fake_images(table: int, ids: Tensor) -> Tensor:
    return ids.new_empty((ids.shape[0], _symbolic_size()), dtype=torch.uint8)


def _fake_nothing(*_: object) -> None:
    return None


def _fake_table_ids(group: int, ids: Tensor, offsets: Tensor | None) -> list[Tensor]:
    return [ids.new_empty(_symbolic_size())]


def _fake_read(group: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty((_symbolic_size(), _symbolic_size()), dtype=torch.float32)


_FAKES: dict[str, Callable[..., object]] = {
    "table_lookup": _fake_lookup,
    "table_read": _fake_nothing,
    "table_update": _fake_nothing,
    "table_insert": _fake_nothing,
    "table_remove": _fake_remove,
    "table_contains": _fake_contains,
    "table_export": _fake_export,
    "table_import": _fake_nothing,
    "table_set_sightings": _fake_nothing,
    "table_absent": _fake_ids,
    "table_may_be_cold": _fake_contains,
    "table_admits": _fake_contains,
    "table_leaving": _fake_ids,
    "table_images": _fake_images,
    "table_evict": _fake_contains,
    "table_bring_back": _fake_nothing,
    "table_note_cold": _fake_nothing,
    "table_begin_refilter": _fake_nothing,
    "table_keep_cold": _fake_nothing,
    "table_may_be_kept": _fake_contains,
    "table_end_refilter": _fake_nothing,
    "table_note_left": _fake_nothing,
    "group_table_ids": _fake_table_ids,
    "group_read": _fake_read,
    "group_forward": _fake_forward,
    "group_prefetch": _fake_nothing,
    "group_backward": _fake_backward,
    "rows_forward": _fake_rows,
    "rows_begin": _fake_ids,
    "rows_read": _fake_nothing,
    "rows_update": _fake_nothing,
    "ids_split": _fake_split,
    "ids_distinct": _fake_distinct,
    "mix_ids": _fake_mix,
    "rows_put": _fake_nothing,
    "rows_take": _fake_nothing,
    "group_weight_gradients": _fake_weight_gradients,
    "group_accumulated_backward": _fake_nothing,
}


_ON_TENSORS = ("ids_distinct", "ids_split", "mix_ids", "rows_put", "rows_take", "table_read")
"""The ops whose results are in tensors alone. The schema of an op states the tensors that the op changes."""

PYTHON_OPS = torch.library.Library("recstore_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
"""The ops that are implemented in Python; see :func:`register_python_op`."""


def register() -> None:
    """Registers the fake version of each native op. The ops on tables are registered as ordered effects."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"recstore_ops::{name}", fake)
        if name not in _ON_TENSORS:
            _register_effect(name)


def register_python_op(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], dispatch_key: str = "CPU"
) -> None:
    """Registers an op that is implemented in Python, and its fake version, as an ordered effect.

    Args:
        schema: The op's schema, without a namespace.
        implementation: The op.
        fake: Its fake version.
        dispatch_key: The dispatch key of the implementation. Default: ``"CPU"``.
    """
    name = schema.partition("(")[0]
    PYTHON_OPS.define(schema)  # type: ignore[no-untyped-call]
    PYTHON_OPS.impl(name, implementation, dispatch_key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"recstore_ops::{name}", fake, lib=PYTHON_OPS)
    _register_effect(name)


def _register_effect(name: str) -> None:
    # The ops read and change rows, which are not tensors of a graph. As ordered effects, they are neither dropped nor
    # reordered by compilers. (torch 2.13 has no public name for this.)
    _register_effectful_op(f"recstore_ops::{name}", EffectType.ORDERED)
