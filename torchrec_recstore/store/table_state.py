"""What a table knows besides its rows: its clocks, how often its admission has seen
ids, and its statistics.

Tests: tests/store/test_shared_counts.py, tests/store/test_refused_times.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.display import html_table, text_table
from torchrec_recstore.options import TableOptions
from torchrec_recstore.store.parts import Owned
from torchrec_recstore.utils import warn_user


class Sightings(NamedTuple):
    """How often admission has seen ids, (N,) int64, that have no row: (N,) uint8.

    A generation of the counter (``csrc/bounds/sightings.h``), (N,) uint8, is 0, the present
    one, or 1, the older one.
    """

    ids: Tensor
    counts: Tensor
    generations: Tensor

    def take(self, which: Tensor) -> Sightings:
        """Returns the entries at positions, (n,) int64, or of a mask, (N,) bool."""
        return Sightings(*(tensor[which] for tensor in self))


def no_sightings() -> Sightings:
    """Returns the sightings of a new table."""
    none = torch.empty(0, dtype=torch.uint8)
    return Sightings(torch.empty(0, dtype=torch.int64), none, none)


_SIGHTINGS = dict(
    zip(
        ("sighting_ids", "sighting_counts", "sighting_generations"),
        Sightings._fields,
        strict=True,
    )
)


@dataclass(frozen=True, eq=False)
class TableState:
    """The state of a table, or of a shard of it, that is not in its rows.

    Args:
        steps: The number of training lookups. The rows' ``last_step`` refers to it.
        optimizer_steps: The number of updates, which the bias correction of Adam and
            LAMB uses.
        times: The times of the steps; see ``ops.table_times``. None if rows do not
            expire after a time.
        sightings: What admission has counted. None if admission does not count.
    """

    steps: int = 0
    optimizer_steps: int = 0
    times: tuple[int, ...] | None = None
    sightings: Sightings | None = None

    @staticmethod
    def merged(states: Iterable[TableState]) -> TableState:
        """Returns the state of a table from the states of its shards, which hold
        different ids.

        The clocks are those of the shard that is ahead. Of column shards, which hold
        the same ids, one has sightings.
        """
        states = list(states)
        counted = [state.sightings for state in states if state.sightings is not None]
        return TableState(
            steps=max((state.steps for state in states), default=0),
            optimizer_steps=max((state.optimizer_steps for state in states), default=0),
            # The shards have the same ticks. Their clocks differ a little.
            times=max(
                (state.times for state in states if state.times),
                key=lambda times: times[1],
                default=None,
            ),
            sightings=(
                Sightings(*map(torch.cat, zip(*counted, strict=True)))
                if counted
                else None
            ),
        )

    def owned(self, owned: Owned | None) -> TableState:
        """Returns the state of a shard: the clocks of the table, and the sightings of
        the shard's ids.
        """
        if owned is None or self.sightings is None:
            return self
        return replace(self, sightings=self.sightings.take(owned(self.sightings.ids)))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state as tensors, of which :meth:`from_tensors` makes it again.

        ``steps`` and ``optimizer_steps`` are (1,) int64, and, if the table has them,
        ``times`` (T,) int64, ``sighting_ids`` (N,) int64, ``sighting_counts`` and
        ``sighting_generations`` (N,) uint8.
        """
        named = {
            "steps": torch.tensor([self.steps]),
            "optimizer_steps": torch.tensor([self.optimizer_steps]),
        }
        if self.times is not None:
            named["times"] = torch.tensor(self.times, dtype=torch.int64)
        if self.sightings is not None:
            named |= {
                key: getattr(self.sightings, field) for key, field in _SIGHTINGS.items()
            }
        return named

    @staticmethod
    def from_tensors(named: Mapping[str, Tensor]) -> TableState:
        """Returns the state of :meth:`tensors`.

        Other tensors are ignored. Missing ones are as in a new table.

        Raises:
            ValueError: A tensor has another shape or another dtype. The message names
                the tensor.
        """
        found = {
            key: named[key].detach().to("cpu") for key in STATE_KEYS if key in named
        }
        for key, value in found.items():
            size, dtype = None, torch.int64
            if key in ("steps", "optimizer_steps"):
                size = 1
            elif key != "times":
                size, dtype = (
                    len(found.get("sighting_ids", ())),
                    (torch.int64 if key == "sighting_ids" else torch.uint8),
                )
            if (
                value.dtype is not dtype
                or value.dim() != 1
                or size not in (None, len(value))
            ):
                expected = f"({'T' if size is None else size},)"
                got = f"{value.dtype} of shape {tuple(value.shape)}"
                raise ValueError(
                    f"{key} must be {dtype} of shape {expected}, got {got}"
                )
        missing = [key for key in _SIGHTINGS if key not in found]
        if 0 < len(missing) < len(_SIGHTINGS):
            raise ValueError(f"the sightings have no {', '.join(missing)}")
        return TableState(
            steps=int(found["steps"]) if "steps" in found else 0,
            optimizer_steps=(
                int(found["optimizer_steps"]) if "optimizer_steps" in found else 0
            ),
            times=tuple(found["times"].tolist()) if "times" in found else None,
            sightings=(
                None if missing else Sightings(*(found[key] for key in _SIGHTINGS))
            ),
        )


STATE_KEYS = ("steps", "optimizer_steps", "times", *_SIGHTINGS)
"""The names of the tensors of a :class:`TableState`."""


class _TimedTable(Protocol):
    handle: int
    name: str
    options: TableOptions


def set_event_time(tables: Iterable[_TimedTable], times: Sequence[int]) -> None:
    """Sets the time by which rows expire to one of ``times``, in microseconds, which
    the ranks know of the events.

    See ``csrc/bounds/wall_clock.h``. Warns in the first, tenth, hundredth and so on call that
    refuses a time.
    """
    refusals: dict[tuple[int, int, int, int], set[str]] = {}
    for table in tables:
        refused = ops.table_set_time(table.handle, times)
        if refused and table.options.expiry and str(refused[-1]).rstrip("0") == "1":
            time, clock, count = refused
            refusals.setdefault(
                (time, clock, count, table.options.expiry.max_jump_microseconds), set()
            ).add(table.name)
    for (time, clock, count, max_jump), names in refusals.items():
        named = repr(min(names)) + (
            f" and {len(names) - 1} more" if len(names) > 1 else ""
        )
        warn_user(
            f"table {named}: set_time has refused the time {time / 1e6} ({count}"
            f" refused so far): it is more than {max_jump / 1e6:g} s away from the"
            f" clock's time {clock / 1e6}, by which rows expire. The clock follows when"
            " ten calls in a row agree. If your events can be so far apart, set"
            " Expiry(max_jump_s=...); otherwise leave out the times that are wrong"
        )


@dataclass(frozen=True)
class TableStats:
    """Statistics of a table: its size, and counts of its operations.

    Counts are numbers of distinct ids in a step. A training step is counted when its
    backward has run, when its graph has been freed, or when the statistics are read.
    Evaluation lookups are not counted.

    Args:
        rows: The number of rows in memory.
        cold_rows: The number of rows in the cold store. It is 0 for a shared cold
            store.
        bytes: The size in bytes of the memory for rows with their state, index and
            bookkeeping, for the counter of admission, and for the filter of the cold
            store.
        lookups: The number of ids that training steps looked up.
        hits: The number of these ids that had a row.
        misses: The number of these ids that had no row in memory.
        inserts: The number of rows created by training lookups, ``update`` and
            ``insert``, not brought back from a cold store.
        refused: The number of misses for which admission created no row.
        evicted: The number of rows that were evicted from memory.
        expired: The number of rows that expired.
        cold_hits: The number of misses that were found in the cold store.
        updates: The number of rows that a backward or ``update`` has changed.
        nonfinite: The number of rows that an update has left as they are. See
            ``TableOptions.nonfinite``.
        steps: The number of training lookups.
        refused_times: The number of calls of ``set_time`` with a time that was refused.
            See ``Expiry.max_jump_s``.
    """

    rows: int = 0
    cold_rows: int = 0
    bytes: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    inserts: int = 0
    refused: int = 0
    evicted: int = 0
    expired: int = 0
    cold_hits: int = 0
    updates: int = 0
    nonfinite: int = 0
    steps: int = 0
    refused_times: int = 0


class StatsByTable(dict[str, TableStats]):
    """Statistics by the name of the table, which are shown as a table, also in
    notebooks.
    """

    def __str__(self) -> str:
        return text_table(*self._shown()) if self else "{}"

    def _repr_html_(self) -> str:
        return html_table(*self._shown())

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        """Returns the columns and rows.

        Counts that are 0 for all tables are left out.
        """
        counts = [
            f.name
            for f in fields(TableStats)
            if f.name not in ("lookups", "misses", "hits")
        ]
        always = ("rows", "bytes", "steps")
        names = [
            name
            for name in counts
            if name in always or any(getattr(each, name) for each in self.values())
        ]
        columns = ["table", *(name.replace("_", " ") for name in names), "hit rate"]
        cells = [
            [
                table,
                *(f"{getattr(each, name):,}" for name in names),
                f"{each.hits / max(each.lookups, 1):.1%}",
            ]
            for table, each in self.items()
        ]
        return columns, cells


def combined(shards: Iterable[TableStats]) -> TableStats:
    """Returns the sum of the statistics of at least one shard, and the maximum of
    ``steps`` and ``refused_times``.
    """
    shards = list(shards)
    total = {
        f.name: sum(getattr(stats, f.name) for stats in shards)
        for f in fields(TableStats)
    }
    most = {
        name: max(getattr(stats, name) for stats in shards)
        for name in ("steps", "refused_times")
    }
    return TableStats(**(total | most))
