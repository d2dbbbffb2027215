"""A set of two servers, of which one has a full disk during saves: by schedule and by a
client.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.recstore_server import RecStoreServer
from tests.redis_server import free_port
from torchrec_recstore import SGD, RecStoreClient

pytestmark = pytest.mark.slow

DIM = 16
SMALL = torch.arange(20)
LARGE = torch.arange(30_000)


def _wait_until(holds: Callable[[], bool], servers: list[RecStoreServer]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, [server.stderr for server in servers]
        time.sleep(0.05)


def _saves(server: RecStoreServer) -> set[str]:
    return {entry.name for entry in server.data.iterdir() if entry.is_dir()}


def test_saves_of_two_servers_while_the_disk_of_one_is_full(
    small_disk: Path, tmp_path: Path
) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    flags = ("--save-every", "0.3", "--keep", "1", "--servers", ",".join(addresses))
    folders = [tmp_path / "roomy", small_disk / "data"]
    servers = [
        RecStoreServer(folder, *flags, listen=address)
        for folder, address in zip(folders, addresses, strict=True)
    ]
    full = servers[1]
    try:
        with RecStoreClient(addresses) as client:
            client.init_data("t", (100, DIM), torch.float32, optimizer=SGD(lr=1.0))
            client.push("t", SMALL, torch.zeros(len(SMALL), DIM))
            client.save("first")
            client.push("t", LARGE, torch.zeros(len(LARGE), DIM))
            # The server that began the save tells of its failure: the first one, unless
            # a save of it was under way.
            _wait_until(
                lambda: any("has failed" in server.stderr for server in servers),
                servers,
            )
            lines = [line for server in servers for line in server.stderr.splitlines()]
            failure = next(line for line in lines if "has failed" in line)
            assert "No space left on device" in failure
            assert str(full.data) in failure
            before = [
                {name for name in _saves(server) if name.startswith("scheduled-")}
                for server in servers
            ]
            with pytest.raises(Exception, match=r"No space left on device.*data"):
                client.save("second")
            for _ in range(3):
                client.update("t", SMALL, torch.ones(len(SMALL), DIM))
            # The other server keeps nothing of the saves that failed on this one, and
            # the last good save counts.
            assert all("second" not in _saves(server) for server in servers)
            for server, names in zip(servers, before, strict=True):
                assert {
                    name for name in _saves(server) if name.startswith("scheduled-")
                } == names
            client.delete("t", LARGE[100:])
            _wait_until(lambda: shutil.disk_usage(small_disk).free > 400_000, servers)
            client.save("third")
            client.update("t", SMALL, torch.ones(len(SMALL), DIM))
            _wait_until(
                lambda: all(
                    any(
                        name.startswith("scheduled-") and name not in names
                        for name in _saves(server)
                    )
                    for server, names in zip(servers, before, strict=True)
                ),
                servers,
            )
            client.load("third")
            assert client.pull("t", SMALL).unique().tolist() == [-3.0]
            client.load("first")
            assert client.pull("t", SMALL).unique().tolist() == [0.0]
            assert client.stats("t").rows == len(SMALL)
        for server in servers:
            server.kill()
            hidden = [
                entry.name
                for entry in server.data.iterdir()
                if entry.name.startswith(".prepared-")
            ]
            assert len(hidden) <= 1  # a scheduled save may have been in progress
    finally:
        for server in servers:
            server.kill()
