"""The stream of clicks: on a Redis server, in a Kafka topic, or in a file.

Clicks have consecutive numbers, and the first one has 1. The number of a click is its
position in the stream, so that one integer, the offset, says which clicks have been
read. A click that is appended twice is in the stream once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
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
    """A stream of clicks, with one writer and any number of readers."""

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

    def read(self, offset: int, count: int) -> Clicks:
        """Returns the next clicks after click ``offset``, at most ``count``.

        It waits for a moment if there is none.

        Raises:
            DataError: The stream has lost clicks.
        """

    def trim(self, offset: int) -> None:
        """Allows the stream to delete the clicks up to click ``offset``.

        No process reads them again.
        """


def stream_of(settings: Settings) -> ClickStream:
    """Returns the stream of a run."""
    if settings.url is None:
        return FileStream(settings.folder / "clicks.log")
    return server_stream(settings)


def server_stream(settings: Settings) -> RedisStream | KafkaStream:
    """Returns the stream of a run that has a server."""
    assert settings.url is not None
    if settings.is_kafka:
        return KafkaStream(settings.url, settings.stream)
    return RedisStream(settings.url, settings.stream)


def _repeated(
    action: Callable[[], T],
    failures: tuple[type[Exception], ...],
    server: str,
    retry_s: float,
) -> T:
    """Calls ``action`` until it succeeds.

    If it fails by one of ``failures``, the call is repeated, for at most ``retry_s``
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

    def read(self, offset: int, count: int) -> Clicks:
        """See :meth:`ClickStream.read`."""
        last = self.last()
        if last < offset:
            raise DataError(
                f"{self._path} ends with click {last:,}, and click {offset:,} has been"
                " trained on"
            )
        if last == offset:
            time.sleep(WAIT_S / 5)
        count = min(count, last - offset)
        return np.fromfile(
            self._path,
            CLICK,
            count,
            offset=offset * CLICK.itemsize,
        )

    def trim(self, offset: int) -> None:
        """See :meth:`ClickStream.trim`. The file is never trimmed."""


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
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=10,
        )

    def problems(self) -> list[str]:
        """Checks the server of a new stream.

        Returns:
            The settings with which it may lose clicks, a warning for each.

        Raises:
            DataError: The stream exists, or the server cannot be reached.
        """
        try:
            if self._last():
                raise DataError(
                    f"the stream {self._key} exists: delete it, or choose another"
                    " folder with --folder"
                )
            config = {
                **self._client.config_get("appendonly"),
                **self._client.config_get("appendfsync"),
            }
        except self._redis.RedisError as error:
            raise DataError(f"the Redis server cannot be used: {error}") from error
        durable_config = {"appendonly": "yes", "appendfsync": "always"}
        problems = []
        for name, durable_value in durable_config.items():
            value = config.get(name)
            if value != durable_value:
                problems.append(
                    f"the Redis server has {name} {value}: it may lose clicks if it is"
                    f" killed; set {name} {durable_value}"
                )
        return problems

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
            new_clicks = clicks[last + 1 - first :].tolist()
            # all of them or none
            with self._client.pipeline(transaction=True) as pipeline:
                for number, click in enumerate(new_clicks, last + 1):
                    fields = dict(zip(CLICK.names or (), click, strict=True))
                    pipeline.xadd(self._key, fields, id=f"{number}-0")
                # If an answer was lost, the clicks arrive while this call repeats them.
                # Redis then refuses their IDs.
                for answer in pipeline.execute(raise_on_error=False):
                    is_error = isinstance(answer, Exception)
                    if is_error and "equal or smaller" not in str(answer):
                        raise answer

        self._call(add)

    def read(self, offset: int, count: int) -> Clicks:
        """See :meth:`ClickStream.read`."""
        wait_ms = int(1000 * WAIT_S)
        positions = {self._key: f"{offset}-0"}
        answer = self._call(
            lambda: self._client.xread(positions, count=count, block=wait_ms)
        )
        if not answer:
            last = self.last()
            if last < offset:
                raise DataError(
                    f"{self._key} ends with click {last:,}, and click {offset:,} has"
                    " been trained on"
                )
            return np.empty(0, CLICK)
        _, entries = answer[0]
        first = _number_of_entry(entries[0][0])
        last = _number_of_entry(entries[-1][0])
        if (first, last) != (offset + 1, offset + len(entries)):
            raise DataError(
                f"{self._key} lacks clicks between {offset + 1:,} and {last:,}"
            )
        return _clicks_of_entries([fields for _, fields in entries])

    def trim(self, offset: int) -> None:
        """See :meth:`ClickStream.trim`."""
        first_kept = f"{offset + 1}-0"
        self._call(
            lambda: self._client.xtrim(self._key, minid=first_kept, approximate=True)
        )

    def _last(self) -> int:
        try:
            info = self._client.xinfo_stream(self._key)
        except self._redis.ResponseError as error:
            if "no such key" in str(error):
                return 0
            raise
        return _number_of_entry(info["last-generated-id"])

    def _call(self, action: Callable[[], T]) -> T:
        failures = (self._redis.ConnectionError, self._redis.TimeoutError)
        return _repeated(action, failures, "Redis server", RETRY_S)


def _number_of_entry(entry_id: bytes) -> int:
    """Returns the number of the click: 17 of ``17-0``."""
    return int(entry_id.partition(b"-")[0])


def _clicks_of_entries(entries: Sequence[Mapping[bytes, bytes]]) -> np.ndarray:
    """Returns the clicks, (N,) ``CLICK``, of the fields of N entries."""
    types = []
    for name in CLICK.names or ():
        number_type = float if CLICK[name].kind == "f" else int
        types.append((name.encode(), number_type))
    clicks = []
    for fields in entries:
        clicks.append(tuple(to_number(fields[key]) for key, to_number in types))
    return np.array(clicks, CLICK)


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
        self._kafka = confluent_kafka
        self._topic = topic
        self._settings = {
            "bootstrap.servers": url.removeprefix("kafka://"),
            "log_level": 0,
        }
        self._consumer = confluent_kafka.Consumer(
            {
                **self._settings,
                "group.id": topic,  # The client demands it, and never joins the group.
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,  # A fetch that waits delays other requests.
            }
        )
        # the click after which the consumer continues
        self._read_offset: int | None = None
        # the last click, if this process has appended it
        self._last: int | None = None

    @cached_property
    def _producer(self) -> Any:
        return self._kafka.Producer(
            {
                **self._settings,
                "enable.idempotence": True,
                "acks": "all",
                "message.timeout.ms": int(1000 * RETRY_S),
            }
        )

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
        self._last = None
        problems: list[str] = []

        def on_delivery(error: Any, record: Any) -> None:
            if error is not None:
                problems.append(
                    f"{self._topic} has not taken click {int(record.key()):,}:"
                    f" {error.str()}"
                )
            elif record.offset() != int(record.key()) - 1:
                problems.append(
                    f"{self._misplaced(record)}: another process writes to the topic"
                )

        for number, click in enumerate(clicks[last + 1 - first :], last + 1):
            self._producer.produce(
                self._topic,
                click.tobytes(),
                str(number),
                partition=0,
                on_delivery=on_delivery,
            )
        self._producer.flush()  # Each record has been delivered or has failed.
        if problems:
            raise DataError(problems[0])
        self._last = max(last, first + len(clicks) - 1)

    def read(self, offset: int, count: int) -> Clicks:
        """See :meth:`ClickStream.read`."""
        if offset != self._read_offset:
            place = self._kafka.TopicPartition(self._topic, 0, offset)
            self._consumer.assign([place])
        self._read_offset = None  # An error begins again at the offset.
        records = self._consumer.consume(count, WAIT_S)
        errors = [record.error() for record in records if record.error() is not None]
        if errors or not records:
            self._check_ends(offset)
        if errors:
            raise DataError(
                f"{self._topic} cannot be read after click {offset:,}:"
                f" {errors[0].str()}"
            )
        for number, record in enumerate(records, offset + 1):
            if (
                record.offset() != number - 1
                or record.key() != b"%d" % number
                or len(record) != CLICK.itemsize
            ):
                raise DataError(
                    f"{self._misplaced(record)}, where click {number:,} is expected at"
                    f" offset {number - 1}"
                )
        self._read_offset = offset + len(records)
        return np.frombuffer(b"".join(record.value() for record in records), CLICK)

    def trim(self, offset: int) -> None:
        """See :meth:`ClickStream.trim`. The retention of the topic deletes clicks."""

    def _check_ends(self, offset: int) -> None:
        """Raises a DataError if the topic has lost clicks after click ``offset``."""
        deleted, last = self._call(self._ends)
        if deleted > offset:
            raise DataError(
                f"{self._topic} begins with click {deleted + 1:,}, and click"
                f" {offset + 1:,} is the next one to train on: the retention of the"
                " topic has deleted the clicks between them"
            )
        if last < offset:
            raise DataError(
                f"{self._topic} ends with click {last:,}, and click {offset:,} has been"
                " trained on"
            )

    def _misplaced(self, record: Any) -> str:
        return (
            f"{self._topic} has a record of {len(record)} bytes with the key"
            f" {record.key()!r} at offset {record.offset()}"
        )

    def _ends(self) -> tuple[int, int]:
        """Returns the numbers of the last click that was deleted and of the last click.

        The first number is 0 if no click was deleted.
        """
        place = self._kafka.TopicPartition(self._topic, 0)
        ends: tuple[int, int] = self._consumer.get_watermark_offsets(
            place,
            QUERY_S,
            cached=False,
        )
        return ends

    def _call(self, action: Callable[[], T], retry_s: float = RETRY_S) -> T:
        failures = (self._kafka.KafkaException,)
        return _repeated(
            action,
            failures,
            f"Kafka topic {self._topic}",
            retry_s,
        )


def read_batch(
    stream: ClickStream,
    offset: int,
    count: int,
) -> Clicks:
    """Waits for exactly ``count`` clicks after click ``offset``.

    Batches therefore do not depend on when clicks arrive.
    """
    parts = []
    end = offset + count
    while not parts or offset < end:
        clicks = stream.read(offset, end - offset)
        parts.append(clicks)
        offset += len(clicks)
    return np.concatenate(parts)
