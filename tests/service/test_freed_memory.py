"""A server keeps the buffers of one save, not of one for each thread of its calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.recstore_server import RecStoreServer
from torchrec_recstore import SGD, RecStoreClient

DIM = 16
ROWS = 300_000
TABLE_BYTES = ROWS * DIM * 4
CLIENTS = 8
SAVES = 4
"""The number of saves of each client."""
WARM_UP = 4
"""The number of saves until the process has the buffers of outputs that it keeps on
purpose.
"""


def anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_saves_of_many_clients(own_server: RecStoreServer) -> None:
    with RecStoreClient([own_server.address]) as client:
        client.init_data("t", (ROWS, DIM), optimizer=SGD())
        for ids in torch.arange(ROWS).split(10_000):
            client.push("t", ids, torch.zeros(len(ids), DIM))
        for _ in range(WARM_UP):
            client.save("first", overwrite=True)
        before = anonymous_bytes(own_server.pid)

        def save(number: int) -> None:
            for _ in range(SAVES):
                client.save(f"save-{number}", overwrite=True)

        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(save, range(CLIENTS)))
        grown = anonymous_bytes(own_server.pid) - before
        # Each thread of calls keeps a megabyte of messages. With the buffers of saves,
        # all threads kept 2.5 tables.
        assert grown < 1.5 * TABLE_BYTES
