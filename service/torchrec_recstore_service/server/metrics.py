"""The metrics of a server, for Prometheus.

Tests: tests/service/test_limits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol

from torchrec_recstore.store import TableStats
from torchrec_recstore_service.client.hosted import HostedTables
from torchrec_recstore_service.server.metrics_endpoint import MetricsEndpoint

_LABELS = 10_000
_GAUGES = ("rows", "cold_rows", "bytes", "steps")

Numbers = Mapping[str, tuple[str, Callable[[], float]]]
"""A description and a function of each number, by its name."""


def add_gauges(registry: Any, numbers: Numbers) -> None:
    """Reports numbers in a registry of ``prometheus_client``."""
    import prometheus_client as prometheus

    for name, (description, number) in numbers.items():
        prometheus.Gauge(f"recstore_{name}", description, registry=registry).set_function(number)


class Observer(Protocol):
    """The interface through which a server reports its calls."""

    def call(self, method: str, outcome: str, seconds: float) -> None:
        """Records the end of a call. ``outcome`` is ``ok``, ``cancelled`` or the name of an error class."""

    def ids(self, operation: str, table: str, count: int) -> None:
        """Records the number of ids that were pulled, pushed, updated or deleted."""


class NoObserver:
    """An observer that records nothing."""

    def call(self, method: str, outcome: str, seconds: float) -> None:
        """See :meth:`Observer.call`."""

    def ids(self, operation: str, table: str, count: int) -> None:
        """See :meth:`Observer.ids`."""


class Metrics:
    """An HTTP endpoint for Prometheus with counts and times of calls and all fields of ``TableStats``.

    Args:
        tables: The tables whose statistics are reported.
        host: The host to listen on.
        port: The port to listen on. 0 chooses a free port.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(self, tables: HostedTables, host: str, port: int) -> None:
        import prometheus_client as prometheus  # imported here, because most servers report no metrics
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        prometheus.PlatformCollector(registry=registry)
        self._seconds = prometheus.Histogram(
            "recstore_call_seconds", "The time of a call until its last reply.", ["method"], registry=registry
        )
        self._calls = prometheus.Counter(
            "recstore_calls", "The number of calls by method and outcome.", ["method", "outcome"], registry=registry
        )
        self._ids = prometheus.Counter(
            "recstore_ids", "The number of ids by operation and table.", ["operation", "table"], registry=registry
        )

        self._labels: set[tuple[str, str]] = set()

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
        self._registry = registry
        self._endpoint = MetricsEndpoint(registry, host.strip("[]"), port)
        self.port = self._endpoint.port

    def call(self, method: str, outcome: str, seconds: float) -> None:
        """See :meth:`Observer.call`."""
        self._seconds.labels(method).observe(seconds)
        self._calls.labels(method, outcome).inc()

    def ids(self, operation: str, table: str, count: int) -> None:
        """See :meth:`Observer.ids`."""
        self._labels.add((operation, table))
        if len(self._labels) > _LABELS:  # of tables that were made and deleted: counters may start again
            self._ids.clear()
            self._labels = {(operation, table)}
        self._ids.labels(operation, table).inc(count)

    def gauges(self, numbers: Numbers) -> None:
        """Reports further numbers."""
        add_gauges(self._registry, numbers)

    def close(self) -> None:
        """Stops listening."""
        self._endpoint.close()
