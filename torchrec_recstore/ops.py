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
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType

from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RMSprop,
    RowWiseAdagrad,
)
from torchrec_recstore.options import LFU, ConstantInit, Initializer, NormalInit, TableOptions, UniformInit

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
_CLOSED = "no open table has the handle"
# csrc/optimizer.h, OptimizerKind. AdamW is FBGEMM's Adam with other defaults.
_KINDS: dict[type, int] = {
    SGD: 0,
    Adagrad: 1,
    RowWiseAdagrad: 2,
    Adam: 3,
    AdamW: 3,
    PartialRowWiseAdam: 4,
    LAMB: 5,
    PartialRowWiseLAMB: 6,
    LARSSGD: 7,
    RMSprop: 8,
    Ftrl: 9,
}


# csrc/config.h, RowType.
_ROW_TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ROW_DTYPES = tuple(_ROW_TYPES)
"""What a table's weights can be stored as."""


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
            text = text.removeprefix(_INVALID)
            if text.startswith(_CLOSED) and who.startswith("table '"):
                text = "it is closed"
            raise ValueError(text if text.startswith("table '") else f"{who}: {text}") from None
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


def _optimizer_numbers(optimizer: Optimizer) -> list[float]:
    """In the order of csrc/optimizer.h, OptimizerConfig; 0 for what the optimizer has not or has switched off."""

    def number(name: str) -> float:
        return float(getattr(optimizer, name, None) or 0.0)

    decouple = getattr(optimizer, "weight_decay_mode", None) == "decouple"
    betas = getattr(optimizer, "betas", (0.0, 0.0))
    return [
        number("eps"),
        number("weight_decay"),
        float(decouple),
        number("momentum"),
        *map(float, betas),
        *map(number, ("eta", "alpha", "l1", "l2", "lr_power", "beta", "max_gradient", "max_gradient_norm", "max_norm")),
    ]


def _bounds(options: TableOptions) -> list[int]:
    """In the order of csrc/config.h, Bounds; 0 for what there is not."""
    eviction, admission = options.eviction, options.admission
    return [
        options.max_rows or 0,
        0 if eviction is None else 2 if isinstance(eviction, LFU) else 1,
        (isinstance(eviction, LFU) and eviction.half_life_steps) or 0,
        0 if options.expiry is None else options.expiry.steps,
        0 if admission is None else admission.count,
        0 if admission is None else admission.counter_bytes,
        int(options.cold_store is not None),
    ]


def table_create(
    name: str,
    columns: range,
    seed: int,
    missing: str,
    initializer: Initializer,
    optimizer: Optimizer,
    dtype: torch.dtype = torch.float32,
    stochastic_rounding: bool = False,
    options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
) -> int:
    """Makes a table that holds ``columns`` of each row; returns its handle, to be given to :func:`table_destroy`.

    ``dtype`` is one of :data:`ROW_DTYPES`; tensors of weights are float32 for each of them. Of ``options`` the bounds
    count.
    """
    numbers = _initializer_numbers(initializer)
    with native_errors(f"table '{name}'"):
        handle = _ops.table_create(
            name,
            columns.start,
            columns.stop,
            seed,
            missing == "init",
            *numbers,
            _KINDS[type(optimizer)],
            _optimizer_numbers(optimizer),
            _ROW_TYPES[dtype],
            stochastic_rounding,
            _bounds(options),
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
"""(table) -> rows, bytes, lookups, misses, inserts, updates, steps, refused, evicted, expired, cold hits."""

table_optimizer_steps = cast(Callable[[int], int], _ops.table_optimizer_steps.default)
"""(table) -> the updates so far, one a step: what Adam's and LAMB's bias correction counts."""

table_set_optimizer_steps = cast(Callable[[int, int], None], _ops.table_set_optimizer_steps.default)
"""(table, updates)."""

table_steps = cast(Callable[[int], int], _ops.table_steps.default)
"""(table) -> training lookups so far."""

table_set_steps = cast(Callable[[int, int], None], _ops.table_set_steps.default)
"""(table, training lookups so far): the clock that last steps are told by."""

RowTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Weights (N, columns) of the table's dtype, element-wise optimizer states (states, N, columns) float32, the row-wise
state (N,) float32, last step (N,) int64, frequency (N,) int64."""

table_export = cast(Callable[[int, Tensor], RowTensors], _ops.table_export.default)
"""(table, ids (N,) int64) -> :data:`RowTensors`. ValueError where an id has no row."""

table_import = cast(Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None], _ops.table_import.default)
"""(table, ids (N,) int64, :data:`RowTensors`). Makes or overwrites the rows, all of each."""

table_exchange_rows = cast(Callable[[int, int], None], _ops.table_exchange_rows.default)
"""(table, other table of the same shape). Each gets the other's rows, clocks and changes; nothing is copied."""

table_is_being_saved = cast(Callable[[int], bool], _ops.table_is_being_saved.default)
"""(table) -> whether there is a snapshot of it."""

table_sightings = cast(Callable[[int], tuple[Tensor, int]], _ops.table_sightings.default)
"""(table) -> what admission has counted: cells (2, 4, N) uint8, the present generation first, and the sightings that
this one has taken. N is 0 without admission."""

table_set_sightings = cast(Callable[[int, Tensor, int], None], _ops.table_set_sightings.default)
"""(table, cells, taken)."""

# What follows is for whoever keeps a table's cold store. An image, (image bytes,) uint8, is a row with all its state.

table_image_bytes = cast(Callable[[int], int], _ops.table_image_bytes.default)
"""(table) -> bytes of an image."""

table_absent = cast(Callable[[int, Tensor], Tensor], _ops.table_absent.default)
"""(table, ids (N,) int64) -> the distinct ones that have no row in memory, in the order of their first occurrence."""

table_may_be_cold = cast(Callable[[int, Tensor], Tensor], _ops.table_may_be_cold.default)
"""(table, ids (N,) int64) -> (N,) bool: whether they may have left for the cold store; False is certain."""

table_admits = cast(Callable[[int, Tensor, bool], Tensor], _ops.table_admits.default)
"""(table, ids (N,) int64 without a row, lookup) -> (N,) bool: whether a training lookup, or else an update, would make
their rows."""

table_leaving = cast(Callable[[int, Tensor, int], Tensor], _ops.table_leaving.default)
"""(table, ids (N,) int64, new rows) -> ids whose rows must leave before so many more come, none of ``ids``. ValueError
where the working set is larger than ``max_rows``."""

table_images = cast(Callable[[int, Tensor], Tensor], _ops.table_images.default)
"""(table, ids (N,) int64) -> (N, image bytes) uint8. ValueError where an id has no row in memory."""

table_evict = cast(Callable[[int, Tensor, Tensor], Tensor], _ops.table_evict.default)
"""(table, ids (N,) int64, images (N, image bytes) uint8) -> (N,) bool: which rows have left memory; those stay that are
no longer as in their image, or that a pending backward needs."""

table_bring_back = cast(Callable[[int, Tensor, Tensor, bool], None], _ops.table_bring_back.default)
"""(table, ids (N,) int64, images (N, image bytes) uint8, whether a step looks them up). There must be room."""

table_expired = cast(Callable[[int], Tensor], _ops.table_expired.default)
"""(table) -> ids (N,) int64 whose rows no step has looked up for too long."""

table_note_cold = cast(Callable[[int, Tensor], None], _ops.table_note_cold.default)
"""(table, ids (N,) int64) whose rows are about to be written to the cold store."""

table_note_left = cast(Callable[[int, Tensor], None], _ops.table_note_left.default)
"""(table, ids (N,) int64) whose rows have left the cold store for good: for deltas."""

table_count_expired = cast(Callable[[int, int], None], _ops.table_count_expired.default)
"""(table, rows) that have left for age."""

table_mark = cast(Callable[[int], int], _ops.table_mark.default)
"""(table) -> a mark, since when changes are known from here on."""

snapshot_open = cast(Callable[[int, int | None], int], _ops.snapshot_open.default)
"""(table, mark or None) -> a snapshot of all rows, or of those changed since the mark."""

snapshot_moment = cast(Callable[[int], list[int]], _ops.snapshot_moment.default)
"""(snapshot) -> a mark of its moment, and the table's rows, steps and optimizer steps then."""

snapshot_left = cast(Callable[[int], Tensor | None], _ops.snapshot_left.default)
"""(snapshot since a mark) -> ids (N,) int64, ascending, that had a row then and had none any more; None where they are
no longer known, or where there was no mark."""

snapshot_rows_left = cast(Callable[[int], int], _ops.snapshot_rows_left.default)
"""(snapshot) -> rows that have not been read."""

snapshot_read = cast(
    Callable[[int, int, bool], tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]], _ops.snapshot_read.default
)
"""(snapshot, n, polite) -> the next n ids (n,) int64, ascending, and their :data:`RowTensors`."""

snapshot_close = cast(Callable[[int], None], _ops.snapshot_close.default)
"""Forgets a snapshot. A handle that is unknown is ignored."""

group_destroy = cast(Callable[[int], None], _ops.group_destroy.default)
"""Forgets a group; its tables stay. A handle that is unknown is ignored."""

group_forward = cast(
    Callable[[int, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]], _ops.group_forward.default
)
"""(group, ids (N,) int64, offsets (features * B + 1,) int32 or int64, weights (N,) float32 or None, train)
-> pooled (B, columns) float32, and the context for :func:`group_backward` (empty without train).

While the context lives, the slots that the forward found are not reused."""

group_table_ids = cast(Callable[[int, Tensor, Tensor | None], list[Tensor]], _ops.group_table_ids.default)
"""(group, ids (N,) int64, offsets as for :func:`group_forward`, or None in a group of one feature) -> the raw ids that
the batch looks up in each table."""

group_read = cast(
    Callable[[int, Tensor, Tensor | None, Tensor | None, Sequence[Tensor], Sequence[Tensor]], Tensor],
    _ops.group_read.default,
)
"""(group, ids (N,) int64, offsets, weights, ids (n,) int64, ascending, and images (n, image bytes) uint8 of each table)
-> pooled (B, columns) float32: an evaluation lookup in which these rows lie elsewhere."""

group_prefetch = cast(Callable[[int, Tensor, Sequence[int]], None], _ops.group_prefetch.default)
"""(group, ids (N,) int64, how many of them each feature has). Makes missing rows ahead of their training forward, on
the calling thread alone; they count as misses and inserts now and as lookups then."""

group_backward = cast(Callable[[Tensor, Tensor, Sequence[float], bool], Tensor], _ops.group_backward.default)
"""(context, grad (B, columns) float32, learning rate of each table, weight_grads)
-> per-sample weights' gradient (N,) float32, empty without weight_grads. Updates the rows."""

group_weight_gradients = cast(Callable[[Tensor, Tensor], Tensor], _ops.group_weight_gradients.default)
"""(context, grad (B, columns) float32) -> per-sample weights' gradient (N,) float32; the rows stay as they are."""

group_accumulated_backward = cast(
    Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[float]], None], _ops.group_accumulated_backward.default
)
"""(contexts of one group, the grad of each (B, columns) float32, learning rate of each table): one update of each row
on the sum over all contexts, feature by feature, and of a feature context by context."""


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
    Callable[[Sequence[int], Tensor, Sequence[int], bool], tuple[Tensor, Tensor]], _ops.rows_forward.default
)
"""(groups of one feature, ids (N,) int64, counts: ids of each group, train)
-> rows (sum of counts * columns,) float32, and the contexts (groups,) that :func:`group_backward` takes one by one, as
``contexts[i : i + 1]`` (empty without train)."""

mix_ids = cast(Callable[[Tensor, bool], Tensor], _ops.mix_ids.default)
"""(ids (N,) int64, inverse) -> (N,) int64: a bijection without a pattern in its low bits, or its inverse."""


def buffer_pool_bytes() -> tuple[int, int, int]:
    """Bytes of the process's pool of outputs and gradients: in use, idle, and the most that it keeps idle."""
    used, idle, most_idle = _ops.buffer_pool_bytes()
    return used, idle, most_idle


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


def _fake_contains(table: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.bool)


def _fake_export(table: int, ids: Tensor) -> RowTensors:
    n, columns = ids.shape[0], _symbolic_size()
    floats = [
        ids.new_empty(shape, dtype=torch.float32) for shape in ((n, columns), (_symbolic_size(), n, columns), (n,))
    ]
    return floats[0], floats[1], floats[2], ids.new_empty(n), ids.new_empty(n)


def _fake_import(table: int, ids: Tensor, *rows: Tensor) -> None:
    return None


def _fake_forward(group: int, ids: Tensor, offsets: Tensor, weights: Tensor | None, train: bool) -> tuple[Tensor, ...]:
    out = ids.new_empty((_symbolic_size(), _symbolic_size()), dtype=torch.float32)
    return out, ids.new_empty((1 if train else 0,))


def _fake_prefetch(group: int, ids: Tensor, counts: Sequence[int]) -> None:
    return None


def _fake_backward(context: Tensor, grad: Tensor, learning_rates: Sequence[float], weight_grads: bool) -> Tensor:
    return grad.new_empty((_symbolic_size() if weight_grads else 0,))


def _fake_rows(groups: Sequence[int], ids: Tensor, counts: Sequence[int], train: bool) -> tuple[Tensor, Tensor]:
    out = ids.new_empty((_symbolic_size(),), dtype=torch.float32)
    return out, ids.new_empty((len(groups) if train else 0,))


def _fake_mix(ids: Tensor, inverse: bool) -> Tensor:
    return ids.new_empty(ids.shape)


def _fake_weight_gradients(context: Tensor, grad: Tensor) -> Tensor:
    return grad.new_empty((_symbolic_size(),))


def _fake_accumulated(contexts: Sequence[Tensor], grads: Sequence[Tensor], learning_rates: Sequence[float]) -> None:
    return None


def _fake_ids(table: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty(_symbolic_size())


def _fake_images(table: int, ids: Tensor) -> Tensor:
    return ids.new_empty((ids.shape[0], _symbolic_size()), dtype=torch.uint8)


def _fake_nothing(table: int, *_: object) -> None:
    return None


def _fake_table_ids(group: int, ids: Tensor, offsets: Tensor | None) -> list[Tensor]:
    return [ids.new_empty(_symbolic_size())]


def _fake_read(group: int, ids: Tensor, *_: object) -> Tensor:
    return ids.new_empty((_symbolic_size(), _symbolic_size()), dtype=torch.float32)


_FAKES: dict[str, Callable[..., object]] = {
    "table_lookup": _fake_lookup,
    "table_update": _fake_write,
    "table_insert": _fake_write,
    "table_remove": _fake_remove,
    "table_contains": _fake_contains,
    "table_export": _fake_export,
    "table_import": _fake_import,
    "table_set_sightings": _fake_nothing,
    "table_absent": _fake_ids,
    "table_may_be_cold": _fake_contains,
    "table_admits": _fake_contains,
    "table_leaving": _fake_ids,
    "table_images": _fake_images,
    "table_evict": _fake_contains,
    "table_bring_back": _fake_nothing,
    "table_note_cold": _fake_nothing,
    "table_note_left": _fake_nothing,
    "group_table_ids": _fake_table_ids,
    "group_read": _fake_read,
    "group_forward": _fake_forward,
    "group_prefetch": _fake_prefetch,
    "group_backward": _fake_backward,
    "rows_forward": _fake_rows,
    "mix_ids": _fake_mix,
    "group_weight_gradients": _fake_weight_gradients,
    "group_accumulated_backward": _fake_accumulated,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"recstore_ops::{_name}", _fake)
    if _fake is not _fake_mix:
        # The rows that the other ops read and change are no tensor of a graph. As effects in order, compilers neither
        # drop one of them nor move it before or behind another. (torch has no public name for it, 2.13.)
        _register_effectful_op(f"recstore_ops::{_name}", EffectType.ORDERED)
