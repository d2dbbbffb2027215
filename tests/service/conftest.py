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
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecStoreServer]:
    """Returns a second server that all tests share."""
    server = RecStoreServer(tmp_path_factory.mktemp("second"))
    yield server
    server.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RecStoreServer]:
    server = RecStoreServer(tmp_path / "data")
    yield server
    server.kill()


@pytest.fixture
def proxy(server: RecStoreServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    # Shared memory would bypass the proxy.
    monkeypatch.setattr("torchrec_recstore.rpc.shared_memory.is_available", lambda: False)
    proxy = Proxy(server.address)
    yield proxy
    proxy.close()
