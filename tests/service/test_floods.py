"""Tests of a server under floods: silent connections, and frames of HTTP/2 as fast as a
client can send them.

Threads, memory and files of the server stay bounded, and a client with a token goes on
meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.recstore_server import RecStoreServer
from tests.redis_server import free_port
from tests.secrets import write_secret
from tests.service.flood import FLOODS
from tests.service.tables.test_limits import numbers, resident_mb
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service.server.metrics_endpoint import MOST_CLIENTS

TOKEN = "0123456789abcdef"
SECONDS = 3.0
MOST_CONNECTIONS = 200
MORE_THREADS = 24
MORE_MB = 150
MORE_FILES = MOST_CONNECTIONS + MOST_CLIENTS + 32
FEWEST_UPDATES = 10
"""The updates that a client ends during a flood, which are a hundred on an idle machine."""
IDS = torch.arange(100)


@dataclass
class Flooded:
    server: RecStoreServer
    metrics: str
    client: RecStoreClient

    def used(self) -> tuple[int, float, int]:
        """Returns the threads, the resident memory in MB and the open files of the
        server.
        """
        process = Path(f"/proc/{self.server.pid}")
        return (
            len(os.listdir(process / "task")),
            resident_mb(self.server),
            len(os.listdir(process / "fd")),
        )

    def bears(self, kind: str, address: str) -> None:
        """Floods an address, and checks what the server uses and that calls end
        meanwhile.
        """
        before = self.used()
        updates, most = 0, before
        command = [
            sys.executable,
            "-m",
            "tests.service.flood",
            kind,
            address,
            f"{SECONDS}",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
            assert flood.stdout is not None
            assert flood.stdout.readline() == "begins\n"
            while flood.poll() is None:
                self.client.update("t", IDS, torch.ones(100, 8))
                self.client.pull("t", IDS)
                updates += 1
                most = tuple(map(max, most, self.used()))  # type: ignore[assignment]
                time.sleep(0.02)
            print(
                kind,
                flood.stdout.read().strip(),
                f"{updates} updates; used before {before}, at most {most}",
            )
        assert flood.returncode == 0
        assert updates >= FEWEST_UPDATES
        assert most[0] <= before[0] + MORE_THREADS
        assert most[1] <= before[1] + MORE_MB
        assert most[2] <= before[2] + MORE_FILES
        assert numbers(self.metrics)["recstore_connections"] <= MOST_CONNECTIONS


@pytest.fixture
def flooded(tmp_path: Path) -> Iterator[Flooded]:
    metrics, token = f"127.0.0.1:{free_port()}", tmp_path / "token"
    write_secret(token, TOKEN)
    flags = [
        "--token-file",
        str(token),
        "--metrics",
        metrics,
        "--max-connections",
        f"{MOST_CONNECTIONS}",
    ]
    server = RecStoreServer(tmp_path / "data", *flags)
    with RecStoreClient([server.address], token=TOKEN, shared_memory=False) as client:
        client.init_data("t", (100, 8))
        client.update("t", IDS, torch.ones(100, 8))
        yield Flooded(server, metrics, client)
    server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["half_requests", "silent"])
def test_silent_connections_to_the_metrics(flooded: Flooded, kind: str) -> None:
    flooded.bears(kind, flooded.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["half_prefaces", "silent", *FLOODS])
def test_floods_of_the_port(flooded: Flooded, kind: str) -> None:
    flooded.bears(kind, flooded.server.address)
