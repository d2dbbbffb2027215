"""What a server tells of itself, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Protocol

from torchrec_recstore.service.hosted import HostedBackend
from torchrec_recstore.store import TableStats

_GAUGES = ("rows", "cold_rows", "bytes", "steps")


class Observer(Protocol):
    """Is told what a server does."""

    def call(self, method: str, outcome: str, seconds: float) -> None:
        """A call has ended: ``ok``, ``cancelled``, or the name of an error."""

    def ids(self, operation: str, table: str, count: int) -> None:
        """That many ids were pulled, pushed, updated or deleted."""


class NoObserver:
    """Forgets it all."""

    def call(self, method: str, outcome: str, seconds: float) -> None:
        """As :class:`Observer`."""

    def ids(self, operation: str, table: str, count: int) -> None:
        """As :class:`Observer`."""


class Metrics:
    """Counts and times of calls, and every number of :class:`torchrec_recstore.TableStats`, over HTTP.

    Args:
        tables: whose numbers are told.
        host: to listen on.
        port: likewise; 0 for a free one.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, tables: HostedBackend, host: str, port: int) -> None:
        import prometheus_client as prometheus  # here: most servers' metrics are not asked for
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        prometheus.PlatformCollector(registry=registry)
        self._seconds = prometheus.Histogram(
            "recstore_call_seconds", "Time of a call until its last reply.", ["method"], registry=registry
        )
        self._calls = prometheus.Counter(
            "recstore_calls", "Calls by method and outcome.", ["method", "outcome"], registry=registry
        )
        self._ids = prometheus.Counter(
            "recstore_ids", "Ids by operation and table.", ["operation", "table"], registry=registry
        )

        class OfTables:
            def collect(self) -> Iterator[Any]:
                stats = {name: tables.stats(name) for name in tables.specs()}
                for field in fields(TableStats):
                    kind = GaugeMetricFamily if field.name in _GAUGES else CounterMetricFamily
                    family = kind(f"recstore_table_{field.name}", f"TableStats.{field.name}", labels=["table"])
                    for name, counts in stats.items():
                        family.add_metric([name], getattr(counts, field.name))
                    yield family

        registry.register(OfTables())
        self._server, self._thread = prometheus.start_http_server(port, host.strip("[]"), registry=registry)
        self.port: int = self._server.server_port

    def call(self, method: str, outcome: str, seconds: float) -> None:
        """As :class:`Observer`."""
        self._seconds.labels(method).observe(seconds)
        self._calls.labels(method, outcome).inc()

    def ids(self, operation: str, table: str, count: int) -> None:
        """As :class:`Observer`."""
        self._ids.labels(operation, table).inc(count)

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
