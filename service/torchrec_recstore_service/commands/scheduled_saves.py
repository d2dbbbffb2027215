"""Saves of a set of servers on a schedule.

Tests: tests/service/test_agreement.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from torchrec_recstore.network import checked_addresses, host_of
from torchrec_recstore_service.client.server_set import ServerSet
from torchrec_recstore_service.server.credentials import watched_token
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_service.wire.access import Access
from torchrec_recstore_service.wire.agreement import complete_saves

_PREFIX = "scheduled-"
_STOP_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """When a set of servers is saved, and how many of these saves are kept.

    All servers of a set can have the same schedule: the first server of the set makes
    the saves.

    Args:
        every_s: The time between two saves in seconds.
        keep: The number of scheduled saves that are kept. Saves of other names are
            never deleted. Default: 3.
        servers: The address of each server of the set. Default: none, for a set of one
            server.
        tls_ca: The path of a PEM file with the CA certificates of the servers, if they
            use TLS. Default: None.

    Raises:
        TypeError, ValueError: A value is invalid. The message names the flag.
    """

    every_s: float
    keep: int = 3
    servers: Sequence[str] = ()
    tls_ca: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.every_s < float("inf"):
            raise ValueError(
                "--save-every must be a positive number of seconds, got"
                f" {self.every_s:g}"
            )
        if self.keep < 1:
            raise ValueError(f"--keep must be at least 1, got {self.keep}")
        if self.servers:
            checked_addresses(self.servers, "--servers")

    def check_fits(self, listening: ListenOptions) -> None:
        """Checks that a server with these options can call the servers of the set.

        Raises:
            ValueError: A flag is missing.
        """
        host = host_of(listening.listen, least_port=0).strip("[]")
        if not self.servers and host in ("0.0.0.0", "::"):
            raise ValueError(
                f"--save-every needs --servers: {listening.listen} is not an address"
                " that can be called"
            )
        if listening.tls_cert is not None and self.tls_ca is None:
            raise ValueError(
                "--save-every needs --tls-ca on a server with TLS, because it calls the"
                " servers of the set"
            )


class ScheduledSaves:
    """A thread that saves a set of servers on a schedule.

    A save that fails is logged, and the next one is made.

    Args:
        schedule: The schedule.
        listening: The options of this server, whose token and certificate the calls
            use.
        address: The address of this server.
        is_first: A function that returns whether this server is in an epoch and is the
            first server of its set.
    """

    def __init__(
        self,
        schedule: Schedule,
        listening: ListenOptions,
        address: str,
        is_first: Callable[[], bool],
    ) -> None:
        self._schedule = schedule
        self._is_first = is_first
        self._token = None
        if listening.token_file is not None:
            self._token = watched_token(listening.token_file)
        access = Access(tls_ca=schedule.tls_ca, shared_memory=False)
        if listening.client_ca is not None:
            access = replace(
                access,
                tls_cert=listening.tls_cert,
                tls_key=listening.tls_key,
            )
        self._access = access
        self._addresses = tuple(schedule.servers) or (address,)
        self._lock = threading.Lock()
        self._servers: ServerSet | None = None  # while a save is made
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            name="recstore-schedule",
            daemon=True,
        )

    def start(self) -> None:
        """Starts the thread.

        The first save is made after the time between two saves.
        """
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. A save in progress is aborted."""
        with self._lock:
            self._end.set()
            if self._servers is not None:
                self._servers.close()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._end.wait(self._schedule.every_s):
            self._save()

    def _save(self) -> None:
        if not self._is_first():
            return
        name = f"{_PREFIX}{datetime.now(timezone.utc):%Y%m%d-%H%M%S-%f}"
        try:
            servers = self._connected()
        except Exception as error:
            _log.warning("the scheduled save %s has failed: %s", name, error)
            return
        try:
            states = servers.describe()
            names = [
                saved.name
                for saved in complete_saves(states)
                if saved.name.startswith(_PREFIX)
            ]
            surplus = max(0, len(names) + 1 - self._schedule.keep)
            servers.save(name, overwrite=False, forget=names[:surplus])
        except Exception as error:
            if not self._end.is_set():
                _log.warning("the scheduled save %s has failed: %s", name, error)
        finally:
            with self._lock:
                self._servers = None
            servers.close()

    def _connected(self) -> ServerSet:
        """Connects to the servers, with the present token and certificates."""
        with self._lock:
            token = None if self._token is None else self._token.value
            access = replace(self._access, token=token)
            self._servers = ServerSet(self._addresses, access)
            if self._end.is_set():
                self._servers.close()
            return self._servers
