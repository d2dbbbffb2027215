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
    """How often admission has seen ids that have no row."""

    ids: Tensor  # (N,) int64
    counts: Tensor  # (N,) uint8
    # (N,) uint8: the generation of the counter, 0 for the present one and 1 for the
    # older one. See csrc/bounds/sightings.h.
    generations: Tensor

    def take(self, which: Tensor) -> Sightings:
        """Returns the entries at positions, (n,) int64, or of a mask, (N,) bool."""
        return Sightings(
            self.ids[which],
            self.counts[which],
            self.generations[which],
        )


def no_sightings() -> Sightings:
    """Returns the sightings of a new table."""
    no_ids = torch.empty(0, dtype=torch.int64)
    no_counts = torch.empty(0, dtype=torch.uint8)
    return Sightings(no_ids, no_counts, no_counts)


_CLOCK = 1  # the place of the clock's time in ops.table_times
_STEP_KEYS = ("steps", "optimizer_steps")
_SIGHTING_KEYS = (
    "sighting_ids",
    "sighting_counts",
    "sighting_generations",
)
"""The keys of the fields of :class:`Sightings`, in their order."""

STATE_KEYS = (*_STEP_KEYS, "times", *_SIGHTING_KEYS)
"""The names of the tensors of a :class:`TableState`."""


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
        steps = 0
        optimizer_steps = 0
        times: tuple[int, ...] | None = None
        sightings: list[Sightings] = []
        for state in states:
            steps = max(steps, state.steps)
            optimizer_steps = max(optimizer_steps, state.optimizer_steps)
            # The shards have the same ticks. Their clocks differ a little.
            if state.times:
                is_ahead = times is None or state.times[_CLOCK] > times[_CLOCK]
                if is_ahead:
                    times = state.times
            if state.sightings is not None:
                sightings.append(state.sightings)

        merged_sightings: Sightings | None = None
        if sightings:
            merged_sightings = Sightings(
                ids=torch.cat([part.ids for part in sightings]),
                counts=torch.cat([part.counts for part in sightings]),
                generations=torch.cat([part.generations for part in sightings]),
            )
        return TableState(steps, optimizer_steps, times, merged_sightings)

    def owned(self, owned: Owned | None) -> TableState:
        """Returns the state of a shard: the clocks of the table, and the sightings of
        the shard's ids.
        """
        if owned is None or self.sightings is None:
            return self
        is_owned = owned(self.sightings.ids)
        return replace(self, sightings=self.sightings.take(is_owned))

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
            named |= zip(_SIGHTING_KEYS, self.sightings, strict=True)
        return named

    @staticmethod
    def from_tensors(named: Mapping[str, Tensor]) -> TableState:
        """Returns the state of :meth:`tensors`.

        Other tensors are ignored. Missing ones are as in a new table.

        Raises:
            ValueError: A tensor has another shape or another dtype. The message names
                the tensor.
        """
        tensors = {}
        for key in STATE_KEYS:
            if key in named:
                tensors[key] = named[key].detach().to("cpu")
        sighting_ids = tensors.get("sighting_ids", ())
        for key, tensor in tensors.items():
            if key == "times":
                _check_tensor(key, tensor, None, torch.int64)
            elif key in _STEP_KEYS:
                _check_tensor(key, tensor, 1, torch.int64)
            elif key == "sighting_ids":
                _check_tensor(
                    key,
                    tensor,
                    len(sighting_ids),
                    torch.int64,
                )
            else:
                _check_tensor(
                    key,
                    tensor,
                    len(sighting_ids),
                    torch.uint8,
                )

        missing = [key for key in _SIGHTING_KEYS if key not in tensors]
        if 0 < len(missing) < len(_SIGHTING_KEYS):
            listed = ", ".join(missing)
            raise ValueError(f"the sightings have no {listed}")

        times: tuple[int, ...] | None = None
        if "times" in tensors:
            times = tuple(tensors["times"].tolist())
        sightings: Sightings | None = None
        if not missing:
            fields_of_sightings = [tensors[key] for key in _SIGHTING_KEYS]
            sightings = Sightings(*fields_of_sightings)
        return TableState(
            steps=int(tensors.get("steps", 0)),
            optimizer_steps=int(tensors.get("optimizer_steps", 0)),
            times=times,
            sightings=sightings,
        )


def _check_tensor(
    key: str,
    tensor: Tensor,
    size: int | None,
    dtype: torch.dtype,
) -> None:
    """Raises ValueError if a tensor is not (size,) of ``dtype``. None: any size."""
    has_size = tensor.dim() == 1 and size in (None, len(tensor))
    if tensor.dtype is not dtype or not has_size:
        expected_size = "T" if size is None else size
        raise ValueError(
            f"{key} must be {dtype} of shape ({expected_size},),"
            f" got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


class _TimedTable(Protocol):
    handle: int
    name: str
    options: TableOptions


class _Refusal(NamedTuple):
    """A time that a table has refused. Times are in microseconds."""

    time: int
    clock: int
    refused_times: int
    max_jump: int


def set_event_time(tables: Iterable[_TimedTable], times: Sequence[int]) -> None:
    """Sets the time by which rows expire to one of ``times``, in microseconds, which
    the ranks know of the events.

    See ``csrc/bounds/wall_clock.h``. Warns in the first, tenth, hundredth and so on
    call that refuses a time.
    """
    refusals: dict[_Refusal, set[str]] = {}
    for table in tables:
        refused = ops.table_set_time(table.handle, times)
        if not refused or not table.options.expiry:
            continue
        time, clock, count = refused
        is_power_of_ten = str(count).rstrip("0") == "1"
        if is_power_of_ten:
            max_jump = table.options.expiry.max_jump_microseconds
            refusal = _Refusal(time, clock, count, max_jump)
            names_of_refusal = refusals.setdefault(refusal, set())
            names_of_refusal.add(table.name)

    for refusal, names in refusals.items():
        named = repr(min(names))
        if len(names) > 1:
            named += f" and {len(names) - 1} more"
        time_s = refusal.time / 1e6
        clock_s = refusal.clock / 1e6
        max_jump_s = refusal.max_jump / 1e6
        warn_user(
            f"table {named}: set_time has refused the time {time_s}"
            f" ({refusal.refused_times} refused so far): it is more than"
            f" {max_jump_s:g} s away from the clock's time"
            f" {clock_s}, by which rows expire. The clock follows when"
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
        device_rows: The number of rows that are also in the memory of the accelerator.
            See ``TableOptions.device_rows``.
        device_hits: The number of ids that training steps on the accelerator looked up
            and found there, also those that a prefetch had copied there before.
        device_arrivals: The number of ids whose rows these steps, and prefetches,
            copied there.
        device_written_back: The number of rows that were copied from the accelerator to
            the host, because they left the accelerator or the host needed them.
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
    device_rows: int = 0
    device_hits: int = 0
    device_arrivals: int = 0
    device_written_back: int = 0


class StatsByTable(dict[str, TableStats]):
    """Statistics by the name of the table, which are shown as a table, also in
    notebooks.
    """

    def __str__(self) -> str:
        if not self:
            return "{}"
        columns, rows = self._shown()
        return text_table(columns, rows)

    def _repr_html_(self) -> str:
        columns, rows = self._shown()
        return html_table(columns, rows)

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        """Returns the columns and rows.

        Counts that are 0 for all tables are left out.
        """
        in_hit_rate = ("lookups", "misses", "hits")
        always_shown = ("rows", "bytes", "steps")
        names = []
        for field in fields(TableStats):
            if field.name in in_hit_rate:
                continue
            is_counted = any(getattr(stats, field.name) for stats in self.values())
            if field.name in always_shown or is_counted:
                names.append(field.name)

        titles = [name.replace("_", " ") for name in names]
        columns = ["table", *titles, "hit rate"]
        rows = []
        for table_name, stats in self.items():
            counts = [f"{getattr(stats, name):,}" for name in names]
            hit_rate = stats.hits / max(stats.lookups, 1)
            rows.append([table_name, *counts, f"{hit_rate:.1%}"])
        return columns, rows


def combined(shards: Iterable[TableStats]) -> TableStats:
    """Returns the sum of the statistics of at least one shard, and the maximum of
    ``steps`` and ``refused_times``.
    """
    shards = list(shards)
    counts = {}
    for field in fields(TableStats):
        counts_of_shards = [getattr(stats, field.name) for stats in shards]
        if field.name in ("steps", "refused_times"):
            counts[field.name] = max(counts_of_shards)
        else:
            counts[field.name] = sum(counts_of_shards)
    return TableStats(**counts)
