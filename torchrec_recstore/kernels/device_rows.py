"""The rows of a group of tables that are also in the memory of a device.

The host has all rows. A row of a batch is copied to the *arena* of its layout, a tensor
on the device, where kernels pool and update it. ``csrc/rows/device_slots.h`` knows
which rows are there, and which of them are newer than the host's.

A pass on the device runs under the lock of this object. If there is no memory for a
copy, the pass runs on the host. ``device_moves`` moves the rows.

Tests: tests/device/test_device_rows.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_arenas import Arenas
from torchrec_recstore.kernels.device_copies import Arriving, CopyTarget, staging, up
from torchrec_recstore.kernels.device_interface import INTEGERS, NUMBERS, kernels_of
from torchrec_recstore.kernels.device_lookups import HostBatch, Lookups
from torchrec_recstore.kernels.device_moves import DeviceMoves, Staging
from torchrec_recstore.kernels.device_passes import (
    DevicePass,
    Passes,
    PreparedUpdate,
    Settings,
)
from torchrec_recstore.kernels.device_transfers import DeviceTransfers
from torchrec_recstore.store import Table
from torchrec_recstore.store.cold_tier import ColdTier
from torchrec_recstore.store.memory_tier import holding
from torchrec_recstore.utils import warn_user

MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError)
"""The errors of a device or a host that has no memory for a copy."""


@dataclass
class _Staged:
    """Rows of one table that a lookup reads from staging."""

    slots: Tensor | None
    """(n,) int64. The host's slots. None: the ids have no row."""
    ids: Tensor
    """(n,) int64."""
    cold: tuple[Tensor, Tensor] | None
    """The ids and images of the batch's rows in the cold store."""
    initial: bool
    """Whether an id without a row always reads as its initial row."""


@dataclass
class Updated:
    """The result of an update on the device."""

    weight_gradients: Tensor | None
    """(N,) float32, on the host."""


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raises MemoryError if the host or the device has no memory."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "out of memory" not in text and "std::bad_alloc" not in text:
            raise
        raise MemoryError(text) from error


class DeviceRows:
    """The device slots of a group's tables, and the copies of their rows.

    Args:
        lookups: The lookups of the group.
        tables: Its tables.
        device: The device.
        rows: The number of device slots of each table.
        learning_rates: Returns the learning rate of each table. It is called in each
            training lookup, so that the settings of the update are on the device when
            backward needs them.

    Raises:
        ValueError: The rows of a table cannot be on a device. The message names the
            table and the option.
    """

    def __init__(
        self,
        lookups: Lookups,
        tables: Sequence[Table],
        device: torch.device,
        rows: Sequence[int],
        learning_rates: Callable[[], Sequence[float]],
    ) -> None:
        self.device = device
        self.lock = threading.RLock()
        """Keeps rows from moving. It is taken before the lock of a cold store."""
        self.passes = 0
        """The number of training lookups on the device so far."""
        self.reads = 0
        """The number of evaluation lookups on the device so far."""
        self.group: object = None
        """The group, if nothing else keeps it as long as its tables."""
        self._lookups = lookups
        self._tables = list(tables)
        self._open = {table.name for table in tables}
        """The names of the tables that are not closed."""
        self._learning_rates = learning_rates
        self._transfers = DeviceTransfers(device)
        self._arenas = Arenas(tables, self._transfers.new_arena, rows)
        self._kernels = kernels_of(device)
        self._passes = Passes(lookups, self._arenas, self._kernels, device)
        self._moves = DeviceMoves(tables, self._arenas, self._kernels, self._transfers)
        kinds = [arena.kind for arena in self._arenas.all]
        self._is_stochastic = any(kind.is_stochastic for kind in kinds)
        self._rows = list(rows)
        self._has_warned = False
        self._raises = any(t.options.nonfinite == "raise" for t in tables)
        self._skipped: Tensor | None = None
        if any(kind.skips_nonfinite for kind in kinds):
            with self._transfers.computing():
                self._skipped = torch.zeros(
                    len(tables), dtype=torch.int64, device=device
                )
        self._skipped_before = [0] * len(tables)
        """The counts of skipped rows that the tables have."""
        for number, table in enumerate(tables):
            ops.table_make_device_slots(table.handle, rows[number])
            table.device_rows = self
            table.tier.settle = partial(self.settle, table)

    def begin(self, batch: HostBatch) -> Tensor:
        """Begins a training lookup, after which the rows of the batch stay in memory as
        long as its context lives.

        Returns the context for the lookup and for its update. The caller has the lock.
        """
        self._moves.check()
        return self._lookups.begin(batch)

    def training_lookup(
        self, context: Tensor, batch: HostBatch, to: CopyTarget
    ) -> tuple[Tensor, DevicePass | None]:
        """Looks up a batch for training.

        Returns the output on the device, and the pass, None if the device had no room
        or no memory, so that the lookup was done on the host.
        """
        with self.lock:
            self._moves.land()
            try:
                with _memory_errors():
                    result = self._lookup_on_device(context, batch, to)
            except MEMORY_ERRORS:
                if self._moves.is_lost:
                    raise
                result = None
            if result is not None:
                self.passes += 1
                return result
            self._warn_of_room(batch)
            staged = staging(self._lookups.output_shape(batch), to)
            rows = self.lookup_on_host(context, batch, staged)
            return up(rows, to, staged=staged), None

    def _warn_of_room(self, batch: HostBatch) -> None:
        """Warns at the first training lookup that runs on the host, which is as exact
        and not as fast.
        """
        if self._has_warned:
            return
        self._has_warned = True
        ids_of_tables = self._lookups.ids_of_tables(batch)
        for table, ids, rows in zip(
            self._tables, ids_of_tables, self._rows, strict=True
        ):
            distinct = len(torch.unique(ids))
            if distinct > rows:
                warn_user(
                    f"table {table.name!r}: a batch of {distinct:,} distinct ids does"
                    f" not fit into {rows:,} device rows, so that its group's training"
                    " lookup runs on the host: set TableOptions(device_rows=...) to at"
                    " least the distinct ids of two batches, or to 0"
                )
                return
        names = ", ".join(repr(table.name) for table in self._tables)
        warn_user(
            f"tables {names}: a training lookup runs on the host, because the device has"
            " no memory for it, or no room beside the batches whose backward is to come:"
            " set TableOptions(device_rows=...) to at least the distinct ids of two"
            " batches, or to 0"
        )

    def _lookup_on_device(
        self, context: Tensor, batch: HostBatch, to: CopyTarget
    ) -> tuple[Tensor, DevicePass] | None:
        """Returns None if the rows do not fit on the device.

        Raises one of ``MEMORY_ERRORS`` if there is no memory for a copy or the output.
        """
        slots = torch.empty(batch.ids.shape, dtype=torch.int32)
        arenas = self._arenas
        if not ops.device_plan(context, arenas.first_slots, arenas.of_table, slots):
            return None
        try:
            has_bags_of_one = ops.device_has_bags_of_one(context)
            staged = []
            refused_ids, counts = ops.device_refused(context)
            if len(refused_ids):
                for ids in torch.split(refused_ids, counts.tolist()):
                    staged.append(_Staged(slots=None, ids=ids, cold=None, initial=True))
            settings = self._settings(self._learning_rates())
            on_device = self._batch_up(batch, has_bags_of_one, slots, staged, settings)
        except BaseException:
            self._moves.abort()
            raise
        return self._pooled(batch, on_device, to), on_device

    def _pooled(
        self, batch: HostBatch, on_device: DevicePass, to: CopyTarget
    ) -> Tensor:
        shape = self._lookups.output_shape(batch)
        with self._transfers.computing(on_device.memory):
            return self._passes.pool(on_device, shape, to.dtype)

    def lookup_on_host(
        self, context: Tensor, batch: HostBatch, out: Tensor | None = None
    ) -> Tensor:
        """Looks up a batch for training, from the host's rows.

        Returns the output on the host, which is ``out`` unless that is None.
        """
        with self.lock:
            self.settle_pass(context)
            if out is None:
                shape = self._lookups.output_shape(batch)
                out = torch.empty(shape, dtype=torch.float32)
            ops.device_read_on_host(context, out)
            return out

    def evaluation_lookup(self, batch: HostBatch, to: CopyTarget) -> Tensor | None:
        """Looks up a batch for evaluation. Rows on the device are read there, and no
        row moves.

        Returns the output on the device, or None if there is no memory there.
        """
        tiers = [table.tier for table in self._tables]
        with self.lock, holding(tiers):
            self._moves.check()
            try:
                with _memory_errors():
                    self._moves.land()
                    slots, staged = self._find(batch)
                    on_device = self._batch_up(
                        batch, batch.has_bags_of_one, slots, staged, None
                    )
                    out = self._pooled(batch, on_device, to)
            except MEMORY_ERRORS:
                return None
            self.reads += 1
            return out

    def _find(self, batch: HostBatch) -> tuple[Tensor, list[_Staged]]:
        """Returns the number of each position's row, (N,) int32, and the rows that are
        staged, by table.
        """
        numbers_of_tables = []
        staged = []
        staged_rows = [0] * len(self._arenas.all)
        ids_of_tables = self._lookups.ids_of_tables(batch)
        for number, table in enumerate(self._tables):
            arena = self._arenas.of_table[number]
            cold = None
            if isinstance(table.tier, ColdTier):
                cold = table.tier.read(ids_of_tables[number])
            numbers, slots, staged_ids = ops.device_find(
                table.handle,
                ids_of_tables[number],
                self._arenas.first_slots[number],
                staged_rows[arena],
                cold is not None and len(cold[0]) > 0,
            )
            staged_rows[arena] += len(staged_ids)
            numbers_of_tables.append(numbers)
            staged.append(_Staged(slots, staged_ids, cold, initial=False))
        return self._lookups.in_batch_order(batch, numbers_of_tables), staged

    def update(
        self,
        context: Tensor,
        batch: DevicePass,
        grad: Tensor,
        rates: Sequence[float],
        weight_gradients: bool,
    ) -> Updated | None:
        """Updates the rows of a pass on the device.

        ``grad`` is the gradient of the output, on the device. ``rates`` has the
        learning rate of each table.

        Returns None if nothing has changed, so that the caller updates the rows on the
        host: there is no memory on the device, or a gradient is not finite, and a table
        has ``nonfinite="raise"``, for which the update on the host raises the error.
        """
        with self.lock:
            self._moves.check()
            try:
                with _memory_errors():
                    counted = ops.device_plan_refresh(context)
                    memory = self._refresh(context, batch, rates, counted)
                with _memory_errors(), self._transfers.computing(memory):
                    update = self._prepared(batch, grad, weight_gradients)
                    self._passes.update(batch, update, self._skipped, compile_only=True)
                    with self._moves.changing_rows():
                        self._passes.update(batch, update, self._skipped)
            except MEMORY_ERRORS:
                if self._moves.is_lost:
                    raise
                return None
            failed = update.failed_on_host
            if failed is not None and bool(failed.wait()[-1]):
                return None
            with self._moves.changing_rows():
                ops.device_updated(context)
            gradients = update.weight_gradients
            return Updated(None if gradients is None else gradients.wait())

    def _refresh(
        self,
        context: Tensor,
        batch: DevicePass,
        rates: Sequence[float],
        counted: Tensor,
    ) -> list[Tensor]:
        """Copies the rows of a pass that the host has written since, and the settings of
        the update if they have changed, to the device. Returns the memory of the pass.

        ``counted``, (tables,) int64, is 0 for tables whose rows were exchanged after
        the lookup. Their update changes nothing that is still used, and counts nothing.
        """
        try:
            settings = self._settings(rates)
            settings.integers[counted == 0, INTEGERS.index("nonfinite")] = 0
            parts = {}
            if batch.settings is None or not settings.equals(batch.settings):
                parts = settings.parts()
            sent = self._moves.carry_out(parts)
        except BaseException:
            self._moves.abort()
            raise
        if parts:
            batch.settings = settings
            batch.numbers = sent.parts["numbers"]
            batch.integers = sent.parts["integers"]
            batch.memory.extend(sent.memory)
        return batch.memory

    def _prepared(
        self, batch: DevicePass, grad: Tensor, weight_gradients: bool
    ) -> PreparedUpdate:
        """Does everything of an update that comes before a row changes."""
        assert batch.numbers is not None
        assert batch.integers is not None
        update = self._passes.prepare(batch, grad, batch.numbers, batch.integers)
        if self._raises:
            self._passes.check_finite(batch, update)
        if weight_gradients:
            self._passes.weight_gradients(batch, update)
        return update

    def prefetch(self) -> None:
        """Copies the rows of the batch that the group has prefetched last to the device,
        so that its training lookup finds them there.

        The rows keep their device slots as long as a pass is pending that began before
        this call. Rows of a table that has no room for them stay on the host.
        """
        with self.lock:
            self._moves.check()
            try:
                with _memory_errors():
                    self._moves.land()
                    if ops.device_plan_ahead(self._lookups.groups):
                        self._moves.carry_out()
            except MEMORY_ERRORS:
                self._moves.check()

    def count_skipped(self) -> None:
        """Adds the rows that updates on the device have skipped, because their gradient
        was not finite, to the counts of the tables.
        """
        with self.lock:
            if self._skipped is None:
                return
            self._moves.check()
            with self._transfers.computing():
                arriving = Arriving(self._skipped)
            skipped = arriving.wait().tolist()
            for number, table in enumerate(self._tables):
                rows = skipped[number] - self._skipped_before[number]
                if rows and table.name in self._open:
                    ops.device_skipped(table.handle, rows)
            self._skipped_before = skipped

    @contextmanager
    def settled(self, table: Table, ids: Tensor | None) -> Iterator[None]:
        """Calls :meth:`settle`, and keeps rows from changing on the device meanwhile."""
        with self.lock:
            self.settle(table, ids)
            yield

    @contextmanager
    def settled_batch(self, batch: HostBatch) -> Iterator[None]:
        """Like :meth:`settled`, for the rows of a batch."""
        with self.lock:
            for table, table_ids in zip(
                self._tables, self._lookups.ids_of_tables(batch), strict=True
            ):
                self.settle(table, table_ids)
            yield

    def settle(self, table: Table, ids: Tensor | None) -> None:
        """Brings the host's rows of ``ids``, (N,) int64, or all rows of a table up to
        date.
        """
        with self.lock:
            self._moves.check()
            if ids is None:
                self.count_skipped()
            self._moves.land()
            dirty = ops.device_dirty(table.handle, ids)
            self._moves.bring({self._tables.index(table): dirty})

    def settle_pass(self, context: Tensor) -> None:
        """Brings the host's rows of a pass up to date."""
        with self.lock:
            self._moves.check()
            self._moves.land()
            self._moves.bring(dict(enumerate(ops.device_dirty_of_pass(context))))

    def leave(self, table: Table) -> None:
        """Prepares the group for a table that closes.

        The rows that are on their way to the host are those of all tables, so they are
        written first. If that fails, the rows of the other tables on the device are
        lost, which their next calls say.

        The last table frees the arenas. Groups and their tables refer to each other, so
        that the memory of the device would otherwise wait for Python's garbage
        collector.
        """
        with self.lock:
            if table.name in self._open and not self._moves.is_lost:
                with suppress(Exception), self._moves.changing_rows():
                    self._moves.land()
            self._open.discard(table.name)
            if not self._open:
                for arena in self._arenas.all:
                    arena.rows = arena.rows.new_empty((0, arena.layout.stride))

    def _settings(self, rates: Sequence[float]) -> Settings:
        settings = ops.device_settings(
            self._lookups.groups, list(rates), NUMBERS, INTEGERS
        )
        return Settings(*settings)

    def _batch_up(
        self,
        batch: HostBatch,
        has_bags_of_one: bool,
        slots: Tensor,
        staged: Sequence[_Staged],
        settings: Settings | None,
    ) -> DevicePass:
        """Copies what kernels need of a batch to the device, and carries out the plan
        of a training lookup with the same copies.

        An evaluation has no plan, and no settings.
        """
        # A training lookup reads rows from staging alone that admission has refused.
        is_training = settings is not None
        all_on_device = is_training and not any(len(part.ids) for part in staged)
        packed = self._passes.segments(batch, slots, all_on_device=all_on_device)
        parts = {"slots": slots, "segments": packed.fields}
        if settings is not None:
            parts.update(settings.parts())
        if not has_bags_of_one:
            assert batch.offsets is not None
            parts["offsets"] = batch.offsets.int()
        if batch.weights is not None:
            parts["weights"] = batch.weights.detach()
        if settings is not None and self._is_stochastic:
            parts["ids"] = batch.ids
        staging = self._staging(staged)
        if settings is not None:
            sent = self._moves.carry_out(parts, staging)
        else:
            sent = self._moves.send(parts, staging)
        return DevicePass(
            memory=sent.memory,
            slots=sent.parts["slots"],
            staging=sent.staging,
            offsets=sent.parts.get("offsets"),
            weights=sent.parts.get("weights"),
            segments=sent.parts["segments"],
            packed=packed,
            ids=sent.parts.get("ids"),
            settings=settings,
            numbers=sent.parts.get("numbers"),
            integers=sent.parts.get("integers"),
        )

    def _staging(self, staged: Sequence[_Staged]) -> Staging | None:
        """Returns the staging of all arenas. ``staged`` is given by table, or empty."""
        if not staged:
            return None
        rows = []
        for arena in self._arenas.all:
            rows.append(sum(len(staged[number].ids) for number in arena.numbers))
        return Staging(rows, partial(self._write_staging, staged))

    def _write_staging(
        self, staged: Sequence[_Staged], arena: int, on_host: Tensor
    ) -> None:
        begin = 0
        for number in self._arenas.all[arena].numbers:
            of_table = staged[number]
            end = begin + len(of_table.ids)
            cold_ids, cold_images = of_table.cold or (None, None)
            ops.device_stage_rows(
                self._tables[number].handle,
                of_table.slots,
                of_table.ids,
                of_table.initial,
                cold_ids,
                cold_images,
                on_host[begin:end],
            )
            begin = end
