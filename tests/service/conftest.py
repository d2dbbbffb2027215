from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recstore_server import Proxy, RecStoreServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecStoreServer]:
    """Returns a server that all tests share. Each test uses its own table names."""
    server = RecStoreServer(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RecStoreServer]]:
    """Returns a set of two servers that all tests share."""
    servers = [RecStoreServer(tmp_path_factory.mktemp(name)) for name in ("first", "second")]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RecStoreServer]:
    server = RecStoreServer(tmp_path / "data")
    yield server
    server.kill()


@pytest.fixture
def proxy(server: RecStoreServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    # Shared memory would bypass the proxy.
    monkeypatch.setattr("torchrec_recstore_service.client.shared_memory.is_available", lambda: False)
    proxy = Proxy(server.address)
    yield proxy
    proxy.close()
