"""Tests of the DLRM example on two simulated hosts: each torchrun node has its own
network namespace.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from generator import Generator

from .commands import ROOT
from .network_hosts import network_hosts
from .training import settings_of, train_on_ranks


@pytest.mark.slow
def test_two_hosts_train_as_one(tmp_path: Path) -> None:
    data = tmp_path / "rows.tsv"
    data.write_bytes(b"".join(Generator(2000, 1).lines(0, 2000)))
    flags = [
        "--data",
        str(data),
        "--dim",
        "8",
        "--batch-size",
        "256",
        "--sharding",
        "row_wise",
    ]
    settings = settings_of(
        data=data,
        dim=8,
        num_embeddings=100_000,
        batch_size=256,
        sharding="row_wise",
        json_out=tmp_path / "one.json",
    )
    train_on_ranks(2, settings)

    with network_hosts(2) as hosts:
        for rank, host in enumerate(hosts):
            host.torchrun(
                [
                    *(
                        "--nnodes",
                        "2",
                        "--node-rank",
                        str(rank),
                        "--nproc-per-node",
                        "1",
                    ),
                    *("--master-addr", hosts[0].address, "--master-port", "29400"),
                    *(str(ROOT / "examples" / "dlrm" / "train.py"), *flags),
                    *("--json", str(tmp_path / "two.json"), "--no-log"),
                ],
                tmp_path / "hosts.log",
            )
        assert [host.wait(120) for host in hosts] == [0, 0], (
            tmp_path / "hosts.log"
        ).read_text()

    one, two = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two")
    )
    assert two["world_size"] == 2
    same = ("train_loss", "val_auc", "test_logloss", "test_auc", "rows")
    assert {key: two[key] for key in same} == {key: one[key] for key in same}
