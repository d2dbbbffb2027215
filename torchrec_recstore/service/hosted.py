"""Tables of one process: those of a client without servers, and those that a server serves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.info import read_chain
from torchrec_recstore.checkpoint.reader import exchange_all
from torchrec_recstore.checkpoint.writer import SavedShard
from torchrec_recstore.kernels import PooledKernel
from torchrec_recstore.options import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    TableOptions,
    shard_options,
)
from torchrec_recstore.rpc.table_spec import TableSpec
from torchrec_recstore.service.backend import InitialRows, NoInitialRow
from torchrec_recstore.service.checkpoints import check_loadable, loaded_tables, saved_specs, write_tables
from torchrec_recstore.store import Table, TableStats
from torchrec_recstore.store.arguments import among


@dataclass(frozen=True)
class Limits:
    """Bounds of every table that a process holds, where its specification leaves them open.

    Args:
        max_rows: of each table in this process; a specification may ask for less, not for more.
        eviction: as in :class:`TableOptions`; of tables with a bound.
        expiry: likewise, of all tables.
        admission: likewise.
        cold_store: likewise, of tables with a bound.

    Raises:
        TypeError, ValueError: a value makes no sense; the message names it.
    """

    max_rows: int | None = None
    eviction: LRU | LFU | None = None
    expiry: Expiry | None = None
    admission: MinFrequency | None = None
    cold_store: Hashable | None = None

    def __post_init__(self) -> None:
        # A specification may have the bound that eviction and cold store need.
        TableOptions(
            max_rows=1 if self.max_rows is None else self.max_rows,
            eviction=self.eviction,
            expiry=self.expiry,
            admission=self.admission,
            cold_store=self.cold_store,
        )


def limits_of(options: TableOptions) -> Limits:
    """Those of its bounds that a process can have for all of its tables."""
    return Limits(options.max_rows, options.eviction, options.expiry, options.admission, options.cold_store)


def held_options(name: str, spec: TableSpec, limits: Limits) -> TableOptions:
    """The options of the part of a table that this process holds.

    Args:
        name: of the table.
        spec: whose ``max_rows`` is over all shards.
        limits: of this process.

    Raises:
        ValueError: ``max_rows`` is less than the number of shards; the message names the table.
    """
    shard, shards = spec.shard
    options = shard_options(spec.options, (shards, shard), name)
    bounds = [rows for rows in (options.max_rows, limits.max_rows) if rows is not None]
    bounded = bool(bounds)
    if spec.lossless:
        keeps = limits.eviction if limits.cold_store is not None else None
        limits = replace(limits, eviction=keeps, expiry=None, admission=None)
    return replace(
        options,
        max_rows=min(bounds, default=None),
        eviction=options.eviction or (limits.eviction if bounded else None),
        expiry=options.expiry or limits.expiry,
        admission=options.admission or limits.admission,
        cold_store=limits.cold_store if bounded else None,
        missing="init",  # a client reads what training would begin with
    )


@dataclass
class Hosted:
    """A table, and what it was made with."""

    name: str
    spec: TableSpec
    table: Table
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by every call that looks at the rows or changes them, as long as it takes."""
    dropped: bool = False
    last_used: float = field(default_factory=time.monotonic)
    """When a call has last looked at the rows or changed them."""

    def __post_init__(self) -> None:
        self.kernel = PooledKernel([self.table], [0], "sum")


class HostedBackend:
    """Named tables of this process; implements :class:`torchrec_recstore.service.backend.Backend`.

    Calls for one table come one after the other, those for different tables side by side.

    Args:
        limits: bounds of each table where its specification leaves them open.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        self._limits = limits
        self._tables: dict[str, Hosted] | None = {}
        # In the order in which they are taken; a table's own lock is the last.
        self._files = threading.Lock()  # one save or load at a time
        self._lock = threading.RLock()  # of which tables there are

    def create(self, name: str, spec: TableSpec) -> None:
        """As :meth:`Backend.create`; ``spec.shard`` tells which part of the table this is."""
        there = self._named().get(name)
        if there is None:
            with self._lock:
                there = self._named().get(name)
                if there is None:
                    self._named()[name] = Hosted(name, spec, _made(name, spec, self._limits))
                    return
        if there.spec != spec:
            raise ValueError(f"table {name!r} is there already, and another one: {there.spec.difference(spec)}")

    def spec(self, name: str) -> TableSpec | None:
        """As :meth:`Backend.spec`, with the shard that it was made with."""
        there = self._named().get(name)
        return None if there is None else there.spec

    def specs(self) -> dict[str, TableSpec]:
        """Of every table, by its name."""
        return {name: hosted.spec for name, hosted in dict(self._named()).items()}

    def no_table(self, name: str) -> ValueError:
        """The error of whoever asks for a table that is not there."""
        there = ", ".join(map(repr, sorted(self._named()))) or "none"
        return ValueError(f"there is no table {name!r}: there is {there}; init_data makes one")

    def drop(self, name: str) -> None:
        """Forgets a table and its rows."""
        with self._lock, self._held(name) as hosted:
            self._drop(hosted)

    def drop_idle(self, seconds: float) -> list[str]:
        """Forgets temporary tables that have not been used for so long; returns their names."""
        dropped = []
        with self._lock:
            for name in [name for name, spec in self.specs().items() if spec.temporary]:
                with self._held(name, use=False) as hosted:
                    if time.monotonic() - hosted.last_used > seconds:
                        self._drop(hosted)
                        dropped.append(name)
        return dropped

    def _drop(self, hosted: Hosted) -> None:
        del self._named()[hosted.name]
        hosted.dropped = True
        _close(hosted)

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """As :meth:`Backend.pull`."""
        with self._held(name) as hosted:
            if hosted.spec.initial_rows and not bool(hosted.table.contains(ids).all()):
                raise NoInitialRow(name, torch.arange(len(ids)))
            return hosted.table.lookup(ids)

    def found_rows(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`Backend.found_rows`."""
        with self._held(name) as hosted:
            found = hosted.table.contains(ids)
            # Not a lookup: a sum of one row, which makes signalling NaNs quiet. Cold stores keep any bytes in rows.
            return found, hosted.table.read_rows(ids if bool(found.all()) else ids[found])["weight"]

    def push(self, name: str, ids: Tensor, values: Tensor) -> None:
        """As :meth:`Backend.push`."""
        with self._held(name) as hosted:
            hosted.table.insert(ids, values)

    def update(self, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None) -> None:
        """As :meth:`Backend.update`."""
        with self._held(name) as hosted:
            table, kernel = hosted.table, hosted.kernel
            with ops.native_errors(f"table '{name}'"), kernel.cold_rows.resident(ids, None):
                begun = _without_row(hosted, ids, initial)
                # The rows stay where they are from here on until their update.
                context = ops.rows_forward([kernel.group], ids, [len(ids)], True)[1]
                if begun is not None and len(begun[0]):
                    there = table.contains(begun[0])  # those that admission has not held back
                    table.insert(begun[0][there], begun[1][there])
                kernel.update(context, grads.float(), False)

    def delete(self, name: str, ids: Tensor) -> int:
        """As :meth:`Backend.delete`."""
        with self._held(name) as hosted:
            return hosted.table.remove(ids)

    def exists(self, name: str, ids: Tensor) -> Tensor:
        """As :meth:`Backend.exists`."""
        with self._held(name) as hosted:
            return hosted.table.contains(ids)

    def ids(self, name: str) -> Tensor:
        """The ids that have a row: (rows,) int64, ascending."""
        with self._held(name) as hosted:
            return hosted.table.ids()

    def stats(self, name: str) -> TableStats:
        """As :meth:`Backend.stats`."""
        with self._held(name, use=False) as hosted:
            return hosted.table.stats()

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """As :meth:`Backend.save`; the tables go on meanwhile."""
        path = Path(os.path.realpath(path))
        with self._files, Destination(path, overwrite=overwrite) as destination:
            with self._lock:
                saved = {name: hosted for name, hosted in self._named().items() if not hosted.spec.temporary}
            try:
                with ExitStack() as snapshots:
                    shards = self._snapshots(saved, snapshots)
                    write_tables(shards, {name: hosted.spec for name, hosted in saved.items()}, destination)
            finally:
                for hosted in saved.values():
                    if hosted.dropped:
                        hosted.table.close()

    def load(self, path: str | Path) -> None:
        """As :meth:`Backend.load`; until all is read the tables go on, and what is written meanwhile is replaced.

        Tables that are in the checkpoint alone are made. Old and new rows are in memory together for a while; making
        and dropping tables waits.
        """
        with self._files, self._lock:
            chain = read_chain(path)
            specs = saved_specs(chain[-1])
            tables = self._named()
            check_loadable(chain[-1], specs, self.specs())
            fresh = loaded_tables(
                chain,
                {
                    name: tables[name].table.empty_copy if name in tables else partial(_made, name, spec, self._limits)
                    for name, spec in specs.items()
                },
            )
            with ExitStack() as locks:
                present = [locks.enter_context(self._held(name)) for name in fresh if name in tables]
                exchange_all((hosted.table, fresh.pop(hosted.name)) for hosted in present)
            tables.update((name, Hosted(name, specs[name], table)) for name, table in fresh.items())

    def close(self) -> None:
        """As :meth:`Backend.close`; waits for a save or load."""
        with self._files, self._lock:
            tables, self._tables = self._tables or {}, None
            for hosted in tables.values():
                with hosted.lock:
                    hosted.dropped = True
                    hosted.table.close()

    def _snapshots(self, saved: dict[str, Hosted], snapshots: ExitStack) -> list[SavedShard]:
        """Opens snapshots of all tables at one moment, at which no call is at work on any of them."""
        with ExitStack() as locks:
            for hosted in saved.values():
                locks.enter_context(hosted.lock)
            for name in [name for name, hosted in saved.items() if hosted.dropped]:
                del saved[name]
            return [
                SavedShard(
                    hosted.table.name,
                    hosted.table,
                    snapshots.enter_context(hosted.table.snapshot()),
                    hosted.spec.options,
                    hosted.table.sightings(),
                )
                for hosted in saved.values()
            ]

    def _named(self) -> dict[str, Hosted]:
        if self._tables is None:
            raise ValueError("the tables are closed")
        return self._tables

    @contextmanager
    def _held(self, name: str, use: bool = True) -> Iterator[Hosted]:
        """The table of that name, which no other call looks at meanwhile."""
        while True:
            tables = self._named()
            hosted = tables.get(name)
            if hosted is None:
                raise self.no_table(name)
            with hosted.lock:
                if not hosted.dropped:  # meanwhile; there may be another one of that name
                    if use:
                        hosted.last_used = time.monotonic()
                    yield hosted
                    return


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
    """Frees the rows, unless a save has still to read them, which does it then."""
    if not hosted.table.is_being_saved:
        hosted.table.close()


def _without_row(hosted: Hosted, ids: Tensor, initial: InitialRows | None) -> InitialRows | None:
    """Those of the initial rows whose ids have no row.

    Raises:
        NoInitialRow: an id of a table with initial rows has neither.
    """
    if initial is None and not hosted.spec.initial_rows:
        return None
    missing = torch.unique(ids[~hosted.table.contains(ids)])
    known, rows = initial if initial is not None else (missing[:0], torch.empty(0, hosted.spec.dim))
    if hosted.spec.initial_rows and not bool(among(missing, known.sort().values).all()):
        raise NoInitialRow(hosted.name, torch.arange(len(ids)))
    wanted = among(known, missing)
    return known[wanted], rows[wanted]
