"""The access to ``recstore follow``: tokens and TLS over gRPC and HTTP, and the
metrics.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import nn

from tests.secrets import write_secret
from torchrec_recstore.inference import DeltaPublisher
from torchrec_recstore_serving.predict import predictor_pb2 as pb
from torchrec_recstore_serving.predict.messages import array_of, tensor_of
from torchrec_recstore_serving.predict.predictor_pb2_grpc import PredictorStub

from ...certificates import make_certificates, needs_openssl
from ...redis_server import free_port
from ..publish.test_publisher import change, trained, wait_for
from .test_predictor import TOKEN, FollowCommand, refusal

IDS = torch.randint(-50, 300, (6, 4))
REQUEST = pb.PredictRequest(arguments={"ids": pb.Argument(array=array_of(IDS))})
GOOD = [("authorization", f"Bearer {TOKEN}")]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates, the token, and a published model."""
    path = make_certificates(tmp_path_factory.mktemp("certificates"))
    write_secret(path / "token", TOKEN + "\n")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    made = trained()
    with DeltaPublisher(
        made, folder / "published", every_s=0, dtype=torch.float32
    ) as publisher:
        publisher.step()
    return made


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(
    folder: Path, model: nn.Module, metrics_port: int
) -> Iterator[FollowCommand]:
    """``recstore follow``, which requires TLS, the certificate of a client, and the
    token.
    """
    started = FollowCommand(
        folder / "published",
        *(
            "--tls-cert",
            str(folder / "server.pem"),
            "--tls-key",
            str(folder / "server.key"),
        ),
        *("--client-ca", str(folder / "ca.pem"), "--token-file", str(folder / "token")),
        *("--http", "127.0.0.1:0", "--metrics", f"127.0.0.1:{metrics_port}"),
        *("--poll-every", "0.05", "--report-every", "0.1"),
    )
    wait_for(lambda: started.lines()[-1].get("number") == 1)
    yield started
    started.command.terminate()
    assert started.command.wait(60) == 0, started.command.stderr
    assert started.lines()[-1]["event"] == "stopped"


def channel(
    server: FollowCommand, folder: Path, *, own: bool = True, ca: str = "ca.pem"
) -> grpc.Channel:
    files = [
        (folder / name).read_bytes() if own else None
        for name in ("client.key", "client.pem")
    ]
    credentials = grpc.ssl_channel_credentials((folder / ca).read_bytes(), *files)
    return grpc.secure_channel(server.serving["address"], credentials)


def https(
    server: FollowCommand,
    folder: Path,
    path: str,
    token: str | None,
    *,
    own: bool = True,
) -> tuple[int, Any]:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if own:
        context.load_cert_chain(folder / "client.pem", folder / "client.key")
    document = (
        json.dumps({"arguments": {"ids": IDS.tolist()}}).encode()
        if path == "/predict"
        else None
    )
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(
        f"https://{server.serving['http']}{path}", document, headers
    )
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@needs_openssl
def test_grpc(server: FollowCommand, folder: Path, model: nn.Module) -> None:
    with channel(server, folder) as opened:
        stub = PredictorStub(opened)
        reply = stub.Predict(REQUEST, metadata=GOOD)
        with torch.no_grad():
            torch.testing.assert_close(
                tensor_of(reply.outputs["output"], "output"), model(IDS)
            )
        wrong = (
            [],
            [("authorization", "Bearer wrong")],
            [("authorization", f"Bearer {TOKEN}x")],
            [("token", TOKEN)],
        )
        calls: list[Callable[[Any], object]] = [
            lambda metadata: stub.Predict(REQUEST, metadata=metadata),
            lambda metadata: stub.State(pb.StateRequest(), metadata=metadata),
        ]
        for metadata in wrong:
            for call in calls:
                code, message = refusal(
                    lambda call=call, metadata=metadata: call(metadata)
                )  # type: ignore[misc]
                assert (code, message) == (
                    grpc.StatusCode.UNAUTHENTICATED,
                    "the token is missing or wrong",
                )
        # A supervisor that restarts servers does not need the token.
        health = health_pb2_grpc.HealthStub(opened).Check(
            health_pb2.HealthCheckRequest()
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    unsafe = (
        grpc.insecure_channel(server.serving["address"]),
        channel(server, folder, own=False),
        channel(server, folder, ca="client.pem"),
    )
    for opened in unsafe:
        with opened:
            assert refusal(
                lambda opened=opened: PredictorStub(opened).Predict(
                    REQUEST, metadata=GOOD
                )
            )[0] == (  # type: ignore[misc]
                grpc.StatusCode.UNAVAILABLE
            )


@needs_openssl
def test_http(server: FollowCommand, folder: Path, model: nn.Module) -> None:
    status, document = https(server, folder, "/predict", TOKEN)
    assert status == 200
    with torch.no_grad():
        torch.testing.assert_close(
            torch.tensor(document["outputs"]["output"]), model(IDS)
        )
    for token in (None, "wrong", TOKEN + "x", ""):
        for path in ("/predict", "/state"):
            assert https(server, folder, path, token) == (
                401,
                {"error": "the token is missing or wrong"},
            )
    assert https(server, folder, "/health", None)[0] == 200
    # A port with TLS does not answer plain text, nor clients without a certificate of
    # the authority.
    with pytest.raises((urllib.error.URLError, http.client.HTTPException, OSError)):
        urllib.request.urlopen(
            f"http://{server.serving['http']}/health", timeout=60
        ).read()
    with pytest.raises(
        (urllib.error.URLError, ssl.SSLError, http.client.HTTPException, OSError)
    ):
        https(server, folder, "/state", TOKEN, own=False)
    assert https(server, folder, "/state", TOKEN)[1]["number"] >= 1, (
        "it serves on after calls that were refused"
    )
    assert TOKEN not in server.command.stdout + server.command.stderr


def scraped(port: int) -> dict[str, float]:
    text = (
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
        .read()
        .decode()
    )
    lines = (
        line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
    )
    return {name: float(value) for name, value in lines}


@needs_openssl
def test_metrics_and_json(
    server: FollowCommand, folder: Path, model: nn.Module, metrics_port: int
) -> None:
    before = scraped(metrics_port)
    with channel(server, folder) as opened:
        stub = PredictorStub(opened)
        for _ in range(3):
            stub.Predict(REQUEST, metadata=GOOD)
        refusal(lambda: stub.Predict(REQUEST))
    after = scraped(metrics_port)
    ok = 'recstore_predictions_total{outcome="ok"}'
    assert after[ok] - before.get(ok, 0) == 3, (
        "a call without the token is no prediction"
    )
    documented = (ROOT / "docs" / "publishing.md").read_text()
    documented = documented[documented.index("`--metrics` is an address") :]
    names = re.findall(r"`(recstore_\w+)`", documented.partition("\n\n")[0])
    assert len(names) == 21
    for name in names:
        assert any(found.startswith(name) for found in after), name
    assert after["recstore_connections"] >= 0
    assert after["recstore_calls_refused"] == after["recstore_http_connections"] == 0
    assert after["recstore_follow_number"] == 1
    assert (
        after["recstore_follow_versions_behind"]
        == after["recstore_follow_problem"]
        == 0
    )
    assert after["recstore_follow_fulls_loaded_total"] == 1
    assert after["recstore_follow_deltas_applied_total"] == 0
    assert after["recstore_predict_seconds_count"] == after[ok]
    first, *states = server.lines()
    assert set(first) == {"event", "address", "http", "pid", "trusts"}
    assert first["trusts"].startswith(
        f"everyone who may write the directory {folder / 'published'}, which"
        " belongs to "
    )
    # A follower that reads the state over HTTP, in a line of --json and as metrics
    # finds the same names.
    state = https(server, folder, "/state", TOKEN)[1]
    for name in (
        "seconds_behind",
        "versions_behind",
        "number",
        "fulls_loaded",
        "deltas_applied",
        "batches",
        "problem",
    ):
        assert name in state
        assert name in states[-1]
    assert states[-1]["event"] == "state"
    assert states[-1]["problem"] is None
    # The rows become older until the next publication, which the metrics show.
    aged = scraped(metrics_port)["recstore_follow_seconds_behind"]
    assert aged >= after["recstore_follow_seconds_behind"] > 0
    change(model, 0)
    with DeltaPublisher(
        model, folder / "published", every_s=0, dtype=torch.float32
    ) as publisher:
        publisher.step()
        wait_for(lambda: scraped(metrics_port)["recstore_follow_number"] >= 2)
    newest = publisher._writer._number  # type: ignore[union-attr]
    wait_for(lambda: server.lines()[-1].get("number") == newest)
    assert scraped(metrics_port)["recstore_follow_fulls_loaded_total"] == 2, (
        "a new publisher begins with one"
    )
