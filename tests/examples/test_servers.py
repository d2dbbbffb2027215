"""Tests of the training command with its tables on parameter servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer
from common.command import DataError
from common.run_settings import Bounds

from tests.recstore_server import RecStoreServer

from .commands import run_forked
from .test_train import settings_of

LIMIT = 2_000
COMPARED = ("train_steps", "train_samples", "train_loss", "val_auc", "test_auc", "test_logloss")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    both = [RecStoreServer(tmp_path_factory.mktemp(f"server{number}")) for number in range(2)]
    yield ",".join(server.address for server in both)
    for server in both:
        server.kill()


def results(out: Path, **changes: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainer.train(settings_of(json_out=out, limit_rows=LIMIT, batch_size=256, **changes))
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_as_with_tables_on_the_rank(servers: str, tmp_path: Path) -> None:
    here = results(tmp_path / "here.json", epochs=2)
    there = results(tmp_path / "there.json", epochs=2, servers=servers, staleness=0)
    assert {name: here[name] for name in COMPARED} == {name: there[name] for name in COMPARED}
    assert there["servers"] == servers


@pytest.mark.slow
def test_several_workers_and_an_update_in_progress(servers: str, tmp_path: Path) -> None:
    flags = ("--limit-rows", LIMIT, "--batch-size", 256, "--dim", 4, "--seed", 3, "--json", tmp_path / "out.json")
    done = run_forked("dlrm/train.py", *flags, "--servers", servers, ranks=2)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["train_loss"] < 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"servers": "127.0.0.1"}, "--servers: Servers.addresses must be HOST:PORT"),
        ({"backend": "fused"}, "--servers is for --backend recstore"),
        ({"sharding": "row_wise"}, "--servers needs --sharding table_wise"),
        ({"bounds": Bounds(max_rows=9, cold_store="cold")}, "--cold-store cannot be used with --servers"),
        ({"checkpoint": Path("run")}, "--checkpoint cannot be used with --servers, which own the tables"),
        ({"warmup_steps": 3}, "--warmup-steps cannot be used with --servers"),
        ({"lr_schedule": "cosine"}, "--lr-schedule cannot be used with --servers"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        settings_of(**{"servers": "127.0.0.1:7700", **changes}).check(1)
