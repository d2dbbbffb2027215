"""The server of ``recstore follow``, for predictions over gRPC and HTTP.

Its models may be trained meanwhile.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch

from torchrec_recstore_service.server.listening import (
    GrpcServer,
    ListenOptions,
    stopped_by_signals,
)
from torchrec_recstore_service.wire.protocol import shortened
from torchrec_recstore_serving.predict import predictor_pb2 as pb
from torchrec_recstore_serving.predict.batching import Answer, Batcher
from torchrec_recstore_serving.predict.http_server import HttpServer, failure
from torchrec_recstore_serving.predict.messages import array_of, value_of
from torchrec_recstore_serving.predict.metrics import AGES, PredictorMetrics
from torchrec_recstore_serving.predict.named_models import ModelSource, NamedModels
from torchrec_recstore_serving.predict.predictor_pb2_grpc import (
    PredictorServicer,
    add_PredictorServicer_to_server,
)
from torchrec_recstore_serving.predict.requests import JaggedArgument, Value, request_of
from torchrec_recstore_serving.publish.follower import Follower

_JAGGED = re.compile(
    r"(?P<values>[^,]+),(?P<lengths>[^,]+),(?P<features>\d+)",
    re.DOTALL,
)
_LOOK_S = 0.05  # The time between two looks at whether the server is ready.


@dataclass(frozen=True)
class PredictorOptions:
    """The options of a server of predictions.

    Args:
        sources: Where the models come from, by name; see
            :func:`torchrec_recstore_serving.predict.named_models.sources_of`.
        listening: The address, and who may call the server.
        http: The address for JSON over HTTP, as ``host:port``. None: there is none.
        jagged: See :func:`torchrec_recstore_serving.predict.requests.request_of`.
            ``NAME:ARGUMENT``: of one model.
        max_batch: The largest number of examples in a batch of several requests.
        threads: The number of threads that call a model.
        poll_s: The longest time between two looks at the source, in seconds.
        report_s: The time between two reports, in seconds.
        key: The file of the publisher's key; see
            :class:`torchrec_recstore.inference.Follower`. None: there is none.
        max_age_s: The age of the rows in seconds above which a model is not ready,
            unless it is pinned. None: there is no limit.

    Raises:
        ValueError: A value is invalid.
    """

    sources: Mapping[str, ModelSource]
    listening: ListenOptions
    http: str | None = None
    jagged: Mapping[str, tuple[str, int]] | None = None
    max_batch: int = 1024
    threads: int = 2
    poll_s: float = 0.2
    report_s: float = 10.0
    key: Path | None = None
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        counts = {"--max-batch": self.max_batch, "--threads": self.threads}
        for flag, count in counts.items():
            if count < 1:
                raise ValueError(f"{flag} must be at least 1, got {count}")
        times = {
            "--poll-every": self.poll_s,
            "--report-every": self.report_s,
            "--max-age": self.max_age_s,
        }
        for flag, seconds in times.items():
            if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(
                    f"{flag} must be a positive number of seconds, got {seconds:g}"
                )
        for argument in self.jagged or {}:
            if ":" in argument and argument.partition(":")[0] not in self.sources:
                raise ValueError(
                    f"--jagged {argument} names no model: write"
                    " NAME:VALUES,LENGTHS,FEATURES"
                )
        if self.http is not None:
            self.listening.check_address("--http", self.http)

    def jagged_for(self, name: str) -> dict[str, tuple[str, int]]:
        """Returns ``jagged`` for the model of a name."""
        jagged: dict[str, tuple[str, int]] = {}
        for named_argument, lengths in (self.jagged or {}).items():
            model, _, argument = named_argument.rpartition(":")
            if model in ("", name):
                jagged[argument] = lengths
        return jagged


def jagged_of(text: str) -> tuple[str, tuple[str, int]]:
    """Returns the value of ``--jagged`` as an item of ``PredictorOptions.jagged``.

    The value is ``VALUES,LENGTHS,FEATURES``.

    Raises:
        ValueError: The value has another form.
    """
    match = _JAGGED.fullmatch(text)
    if match is None or int(match["features"]) < 1:
        raise ValueError(
            "--jagged must be VALUES,LENGTHS,FEATURES, for example values,lengths,26;"
            f" got {text!r}"
        )
    return match["values"], (match["lengths"], int(match["features"]))


@dataclass(frozen=True)
class _DescribedModel:
    """A served model, and the arguments of its ``forward`` by name."""

    model: torch.jit.ScriptModule
    arguments: Mapping[str, Any]


class Predictor:
    """A follower, and the queue of requests to its model.

    Args:
        options: The options.
        name: The name of the model.
        observe: See :class:`Batcher`.

    Raises:
        TypeError, ValueError, ImportError: See :class:`Follower`.
        OSError: The key cannot be read.
    """

    def __init__(
        self,
        options: PredictorOptions,
        name: str = "",
        observe: Callable[[float, bool], object] = lambda seconds, failed: None,
    ) -> None:
        self.jagged: Mapping[str, tuple[str, int]] = options.jagged_for(name)
        """See :func:`torchrec_recstore_serving.predict.requests.request_of`."""
        self._max_age_s = options.max_age_s
        source = options.sources[name]
        self.follower = Follower(source.place, key=options.key, pinned=source.pinned)
        self._described: _DescribedModel | None = None
        self._batcher = Batcher(
            self.follower,
            self.jagged,
            max_examples=options.max_batch,
            threads=options.threads,
            observe=observe,
        )

    def submit(
        self,
        arguments: Mapping[str, Value],
        *,
        caller_s: float = 0.0,
    ) -> Future[Answer]:
        """Queues a request.

        The future has the answer, or the error of the model. See
        :meth:`Batcher.submit`.

        Raises:
            ValueError: The arguments do not fit the model.
            ConnectionError: No full export has been loaded yet.
        """
        if self.follower.version is None:
            raise ConnectionError(
                self.follower.state.problem or "no full export has been loaded yet"
            )
        model = self.follower.model
        _check_names(self._arguments_of(model), arguments)
        request = request_of(arguments, self.jagged)
        return self._batcher.submit(request, caller_s=caller_s)

    def _arguments_of(self, model: torch.jit.ScriptModule) -> Mapping[str, Any]:
        """Returns the arguments of the ``forward`` of a model by name."""
        described = self._described
        if described is None or described.model is not model:
            # torch makes this description anew in each call
            forward: Any = model.forward
            arguments = forward.schema.arguments[1:]
            by_name = {argument.name: argument for argument in arguments}
            described = _DescribedModel(model, by_name)
            self._described = described
        return described.arguments

    def not_ready(self) -> str | None:
        """Returns why the model is not ready.

        No full export has been loaded, or the rows are too old.

        None: it is.
        """
        state = self.follower.state
        if state.version is None:
            return state.problem or "no full export has been loaded yet"
        if self._max_age_s is None or state.pinned is not None:
            return None
        if state.seconds_behind <= self._max_age_s:
            return None
        cause = state.problem or f"the follower waits for {state.waits_for}"
        return (
            f"the rows are older than --max-age {self._max_age_s:g}:"
            f" {state.publication_age_s:.1f} s by the clock of the publisher, and the"
            f" last news of them arrived {state.arrival_age_s:.1f} s ago; {cause}"
        )

    def state(self) -> dict[str, Any]:
        """Returns the state of the follower and of the queue, for JSON."""
        state = asdict(self.follower.state)
        for name in AGES:
            if not math.isfinite(state[name]):
                state[name] = None
        return {
            **state,
            "not_ready": self.not_ready(),
            **self._batcher.report(),
        }

    def close(self) -> None:
        """Answers the requests that wait, and stops following."""
        self._batcher.close()
        self.follower.close()


def _check_names(
    model_arguments: Mapping[str, Any],
    arguments: Mapping[str, Value],
) -> None:
    """Compares the names and kinds of arguments with those of the model's ``forward``."""
    required = {
        name
        for name, argument in model_arguments.items()
        if not argument.has_default_value()
    }
    names = arguments.keys()
    if not required <= names or not names <= model_arguments.keys():
        raise ValueError(
            f"the model's arguments are {', '.join(model_arguments)}: got"
            f" {', '.join(sorted(arguments)) or 'none'}"
        )
    for name, value in arguments.items():
        wants_bags = str(model_arguments[name].type).endswith("KeyedJaggedTensor")
        if wants_bags != isinstance(value, JaggedArgument):
            kind = "bags of ids by feature" if wants_bags else "a tensor"
            raise ValueError(f"the argument {name!r} must be {kind}")


def _opened(
    options: PredictorOptions,
    stack: ExitStack,
) -> tuple[dict[str, Predictor], PredictorMetrics | None]:
    """Makes the predictors by name, and their metrics, if there are any.

    ``stack`` closes them.
    """
    predictors: dict[str, Predictor] = {}
    metrics: PredictorMetrics | None = None
    if options.listening.metrics is not None:
        metrics = PredictorMetrics(
            # a copy, because predictors are still added
            lambda: {
                name: predictor.state() for name, predictor in list(predictors.items())
            },
            options.listening.metrics,
            named="" not in options.sources,
        )
        stack.callback(metrics.close)
    for name in options.sources:
        if metrics is None:
            predictors[name] = Predictor(options, name)
        else:
            observe = partial(metrics.observe, name)
            predictors[name] = Predictor(options, name, observe)
        stack.callback(predictors[name].close)
    return predictors, metrics


def serve_predictions(
    options: PredictorOptions,
    ready: Callable[[str, str | None, Mapping[str, str]], object],
    report: Callable[[Mapping[str, Any]], object],
) -> None:
    """Runs a server until SIGTERM or SIGINT.

    This function must be called from the main thread.

    The server takes calls at once, and refuses predictions of a model until its first
    full export is loaded. If the rows become too old, it still answers predictions, and
    its health checks say that it is not ready.

    Args:
        options: The options.
        ready: A function that is called when the server takes calls, with the address
            for gRPC, the address for HTTP, and whose models are loaded, by the name of
            the model.
        report: A function that is called with the state every ``report_s`` seconds and
            at the end.

    Raises:
        OSError: An address cannot be listened on.
        TypeError, ValueError, ImportError: See :class:`Follower`.
    """
    with stopped_by_signals() as stop, ExitStack() as stack:
        predictors, metrics = _opened(options, stack)
        models = NamedModels(predictors)
        service = pb.DESCRIPTOR.services_by_name["Predictor"].full_name
        server = GrpcServer(
            options.listening,
            service,
            lambda server: add_PredictorServicer_to_server(_Service(models), server),  # type: ignore[no-untyped-call]
        )
        http: HttpServer | None = None
        if options.http is not None:
            http = HttpServer(options.http, options.listening, models)
        if metrics is not None:
            _add_gauges(metrics, server, http)
        serving = dict.fromkeys(["", *predictors], False)
        server.set_serving(False)
        server.set_serving(False, *(name for name in predictors if name))
        server.start()
        for predictor in predictors.values():
            predictor.follower.start(options.poll_s)
        trusts = {
            name: predictor.follower.trusts for name, predictor in predictors.items()
        }
        ready(
            server.address,
            None if http is None else http.address,
            trusts,
        )
        reported = time.monotonic()
        while not stop.wait(min(_LOOK_S, options.report_s)):
            for name in serving:
                is_ready = models.not_ready(name) is None
                if serving[name] != is_ready:
                    serving[name] = is_ready
                    server.set_serving(is_ready, *([name] if name else []))
            if time.monotonic() >= reported + options.report_s:
                reported = time.monotonic()
                report(models.state())
        server.stop()
        if http is not None:
            http.close()
        stack.close()
        report(models.state())


def _add_gauges(
    metrics: PredictorMetrics,
    server: GrpcServer,
    http: HttpServer | None,
) -> None:
    """Adds the numbers of the servers to the metrics."""
    metrics.gauges(server.gauges())
    if http is not None:
        text = "The number of connections by HTTP."
        metrics.gauges({"http_connections": (text, lambda: http.connections)})


class _Service(PredictorServicer):
    """See predictor.proto."""

    def __init__(self, models: NamedModels) -> None:
        self._models = models

    def Predict(self, request: Any, context: Any) -> Any:
        """See predictor.proto."""
        self._check_name(request, context)
        try:
            arguments = {
                name: value_of(argument, name)
                for name, argument in request.arguments.items()
            }
            answer = self._models.model(request.model).submit(arguments).result()
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, shortened(str(error)))
        except ConnectionError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, shortened(str(error)))
        except Exception as error:
            context.abort(grpc.StatusCode.UNKNOWN, shortened(failure(error)))
        return pb.PredictReply(
            outputs={name: array_of(output) for name, output in answer.outputs.items()},
            version=answer.version,
            number=answer.number,
            seconds_behind=answer.seconds_behind,
        )

    def State(self, request: Any, context: Any) -> Any:
        """See predictor.proto."""
        self._check_name(request, context)
        return pb.StateReply(json=json.dumps(self._models.state(request.model)))

    def _check_name(self, request: Any, context: Any) -> None:
        unknown = self._models.unknown(request.model)
        if unknown is not None:
            context.abort(grpc.StatusCode.NOT_FOUND, shortened(unknown))
