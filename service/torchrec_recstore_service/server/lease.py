"""The lease of the primary of a pair of servers, in Redis or Valkey.

Tests: tests/service/test_pairs.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_recstore.installing import install

TTL_S = 3.0
"""The time in seconds after which a lease that its holder does not renew ends."""
_TIMEOUT_S = 1.0
# The keys of the lease and of the record, and the server, the milliseconds of the
# lease, the server from which it may take the lease over, and the record before and
# after. A primary writes its record again if Redis has lost both keys.
_TAKE = """
local holder, record = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] and holder ~= ARGV[3] then return 0 end
if (record or '') ~= ARGV[4] and (record or holder or ARGV[6] == '0') then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], ARGV[5])
return 1
"""
_RELEASE = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
)


@dataclass(frozen=True)
class Record:
    """What the servers of a pair agree on.

    Args:
        address: The address of the primary for other calls than those on rows.
        in_sync: The servers that have all rows, with the primary as the first. Only
            these may become the primary.
    """

    address: str
    in_sync: tuple[str, ...]

    def text(self) -> str:
        """Returns the record as it is stored."""
        return json.dumps(
            {"address": self.address, "in_sync": self.in_sync},
            sort_keys=True,
        )


class Lease:
    """The lease and the record of one pair.

    All decisions are steps of Redis, which runs a script as one command.

    The lease is a key that expires (https://redis.io/docs/latest/commands/set/). Its
    holder is the primary. The record does not expire.

    Args:
        url: The URL of Redis.
        pair: The name of the pair.
        server: The name of this start of this server.

    Raises:
        ImportError: The package ``redis`` is not installed.
        ValueError: The URL cannot be used.
    """

    def __init__(self, url: str, pair: str, server: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ImportError(
                "--replicate needs the package redis:"
                f" {install('redis', part='service')}"
            ) from None
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
            )
        except ValueError:
            # The message of the error may contain a part of the password.
            raise ValueError(
                "--lease must be the URL of a Redis server, such as redis://host:6379/0"
            ) from None
        self.error: type[Exception] = redis.RedisError
        """The class of the errors of all calls."""
        self._server = server
        prefix = f"recstore:pair:{{{pair}}}"
        self._keys = [f"{prefix}:lease", f"{prefix}:record"]
        self._take = self._client.register_script(_TAKE)

    def read(self) -> tuple[str, Record | None]:
        """Returns the holder of the lease, "" if it is free, and the record if there is one."""
        holder, text = self._client.mget(self._keys)
        holder = (holder or b"").decode()
        if text is None:
            return holder, None
        document = json.loads(text)
        return holder, Record(document["address"], tuple(document["in_sync"]))

    def take(
        self,
        old_record: Record | None,
        new_record: Record,
        holder: str = "",
        renews: bool = False,
    ) -> bool:
        """Takes or renews the lease, and replaces the record.

        Args:
            old_record: The record as this server knows it.
            new_record: The next record.
            holder: A server whose lease may be taken over. Default: "", none.
            renews: Whether this server has the lease already, so that it also writes
                the record if Redis has lost both. Default: False.

        Returns:
            Whether this server has the lease now. Otherwise another one has it, or the
            record is another one.
        """
        arguments: Sequence[Any] = (
            self._server,
            int(TTL_S * 1000),
            holder,
            "" if old_record is None else old_record.text(),
            new_record.text(),
            int(renews),
        )
        return bool(self._take(self._keys, arguments))

    def release(self) -> None:
        """Ends the lease of this server, if it has it."""
        self._client.eval(
            _RELEASE,
            1,
            self._keys[0],
            self._server,
        )

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
