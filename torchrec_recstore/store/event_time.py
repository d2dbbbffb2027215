"""The time of the events by which rows expire, and the warning of times that are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torchrec_recstore import ops
from torchrec_recstore.options import TableOptions
from torchrec_recstore.utils import warn_user


class _Table(Protocol):
    handle: int
    name: str
    options: TableOptions


def set_event_time(tables: Iterable[_Table], times: Sequence[int]) -> None:
    """Sets the time by which the rows of tables expire to one of the times of the events.

    Warns in the first, tenth, hundredth and so on call that refuses a time.

    Args:
        tables: The tables. Those whose rows do not expire after a time ignore the call.
        times: The times of the events that the ranks know, in microseconds since 1970. See
            :data:`torchrec_recstore.ops.table_set_time`.
    """
    refusals: dict[tuple[int, int, int, int], set[str]] = {}
    for table in tables:
        refused = ops.table_set_time(table.handle, times)
        if refused and table.options.expiry and str(refused[-1]).rstrip("0") == "1":
            time, clock, count = refused
            refusals.setdefault((time, clock, count, table.options.expiry.max_jump_microseconds), set()).add(table.name)
    for (time, clock, count, max_jump), names in refusals.items():
        named = repr(min(names)) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        warn_user(
            f"table {named}: set_time has refused the time {time / 1e6} ({count} refused so far): it is "
            f"more than {max_jump / 1e6:g} s away from the clock's time {clock / 1e6}, by which rows expire. The clock "
            "follows when ten calls in a row agree. If your events can be so far apart, set Expiry(max_jump_s=...); "
            "otherwise leave out the times that are wrong"
        )
