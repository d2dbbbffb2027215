"""Tests of the training command with its tables on parameter servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common.command import DataError

from tests.certificates import make_certificates, needs_openssl
from tests.recstore_server import RecStoreServer
from tests.secrets import write_secret

from .commands import run_forked
from .training import settings_of, train_here

LIMIT = 2_000
COMPARED = (
    "train_steps",
    "train_samples",
    "train_loss",
    "val_auc",
    "test_auc",
    "test_logloss",
)


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    both = [
        RecStoreServer(tmp_path_factory.mktemp(f"server{number}"))
        for number in range(2)
    ]
    yield ",".join(server.address for server in both)
    for server in both:
        server.kill()


def results(out: Path, **changes: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    train_here(
        settings_of(json_out=out, limit_rows=LIMIT, dim=8, batch_size=256, **changes)
    )
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_as_with_tables_on_the_rank(servers: str, tmp_path: Path) -> None:
    schedule = {"epochs": 2, "lr_schedule": "cosine", "warmup_steps": 3}
    here = results(tmp_path / "here.json", **schedule)
    there = results(tmp_path / "there.json", servers=servers, staleness=0, **schedule)
    assert {name: here[name] for name in COMPARED} == {
        name: there[name] for name in COMPARED
    }
    assert there["servers"] == servers


@needs_openssl
def test_a_token_and_certificates(tmp_path: Path) -> None:
    ca = make_certificates(tmp_path) / "ca.pem"
    token = write_secret(tmp_path / "token", "0123456789abcdef0123456789abcdef")
    tls = [
        "--tls-cert",
        str(tmp_path / "server.pem"),
        "--tls-key",
        str(tmp_path / "server.key"),
    ]
    server = RecStoreServer(tmp_path / "data", "--token-file", str(token), *tls)
    changes = {"servers": server.address, "token_file": token, "tls_ca": ca}
    there = results(tmp_path / "there.json", **changes)
    assert there["train_steps"] > 0
    assert there["token_file"] == str(token)
    assert token.read_text() not in (tmp_path / "there.json").read_text()
    server.kill()


@pytest.mark.slow
def test_several_workers_and_an_update_in_progress(
    servers: str, tmp_path: Path
) -> None:
    flags = (
        "--limit-rows",
        LIMIT,
        "--batch-size",
        256,
        "--dim",
        4,
        "--seed",
        3,
        "--json",
        tmp_path / "out.json",
    )
    done = run_forked("dlrm/train.py", *flags, "--servers", servers, ranks=2)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["train_loss"] < 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"servers": "127.0.0.1"}, "--servers: Servers.addresses must be HOST:PORT"),
        ({"backend": "fused"}, "--servers is for --backend recstore"),
        ({"sharding": "row_wise"}, "--servers needs --sharding table_wise"),
        (
            {"max_rows": 9, "cold_store": "cold"},
            "--cold-store cannot be used with --servers",
        ),
        (
            {"checkpoint": Path("run")},
            "--checkpoint cannot be used with --servers, which own the tables",
        ),
        (
            {"reset_rows_each_epoch": True},
            "--reset-rows-each-epoch cannot be used with --servers",
        ),
        (
            {"servers": None, "tls_ca": Path("ca.pem")},
            "--tls-ca, --tls-cert and --tls-key need --servers",
        ),
        ({"token_file": Path("missing")}, "--token-file: .*No such file"),
        (
            {"tls_cert": Path("a.pem")},
            "--servers: Servers.tls_cert and Servers.tls_key must be set together",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        settings_of(**{"servers": "127.0.0.1:7700", **changes}).check_group(1)
