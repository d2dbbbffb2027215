"""Tests of ``recstore plan``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import DataType
from typer.testing import CliRunner, Result

from tests.checkpoint import models
from torchrec_recstore import (
    Adam,
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    save_checkpoint,
)
from torchrec_recstore.cli import app
from torchrec_recstore.planner import TableStatistics, read_statistics, write_statistics

HOSTS = {
    "ranks_per_host": 2,
    "memory_per_rank_bytes": 10**9,
    "within_host_bytes_per_s": 1e9,
    "between_hosts_bytes_per_s": 1e8,
}
SAMPLED = {
    "user": TableStatistics(ids_per_sample=(1.0,), ns_per_id=200.0),
    "item": TableStatistics(ids_per_sample=(1.0, 5.0), ns_per_id=100.0),
}


@pytest.fixture
def folder(one_rank: None, tmp_path: Path) -> Path:
    """A folder with a run of two checkpoints, a file of statistics and a topology file."""
    model = models.recstore()
    for step, distinct in ((1, 40), (2, 80)):
        models.train(model, steps=4 * step, distinct=distinct)
        save_checkpoint(model, tmp_path / "run" / f"step-{step}")
    write_statistics(tmp_path / "sample.json", SAMPLED)
    (tmp_path / "hosts.json").write_text(json.dumps(HOSTS))
    return tmp_path


def plan(
    folder: Path, *arguments: str, sources: tuple[str, ...] = ("run", "sample.json")
) -> Result:
    paths = [str(folder / source) for source in sources]
    flags = ["--topology", str(folder / "hosts.json"), "--ranks", "2", *arguments]
    return CliRunner().invoke(app, ["plan", *paths, *flags], catch_exceptions=False)


def test_json(folder: Path) -> None:
    growth = ["--days", "2", "--samples-per-day", "32000", "--samples-per-step", "32"]
    out = folder / "statistics.json"
    done = plan(
        folder, *growth, "--batch-size", "100", "--statistics-out", str(out), "--json"
    )
    told = json.loads(done.stdout)
    assert list(told) == ["step_ms", "limit", "boundless_step_ms", "tables", "ranks"]
    run = read_statistics(folder / "run")
    assert {each["table"]: each["rows"] for each in told["tables"]} == {
        name: run[name].rows for name in run
    }
    assert {each["table"]: each["rows_later"] for each in told["tables"]} == {
        name: each.after(2000).rows for name, each in run.items()
    }
    assert [each["rank"] for each in told["ranks"]] == [0, 1]
    for rank in told["ranks"]:
        assert (
            rank["step_ms"]
            == rank["lookups_ms"] + rank["network_ms"] + rank["torchrec_ms"]
        )
        assert rank["sent_bytes"] > 0
        assert rank["memory_bytes"] > 0
    # All ids of both ranks: 100 samples of 1 id at 200 ns, and of 6 ids at 100 ns.
    assert (
        sum(rank["lookups_ms"] for rank in told["ranks"])
        >= 2 * 100 * (200 + 600) / 1e6 * 0.999
    )
    assert told["step_ms"] == max(rank["step_ms"] for rank in told["ranks"])
    assert sum(rank["sent_bytes"] for rank in told["ranks"]) == sum(
        rank["received_bytes"] for rank in told["ranks"]
    )
    written = read_statistics(out)
    assert written["item"].rows_per_step == run["item"].rows_per_step
    assert written["item"].ids_per_sample == (1.0, 5.0)


def test_tables(folder: Path) -> None:
    shown = plan(
        folder, "--days", "2", "--samples-per-day", "32000", "--samples-per-step", "32"
    ).stdout
    for heading in (
        "sharding type",
        "rows in 2 days",
        "lookups",
        "network",
        "memory in 2 days",
    ):
        assert heading in shown
    assert shown.splitlines()[-1].startswith("limit  ")
    now = plan(folder).stdout
    assert "in 2 days" not in now
    assert now.index("│ item") < now.index("│ user")


def test_rows_on_gpus(folder: Path) -> None:
    gpus = {"gpu_memory_per_rank_bytes": 10**9, "bus_bytes_per_s": 4e9}
    (folder / "hosts.json").write_text(json.dumps(HOSTS | gpus))
    hot = replace(SAMPLED["item"], unique_share=0.01, hot_share=0.8)
    write_statistics(folder / "sample.json", SAMPLED | {"item": hot})
    small = ["--batch-size", "10"]
    told = json.loads(plan(folder, *small, "--json").stdout)
    item, user = told["tables"]
    rows = read_statistics(folder / "run")["item"].rows
    assert rows is not None
    assert (item["device_rows"], item["hit_share"]) == (-(-rows // 10), 0.8)
    assert (user["device_rows"], user["hit_share"]) == (0, None)
    for rank in told["ranks"]:
        assert rank["bus_ms"] == pytest.approx(rank["bus_bytes"] / 4e6, abs=1e-6)
        parts = ("lookups_ms", "bus_ms", "network_ms", "torchrec_ms")
        assert rank["step_ms"] == pytest.approx(sum(rank[part] for part in parts))
    shown = plan(folder, *small).stdout
    for heading in ("rows on GPU", "hits", "80%", "bus", "copied"):
        assert heading in shown
    (folder / "hosts.json").write_text(json.dumps(HOSTS))
    assert "GPU" not in plan(folder, *small).stdout


CLICKS = {
    "u": [f"user {i % 7}" for i in range(40)],
    "i": [[i, i + 1] for i in range(40)],
    "j": [None, 3] * 20,
}
OF_RUN = {"user": {"features": ["u"]}, "item": {"features": ["i", "j"]}}
ALONE = {
    "user": {"features": ["u"], "dim": 8},
    "item": {"features": ["i", "j"], "dim": 16, "dtype": "float16"},
}


def sample(folder: Path, tables: object, clicks: dict[str, Any] = CLICKS) -> list[str]:
    """The flags of a sample and of a file of tables, which are written."""
    pq.write_table(pa.table(clicks), folder / "clicks.parquet")
    (folder / "tables.json").write_text(json.dumps(tables))
    return [
        "--parquet",
        str(folder / "clicks.parquet"),
        "--tables",
        str(folder / "tables.json"),
    ]


def refusal(done: Result) -> str:
    assert (done.exit_code, done.stderr.count("\n"), done.stdout) == (
        2,
        1,
        "",
    ), done.stderr
    return done.stderr


def test_a_parquet_sample(folder: Path) -> None:
    """Ids are integers, strings or lists; what the file of a sample tells is what its
    rows are.
    """
    flags = [*sample(folder, {"tables": OF_RUN}), "--batch-size", "20"]
    done = plan(
        folder,
        *flags,
        "--statistics-out",
        str(folder / "out.json"),
        "--json",
        sources=("run",),
    )
    assert done.exit_code == 0, done.stderr
    found = read_statistics(folder / "out.json")
    assert found["user"].ids_per_sample == (1.0,)
    assert found["user"].unique_share == 7 / 20
    assert found["item"].ids_per_sample == (2.0, 0.5)
    assert (found["item"].ns_per_id or 0) > 0
    run = read_statistics(folder / "run")["item"]
    assert (found["item"].rows, found["item"].rows_per_step) == (
        run.rows,
        run.rows_per_step,
    )
    assert not any(
        table["rows_of_sample"] for table in json.loads(done.stdout)["tables"]
    )
    # The sample does not tell the growth of a table whose rows a checkpoint tells.
    days = ["--days", "1", "--samples-per-day", "1000"]
    refused = refusal(plan(folder, *flags, *days, sources=("run/step-1",)))
    assert (
        "table 'item': rows_per_step is not known: pass the folder of a run" in refused
    )
    assert "clicks.parquet has no whole batch of 41 rows" in refusal(
        plan(folder, *flags[:4], "--batch-size", "41", sources=("run",))
    )
    (folder / "clicks.parquet").write_text("user,item")
    assert "clicks.parquet is not a Parquet file: " in refusal(
        plan(folder, *flags, sources=("run",))
    )
    assert "--parquet needs --tables" in refusal(
        plan(folder, *flags[:2], sources=("run",))
    )


def test_a_parquet_sample_without_a_checkpoint(folder: Path) -> None:
    """The rows are those of a training on the sample, and go on to grow as in its
    second half.
    """
    document = {"optimizer": {"name": "Adam", "betas": [0.9, 0.99]}, "tables": ALONE}
    flags = [*sample(folder, document), "--batch-size", "10"]
    out = folder / "out.json"
    days = ["--days", "3", "--samples-per-day", "1000"]
    done = plan(
        folder, *flags, *days, "--statistics-out", str(out), "--json", sources=()
    )
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    # The ids of i are 0 to 40, and 3 is one of them; 20 of them are only in the last 20
    # samples. User ids are the same.
    assert [(table["rows"], table["rows_later"]) for table in told["tables"]] == [
        (41, 41 + 3000),
        (7, 7),
    ]
    assert all(table["rows_of_sample"] for table in told["tables"])
    measured = read_statistics(out)
    assert (measured["item"].rows, measured["item"].rows_per_step) == (41, 10.0)
    assert measured["item"].ids_per_sample == (2.0, 0.5)
    shown = plan(folder, *flags, sources=()).stdout.splitlines()
    assert shown[-1] == "rows   those of item, user are the distinct ids of the sample"

    # The file is a SOURCE for the same tables.
    again = plan(
        folder,
        *flags[2:],
        *days,
        "--samples-per-step",
        "10",
        "--json",
        sources=("out.json",),
    )
    same = json.loads(again.stdout)
    assert [table | {"rows_of_sample": True} for table in same["tables"]] == told[
        "tables"
    ]
    assert same["ranks"] == told["ranks"]

    # The planner makes the same plan of the file.
    now = json.loads(plan(folder, *flags[2:], "--json", sources=("out.json",)).stdout)
    configs = [
        EmbeddingBagConfig(
            name="user", embedding_dim=8, num_embeddings=2**40, feature_names=["u"]
        ),
        EmbeddingBagConfig(
            name="item",
            embedding_dim=16,
            num_embeddings=2**40,
            feature_names=["i", "j"],
            data_type=DataType.FP16,
        ),
    ]
    topology = Topology(
        2,
        local_world_size=2,
        compute_device="cpu",
        intra_host_bw=1e6,
        inter_host_bw=1e5,
    )
    constraints: Any = {
        name: RecStoreConstraints(sharding_types=["table_wise", "row_wise"])
        for name in ALONE
    }
    planner = RecStorePlanner(
        topology, 10, constraints=constraints, statistics=measured, debug=False
    )
    model = EmbeddingBagCollection(configs, device=torch.device("meta"))
    (module,) = planner.plan(model, [RecStoreSharder(optimizer=Adam())]).plan.values()
    assert {
        name: [sharding.sharding_type, sharding.ranks]
        for name, sharding in module.items()
    } == {
        table["table"]: [table["sharding_type"], table["ranks"]]
        for table in now["tables"]
    }


def test_stated_rows_count_first(folder: Path) -> None:
    """Rows, growth and bounds of the file of tables count before those of a run and of
    a sample.
    """
    stated = {
        "user": {**ALONE["user"], "rows": 5000, "rows_per_day": 100},
        "item": {**ALONE["item"], "max_rows": 30},
    }
    days = [
        "--days",
        "3",
        "--samples-per-day",
        "1000",
        "--samples-per-step",
        "20",
        "--json",
    ]
    flags = [
        *sample(folder, {"optimizer": {"name": "SGD"}, "tables": stated}),
        "--batch-size",
        "10",
        *days,
    ]
    for sources in ((), ("run",)):
        tables = json.loads(plan(folder, *flags, sources=sources).stdout)["tables"]
        rows = {
            table["table"]: (
                table["rows"],
                table["rows_later"],
                table["rows_of_sample"],
            )
            for table in tables
        }
        assert rows == {"item": (30, 30, not sources), "user": (5000, 5300, False)}
    # Memory is that of the stated dim and type, and not of those of the checkpoint.
    sizes = []
    for dim in (16, 64):
        flags = sample(folder, {"tables": {"user": {"dim": dim, "rows": 100_000}}})[2:]
        found = json.loads(plan(folder, *flags, "--json").stdout)
        sizes.append(sum(rank["memory_bytes"] for rank in found["ranks"]))
    assert sizes[1] - sizes[0] >= 100_000 * (64 - 16) * 4


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            {"user": ALONE["user"], "item": {"features": ["i"]}},
            "the dim of table 'item' is not known: state dim, or",
        ),
        (
            {"user": ALONE["user"], "item": {"dim": 8}},
            "table 'item': rows is not known: pass a checkpoint or a Parquet",
        ),
        (
            {"user": {"dim": 8}},
            "tables.json: no table has features, the columns of the Parquet file",
        ),
        ({"user": {"features": ["k"], "dim": 8}}, "clicks.parquet has no column 'k'"),
        (
            {"t.user": ALONE["user"]},
            "table 't.user' cannot be planned: the name of a TorchRec table has no '.'",
        ),
        (
            {"user": {**ALONE["user"], "rows": 9}},
            (
                "table 'user': rows_per_step is not known: pass the folder of a run"
                " with several checkpoints, or state rows_per_day in the file of tables"
            ),
        ),
    ],
)
def test_what_a_sample_lacks(tables: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps(HOSTS))
    flags = sample(tmp_path, {"optimizer": {"name": "SGD"}, "tables": tables})
    days = ["--days", "1", "--samples-per-day", "100"]
    assert says in refusal(
        plan(tmp_path, *flags, *days, "--batch-size", "20", sources=())
    )


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (
            [0.5] * 40,
            "column 'u' must have integers, strings, or lists of them, got 0.5",
        ),
        (
            [True] * 40,
            "column 'u' must have integers, strings, or lists of them, got True",
        ),
        (
            pa.array([2**63] * 40, pa.uint64()),
            f"column 'u' has the id {2**63}, and ids are signed integers of 64 bits",
        ),
    ],
)
def test_ids_of_a_sample_that_are_refused(
    column: Any, says: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps(HOSTS))
    flags = sample(
        tmp_path,
        {"optimizer": {"name": "SGD"}, "tables": ALONE},
        {**CLICKS, "u": column},
    )
    assert says in refusal(plan(tmp_path, *flags, "--batch-size", "20", sources=()))


def test_refusals(folder: Path) -> None:
    days = ("--days", "3", "--samples-per-day", "900")
    for arguments, sources, says in (
        (
            (),
            ("run",),
            (
                "error: table 'item': ids_per_sample is not known: pass statistics of"
                " batches"
            ),
        ),
        ((), ("sample.json",), "error: no SOURCE is a checkpoint or a run"),
        ((), (), "error: no SOURCE is a checkpoint or a run"),
        ((), ("nothing",), "nothing"),
        (
            ("--days", "3"),
            ("run", "sample.json"),
            "error: --days needs --samples-per-day",
        ),
        (
            days,
            ("run", "sample.json"),
            (
                "error: table 'item': a SOURCE tells its growth for a step: pass"
                " --samples-per"
            ),
        ),
        (
            days,
            ("run/step-1", "sample.json"),
            (
                "error: table 'item': rows_per_step is not known: pass the folder of a"
                " run with several checkpoints"
            ),
        ),
        (
            ("--ranks", "3"),
            ("run", "sample.json"),
            "error: 3 ranks do not fill hosts with 2 ranks each",
        ),
    ):
        assert says in refusal(plan(folder, *arguments, sources=sources))
    (folder / "hosts.json").write_text(
        json.dumps({**HOSTS, "memory_per_rank_bytes": 100})
    )
    assert "needs at least" in refusal(plan(folder))
