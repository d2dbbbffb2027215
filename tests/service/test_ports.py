"""Tests of the port for rows: connections to a wrong server, mapped ports, and reports
of clients.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.certificates import make_certificates, needs_openssl
from tests.recstore_server import Proxy, RecStoreServer, ServerPair
from tests.redis_server import free_port, needs_redis
from tests.secrets import write_secret
from tests.service.container import Container, reason_against_namespaces
from tests.service.tables.test_limits import METADATA, SERVICE, numbers
from torchrec_recstore.optim import Adagrad
from torchrec_recstore_service import RecStoreClient, ServerSetError
from torchrec_recstore_service.client.connection import Side
from torchrec_recstore_service.client.row_port import RowPort
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_service.server.native import Native
from torchrec_recstore_service.server.pair import Role
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.addresses import rows_addresses

TOKEN = "correct-horse-battery"
IDS = torch.arange(-100, 100)
EMPTY_REPLY = bytes(4)  # a message without fields is a reply without an error


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Returns a stack whose end stops what a test has started."""
    with ExitStack() as stack:
        yield stack


def _started(
    stack: ExitStack, folder: Path, *flags: str, on: str = "127.0.0.1"
) -> RecStoreServer:
    server = RecStoreServer(folder, *flags, listen=f"{on}:{free_port()}")
    stack.callback(server.kill)
    return server


def _mapped(stack: ExitStack, address: str) -> str:
    """Maps a free port of 127.0.0.1 to an address, as Docker does for a container."""
    mapping = Proxy(address)
    stack.callback(mapping.close)
    return mapping.address


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _offer(address: str, port_only: bool = False) -> pb.AttachReply:
    request = pb.AttachRequest(port=port_only).SerializeToString()
    with grpc.insecure_channel(address) as channel:
        attach = channel.unary_unary(SERVICE + "Attach")
        return pb.AttachReply.FromString(attach(request, metadata=METADATA))


def _use(addresses: list[str], table: str = "t", **access: Any) -> RecStoreClient:
    """Updates and reads a table, and checks the rows. Returns the client."""
    expected = RecStoreClient(private=True)
    client = RecStoreClient(
        addresses, **{"shared_memory": False, "timeout_s": 20.0, **access}
    )
    for one in (expected, client):
        one.init_data(table, (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
    for step in range(3):
        gradients = torch.full((len(IDS), 8), step + 1.0)
        expected.update(table, IDS, gradients)
        client.update(table, IDS, gradients)
    assert torch.equal(client.pull(table, IDS), expected.pull(table, IDS))
    return client


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the warnings of clients that their rows go by gRPC."""
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "go by gRPC" in message]


def test_a_port_of_another_server_of_the_set_gets_no_rows(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the host of the mapping, the port for rows of the first server is that of the
    second.
    """
    rows_port = str(free_port())
    flags = ("--rows-port", rows_port)
    first = _started(stack, tmp_path / "first", *flags, on="127.0.0.2")
    second = _started(stack, tmp_path / "second", *flags)
    outside = _mapped(stack, first.address)
    with _use([outside, second.address]) as client:
        rows = client.pull("t", IDS)
    # This client reaches both servers at their own addresses.
    with RecStoreClient([first.address, second.address], shared_memory=False) as direct:
        assert torch.equal(direct.pull("t", IDS), rows)
        assert direct.stats("t").rows == len(IDS)
    (warning,) = _warnings(caplog)
    assert f"calls on rows of server {outside} go by gRPC" in warning
    assert f"(127.0.0.1:{rows_port}: the connection is for the server" in warning
    assert "has reached another server" in warning
    assert "--rows-port" in warning


@pytest.mark.parametrize("by_grpc", [False, True], ids=["TCP", "gRPC"])
def test_a_first_port_that_leads_to_another_server_gets_no_rows(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_grpc: bool
) -> None:
    """A mapping is changed while a client uses it.

    The calls of both servers have the same epoch.
    """
    if by_grpc:
        monkeypatch.setattr(Side, "_by_tcp", lambda self, offer: None)
    first = _started(stack, tmp_path / "first")
    second = _started(stack, tmp_path / "second")
    mapping = Proxy(first.address)
    stack.callback(mapping.close)
    with _use([mapping.address, second.address]) as client:
        rows = client.pull("t", IDS)
        mapping.lead(int(_port(first.address)), second.address)
        mapping.cut()
        if by_grpc:
            with pytest.raises(
                ServerSetError, match="two of the addresses are of the same server"
            ):
                client.pull("t", IDS)
            with pytest.raises(
                ServerSetError, match="two of the addresses are of the same server"
            ):
                client.update("t", IDS, torch.ones(len(IDS), 8))
            mapping.lead(int(_port(first.address)), first.address)
            mapping.cut()
            # The second server has carried out its own part of the update, and no other
            # part.
            is_unchanged = (client.pull("t", IDS) == rows).all(dim=1)
            assert 0 < is_unchanged.sum() < len(IDS)
            assert client.stats("t").rows == len(IDS)
            rows = client.pull("t", IDS)
        assert torch.equal(client.pull("t", IDS), rows)


@pytest.mark.usefixtures("no_streams")
def test_rows_go_through_a_mapping_that_changes_the_ports(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows_port = str(free_port())
    # The number outside has to be known when the server starts, so that the mapping is
    # made before.
    rows_outside = _mapped(stack, f"127.0.0.2:{rows_port}")
    flags = ("--rows-port", rows_port, "--advertise-rows", _port(rows_outside))
    server = _started(stack, tmp_path / "data", *flags, on="127.0.0.2")
    with _use([_mapped(stack, server.address)]) as client:
        assert client.rows_addresses() == [rows_outside]
    # A client on the network of the server reaches the port itself, and not the one
    # outside.
    with _use([server.address], "of the same network") as client:
        assert client.rows_addresses() == [f"127.0.0.2:{rows_port}"]
    assert _warnings(caplog) == []


@pytest.mark.usefixtures("no_streams")
def test_rows_go_to_a_host_that_the_server_advertises(
    stack: ExitStack, tmp_path: Path
) -> None:
    rows_port = str(free_port())
    rows_outside = _mapped(stack, f"127.0.0.2:{rows_port}")
    flags = ("--rows-port", rows_port, "--advertise-rows", rows_outside)
    server = _started(stack, tmp_path / "data", *flags, on="127.0.0.2")
    with _use([server.address]) as client:
        assert client.rows_addresses() == [rows_outside]


def test_a_port_that_is_not_mapped_is_reported_once(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows_port = str(free_port())
    flags = ("--rows-port", rows_port)
    server = _started(stack, tmp_path / "data", *flags, on="127.0.0.2")
    outside = _mapped(stack, server.address)
    with _use([outside]) as client:
        side = client._tables._connections[0]._side  # type: ignore[union-attr]
        for transport in side.transports:
            transport._not_before = 0.0  # the time in which a client does not try again
        client.pull("t", IDS)
    (warning,) = _warnings(caplog)
    assert f"127.0.0.1:{rows_port}: " in warning
    assert "refused" in warning


@pytest.mark.usefixtures("no_streams")
def test_a_server_that_is_started_again_on_its_port_has_another_name(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = _started(stack, tmp_path / "data", "--rows-port", str(free_port()))
    with _use([server.address]) as client:
        transport = client._tables._connections[0]._side.transports[0]  # type: ignore[union-attr]
        before = _offer(server.address)
        # a second connection is then made by the offer of the first one
        busy = transport.take(5.0)
        server.stop()
        server.start()
        after = _offer(server.address)
        assert (before.rows_port, before.server != after.server) == (
            after.rows_port,
            True,
        )
        rows = client.pull("t", IDS)
        client.push("t", IDS, rows + 1)
        assert torch.equal(client.pull("t", IDS), rows + 1)
        transport.drop(busy)
        with pytest.raises(OSError, match="has reached another server"):
            RowPort(server.address, None, None, lambda _: before).connect(before)
    # of the last line, whose attach function returns the same
    assert len(_warnings(caplog)) == 1


@pytest.mark.slow
@needs_redis
def test_the_other_server_of_a_pair_refuses_connections(
    stack: ExitStack, tmp_path: Path
) -> None:
    pair = ServerPair(tmp_path)
    stack.callback(pair.close)
    with _use([pair.address]):
        primary = pair.primary()
        for server in (primary, 1 - primary):
            address = pair.servers[server].address
            offer = _offer(address, port_only=True)
            offer.rows_port = _offer(
                pair.servers[1 - server].address, port_only=True
            ).rows_port
            with pytest.raises(OSError, match="has reached another server"):
                RowPort(address, None, None, lambda _: pb.AttachReply()).connect(offer)


@pytest.mark.slow
@needs_redis
def test_servers_of_a_pair_reach_each_other_inside_a_mapping(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens on the advertised ports where the servers call each other."""
    outside, rows_outside, rows_inside, flags = [], [], [], []
    for host in ("127.0.0.2", "127.0.0.3"):
        inside = f"{host}:{free_port()}"
        rows_inside.append(f"{host}:{free_port()}")
        outside.append(_mapped(stack, inside))
        rows_outside.append(_mapped(stack, rows_inside[-1]))
        ports = (
            "--rows-port",
            _port(rows_inside[-1]),
            "--advertise-rows",
            _port(rows_outside[-1]),
        )
        flags.append(("--listen", inside, *ports))
    pair = ServerPair(tmp_path, own=tuple(flags))
    stack.callback(pair.close)
    primary = pair.primary()
    assert "cannot be reached" not in pair.servers[primary].stderr
    with _use(["/".join(outside)]) as client:
        assert client.rows_addresses() == ["/".join(rows_outside)]
        pair.primary()  # the backup copies the tables again for the epoch of the client
        rows = client.pull("t", IDS)
        with pair.client() as within:
            assert within.rows_addresses() == ["/".join(rows_inside)]
        pair.servers[primary].kill()
        assert torch.equal(client.pull("t", IDS), rows)
    assert _warnings(caplog) == []


class Stranger:
    """A program on the port for rows that is no server of RecStore.

    It answers always the same.
    """

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.received = b""
        """What the last connection has begun with."""
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(10)
                    self.received = connection.recv(1000)
                    connection.sendall(self._answer * 100)


@pytest.mark.parametrize(
    "answer",
    [
        EMPTY_REPLY,
        # the answer of an earlier release: the last reply, without an error
        b"\2\0\0\0\x38\1",
        b"\1\0\0\0\xff",
        b"\3\0\0\0\x08\xff\x07",  # a status that gRPC does not have
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"RECSTORE\3\0\0\0",
        b"",
    ],
)
def test_another_program_on_the_port_gets_no_rows(
    stack: ExitStack,
    own_server: RecStoreServer,
    caplog: pytest.LogCaptureFixture,
    answer: bytes,
) -> None:
    stranger = Stranger(answer)
    stack.callback(stranger.close)
    offer = _offer(own_server.address)
    offer.rows_port = stranger.port
    port = RowPort(own_server.address, None, None, lambda _: offer)
    for _ in range(3):
        with pytest.raises(OSError, match=f"127.0.0.1:{stranger.port}: "):
            port.connect(offer)
    assert len(_warnings(caplog)) == 1


def test_a_server_of_an_earlier_release_gets_rows_by_grpc(
    own_server: RecStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connections do not name it, so that a wrong server would answer, too."""
    offer = _offer(own_server.address)
    offer.server = ""
    with pytest.raises(OSError, match="does not name itself"):
        RowPort(own_server.address, None, None, lambda _: offer).connect(offer)
    (warning,) = _warnings(caplog)
    assert "install the release of the client on the server" in warning


def test_a_server_that_has_gone_has_no_closed_port(
    caplog: pytest.LogCaptureFixture,
) -> None:
    offer = pb.AttachReply(rows_port=free_port(), server="a")

    def gone(left_s: float) -> pb.AttachReply:
        raise grpc.RpcError

    for attach in (gone, lambda left_s: pb.AttachReply(server="b")):
        with pytest.raises(OSError, match="refused"):
            RowPort("127.0.0.1:1", None, None, attach).connect(offer)
    assert RowPort("127.0.0.1:1", None, None, gone).connect(pb.AttachReply()) is None
    assert _warnings(caplog) == []


def test_addresses_of_the_port() -> None:
    def of(address: str, advertised: str = "", port: int = 5001) -> list[str]:
        offer = pb.AttachReply(rows_port=port, rows_address=advertised)
        return rows_addresses(address, offer)

    assert of("host:7700") == ["host:5001"]
    assert of("[::1]:7700", "6001") == ["[::1]:6001", "[::1]:5001"]
    assert of("host:7700", "5001") == ["host:5001"]
    assert of("host:7700", "other:6001") == ["other:6001", "host:5001"]
    assert of("host:7700", "other:6001", port=0) == []


@pytest.mark.parametrize(
    ("value", "rows_port", "match"),
    [
        ("30001", 0, "--advertise-rows needs --rows-port"),
        ("0", 5001, "must be PORT or HOST:PORT"),
        ("65536", 5001, "must be PORT or HOST:PORT"),
        ("host", 5001, "must be PORT or HOST:PORT"),
        ("host:", 5001, "must be PORT or HOST:PORT"),
        (":30001", 5001, "must be PORT or HOST:PORT"),
        ("", 5001, "must be PORT or HOST:PORT"),
        ("0.0.0.0:30001", 5001, "not an address that clients can call"),
        ("[::]:30001", 5001, "not an address that clients can call"),
    ],
)
def test_what_cannot_be_advertised(value: str, rows_port: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ListenOptions("127.0.0.1:7700", rows_port=rows_port, advertise_rows=value)


def _followed(stranger: Stranger, name: str) -> None:
    """Lets a primary send its writes to a backup with this name."""
    replica = Native("replica")
    replica.invoke("set_role", Role.JOINING.value)
    texts = ("127.0.0.1", stranger.port, "secret", name, "", "", "", "")
    replica.checked(
        "follow", *(text if isinstance(text, int) else text.encode() for text in texts)
    )


def test_a_primary_sends_its_writes_to_its_backup_only(stack: ExitStack) -> None:
    earlier = Stranger(b"\2\0\0\0\x38\1")
    named = Stranger(b"\5\0\0\0\x38\1\x42\1b")
    for stranger in (earlier, named):
        stack.callback(stranger.close)
    for stranger, name in ((earlier, "b"), (named, "a"), (named, "")):
        with pytest.raises(
            OSError, match="another server answers at the address for rows"
        ):
            _followed(stranger, name)
    _followed(named, "b")
    assert named.received == b"RECSTORE\3\0\0\0\6\0\0\0\1\0\0\0secretb"
    _followed(earlier, "")  # a backup of an earlier release has told no name
    assert earlier.received == b"RECSTORE\2\0\0\0\6\0\0\0secret"


_AGAINST = reason_against_namespaces()
needs_namespaces = pytest.mark.skipif(
    bool(_AGAINST), reason=_AGAINST or "namespaces can be made"
)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize(
    "numbers_change", [False, True], ids=["same numbers", "other numbers"]
)
def test_rows_of_a_container_with_both_ports_mapped(
    stack: ExitStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    numbers_change: bool,
) -> None:
    """A client outside cannot use shared memory, although it is the same user of the
    same host.
    """
    inner = [free_port() for _ in range(3)]
    outer = [free_port() for _ in range(3)] if numbers_change else inner
    flags = ["--listen", f"127.0.0.1:{inner[0]}", "--rows-port", str(inner[1])]
    flags += ["--metrics", f"127.0.0.1:{inner[2]}"]
    if numbers_change:
        flags += ["--advertise-rows", str(outer[1])]
    container = Container(tmp_path, dict(zip(inner, outer, strict=True)), *flags)
    stack.callback(container.close)
    assert _namespace(container.pid) != _namespace("self")
    with _use([f"127.0.0.1:{outer[0]}"], shared_memory=True):
        counts = numbers(f"127.0.0.1:{outer[2]}")
        assert counts["recstore_row_connections"] >= 1
        assert counts["recstore_shared_memory_connections"] == 0
    assert _warnings(caplog) == []


@pytest.mark.slow
@needs_namespaces
def test_rows_of_a_container_with_the_first_port_mapped(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listen, rows_port, metrics = (free_port() for _ in range(3))
    flags = ["--listen", f"127.0.0.1:{listen}", "--rows-port", str(rows_port)]
    flags += ["--metrics", f"127.0.0.1:{metrics}"]
    container = Container(tmp_path, {listen: listen, metrics: metrics}, *flags)
    stack.callback(container.close)
    with _use([f"127.0.0.1:{listen}"], shared_memory=True):
        assert numbers(f"127.0.0.1:{metrics}")["recstore_row_connections"] == 0
    (warning,) = _warnings(caplog)
    assert f"127.0.0.1:{rows_port}: " in warning


@pytest.mark.slow
@needs_namespaces
@needs_openssl
@pytest.mark.usefixtures("no_streams")
def test_rows_of_a_container_with_tls_and_a_token(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A container listens on all of its addresses, which needs TLS and a token."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    make_certificates(secrets)
    write_secret(secrets / "token", TOKEN)
    listen, rows_port, outer_listen, outer_rows = (free_port() for _ in range(4))
    flags = ["--listen", f"0.0.0.0:{listen}", "--rows-port", str(rows_port)]
    flags += [
        "--advertise-rows",
        str(outer_rows),
        "--token-file",
        str(secrets / "token"),
    ]
    flags += [
        "--tls-cert",
        str(secrets / "server.pem"),
        "--tls-key",
        str(secrets / "server.key"),
    ]
    ports = {listen: outer_listen, rows_port: outer_rows}
    stack.callback(Container(tmp_path, ports, *flags).close)
    _use([f"127.0.0.1:{outer_listen}"], token=TOKEN, tls_ca=secrets / "ca.pem").close()
    assert _warnings(caplog) == []


def _namespace(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())
