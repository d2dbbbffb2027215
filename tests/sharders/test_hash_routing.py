"""Tests how evenly rows are spread over ranks, and the errors of hash routing.

Tests of results: tests/distributed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.processes import run_forked_command
from torchrec_recstore import ops
from torchrec_recstore.kernels.routing import _mixed_by_torch
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import RecStoreConstraints
from torchrec_recstore.store import Table

from .models import bag, collection, sharded

ROUTING = Path(__file__).resolve().parents[2] / "benchmarks" / "routing.py"
INT64 = torch.iinfo(torch.int64)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
def test_patterns_load_ranks_evenly(ranks: int) -> None:
    run = run_forked_command([str(ROUTING), "--ranks", str(ranks)])
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["ids"] for row in rows] == ["sequential", "multiples"]
    assert all(row["block"] == ranks and row["hash"] < 1.05 for row in rows)


def test_the_mix_is_a_bijection() -> None:
    ids = torch.cat([torch.arange(-1000, 1000), torch.tensor([INT64.min, INT64.max])])
    mixed = ops.mix_ids(ids, False)
    assert len(mixed.unique()) == len(ids)
    assert torch.equal(ops.mix_ids(mixed, True), ids)
    assert torch.equal(_mixed_by_torch(ids), mixed)
    assert mixed[1001].item() == -5451962507482445012  # fmix64(1) = 0xb456bcfc34c2cb2c


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="routing"):
        TableOptions(routing="modulo")  # type: ignore[arg-type]
    Table(4, options=TableOptions(routing="hash"))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("sharding_type", "routing"), [("row_wise", "block"), ("table_wise", "hash")]
)
def test_a_feature_is_routed_in_one_way(sharding_type: str, routing: str) -> None:
    constraints = {
        "a": RecStoreConstraints(
            sharding_types=["row_wise"], options=TableOptions(routing="hash")
        ),
        "b": RecStoreConstraints(
            sharding_types=[sharding_type], options=TableOptions(routing=routing)
        ),
    }
    with pytest.raises(ValueError, match=r"'a'.*\['f'\].*'b'"):
        sharded(
            collection(bag("a", ["f"]), bag("b", ["f", "g"])), constraints=constraints
        )
