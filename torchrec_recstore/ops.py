"""Typed wrappers of the native ops ``torch.ops.recstore_ops.*``.

All tensors are on the CPU. The native ops check every argument, so that no input
crashes the process. Below, an *image* is a row with all its state as bytes, (image
bytes,) uint8; the owner of a cold store reads and writes images.

Raises:
    ImportError: The native extension has not been built, or does not load with the
        installed torch. Raised on import.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torchrec_recstore import fake_ops, table_fields
from torchrec_recstore.optim import Optimizer, RowOptimizer
from torchrec_recstore.options import NONFINITE, Initializer, TableOptions
from torchrec_recstore.row_types import ROW_TYPES, STATE_TYPES

try:
    from torchrec_recstore import _C  # noqa: F401  (the import registers the ops)
except ImportError as error:
    raise ImportError(
        "the native extension torchrec_recstore._C is missing or does not fit this"
        f" torch ({torch.__version__}, needs 2.11 or later): run `make build` in the"
        " repository, or `pip install --no-build-isolation .` with torch installed"
    ) from error

fake_ops.register()
_ops = torch.ops.recstore_ops
_INVALID = "recstore invalid argument: "
_NO_MEMORY = "recstore out of memory: "
_CLOSED = "no open table has the handle"

waiting_updates: deque[Callable[[], None]] = deque()
"""The updates of rows that wait for gradients from an accelerator, in the order of
their backward passes.

Every call that reads or changes a table, its statistics included, calls
:func:`finish_updates` first. So nothing sees rows without the updates of earlier
passes.
"""
_finishing = threading.RLock()
_in_progress = False


def finish_updates() -> None:
    """Carries out all updates that wait.

    Call it before the native ops that read or change a table's rows, counts or clocks.
    These ops do not need it: those that only allocate or free memory, and those that
    read a snapshot, which has the rows of an earlier moment.

    If an update raises an error, the next call carries out those after it.
    """
    if waiting_updates:
        _carry_out_updates()


def _carry_out_updates() -> None:
    global _in_progress
    with _finishing:
        if _in_progress:  # An update itself calls the functions that finish updates.
            return
        _in_progress = True
        try:
            while waiting_updates:
                try:
                    waiting_updates[0]()
                finally:
                    # Afterwards, so that other threads wait for an update in progress.
                    waiting_updates.popleft()
        finally:
            _in_progress = False


class native_errors:
    """A context manager that converts native errors to ValueError and MemoryError, and
    adds the name of the caller.

    ``label``, such as ``"table 't_user'"``, is the beginning of the message. It is a
    class, because a generator takes three times as long to enter and to leave.
    """

    __slots__ = ("_label",)

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        if not isinstance(error, RuntimeError):
            return
        text = str(error).partition("\n")[0]
        if text.startswith(_INVALID):
            text = text.removeprefix(_INVALID)
            if text.startswith(_CLOSED) and self._label.startswith("table '"):
                text = f"{self._label} is closed"
            raise ValueError(
                text if text.startswith("table '") else f"{self._label}: {text}"
            ) from None
        if text.startswith(_NO_MEMORY) or "std::bad_alloc" in text:
            raise MemoryError(
                f"{self._label}: out of memory: {text.removeprefix(_NO_MEMORY)}"
            ) from None


def table_create(
    name: str,
    columns: range,
    seed: int,
    missing: str,
    initializer: Initializer,
    optimizer: Optimizer,
    dtype: torch.dtype = torch.float32,
    stochastic_rounding: bool = False,
    state_dtype: torch.dtype = torch.float32,
    options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
) -> int:
    """Makes a table of one shard's columns and returns its handle, which
    :func:`table_destroy` frees.

    ``missing``, ``"zeros"`` or ``"init"``, is how an evaluation lookup reads an id
    without a row. Lookups return float32 for each ``dtype``, one of
    ``row_types.ROW_DTYPES``. ``stochastic_rounding`` is for updates of narrow weights.
    ``state_dtype``, a key of ``row_types.STATE_TYPES``, is that of optimizer states.
    Only the bounds and ``nonfinite`` of ``options`` are used.
    """
    integers = {
        "column_begin": columns.start,
        "column_end": columns.stop,
        "seed": seed,
        "missing_reads_init": int(missing == "init"),
        "init": table_fields.initializer_kind(initializer),
        "row_type": ROW_TYPES[dtype],
        "stochastic_rounding": int(stochastic_rounding),
        "state_type": STATE_TYPES[state_dtype],
        "nonfinite": NONFINITE.index(options.nonfinite),
        **table_fields.bounds(options),
    }
    numbers = table_fields.initializer_numbers(initializer) | optimizer.numbers()
    with native_errors(f"table '{name}'"):
        hyperparameters: list[float] = []
        integers["optimizer"] = optimizer.kind
        if isinstance(optimizer, RowOptimizer):
            hyperparameters = optimizer.hyperparameter_values()
            integers["optimizer"] = _ops.optimizer_load(**optimizer.code())
        handle = _ops.table_create(
            name=name,
            integer_names=list(integers),
            integers=list(integers.values()),
            number_names=list(numbers),
            numbers=list(numbers.values()),
            hyperparameters=hyperparameters,
        )
    return cast(int, handle)


# A decorator for the ops of finalizers: Python may collect garbage in the middle of a
# trace, and the graph must not record them. Torch 2.12 to 2.14 have no public name for
# this.
untraced = _disable_current_modes()

# A table and its rows.
table_destroy = untraced(_ops.table_destroy.default)
"""(table). Frees a table. An unknown handle is ignored."""
table_lookup: Callable[[int, Tensor, bool], Tensor] = _ops.table_lookup.default
"""(table, ids (N,) int64, train) -> (N, columns) float32.

A training lookup is one step and makes missing rows.
"""
table_read: Callable[[int, Tensor, Tensor], None] = _ops.table_read.default
"""(table, ids (N,) int64, out (N, columns) float32, contiguous).

Reads rows into ``out`` without a change.
"""
table_update: Callable[[int, Tensor, Tensor, float], None] = _ops.table_update.default
"""(table, ids (N,) int64, grads (N, columns) float32, learning rate).

Updates the rows; makes missing rows first.
"""
table_insert: Callable[[int, Tensor, Tensor], None] = _ops.table_insert.default
"""(table, ids (N,) int64, weights (N, columns) float32).

Makes or overwrites the weights of rows.
"""
table_remove: Callable[[int, Tensor], Tensor] = _ops.table_remove.default
"""(table, ids (N,) int64) -> () int64: the number of rows that were removed."""
table_contains: Callable[[int, Tensor], Tensor] = _ops.table_contains.default
"""(table, ids (N,) int64) -> (N,) bool: whether each id has a row in memory."""
table_set_scores: Callable[[int, Tensor, Tensor], Tensor] = (
    _ops.table_set_scores.default
)
"""(table, ids (N,) int64, scores (N,) float32, finite) -> () int64: the number of rows
whose score was set.

Ids without a row in memory are ignored; of duplicates, the last one counts.
"""
table_score_images: Callable[[int, Tensor, Tensor, Tensor], Tensor] = (
    _ops.table_score_images.default
)
"""(table, distinct ids (N,) int64, scores (N,) float32, finite, images (N, image bytes)
uint8 of cold rows) -> a copy of the images with these scores, which the caller writes
to the cold store.
"""
table_record_left: Callable[[int, int], None] = _ops.table_record_left.default
"""(table, number of ids).

Begins to record which rows leave the table for good, up to this number of distinct ids.
"""
table_take_left: Callable[[int], tuple[Tensor, bool]] = _ops.table_take_left.default
"""(table) -> the recorded ids without a row in memory, (N,) int64, ascending, and
whether these are all.

The record begins anew.
"""
table_add_left: Callable[[int, Tensor, bool], None] = _ops.table_add_left.default
"""(table, ids (N,) int64, complete).

Adds ids to the record. Without ``complete``, other ids have left, too.
"""
table_ids: Callable[[int], Tensor] = _ops.table_ids.default
"""(table) -> (rows,) int64: the ids that have a row in memory, in ascending order."""
table_stats: Callable[[int], list[int]] = _ops.table_stats.default
"""(table) -> rows, bytes, lookups, misses, inserts, updates, steps, refused, evicted,
expired, cold hits, refused times.
"""
RowTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Stored weights (see ``row_types.py``), element-wise optimizer states (states, N,
columns) float32, row-wise optimizer state (N,) float32, last step (N,) int64, frequency
(N,) int64.
"""
table_export: Callable[[int, Tensor], RowTensors] = _ops.table_export.default
"""(table, ids (N,) int64) -> :data:`RowTensors`.

An id without a row is a ValueError.
"""
table_import: Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None] = (
    _ops.table_import.default
)
"""(table, ids (N,) int64, :data:`RowTensors`). Makes or overwrites whole rows."""
table_exchange_rows: Callable[[int, int], None] = _ops.table_exchange_rows.default
"""(table, other table of the same shape).

Exchanges the rows, clocks and changes of two tables without copying them.
"""

# The clocks of a table, and what its admission has counted.
table_optimizer_steps: Callable[[int], int] = _ops.table_optimizer_steps.default
"""(table) -> the number of updates so far, which the bias correction of Adam and LAMB
uses.

Each step is one update.
"""
table_set_optimizer_steps: Callable[[int, int], None] = (
    _ops.table_set_optimizer_steps.default
)
"""(table, number of updates).

Sets the number that :data:`table_optimizer_steps` returns.
"""
table_steps: Callable[[int], int] = _ops.table_steps.default
"""(table) -> the number of training lookups so far, which is the clock of the rows'
last steps.
"""
table_set_steps: Callable[[int, int], None] = _ops.table_set_steps.default
"""(table, number of training lookups).

Sets the clock that :data:`table_steps` returns.
"""
table_times: Callable[[int], list[int]] = _ops.table_times.default
"""(table) -> the times of the table's steps, by which rows expire; empty if they do not
expire after a time.

The numbers are those of ``WallClock::state`` in csrc/bounds/wall_clock.h, and times are
microseconds since 1970.
"""
table_set_times: Callable[[int, list[int]], None] = _ops.table_set_times.default
"""(table, numbers). Restores what :data:`table_times` returns."""
table_set_time: Callable[[int, Sequence[int]], list[int]] = _ops.table_set_time.default
"""(table, times of the events that the ranks know, in microseconds since 1970) ->
nothing, or a time that was refused, the time of the clock, and the number of refusals.

``WallClock::set`` in csrc/bounds/wall_clock.h says which time is taken. A table whose
rows do not expire after a time ignores them.
"""
table_follow_time: Callable[[int, int], None] = _ops.table_follow_time.default
"""(table, microseconds since 1970).

Sets the time that is read in place of the system's clock.
"""
table_sightings: Callable[[int], tuple[Tensor, Tensor, Tensor]] = (
    _ops.table_sightings.default
)
"""(table) -> what admission has counted: the ids, (N,) int64, the count of each id in a
generation of the counter, (N,) uint8, and the generation, (N,) uint8: 0 for the present
one, 1 for the older one.

N is 0 without admission.
"""
table_set_sightings: Callable[[int, Tensor, Tensor, Tensor], None] = (
    _ops.table_set_sightings.default
)
"""(table, ids, counts, generations).

Restores what :data:`table_sightings` of any tables has returned.
"""

# For the owner of a table's cold store.
table_image_bytes: Callable[[int], int] = _ops.table_image_bytes.default
"""(table) -> the number of bytes of an image."""
table_absent: Callable[[int, Tensor], Tensor] = _ops.table_absent.default
"""(table, ids (N,) int64) -> the distinct ids without a row in memory, in the order of
their first occurrence.
"""
table_may_be_cold: Callable[[int, Tensor], Tensor] = _ops.table_may_be_cold.default
"""(table, ids (N,) int64) -> (N,) bool: whether each row may be in the cold store.

False is certain, True is not.
"""
table_admits: Callable[[int, Tensor, bool], Tensor] = _ops.table_admits.default
"""(table, ids (N,) int64 without a row, lookup) -> (N,) bool: whether a training
lookup, or else an update, would make a row for each id.
"""
table_leaving: Callable[[int, Tensor, int], Tensor] = _ops.table_leaving.default
"""(table, ids (N,) int64, number of new rows) -> the ids whose rows must be evicted
before the new rows are made; none of ``ids``.

A working set larger than ``max_rows`` is a ValueError.
"""
table_images: Callable[[int, Tensor], Tensor] = _ops.table_images.default
"""(table, ids (N,) int64) -> images (N, image bytes) uint8.

An id without a row in memory is a ValueError.
"""
table_evict: Callable[[int, Tensor, Tensor], Tensor] = _ops.table_evict.default
"""(table, ids (N,) int64, images (N, image bytes) uint8) -> (N,) bool: whether each row
was removed from memory.

A row stays if it is no longer equal to its image, or if a pending backward needs it.
"""
table_bring_back: Callable[[int, Tensor, Tensor, bool], None] = (
    _ops.table_bring_back.default
)
"""(table, ids (N,) int64, images (N, image bytes) uint8, whether a step looks up the
ids).

Makes the rows of images that were read from the cold store. The table must have room
for them.
"""
table_expired: Callable[[int], Tensor] = _ops.table_expired.default
"""(table) -> ids (N,) int64 of the rows that have expired."""
table_note_cold: Callable[[int, Tensor], None] = _ops.table_note_cold.default
"""(table, ids (N,) int64).

Notes that the rows are about to be written to the cold store.
"""
table_begin_refilter: Callable[[int], None] = _ops.table_begin_refilter.default
"""(table).

Begins a new filter for :data:`table_may_be_cold`, of the ids that are noted from now on
or kept.
"""
table_keep_cold: Callable[[int, Tensor], None] = _ops.table_keep_cold.default
"""(table, ids (N,) int64).

Keeps ids whose rows are in the cold store in the new filter.
"""
table_may_be_kept: Callable[[int, Tensor], Tensor] = _ops.table_may_be_kept.default
"""(table, ids (N,) int64) -> (N,) bool: whether each was noted or kept since the new
filter began.

False is certain.
"""
table_end_refilter: Callable[[int], None] = _ops.table_end_refilter.default
"""(table). Replaces the filter by the new one."""
table_note_left: Callable[[int, Tensor], None] = _ops.table_note_left.default
"""(table, ids (N,) int64).

Notes that the rows were deleted from the cold store for good, for delta checkpoints.
"""
table_count_expired: Callable[[int, int], None] = _ops.table_count_expired.default
"""(table, number of rows). Adds rows to the count of expired rows."""

# The changes of a table since a mark, and its memory.
table_mark: Callable[[int], int] = _ops.table_mark.default
"""(table) -> a new mark. From now on it is known which rows change after this mark."""
table_locate_rows: Callable[[int], None] = _ops.table_locate_rows.default
"""(table).

Records where the index has each row, so that a snapshot of changed rows takes time for
these rows only.
"""
table_reserve: Callable[[int, int], None] = _ops.table_reserve.default
"""(table, rows).

Grows the index for this many rows in all, at most max_rows: no entries move while they
arrive.
"""
table_shrink: Callable[[int], None] = _ops.table_shrink.default
"""(table).

Returns the memory of removed rows to the system. Does nothing while a snapshot or a
backward is pending.
"""

# Snapshots.
table_is_being_saved: Callable[[int], bool] = _ops.table_is_being_saved.default
"""(table) -> whether the table has a snapshot."""
snapshot_open: Callable[[int, int | None], int] = _ops.snapshot_open.default
"""(table, mark or None) -> a snapshot of all rows, or of the rows that have changed
since the mark.
"""
snapshot_moment: Callable[[int], list[int]] = _ops.snapshot_moment.default
"""(snapshot) -> a mark of the snapshot's moment, and the table's rows, steps and
optimizer steps at that moment.
"""
snapshot_left: Callable[[int], Tensor | None] = _ops.snapshot_left.default
"""(snapshot) -> ids (N,) int64, ascending, of the rows that were removed after the mark
of :data:`snapshot_open`; None if they are no longer known, or if there was no mark.
"""
snapshot_rows_left: Callable[[int], int] = _ops.snapshot_rows_left.default
"""(snapshot) -> the number of rows that have not been read."""
snapshot_read: Callable[
    [int, int, bool], tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
] = _ops.snapshot_read.default
"""(snapshot, n, polite) -> the next n ids (n,) int64, ascending, and their
:data:`RowTensors`.

A polite read takes a small share of one core, so that it does not slow down training.
"""
snapshot_close = untraced(_ops.snapshot_close.default)
"""(snapshot). Ends a snapshot. An unknown handle is ignored."""

# Lookups of a group of tables, and their updates.
group_destroy = untraced(_ops.group_destroy.default)
"""(group). Forgets a group; its tables stay open. An unknown handle is ignored."""
group_forward: Callable[
    [int, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]
] = _ops.group_forward.default
"""(group, ids (N,) int64, offsets (features * B + 1,) int32 or int64, weights (N,)
float32 or None, train) -> pooled (B, columns) float32, and the context for
:func:`group_backward`, which is empty without ``train``.

The slots that the forward has found are not reused while the context exists.
"""
group_forward_into: Callable[
    [int, Tensor, Tensor, Tensor | None, bool, Tensor], Tensor
] = _ops.group_forward_into.default
"""(group, ids, offsets, weights, train, out (B, columns) float32, contiguous) -> the
context of :data:`group_forward`, whose output is written to ``out``.
"""
group_table_ids: Callable[[int, Tensor, Tensor | None], list[Tensor]] = (
    _ops.group_table_ids.default
)
"""(group, ids (N,) int64, offsets) -> for each table, the raw ids that the batch looks
up in it.

The offsets are as for :func:`group_forward`; they may be None in a group of one
feature.
"""
group_read: Callable[
    [
        int,
        Tensor,
        Tensor | None,
        Tensor | None,
        Sequence[Tensor],
        Sequence[Tensor],
    ],
    Tensor,
] = _ops.group_read.default
"""(group, ids (N,) int64, offsets, weights, elsewhere_ids, elsewhere_images) -> pooled
(B, columns) float32.

An evaluation lookup in which some rows are not in the tables: for each table, their ids
(n,) int64, ascending, and their images (n, image bytes) uint8.
"""
group_prefetch: Callable[[int, Tensor, Sequence[int]], None] = (
    _ops.group_prefetch.default
)
"""(group, ids (N,) int64, number of ids of each feature).

Makes missing rows before their training forward, on the calling thread alone. The rows
count as misses and inserts now, and as lookups in the forward.
"""
group_backward: Callable[[Tensor, Tensor, Sequence[float], bool], Tensor] = (
    _ops.group_backward.default
)
"""(context, grad (B, columns) float32, learning rate of each table, weight_grads) ->
gradient of the per-sample weights (N,) float32, which is empty without
``weight_grads``.

Updates the rows.
"""
group_weight_gradients: Callable[[Tensor, Tensor], Tensor] = (
    _ops.group_weight_gradients.default
)
"""(context, grad (B, columns) float32) -> gradient of the per-sample weights (N,)
float32.

The rows do not change.
"""
group_accumulated_backward: Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[float]], None
] = _ops.group_accumulated_backward.default
"""(contexts of one group, grad (B, columns) float32 of each context, learning rate of
each table).

Updates each row once, on the sum of its gradients over all contexts. The sum is taken
feature by feature, and within a feature context by context.
"""


def group_create(
    tables: Sequence[int],
    feature_tables: Sequence[int],
    routings: Sequence[tuple[int, int, int, bool]],
    mean: bool,
) -> int:
    """Makes a group of tables that one call looks up, and returns its handle, which
    :func:`group_destroy` frees.

    ``feature_tables`` has the position of each feature's table in ``tables``. A routing
    is (block_rows, world_size, rank, mixed); a world_size of 0 leaves ids unchanged.
    ``mean`` pools by the mean, otherwise by the sum.
    """
    with native_errors("group"):
        handle = _ops.group_create(
            tables=list(tables),
            feature_tables=list(feature_tables),
            block_rows=[routing[0] for routing in routings],
            world_sizes=[routing[1] for routing in routings],
            ranks=[routing[2] for routing in routings],
            mixed=[int(routing[3]) for routing in routings],
            mean=mean,
        )
    return cast(int, handle)


# Rows that are also on a device. All tensors are on the host, and the caller copies them.
# See csrc/lookup/device_pass.h.
table_make_device_slots: Callable[[int, int], None] = (
    _ops.table_make_device_slots.default
)
"""(table, device slots). Gives a table device slots, once."""
group_begin: Callable[[int, Tensor, Tensor, Tensor | None], Tensor] = (
    _ops.group_begin.default
)
"""(group, ids (N,) int64, offsets, weights) -> the context of a training lookup without
its output.
"""
device_plan: Callable[[Tensor, Sequence[int], Sequence[int], Tensor], bool] = (
    _ops.device_plan.default
)
"""(context, number of the first device slot of each table, arena of each table, out
(N,) int32) -> whether the rows of the lookup fit on the device.

The context may have several passes; the tables are those of all passes. If the rows
fit, a plan exists, and ``out`` has the number of each position's row, as
``kernels/device_interface.py`` explains it. The staging of an arena has the initial
rows of :data:`device_refused`, table by table.
"""
device_refused: Callable[[Tensor], tuple[Tensor, Tensor]] = _ops.device_refused.default
"""(context) -> the raw ids that admission has refused in a planned lookup, table by
table, (n,) int64, and their number of each table, (tables,) int64.
"""
device_has_bags_of_one: Callable[[Tensor], bool] = _ops.device_has_bags_of_one.default
"""(context) -> whether each bag of the lookup has one position. A lookup without offsets
has such bags, too.
"""
device_plan_refresh: Callable[[Tensor], Tensor] = _ops.device_plan_refresh.default
"""(context) -> whether each table counts the update of the lookup, (tables,) int64.

Plans that rows of the lookup that the host has written are copied again. A table does
not count the update if its rows were exchanged after the lookup.
"""
device_find: Callable[[int, Tensor, int, int, bool], tuple[Tensor, Tensor, Tensor]] = (
    _ops.device_find.default
)
"""(table, raw ids (N,) int64, number of its first device slot, number of rows that the
staging of its arena has already, whether ids that read as zeros are staged) -> the
number of each id's row, (N,) int32, and the host's slots and the ids of the rows that
this call adds to the staging, (n,) int64.
"""
device_stage_rows: Callable[
    [
        int,
        Tensor | None,
        Tensor,
        bool,
        Tensor | None,
        Tensor | None,
        Tensor,
    ],
    None,
] = _ops.device_stage_rows.default
"""(table, slots (n,) int64 or None for ids without a row, ids (n,) int64, whether ids
without a row always read as their initial rows, ids of rows elsewhere, ascending, their
images, out (n, stride) float32). Writes the rows of a staging to ``out``.
"""
device_skipped: Callable[[int, int], None] = _ops.device_skipped.default
"""(table, rows). Counts rows that an update has left as they are, because their gradient
was not finite. The update has counted them as updated.
"""
device_updated: Callable[[Tensor], None] = _ops.device_updated.default
"""(context). Notes that the device has updated the rows of the pass."""
device_read_on_host: Callable[[Tensor, Tensor], None] = _ops.device_read_on_host.default
"""(context, out, float32, contiguous). Writes the output of the lookup, from the rows of
the host.
"""
device_dirty: Callable[[int, Tensor | None], Tensor] = _ops.device_dirty.default
"""(table, ids (N,) int64 or None for all) -> the device slots of those rows that are
newer than the host's, (n,) int32.
"""
device_dirty_of_pass: Callable[[Tensor], list[Tensor]] = (
    _ops.device_dirty_of_pass.default
)
"""(context) -> :data:`device_dirty` for the rows of a pass, by table."""
device_moves: Callable[
    [Sequence[int], Sequence[int]], tuple[Tensor, Tensor, Tensor]
] = _ops.device_moves.default
"""(tables, number of the first device slot of each table) -> the device slots to which
the plans of the tables copy rows, (n,) int32, those whose rows they copy to the host
before, (m,) int32, and the numbers of both for each table, (2, tables) int64.
"""
device_stage_moves: Callable[[Sequence[int], Tensor], None] = (
    _ops.device_stage_moves.default
)
"""(tables, out (floats,) float32). Writes the rows that the plans of the tables copy to
the device to ``out``, table by table.
"""
device_commit_moves: Callable[[Sequence[int]], None] = _ops.device_commit_moves.default
"""(tables). Notes that the copies of their plans have been carried out."""
device_abort_moves: Callable[[Sequence[int]], None] = _ops.device_abort_moves.default
"""(tables). Ends their plans, of which nothing has been carried out."""
device_land_moves: Callable[[Sequence[int], Tensor], None] = (
    _ops.device_land_moves.default
)
"""(tables, rows (floats,) float32). Writes the rows that the last plans of the tables
have copied to the host, table by table.
"""
device_plan_ahead: Callable[[Sequence[int]], bool] = _ops.device_plan_ahead.default
"""(groups) -> whether plans exist that copy rows of the newest prefetched batches of the
groups to the device.

A table whose rows do not fit on the device has no plan.
"""
device_settle: Callable[[int, Tensor, Tensor], None] = _ops.device_settle.default
"""(table, device slots (n,) int32 of :data:`device_dirty`, rows (n, stride) float32).

Writes the rows to the host.
"""

# Rows of several groups.
rows_forward: Callable[
    [Sequence[int], Tensor, Sequence[int], bool], tuple[Tensor, Tensor]
] = _ops.rows_forward.default
"""(groups of one feature, ids (N,) int64, number of ids of each group, train) -> rows
(sum of counts * columns,) float32, and the contexts (groups,), which are empty without
``train``.

``contexts[i : i + 1]`` is the argument of :func:`group_backward` for group ``i``.
"""
rows_begin_each: Callable[[Sequence[int], Tensor, Sequence[int]], Tensor] = (
    _ops.rows_begin_each.default
)
"""(groups, ids, counts) -> the contexts of a training :data:`rows_forward`, without its
rows.
"""
rows_forward_into: Callable[
    [Sequence[int], Tensor, Sequence[int], bool, Tensor], Tensor
] = _ops.rows_forward_into.default
"""(groups, ids, counts, train, out (sum of counts * columns,) float32, contiguous) ->
the contexts of :data:`rows_forward`, whose rows are written to ``out``.
"""

# Rows in the memory of a device: kernels/device_interface.py has the arguments.
device_settings: Callable[
    [
        Sequence[int],
        Sequence[float],
        Sequence[str],
        Sequence[str],
    ],
    tuple[Tensor, Tensor],
] = _ops.device_settings.default
"""(groups, learning_rates, number_names, integer_names) -> the settings of the next
update of each table of the groups: numbers (tables, number names) float32, and integers (tables,
integer names) int64, in the order of the names.

``learning_rates`` has one entry for each table. Nothing changes, so that the caller
counts the update.
"""

device_pool: Callable[..., None] = _ops.device_pool.default
"""The reference of ``DeviceKernels.pool``, for an output that is flat and float32."""

device_locate: Callable[..., None] = _ops.device_locate.default
"""The reference of ``DeviceKernels.locate``."""

device_weight_gradients: Callable[..., None] = _ops.device_weight_gradients.default
"""The reference of ``DeviceKernels.weight_gradients``, for a gradient that is flat and
float32.
"""

device_check_finite: Callable[..., None] = _ops.device_check_finite.default
"""The reference of ``DeviceKernels.check_finite``, for a gradient that is flat and
float32.
"""

device_update: Callable[..., None] = _ops.device_update.default
"""The reference of ``DeviceKernels.update``, for a gradient that is flat and float32.
"""

# Ids.
mix_ids: Callable[[Tensor, bool], Tensor] = _ops.mix_ids.default
"""(ids (N,) int64, inverse) -> (N,) int64: the ids, mapped by a bijection that leaves
no pattern in their low bits, or by its inverse.
"""


def buffer_pool_bytes() -> tuple[int, int, int]:
    """Returns the bytes of the process's buffer pool for outputs and gradients: in use,
    idle, and the bound on idle.
    """
    used, idle, most_idle = _ops.buffer_pool_bytes()
    return used, idle, most_idle


def instruction_set() -> str:
    """Returns the instruction set of the loops over rows: ``"baseline"``, ``"neon"``,
    ``"avx2"`` or ``"avx512"``.
    """
    return cast(str, _ops.instruction_set())


def check_integers(dtype: torch.dtype, features: Sequence[str]) -> None:
    """Raises TypeError if the ids of a batch with ``features`` are not integers."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {dtype} for features {features}")


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Returns tensors one after the other.

    A single tensor is returned itself, without a copy.
    """
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
