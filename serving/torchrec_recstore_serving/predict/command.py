"""The command ``recstore follow``.

Tests: tests/serving/predict/test_predictor.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torchrec_recstore.commands.config_file import ConfigFile
from torchrec_recstore.commands.output import errors_in_one_line
from torchrec_recstore.commands.scripts import missing_in_one_line
from torchrec_recstore_service.commands.access_flags import (
    ClientCa,
    Listen,
    MaxCalls,
    MaxConnections,
    MaxRequestMemory,
    MetricsAddress,
    TlsCert,
    TlsKey,
    TokenFile,
    listen_options,
)

MODEL = "Calls of the model"


def follow(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]SOURCE[@NUMBER]...",
            help=(
                "Directory of a DeltaPublisher, or redis://host:port/db?stream=name."
                " Each of several sources needs a "
                "name. With @12, publication 12 is served, and no later one."
            ),
        ),
    ],
    listen: Listen,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=(
                "Address for JSON over HTTP: POST /predict or /models/NAME/predict, GET"
                " /state."
            ),
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the secret key of the publisher. Nothing else is loaded.",
        ),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    client_ca: ClientCa = None,
    token_file: TokenFile = None,
    metrics: MetricsAddress = None,
    max_calls: MaxCalls = 32,
    max_connections: MaxConnections = 1024,
    max_request_memory: MaxRequestMemory = 4.0,
    max_batch: Annotated[
        int,
        typer.Option(
            help="Maximum number of examples of requests that are answered together.",
            rich_help_panel=MODEL,
        ),
    ] = 1024,
    threads: Annotated[
        int,
        typer.Option(
            help="Number of threads that call a model.", rich_help_panel=MODEL
        ),
    ] = 2,
    jagged: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME:]VALUES,LENGTHS,FEATURES",
            help=(
                "Arguments of the model, or of the model NAME only, that are bags of"
                " ids, as plain tensors, and their "
                "number of features."
            ),
            rich_help_panel=MODEL,
        ),
    ] = None,
    poll_every: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Longest time between two looks at the source."
        ),
    ] = 0.2,
    max_age: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=(
                "Age of the rows of a model without @NUMBER above which health checks"
                " say that it is not ready."
            ),
        ),
    ] = None,
    report_every: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Time between two reports of the state with --json."
        ),
    ] = 10.0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help=(
                "Print lines of JSON: the address, the state from time to time, the"
                " end."
            ),
        ),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Serve predictions of published models over gRPC, with rows that follow the
    training, until SIGTERM or Ctrl-C.

    Loads the newest full export, applies all deltas after it, and continues to apply
    deltas. A name chooses the model of a request (/models/NAME/predict); without a
    name, the first model answers. An address that other machines can reach requires TLS
    and a token. A model that is loaded runs code of its file: without --key, everyone
    who may write to SOURCE is trusted.

    Example: recstore follow published --listen 127.0.0.1:7800 --http 127.0.0.1:7801

    Example: recstore follow new=published old=published@12 --listen 127.0.0.1:7800

    Exit status: 0 after SIGTERM or Ctrl-C, or 2 with one line on stderr if the server
    cannot serve.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as for recstore serve
    with errors_in_one_line(), missing_in_one_line():
        listening = listen_options(
            listen=listen,
            tls_cert=tls_cert,
            tls_key=tls_key,
            client_ca=client_ca,
            token_file=token_file,
            metrics=metrics,
            max_calls=max_calls,
            max_connections=max_connections,
            max_request_memory=max_request_memory,
        )
        # imported here, because each command of recstore loads this module
        from torchrec_recstore_serving.predict.named_models import sources_of
        from torchrec_recstore_serving.predict.predictor import (
            PredictorOptions,
            jagged_of,
            serve_predictions,
        )

        options = PredictorOptions(
            sources=sources_of(sources),
            listening=listening,
            http=http,
            key=key,
            jagged=dict(jagged_of(text) for text in jagged or []),
            max_batch=max_batch,
            threads=threads,
            poll_s=poll_every,
            report_s=report_every,
            max_age_s=max_age,
        )
        output = _JsonOutput() if as_json else _TextOutput()
        begin = time.monotonic()
        serve_predictions(options, output.ready, output.report)
        output.stopped(time.monotonic() - begin)


class _TextOutput:
    """Prints the addresses, and whose models are loaded."""

    def ready(
        self,
        address: str,
        http_address: str | None,
        trusts: Mapping[str, str],
    ) -> None:
        addresses = address
        if http_address:
            addresses += f", http://{http_address}"
        print(f"serving on {addresses}", flush=True)
        for name, trusted in trusts.items():
            prefix = f"{name}: " if name else ""
            print(f"{prefix}loads models of {trusted}", flush=True)

    def report(self, state: Mapping[str, Any]) -> None:
        pass

    def stopped(self, seconds: float) -> None:
        pass


class _JsonOutput:
    """Prints a line of JSON for each event."""

    def ready(
        self,
        address: str,
        http_address: str | None,
        trusts: Mapping[str, str],
    ) -> None:
        event = {
            "event": "serving",
            "address": address,
            "http": http_address,
            "pid": os.getpid(),
            "trusts": trusts.get("", trusts),
        }
        print(json.dumps(event), flush=True)

    def report(self, state: Mapping[str, Any]) -> None:
        print(json.dumps({"event": "state", **state}), flush=True)

    def stopped(self, seconds: float) -> None:
        event = {"event": "stopped", "seconds": round(seconds, 3)}
        print(json.dumps(event), flush=True)
