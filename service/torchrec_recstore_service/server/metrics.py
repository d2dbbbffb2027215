"""The metrics of a server, for Prometheus.

Tests: tests/service/tables/test_limits.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from torchrec_recstore.store import TableStats
from torchrec_recstore_service.server.metrics_endpoint import MetricsEndpoint
from torchrec_recstore_service.server.native import CallCounts
from torchrec_recstore_service.tables.hosted import HostedTables

# kSeconds in counts.h
_SECONDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
_SECONDS_NAMES = (*map(str, _SECONDS), "+Inf")
_GAUGES = ("rows", "cold_rows", "bytes", "steps", "device_rows")

Numbers = Mapping[str, tuple[str, Callable[[], float]]]
"""A description and a function of each number, by its name."""


def add_gauges(registry: Any, numbers: Numbers) -> None:
    """Reports numbers in a registry of ``prometheus_client``."""
    import prometheus_client as prometheus

    for name, (description, number) in numbers.items():
        prometheus.Gauge(
            f"recstore_{name}",
            description,
            registry=registry,
        ).set_function(number)


class Metrics:
    """An HTTP endpoint for Prometheus: counts and times of calls, and ``TableStats``.

    Args:
        tables: The tables whose statistics are reported.
        counts: The counts and times of calls.
        host: The host to listen on.
        port: The port to listen on. 0 chooses a free port.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        tables: HostedTables,
        counts: CallCounts,
        host: str,
        port: int,
    ) -> None:
        # imported here, because most servers report no metrics
        import prometheus_client as prometheus

        registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        prometheus.PlatformCollector(registry=registry)
        registry.register(_CallCollector(counts))
        registry.register(_TableCollector(tables))
        self._registry = registry
        self._endpoint = MetricsEndpoint(registry, host.strip("[]"), port)
        self.port = self._endpoint.port

    def gauges(self, numbers: Numbers) -> None:
        """Reports further numbers."""
        add_gauges(self._registry, numbers)

    def close(self) -> None:
        """Stops listening."""
        self._endpoint.close()


class _CallCollector:
    """Reports the counts and times of calls to ``prometheus_client``."""

    def __init__(self, counts: CallCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        calls = CounterMetricFamily(
            "recstore_calls",
            "The number of calls by method and outcome.",
            labels=["method", "outcome"],
        )
        ids = CounterMetricFamily(
            "recstore_ids",
            "The number of ids by operation and table.",
            labels=["operation", "table"],
        )
        times: dict[str, dict[str, float]] = {}
        seconds: dict[str, float] = {}
        for kind, label, label_2, number in self._counts.numbers():
            if kind == "time":
                times.setdefault(label, {})[label_2] = number
            elif kind == "seconds":
                seconds[label] = number
            elif kind == "call":
                calls.add_metric([label, label_2], number)
            else:
                ids.add_metric([label, label_2], number)
        call_seconds = HistogramMetricFamily(
            "recstore_call_seconds",
            "The time of a call until its last reply.",
            labels=["method"],
        )
        for method, classes in times.items():
            numbers = [classes[str(i)] for i in range(len(_SECONDS))]
            numbers.append(classes[""])
            sums = itertools.accumulate(numbers)
            buckets = list(zip(_SECONDS_NAMES, sums, strict=True))
            call_seconds.add_metric([method], buckets, seconds[method])
        yield call_seconds
        yield calls
        yield ids


class _TableCollector:
    """Reports all fields of ``TableStats`` to ``prometheus_client``."""

    def __init__(self, tables: HostedTables) -> None:
        self._tables = tables

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = {name: self._tables.stats(name) for name in self._tables.specs()}
        for field in fields(TableStats):
            is_gauge = field.name in _GAUGES
            new_family = GaugeMetricFamily if is_gauge else CounterMetricFamily
            family = new_family(
                f"recstore_table_{field.name}",
                f"TableStats.{field.name}",
                labels=["table"],
            )
            for name, table_stats in stats.items():
                family.add_metric([name], getattr(table_stats, field.name))
            yield family
