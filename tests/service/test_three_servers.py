"""Servers of a set of three are killed at any moment, and come back, some of them
empty.

Clients use shared memory.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.recstore_server import RecStoreServer
from torchrec_recstore.cli import app
from torchrec_recstore.optim import SGD
from torchrec_recstore_service import (
    RecStoreClient,
    ServerRestartedError,
    ServerSetError,
    ServiceError,
)

IDS = torch.arange(3000)


def _client(servers: list[RecStoreServer]) -> RecStoreClient:
    client = RecStoreClient([server.address for server in servers], timeout_s=3.0)
    client.init_data("t", (3000, 4), torch.float32, optimizer=SGD(lr=1.0))
    return client


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["servers", *arguments])
    return done.exit_code, (done.stdout + done.stderr).strip()


@pytest.mark.slow
def test_no_client_reads_rows_of_two_states(tmp_path: Path) -> None:
    chosen = random.Random(0)
    servers = [RecStoreServer(tmp_path / name) for name in "abc"]
    named = ",".join(server.address for server in servers)
    value = saved = 0
    try:
        with _client(servers) as client:
            client.push("t", IDS, torch.zeros(3000, 4))
            client.save("save-0")
        for count, is_lost in itertools.product((1, 2), (False, True)):
            idle, client = _client(servers), _client(servers)
            assert idle.pull("t", IDS).unique().tolist() == [saved]
            value = saved
            victims = chosen.sample(servers, count)
            killer = threading.Timer(
                chosen.uniform(0.0, 0.5),
                lambda each=victims: [server.kill() for server in each],
            )
            killer.start()
            with pytest.raises(ServiceError):  # noqa: PT012
                while True:
                    value += 1
                    client.push("t", IDS, torch.full((3000, 4), float(value)))
                    if chosen.random() < 0.3:
                        # one that was not committed has this name, too
                        client.save(f"save-{value}", overwrite=True)
                        saved = value
            killer.join()
            lost = victims[0].data if is_lost else None
            if lost is not None:
                lost.rename(tmp_path / "copy")
            for server in victims:
                server.start()
            new = RecStoreClient([server.address for server in servers], timeout_s=3.0)
            for each in (idle, client, new, idle, client, new):
                with pytest.raises((ServerSetError, ServerRestartedError)):
                    each.pull("t", IDS)
                with pytest.raises((ServerSetError, ServerRestartedError)):
                    each.update("t", IDS, torch.ones(3000, 4))
            if lost is not None:
                status, told = _run("restore", f"save-{saved}", named)
                assert (status, "the complete saves are: none" in told) == (
                    2,
                    True,
                ), told
                victims[0].kill()
                shutil.rmtree(lost)
                (tmp_path / "copy").rename(lost)
                victims[0].start()
            status, told = _run("status", named, "--json")
            newest = json.loads(told)["complete_saves"][-1]["name"]
            assert saved <= int(newest.removeprefix("save-")) <= value
            saved = int(newest.removeprefix("save-"))
            assert _run("restore", newest, named)[0] == 0
            assert new.pull("t", IDS).unique().tolist() == [saved]
            for each in (idle, client, new):
                each.close()
    finally:
        for server in servers:
            server.kill()
