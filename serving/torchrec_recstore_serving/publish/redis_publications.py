"""Publications on a Redis server: a stream with an entry for each of them.

Tests: tests/serving/publish/test_publisher.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from torchrec_recstore.checkpoint.files import whole_file
from torchrec_recstore.network import Backoff, is_loopback
from torchrec_recstore.options import RedisStore
from torchrec_recstore_serving.export.signing import Key
from torchrec_recstore_serving.publish.publications import (
    FULL,
    Kind,
    Latest,
    Publication,
    Writers,
    described,
    first_kept,
    is_same,
    latest_after,
    latest_of,
    publication_of,
)

_PART_BYTES = 1 << 24
_DELETED_AT_ONCE = 1024  # the number of keys that one command deletes
_INLINE_BYTES = 1 << 16  # A delta up to this size is in its entry.
# The keys of a publication that is never completed expire after this time.
_UPLOAD_SECONDS = 3600
_TIMEOUT_S = 10.0
# The longest time for which the server may hold a read of the stream: less than
# _TIMEOUT_S.
_BLOCK_S = 5.0
# redis-py also raises WatchError if the connection is lost. The transaction then finds
# out who has published last.
_PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.WatchError,
)
_Result = TypeVar("_Result")


class RedisPublications:
    """Publications on a stream of a Redis or Valkey server.

    The entry of publication 12 on the stream ``clicks`` has the ID ``12-0`` and the
    fields ``publication``, a JSON document, and ``parts``, the number of keys with its
    delta: ``clicks:12:delta:0`` and so on. A small delta is in the field ``delta``. A
    full export is in keys ``clicks:12:program:0`` and ``clicks:12:full:0`` and so on.
    ``clicks:latest`` describes the newest publication, and ``clicks:keys`` is a sorted
    set of all keys with their numbers. One transaction adds the entry, replaces
    ``clicks:latest`` and makes the keys permanent, which until then expire.

    Args:
        url: The URL of the server, with ``stream=NAME`` in its query.
        key: See :class:`torchrec_recstore_serving.publish.publications.DirectoryPublications`.
            Default: None.
        retry_seconds: The time in seconds for which a failed write is repeated.
            Default: 30.

    Raises:
        ValueError: The URL has no stream, or cannot be parsed.
    """

    def __init__(
        self,
        url: str,
        key: Key | None = None,
        retry_seconds: float = 30.0,
    ) -> None:
        self._signing = key
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        self._stream = query.pop("stream", "")
        server_url = urlunsplit(parts._replace(query=urlencode(query)))
        public_url = RedisStore(server_url).public_url
        self._public = f"{public_url}?stream={self._stream}"
        if not self._stream:
            raise ValueError(f"{public_url} names no stream: add ?stream=NAME")
        self._retry_seconds = retry_seconds
        try:
            self._client: Any = redis.Redis.from_url(
                server_url,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
            )
        except ValueError:
            # The message of the error may contain a part of the password.
            raise ValueError(f"{self._public}: the url cannot be parsed") from None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._run = ""
        self._stopped = False
        self._needed_keys: list[str] = []
        """The keys of the publisher's newest full export, and of the deltas after it.
        """
        self._length = 0
        """The number of entries, as the publisher has left them."""

    def claim(self, run: str) -> Latest | None:
        """See :meth:`Publications.claim`."""
        self._run = run
        self._folder = tempfile.TemporaryDirectory(prefix="recstore-publish-")
        memory = self._call(lambda: self._client.info("memory"))
        policy = str(memory.get("maxmemory_policy", ""))
        if int(memory.get("maxmemory", 0)) and policy != "noeviction":
            raise ValueError(
                f"{self} would lose publications: its maxmemory-policy is {policy}; it"
                " must be noeviction"
            )
        text = self._call(lambda: self._client.get(self._key("latest")))
        return None if text is None else latest_of(text, self)

    def path_of(self, number: int, kind: Kind) -> Path:
        """See :meth:`Publications.path_of`."""
        assert self._folder is not None
        return Path(self._folder.name, f"{number}.{kind}")

    def append(
        self,
        publication: Publication,
        known_latest: Latest | None,
    ) -> Latest | None:
        """See :meth:`Publications.append`."""
        number = publication.number
        latest = latest_after(publication, known_latest)
        description = described(latest, self._signing)
        fields: dict[str, Any] = {
            "publication": described(publication, self._signing),
            "parts": 0,
        }
        keys: list[str] = []
        delta = self.path_of(number, "delta")
        if publication.base is not None and delta.stat().st_size <= _INLINE_BYTES:
            fields["delta"] = delta.read_bytes()
        elif publication.base is not None:
            keys += self._upload(number, "delta")
            fields["parts"] = len(keys)
        for kind in FULL if publication.full else ():
            keys += self._upload(number, kind)

        def commit(pipeline: Any) -> bool:
            if keys and pipeline.exists(*keys) != len(keys):
                return False
            if publication.base is not None and not self._is_whole(pipeline):
                return False
            pipeline.multi()
            pipeline.xadd(self._stream, fields, id=f"{number}-0")
            pipeline.set(self._key("latest"), description)
            for key in keys:
                pipeline.persist(key)
                pipeline.zadd(self._key("keys"), {key: number})
            return True

        committed = self._call(
            lambda: self._transaction(commit, known_latest, description)
        )
        for kind in (*FULL, "delta"):
            self.path_of(number, kind).unlink(missing_ok=True)
        if not committed:
            return None
        self._length += 1
        self._needed_keys += keys
        if publication.full:
            self._call(lambda: self._trim(latest))
            self._needed_keys = keys
            self._length = self._call(lambda: int(self._client.xlen(self._stream)))
        return latest

    def confirm(self, latest: Latest) -> bool:
        """See :meth:`Publications.confirm`."""
        description = described(latest, self._signing)

        def commit(pipeline: Any) -> bool:
            if not self._is_whole(pipeline):
                return False
            pipeline.multi()
            pipeline.set(self._key("latest"), description)
            return True

        return self._call(lambda: self._transaction(commit, latest, description))

    def latest(self) -> Latest | None:
        """See :meth:`Publications.latest`."""
        text = self._call_once(lambda: self._client.get(self._key("latest")))
        if text is None:
            return None
        required_key = None if self._run else self._signing
        return latest_of(text, f"{self}, {self._key('latest')}", required_key)

    def publication(self, number: int) -> Publication:
        """See :meth:`Publications.publication`."""
        text = self._entry(number)[b"publication"]
        return publication_of(
            text,
            number,
            f"{self}, {number}-0",
            self._signing,
        )

    def fetch(self, number: int, kind: Kind, folder: Path) -> Path:
        """See :meth:`Publications.fetch`."""
        path = folder / f"{number}.{kind}"
        entry = self._entry(number)
        if kind == "delta" and b"delta" in entry:
            path.write_bytes(entry[b"delta"])
            return path
        part = 0
        with whole_file(path) as beside, beside.open("wb") as file:
            while True:
                # The last part is shorter than the others, and may be empty.
                key = self._key(number, kind, part)
                data = self._call_once(partial(self._client.get, key))
                if data is None:
                    raise FileNotFoundError(f"{self} has no {key}")
                file.write(data)
                part += 1
                if len(data) < _PART_BYTES:
                    return path

    def name_of(self, number: int, kind: Kind) -> str:
        """See :meth:`Publications.name_of`."""
        return self._key(number, kind)

    def wait(self, number: int, seconds: float) -> None:
        """See :meth:`Publications.wait`."""
        milliseconds = max(1, int(1000 * min(seconds, _BLOCK_S)))
        self._call_once(
            lambda: self._client.xread(
                {self._stream: f"{number}-0"},
                count=1,
                block=milliseconds,
            )
        )

    def writers(self) -> Writers:
        """See :meth:`Publications.writers`."""
        connection = self._client.connection_pool.connection_kwargs
        if connection.get("password") or connection.get("ssl_certfile"):
            return Writers(
                f"everyone who may write to {self}, which is asked with credentials"
            )
        trusted = f"everyone who reaches {self}, which is asked without a password"
        if "path" in connection or is_loopback(connection.get("host", "localhost")):
            return Writers(
                trusted,
                f"every user of this machine may write to {self}: set a password",
            )
        return Writers(
            trusted,
            f"everyone who reaches {self} may write to it: set a password",
            anyone=True,
        )

    def stop(self) -> None:
        """See :meth:`Publications.stop`."""
        self._stopped = True
        self._client.connection_pool.disconnect()

    def close(self) -> None:
        """See :meth:`Publications.close`."""
        self._client.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __str__(self) -> str:
        return self._public

    def _key(self, *parts: object) -> str:
        return ":".join([self._stream, *map(str, parts)])

    def _entry(self, number: int) -> dict[bytes, bytes]:
        entries = self._call_once(
            lambda: self._client.xrange(self._stream, f"{number}-0", f"{number}-0")
        )
        if not entries:
            raise FileNotFoundError(f"{self} has no publication {number}")
        fields: dict[bytes, bytes] = entries[0][1]
        return fields

    def _upload(self, number: int, kind: Kind) -> list[str]:
        """Writes a file into keys that expire, and returns the keys."""
        keys: list[str] = []
        with self.path_of(number, kind).open("rb") as file:
            while True:
                data = file.read(_PART_BYTES)
                keys.append(self._key(number, kind, len(keys)))
                self._call(
                    partial(
                        self._client.set,
                        keys[-1],
                        data,
                        ex=_UPLOAD_SECONDS,
                    )
                )
                if len(data) < _PART_BYTES:
                    return keys

    def _is_whole(self, pipeline: Any) -> bool:
        """Returns whether nobody else has deleted what followers need."""
        keys = self._needed_keys
        if keys and pipeline.exists(*keys) != len(keys):
            return False
        return bool(pipeline.xlen(self._stream) == self._length)

    def _transaction(
        self,
        commit: Callable[[Any], bool],
        known_latest: Latest | None,
        description: str,
    ) -> bool:
        """Runs a transaction if the newest publication is the one that is known.

        Returns:
            Whether it was run. If not, the server has lost data.
        """
        with self._client.pipeline() as pipeline:
            pipeline.watch(self._key("latest"))
            text = pipeline.get(self._key("latest"))
            if text is not None and text.decode() == description:
                return True  # It was committed before, and the answer was lost.
            latest = None if text is None else latest_of(text, self)
            if not is_same(latest, known_latest):
                if latest is not None and latest.run != self._run:
                    raise BlockingIOError(
                        f"{self} cannot be published to: another publisher has begun to"
                        " publish to it"
                    )
                return False
            if not commit(pipeline):
                return False
            pipeline.execute()
            return True

    def _trim(self, latest: Latest) -> None:
        """Deletes the entries and keys of publications that no follower needs."""
        names = self._key("keys")
        older_full = latest.fulls[0]
        keys = self._client.zrangebyscore(names, "-inf", first_kept(latest, "full"))
        # The older full export stays, and the delta that leads to it leaves with the
        # entries before it.
        prefixes = [f"{self._key(older_full, kind)}:" for kind in FULL]
        stays = tuple(prefix.encode() for prefix in prefixes)
        old_keys = [key for key in keys if not key.startswith(stays)]
        for begin in range(0, len(old_keys), _DELETED_AT_ONCE):
            piece = old_keys[begin : begin + _DELETED_AT_ONCE]
            self._client.unlink(*piece)
            self._client.zrem(names, *piece)
        self._client.xtrim(
            self._stream,
            minid=f"{older_full}-0",
            approximate=False,
        )

    def _call(self, action: Callable[[], _Result]) -> _Result:
        """Calls ``action``.

        If the server cannot be reached, repeats the call for at most ``retry_seconds``.
        """
        backoff = Backoff(self._retry_seconds)
        while True:
            try:
                return action()
            except _PASSING as error:
                if backoff.left_s <= 0:
                    raise ConnectionError(
                        f"{self} cannot be reached for {self._retry_seconds:g} s:"
                        f" {error}"
                    ) from error
                backoff.pause()
            except redis.RedisError as error:
                raise OSError(f"{self} has failed: {error}") from error

    def _call_once(self, action: Callable[[], _Result]) -> _Result:
        """Calls ``action`` once."""
        if self._stopped:
            raise ConnectionError(f"{self} is closed")
        try:
            return action()
        except _PASSING as error:
            raise ConnectionError(f"{self} cannot be reached: {error}") from error
        except redis.RedisError as error:
            raise OSError(f"{self} has failed: {error}") from error
