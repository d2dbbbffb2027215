"""A Kafka broker for tests: the mock cluster of librdkafka, which the package
confluent-kafka contains.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Producer, cimpl

_LIBRARY = ctypes.CDLL(cimpl.__file__)
for _name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
    getattr(_LIBRARY, _name).restype = ctypes.c_void_p
_LIBRARY.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p


class KafkaBroker:
    """One broker in this process, which keeps at most 5 MiB of a topic.

    It creates each topic that is asked for.

    Attributes:
        address: The address of the broker, ``host:port``.
        url: The same as a URL, ``kafka://host:port``.
    """

    def __init__(self) -> None:
        settings = ctypes.c_void_p(_LIBRARY.rd_kafka_conf_new())
        _LIBRARY.rd_kafka_conf_set(
            settings, b"log_level", b"0", None, ctypes.c_size_t(0)
        )
        self._client = ctypes.c_void_p(
            _LIBRARY.rd_kafka_new(0, settings, None, ctypes.c_size_t(0))
        )
        self._cluster = ctypes.c_void_p(
            _LIBRARY.rd_kafka_mock_cluster_new(self._client, 1)
        )
        self.address: str = _LIBRARY.rd_kafka_mock_cluster_bootstraps(
            self._cluster
        ).decode()
        self.url = f"kafka://{self.address}"

    def stop(self) -> None:
        """Closes all connections, and refuses new ones. The records stay."""
        assert _LIBRARY.rd_kafka_mock_broker_set_down(self._cluster, 1) == 0

    def start(self) -> None:
        """Accepts connections again, at the same address."""
        assert _LIBRARY.rd_kafka_mock_broker_set_up(self._cluster, 1) == 0

    def produce(self, topic: str, key: bytes, value: bytes) -> None:
        """Appends a record to partition 0, as any program can."""
        producer = Producer({"bootstrap.servers": self.address})
        producer.produce(topic, value, key, partition=0)
        assert producer.flush(10) == 0

    def delete_records(self, topic: str, before: int) -> None:
        """Deletes the records of partition 0 before an offset, as the retention of a
        topic does.
        """
        deleted = _LIBRARY.rd_kafka_mock_partition_delete_records(
            self._cluster, topic.encode(), 0, ctypes.c_int64(before)
        )
        assert deleted == 0

    def close(self) -> None:
        """Ends the broker."""
        _LIBRARY.rd_kafka_mock_cluster_destroy(self._cluster)
        _LIBRARY.rd_kafka_destroy(self._client)


@contextmanager
def kafka_broker() -> Iterator[KafkaBroker]:
    broker = KafkaBroker()
    try:
        yield broker
    finally:
        broker.close()
