"""The metrics of a server of predictions, for Prometheus.

Tests: tests/serving/predict/test_access.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchrec_recstore_service.server.listening import host_and_port
from torchrec_recstore_service.server.metrics import Numbers, add_gauges
from torchrec_recstore_service.server.metrics_endpoint import MetricsEndpoint

AGES = ("seconds_behind", "publication_age_s", "arrival_age_s")
_GAUGES = {
    "seconds_behind": (
        "The age of the served rows in seconds: the larger of the two that follow."
    ),
    "publication_age_s": (
        "The age of the served rows in seconds by the clock of the publisher."
    ),
    "arrival_age_s": (
        "The time in seconds since the last news of the served rows has arrived."
    ),
    "not_ready": "Whether the server is not ready: 1 or 0.",
    "versions_behind": "The number of publications that are not applied.",
    "problem": "Whether the newest publication cannot be served: 1 or 0.",
    "number": "The number of the publication that is served.",
}
_REASONS = ("problem", "not_ready")
"""The gauges that say whether the state has a reason."""
_COUNTERS = {
    "fulls_loaded": "The number of full exports that were loaded.",
    "deltas_applied": "The number of deltas that were applied.",
    "history_changes": (
        "The number of times that the follower has left a history that the place has"
        " lost."
    ),
    "batches": "The number of calls of the model.",
}


class PredictorMetrics:
    """An HTTP endpoint for Prometheus.

    The metrics of models with names have the label ``model``.

    Args:
        states: A function that returns the states of the models by name. The name of a
            single model may be ``""``.
        address: The address to listen on, ``host:port``. Port 0 chooses a free port.
        named: Whether the models have names.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        states: Callable[[], Mapping[str, Mapping[str, Any]]],
        address: str,
        named: bool,
    ) -> None:
        # imported here, because most servers report no metrics
        import prometheus_client as prometheus
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        registry = prometheus.CollectorRegistry()
        labels = ["model"] if named else []
        prometheus.ProcessCollector(registry=registry)
        prometheus.PlatformCollector(registry=registry)
        self._seconds = prometheus.Histogram(
            "recstore_predict_seconds",
            "The time of a prediction, from its arrival in the queue to its answer.",
            labels,
            buckets=[0.0005 * 2**power for power in range(15)],
            registry=registry,
        )
        self._predictions = prometheus.Counter(
            "recstore_predictions",
            "The number of predictions by outcome.",
            [*labels, "outcome"],
            registry=registry,
        )

        class OfFollowers:
            def collect(self) -> Iterator[Any]:
                numbers_of = {
                    model: _numbers(state) for model, state in states().items()
                }
                for texts, kind in (
                    (_GAUGES, GaugeMetricFamily),
                    (_COUNTERS, CounterMetricFamily),
                ):
                    for name, text in texts.items():
                        metric = kind(f"recstore_follow_{name}", text, labels=labels)
                        for model, numbers in numbers_of.items():
                            metric.add_metric([model] if named else [], numbers[name])
                        yield metric

        registry.register(OfFollowers())
        self._registry = registry
        host, port = host_and_port(address)
        try:
            self._endpoint = MetricsEndpoint(registry, host, port)
        except OSError as error:
            raise OSError(f"--metrics {address}: {error.strerror}") from error

    def observe(self, model: str, seconds: float, failed: bool) -> None:
        """Records the end of a prediction of a model."""
        outcome = "failed" if failed else "ok"
        if model:
            self._seconds.labels(model).observe(seconds)
            self._predictions.labels(model, outcome).inc()
        else:
            self._seconds.observe(seconds)
            self._predictions.labels(outcome).inc()

    def gauges(self, numbers: Numbers) -> None:
        """Reports further numbers."""
        add_gauges(self._registry, numbers)

    def close(self) -> None:
        """Stops listening."""
        self._endpoint.close()


def _numbers(state: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a model's state."""
    numbers: dict[str, float] = {}
    for name in (*_GAUGES, *_COUNTERS):
        value = state[name]
        if name in _REASONS:
            numbers[name] = value is not None
        elif name in AGES and value is None:
            numbers[name] = math.inf
        else:
            numbers[name] = value
    return numbers
