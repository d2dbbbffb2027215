"""A table: one shard of an embedding table, with rows in memory and in a cold store.

Tests: tests/store/test_table.py, test_oracle.py and test_all_or_nothing.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.optim import (
    Optimizer,
    RowWiseAdagrad,
    is_square,
    state_names,
    without_state,
)
from torchrec_recstore.options import (
    Scored,
    TableOptions,
    default_initializer,
    is_shared,
)
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store.arguments import (
    among,
    check_ids,
    check_rows,
    check_scores,
    check_table,
    check_time,
    check_whole_rows,
    plain_rows,
)
from torchrec_recstore.store.cold_store import ColdStoreError
from torchrec_recstore.store.cold_tier import ColdTier
from torchrec_recstore.store.left_ids import LeftIds
from torchrec_recstore.store.memory_tier import Arrival, MemoryTier, holding
from torchrec_recstore.store.parts import ImageLayout, Part, Parts, named_rows
from torchrec_recstore.store.snapshot import ColdSnapshot, Snapshot
from torchrec_recstore.store.table_state import (
    Sightings,
    TableState,
    TableStats,
    no_sightings,
    set_event_time,
)
from torchrec_recstore.utils import warn_user

_NOTHING = nullcontext()


class RowsOnDevice(Protocol):
    """The rows of tables that are also in the memory of a device."""

    def settled(
        self,
        table: Table,
        ids: Tensor | None,
    ) -> AbstractContextManager[object]:
        """Brings the rows of ``ids``, (N,) int64, or all rows of a table up to date in
        memory, and keeps them so.
        """

    def count_skipped(self) -> None:
        """Completes the tables' counts of rows whose gradients were not finite."""

    def leave(self, table: Table) -> None:
        """Is called when a table has been closed."""


PART_ROWS = 1 << 16
"""The rows that :meth:`Table.parts` reads, and :meth:`Table.write` writes, at once: it
limits memory and pauses.
"""

_ARRIVALS = 8  # the parts of max_rows in which rows are written
# the fields of TableStats that ops.table_stats returns, in its order
_NATIVE_STATS = (
    "rows",
    "bytes",
    "lookups",
    "misses",
    "inserts",
    "updates",
    "nonfinite",
    "steps",
    "refused",
    "evicted",
    "expired",
    "cold_hits",
    "refused_times",
    "device_rows",
    "device_hits",
    "device_arrivals",
    "device_written_back",
)


class Table(AbstractContextManager["Table"]):
    """One shard of one embedding table: a growing native store of rows by id.

    Every int64 value is a valid id. A call either does all of its work, or raises an
    error and leaves the table unchanged: a call that raises ColdStoreError, because the
    cold store fails, can be repeated. Several threads may call the table at the same
    time. Calls that only read share it, and each reads the rows of one moment; a call
    that changes it runs alone. The results of a call are the same, to the bit, for
    every number of torch's threads.

    Args:
        dim: The number of columns of the whole table.
        dtype: The data type of the weights: ``torch.float32``, ``float16``,
            ``bfloat16`` or ``int8`` (8 bits a weight, and a scale and a bias a row;
            lookups are then float32). All arithmetic is float32. Stored weights are
            rounded to nearest.
        optimizer: The optimizer with which :meth:`update` and the backward of a group
            update rows. A table with ``options.frozen`` has none, and
            ``table.optimizer`` is then an :class:`SGD`, whose rows have no state.
        options: How rows are created, read, evicted and stored.
        name: The name of the table, on which the weights of new rows depend.
        columns: The columns of the shard, ``range(a, b)``. The result of a lookup then
            has the shape (N, b - a). Default: None, which means all columns.
        stochastic_rounding: Whether updates of narrow rows are rounded up or down at
            random, so that the mean is right and that steps smaller than the last bit
            are not lost. The random numbers depend only on the seed, the name, the id,
            the column and the number of the table's update. float32 rows are exact.
            Default: None, which is True for ``int8``, where False is an error, else
            False.
        state_dtype: The data type in which optimizer state is stored: ``torch.float32``
            or ``float16``. A float16 state is rounded stochastically in each update,
            and to nearest when it is written. A sum or an average of squares is stored
            as its square root, so that the squares of small gradients are not lost.
            Numbers above the largest one, 65504, become 65504. The table reads and
            writes states as float32 in either case.
        shard: The index of the shard, if the rows of the table are split. It tells
            shards apart in a cold store.
        owned: A function that takes ids, (N,) int64, and returns which of them belong
            to this shard, (N,) bool. A shared cold store, which stores the rows of all
            shards under one name, needs it if the rows are split. Default: None, which
            means that all ids belong to this shard.

    Raises:
        TypeError, ValueError: An argument has the wrong type or an invalid value. The
            message names the argument.
        ColdStoreError: The cold store cannot be opened.
        ImportError: The package that the cold store needs is missing.

    Example::

        table = Table(8, optimizer=SGD(lr=0.1))
        ids = torch.tensor([7, -1, 7])
        rows = table.lookup(ids, train=True)  # makes the rows of 7 and -1
        table.update(ids, torch.ones(3, 8))  # the gradients of 7 are added first
        len(table)  # 2
    """

    def __init__(
        self,
        dim: int,
        dtype: torch.dtype = torch.float32,
        optimizer: Optimizer = RowWiseAdagrad(lr=0.01),  # noqa: B008  (frozen)
        options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
        *,
        name: str = "table",
        columns: range | None = None,
        stochastic_rounding: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        shard: int = 0,
        owned: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_table(
            dim,
            dtype,
            optimizer,
            options,
            name,
            columns,
            stochastic_rounding,
            state_dtype,
        )
        if columns is None:
            columns = range(dim)
        if stochastic_rounding is None:
            stochastic_rounding = dtype is torch.int8
        if options.frozen:
            optimizer = without_state(optimizer)
        self.dim = dim
        self.dtype = dtype
        self.optimizer = optimizer
        self.options = options
        self.name = name
        self._value_dtype = value_dtype(dtype)
        self._label = f"table '{name}'"  # names the table in errors
        self.columns = columns
        self.stochastic_rounding = stochastic_rounding
        self.state_dtype = state_dtype
        self.shard = shard
        self.handle = ops.table_create(
            name=name,
            columns=columns,
            seed=options.seed,
            missing=options.missing,
            initializer=default_initializer(options),
            optimizer=optimizer,
            dtype=dtype,
            stochastic_rounding=stochastic_rounding,
            state_dtype=state_dtype,
            options=options,
        )
        """The handle of the native table, for
        :func:`torchrec_recstore.ops.group_create`.
        """
        self._free_rows = weakref.finalize(self, ops.table_destroy, self.handle)
        if options.left_ids is not None:
            ops.table_record_left(self.handle, options.left_ids)
        self.pending_passes: list[tuple[Tensor, Tensor]] = []
        """The backward passes whose gradients a group keeps until it updates the rows
        with those of further passes.
        """
        self.device_rows: RowsOnDevice | None = None
        """The rows that are also in the memory of a device, None if there are none."""
        self.tier = MemoryTier(self.handle)
        """The strategy by which rows move between memory and the cold store, if there
        is one.
        """
        if options.cold_store is not None:
            self.tier = ColdTier(
                self.handle, self.image_layout, options, self._store_name(), owned
            )
        self._free_store = weakref.finalize(self, self.tier.close)

    def _store_name(self) -> str:
        """Returns the name of this shard in the cold store."""
        columns = f"{self.columns.start}-{self.columns.stop}"
        if not is_shared(self.options.cold_store):
            return f"{self.name}.{self.shard}.{columns}"
        # The name has no shard index, because other jobs may split the rows
        # differently. It has the data types and the states, because a job with others
        # would misread the bytes of a row.
        dtype_name = str(self.dtype).removeprefix("torch.")
        parts = [
            self.name,
            columns,
            dtype_name,
            *state_names(self.optimizer),
        ]
        if self.state_dtype is torch.float16:
            parts.append("float16")
        return ".".join(parts)

    def lookup(
        self,
        ids: Tensor,
        *,
        train: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Reads the weights of rows.

        Args:
            ids: (N,) int64. The ids whose rows are read. Any strides and duplicates are
                allowed.
            train: Whether the call is a training step, which creates a row for each id
                without one. Otherwise, and in a frozen table, nothing changes, and for
                an id without a row the call returns zeros or the id's initial row
                (``options.missing``).
            out: (N, columns), contiguous, of the dtype of the result. The tensor that
                receives the weights, only with ``train=False``. Default: None, for a
                new tensor.

        Returns:
            (N, columns), of the table's dtype, or float32 for an ``int8`` table. The
            weights, in the order of ``ids``.

        Raises:
            TypeError: ``ids`` is not an int64 tensor.
            ValueError: ``ids`` or ``out`` has another shape, the table is closed, or
                the ids need more rows at once than ``options.max_rows``.
            MemoryError: There is no memory for the new rows.
            ColdStoreError: The cold store fails.
        """
        check_ids(ids)
        if out is not None:
            shape = (len(ids), len(self.columns))
            check_rows(out, "out", shape, (self._value_dtype,))
            if train:
                raise ValueError("out needs train=False")
        train = train and not self.options.frozen
        arrival: Arrival | None = "lookup" if train else None
        ops.finish_updates()
        with (
            ops.native_errors(self._label),
            self._settled(ids),
            self.tier.resident(ids, arrival),
        ):
            if out is not None and out.dtype is torch.float32:
                ops.table_read(self.handle, ids, out)
            else:
                rows = ops.table_lookup(self.handle, ids, train)
                if self._value_dtype is not torch.float32:
                    rows = rows.to(self._value_dtype)
                out = rows if out is None else out.copy_(rows)
            if not train:
                self.tier.read_into(out, ids)
            return out

    def update(
        self,
        ids: Tensor,
        grads: Tensor,
        *,
        lr: float | None = None,
    ) -> None:
        """Applies the optimizer once to the row of each distinct id.

        The gradients of an id are added in the order of ``ids``, and the optimizer is
        applied to the sum. An id without a row gets its initial row first. With
        ``MinFrequency(count)`` and a count above 1, it does not get one, and its
        gradients are dropped: only a training lookup admits an id.

        Args:
            ids: (N,) int64. The ids whose rows are updated. Duplicates are allowed.
            grads: (N, columns), float32 or the table's dtype. The gradient of each
                entry of ``ids``.
            lr: The learning rate. Default: None, which means the optimizer's.

        Raises:
            TypeError, ValueError, MemoryError, ColdStoreError: See :meth:`lookup`.
                ``grads`` is checked like ``ids``. It is a ValueError, too, if the table
                is frozen.
        """
        if self.options.frozen:
            raise ValueError(
                f"{self._label} is frozen by its options, and is not updated:"
                " insert(ids, weights) writes rows"
            )
        check_ids(ids)
        self._check_rows(grads, "grads", ids)
        if lr is None:
            lr = self.optimizer.lr
        ops.finish_updates()
        with (
            ops.native_errors(self._label),
            self._settled(ids),
            self.tier.resident(ids, "update"),
        ):
            ops.table_update(self.handle, ids, plain_rows(grads), lr)

    def insert(self, ids: Tensor, weights: Tensor) -> None:
        """Writes the weights of rows.

        A new row has zero optimizer state; an existing row keeps its optimizer state.

        Args:
            ids: (N,) int64. The ids whose rows are written. Among duplicates, the last
                one counts.
            weights: (N, columns), float32 or the table's dtype. The weights of each
                entry of ``ids``.

        Raises:
            TypeError, ValueError, MemoryError, ColdStoreError: See :meth:`lookup`.
                ``weights`` is checked like ``ids``.
        """
        check_ids(ids)
        self._check_rows(weights, "weights", ids)
        ops.finish_updates()
        with (
            ops.native_errors(self._label),
            self._settled(ids),
            self.tier.resident(ids, "write"),
        ):
            ops.table_insert(self.handle, ids, plain_rows(weights))

    def read_rows(self, ids: Tensor) -> dict[str, Tensor]:
        """Returns copies of the whole rows of ``ids``, (N,) int64: weights, optimizer
        states and bookkeeping.

        Returns:
            A dictionary: ``weight``, the stored weights (see ``row_types.py``);
            ``last_step`` and ``frequency``, (N,) int64; and the optimizer's states
            (:func:`torchrec_recstore.optim.state_names`), float32: element-wise states
            have the shape (N, columns), row-wise states (N,).

        Raises:
            TypeError, ValueError, ColdStoreError: See :meth:`lookup`. It is a
                ValueError, too, if an id has no row.
        """
        check_ids(ids)
        ops.finish_updates()
        with (
            ops.native_errors(self._label),
            self._settled(ids),
            self.tier.resident(ids),
        ):
            return named_rows(self.optimizer, self.tier.export(ids))

    def write_rows(self, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Writes whole rows: weights, optimizer states and bookkeeping.

        An id without a row gets one.

        Args:
            ids: (N,) int64. The ids whose rows are written. Among duplicates, the last
                one counts.
            rows: The rows, in the form that :meth:`read_rows` returns. ``weight`` may
                also be (N, columns) float32.

        Raises:
            TypeError, ValueError, MemoryError, ColdStoreError: See :meth:`lookup`. It
                is a ValueError, too, if a key of ``rows`` is missing or unknown, or a
                tensor has another shape.
        """
        check_ids(ids)
        shape = (len(ids), len(self.columns))
        row_tensors = check_whole_rows(
            rows,
            shape,
            self.dtype,
            state_names(self.optimizer),
        )
        ops.finish_updates()
        with (
            ops.native_errors(self._label),
            self._settled(ids),
            self.tier.resident(ids, "write"),
        ):
            ops.table_import(self.handle, ids, *row_tensors)

    @property
    def is_being_saved(self) -> bool:
        """Whether there is a snapshot of the table.

        Its rows cannot be exchanged before the snapshot is closed.
        """
        with ops.native_errors(self._label):
            return ops.table_is_being_saved(self.handle)

    def part(self, ids: Tensor) -> Part:
        """Returns the rows of ``ids``, (N,) int64, as :meth:`read_rows` does, with
        their ids and columns.
        """
        return Part(ids, self.columns, self.read_rows(ids))

    def parts(self) -> Parts:
        """Reads all rows, cold rows included, in ascending order of their ids.

        A table without rows has one part. The table must not change meanwhile;
        :meth:`snapshot` reads one that does.
        """
        ids = self.ids()
        return (
            self.part(ids[begin : begin + PART_ROWS])
            for begin in range(0, max(1, len(ids)), PART_ROWS)
        )

    def write(self, part: Part) -> None:
        """Writes the rows of a part with the table's columns, also more rows than
        ``max_rows`` at once.

        Weights of another data type are rounded to nearest. Rows that exceed
        ``max_rows`` are evicted as they arrive. If the call fails, some of the rows may
        have been written.

        Raises:
            TypeError, ValueError, MemoryError, ColdStoreError: See :meth:`write_rows`.
        """
        part = part.stored_as(self.dtype)
        for place in self._arriving(len(part)):
            arriving_part = part.take(place)
            self.write_rows(arriving_part.ids, arriving_part.rows)

    def insert_all(self, ids: Tensor, weights: Tensor) -> None:
        """Calls :meth:`insert` for any number of rows.

        See :meth:`write`, which is the same for whole rows.
        """
        for place in self._arriving(len(ids)):
            self.insert(ids[place], weights[place])

    def _arriving(self, rows: int) -> Iterator[slice]:
        """Yields the places of the rows that are written in one call, for which other
        calls wait.
        """
        rows_of_call = PART_ROWS
        # the last rows stay in memory, whatever their stamps: they must be few
        if self.options.max_rows is not None:
            few_rows = max(1, self.options.max_rows // _ARRIVALS)
            rows_of_call = min(PART_ROWS, few_rows)
        for begin in range(0, max(1, rows), rows_of_call):
            yield slice(begin, begin + rows_of_call)

    def state(self) -> TableState:
        """Returns a copy of what the table knows besides its rows: its clocks, and the
        counts of admission.
        """
        ops.finish_updates()
        with ops.native_errors(self._label):
            sightings: Sightings | None = None
            if self._counts_sightings:
                sightings = Sightings(*ops.table_sightings(self.handle))
                # in an order that no history changes
                order = sightings.ids.argsort(stable=True)
                sightings = sightings.take(order)
            times = ops.table_times(self.handle)
            return TableState(
                steps=self.steps,
                optimizer_steps=self.optimizer_steps,
                times=tuple(times) if times else None,
                sightings=sightings,
            )

    def set_state(self, state: TableState) -> None:
        """Replaces what the table knows besides its rows.

        Set it before rows are written: eviction and expiry use it.

        Times are ignored if the rows do not expire after a time, and sightings if
        admission does not count. Without times, the age of the rows counts from the
        next step. Without sightings, admission counts from zero. The state of other
        shards becomes that of this one by ``TableState.merged(states).owned(owned)``.

        Raises:
            ValueError: The times are damaged, a number of steps is out of range, or a
                tensor has another shape.
            ColdStoreError: The cold store fails.
        """
        state = TableState.from_tensors(state.tensors())  # checks the tensors
        ops.finish_updates()
        with ops.native_errors(self._label):
            times: list[int] = []
            expires_by_time = bool(ops.table_times(self.handle))
            if expires_by_time:
                times = list(state.times or ())
            # A table without rows checks the numbers, because the native table sets
            # them one after the other.
            options = TableOptions(expiry=self.options.expiry)
            empty = Table(1, options=options)
            empty.tier.set_clock(state.steps, times)
            ops.table_set_optimizer_steps(empty.handle, state.optimizer_steps)

        with ops.native_errors(self._label), self.tier.lock:
            self.tier.set_clock(state.steps, times)
            ops.table_set_optimizer_steps(self.handle, state.optimizer_steps)
            if self._counts_sightings:
                sightings = state.sightings or no_sightings()
                ops.table_set_sightings(self.handle, *sightings)

    @property
    def _counts_sightings(self) -> bool:
        return self.options.admission is not None and self.options.admission.count > 1

    def set_time(self, unix_seconds: float) -> None:
        """Sets the time by which rows expire to that of the events, as
        :func:`torchrec_recstore.set_time` does.
        """
        ops.finish_updates()
        with ops.native_errors(self._label):
            set_event_time([self], [check_time(unix_seconds)])

    @property
    def image_layout(self) -> ImageLayout:
        """The layout of a row with all of its state, as a cold store stores it."""
        squares = []
        for name, kind in state_names(self.optimizer).items():
            if kind == "element":
                squares.append(is_square(name))
        return ImageLayout(
            dtype=self.dtype,
            columns=len(self.columns),
            state_dtype=self.state_dtype,
            squares=tuple(squares),
        )

    @property
    def image_bytes(self) -> int:
        """The bytes of a row with all of its state, as a cold store stores it."""
        return ops.table_image_bytes(self.handle)

    def mark(self) -> int:
        """Marks this moment, and returns the mark.

        ``snapshot(since=mark)`` later returns the changes since then.

        A snapshot also has a mark, of its moment. From the first mark on, the table
        records which rows change, in one byte per row, and which rows are removed, in
        eight bytes per id. It remembers at least the last 127 marks.
        """
        ops.finish_updates()
        with ops.native_errors(self._label):
            return ops.table_mark(self.handle)

    def locate_rows(self) -> None:
        """Records where the index has each row, in four bytes per row, which may raise
        MemoryError.

        With this record, a snapshot since a mark takes time for the changed rows only.
        The first call walks over the index. The record is lost when the table exchanges
        its rows.
        """
        with ops.native_errors(self._label):
            ops.table_locate_rows(self.handle)

    def reserve(self, rows: int) -> None:
        """Grows the index for ``rows`` rows in all, at most ``max_rows``, so that no
        entries move while they arrive.

        The memory of the rows themselves grows with them, and is checked again then:
        other processes may take it.

        Raises:
            ValueError: ``rows`` is negative.
            MemoryError: There is no memory for so many rows now. The rows are
                unchanged.
        """
        with ops.native_errors(self._label):
            ops.table_reserve(self.handle, rows)

    def shrink(self) -> None:
        """Returns the memory of removed rows to the system.

        Without this call, that happens when half of them are gone.

        The call does nothing while the table has a snapshot, or a backward pass is
        pending.
        """
        ops.finish_updates()
        no_ids = torch.empty(0, dtype=torch.int64)
        # An evaluation on a device keeps the places of rows meanwhile.
        with ops.native_errors(self._label), self._settled(no_ids):
            ops.table_shrink(self.handle)

    def snapshot(self, since: int | None = None) -> Snapshot:
        """Returns a snapshot of the rows as they are now, which can be read while the
        table changes.

        A table has at most one snapshot at a time. If the cold store cannot be read as
        it was at one moment (``ColdStore.ascending_snapshots``), the call first copies
        the store to a temporary file.

        Args:
            since: A mark. The snapshot then has only the rows that were changed or
                created after the mark.

        Raises:
            ValueError: There is a snapshot of the table already, the mark has been
                forgotten, or there is a mark and the cold store is shared, so that
                changes by other jobs are not known.
            ColdStoreError: The cold store fails.
        """
        if since is not None:
            self.check_unshared(
                "changes by other jobs since a mark are not known: save the whole table"
            )
        ops.finish_updates()
        with ops.native_errors(self._label), self._settled(None), self.tier.lock:
            handle = ops.snapshot_open(self.handle, since)
            try:
                cold: ColdSnapshot | None = None
                if isinstance(self.tier, ColdTier):
                    cold = ColdSnapshot(self.handle, self.tier, handle, since)
                return Snapshot(
                    name=self.name,
                    optimizer=self.optimizer,
                    columns=self.columns,
                    layout=self.image_layout,
                    handle=handle,
                    cold=cold,
                )
            except BaseException:
                ops.snapshot_close(handle)
                raise

    def empty_copy(self) -> Table:
        """Returns a table with the same arguments and no rows.

        Raises ValueError if the cold store is shared.
        """
        self.check_unshared("other jobs use them, so that they cannot be replaced")
        return Table(
            self.dim,
            self.dtype,
            self.optimizer,
            self.options,
            name=self.name,
            columns=self.columns,
            stochastic_rounding=self.stochastic_rounding,
            state_dtype=self.state_dtype,
            shard=self.shard,
        )

    def exchange_rows(self, other: Table, *, record_other: bool = True) -> None:
        """Exchanges the rows, ``steps`` and ``optimizer_steps`` of this table and
        another table, without copying rows.

        The backward of a forward that ran before the exchange updates neither table.
        Both tables forget all marks.

        Args:
            other: The other table.
            record_other: Whether the other table, too, records which ids leave it. That
                reads whole cold stores, for nothing if the other table is closed
                afterwards.

        Raises:
            ValueError: The tables differ in columns, data types, optimizer or bounds,
                there is a snapshot of one of them, or a cold store is shared.
        """
        for table in (self, other):
            table.check_unshared(
                "other jobs use them, so that they cannot move to another table"
            )
        ops.finish_updates()
        with (
            ops.native_errors(self._label),
            self._settled(None),
            other._settled(None),
            holding([self.tier, other.tier]),
        ):
            self._record_exchange(other)
            if record_other:
                other._record_exchange(self)
            ops.table_exchange_rows(self.handle, other.handle)
            self.pending_passes.clear()
            other.pending_passes.clear()
            self.tier.exchange(other.tier)

    def take_rows(self, other: Table) -> None:
        """Replaces the rows, ``steps`` and ``optimizer_steps`` by those of another
        table, which is then closed.

        Raises:
            ValueError: See :meth:`exchange_rows`. The other table stays open.
        """
        self.exchange_rows(other, record_other=False)
        other.close()

    def contains(self, ids: Tensor) -> Tensor:
        """Returns which of ``ids``, (N,) int64, have a row: (N,) bool.

        Cold rows count.
        """
        check_ids(ids)
        ops.finish_updates()
        with (
            ops.native_errors(self._label),
            self._settled(ids),
            self.tier.resident(ids),
        ):
            return self.tier.contains(ids)

    def remove(self, ids: Tensor) -> int:
        """Removes the rows of ``ids``, (N,) int64, and returns how many rows there
        were.

        Cold rows are removed too.
        """
        check_ids(ids)
        ops.finish_updates()
        with (
            ops.native_errors(self._label),
            self._settled(ids),
            self.tier.resident(ids),
        ):
            return self.tier.remove(ids)

    def set_scores(self, ids: Tensor, scores: Tensor) -> int:
        """Sets the scores of rows, by which a table with ``eviction=Scored()`` selects
        the rows to evict.

        Ids without a row are ignored: a row that is made later has no score. Cold rows
        stay in the cold store. If the cold store fails, some scores may have been set;
        the call can be repeated.

        Args:
            ids: (N,) int64. The ids of the rows. Among duplicates, the last one counts.
            scores: (N,) float32, finite. The score of each entry of ``ids``. Rows with
                lower scores are evicted first.

        Returns:
            The number of rows whose score was set.

        Raises:
            TypeError, ValueError: ``ids`` or ``scores`` has another dtype or shape, a
                score is not finite, or the table has no ``eviction=Scored()``. Nothing
                has changed.
            ColdStoreError: The cold store fails.
        """
        check_ids(ids)
        check_scores(scores, ids)
        if not isinstance(self.options.eviction, Scored):
            raise ValueError(
                f"{self._label} does not evict by scores: its eviction is"
                f" {self.options.eviction!r}; make it with TableOptions(max_rows=...,"
                " eviction=Scored())"
            )
        distinct, scores = _last_scores(ids, scores.detach())
        ops.finish_updates()
        with ops.native_errors(self._label), self.tier.resident(distinct):
            return self.tier.set_scores(distinct, scores)

    def left_ids(self) -> LeftIds:
        """Returns the ids whose rows have left the table since the last call, and
        begins a new record.

        A row leaves by eviction without a cold store, by expiry, by :meth:`remove`, or
        if other rows take the place of the table's rows. A row that moves to the cold
        store has not left. An id that has left and has a row again is not in the
        result. The first call returns the ids since the table was made. The call reads
        the whole cold store if its rows expire.

        Raises:
            ValueError: The table has no ``options.left_ids``.
            ColdStoreError: The cold store fails. The call can be repeated.
        """
        self.check_records_left("left_ids")
        ops.finish_updates()
        with ops.native_errors(self._label), self.tier.lock:
            self.tier.bury_expired()
            ids, complete = ops.table_take_left(self.handle)
            try:
                return LeftIds(ids[~self.tier.contains(ids)], complete)
            except BaseException:
                ops.table_add_left(self.handle, ids, complete)
                raise

    def add_left_ids(self, record: LeftIds) -> None:
        """Adds ids to the record that :meth:`left_ids` returns, such as those of a
        table that this one replaces.
        """
        self.check_records_left("add_left_ids")
        with ops.native_errors(self._label):
            ops.table_add_left(self.handle, record.ids, record.complete)

    def check_records_left(self, call: str) -> None:
        """Raises ValueError, which begins with ``call``, if the table does not record
        which ids leave it.
        """
        if self.options.left_ids is None:
            raise ValueError(
                f"{call}: {self._label} does not record which ids leave it: make it"
                " with TableOptions(left_ids=...), the largest number of ids in the"
                " record"
            )

    def _record_exchange(self, other: Table) -> None:
        """Records the ids of this table that ``other``, with which it is about to
        exchange its rows, does not have.
        """
        if self.options.left_ids is None:
            return
        try:
            # The native errors are converted within this block, so that it catches
            # those for want of memory.
            with ops.native_errors(self._label):
                self.tier.bury_expired()
            ids = self.ids()
            # The ids of the other table, with all of its cold rows, are not needed.
            if len(ids) == 0:
                return
            is_in_other = among(ids, other.ids())
            self.add_left_ids(LeftIds(ids[~is_in_other], complete=True))
        except (ColdStoreError, MemoryError):  # The exchange must not fail.
            self.add_left_ids(
                LeftIds(torch.empty(0, dtype=torch.int64), complete=False)
            )

    def ids(self) -> Tensor:
        """Returns the ids that have a row, cold rows included: (rows,) int64,
        ascending.
        """
        ops.finish_updates()
        with ops.native_errors(self._label):
            return self.tier.ids()

    def flush(self) -> None:
        """Writes the rows that have changed in memory to the shared cold store, so that
        other jobs can read them.

        The rows also stay in memory. They overwrite the rows that other jobs have
        written in the meantime.

        Raises:
            ValueError: The table has no shared cold store, or there is a snapshot of
                the table.
            ColdStoreError: The cold store fails. It may have stored some of the rows.
                The call can be repeated.
        """
        ops.finish_updates()
        with ops.native_errors(self._label), self._settled(None):
            self._shared_tier().flush()

    def refresh(self) -> None:
        """Calls :meth:`flush` and then removes the rows from memory, so that lookups
        read what other jobs have written.

        Rows of a forward whose backward has not run yet stay in memory.

        Raises:
            ValueError, ColdStoreError: See :meth:`flush`.
        """
        ops.finish_updates()
        with ops.native_errors(self._label), self._settled(None):
            self._shared_tier().release()

    @property
    def optimizer_steps(self) -> int:
        """The number of updates so far, one per step.

        The bias correction of Adam and LAMB uses it.
        """
        ops.finish_updates()
        with ops.native_errors(self._label):
            return ops.table_optimizer_steps(self.handle)

    def set_optimizer_steps(self, steps: int) -> None:
        """Sets :attr:`optimizer_steps`, at least 0."""
        ops.finish_updates()
        with ops.native_errors(self._label):
            ops.table_set_optimizer_steps(self.handle, steps)

    @property
    def steps(self) -> int:
        """The number of training lookups so far.

        It is the clock of ``last_step`` and of expiry.
        """
        ops.finish_updates()
        with ops.native_errors(self._label):
            return ops.table_steps(self.handle)

    def stats(self) -> TableStats:
        """Returns the table's statistics: numbers of rows, bytes, hits, misses and so
        on.
        """
        ops.finish_updates()
        with ops.native_errors(self._label):
            if self.device_rows is not None:
                self.device_rows.count_skipped()
            numbers = ops.table_stats(self.handle)
        counts = dict(zip(_NATIVE_STATS, numbers, strict=True))
        return TableStats(
            **counts,
            cold_rows=self.tier.rows,
            hits=counts["lookups"] - counts["misses"],
        )

    def close(self, *, flush: bool = True) -> None:
        """Frees all rows, cold rows too.

        Every later call raises ValueError. The table may be closed twice.

        The rows of a shared cold store stay there.

        Args:
            flush: Whether a table with a shared cold store calls :meth:`flush` first.
                If it raises an error, the table stays open. A table that is
                garbage-collected without being closed does not flush.
        """
        ops.finish_updates()
        if flush and self._free_rows.alive and self.tier.shared:
            self.flush()
        if self.device_rows is not None:
            self.device_rows.leave(self)
        self._free_rows()
        self._free_store()

    def __len__(self) -> int:
        if self.tier.shared:
            return len(self.ids())
        stats = self.stats()
        return stats.rows + stats.cold_rows

    def __bool__(self) -> bool:
        return True  # __len__ would make an empty table false

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            self.close()
        except ColdStoreError:
            self.close(flush=False)
            # an error of the with statement's body comes first
            if kind is None:
                raise

    def __reduce__(self) -> str:
        raise TypeError(
            f"table {self.name!r} owns native memory and cannot be copied or pickled"
        )

    def __repr__(self) -> str:
        return (
            f"Table(dim={self.dim}, dtype={self.dtype}, optimizer={self.optimizer},"
            f" name={self.name!r}, columns={self.columns})"
        )

    def _shared_tier(self) -> ColdTier:
        if isinstance(self.tier, ColdTier) and self.tier.shared:
            return self.tier
        raise ValueError(f"{self._label} has no shared cold store")

    def check_unshared(self, reason: str) -> None:
        """Raises ValueError, which ends with ``reason``, if the rows are in a
        shared cold store.
        """
        if self.tier.shared:
            raise ValueError(
                f"{self._label}: its rows are in {self.options.cold_store!r}, which is"
                f" shared: {reason}"
            )

    def _settled(self, ids: Tensor | None) -> AbstractContextManager[object]:
        """Brings the rows of ``ids``, (N,) int64, or all rows up to date in memory, and
        keeps them so.
        """
        if self.device_rows is None:
            return _NOTHING
        return self.device_rows.settled(self, ids)

    def _check_rows(
        self,
        rows: Tensor,
        argument: str,
        ids: Tensor,
    ) -> None:
        shape = (len(ids), len(self.columns))
        check_rows(
            rows,
            argument,
            shape,
            (torch.float32, self._value_dtype),
        )


def _last_scores(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct ids, and the last score of each."""
    distinct, places = torch.unique(ids, return_inverse=True)
    if len(distinct) == len(ids):
        return ids, scores
    last_positions = torch.zeros(len(distinct), dtype=torch.int64)
    positions = torch.arange(len(ids))
    last_positions.scatter_reduce_(0, places, positions, "amax")
    return distinct, scores[last_positions]


def check_replaceable(tables: Iterable[Table]) -> None:
    """Raises ValueError, which names the table, if the rows of a table are being
    written to a checkpoint.
    """
    for table in tables:
        if table.is_being_saved:
            raise ValueError(
                f"table '{table.name}': the table is being saved already: wait until"
                " the save has ended"
            )


def check_applied(tables: Iterable[Table], *, saves: bool = False) -> None:
    """Raises ValueError, which names the table, if a group with ``accumulation_steps``
    keeps gradients of a table.

    If the caller ``saves`` a state, which then lacks these gradients, the function only
    warns.
    """
    # A backward on an accelerator hands its gradient to the group only then.
    ops.finish_updates()
    for table in tables:
        passes = len(table.pending_passes)
        if not passes:
            continue
        waiting = f"the gradients of {passes} backward passes have not been applied yet"
        if not saves:
            raise ValueError(
                f"table '{table.name}': {waiting}: call it after a multiple of"
                " accumulation_steps"
            )
        warn_user(
            f"table '{table.name}': {waiting}, and are not saved: save after a multiple"
            " of accumulation_steps"
        )
        return


def exchange_all(pairs: Iterable[tuple[Table, Table]]) -> None:
    """Replaces the rows of the first table of each pair by those of the second, and
    closes the second.
    """
    for table, new_table in pairs:
        table.take_rows(new_table)
