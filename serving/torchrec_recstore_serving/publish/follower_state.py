"""The state of a follower.

Tests: tests/serving/publish/test_follower.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FollowerState:
    """The state of a follower.

    Args:
        source: The place that is followed, without credentials.
        version: The version of the served rows. None: no full export has been loaded
            yet.
        number: The number of the publication that has these rows.
        newest: The number of the newest publication that is known.
        versions_behind: The number of publications that are not applied yet.
        seconds_behind: The age of the rows in seconds, the larger of the two ages that
            follow. Infinity if no full export has been loaded yet.
        publication_age_s: The time in seconds since the moment up to which the rows are
            known to be those of the trained model, by the publisher's clock. 0 if that
            clock is ahead.
        arrival_age_s: The time in seconds since the follower has first seen that
            moment, by its own monotonic clock. It grows when the publisher is gone,
            whatever the clocks say.
        fulls_loaded: The number of full exports that have been loaded.
        deltas_applied: The number of deltas that have been applied.
        history_changes: The number of times that the follower has left a history. A
            publisher that continues from an older checkpoint, while the place has lost
            the publications after it, begins another history.
        problem: The reason why the newest publication is not served. None: it is
            served, or is being applied.
        waits_for: The publication or the file that is loaded next: ``"publication 6"``,
            ``"a full export"``, ``"delta 5, which is read again in 1.5 s"``, or
            ``"nothing"`` if a pinned publication is served.
        pinned: The number of the only publication that is served. None: the newest one
            is.
    """

    source: str
    version: str | None
    number: int
    newest: int
    versions_behind: int
    seconds_behind: float
    publication_age_s: float
    arrival_age_s: float
    fulls_loaded: int
    deltas_applied: int
    history_changes: int
    problem: str | None
    waits_for: str
    pinned: int | None = None
