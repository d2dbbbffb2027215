"""The stream of clicks: on a Redis server, in a Kafka topic, or in a file.

Clicks have consecutive numbers, and the first one has 1. The number of a click is its
position in the stream, so that one integer, the offset, says which clicks have been
read. A click that is appended twice is in the stream once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from common.command import DataError
from online.clicks import CLICK, Clicks
from online.settings import Settings

from torchrec_recstore.network import Backoff

T = TypeVar("T")
WAIT_S = 0.5
RETRY_S = 60.0
QUERY_S = 10.0


class ClickStream(Protocol):
    """A stream of clicks, with one process that appends to it and any number of
    readers.
    """

    def last(self) -> int:
        """Returns the number of the last click, or 0 if there is none."""

    def append(self, first: int, clicks: Clicks) -> None:
        """Appends clicks with the numbers from ``first`` on.

        Clicks that are in the stream already are left out.

        When the call returns, the clicks are on the disk. A call that fails can be
        repeated.

        Raises:
            DataError: The stream ends before click ``first - 1``.
        """

    def read(self, after: int, count: int) -> Clicks:
        """Returns the next clicks after click ``after``, at most ``count``.

        It waits for a moment if there is none.

        Raises:
            DataError: The stream has lost clicks.
        """

    def trim(self, through: int) -> None:
        """Allows the stream to delete the clicks up to ``through``, which no process
        reads again.
        """


def stream_of(settings: Settings) -> ClickStream:
    """Returns the stream of a run."""
    if settings.url is None:
        return FileStream(settings.folder / "clicks.log")
    return server_stream(settings)


def server_stream(settings: Settings) -> RedisStream | KafkaStream:
    """Returns the stream of a run that has a server."""
    assert settings.url is not None
    return (KafkaStream if settings.is_kafka else RedisStream)(
        settings.url, settings.stream
    )


def _repeated(
    action: Callable[[], T],
    failures: tuple[type[Exception], ...],
    server: str,
    retry_s: float,
) -> T:
    """Calls ``action``.

    If it fails by one of ``failures``, repeats the call for at most ``retry_s``
    seconds.
    """
    backoff = Backoff(retry_s)
    while True:
        try:
            return action()
        except failures as error:
            if backoff.left_s <= 0:
                raise DataError(
                    f"the {server} cannot be reached for {retry_s:g} s: {error}"
                ) from error
            backoff.pause()


class FileStream:
    """A stream of clicks in a file: one record of the dtype ``CLICK`` after the other.

    The position of a record is the number of the click. A process that is killed while
    it appends may leave a part of a record, which readers ignore and the next append
    overwrites. The file is never trimmed.

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
            raise DataError(
                f"{self._path} ends with click {last:,}, so click {first:,} cannot be"
                " appended"
            )
        with self._path.open("r+b") as file:
            file.seek(last * CLICK.itemsize)
            file.write(clicks[last + 1 - first :].tobytes())
            file.flush()
            os.fsync(file.fileno())

    def read(self, after: int, count: int) -> Clicks:
        """See :meth:`ClickStream.read`."""
        last = self.last()
        if last < after:
            raise DataError(
                f"{self._path} ends with click {last:,}, and click {after:,} has been"
                " trained on"
            )
        if last == after:
            time.sleep(WAIT_S / 5)
        return np.fromfile(
            self._path, CLICK, min(count, last - after), offset=after * CLICK.itemsize
        )

    def trim(self, through: int) -> None:
        """See :meth:`ClickStream.trim`."""


class RedisStream:
    """A stream of clicks on a Redis or Valkey server.

    Click 17 is the entry ``17-0`` with the fields of a click.

    Redis refuses an entry whose ID is not above the last ID of the stream, so that no
    click is added twice. The server needs ``appendonly yes`` and ``appendfsync
    always``, else it loses clicks if it is killed. A call is repeated for a minute if
    the server cannot be reached.

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
        self._client: Any = redis.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=10
        )

    def problems(self) -> list[str]:
        """Checks the server of a new stream, and returns the settings with which it may
        lose clicks.

        Raises:
            DataError: The stream exists, or the server cannot be reached.
        """
        try:
            if self._last():
                raise DataError(
                    f"the stream {self._key} exists: delete it, or choose another"
                    " folder with --folder"
                )
            found = {
                **self._client.config_get("appendonly"),
                **self._client.config_get("appendfsync"),
            }
        except self._redis.RedisError as error:
            raise DataError(f"the Redis server cannot be used: {error}") from error
        wanted = {"appendonly": "yes", "appendfsync": "always"}
        return [
            f"the Redis server has {name} {found.get(name)}: it may lose clicks if it"
            f" is killed; set {name} {value}"
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
                raise DataError(
                    f"{self._key} ends with click {last:,}, so click {first:,} cannot"
                    " be appended"
                )
            # all of them or none
            with self._client.pipeline(transaction=True) as pipeline:
                for number, click in enumerate(
                    clicks[last + 1 - first :].tolist(), last + 1
                ):
                    pipeline.xadd(
                        self._key,
                        dict(zip(CLICK.names or (), click, strict=True)),
                        id=f"{number}-0",
                    )
                # An answer that was lost: the clicks arrive while this call repeats
                # them, and Redis refuses the IDs.
                for answer in pipeline.execute(raise_on_error=False):
                    if isinstance(answer, Exception) and "equal or smaller" not in str(
                        answer
                    ):
                        raise answer

        self._call(add)

    def read(self, after: int, count: int) -> Clicks:
        """See :meth:`ClickStream.read`."""
        wait_ms = int(1000 * WAIT_S)
        answer = self._call(
            lambda: self._client.xread(
                {self._key: f"{after}-0"}, count=count, block=wait_ms
            )
        )
        if not answer:
            last = self.last()
            if last < after:
                raise DataError(
                    f"{self._key} ends with click {last:,}, and click {after:,} has"
                    " been trained on"
                )
            return np.empty(0, CLICK)
        entries = answer[0][1]
        first, last = (
            int(entry[0].partition(b"-")[0]) for entry in (entries[0], entries[-1])
        )
        if (first, last) != (after + 1, after + len(entries)):
            raise DataError(
                f"{self._key} lacks clicks between {after + 1:,} and {last:,}"
            )
        names = [name.encode() for name in CLICK.names or ()]
        kinds = [
            float if CLICK[name].kind == "f" else int for name in CLICK.names or ()
        ]
        fields = [
            tuple(kind(entry[name]) for name, kind in zip(names, kinds, strict=True))
            for _, entry in entries
        ]
        return np.array(fields, CLICK)

    def trim(self, through: int) -> None:
        """See :meth:`ClickStream.trim`."""
        self._call(
            lambda: self._client.xtrim(
                self._key, minid=f"{through + 1}-0", approximate=True
            )
        )

    def _last(self) -> int:
        try:
            info = self._client.xinfo_stream(self._key)
        except self._redis.ResponseError as error:
            if "no such key" in str(error):
                return 0
            raise
        return int(info["last-generated-id"].partition(b"-")[0])

    def _call(self, action: Callable[[], T]) -> T:
        failures = (self._redis.ConnectionError, self._redis.TimeoutError)
        return _repeated(action, failures, "Redis server", RETRY_S)


class KafkaStream:
    """A stream of clicks in partition 0 of a Kafka topic.

    Click 17 is the record at offset 16, with the key ``17``.

    There is no consumer group, because the checkpoint of the trainer has the offset.
    Kafka cannot refuse a record by its number. Therefore the writer and the readers
    compare each key with the offset, and stop at a record that is out of place. The
    retention of the topic deletes records. A call is repeated for a minute if no broker
    can be reached.

    Args:
        url: The brokers, ``kafka://host:port``. Several addresses are separated by
            commas.
        topic: The name of the topic, which :meth:`problems` asks the brokers to create.

    Raises:
        DataError: The package ``confluent-kafka`` is not installed.
    """

    def __init__(self, url: str, topic: str) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise DataError(
                "clicks on Kafka need a package: pip install confluent-kafka"
            ) from error
        self._kafka, self._topic = confluent_kafka, topic
        self._settings = {
            "bootstrap.servers": url.removeprefix("kafka://"),
            "log_level": 0,
        }
        self._consumer = confluent_kafka.Consumer(
            self._settings
            # The client demands the ID of a group, which it never joins. A fetch that
            # waits delays other requests.
            | {
                "group.id": topic,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
            }
        )
        self._after: int | None = None  # The consumer continues after this click.
        self._last: int | None = None  # the last click, if this process has appended it

    @cached_property
    def _producer(self) -> Any:
        safe = {
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": int(1000 * RETRY_S),
        }
        return self._kafka.Producer(self._settings | safe)

    def problems(self) -> list[str]:
        """Checks the topic of a new stream, and creates it. There are no warnings.

        Raises:
            DataError: The topic has or had records, or no broker can be reached.
        """

        def ends() -> tuple[int, int]:
            # Brokers create a topic that a producer asks for.
            self._producer.list_topics(self._topic, QUERY_S)
            return self._ends()

        if any(self._call(ends, QUERY_S)):
            raise DataError(
                f"the topic {self._topic} has records: delete it, or choose another"
                " folder with --folder"
            )
        return []

    def last(self) -> int:
        """See :meth:`ClickStream.last`."""
        return self._call(self._ends)[1]

    def append(self, first: int, clicks: Clicks) -> None:
        """See :meth:`ClickStream.append`."""
        last = self.last() if self._last is None else self._last
        if first > last + 1:
            raise DataError(
                f"{self._topic} ends with click {last:,}, so click {first:,} cannot be"
                " appended"
            )
        self._last, problems = None, list[str]()

        def delivered(error: Any, record: Any) -> None:
            if error is not None:
                problems.append(
                    f"{self._topic} has not taken click {int(record.key()):,}:"
                    f" {error.str()}"
                )
            elif record.offset() != int(record.key()) - 1:
                problems.append(
                    self._misplaced(record) + ": another process writes to the topic"
                )

        for number, click in enumerate(clicks[last + 1 - first :], last + 1):
            self._producer.produce(
                self._topic,
                click.tobytes(),
                str(number),
                partition=0,
                on_delivery=delivered,
            )
        self._producer.flush()  # Each record has been delivered or has failed.
        if problems:
            raise DataError(problems[0])
        self._last = max(last, first + len(clicks) - 1)

    def read(self, after: int, count: int) -> Clicks:
        """See :meth:`ClickStream.read`."""
        if after != self._after:
            self._consumer.assign([self._kafka.TopicPartition(self._topic, 0, after)])
        self._after = None  # An error begins again at the offset.
        records = self._consumer.consume(count, WAIT_S)
        errors = [record.error() for record in records if record.error() is not None]
        if errors or not records:
            before, last = self._call(self._ends)
            if before > after:
                raise DataError(
                    f"{self._topic} begins with click {before + 1:,}, and click"
                    f" {after + 1:,} is the next one to train on: the retention of the"
                    " topic has deleted the clicks between them"
                )
            if last < after:
                raise DataError(
                    f"{self._topic} ends with click {last:,}, and click {after:,} has"
                    " been trained on"
                )
        if errors:
            raise DataError(
                f"{self._topic} cannot be read after click {after:,}: {errors[0].str()}"
            )
        for number, record in enumerate(records, after + 1):
            if (record.offset(), record.key(), len(record)) != (
                number - 1,
                b"%d" % number,
                CLICK.itemsize,
            ):
                raise DataError(
                    f"{self._misplaced(record)}, where click {number:,} is expected at"
                    f" offset {number - 1}"
                )
        self._after = after + len(records)
        return np.frombuffer(b"".join(record.value() for record in records), CLICK)

    def trim(self, through: int) -> None:
        """See :meth:`ClickStream.trim`."""

    def _misplaced(self, record: Any) -> str:
        record_at = (
            f"a record of {len(record)} bytes with the key {record.key()!r} at offset"
            f" {record.offset()}"
        )
        return f"{self._topic} has {record_at}"

    def _ends(self) -> tuple[int, int]:
        """Returns the number of the click before the first one, and the number of the
        last one.
        """
        place = self._kafka.TopicPartition(self._topic, 0)
        ends: tuple[int, int] = self._consumer.get_watermark_offsets(
            place, QUERY_S, cached=False
        )
        return ends

    def _call(self, action: Callable[[], T], retry_s: float = RETRY_S) -> T:
        return _repeated(
            action, (self._kafka.KafkaException,), f"Kafka topic {self._topic}", retry_s
        )


def read_batch(stream: ClickStream, after: int, count: int) -> Clicks:
    """Waits for exactly ``count`` clicks after click ``after``, so that batches do not
    depend on when clicks arrive.
    """
    parts = [stream.read(after, count)]
    while (missing := count - sum(map(len, parts))) > 0:
        parts.append(stream.read(after + count - missing, missing))
    return np.concatenate(parts)
