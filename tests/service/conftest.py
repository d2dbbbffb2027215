from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recstore_server import Proxy, RecStoreServer
from torchrec_recstore_service.client.streams import Streams
from torchrec_recstore_service.client.tcp_rows import TcpConnection


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecStoreServer]:
    """Returns a server that all tests share. Each test uses its own table names."""
    server = RecStoreServer(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def two_servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[RecStoreServer]]:
    """Returns a set of two servers that all tests share."""
    servers = [
        RecStoreServer(tmp_path_factory.mktemp(name)) for name in ("first", "second")
    ]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RecStoreServer]:
    server = RecStoreServer(tmp_path / "data")
    yield server
    server.kill()


@pytest.fixture(params=["gRPC", "TCP"])
def proxy(
    request: pytest.FixtureRequest,
    server: RecStoreServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Proxy]:
    """Returns a proxy in front of the server, through which the rows go, too: by gRPC,
    or by TCP.
    """
    # Shared memory would bypass the proxy, and so would a connection to the server's
    # own port for rows.
    monkeypatch.setattr(
        "torchrec_recstore_service.client.shared_memory.is_available", lambda: False
    )
    proxy = Proxy(server.address)

    def connected(host: str, port: int, **access: Any) -> TcpConnection:
        if request.param == "gRPC":
            raise OSError("the rows go by gRPC")
        return TcpConnection(host, proxy.in_front_of(port), **access)

    monkeypatch.setattr(
        "torchrec_recstore_service.client.row_port.TcpConnection", connected
    )
    yield proxy
    proxy.close()


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each read or write of rows by gRPC fail."""

    def fail(*_: object) -> None:
        raise AssertionError("the call went by gRPC")

    for method in ("pull", "existing_rows", "write"):
        monkeypatch.setattr(Streams, method, fail)
