"""Tables by name in this process: those of a client without servers, or of a server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from torchrec_recstore.checkpoint.writer import SavedShard
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

_LISTED = 20  # names of tables in a message
_NAME = 200  # characters of a name in a message

_Result = TypeVar("_Result")


@dataclass
class Loaded:
    """Tables that have been read from a checkpoint, and have not replaced those of the
    process yet.
    """

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
            none. Default: no bounds.

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
        self._made: Callable[[Hosted], object] = lambda hosted: None
        self._gone: Callable[[str], object] = lambda name: None

    def watch(
        self, made: Callable[[Hosted], object], gone: Callable[[str], object]
    ) -> None:
        """Calls ``made`` with each table, also later ones, and ``gone`` with the name
        of one that is deleted.
        """
        self._made, self._gone = made, gone
        for hosted in self._named().values():
            made(hosted)

    def create(self, name: str, spec: TableSpec) -> None:
        """Creates a table.

        A table that exists with the same specification is not changed.

        ``spec.shard`` is the shard of the table that this process holds.

        Raises:
            ValueError: The table exists with another specification. The message names
                the difference.
        """
        there = self._named().get(name)
        if there is None:
            with self._lock:
                there = self._named().get(name)
                if there is None:
                    most = self._limits.max_tables
                    if most is not None and len(self._named()) >= most:
                        raise ValueError(
                            f"table {name!r} cannot be made: the server has {most}"
                            " tables, the most of --max-tables"
                        )
                    self._check_counters(name, spec)
                    made = self._named()[name] = Hosted(
                        name, spec, _made(name, spec, self._limits)
                    )
                    self._made(made)
                    return
        if there.spec != spec:
            raise ValueError(
                f"table {name!r} exists already with another specification:"
                f" {there.spec.difference(spec)}"
            )

    def _check_counters(self, name: str, spec: TableSpec) -> None:
        most = self._limits.max_counter_bytes
        specs = [*self.specs().items(), (name, spec)]
        policies = [
            held_options(name, spec, self._limits).admission for name, spec in specs
        ]
        size = sum(policy.counter_bytes for policy in policies if policy is not None)
        if most is not None and size > most:
            raise ValueError(
                f"table {name!r} cannot be made: the counters of MinFrequency of all"
                f" tables would take {size} bytes, and --max-counter-memory is {most}"
                " bytes"
            )

    def spec(self, name: str) -> TableSpec | None:
        """Returns the specification that a table was created with, or None if the table
        does not exist.
        """
        there = self._named().get(name)
        return None if there is None else there.spec

    def specs(self) -> dict[str, TableSpec]:
        """Returns the specification of every table, by table name."""
        return {name: hosted.spec for name, hosted in dict(self._named()).items()}

    def no_table(self, name: str) -> ValueError:
        """Returns the error for a table that does not exist."""
        names = sorted(self._named())
        there = ", ".join(map(repr, names[:_LISTED])) or "none"
        if len(names) > _LISTED:
            there += f" and {len(names) - _LISTED} more"
        if len(name) > _NAME:
            name = f"{name[:_NAME]}..."
        return ValueError(
            f"there is no table {name!r}: there is {there}; init_data makes one"
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
            for name in [name for name, spec in self.specs().items() if spec.temporary]:
                with self._held(name, use=False) as hosted:
                    if time.monotonic() - hosted.last_used > seconds:
                        self._drop(hosted)
                        dropped.append(name)
        return dropped

    def _drop(self, hosted: Hosted) -> None:
        self._gone(hosted.name)
        del self._named()[hosted.name]
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
            (N,) bool, True for the ids that have a row, and (found, dim) in the table's
            dtype, the rows of these ids in the order of ``ids``.
        """
        with self._shared(name) as hosted:
            found = hosted.table.contains(ids)
            # A lookup sums one row, which turns a signalling NaN into a quiet NaN. The
            # rows of a cold store are arbitrary bytes and must not change, so the rows
            # are read without a sum.
            weight = hosted.table.read_rows(ids if bool(found.all()) else ids[found])[
                "weight"
            ]
            return found, values(weight) if weight.dtype is torch.uint8 else weight

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes weights.

        New rows start with zero optimizer state. Existing rows keep their optimizer
        state. If an id occurs several times, its last row is written.
        """
        with self._held(name) as hosted:
            hosted.table.insert(ids, values)

    def update(
        self, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None
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
            table, group = hosted.table, hosted.group
            with (
                ops.native_errors(f"table '{name}'"),
                group.cold_rows.resident(ids, None),
            ):
                begun = without_row(hosted, ids, initial)
                # The forward pins the rows in their slots until kernel.update.
                context = row_ops.rows_begin(group.handle, ids)
                if len(begun[0]):
                    # False for ids that are not admitted yet
                    there = table.contains(begun[0])
                    table.insert(begun[0][there], begun[1][there])
                group.update(context, grads.float(), False)

    def pull_each(self, reads: Sequence[RowRead]) -> list[Tensor]:
        """Reads rows of several tables without ``initial_rows``. See :class:`RowRead`.

        Returns:
            For each read, (N, dim) in the table's dtype. No row is made.
        """
        with self._several(self._shared, (read.table for read in reads)) as hosted:
            rows = []
            for read, each in zip(reads, hosted, strict=True):
                dtype = value_dtype(each.spec.dtype)
                rows.append(
                    row_ops.rows_empty(
                        len(read.ids), each.spec.dim * dtype.itemsize
                    ).view(dtype)
                )
            read_rows(hosted, reads, rows)
            return rows

    def read_each(self, reads: Sequence[RowRead], out: Sequence[Tensor]) -> None:
        """Writes what :meth:`pull_each` returns to ``out``: (N, dim) for each read, in
        the dtype of its table.
        """
        if len(reads) == 1:
            with self._shared(reads[0].table) as one:
                read_rows([one], reads, out)
            return
        with self._several(self._shared, (read.table for read in reads)) as hosted:
            read_rows(hosted, reads, out)

    def update_each(self, updates: Sequence[RowUpdate]) -> None:
        """Makes an :meth:`update` of each of several tables without ``initial_rows``,
        also of those without ids.

        If one update fails, no row of this process is updated.
        """
        with self._several(self._held, (update.table for update in updates)) as hosted:
            update_rows(hosted, updates)

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
        return self.whole(name, Table.ids)

    def whole(self, name: str, call: Callable[[Table], _Result]) -> _Result:
        """Returns the result of a call that reads all rows of a table.

        Other calls do not wait for it.
        """
        with self._shared(name) as hosted:
            table = hosted.table
        try:
            # without the lock, because it takes seconds for a large table
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
        return sum(
            hosted.table.stats().bytes
            for hosted in list(self._named().values())
            if not hosted.dropped
        )

    def save(
        self,
        path: str | Path,
        overwrite: bool = False,
        more: Mapping[str, Any] | None = None,
        begun: Callable[[], object] | None = None,
    ) -> None:
        """Saves all tables except temporary tables.

        On each server, the tables are saved as of one moment.

        The tables can be used during the save.

        ``more`` are further values of the checkpoint's training state. ``begun`` is
        called at that moment, while no call reads or changes a table.

        Raises:
            FileExistsError: ``path`` exists and ``overwrite`` is False, or ``path`` is
                not a checkpoint. Nothing is written.
            OSError: A file cannot be written. Nothing new is left at ``path``.
        """
        path = Path(os.path.realpath(path))
        with self._files, Destination(path, overwrite=overwrite) as destination:
            with self._lock:
                saved = {
                    name: hosted
                    for name, hosted in self._named().items()
                    if not hosted.spec.temporary
                }
            try:
                with ExitStack() as snapshots:
                    shards = self._snapshots(saved, snapshots, begun)
                    write_tables(
                        shards,
                        {name: hosted.spec for name, hosted in saved.items()},
                        destination,
                        more,
                    )
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
            return (
                Loaded({}, {}, True, {})
                if path is None
                else self._read_checkpoint(path, exact)
            )

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
        more: Mapping[str, Any],
    ) -> None:
        """Writes a checkpoint with some of the rows of another checkpoint.

        The tables of this process do not change.

        Args:
            info: The checkpoint.
            specs: The specification of each table of the new checkpoint, by table name.
            owned: A function that selects the ids of the new checkpoint.
            path: The path of the new checkpoint.
            more: Further values of the training state of the new checkpoint.

        Raises:
            CheckpointError, MemoryError, ColdStoreError: The rows cannot be read.
            OSError: The new checkpoint cannot be written.
        """
        part = HostedTables(self._limits)
        try:
            made = {
                name: partial(_made, name, spec, self._limits)
                for name, spec in specs.items()
            }
            tables = loaded_tables([info], made, owned)
            part._named().update(
                (name, Hosted(name, specs[name], table))
                for name, table in tables.items()
            )
            part.save(path, more=more)
        finally:
            part.close()

    def _read_checkpoint(
        self,
        path: str | Path,
        exact: bool,
        warm: WarmStart = WarmStart(),  # noqa: B008  (frozen)
    ) -> Loaded:
        chain = read_chain(path)
        tables = self._named()
        present = {
            name: spec
            for name, spec in self.specs().items()
            if spec.temporary or not exact
        }
        chosen = sources(chain[-1], warm, present)
        check_loadable(chain[-1], chosen, present, warm)
        specs = {name: source.spec for name, source in chosen.items()}
        empty = {
            name: (
                tables[name].table.empty_copy
                if name in present
                else partial(_made, name, spec, self._limits)
            )
            for name, spec in specs.items()
        }
        fresh = loaded_tables(chain, empty, loaded=chosen, warm=warm)
        return Loaded(specs, fresh, exact, self._lasting())

    def _lasting(self) -> dict[str, Hosted]:
        return {
            name: hosted
            for name, hosted in self._named().items()
            if not hosted.spec.temporary
        }

    def _replace(self, loaded: Loaded) -> None:
        tables = self._named()
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
        fresh = {
            name: Hosted(name, loaded.specs[name], table)
            for name, table in loaded.tables.items()
        }
        tables.update(fresh)
        for hosted in fresh.values():
            self._made(hosted)

    def close(self) -> None:
        """Frees the tables.

        It may be called twice. It waits for the end of a save or load.
        """
        with self._files, self._lock:
            tables, self._tables = self._tables or {}, None
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
        """Opens snapshots of all tables at one moment, while no call reads or changes
        any of the tables.
        """
        with ExitStack() as locks:
            locks.enter_context(self.alone())
            # locks of several tables are taken in the order of their names
            for _, hosted in sorted(saved.items()):
                locks.enter_context(hosted.lock)
            for name in [name for name, hosted in saved.items() if hosted.dropped]:
                del saved[name]
            if begun is not None:
                begun()
            return [
                SavedShard(
                    hosted.table.name,
                    hosted.table,
                    snapshots.enter_context(hosted.table.snapshot()),
                    hosted.spec.options,
                    hosted.table.state(),
                )
                for hosted in saved.values()
            ]

    def _named(self) -> dict[str, Hosted]:
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
            hosted = self._named().get(name)
            if hosted is None:
                raise self.no_table(name)
            with lock(hosted):
                if (
                    not hosted.dropped
                    # else it was dropped before the lock was taken, and a new table may
                    # have its name
                ):
                    if use:
                        hosted.last_used = time.monotonic()
                    yield hosted
                    return

    @contextmanager
    def _several(
        self,
        held: Callable[[str], AbstractContextManager[Hosted]],
        names: Iterable[str],
    ) -> Iterator[list[Hosted]]:
        """Locks several tables by ``_held`` or ``_shared``, and yields them in the
        order of ``names``.
        """
        names = list(names)
        with ExitStack() as locks:
            tables = {
                name: locks.enter_context(held(name)) for name in sorted(set(names))
            }
            yield [tables[name] for name in names]


def _made(name: str, spec: TableSpec, limits: Limits) -> Table:
    return Table(
        spec.dim,
        spec.dtype,
        spec.optimizer,
        held_options(name, spec, limits),
        name=name,
        shard=spec.shard[0],
    )


def _close(hosted: Hosted) -> None:
    """Frees the rows, unless a save still reads them.

    In that case the save frees them.
    """
    if not hosted.table.is_being_saved:
        hosted.table.close()
