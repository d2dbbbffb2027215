"""Tests of the DLRM example on two simulated hosts: each torchrun node has its own network namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from generator import Generator

from .commands import ROOT
from .training import settings_of, train_on_ranks

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Creates two connected network namespaces. Returns the name and the interface of each."""
    names = [f"recstore_{os.getpid()}_{i}" for i in range(2)]
    cables = [f"rs{os.getpid() % 10**6}n{i}" for i in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
            for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
                ip("link", "set", cable, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not allowed here: {getattr(error, 'stderr', error)}")
        yield list(zip(names, cables, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_two_hosts_train_as_one(hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    data = tmp_path / "rows.tsv"
    data.write_bytes(b"".join(Generator(2000, 1).lines(0, 2000)))
    flags = ["--data", str(data), "--dim", "8", "--batch-size", "256", "--sharding", "row_wise"]
    settings = settings_of(
        data=data, dim=8, num_embeddings=100_000, batch_size=256, sharding="row_wise", json_out=tmp_path / "one.json"
    )
    train_on_ranks(2, settings)

    script = str(ROOT / "examples" / "dlrm" / "train.py")
    nodes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"),
                *("--master-addr", ADDRESSES[0], "--master-port", "29400"),
                *(script, *flags, "--json", str(tmp_path / "two.json"), "--no-log"),
            ],
            # gloo would use the address of the machine's name, which does not exist in the namespace.
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": cable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, (name, cable) in enumerate(hosts)
    ]
    try:
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs

    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["world_size"] == 2
    same = ("train_loss", "val_auc", "test_logloss", "test_auc", "rows")
    assert {key: two[key] for key in same} == {key: one[key] for key in same}
