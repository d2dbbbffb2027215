"""JSON over HTTP: what a request may hold, what a reply holds, limits on clients, and
connections that are kept.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.processes import run_forked_command
from torchrec_recstore.inference import DeltaPublisher
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_serving.predict import http_server
from torchrec_recstore_serving.predict.batching import Answer
from torchrec_recstore_serving.predict.http_server import HttpServer
from torchrec_recstore_serving.predict.named_models import ModelSource, NamedModels
from torchrec_recstore_serving.predict.predictor import Predictor, PredictorOptions
from torchrec_recstore_serving.predict.requests import JaggedArgument, Value

from ..publish.test_publisher import wait_for

NEAR = 20_000_000  # float32 has no integer between this one and the next but one
ACCESS = ListenOptions("127.0.0.1:0")


class Fake:
    """A model's server that answers with the tensors that it is given, or with others."""

    def __init__(self, outputs: Mapping[str, Tensor] | None = None) -> None:
        self.jagged = {"values": ("lengths", 2)}
        self.outputs = outputs
        self.given: Mapping[str, Value] = {}

    def submit(
        self, arguments: Mapping[str, Value], *, caller_s: float = 0.0
    ) -> Future[Answer]:
        self.given = arguments
        outputs = self.outputs
        if outputs is None:
            outputs = {
                name: each
                for name, each in arguments.items()
                if isinstance(each, Tensor)
            }
        answer: Future[Answer] = Future()
        answer.set_result(Answer(outputs, "v", 1, 0.5))
        return answer

    def state(self) -> dict[str, Any]:
        return {}

    def not_ready(self) -> None:
        return None


@contextmanager
def served(predictor: Any, access: ListenOptions = ACCESS) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1:0", access, NamedModels({"": predictor}))
    try:
        yield server
    finally:
        server.close()


def connected(server: HttpServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def post(server: HttpServer, arguments: str) -> tuple[int, Any]:
    """The status and the document of the reply, which must be JSON without NaN."""
    connection = http.client.HTTPConnection(server.address, timeout=60)
    connection.request("POST", "/predict", f'{{"arguments": {arguments}}}')
    reply = connection.getresponse()
    document = json.loads(
        reply.read(),
        parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"),
    )
    connection.close()
    return reply.status, document


class Rows(nn.Module):
    """A table, and a dense argument."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = RecStoreEmbedding(10, 4, name="t", lr=0.1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        out: Tensor = self.rows(ids).sum(1) + dense.sum(1, keepdim=True)
        return out


@pytest.mark.parametrize("index", ["sorted", "hash"])
def test_the_row_of_the_id_and_of_no_other(index: str, tmp_path: Path) -> None:
    model = Rows()
    model(torch.tensor([[NEAR], [NEAR + 1]]), torch.zeros(2, 1)).sum().backward()
    with DeltaPublisher(
        model.eval(),
        tmp_path / "published",
        every_s=0,
        dtype=torch.float32,
        index=index,
    ) as publisher:
        publisher.step()
    predictor = Predictor(
        PredictorOptions({"": ModelSource(str(tmp_path / "published"))}, ACCESS)
    )
    predictor.follower.poll()
    try:
        with served(predictor) as server:
            for given in (NEAR, NEAR + 1, 2**62 + 1):
                with torch.no_grad():
                    wanted = model(torch.tensor([[given]]), torch.zeros(1, 1))
                status, document = post(
                    server, f'{{"ids": [[{given}]], "dense": [[0.0]]}}'
                )
                assert status == 200
                torch.testing.assert_close(
                    torch.tensor(document["outputs"]["output"]), wanted
                )
            for ids, place in (
                ("[[20000001.0]]", "[0][0]: 20000001.0"),
                ("[[1, 2], [20000001.0, 3]]", "[1][0]"),
            ):
                status, document = post(server, f'{{"ids": {ids}, "dense": [[1]]}}')
                assert status == 400
                assert document["error"].startswith(
                    "ids must be integers, and the argument(s) 'ids' hold floats"
                )
                assert f"(ids{place}" in document["error"]
                assert "send integers" in document["error"]
    finally:
        predictor.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            '{"x": 7}',
            (
                "the argument 'x' has 7 at x: it must be a list, with an entry for each"
                " example"
            ),
        ),
        (
            '{"x": []}',
            (
                "the argument 'x' has [] at x: an empty list does not tell the shape"
                " and the dtype"
            ),
        ),
        ('{"x": [[1, 2], []]}', "the argument 'x' has 0 entries at [1], and 2 at [0]"),
        ('{"x": [[], []]}', "the argument 'x' has [] at x[0]: an empty list"),
        ('{"x": [[1], [2, 3]]}', "the argument 'x' has 2 entries at [1], and 1 at [0]"),
        (
            '{"x": [[[1]], [[2, 3]]]}',
            "the argument 'x' has 2 entries at [1][0], and 1 at [0][0]",
        ),
        (
            '{"x": [[1], 2]}',
            "the argument 'x' has 2 at x[1]: there are lists and numbers at one depth",
        ),
        (
            '{"x": [1, [2]]}',
            "the argument 'x' has a list at x[1]: there are lists and numbers",
        ),
        ('{"x": [["a"]]}', "the argument 'x' has 'a' at x[0][0]: it must be a number"),
        (
            '{"x": [[1, null]]}',
            "the argument 'x' has null at x[0][1]: it must be a number",
        ),
        ('{"x": [1, true]}', "the argument 'x' has True at x[1]: it must be a number"),
        (
            '{"x": [[0.5], [NaN]]}',
            "the argument 'x' has nan at x[1][0]: it must be finite",
        ),
        (
            '{"x": [0.5, 1e39]}',
            (
                "the argument 'x' has 1e+39 at x[1]: it must be finite, and float32"
                " must hold it"
            ),
        ),
        (
            '{"x": [9223372036854775808]}',
            "the argument 'x' has 9223372036854775808 at x[0]: int64 does not hold it",
        ),
        (
            '{"values": [1, 2.0], "lengths": [1, 1]}',
            "the argument 'values' has 2.0 at values[1]: ids and lengths are",
        ),
        (
            '{"values": [1], "lengths": [1.9]}',
            "the argument 'lengths' has 1.9 at lengths[0]: ids and lengths are",
        ),
        (
            '{"values": [true], "lengths": [1]}',
            "the argument 'values' has True at values[0]: ids and lengths are",
        ),
        (
            '{"values": 1, "lengths": [1]}',
            "the argument 'values' has 1 at values: it must be a list of integers",
        ),
        (
            '{"x": {"u": [[7], [8.0]]}}',
            "the argument 'x' has 8.0 at x['u'][1][0]: ids and lengths are integers",
        ),
        (
            '{"x": {"u": [[7], 8]}}',
            (
                "the argument 'x' has 8 at x['u'][1]: each feature must have a list of"
                " bags"
            ),
        ),
        (
            '{"x": {"u": 8}}',
            "the argument 'x' has 8 at x['u']: each feature must have a list of bags",
        ),
        (
            '{"x": {"u": [[[7]]]}}',
            "the argument 'x' has a list at x['u'][0][0]: ids and lengths are integers",
        ),
        (
            '{"x": {"keys": "u", "values": [], "lengths": [0]}}',
            "the argument 'x' has 'u' at x.keys: it must be a list",
        ),
        (
            '{"x": {"keys": ["u"], "values": [1.5], "lengths": [1]}}',
            "the argument 'x' has 1.5 at x.values[0]: ids and lengths are integers",
        ),
        (
            '{"x": {"keys": ["u"], "values": [1], "lengths": [1.9]}}',
            "the argument 'x' has 1.9 at x.lengths[0]: ids and lengths are integers",
        ),
        (
            '{"x": {"keys": ["u"], "values": [1], "lengths": [1], "weights": [NaN]}}',
            "the argument 'x' has nan at x.weights[0]: it must be finite",
        ),
        (
            f'{{"x": {"[" * 60}1{"]" * 60}}}',
            "the argument 'x' has lists within lists at [0][0]",
        ),
        (
            f'{{"y": [1], "x": {"[" * 1_000_000}',
            "the argument 'x' has 100 lists within lists at byte",
        ),
        (
            '{"x": ' + '{"a":' * 1_000_000,
            "the argument 'x' has 100 lists within lists at byte",
        ),
        ("[]", 'the body must be {"arguments": {NAME: VALUE, ...}}'),
        ("{", "the body is not JSON"),
    ],
)
def test_what_json_refuses(arguments: str, message: str) -> None:
    with served(Fake()) as server:
        status, document = post(server, arguments)
        assert status == 400
        assert document["error"].startswith(message)


def test_what_json_holds() -> None:
    fake = Fake()
    with served(fake) as server:
        for given, wanted in (
            ("[[9007199254740993, -1]]", torch.tensor([[2**53 + 1, -1]])),
            (
                "[-9223372036854775808, 9223372036854775807]",
                torch.tensor([-(2**63), 2**63 - 1]),
            ),
            ("[[1, 2.5], [3, 4]]", torch.tensor([[1, 2.5], [3, 4]])),
            ("[true, false]", torch.tensor([True, False])),
        ):
            assert post(server, f'{{"x": {given}}}')[0] == 200
            found = fake.given["x"]
            assert isinstance(found, Tensor)
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
        assert post(server, '{"values": [], "lengths": [0, 0]}')[0] == 200
        for name in ("values", "lengths"):
            assert fake.given[name].dtype == torch.int64  # type: ignore[union-attr]
        given = (
            '{"keys": ["u", "v"], "values": [1, 2], "lengths": [1, 1], "weights": [1,'
            " 0.5]}"
        )
        for document, weights in (
            (given, torch.tensor([1, 0.5])),
            ('{"u": [[1]], "v": [[2]]}', None),
        ):
            assert post(server, f'{{"x": {document}}}')[0] == 200
            bags = fake.given["x"]
            assert isinstance(bags, JaggedArgument)
            assert (bags.keys, bags.values.tolist(), bags.lengths.tolist()) == (
                ("u", "v"),
                [1, 2],
                [[1], [1]],
            )
            assert (
                (bags.weights is None)
                if weights is None
                else torch.equal(bags.weights, weights)
            )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reply_never_holds_what_json_does_not_have(bad: float) -> None:
    outputs = {"good": torch.ones(2), "bad": torch.tensor([[0.0, 1.0], [bad, 2.0]])}
    with served(Fake(outputs)) as server:
        status, document = post(server, "{}")
        assert status == 500
        assert document["error"].startswith(
            f"the model returns {bad} in 'bad' at [1][0], which JSON has not"
        )
    with served(Fake({"bad": torch.tensor(bad)})) as server:
        assert post(server, "{}")[0] == 500


class Waiting(Fake):
    """A model's server that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.answer: Future[Answer] = Future()

    def submit(
        self, arguments: Mapping[str, Value], *, caller_s: float = 0.0
    ) -> Future[Answer]:
        self.asked.set()
        return self.answer


START = b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: "
REQUEST = START + b'17\r\n\r\n{"arguments": {}}'
# more than the buffers of a connection hold
LARGE = Answer({"x": torch.arange(2**22)}, "v", 1, 0.5)


def test_a_client_that_does_not_wait_for_the_answer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    predictor = Waiting()
    with served(predictor) as server:
        with connected(server) as client:
            client.sendall(REQUEST)
            assert predictor.asked.wait(60)
            assert server.running == 1
            # close() resets
            client.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        predictor.answer.set_result(LARGE)
        wait_for(lambda: server.running == server.connections == server.held_bytes == 0)
    assert capfd.readouterr() == ("", "")


def test_slow_clients_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that send nothing, a part of the headers or of the body, and those that
    do not read the reply.
    """
    monkeypatch.setattr(http_server, "_SLOWEST_S", 0.3)
    predictor = Waiting()
    predictor.answer.set_result(LARGE)
    with served(predictor) as server, ExitStack() as stack:
        for sent in (b"", b"GET /hea", REQUEST[:20], REQUEST[:-1], REQUEST):
            client = stack.enter_context(connected(server))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(sent)
        assert predictor.asked.wait(60)
        wait_for(lambda: server.connections == 0)
        assert server.held_bytes == 0


def test_a_server_that_stops_answers_what_it_has_begun() -> None:
    predictor = Waiting()
    with connected(
        server := HttpServer("127.0.0.1:0", ACCESS, NamedModels({"": predictor}))
    ) as client:
        client.sendall(REQUEST)
        assert predictor.asked.wait(60)
        closing = threading.Thread(target=server.close)
        closing.start()

        def refused() -> bool:
            with suppress(ConnectionError), connected(server):
                return False
            return True

        wait_for(refused)
        predictor.answer.set_result(Answer({"x": torch.ones(1)}, "v", 1, 0.5))
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        closing.join(60)
        assert not closing.is_alive()


def test_connections_are_bounded() -> None:
    request = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    with (
        served(Fake(), ListenOptions("127.0.0.1:0", max_connections=2)) as server,
        ExitStack() as stack,
    ):
        first, second, third = (
            stack.enter_context(connected(server)) for _ in range(3)
        )
        for each in (first, second):
            each.sendall(request)
            assert each.recv(100).startswith(b"HTTP/1.1 200")
        with suppress(ConnectionError):
            third.sendall(request)
            assert third.recv(100) == b""
        for each in (first, second):
            each.close()
        wait_for(lambda: server.connections == 0)
        with connected(server) as another:
            another.sendall(request)
            assert another.recv(100).startswith(b"HTTP/1.1 200")


def test_requests_are_bounded() -> None:
    predictor = Waiting()
    with (
        served(
            predictor, ListenOptions("127.0.0.1:0", max_request_memory=1 << 28)
        ) as server,
        ExitStack() as stack,
    ):
        for length, status in (
            (b"67108865", b"413"),
            (b"9" * 30, b"413"),
            (b"9" * 5000, b"413"),
            (b"none", b"411"),
        ):
            with connected(server) as client:
                client.sendall(START + length + b"\r\n\r\n")
                assert client.recv(1000).startswith(b"HTTP/1.1 " + status)
                with suppress(ConnectionError):
                    # The server closes the connection, because it does not read the
                    # body.
                    while client.recv(1000):
                        pass
        wait_for(lambda: server.connections == 0)
        for place in range(5):  # 5 bodies of 64 MiB are more than 256 MiB
            client = stack.enter_context(connected(server))
            client.sendall(START + b"67108864\r\n\r\n{")
            wait_for(
                lambda place=place: (
                    server.connections == min(place + 1, 4) and server.held_bytes > 0
                )
            )  # type: ignore[misc]
            if place == 4:
                assert client.recv(1000).startswith(b"HTTP/1.1 503")
            else:
                wait_for(lambda place=place: server.held_bytes == (place + 1) << 26)  # type: ignore[misc]
    assert server.held_bytes == 0


def test_what_never_fits_is_told_so() -> None:
    """413: the same request cannot succeed later, as it may after 503."""
    limit = 1 << 27
    many = Fake({"x": torch.ones(limit // 50)})
    with served(many, ListenOptions("127.0.0.1:0", max_request_memory=limit)) as server:
        lists = ",".join(["[1]"] * (1 << 20))
        status, document = post(server, f'{{"x": [{lists}]}}')
        assert status == 413
        assert "the document takes up to" in document["error"]
        status, document = post(server, '{"x": [[1]]}')
        assert status == 413
        assert "the answer has 2684354 numbers" in document["error"]
        wait_for(lambda: server.held_bytes == 0)


def test_a_kept_connection_has_no_delay() -> None:
    """The delayed ACK of Linux takes 40 ms: a reply in two packets would wait for it."""
    times = []
    with served(Fake()) as server:
        connection = http.client.HTTPConnection(server.address, timeout=60)
        for _ in range(50):
            begin = time.perf_counter()
            connection.request("POST", "/predict", '{"arguments": {"x": [[1, 2, 3]]}}')
            reply = connection.getresponse()
            assert (reply.status, reply.version) == (200, 11)
            assert json.loads(reply.read())["outputs"] == {"x": [[1, 2, 3]]}
            times.append(time.perf_counter() - begin)
        assert server.connections == 1
        connection.close()
    # a busy machine delays some of them
    assert min(times[-20:]) < 0.03


WORST = {
    "lists of one": "[1]",
    "empty lists": "[]",
    "lists of lists": "[[[1]]]",
    "large numbers": "12345678",
    "floats": "1.5",
    "objects": '{"a":1}',
    "texts": '"ab"',
}


def worst_bodies(size: int) -> dict[str, bytes]:
    """Documents of about ``size`` bytes that take the most memory when they are read."""
    bodies = {}
    for name, item in WORST.items():
        items = ",".join([item] * (size // (len(item) + 1)))
        bodies[name] = f'{{"arguments": {{"x": [{items}]}}}}'.encode()
        bodies[f"bags: {name}"] = (
            f'{{"arguments": {{"x": {{"user": [{items}]}}}}}}'.encode()
        )
    for name, character in (
        ("a text", "\U0001f600"),
        ("an escaped text", "\\ud83d\\ude00"),
    ):
        text = character + "a" * size
        bodies[f"{name} of four bytes a character"] = (
            f'{{"arguments": {{"x": "{text}"}}}}'.encode()
        )
        bodies[f"a name: {name} of four bytes a character"] = (
            f'{{"arguments": {{"{text}": 1}}}}'.encode()
        )
    return bodies


def resident_bytes(field: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@pytest.mark.slow
def test_the_memory_of_a_document_is_bounded_before_it_is_read() -> None:
    """A process forks one for each document, so that what is freed does not hide what is
    taken.
    """
    code = """if True:
        import os
        from tests.serving.predict import test_http_server as tests
        for name, body in tests.worst_bodies(1_000_000).items():
            if os.fork() == 0:
                print(name, tests.memory_to_read(body), tests.http_server.memory_of([body]), sep="\\t", flush=True)
                os._exit(0)
            assert os.wait()[1] == 0
    """
    process = run_forked_command(["-c", code])
    assert process.returncode == 0, process.stderr
    taken = {
        name: (int(took), int(bound))
        for name, took, bound in map(tabs, process.stdout.splitlines())
    }
    assert taken.keys() == worst_bodies(1).keys()
    for name, (took, bound) in taken.items():
        assert took <= bound, name


def tabs(line: str) -> list[str]:
    return line.split("\t")


def memory_to_read(body: bytes) -> int:
    """Returns the most bytes that this process takes while it reads a document."""
    http_server._read(b'{"arguments": {"x": [[1.5, 2.5]]}}', {})
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident_bytes()
    pieces = [body[begin : begin + 65536] for begin in range(0, len(body), 65536)]
    with suppress(ValueError):
        http_server._read(b"".join(pieces), {})
    return resident_bytes("VmHWM") - before


def wait_for_the_end(server: HttpServer) -> None:
    """Waits until the work of clients that have left has ended, at most a minute."""
    end = time.monotonic() + 60
    while (server.held_bytes or server.running) and time.monotonic() < end:
        time.sleep(0.1)


@pytest.mark.slow
def test_clients_that_send_the_worst_bodies_and_leave() -> None:
    clients = 200
    bound = 1 << 28
    code = f"""if True:
        import sys
        from tests.serving.predict import test_http_server as tests
        access = tests.ListenOptions("127.0.0.1:0", max_request_memory={bound})
        with tests.served(tests.Fake(), access) as server:
            tests.http_server._read(b'{{"arguments": {{"x": [[1.5, 2.5]]}}}}', {{}})
            tests.Path("/proc/self/clear_refs").write_text("5")
            before = tests.resident_bytes()
            print(server.address, flush=True)
            sys.stdin.readline()
            tests.wait_for_the_end(server)
            print(tests.resident_bytes("VmHWM") - before, server.held_bytes, server.running, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    host, _, port = process.stdout.readline().strip().rpartition(":")
    # Some are as large as the bound allows, some larger, and some so small that many
    # are read at once.
    bodies = [
        body
        for size in (200_000, 3_000_000, 8_000_000)
        for body in worst_bodies(size).values()
    ]
    statuses: list[bytes] = []

    def send(client: int) -> None:
        body = bodies[client * 7 % len(bodies)]
        with (
            suppress(OSError),
            socket.create_connection((host, int(port)), timeout=60) as connection,
        ):
            connection.sendall(START + str(len(body)).encode() + b"\r\n\r\n" + body)
            if client % 3 == 0:  # The others leave at once.
                statuses.append(connection.recv(100).split(b" ")[1])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send, range(clients)))
    wait_for_answer = http.client.HTTPConnection(f"{host}:{port}", timeout=60)
    wait_for_answer.request("GET", "/health")
    assert wait_for_answer.getresponse().status == 200
    process.stdin.write("\n")
    process.stdin.flush()
    grown, held, running = map(int, process.stdout.readline().split())
    assert process.wait() == 0
    print(
        f"{clients} clients: {grown / bound:.2f} of the bound, answers"
        f" {Counter(statuses)}"
    )
    assert grown <= 2 * bound
    assert (held, running) == (0, 0)
    assert b"413" in statuses or b"503" in statuses
    process.stdin.close()
    process.stdout.close()
