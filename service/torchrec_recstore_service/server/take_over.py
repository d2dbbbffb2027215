"""When a server that was started with --take-over may begin without all rows.

Tests: tests/service/test_pairs_lost.py.
"""

from __future__ import annotations

from torchrec_recstore_service.server.lease import TTL_S, Record

FREE_S = 2 * TTL_S
"""The time in seconds for which the lease must be free before --take-over counts."""
# a longer time between two looks at the lease, in which it may have been held
_LOST_SIGHT_S = 1.0


class TakeOver:
    """What --take-over lets a server do once: begin as the primary without all rows.

    A living server with all rows takes a free lease at once. So --take-over counts when
    the lease has been free for some time. It does not count any more when the record
    has changed: then a server has been the primary since, this one or the other one,
    and has acknowledged writes that this server may lack. Neither does it when this
    server has copied the tables of a primary: its rows are not those of its last save
    any more, and lack what this primary has acknowledged since.
    """

    def __init__(self) -> None:
        self._first_record: Record | None = None
        self._last_look: float | None = None
        self._free_since: float | None = None
        self.has_ended = False
        """Whether the record has changed, or the tables are those of another server."""

    @property
    def counts(self) -> bool:
        """Whether the server may begin now."""
        if self.has_ended or self._free_since is None or self._last_look is None:
            return False
        return self._last_look - self._free_since >= FREE_S

    def look(
        self,
        holder: str,
        record: Record | None,
        time_s: float,
    ) -> None:
        """Notes the state of the lease at a time.

        Args:
            holder: The id of the server that has the lease. Empty if it is free.
            record: The record beside the lease, if there is one.
            time_s: The time in seconds, by ``time.monotonic()``.
        """
        if self._last_look is None:
            self._first_record = record
        elif time_s - self._last_look > _LOST_SIGHT_S:
            self._free_since = None
        self._last_look = time_s
        if record != self._first_record:
            self.has_ended = True
        if holder:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = time_s
