"""Tables by name in this process: those of a client without servers, or of a server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.info import CheckpointInfo, read_chain
from torchrec_recstore.checkpoint.warm_start import WarmStart
from torchrec_recstore.checkpoint.writer import SavedShard, warn_of_nonfinite
from torchrec_recstore.row_types import value_dtype, values
from torchrec_recstore.store import Table, TableStats
from torchrec_recstore.store.parts import Owned
from torchrec_recstore.store.table import exchange_all
from torchrec_recstore_service.tables.hosted_checkpoints import (
    check_loadable,
    loaded_tables,
    sources,
    write_tables,
)
from torchrec_recstore_service.tables.hosted_table import (
    Hosted,
    check_initial_rows,
    read_rows,
    update_rows,
    without_row,
)
from torchrec_recstore_service.tables.limits import Limits, held_options
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.row_requests import InitialRows, RowRead, RowUpdate
from torchrec_recstore_service.wire.table_spec import TableSpec

_MOST_LISTED = 20  # names of tables in a message
_MOST_CHARACTERS = 200  # of a name in a message

_Result = TypeVar("_Result")


@dataclass
class Loaded:
    """Tables that have been read from a checkpoint, before they replace others."""

    specs: dict[str, TableSpec]
    tables: dict[str, Table]
    exact: bool
    present: dict[str, Hosted]
    """The tables of the process, without temporary tables, when the checkpoint was
    read.
    """

    def close(self) -> None:
        """Frees the rows."""
        for table in self.tables.values():
            table.close()


class HostedTables:
    """Tables by name in this process, of a client without servers or of a server.

    Callers have checked all arguments. Ids are (N,) int64. Rows are (N, dim) in the
    table's dtype or float32. All tensors are on the CPU and neither changed nor kept
    after the call. Methods may be called from any thread. A call that changes a table
    runs while no other call uses the table. Calls that only read run at the same time,
    and each reads the rows as they are at one moment. A call either completes, or
    raises an error and changes nothing. :class:`ServerSet` has the same methods for
    tables on servers.

    Args:
        limits: The bounds of all tables, which apply where a table's specification sets
            none. Default: None, no bounds.

    Raises:
        ValueError: The table does not exist, or the tables are closed. The message
            names the tables that exist.
        MemoryError, ColdStoreError: See :class:`torchrec_recstore.store.Table`.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._tables: dict[str, Hosted] | None = {}
        # Locks are taken in this order, and a table's own lock is taken last.
        self._files = threading.Lock()  # allows one save or load at a time
        self._lock = threading.RLock()  # guards the set of tables
        self.alone: Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns a context during which nobody changes rows without the locks of the
        tables.
        """
        self._on_create: Callable[[Hosted], object] = lambda hosted: None
        self._on_delete: Callable[[str], object] = lambda name: None

    def watch(
        self,
        on_create: Callable[[Hosted], object],
        on_delete: Callable[[str], object],
    ) -> None:
        """Calls ``on_create`` with each table, also later ones, and ``on_delete`` with
        the name of a table that is deleted.
        """
        self._on_create = on_create
        self._on_delete = on_delete
        for hosted in self._by_name().values():
            on_create(hosted)

    def create(self, name: str, spec: TableSpec) -> None:
        """Creates a table.

        A table that exists with the same specification is not changed.

        ``spec.shard`` is the shard of the table that this process holds.

        Raises:
            ValueError: The table exists with another specification. The message names
                the difference.
        """
        hosted = self._by_name().get(name)
        if hosted is None:
            with self._lock:
                hosted = self._by_name().get(name)
                if hosted is None:
                    self._create(name, spec)
                    return
        if hosted.spec != spec:
            raise ValueError(
                f"table {name!r} exists already with another specification:"
                f" {hosted.spec.difference(spec)}"
            )

    def _create(self, name: str, spec: TableSpec) -> None:
        tables = self._by_name()
        max_tables = self._limits.max_tables
        if max_tables is not None and len(tables) >= max_tables:
            raise ValueError(
                f"table {name!r} cannot be made: the server has {max_tables} tables,"
                " the most of --max-tables"
            )
        self._check_counters(name, spec)
        hosted = Hosted(name, spec, _new_table(name, spec, self._limits))
        tables[name] = hosted
        self._on_create(hosted)

    def _check_counters(self, name: str, spec: TableSpec) -> None:
        size = 0
        for table, table_spec in [*self.specs().items(), (name, spec)]:
            admission = held_options(table, table_spec, self._limits).admission
            if admission is not None:
                size += admission.counter_bytes
        max_bytes = self._limits.max_counter_bytes
        if max_bytes is not None and size > max_bytes:
            raise ValueError(
                f"table {name!r} cannot be made: the counters of MinFrequency of all"
                f" tables would take {size} bytes, and --max-counter-memory is {max_bytes}"
                " bytes"
            )

    def spec(self, name: str) -> TableSpec | None:
        """Returns the specification that a table was created with, or None if the table
        does not exist.
        """
        hosted = self._by_name().get(name)
        return None if hosted is None else hosted.spec

    def specs(self) -> dict[str, TableSpec]:
        """Returns the specification of every table, by table name."""
        return {name: hosted.spec for name, hosted in dict(self._by_name()).items()}

    def no_table(self, name: str) -> ValueError:
        """Returns the error for a table that does not exist."""
        names = sorted(self._by_name())
        listed = ", ".join(map(repr, names[:_MOST_LISTED])) or "none"
        if len(names) > _MOST_LISTED:
            listed += f" and {len(names) - _MOST_LISTED} more"
        if len(name) > _MOST_CHARACTERS:
            name = f"{name[:_MOST_CHARACTERS]}..."
        return ValueError(
            f"there is no table {name!r}: there is {listed}; init_data makes one"
        )

    def drop(self, name: str) -> None:
        """Deletes a table and its rows."""
        with self._lock, self._held(name) as hosted:
            self._drop(hosted)

    def drop_idle(self, seconds: float) -> list[str]:
        """Deletes the temporary tables that have not been used for ``seconds`` and
        returns their names.
        """
        dropped = []
        with self._lock:
            for name, spec in self.specs().items():
                if not spec.temporary:
                    continue
                with self._held(name, use=False) as hosted:
                    if time.monotonic() - hosted.last_used > seconds:
                        self._drop(hosted)
                        dropped.append(name)
        return dropped

    def _drop(self, hosted: Hosted) -> None:
        self._on_delete(hosted.name)
        del self._by_name()[hosted.name]
        hosted.dropped = True
        _close(hosted)

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows: (N, dim) in the table's dtype.

        An id without a row reads as its initial row; no row is made.

        Raises:
            NoInitialRow: An id has no row, and the table has ``initial_rows``.
        """
        with self._shared(name) as hosted:
            check_initial_rows(hosted, ids)
            return hosted.table.lookup(ids)

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads the rows that exist.

        Returns:
            (N,) bool, True for the ids that have a row, and (n, dim) in the table's
            dtype, the rows of these ids in the order of ``ids``.
        """
        with self._shared(name) as hosted:
            has_row = hosted.table.contains(ids)
            ids_with_row = ids if bool(has_row.all()) else ids[has_row]
            # A lookup sums one row, which turns a signalling NaN into a quiet NaN. The
            # rows of a cold store are arbitrary bytes and must not change, so the rows
            # are read without a sum.
            weight = hosted.table.read_rows(ids_with_row)["weight"]
            if weight.dtype is torch.uint8:
                weight = values(weight)
            return has_row, weight

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes weights.

        New rows start with zero optimizer state. Existing rows keep their optimizer
        state. If an id occurs several times, its last row is written.
        """
        with self._held(name) as hosted:
            hosted.table.insert(ids, values)

    def update(
        self,
        name: str,
        ids: Tensor,
        grads: Tensor,
        initial: InitialRows | None = None,
    ) -> None:
        """Applies the optimizer once to the row of each distinct id, with the sum of
        the id's gradients.

        The gradients are summed in the order of ``ids``. One update is one step of the
        table's clock: eviction, expiry and admission count updates.

        Args:
            name: The name of the table.
            ids: (N,) int64. The ids whose rows are updated. Duplicates are allowed.
            grads: (N, dim). The gradients.
            initial: The initial rows of some of the ids, for a table with
                ``initial_rows``. An initial row is used if its id has no row when the
                update is carried out. The row becomes visible together with the update.

        Raises:
            NoInitialRow: The table has ``initial_rows``, and an id has neither a row
                nor an initial row in ``initial``.
        """
        with self._held(name) as hosted:
            if initial is None and not hosted.spec.initial_rows:
                update_rows([hosted], [RowUpdate(name, ids, grads)])
                return
            table = hosted.table
            group = hosted.group
            ops.finish_updates()
            with (
                ops.native_errors(f"table '{name}'"),
                group.cold_rows.resident(ids, None),
            ):
                new_ids, new_rows = without_row(hosted, ids, initial)
                # The forward pins the rows in their slots until group.update.
                context = row_ops.rows_begin(group.handle, ids)
                if len(new_ids):
                    # False for ids that are not admitted yet
                    has_row = table.contains(new_ids)
                    table.insert(new_ids[has_row], new_rows[has_row])
                group.update(context, grads.float(), False)

    def pull_each(self, reads: Sequence[RowRead]) -> list[Tensor]:
        """Reads rows of several tables without ``initial_rows``. See :class:`RowRead`.

        Returns:
            For each read, (N, dim) in the table's dtype. No row is made.
        """
        names = [read.table for read in reads]
        with self._several(self._shared, names) as tables:
            rows = []
            for read, hosted in zip(reads, tables, strict=True):
                dtype = value_dtype(hosted.spec.dtype)
                row_bytes = hosted.spec.dim * dtype.itemsize
                content = row_ops.rows_empty(len(read.ids), row_bytes)
                rows.append(content.view(dtype))
            read_rows(tables, reads, rows)
            return rows

    def read_each(self, reads: Sequence[RowRead], out: Sequence[Tensor]) -> None:
        """Writes what :meth:`pull_each` returns to ``out``: (N, dim) for each read, in
        the dtype of its table.
        """
        if len(reads) == 1:
            with self._shared(reads[0].table) as hosted:
                read_rows([hosted], reads, out)
            return
        names = [read.table for read in reads]
        with self._several(self._shared, names) as tables:
            read_rows(tables, reads, out)

    def update_each(self, updates: Sequence[RowUpdate]) -> None:
        """Makes an :meth:`update` of each of several tables without ``initial_rows``,
        also of those without ids.

        If one update fails, no row of this process is updated.
        """
        names = [update.table for update in updates]
        with self._several(self._held, names) as tables:
            update_rows(tables, updates)

    def delete(self, name: str, ids: Tensor) -> int:
        """Deletes rows and returns the number of rows that existed."""
        with self._held(name) as hosted:
            return hosted.table.remove(ids)

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """Returns (N,) bool, True for the ids that have a row."""
        with self._shared(name) as hosted:
            return hosted.table.contains(ids)

    def ids(self, name: str) -> Tensor:
        """Returns the ids that have a row, (rows,) int64, in ascending order."""
        return self.call_without_lock(name, Table.ids)

    def call_without_lock(self, name: str, call: Callable[[Table], _Result]) -> _Result:
        """Returns the result of a call that reads all rows of a table.

        Other calls do not wait for it, because it takes seconds for a large table.
        """
        with self._shared(name) as hosted:
            table = hosted.table
        try:
            return call(table)
        except ValueError:
            if hosted.dropped:
                raise self.no_table(name) from None
            raise

    def stats(self, name: str) -> TableStats:
        """Returns the statistics of a table."""
        with self._shared(name, use=False) as hosted:
            return hosted.table.stats()

    def used_bytes(self) -> int:
        """Returns the size in bytes of all tables in memory."""
        size = 0
        for hosted in list(self._by_name().values()):
            if not hosted.dropped:
                size += hosted.table.stats().bytes
        return size

    def save(
        self,
        path: str | Path,
        overwrite: bool = False,
        training_state: Mapping[str, Any] | None = None,
        begun: Callable[[], object] | None = None,
    ) -> None:
        """Saves all tables except temporary tables.

        On each server, the tables are saved as of one moment.

        The tables can be used during the save. A ``RecStoreWarning`` names each table
        with rows that are not finite, once for each table.

        ``training_state`` has further values of the checkpoint's training state. ``begun`` is
        called at that moment, while no call reads or changes a table.

        Raises:
            FileExistsError: ``path`` exists and ``overwrite`` is False, or ``path`` is
                not a checkpoint. Nothing is written.
            OSError: A file cannot be written. Nothing new is left at ``path``.
        """
        path = Path(os.path.realpath(path))
        with self._files, Destination(path, overwrite=overwrite) as destination:
            with self._lock:
                saved = self._lasting()
            try:
                with ExitStack() as snapshots:
                    shards = self._snapshots(saved, snapshots, begun)
                    specs = {name: hosted.spec for name, hosted in saved.items()}
                    nonfinite = write_tables(
                        shards,
                        specs,
                        destination,
                        training_state,
                    )
                for name, count in nonfinite.items():
                    if not saved[name].nonfinite_named:
                        saved[name].nonfinite_named = True
                        warn_of_nonfinite(name, count)
            finally:
                for hosted in saved.values():
                    if hosted.dropped:
                        hosted.table.close()

    def load(self, path: str | Path, warm: WarmStart = WarmStart()) -> None:  # noqa: B008  (frozen)
        """Replaces all tables except temporary tables by the tables of a checkpoint.

        Tables that exist only in the checkpoint are created. ``warm`` says what the
        load takes over: tables that it does not choose stay as they are.

        The old tables can be used until the whole checkpoint has been read. Writes to
        them during that time are lost. Old and new rows are in memory at the same time.
        No table can be created or dropped during the load.

        Raises:
            FileNotFoundError: The checkpoint does not exist.
            CheckpointError: A file is missing or damaged.
            ValueError: A table is not in the checkpoint, or has another specification
                there.
        """
        with self._files, self._lock:
            self._replace(self._read_checkpoint(path, exact=False, warm=warm))

    def read(self, path: str | Path | None, exact: bool) -> Loaded:
        """Reads a checkpoint for :meth:`replace`. The tables can be used meanwhile.

        Args:
            path: The path of the checkpoint. None: no tables.
            exact: Whether the tables become those of the checkpoint: tables that it
                does not have are deleted, and tables with another specification are
                made anew. Temporary tables are kept. Otherwise these tables are an
                error, and the learning rates and bounds of the tables are not changed.

        Raises:
            See :meth:`load`.
        """
        with self._files, self._lock:
            if path is None:
                return Loaded(
                    specs={},
                    tables={},
                    exact=True,
                    present={},
                )
            return self._read_checkpoint(path, exact)

    def replace(self, loaded: Loaded) -> None:
        """Replaces the tables by those that :meth:`read` has read.

        Nothing has changed after an error.

        Raises:
            ValueError: With ``exact=False``, tables have been created or dropped since
                they were read.
        """
        with self._files, self._lock:
            self._replace(loaded)

    def write_part(
        self,
        info: CheckpointInfo,
        specs: Mapping[str, TableSpec],
        owned: Owned,
        path: Path,
        training_state: Mapping[str, Any],
    ) -> None:
        """Writes a checkpoint with some of the rows of another checkpoint.

        The tables of this process do not change.

        Args:
            info: The checkpoint.
            specs: The specification of each table of the new checkpoint, by table name.
            owned: A function that selects the ids of the new checkpoint.
            path: The path of the new checkpoint.
            training_state: Further values of the training state of the new checkpoint.

        Raises:
            CheckpointError, MemoryError, ColdStoreError: The rows cannot be read.
            OSError: The new checkpoint cannot be written.
        """
        part = HostedTables(self._limits)
        try:
            makers = {
                name: partial(_new_table, name, spec, self._limits)
                for name, spec in specs.items()
            }
            for name, table in loaded_tables([info], makers, owned).items():
                part._by_name()[name] = Hosted(name, specs[name], table)
            part.save(path, training_state=training_state)
        finally:
            part.close()

    def _read_checkpoint(
        self,
        path: str | Path,
        exact: bool,
        warm: WarmStart = WarmStart(),  # noqa: B008  (frozen)
    ) -> Loaded:
        chain = read_chain(path)
        tables = self._by_name()
        present = {
            name: spec
            for name, spec in self.specs().items()
            if spec.temporary or not exact
        }
        chosen = sources(chain[-1], warm, present)
        check_loadable(chain[-1], chosen, present, warm)
        specs = {name: source.spec for name, source in chosen.items()}
        makers: dict[str, Callable[[], Table]] = {}
        for name, spec in specs.items():
            if name in present:
                makers[name] = tables[name].table.empty_copy
            else:
                makers[name] = partial(_new_table, name, spec, self._limits)
        new_tables = loaded_tables(chain, makers, loaded=chosen, warm=warm)
        return Loaded(
            specs=specs,
            tables=new_tables,
            exact=exact,
            present=self._lasting(),
        )

    def _lasting(self) -> dict[str, Hosted]:
        """Returns the tables that are not temporary, by name."""
        return {
            name: hosted
            for name, hosted in self._by_name().items()
            if not hosted.spec.temporary
        }

    def _replace(self, loaded: Loaded) -> None:
        tables = self._by_name()
        if loaded.exact:
            for name in self._lasting():
                with self._held(name) as hosted:
                    self._drop(hosted)
        elif self._lasting() != loaded.present:
            raise ValueError(
                "tables were created or dropped while the checkpoint was read: load it"
                " again"
            )
        with ExitStack() as locks:
            present = [
                locks.enter_context(self._held(name))
                for name in sorted(loaded.tables)
                if name in tables
            ]
            exchange_all(
                (hosted.table, loaded.tables.pop(hosted.name)) for hosted in present
            )
        new_tables = {
            name: Hosted(name, loaded.specs[name], table)
            for name, table in loaded.tables.items()
        }
        tables.update(new_tables)
        for hosted in new_tables.values():
            self._on_create(hosted)

    def close(self) -> None:
        """Frees the tables.

        It may be called twice. It waits for the end of a save or load.
        """
        with self._files, self._lock:
            tables = self._tables or {}
            self._tables = None
            for hosted in tables.values():
                with hosted.lock:
                    hosted.dropped = True
                    hosted.table.close()

    def _snapshots(
        self,
        saved: dict[str, Hosted],
        snapshots: ExitStack,
        begun: Callable[[], object] | None,
    ) -> list[SavedShard]:
        """Opens snapshots of all tables at one moment, while no call uses a table."""
        with ExitStack() as locks:
            locks.enter_context(self.alone())
            # locks of several tables are taken in the order of their names
            for _, hosted in sorted(saved.items()):
                locks.enter_context(hosted.lock)
            for name, hosted in list(saved.items()):
                if hosted.dropped:
                    del saved[name]
            if begun is not None:
                begun()
            shards = []
            for hosted in saved.values():
                table = hosted.table
                shard = SavedShard(
                    name=table.name,
                    table=table,
                    snapshot=snapshots.enter_context(table.snapshot()),
                    options=hosted.spec.options,
                    state=table.state(),
                )
                shards.append(shard)
            return shards

    def _by_name(self) -> dict[str, Hosted]:
        if self._tables is None:
            raise ValueError("the tables are closed")
        return self._tables

    def _held(self, name: str, use: bool = True) -> AbstractContextManager[Hosted]:
        """Locks a table, for a call that changes it, and yields it."""
        return self._locked(name, lambda hosted: hosted.lock, use)

    def _shared(self, name: str, use: bool = True) -> AbstractContextManager[Hosted]:
        """Shares the lock of a table with other readers, for a call that changes
        nothing, and yields the table.
        """
        return self._locked(name, lambda hosted: hosted.lock.shared(), use)

    @contextmanager
    def _locked(
        self,
        name: str,
        lock: Callable[[Hosted], AbstractContextManager[None]],
        use: bool,
    ) -> Iterator[Hosted]:
        while True:
            hosted = self._by_name().get(name)
            if hosted is None:
                raise self.no_table(name)
            with lock(hosted):
                # If it was dropped before the lock was taken, a new table may have its
                # name.
                if not hosted.dropped:
                    if use:
                        hosted.last_used = time.monotonic()
                    yield hosted
                    return

    @contextmanager
    def _several(
        self,
        lock: Callable[[str], AbstractContextManager[Hosted]],
        names: Sequence[str],
    ) -> Iterator[list[Hosted]]:
        """Locks several tables by ``_held`` or ``_shared``, and yields them in the
        order of ``names``.
        """
        with ExitStack() as locks:
            tables = {
                name: locks.enter_context(lock(name)) for name in sorted(set(names))
            }
            yield [tables[name] for name in names]


def _new_table(
    name: str,
    spec: TableSpec,
    limits: Limits,
) -> Table:
    return Table(
        spec.dim,
        dtype=spec.dtype,
        optimizer=spec.optimizer,
        options=held_options(name, spec, limits),
        name=name,
        shard=spec.shard[0],
    )


def _close(hosted: Hosted) -> None:
    """Frees the rows, unless a save still reads them.

    In that case the save frees them.
    """
    if not hosted.table.is_being_saved:
        hosted.table.close()
