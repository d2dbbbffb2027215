"""Tests of looks at the rows of served tables: ``recstore top`` and ``neighbours`` with
the addresses of servers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.recstore_server import RecStoreServer
from torchrec_recstore import (
    SGD,
    ConstantInit,
    RecStoreClient,
    Table,
    TableOptions,
    neighbours,
    top_rows,
)
from torchrec_recstore.cli import app
from torchrec_recstore_service.server.looks import look
from torchrec_recstore_service.wire import recstore_pb2 as pb


def recstore(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def trained(addresses: list[str], name: str) -> Table:
    """Trains a table on servers, and returns a table in the process with the same rows."""
    options = TableOptions(initializer=ConstantInit(0.25))
    same = Table(4, optimizer=SGD(lr=0.5), name=name, options=options)
    generator = torch.Generator().manual_seed(3)
    with RecStoreClient(addresses) as client:
        client.init_data(
            name, (9, 4), torch.float32, optimizer=SGD(lr=0.5), options=options
        )
        for step in range(6):
            ids = (torch.arange(120) * 977 - 40_000)[step::2]
            grads = torch.randn(len(ids), 4, generator=generator)
            client.update(name, ids, grads)
            same.lookup(ids, train=True)
            same.update(ids, grads)
    return same


def test_one_and_two_servers(
    server: RecStoreServer, two_servers: list[RecStoreServer]
) -> None:
    for servers in ([server], two_servers):
        addresses = [each.address for each in servers]
        same = trained(addresses, f"look_{len(servers)}")
        flags = [
            ",".join(addresses),
            "--table",
            f"look_{len(servers)}",
            "--json",
            "-n",
            "7",
        ]
        for by in ("norm", "frequency"):
            told = json.loads(recstore("top", *flags, "--by", by).stdout)
            found = top_rows(same, by=by, count=7)  # type: ignore[arg-type]
            assert told["ids"] == found.ids.tolist()
            assert told["columns"]["norm"] == pytest.approx(
                found.columns["norm"].tolist()
            )
            assert (told["rows"], told["steps"]) == (120, 6)
        id = int(same.ids()[3])
        told = json.loads(
            recstore("neighbours", *flags, "--metric", "l2", "--", id).stdout
        )
        ids, near = neighbours(same, id, count=7, metric="l2")
        assert told == {"ids": ids.tolist(), "l2": pytest.approx(near.tolist())}


def test_what_cannot_be_done(server: RecStoreServer) -> None:
    trained([server.address], "look_errors")
    for arguments, says in [
        (["top", server.address, "--table", "nowhere"], "there is no table 'nowhere'"),
        (
            ["top", server.address, "--table", "look_errors", "--by", "drift"],
            "drift and growth are those of checkpoints",
        ),
        (
            ["neighbours", server.address, "--table", "look_errors", "--", "5"],
            "id 5 has no row in table 'look_errors'",
        ),
        (["top", "127.0.0.1:1", "--timeout", "0.3"], "cannot be reached"),
    ]:
        refused = recstore(*arguments)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), says
        assert says in refused.stderr
    table = Table(4)
    for request, says in [
        (pb.LookRequest(by="norm", count=10**6), "count must be at most 100000"),
        (pb.LookRequest(by="norm"), "count must be at least 1"),
        (pb.LookRequest(by="drift", count=1), "by='drift' compares"),
        (pb.LookRequest(by="x", count=1), "by='x' is not one of"),
        (
            pb.LookRequest(by="cosine", count=1, row=b"12345"),
            "row must have 16 bytes, not 5",
        ),
        (
            pb.LookRequest(by="norm", count=1, row=bytes(16)),
            "metric='norm' is not one of",
        ),
    ]:
        with pytest.raises(ValueError, match=says):
            look(request, table)


def test_a_directory_with_the_name_of_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:12").mkdir()
    refused = recstore("top", "run:12")
    assert "no checkpoint" in refused.stderr
