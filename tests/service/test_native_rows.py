"""Tests of rows by TCP: results, who may call, limits, clients that are cut or slow,
and the stop of a server.
"""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from tests.certificates import make_certificates, needs_openssl
from tests.recstore_server import Proxy, RecStoreServer
from tests.redis_server import free_port
from tests.secrets import write_secret
from tests.service.tables.test_limits import METADATA, SERVICE, numbers
from tests.service.test_several_tables import TABLES
from torchrec_recstore.optim import Adagrad
from torchrec_recstore.options import LRU, TableOptions
from torchrec_recstore_service import RecStoreClient, ServiceError
from torchrec_recstore_service.client.connection import Side
from torchrec_recstore_service.client.streams import Streams
from torchrec_recstore_service.client.tcp_rows import TcpConnection
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.agreement import label_of, run_label, run_of
from torchrec_recstore_service.wire.protocol import ROWS_VERSION, TOKEN_KEY, token_value
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate

TOKEN = "correct-horse-battery"
IDS = torch.arange(-100, 100)


class RawRows:
    """A connection that sends any bytes."""

    def __init__(
        self,
        address: str,
        token: str = "",
        version: int = ROWS_VERSION,
        hello: bytes | None = None,
    ) -> None:
        metadata = [*METADATA, (TOKEN_KEY, token_value(token))]
        with grpc.insecure_channel(address) as channel:

            def ask(method: str, reply: Any) -> Any:
                return channel.unary_unary(
                    SERVICE + method, response_deserializer=reply.FromString
                )(b"", metadata=metadata)

            offer = ask("Attach", pb.AttachReply)
            self.port = offer.rows_port
            self.name = offer.server
            self.welcome = pb.SegmentReply(last=True, server=self.name)
            state = ask("Describe", pb.DescribeReply)
        self.epoch = run_label(label_of(state), run_of(state))
        self.connect(token, version, hello)

    def connect(
        self,
        token: str = "",
        version: int = ROWS_VERSION,
        hello: bytes | None = None,
        name: str | None = None,
    ) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", self.port))
        name = self.name if name is None else name
        if hello is None:
            numbers = [version, len(token)]
            if version == ROWS_VERSION:
                numbers.append(len(name.encode()))
                token += name
            hello = (
                b"RECSTORE"
                + b"".join(number.to_bytes(4, "little") for number in numbers)
                + token.encode()
            )
        self.socket.sendall(hello)

    def send(self, request: pb.SegmentRequest, *arrays: bytes) -> None:
        message = request.SerializeToString()
        self.socket.sendall(
            b"".join((len(message).to_bytes(4, "little"), message, *arrays))
        )

    def receive(self) -> pb.SegmentReply | None:
        size = self._read(4)
        return (
            pb.SegmentReply.FromString(self._read(int.from_bytes(size, "little")))
            if size
            else None
        )

    def is_closed(self) -> bool:
        with suppress(ConnectionResetError):
            return self.socket.recv(1) == b""
        return True

    def write(
        self, number: int, ids: int, size: int | None = None
    ) -> pb.SegmentRequest:
        header = pb.WriteHeader(
            table="t", epoch=self.epoch, client="raw", request=number, kind=2, ids=ids
        )
        return pb.SegmentRequest(
            write=header, ids=8 * ids, rows=32 * ids if size is None else size
        )

    def pull(self, ids: int) -> pb.SegmentRequest:
        return pb.SegmentRequest(
            pull=pb.PullHeader(table="t", epoch=self.epoch), ids=8 * ids
        )

    def _read(self, size: int) -> bytes:
        content = b""
        with suppress(ConnectionResetError):
            while len(content) < size and (
                more := self.socket.recv(size - len(content))
            ):
                content += more
        return content if len(content) == size else b""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[RecStoreServer, str]]]:
    """Returns a function that starts a server with flags, and returns it and the
    address of its metrics.
    """
    servers: list[RecStoreServer] = []

    def make(*flags: str) -> tuple[RecStoreServer, str]:
        metrics = f"127.0.0.1:{free_port()}"
        servers.append(
            RecStoreServer(
                tmp_path / f"data{len(servers)}", "--metrics", metrics, *flags
            )
        )
        return servers[-1], metrics

    yield make
    for server in servers:
        server.kill()


def _client(address: str, **arguments: Any) -> RecStoreClient:
    client = RecStoreClient(
        [address], shared_memory=False, **{"timeout_s": 20.0, **arguments}
    )
    client.init_data("t", (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
    return client


def _by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are made from now on have no other way."""
    made = Side.__init__

    def make(self: Side, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.transports = []

    monkeypatch.setattr(Side, "__init__", make)


def _grads(step: int, n: int = len(IDS), dim: int = 8) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(step))


def _use(client: RecStoreClient, prefix: str, options: TableOptions) -> list[Tensor]:
    """Makes every kind of call on rows of several tables, and returns all results."""
    results: list[Tensor] = []
    names = {name: prefix + name for name in TABLES}
    for name, (dim, dtype) in TABLES.items():
        client.init_data(
            names[name], (400, dim), dtype, optimizer=Adagrad(lr=0.1), options=options
        )
        client.update(names[name], IDS, _grads(0, dim=dim))
        client.update(names[name], IDS[:33], _grads(1, 33, dim))
        pulled = client.pull(
            names[name], torch.cat([IDS, IDS[:5], torch.tensor([2**62])])
        )
        client.push(names[name], IDS[:3], _grads(2, 3, dim).to(pulled.dtype))
        results += [
            pulled,
            client.pull(names[name], IDS),
            client.pull(names[name], IDS[:0]),
        ]
        results += [
            client.exists(names[name], torch.tensor([1, 2**62, -1])),
            client.exists(names[name], IDS[:0]),
        ]
        results += [
            torch.tensor(client.delete(names[name], torch.tensor([5, 2**62, 7])))
        ]
    for missing in ("init", "zeros"):
        reads = [
            RowRead(names[name], torch.arange(n, 90 + 3 * n), missing)
            for n, name in enumerate(TABLES)
        ]  # type: ignore[arg-type]
        results += client.pull_each(reads)
    updates = [
        RowUpdate(
            names[name], IDS[: 7 * n], _grads(n, 7 * n, dim), [None, 0.5, 0.0][n % 3]
        )
        for n, (name, (dim, _)) in enumerate(TABLES.items())
    ]
    client.update_each(updates)
    return [*results, *(client.pull(name, IDS) for name in names.values())]


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def _counts(metrics: str, method: str) -> dict[str, int]:
    """Returns the number of calls of a method by outcome."""
    text = urllib.request.urlopen(f"http://{metrics}/metrics").read().decode()
    found = re.findall(
        rf'recstore_calls_total\{{method="{method}",outcome="(\w+)"\}} ([\d.e+]+)', text
    )
    return {outcome: int(float(number)) for outcome, number in found}


def test_results_are_those_by_grpc_and_calls_are_counted(
    start: Callable[..., tuple[RecStoreServer, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, metrics = start()
    options = TableOptions(seed=1)
    with (
        monkeypatch.context() as patch,
        RecStoreClient([server.address], shared_memory=False) as client,
    ):
        for method in ("pull", "existing_rows", "write"):
            patch.setattr(Streams, method, None)
        results = _use(client, "", options)
        large = client.pull("float", torch.arange(200_000))
        assert numbers(metrics)["recstore_row_connections"] >= 1
        pulls = _counts(metrics, "Pull")["ok"]
        client.pull("float", IDS)
        client.update("float", IDS, _grads(5))
        client.update("float", IDS, -_grads(5))
        now = numbers(metrics)
        assert _counts(metrics, "Pull")["ok"] == pulls + 1
        assert now["recstore_row_calls_running"] == now["recstore_request_bytes"] == 0
        assert now['recstore_ids_total{operation="pull",table="float"}'] >= 200_000
        with pytest.raises(ValueError, match="no table 'unknown'"):
            client.pull("unknown", IDS)
    server, metrics = start()
    _by_grpc(monkeypatch)
    with RecStoreClient([server.address], shared_memory=False) as client:
        assert _same(results, _use(client, "", options))
        assert torch.equal(large, client.pull("float", torch.arange(200_000)))
        assert numbers(metrics)["recstore_row_connections"] == 0


def test_tables_that_python_answers_give_the_same(
    start: Callable[..., tuple[RecStoreServer, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def use(folder: str) -> list[Tensor]:
        server, _ = start("--cold-store", str(tmp_path / folder), "--max-rows", "205")
        with RecStoreClient([server.address], shared_memory=False) as client:
            found = _use(client, "", TableOptions(seed=1, max_rows=205, eviction=LRU()))
            # older rows go to the cold store
            client.update("float", torch.arange(1000, 1060), _grads(4, 60))
            assert client.stats("float").cold_rows > 0
            found.append(client.pull("float", IDS))
            client.init_data(
                "made",
                (9, 8),
                torch.float32,
                row_func=lambda shape, dtype: torch.full(shape, 0.5),
            )
            client.update("made", IDS[:9], _grads(3, 9))
            return [*found, client.pull("made", IDS[:20]), client.exists("made", IDS)]

    results = use("one")
    _by_grpc(monkeypatch)
    assert _same(results, use("other"))


def test_calls_go_by_grpc_if_the_port_cannot_be_reached(
    own_server: RecStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Side._by_tcp
    closed = free_port()
    for port in (0, closed):

        def elsewhere(
            self: Side, offer: pb.AttachReply, port: int = port
        ) -> TcpConnection | None:
            offer.rows_port = port
            return made(self, offer)

        monkeypatch.setattr(Side, "_by_tcp", elsewhere)
        with _client(own_server.address) as client:
            before = client.pull("t", IDS)
            client.update("t", IDS, _grads(0))
            assert not torch.equal(client.pull("t", IDS), before)


def test_what_is_no_call_is_refused(
    start: Callable[..., tuple[RecStoreServer, str]], tmp_path: Path
) -> None:
    write_secret(tmp_path / "token", TOKEN)
    server, metrics = start("--token-file", str(tmp_path / "token"), "--max-write", "1")
    with _client(server.address, token=TOKEN) as client:
        client.update("t", IDS, _grads(0))
        rows = client.pull("t", IDS)
        raw = RawRows(server.address, TOKEN)
        assert raw.receive() == raw.welcome
        for token in ("", "wrong", TOKEN[:-1], TOKEN + "x"):
            raw.connect(token)
            reply = raw.receive()
            assert reply is not None
            assert reply.details == "the token is missing or wrong"
            assert reply.code == 16
            assert raw.is_closed()
        for version in (2, 99):
            raw.connect(TOKEN, version)
            reply = raw.receive()
            assert reply is not None
            assert (
                f"version {version} of the protocol for rows, the server version 3"
                in reply.details
            )
            assert raw.is_closed()
        # A wrong server may have another token. The name is compared first.
        for token in (TOKEN, "wrong"):
            for name in ("0" * 32, raw.name[:-1], raw.name + "x", "\0", "é"):
                raw.connect(token, name=name)
                reply = raw.receive()
                assert reply is not None
                assert (
                    f"for the server {name} and has reached another server"
                    in reply.details
                )
                assert raw.is_closed()
        raw.connect(TOKEN, name="")
        assert raw.receive() == raw.welcome
        token_too_long = b"RECSTORE\3\0\0\0\xff\xff\xff\xff"
        name_too_long = b"RECSTORE\3\0\0\0\0\0\0\0\x41\0\0\0"
        for hello in (
            b"GET / HTTP/1.1\r\nHost: a\r\n",
            token_too_long,
            name_too_long,
            bytes(100),
        ):
            raw.connect(hello=hello)
            assert raw.is_closed()

        def refused(message: bytes) -> str:
            raw.connect(TOKEN)
            assert raw.receive() == raw.welcome
            raw.socket.sendall(message)
            reply = raw.receive()
            assert reply is not None
            assert reply.code
            return reply.details

        def framed(request: pb.SegmentRequest) -> bytes:
            return (
                request.ByteSize().to_bytes(4, "little") + request.SerializeToString()
            )

        assert "at most 1048576 bytes" in refused(b"\xff\xff\xff\xff")
        assert "cannot be read" in refused(b"\x02\0\0\0\xff\xff")
        assert "no call that this server knows" in refused(bytes(4))
        for size in (2**27, 2**63, 2**64 - 1):
            assert "(--max-write)" in refused(framed(raw.write(0, 1, size)))
            pull = pb.SegmentRequest(pull=raw.pull(1).pull, ids=size, rows=2**64 - size)
            assert "at most 4194304 ids" in refused(framed(pull))
        assert "split it" in refused(framed(raw.write(0, 9000)) + bytes(9000 * 40))
        with pytest.raises(
            ValueError,
            match=r"at most 8192 ids and 1048576 bytes \(--max-write\): split it",
        ):
            client.update("t", torch.arange(9000), torch.ones(9000, 8))
        # The connection goes on after an error in the request.
        raw.connect(TOKEN)
        raw.receive()
        wrong = raw.write(0, 2)
        wrong.write.ids = 3
        raw.send(wrong, bytes(80))
        assert (reply := raw.receive()) is not None
        assert reply.code
        raw.send(raw.pull(4), bytes(32))
        assert (reply := raw.receive()) is not None
        assert reply.rows == 128
        assert torch.equal(client.pull("t", IDS), rows)
        assert numbers(metrics)["recstore_request_bytes"] == 0


@pytest.mark.slow
def test_a_hello_that_never_comes(own_server: RecStoreServer) -> None:
    _client(own_server.address).close()
    raw = RawRows(own_server.address, hello=b"RECS")
    begin = time.monotonic()
    assert raw.is_closed()
    assert time.monotonic() - begin > 8


def test_a_replaced_token(
    start: Callable[..., tuple[RecStoreServer, str]], tmp_path: Path
) -> None:
    write_secret(tmp_path / "token", TOKEN)
    server, _ = start("--token-file", str(tmp_path / "token"))
    with _client(server.address, token=TOKEN) as client:
        client.pull("t", IDS)
        raw = RawRows(server.address, TOKEN)
        raw.receive()
        write_secret(tmp_path / "token", "another-" + TOKEN)
        code = 0
        while not code:
            raw.send(raw.pull(0))
            reply = raw.receive()
            assert reply is not None
            code = reply.code
        assert code == 16
        assert raw.is_closed()
        with pytest.raises(ServiceError, match="token is missing or wrong"):
            client.pull("t", IDS)


@pytest.mark.slow
@needs_openssl
@pytest.mark.usefixtures("no_streams")
def test_tls_and_replaced_certificates(
    start: Callable[..., tuple[RecStoreServer, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("first", "second", "now"):
        (tmp_path / name).mkdir()
    first, second, now = (
        make_certificates(tmp_path / "first"),
        make_certificates(tmp_path / "second"),
        tmp_path / "now",
    )
    shutil.copytree(first, now, dirs_exist_ok=True)
    flags = [
        "--tls-cert",
        now / "server.pem",
        "--tls-key",
        now / "server.key",
        "--client-ca",
        now / "ca.pem",
    ]
    server, metrics = start(*map(str, flags))
    offers: list[pb.AttachReply] = []
    by_tcp = Side._by_tcp

    def noted(self: Side, offer: pb.AttachReply) -> TcpConnection | None:
        offers.append(offer)
        return by_tcp(self, offer)

    monkeypatch.setattr(Side, "_by_tcp", noted)

    def client(folder: Path) -> RecStoreClient:
        mine = {"tls_cert": folder / "client.pem", "tls_key": folder / "client.key"}
        return _client(server.address, tls_ca=folder / "ca.pem", timeout_s=5.0, **mine)

    with client(first) as one:
        one.update("t", IDS, _grads(0))
        ids = torch.arange(300_000)
        one.push("t", ids, torch.arange(2_400_000.0).view(-1, 8))
        assert torch.equal(one.pull("t", ids), torch.arange(2_400_000.0).view(-1, 8))
        assert numbers(metrics)["recstore_row_connections"] >= 1
        port = offers[0].rows_port
        name = offers[0].server
        raw = RawRows.__new__(RawRows)
        raw.port = port
        raw.connect(name="")  # without encryption
        assert raw.is_closed()
        for files in (
            (),
            (first / "client.pem", first / "client.key"),
            (second / "client.pem", second / "client.key"),
        ):
            context = ssl.create_default_context(cafile=first / "ca.pem")
            if files:
                context.load_cert_chain(*files)
            if files and files[0].parent == first:
                TcpConnection("127.0.0.1", port, None, context, name).close()
                continue
            with pytest.raises((ssl.SSLError, ConnectionError, OSError), match=r"\w"):
                TcpConnection("127.0.0.1", port, None, context, name)
        for file in ("server.pem", "server.key", "ca.pem"):
            shutil.copy(second / file, now / file)
        end = time.monotonic() + 20
        while True:
            try:
                with client(second) as other:
                    rows = other.pull("t", IDS)
                break
            except (ServiceError, AssertionError):
                assert time.monotonic() < end
        # a connection that is there goes on
        assert torch.equal(one.pull("t", IDS), rows)


def test_memory_of_requests(start: Callable[..., tuple[RecStoreServer, str]]) -> None:
    server, metrics = start("--max-request-memory", "0.065")
    with _client(server.address, timeout_s=60.0) as client:
        late = [RawRows(server.address) for _ in range(2)]
        for raw in late:  # each announces 30 MB and sends a part
            raw.receive()
            raw.send(raw.write(0, 750_000), bytes(1000))
        while numbers(metrics)["recstore_request_bytes"] < 60_000_000:
            pass
        values = torch.arange(4_000_000.0).view(-1, 8)
        client.push("t", torch.arange(500_000), values)
        assert 1 <= numbers(metrics)["recstore_row_calls_ended"] <= 2
        assert torch.equal(client.pull("t", torch.arange(500_000)), values)
        for raw in late:
            raw.socket.close()
        while numbers(metrics)["recstore_request_bytes"]:
            pass


def test_slow_readers_take_no_threads(
    start: Callable[..., tuple[RecStoreServer, str]],
) -> None:
    server, metrics = start("--max-calls", "2")
    with _client(server.address) as client, ExitStack() as stack:
        client.update("t", IDS, _grads(0))
        for _ in range(8):
            raw = RawRows(server.address)
            stack.callback(raw.socket.close)
            raw.receive()
            raw.send(raw.pull(1_000_000), bytes(8_000_000))
        while numbers(metrics)["recstore_row_calls_running"] < 8:
            pass
        for step in range(20):
            client.update("t", IDS, _grads(step))
            client.pull("t", IDS)
        assert numbers(metrics)["recstore_row_calls_running"] == 8
    while numbers(metrics)["recstore_row_calls_running"]:
        pass
    assert _counts(metrics, "Pull")["cancelled"] == 8


def test_connections_are_bounded(
    start: Callable[..., tuple[RecStoreServer, str]],
) -> None:
    server, metrics = start("--max-connections", "8")
    with _client(server.address) as client, ExitStack() as stack:
        rows = client.pull("t", IDS)
        first = RawRows(server.address)
        stack.callback(first.socket.close)
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", first.port)))
            assert numbers(metrics)["recstore_row_connections"] <= 16
        while numbers(metrics)["recstore_row_connections"] > 8:
            pass
        assert torch.equal(client.pull("t", IDS), rows)


@pytest.mark.parametrize("retry", ["tcp", "grpc"])
def test_a_write_is_carried_out_once_wherever_the_connection_is_cut(
    own_server: RecStoreServer, monkeypatch: pytest.MonkeyPatch, retry: str
) -> None:
    with _client(own_server.address) as client:
        client.push("t", IDS, torch.zeros(len(IDS), 8))
        client.init_data("sum", (400, 8), torch.float32)
        port = RawRows(own_server.address).port
    proxy = Proxy(f"127.0.0.1:{port}")
    cuts: list[int] = []
    by_tcp = Side._by_tcp

    def through_proxy(self: Side, offer: pb.AttachReply) -> TcpConnection | None:
        offer.rows_port = int(proxy.address.rpartition(":")[2])
        connection = by_tcp(self, offer)
        if connection is not None:
            send = connection._socket

            class Cut:
                """Ends the connection after a number of bytes, as the network may."""

                def sendmsg(self, contents: Sequence[Any]) -> int:
                    if not cuts:
                        return int(send.sendmsg(contents))
                    send.sendall(b"".join(map(bytes, contents))[: cuts.pop()])
                    proxy_cut()
                    raise ConnectionResetError("cut")

                def __getattr__(self, name: str) -> Any:
                    return getattr(send, name)

            connection._socket = Cut()
        return connection

    def proxy_cut() -> None:
        if retry == "grpc":
            monkeypatch.setattr(Side, "_by_tcp", lambda self, offer: None)
        proxy.cut()

    size = 4 + len(IDS) * 8 + len(IDS) * 32
    expected = RecStoreClient(private=True)
    expected.init_data("t", (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
    expected.push("t", IDS, torch.zeros(len(IDS), 8))
    for step, cut in enumerate(
        (0, 2, 30, 500, len(IDS) * 8 + 60, size, size + 40, None)
    ):
        monkeypatch.setattr(Side, "_by_tcp", through_proxy)
        with RecStoreClient(
            [own_server.address], shared_memory=False, timeout_s=20.0
        ) as client:
            client.init_data("t", (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
            client.pull("t", IDS)
            if cut is None:  # the write arrives, and its reply does not
                proxy.cut_after = 1
            else:
                cuts.append(cut)
            client.update("t", IDS, _grads(step))
            assert not cuts
            assert proxy.cut_after is None
            expected.update("t", IDS, _grads(step))
            assert torch.equal(client.pull("t", IDS), expected.pull("t", IDS)), cut
            assert client.stats("t").steps == step + 1
    proxy.close()


@pytest.mark.usefixtures("no_streams")
def test_a_read_that_does_not_fit_leaves_no_replies(own_server: RecStoreServer) -> None:
    """A table is made anew with longer rows.

    The next call must not take the rest of a reply for its own.
    """
    with _client(own_server.address) as client:
        client.update("t", IDS, _grads(0))
        rows = client.pull("t", IDS)
        client.init_data("w", (9, 8))
        client.pull("w", IDS[:3])
        with grpc.insecure_channel(own_server.address) as channel:
            drop = pb.DropRequest(
                table="w", epoch=RawRows(own_server.address).epoch
            ).SerializeToString()
            channel.unary_unary(SERVICE + "Drop")(drop, metadata=METADATA)
        with RecStoreClient(
            [own_server.address], private=True, shared_memory=False
        ) as other:
            other.init_data("w", (9, 1000))
        with pytest.raises(ServiceError, match="wrong number of rows"):
            client.pull("w", IDS[:3])
        assert torch.equal(client.pull("t", IDS), rows)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stop_loses_nothing_acknowledged(
    own_server: RecStoreServer, seed: int
) -> None:
    ids = torch.arange(5_000)
    done = [0] * 3
    stopped = threading.Event()
    with ExitStack() as stack:
        for n in range(3):
            name = f"t{n}"
            setup = stack.enter_context(
                RecStoreClient(
                    [own_server.address], shared_memory=False, timeout_s=60.0
                )
            )
            setup.init_data(name, (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))

        def write(n: int) -> None:
            while not stopped.is_set() or done[n] % 5:
                setup.update(f"t{n}", ids, torch.ones(len(ids), 8))
                done[n] += 1

        def read() -> None:
            while not stopped.is_set():
                assert len(setup.pull("t0", torch.arange(100_000))) == 100_000

        threads = [threading.Thread(target=write, args=(n,)) for n in range(3)] + [
            threading.Thread(target=read)
        ]
        for thread in threads:
            thread.start()
        while min(done) < 3 + seed:
            time.sleep(0.001)
        own_server.stop()
        own_server.start()
        after = list(done)
        while any(now <= before for now, before in zip(done, after, strict=True)):
            time.sleep(0.001)
        stopped.set()
        for thread in threads:
            thread.join()
        for n in range(3):
            assert setup.stats(f"t{n}").steps == done[n]
