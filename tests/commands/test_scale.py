"""Tests of the model of scale: its bytes against a count of what each rank sends to
each other, and its page.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from torchrec_recstore.planner.traffic import PlacedTable, rank_traffic

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
scale: Any = importlib.import_module("scale")
model: Any = importlib.import_module("scale_model")
sys.path.remove(str(ROOT / "benchmarks"))

BATCH, DIM = 4, 64
KERNELS = model.Kernels({64: 1e-7, 32: 6e-8}, {64: 1e-9, 32: 5e-10}, 1e-3, 1e-6, 1e10)


def busiest(pairs: Counter[tuple[int, int]]) -> float:
    """The most bytes that a host sends to others, or gets from them.

    ``pairs`` has the bytes by source and target.
    """
    sums: Counter[tuple[str, int]] = Counter()
    for (source, target), size in pairs.items():
        if source != target:
            sums["out", source] += size
            sums["in", target] += size
    return max(sums.values(), default=0)


def counted(job: Any, sharding: str, ranks: int) -> dict[str, float]:
    """The busiest host's bytes of the all-to-alls, counted pair by pair with one id in
    each bag.
    """
    hosts = model.hosts_of(job, ranks)
    on_host = ranks // hosts
    ids, pooled = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    columns = 32 if sharding == "grid" else job.dim
    for shard in range(job.features * job.dim // columns):
        owner = shard % ranks // on_host if sharding == "table_wise" else shard % hosts
        lengths = 1 if sharding == "table_wise" else on_host
        for rank in range(ranks):
            ids[rank // on_host, owner] += job.batch * (8 + 4 * lengths)
            pooled[owner, rank // on_host] += job.batch * columns * 4
    return {"ids": busiest(ids), "pooled": busiest(pooled)}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_bytes_of_all_to_alls(ranks: int) -> None:
    job = model.Job(features=16, dim=DIM, batch=BATCH, ranks_per_host=4)
    for sharding in ("table_wise", "table_row_wise", "grid"):
        made = {
            each.name: each.host_bytes
            for each in model.collectives(job, sharding, ranks)
        }
        told = counted(job, sharding, ranks)
        if sharding == "table_wise" and ranks > job.features:
            continue  # which hosts have the tables is the planner's choice
        across = "pooled" if sharding == "table_wise" else "pooled between hosts"
        assert made["ids"] == pytest.approx(told["ids"]), (sharding, ranks)
        assert (
            made[across]
            == made[across.replace("pooled", "gradients")]
            == told["pooled"]
        ), (sharding, ranks)


@pytest.mark.parametrize("ranks", [4, 8])
def test_bytes_as_the_planner_counts_them(ranks: int) -> None:
    job = model.Job(features=16, dim=DIM, batch=BATCH, ranks_per_host=4)
    for sharding in ("table_wise", "row_wise"):
        placed = [
            PlacedTable(
                sharding,
                (i % ranks,) if sharding == "table_wise" else tuple(range(ranks)),
                DIM,
                1,
                1.0,
            )
            for i in range(job.features)
        ]
        of_ranks = [
            rank_traffic(placed, rank, ranks, BATCH, job.ranks_per_host)
            for rank in range(4)
        ]
        made = {each.name: each for each in model.collectives(job, sharding, ranks)}
        for name, parts in {
            "ids": ("lengths", "ids"),
            "pooled": ("pooled", "partial sums"),
            "gradients": ("gradients",),
        }.items():
            rows = [
                [row for row in rank if row.collective in parts] for rank in of_ranks
            ]
            # A rank sends as much in a ring, but to one rank. So does the host, because
            # one edge of the ring leaves it.
            in_ring = sharding == "row_wise" and name != "ids"
            host = sum(row.sent_between_hosts for rank in rows for row in rank)
            if in_ring and ranks > 4:
                host = sum(row.sent for row in rows[0])
            assert made[name].host_bytes == pytest.approx(host), (sharding, name)
            assert made[name].rank_bytes == pytest.approx(
                sum(row.sent for row in rows[0])
            ), (sharding, name)


def test_gloo_sends_a_reduce_scatter_twice() -> None:
    job = model.Job(
        features=3, dim=DIM, batch=BATCH, ranks_per_host=2, dense_parameters=1000
    )
    ring, gloo = (
        {each.name: each for each in model.collectives(job, "row_wise", 4, library)}
        for library in (model.RING, model.GLOO)
    )
    assert gloo.pop("pooled").host_bytes == 2 * ring.pop("pooled").host_bytes > 0
    assert {name: each.host_bytes for name, each in gloo.items()} == {
        n: each.host_bytes for n, each in ring.items()
    }
    assert ring["all-reduce"].host_bytes == 2 * 3 / 4 * 4000


def test_a_step() -> None:
    job = model.Job(
        features=16, dim=DIM, batch=BATCH, ranks_per_host=4, dense_parameters=1000
    )
    network = model.Network("slow", 1e6, 1e-3)
    for sharding in model.SHARDINGS:
        one = model.step(job, sharding, 1, network, KERNELS)
        assert one.pop("dense") == BATCH * 1e-6
        assert one.pop("torchrec") == 1e-3
        columns = 32 if sharding == "grid" else DIM
        assert one.pop("tables") == pytest.approx(
            16 * DIM / columns * BATCH * KERNELS.id_s[columns]
        )
        assert sum(one.values()) == 0, "one rank sends nothing"
        # The ids of the busiest rank: those of all ranks' samples are shared out
        # evenly, until tables run out.
        assert model.load(job, sharding, 16).ids == BATCH * 16 * (DIM // columns)
    assert model.load(job, "table_wise", 32).ids == 32 * BATCH
    assert model.load(job, "row_wise", 32) == (DIM, 16 * BATCH, 32 * 16 * BATCH)
    parts = model.step(job, "table_wise", 8, network, KERNELS)
    # four ranks send their tables' bags of the four ranks on the other host
    pooled = 16 * BATCH * DIM * 4 / 8 * 4 * 4
    assert parts["pooled"] == pytest.approx(7 * 1e-3 + pooled / 1e6)
    assert parts["all-reduce"] == pytest.approx(14 * 1e-3 + 2 * 7 / 8 * 4000 / 1e6)
    assert model.samples_per_s(job, 8, {"a": 0.5, "b": 0.5}) == 8 * BATCH
    with pytest.raises(ValueError, match="a multiple of ranks_per_host"):
        model.step(job, "table_wise", 6, network, KERNELS)


def test_hosts_for() -> None:
    job = model.Job(features=16, dim=DIM, batch=BATCH, ranks_per_host=4)
    network = model.Network("fast", 1e12, 0.0)
    hosts = model.hosts_for(50_000, job, "table_wise", network, KERNELS)
    assert hosts is not None
    assert hosts > 1
    of = [
        model.samples_per_s(
            job, 4 * n, model.step(job, "table_wise", 4 * n, network, KERNELS)
        )
        for n in (hosts - 1, hosts)
    ]
    assert of[0] < 50_000 <= of[1]
    assert model.hosts_for(1e12, job, "table_wise", network, KERNELS) is None


@pytest.fixture(name="results")
def _results() -> Any:
    return json.loads(scale.RESULTS.read_text())


def test_the_page_has_what_the_model_says(results: Any) -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    network = model.NETWORKS[1]
    for lines in (
        scale.inputs_lines(results),
        scale.step_lines(results, network),
        scale.parts_lines(results, 1024, network),
        scale.hosts_lines(results),
        scale.check_lines(results),
    ):
        assert "\n".join(lines) in page, lines[0]


def test_the_check_agrees_within_15_percent(results: Any) -> None:
    kernels = scale.kernels_of(results["check_kernels"])
    assert {row["ranks"] for row in results["check"]} == {1, 2, 4}
    for row in results["check"]:
        told = scale.expected(row, kernels)
        assert told["model_seconds"] == pytest.approx(row["seconds"], rel=0.15), row
        assert told["model_bytes"] == pytest.approx(
            row["bytes"], rel=0.05, abs=20_000
        ), row


@pytest.mark.slow
def test_bytes_of_two_hosts() -> None:
    """The counters of two simulated hosts' interfaces agree with the model.

    The times are not looked at.
    """
    for row in scale.measured_steps(2, 2, 1e9, 0.0):
        told = scale.expected(
            {"hosts": 2, "ranks": 2, "rate": 1e9, "delay_s": 0.0, **row},
            scale_kernels(),
        )
        assert told["model_bytes"] == pytest.approx(row["bytes"], rel=0.05), row


def scale_kernels() -> Any:
    return model.Kernels({128: 0.0, 32: 0.0}, {128: 0.0, 32: 0.0}, 0.0, 0.0, 1e10)
