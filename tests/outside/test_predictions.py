"""Hostile names in requests of predictions never lead the server of predictions to
other files.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import quote

import grpc
import pytest

from tests.outside.fields import changed_document, text_fields, with_text
from tests.outside.names import ROUNDS, SEED, HostileNames
from tests.outside.sandbox import MARKER, Sandbox
from tests.serving.publish.test_publisher import publish, trained
from torchrec_recstore.inference import DeltaPublisher
from torchrec_recstore_service.server.listening import GrpcServer, ListenOptions
from torchrec_recstore_serving.predict import predictor_pb2 as pb
from torchrec_recstore_serving.predict.http_server import HttpServer
from torchrec_recstore_serving.predict.named_models import ModelSource, NamedModels
from torchrec_recstore_serving.predict.predictor import (
    Predictor,
    PredictorOptions,
    _Service,
)
from torchrec_recstore_serving.predict.predictor_pb2_grpc import (
    add_PredictorServicer_to_server,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SERVICE = pb.DESCRIPTOR.services_by_name["Predictor"]
MODEL = "clicks"
REQUEST = {"arguments": {"ids": [[1, 2], [3, 4]]}}


@dataclass
class Addresses:
    """The addresses of a server of predictions."""

    grpc: str
    http: str


@pytest.fixture
def names(sandbox: Sandbox) -> HostileNames:
    print(f"RECSTORE_TEST_SEED={SEED} RECSTORE_TEST_NAMES={ROUNDS}")
    return HostileNames(random.Random(SEED), sandbox.root, (MODEL, "state", "models"))


@pytest.fixture
def addresses(sandbox: Sandbox) -> Iterator[Addresses]:
    place = sandbox.data / "published"
    with DeltaPublisher(trained(), place, every_s=0) as publisher:
        publish(publisher)
    access = ListenOptions("127.0.0.1:0")
    source = {MODEL: ModelSource(str(place))}
    with ExitStack() as stack:
        predictor = Predictor(PredictorOptions(source, access), MODEL)
        stack.callback(predictor.close)
        predictor.follower.poll()
        models = NamedModels({MODEL: predictor})
        server = GrpcServer(
            access,
            SERVICE.full_name,
            lambda handlers: add_PredictorServicer_to_server(
                _Service(models), handlers
            ),
        )
        server.start()
        stack.callback(server.stop)
        http = HttpServer("127.0.0.1:0", access, models)
        stack.callback(http.close)
        yield Addresses(server.address, http.address)


def _good_request(method: str) -> pb.PredictRequest | pb.StateRequest:
    if method == "State":
        return pb.StateRequest(model=MODEL)
    array = pb.Array(dtype="int64", shape=[2, 2], data=bytes(32))
    return pb.PredictRequest(arguments={"ids": pb.Argument(array=array)}, model=MODEL)


def test_no_field_of_a_call_leads_to_another_file(
    sandbox: Sandbox, addresses: Addresses, names: HostileNames
) -> None:
    with grpc.insecure_channel(addresses.grpc) as channel:
        for method in SERVICE.methods:
            call = channel.unary_unary(f"/{SERVICE.full_name}/{method.name}")
            request = _good_request(method.name)
            assert call(request.SerializeToString(), timeout=60)
            for path in text_fields(method.input_type):
                hostile = [name.encode() for name in names.escapes()[::7]]
                hostile += [names.bytes() for _ in range(ROUNDS // 10)]
                for name in hostile:
                    with sandbox.watched():
                        reply = _reply(call, with_text(request, path, name))
                    assert MARKER not in reply, (method.name, path, name)


def _reply(call: grpc.UnaryUnaryMultiCallable, request: bytes) -> bytes:
    try:
        return call(request, timeout=60)  # type: ignore[no-any-return]
    except grpc.RpcError as error:
        return error.details().encode()  # type: ignore[no-any-return]


def _http(address: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        reply = b""
        while piece := connection.recv(1 << 16):
            reply += piece
    return reply


def _request(line: bytes, body: bytes = b"", header: bytes = b"") -> bytes:
    size = f"Content-Length: {len(body)}".encode()
    lines = [line, b"Host: localhost", b"Connection: close", size]
    return b"\r\n".join([*lines, header, b"", body] if header else [*lines, b"", body])


def test_no_request_by_http_leads_to_another_file(
    sandbox: Sandbox, addresses: Addresses, names: HostileNames
) -> None:
    chosen = random.Random(SEED)
    body = json.dumps(REQUEST).encode()
    path = f"/models/{MODEL}/predict".encode()
    good = _http(addresses.http, _request(b"POST " + path + b" HTTP/1.1", body))
    assert good.startswith(b"HTTP/1.1 200"), good
    for _ in range(ROUNDS):
        name = names.bytes()
        plain = quote(name).encode()
        changed = changed_document(REQUEST, chosen, names.unicode())
        model = chosen.choice((name.replace(b"\r", b""), plain))
        target = chosen.choice(
            (
                b"/%s",
                b"/models/%s/state",
                b"/models/%s/predict",
                b"%s",
                b"/state?model=%s",
            )
        )
        requests = [
            _request(b"GET " + target.replace(b"%s", model) + b" HTTP/1.1"),
            _request(b"POST " + target.replace(b"%s", model) + b" HTTP/1.1", body),
            _request(b"POST " + path + b" HTTP/1.1", json.dumps(changed).encode()),
            _request(b"POST " + path + b" HTTP/1.1", body, b"X-Model: " + name),
        ]
        for request in requests:
            with sandbox.watched():
                reply = _http(addresses.http, request)
            assert MARKER not in reply, request
            assert not reply or reply.startswith(b"HTTP/1.1 "), request
            assert not reply.startswith(b"HTTP/1.1 5"), (request, reply)
