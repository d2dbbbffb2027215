"""The stream of clicks: on a Redis server, or in a file. Clicks have consecutive numbers, and the first one has 1.

The number of a click is its position in the stream, so that one integer, the offset, says which clicks have been read.
A click that is appended twice is in the stream once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from common.command import DataError
from online.clicks import CLICK, Clicks
from online.settings import Settings

from torchrec_recstore_service.wire.addresses import Backoff

T = TypeVar("T")
WAIT_S = 0.5
RETRY_S = 60.0


class ClickStream(Protocol):
    """A stream of clicks, with one process that appends to it and any number of readers."""

    def last(self) -> int:
        """Returns the number of the last click, or 0 if there is none."""

    def append(self, first: int, clicks: Clicks) -> None:
        """Appends clicks with the numbers from ``first`` on. Clicks that are in the stream already are left out.

        When the call returns, the clicks are on the disk. A call that fails can be repeated.

        Raises:
            DataError: The stream ends before click ``first - 1``.
        """

    def read(self, after: int, count: int) -> Clicks:
        """Returns the next clicks after click ``after``, at most ``count``. It waits for a moment if there is none.

        Raises:
            DataError: The stream has lost clicks.
        """

    def trim(self, through: int) -> None:
        """Allows the stream to delete the clicks up to ``through``, which no process reads again."""


def stream_of(settings: Settings) -> ClickStream:
    """Returns the stream of a run."""
    if settings.url is None:
        return FileStream(settings.folder / "clicks.log")
    return RedisStream(settings.url, settings.stream)


class FileStream:
    """A stream of clicks in a file: one record of the dtype ``CLICK`` after the other.

    The position of a record is the number of the click. A process that is killed while it appends may leave a part of a
    record, which readers ignore and the next append overwrites. The file is never trimmed.

    Args:
        path: The path of the file, which is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def last(self) -> int:
        """See :meth:`ClickStream.last`."""
        return self._path.stat().st_size // CLICK.itemsize

    def append(self, first: int, clicks: Clicks) -> None:
        """See :meth:`ClickStream.append`."""
        last = self.last()
        if first > last + 1:
            raise DataError(f"{self._path} ends with click {last:,}, so click {first:,} cannot be appended")
        with self._path.open("r+b") as file:
            file.seek(last * CLICK.itemsize)
            file.write(clicks[last + 1 - first :].tobytes())
            file.flush()
            os.fsync(file.fileno())

    def read(self, after: int, count: int) -> Clicks:
        """See :meth:`ClickStream.read`."""
        last = self.last()
        if last < after:
            raise DataError(f"{self._path} ends with click {last:,}, and click {after:,} has been trained on")
        if last == after:
            time.sleep(WAIT_S / 5)
        return np.fromfile(self._path, CLICK, min(count, last - after), offset=after * CLICK.itemsize)

    def trim(self, through: int) -> None:
        """See :meth:`ClickStream.trim`."""


class RedisStream:
    """A stream of clicks on a Redis or Valkey server. Click 17 is the entry ``17-0`` with the fields of a click.

    Redis refuses an entry whose ID is not above the last ID of the stream, so that no click is added twice. The server
    needs ``appendonly yes`` and ``appendfsync always``, else it loses clicks if it is killed. A call is repeated for a
    minute if the server cannot be reached.

    Args:
        url: The URL of the server.
        key: The name of the stream.
    """

    def __init__(self, url: str, key: str) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._key = key
        self._redis = redis
        self._client: Any = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=10)

    def problems(self) -> list[str]:
        """Checks the server of a new stream, and returns the settings with which it may lose clicks.

        Raises:
            DataError: The stream exists, or the server cannot be reached.
        """
        try:
            if self._last():
                raise DataError(f"the stream {self._key} exists: delete it, or choose another folder with --folder")
            found = {**self._client.config_get("appendonly"), **self._client.config_get("appendfsync")}
        except self._redis.RedisError as error:
            raise DataError(f"the Redis server cannot be used: {error}") from error
        wanted = {"appendonly": "yes", "appendfsync": "always"}
        return [
            f"the Redis server has {name} {found.get(name)}: it may lose clicks if it is killed; set {name} {value}"
            for name, value in wanted.items()
            if found.get(name) != value
        ]

    def last(self) -> int:
        """See :meth:`ClickStream.last`."""
        return self._call(self._last)

    def append(self, first: int, clicks: Clicks) -> None:
        """See :meth:`ClickStream.append`."""

        def add() -> None:
            last = self._last()
            if first > last + 1:
                raise DataError(f"{self._key} ends with click {last:,}, so click {first:,} cannot be appended")
            with self._client.pipeline(transaction=True) as pipeline:  # all of them or none
                for number, click in enumerate(clicks[last + 1 - first :].tolist(), last + 1):
                    pipeline.xadd(self._key, dict(zip(CLICK.names or (), click, strict=True)), id=f"{number}-0")
                # An answer that was lost: the clicks arrive while this call repeats them, and Redis refuses the IDs.
                for answer in pipeline.execute(raise_on_error=False):
                    if isinstance(answer, Exception) and "equal or smaller" not in str(answer):
                        raise answer

        self._call(add)

    def read(self, after: int, count: int) -> Clicks:
        """See :meth:`ClickStream.read`."""
        wait_ms = int(1000 * WAIT_S)
        answer = self._call(lambda: self._client.xread({self._key: f"{after}-0"}, count=count, block=wait_ms))
        if not answer:
            last = self.last()
            if last < after:
                raise DataError(f"{self._key} ends with click {last:,}, and click {after:,} has been trained on")
            return np.empty(0, CLICK)
        entries = answer[0][1]
        first, last = (int(entry[0].partition(b"-")[0]) for entry in (entries[0], entries[-1]))
        if (first, last) != (after + 1, after + len(entries)):
            raise DataError(f"{self._key} lacks clicks between {after + 1:,} and {last:,}")
        names = [name.encode() for name in CLICK.names or ()]
        kinds = [float if CLICK[name].kind == "f" else int for name in CLICK.names or ()]
        fields = [tuple(kind(entry[name]) for name, kind in zip(names, kinds, strict=True)) for _, entry in entries]
        return np.array(fields, CLICK)

    def trim(self, through: int) -> None:
        """See :meth:`ClickStream.trim`."""
        self._call(lambda: self._client.xtrim(self._key, minid=f"{through + 1}-0", approximate=True))

    def _last(self) -> int:
        try:
            info = self._client.xinfo_stream(self._key)
        except self._redis.ResponseError as error:
            if "no such key" in str(error):
                return 0
            raise
        return int(info["last-generated-id"].partition(b"-")[0])

    def _call(self, action: Callable[[], T]) -> T:
        """Calls ``action``. If the server cannot be reached, repeats the call for at most a minute."""
        backoff = Backoff(RETRY_S)
        while True:
            try:
                return action()
            except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
                if backoff.left_s <= 0:
                    raise DataError(f"the Redis server cannot be reached for {RETRY_S:g} s: {error}") from error
                backoff.pause()


def read_batch(stream: ClickStream, after: int, count: int) -> Clicks:
    """Waits for exactly ``count`` clicks after click ``after``, so that batches do not depend on when clicks arrive."""
    parts = [stream.read(after, count)]
    while (missing := count - sum(map(len, parts))) > 0:
        parts.append(stream.read(after + count - missing, missing))
    return np.concatenate(parts)
