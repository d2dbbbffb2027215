from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.optim import Optimizer, RowWiseAdagrad, state_names
from torchrec_recstore.options import TableOptions, default_initializer, is_shared
from torchrec_recstore.store.arguments import check_ids, check_rows
from torchrec_recstore.store.cold_store import ColdStoreError
from torchrec_recstore.store.cold_tier import ColdTier
from torchrec_recstore.store.memory_tier import Arrival, MemoryTier, holding
from torchrec_recstore.store.snapshot import ColdSnapshot, Snapshot, named_rows
from torchrec_recstore.store.stats import TableStats


class Table:
    """One shard of one embedding table: rows by id, in a native store that grows.

    Any int64 is an id. A call either does all of its work or raises with the table as it was. Calls from several
    threads are safe, one after the other; within a call torch's thread pool is used, and results are the same, to the
    bit, for every number of threads.

    Args:
        dim: columns of the whole table.
        dtype: of the rows' weights: ``torch.float32``, ``float16`` or ``bfloat16``. Optimizer state and all arithmetic
            are float32; what is stored is rounded to nearest, ties to even, new rows like all others.
        optimizer: what :meth:`update` and a kernel's backward do to a row.
        options: how rows are made and read.
        name: keeps tables apart; decides new rows' weights together with ``options.seed``.
        columns: ``range(a, b)`` for the shard that holds those columns; lookups are then (N, b - a).
        stochastic_rounding: whether updates of 16-bit rows round up or down at random, with the probability that makes
            the mean right, so that steps smaller than the last bit are not lost. The random numbers depend on seed,
            name, id, column and the number of the table's update alone. Without effect on float32 rows.
        shard: number of the shard where a table's rows are split; keeps shards apart in a cold store.
        owned: ids (N,) int64 -> (N,) bool, which are this shard's where a table's rows are split: a shared cold store
            has those of all shards under one name.

    Raises:
        TypeError: an argument of the wrong type; the message names it.
        ValueError: an argument that makes no sense; the message names it.
        ColdStoreError, ImportError: the cold store cannot be opened. Every call raises ColdStoreError where it needs
            the store and that fails; every row is then where it was, and the call can be repeated.

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
        stochastic_rounding: bool = False,
        shard: int = 0,
        owned: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim must be an int, got {type(dim).__name__}")
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        if dtype not in ops.ROW_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, ops.ROW_DTYPES))}, got {dtype}")
        if not isinstance(stochastic_rounding, bool):
            raise TypeError(f"stochastic_rounding must be a bool, got {type(stochastic_rounding).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be one of torchrec_recstore.optim, got {type(optimizer).__name__}")
        if not isinstance(options, TableOptions):
            raise TypeError(f"options must be TableOptions, got {type(options).__name__}")
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, got {type(name).__name__}")
        if columns is None:
            columns = range(dim)
        if not isinstance(columns, range):
            raise TypeError(f"columns must be a range, got {type(columns).__name__}")
        if columns.step != 1 or not 0 <= columns.start < columns.stop <= dim:
            raise ValueError(f"columns must be a range of step 1 within range({dim}), got {columns}")
        self.dim = dim
        self.dtype = dtype
        self.optimizer = optimizer
        self.options = options
        self.name = name
        self.columns = columns
        self.stochastic_rounding = stochastic_rounding
        self.shard = shard
        self.handle = ops.table_create(
            name,
            columns,
            options.seed,
            options.missing,
            default_initializer(options),
            optimizer,
            dtype,
            stochastic_rounding,
            options,
        )
        """The native table, for :func:`torchrec_recstore.ops.group_create`."""
        self._free_rows = weakref.finalize(self, ops.table_destroy, self.handle)
        self.tier = MemoryTier(self.handle)
        """Where rows lie beside memory."""
        if options.cold_store is not None:
            store_name = f"{name}.{shard}.{columns.start}-{columns.stop}"
            if is_shared(options.cold_store):
                # Found by jobs that split rows otherwise, and by none that would read the bytes as another kind of row.
                kind = ".".join([str(dtype).removeprefix("torch."), *state_names(optimizer)])
                store_name = f"{name}.{columns.start}-{columns.stop}.{kind}"
            self.tier = ColdTier(self.handle, dtype, len(columns), options, store_name, owned)
        self._free_store = weakref.finalize(self, self.tier.close)

    def lookup(self, ids: Tensor, *, train: bool = False) -> Tensor:
        """Reads rows.

        Args:
            ids: (N,) int64, any strides; duplicates allowed.
            train: one step: ids without a row get one. Otherwise nothing changes, and an id without a row reads as
                zeros or as its initial row (``options.missing``).

        Returns:
            (N, columns), the table's dtype.

        Raises:
            TypeError: ``ids`` is no int64 tensor.
            ValueError: ``ids`` has another shape, the table is closed, or the ids need more rows at once than
                ``options.max_rows``.
            MemoryError: no room for the new rows.
        """
        check_ids(ids)
        with self._rows_of(ids, "lookup" if train else None):
            rows = ops.table_lookup(self.handle, ids, train).to(self.dtype)
            if not train:
                self.tier.read_into(rows, ids)
            return rows

    def update(self, ids: Tensor, grads: Tensor, *, lr: float | None = None) -> None:
        """Applies the optimizer once to each distinct id's row, on the sum of its gradients in the order given.

        An id without a row gets its initial row first. With ``MinFrequency(count)`` and a count above 1 it gets no row,
        and its gradients are dropped: only a training lookup admits an id.

        Args:
            ids: (N,) int64.
            grads: (N, columns), float32 or the table's dtype.
            lr: learning rate; None: the optimizer's.

        Raises:
            TypeError, ValueError, MemoryError: as :meth:`lookup`, and for ``grads``.
        """
        check_ids(ids)
        self._check_rows(grads, "grads", ids, self.dtype)
        with self._rows_of(ids, "update"):
            ops.table_update(self.handle, ids, grads.detach().float(), self.optimizer.lr if lr is None else lr)

    def insert(self, ids: Tensor, weights: Tensor) -> None:
        """Writes rows: new ones start with zero optimizer state, existing ones keep theirs.

        Args:
            ids: (N,) int64; of duplicates the last one wins.
            weights: (N, columns), float32 or the table's dtype.

        Raises:
            TypeError, ValueError, MemoryError: as :meth:`lookup`, and for ``weights``.
        """
        check_ids(ids)
        self._check_rows(weights, "weights", ids, self.dtype)
        with self._rows_of(ids, "write"):
            ops.table_insert(self.handle, ids, weights.detach().float())

    def read_rows(self, ids: Tensor) -> dict[str, Tensor]:
        """All that there is of the rows of ``ids``, (N,) int64, as copies.

        Returns:
            ``weight`` (N, columns) of the table's dtype, ``last_step`` and ``frequency`` (N,) int64, and the
            optimizer's states under their names (:func:`torchrec_recstore.optim.state_names`), float32: element-wise
            ones (N, columns), row-wise ones (N,).

        Raises:
            TypeError, ValueError: as :meth:`lookup`; an id has no row.
        """
        check_ids(ids)
        with self._rows_of(ids):
            return named_rows(self.optimizer, self.tier.export(ids))

    def write_rows(self, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Makes or overwrites the rows of ``ids``, (N,) int64, all of each; of duplicates the last wins.

        Args:
            ids: (N,) int64.
            rows: what :meth:`read_rows` gives; ``weight`` may be float32.

        Raises:
            TypeError, ValueError, MemoryError: as :meth:`lookup`; a key is missing or unknown, or a tensor has another
                shape.
        """
        check_ids(ids)
        kinds = state_names(self.optimizer)
        expected = ["weight", *kinds, "last_step", "frequency"]
        if set(rows) != set(expected):
            raise ValueError(f"rows must have the keys {', '.join(expected)}, got {', '.join(rows)}")
        elements = [name for name, kind in kinds.items() if kind == "element"]
        self._check_rows(rows["weight"], "weight", ids, self.dtype)
        for name in elements:
            self._check_rows(rows[name], name, ids)
        for name in expected:
            if name not in elements and name != "weight" and tuple(rows[name].shape) != (ids.shape[0],):
                raise ValueError(f"{name} must have the shape ({ids.shape[0]},), got {tuple(rows[name].shape)}")
        row_wise = [rows[name] for name, kind in kinds.items() if kind == "row"] or [torch.zeros(ids.shape[0])]
        states = [rows[name].detach() for name in elements]
        stacked = torch.stack(states) if states else torch.empty(0, *rows["weight"].shape)
        with self._rows_of(ids, "write"):
            ops.table_import(
                self.handle,
                ids,
                rows["weight"].detach().to(self.dtype),
                stacked,
                row_wise[0].detach().float(),
                rows["last_step"],
                rows["frequency"],
            )

    @property
    def is_being_saved(self) -> bool:
        """Whether there is a snapshot of it, during which it takes no other rows."""
        with ops.native_errors(f"table '{self.name}'"):
            return ops.table_is_being_saved(self.handle)

    def sightings(self) -> tuple[Tensor, int]:
        """What admission has counted: cells (2, 4, N) uint8, the present generation first, and its sightings so far.

        N is 0 without admission. How ids have their cells is told in csrc/sightings.h.
        """
        with ops.native_errors(f"table '{self.name}'"):
            return ops.table_sightings(self.handle)

    def set_sightings(self, cells: Tensor, taken: int) -> None:
        """Replaces what admission has counted by what :meth:`sightings` of such a table gave.

        Raises:
            ValueError: the table has no admission, or a counter of another size.
        """
        with ops.native_errors(f"table '{self.name}'"):
            ops.table_set_sightings(self.handle, cells, taken)

    @property
    def image_bytes(self) -> int:
        """Bytes of a row with all of its state, as a cold store gets it."""
        return ops.table_image_bytes(self.handle)

    def mark(self) -> int:
        """From here on the table knows which rows change and which ids leave; returns the mark to ask by.

        A snapshot has a mark of its own moment. From the first mark on, a row takes a byte more, and each id that
        leaves eight. The last 127 marks at least are known, older ones are forgotten.
        """
        with ops.native_errors(f"table '{self.name}'"):
            return ops.table_mark(self.handle)

    def snapshot(self, since: int | None = None) -> Snapshot:
        """The rows as they are now, to be read while the table goes on changing; one at a time.

        Of a cold store that cannot be read as it was at a moment (``ColdStore.ascending_snapshots``) a copy is made
        first, in a temporary file.

        Args:
            since: a mark; then only rows that have changed, or were made, since.

        Raises:
            ValueError: there is a snapshot of the table already, or the mark has been forgotten, or there is a mark and
                the cold store is shared: what others have changed since is not known.
            ColdStoreError: the cold store fails.
        """
        if since is not None:
            self.check_unshared("what others have changed there since a mark is not known: save all of it")
        with ops.native_errors(f"table '{self.name}'"), self.tier.lock:
            handle = ops.snapshot_open(self.handle, since)
            try:
                cold = None
                if isinstance(self.tier, ColdTier):
                    cold = ColdSnapshot(self.handle, self.tier, ops.snapshot_left(handle), whole=since is None)
                return Snapshot(self.name, self.optimizer, self.dtype, len(self.columns), handle, cold)
            except BaseException:
                ops.snapshot_close(handle)
                raise

    def empty_copy(self) -> Table:
        """A table like this one, without rows.

        Raises:
            ValueError: the cold store is shared.
        """
        self.check_unshared("all of them cannot be replaced at once")
        return Table(
            self.dim,
            self.dtype,
            self.optimizer,
            self.options,
            name=self.name,
            columns=self.columns,
            stochastic_rounding=self.stochastic_rounding,
            shard=self.shard,
        )

    def exchange_rows(self, other: Table) -> None:
        """Exchanges rows, ``steps`` and ``optimizer_steps`` with another table, without copying.

        Forwards whose backward has not run yet update neither table any more, and all marks are forgotten.

        Raises:
            ValueError: the tables differ in columns, dtype, optimizer or bounds, there is a snapshot of one of them, or
                a cold store is shared.
        """
        for table in (self, other):
            table.check_unshared("they are not this table's to give away")
        with ops.native_errors(f"table '{self.name}'"), holding([self.tier, other.tier]):
            ops.table_exchange_rows(self.handle, other.handle)
            self.tier.exchange(other.tier)

    def contains(self, ids: Tensor) -> Tensor:
        """Tells which of ``ids``, (N,) int64, have a row: (N,) bool."""
        check_ids(ids)
        with self._rows_of(ids):
            return self.tier.contains(ids)

    def remove(self, ids: Tensor) -> int:
        """Forgets the rows of ``ids``, (N,) int64; returns how many there were."""
        check_ids(ids)
        with self._rows_of(ids):
            return self.tier.remove(ids)

    def ids(self) -> Tensor:
        """The ids that have a row: (rows,) int64, ascending."""
        with ops.native_errors(f"table '{self.name}'"):
            return self.tier.ids()

    def flush(self) -> None:
        """Writes the rows that have changed in memory to the shared cold store, so that others see them.

        They stay in memory. What is written is what the rows are now, whatever others have written meanwhile.

        Raises:
            ValueError: the table has no shared cold store, or there is a snapshot of it.
            ColdStoreError: the store fails; it may have some of the rows. The call can be repeated.
        """
        with ops.native_errors(f"table '{self.name}'"):
            self._shared_tier().flush()

    def refresh(self) -> None:
        """As :meth:`flush`; then the rows leave memory, so that the next lookups see what others have written.

        Rows of a forward whose backward has not run stay.

        Raises:
            ValueError, ColdStoreError: as :meth:`flush`.
        """
        with ops.native_errors(f"table '{self.name}'"):
            self._shared_tier().release()

    @property
    def optimizer_steps(self) -> int:
        """Updates so far, one a step: what the bias correction of Adam and LAMB counts."""
        with ops.native_errors(f"table '{self.name}'"):
            return ops.table_optimizer_steps(self.handle)

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        with ops.native_errors(f"table '{self.name}'"):
            ops.table_set_optimizer_steps(self.handle, steps)

    @property
    def steps(self) -> int:
        """Training lookups so far: the clock that a row's last step is told by."""
        with ops.native_errors(f"table '{self.name}'"):
            return ops.table_steps(self.handle)

    @steps.setter
    def steps(self, steps: int) -> None:
        with ops.native_errors(f"table '{self.name}'"), self.tier.lock:
            self.tier.set_steps(steps)

    def stats(self) -> TableStats:
        """What the table holds and has done."""
        with ops.native_errors(f"table '{self.name}'"):
            counts = ops.table_stats(self.handle)
        rows, size, lookups, misses, inserts, updates, steps, refused, evicted, expired, cold_hits = counts
        return TableStats(
            rows=rows,
            cold_rows=self.tier.rows,
            bytes=size,
            lookups=lookups,
            hits=lookups - misses,
            misses=misses,
            inserts=inserts,
            refused=refused,
            evicted=evicted,
            expired=expired,
            cold_hits=cold_hits,
            updates=updates,
            steps=steps,
        )

    def close(self, *, flush: bool = True) -> None:
        """Frees the rows, cold ones too; any later use raises ValueError. Closing twice is fine.

        Args:
            flush: with a shared cold store, call :meth:`flush` first, which raises what it raises: the table is then
                open still. A table that is dropped without being closed writes nothing.
        """
        if flush and self._free_rows.alive and self.tier.shared:
            self.flush()
        self._free_rows()
        self._free_store()

    def __len__(self) -> int:
        if self.tier.shared:
            return len(self.ids())
        stats = self.stats()
        return stats.rows + stats.cold_rows

    def __bool__(self) -> bool:
        return True  # an empty table is a table

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ColdStoreError:
            self.close(flush=False)
            if kind is None:  # else that error is the one to be seen
                raise

    def __reduce__(self) -> str:
        raise TypeError(f"table {self.name!r} owns native memory and cannot be copied or pickled")

    def __repr__(self) -> str:
        return (
            f"Table(dim={self.dim}, dtype={self.dtype}, optimizer={self.optimizer}, name={self.name!r}, "
            f"columns={self.columns})"
        )

    @contextmanager
    def _rows_of(self, ids: Tensor, arrival: Arrival | None = None) -> Iterator[None]:
        """Within it no row moves to the cold store or back; with ``arrival`` the rows of ``ids`` are in memory."""
        with ops.native_errors(f"table '{self.name}'"), self.tier.lock:
            if arrival is not None:
                self.tier.bring(ids, arrival)
            yield
            if arrival == "lookup":
                self.tier.end_step()

    def _shared_tier(self) -> ColdTier:
        if not isinstance(self.tier, ColdTier) or not self.tier.shared:
            raise ValueError(f"table '{self.name}' has no shared cold store")
        return self.tier

    def check_unshared(self, why: str) -> None:
        """Refuses what a table whose rows are in a shared cold store cannot do.

        Raises:
            ValueError: it is such a table; the message ends with ``why``.
        """
        if self.tier.shared:
            raise ValueError(
                f"table '{self.name}': its rows lie in {self.options.cold_store!r}, which is shared: {why}"
            )

    def _check_rows(self, rows: Tensor, argument: str, ids: Tensor, or_dtype: torch.dtype = torch.float32) -> None:
        check_rows(rows, argument, (ids.shape[0], len(self.columns)), (torch.float32, or_dtype))
