"""The server of ``recstore follow``: answers predictions over gRPC and HTTP with a model that is trained meanwhile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from torchrec_recstore_service.server.listening import GrpcServer, ListenOptions, stopped_by_signals
from torchrec_recstore_service.server.metrics import Numbers
from torchrec_recstore_service.wire.protocol import shortened
from torchrec_recstore_serving import predictor_pb2 as pb
from torchrec_recstore_serving.batching import Answer, Batcher
from torchrec_recstore_serving.follower import Follower
from torchrec_recstore_serving.predictor_http import HttpServer, failure
from torchrec_recstore_serving.predictor_metrics import PredictorMetrics
from torchrec_recstore_serving.predictor_pb2_grpc import PredictorServicer, add_PredictorServicer_to_server
from torchrec_recstore_serving.request_values import array_of, value_of
from torchrec_recstore_serving.requests import JaggedArgument, Value, request_of


@dataclass(frozen=True)
class PredictorOptions:
    """The options of a server of predictions.

    Args:
        source: The place that is followed; see :func:`torchrec_recstore.inference.follow`.
        listening: The address, and who may call the server.
        http: The address for JSON over HTTP, as ``host:port``. None: there is none.
        jagged: See :func:`torchrec_recstore_serving.requests.request_of`.
        max_batch: The largest number of examples in a batch of several requests.
        threads: The number of threads that call the model.
        poll_s: The longest time between two looks at the source, in seconds.
        report_s: The time between two reports, in seconds.

    Raises:
        ValueError: A value is invalid.
    """

    source: str
    listening: ListenOptions
    http: str | None = None
    jagged: Mapping[str, tuple[str, int]] | None = None
    max_batch: int = 1024
    threads: int = 2
    poll_s: float = 0.2
    report_s: float = 10.0

    def __post_init__(self) -> None:
        for flag, value in (("--max-batch", self.max_batch), ("--threads", self.threads)):
            if value < 1:
                raise ValueError(f"{flag} must be at least 1, got {value}")
        for flag, seconds in (("--poll-every", self.poll_s), ("--report-every", self.report_s)):
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"{flag} must be a positive number of seconds, got {seconds:g}")
        if self.http is not None:
            self.listening.check_address("--http", self.http)


def jagged_of(text: str) -> tuple[str, tuple[str, int]]:
    """Returns the value of the flag ``--jagged VALUES,LENGTHS,FEATURES`` as an item of ``PredictorOptions.jagged``.

    Raises:
        ValueError: The value has another form.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(parts) or not parts[2].isdecimal() or int(parts[2]) < 1:
        raise ValueError(f"--jagged must be VALUES,LENGTHS,FEATURES, for example values,lengths,26; got {text!r}")
    return parts[0], (parts[1], int(parts[2]))


class Predictor:
    """A follower, the queue of requests to its model, and their metrics.

    Args:
        options: The options.

    Raises:
        TypeError, ValueError, ImportError: See :class:`Follower`.
        OSError: The address for Prometheus cannot be listened on.
    """

    def __init__(self, options: PredictorOptions) -> None:
        self.jagged = options.jagged or {}
        """See :func:`torchrec_recstore_serving.requests.request_of`."""
        self.follower = Follower(options.source)
        self._described: tuple[object, Mapping[str, Any]] = (None, {})
        """The model, and the arguments of its ``forward`` by name."""
        self._metrics: PredictorMetrics | None = None
        try:
            if options.listening.metrics is not None:
                self._metrics = PredictorMetrics(self.state, options.listening.metrics)
            self._batcher = Batcher(
                self.follower,
                self.jagged,
                max_examples=options.max_batch,
                threads=options.threads,
                observe=(lambda seconds, failed: None) if self._metrics is None else self._metrics.observe,
            )
        except BaseException:
            self.follower.close()
            raise

    def submit(self, arguments: Mapping[str, Value], *, caller_s: float = 0.0) -> Future[Answer]:
        """Queues a request. The future has the answer, or the error of the model. See :meth:`Batcher.submit`.

        Raises:
            ValueError: The arguments do not fit the model.
            ConnectionError: No full export has been loaded yet.
        """
        if not self.is_ready():
            raise ConnectionError(self.follower.state.problem or "no full export has been loaded yet")
        model = self.follower.model
        if self._described[0] is not model:  # torch makes the description anew in each call
            forward: Any = model.forward
            self._described = model, {each.name: each for each in forward.schema.arguments[1:]}
        _check_names(self._described[1], arguments)
        return self._batcher.submit(request_of(arguments, self.jagged), caller_s=caller_s)

    def is_ready(self) -> bool:
        """Returns whether a full export has been loaded."""
        return self.follower.version is not None

    def state(self) -> dict[str, Any]:
        """Returns the state of the follower and of the queue, for JSON."""
        state = asdict(self.follower.state)
        if not math.isfinite(state["seconds_behind"]):
            state["seconds_behind"] = None
        return {**state, **self._batcher.report()}

    def report_gauges(self, numbers: Numbers) -> None:
        """Adds numbers to the metrics."""
        if self._metrics is not None:
            self._metrics.gauges(numbers)

    def close(self) -> None:
        """Answers the requests that wait, and stops following."""
        self._batcher.close()
        self.follower.close()
        if self._metrics is not None:
            self._metrics.close()


def _check_names(found: Mapping[str, Any], arguments: Mapping[str, Value]) -> None:
    """Compares the names and kinds of arguments with those of the model's ``forward``."""
    unknown = sorted(arguments.keys() - found.keys())
    missing = sorted(name for name, each in found.items() if name not in arguments and not each.has_default_value())
    if unknown or missing:
        raise ValueError(f"the model's arguments are {', '.join(found)}: got {', '.join(sorted(arguments)) or 'none'}")
    for name, value in arguments.items():
        wants_bags = str(found[name].type).endswith("KeyedJaggedTensor")
        if wants_bags != isinstance(value, JaggedArgument):
            raise ValueError(f"the argument {name!r} must be {'bags of ids by feature' if wants_bags else 'a tensor'}")


def serve_predictions(
    options: PredictorOptions,
    ready: Callable[[str, str | None], object],
    report: Callable[[Mapping[str, Any]], object],
) -> None:
    """Runs a server until SIGTERM or SIGINT. This function must be called from the main thread.

    The server takes calls at once, and refuses predictions until the first full export is loaded.

    Args:
        options: The options.
        ready: A function that is called with the address for gRPC and the address for HTTP when the server takes calls.
        report: A function that is called with the state every ``report_s`` seconds and at the end.

    Raises:
        OSError: An address cannot be listened on.
        TypeError, ValueError, ImportError: See :class:`Follower`.
    """
    with stopped_by_signals() as stop:
        predictor = Predictor(options)
        try:
            service = pb.DESCRIPTOR.services_by_name["Predictor"].full_name
            server = GrpcServer(
                options.listening,
                service,
                lambda server: add_PredictorServicer_to_server(_Service(predictor), server),  # type: ignore[no-untyped-call]
            )
            http = None if options.http is None else HttpServer(options.http, options.listening, predictor)
            predictor.report_gauges(server.gauges())
            if http is not None:
                connections = "The number of connections by HTTP."
                predictor.report_gauges({"http_connections": (connections, lambda: http.connections)})
            server.set_serving(False)
            server.start()
            predictor.follower.start(options.poll_s)
            ready(server.address, None if http is None else http.address)
            while not stop.wait(0.05) and not predictor.is_ready():
                pass
            server.set_serving(True)
            while not stop.wait(options.report_s):
                report(predictor.state())
            server.stop()
            if http is not None:
                http.close()
        finally:
            predictor.close()
        report(predictor.state())


class _Service(PredictorServicer):
    """See predictor.proto."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def Predict(self, request: Any, context: Any) -> Any:
        """See predictor.proto."""
        try:
            arguments = {name: value_of(each, name) for name, each in request.arguments.items()}
            answer = self._predictor.submit(arguments).result()
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, shortened(str(error)))
        except ConnectionError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, shortened(str(error)))
        except Exception as error:
            context.abort(grpc.StatusCode.UNKNOWN, shortened(failure(error)))
        return pb.PredictReply(
            outputs={name: array_of(each) for name, each in answer.outputs.items()},
            version=answer.version,
            number=answer.number,
            seconds_behind=answer.seconds_behind,
        )

    def State(self, request: Any, context: Any) -> Any:
        """See predictor.proto."""
        return pb.StateReply(json=json.dumps(self._predictor.state()))
