"""Tests that data directories of the version before servers were a set are converted.

The directory before_sets was written by two servers of that version. They were stopped with SIGTERM, one of them twice.
expected.json has the ids, the gradients, and the rows that their client has read.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.recstore_server import RecStoreServer
from torchrec_recstore.cli import app
from torchrec_recstore.optim import Adam
from torchrec_recstore.options import MinFrequency, TableOptions
from torchrec_recstore.service import RecStoreClient, ServerSetError

BEFORE = Path(__file__).parent / "before_sets"
SEEN = TableOptions(admission=MinFrequency(3, 2**10), seed=5)


def _servers(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["servers", *arguments])
    return done.exit_code, (done.stdout + done.stderr).strip()


def _make_tables(client: RecStoreClient) -> None:
    client.init_data("adam", (100, 4), torch.float32, optimizer=Adam(lr=0.125))
    client.init_data("seen", (100, 4), torch.int8, options=SEEN)


def _here(ids: torch.Tensor, grads: torch.Tensor) -> RecStoreClient:
    """Returns a client with tables in the process, after the updates that the fixture has had."""
    client = RecStoreClient()
    _make_tables(client)
    client.update("adam", ids, grads)
    client.update("adam", ids[::2], -grads[::2])
    client.update("adam", ids[:3], grads[:3])
    client.update("seen", ids, grads)
    client.update("seen", ids[:12], grads[:12])
    client.update("seen", ids[:6], grads[:6])
    return client


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_states_and_counts_are_kept(tmp_path: Path, number: int) -> None:
    expected = json.loads((BEFORE / "expected.json").read_text())
    ids, grads = torch.tensor(expected["ids"]), torch.tensor(expected["grads"])
    with ExitStack() as stack:

        def start(name: str) -> RecStoreServer:
            server = RecStoreServer(tmp_path / name)
            stack.callback(server.kill)
            return server

        shutil.copytree(BEFORE, tmp_path, dirs_exist_ok=True)
        old = [start("server1"), start("server0")]
        named = ",".join(server.address for server in old)
        with pytest.raises(ServerSetError, match=f"is in no set and has the save.*recstore servers convert {named}"):
            RecStoreClient([server.address for server in old]).pull("adam", ids)
        status, told = _servers("convert", old[0].address, "--to", start("alone").address)
        assert status == 2
        assert "needs all of its parts, each once, got 2 of 2: name all servers" in told
        servers = [start(f"new{each}") for each in range(number)]
        to = ["--to", ",".join(server.address for server in servers)] if servers else []
        servers = servers or old
        count = len(servers)
        assert _servers("convert", named, *to) == (0, f"{count} servers begin epoch 1 with the save 'converted'")
        for server in servers:  # the save is one of the set
            server.kill()
        for server in servers:
            server.start()
        with RecStoreClient([server.address for server in servers]) as client, _here(ids, grads) as here:
            for name, rows in expected["rows"].items():
                assert client.pull(name, ids).tolist() == rows
                assert client.exists(name, ids).tolist() == expected["exists"][name]
                client.update(name, ids, grads)
                here.update(name, ids, grads)  # goes on from the same states and counts
                assert torch.equal(client.pull(name, ids), here.pull(name, ids))
                assert torch.equal(client.exists(name, ids), here.exists(name, ids))
            _make_tables(client)
        if not to:
            status, told = _servers("convert", named)
            assert status == 2
            assert "only servers that are in no set and have rows of an earlier version can be converted" in told
            assert all(list(server.data.glob("stopped-?")) for server in servers)
