"""Tests of ``recstore plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from tests.checkpoint import models
from torchrec_recstore import save_checkpoint
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


def plan(folder: Path, *arguments: str, sources: tuple[str, ...] = ("run", "sample.json")) -> Result:
    paths = [str(folder / source) for source in sources]
    flags = ["--topology", str(folder / "hosts.json"), "--ranks", "2", *arguments]
    return CliRunner().invoke(app, ["plan", *paths, *flags], catch_exceptions=False)


def test_json(folder: Path) -> None:
    growth = ["--days", "2", "--steps-per-day", "1000"]
    out = folder / "statistics.json"
    done = plan(folder, *growth, "--batch-size", "100", "--statistics-out", str(out), "--json")
    told = json.loads(done.stdout)
    assert list(told) == ["step_ms", "limit", "boundless_step_ms", "tables", "ranks"]
    run = read_statistics(folder / "run")
    assert {each["table"]: each["rows"] for each in told["tables"]} == {name: run[name].rows for name in run}
    assert {each["table"]: each["rows_later"] for each in told["tables"]} == {
        name: each.after(2000).rows for name, each in run.items()
    }
    assert [each["rank"] for each in told["ranks"]] == [0, 1]
    for rank in told["ranks"]:
        assert rank["step_ms"] == rank["lookups_ms"] + rank["network_ms"] + rank["torchrec_ms"]
        assert rank["sent_bytes"] > 0
        assert rank["memory_bytes"] > 0
    # All ids of both ranks: 100 samples of 1 id at 200 ns, and of 6 ids at 100 ns.
    assert sum(rank["lookups_ms"] for rank in told["ranks"]) >= 2 * 100 * (200 + 600) / 1e6 * 0.999
    assert told["step_ms"] == max(rank["step_ms"] for rank in told["ranks"])
    assert sum(rank["sent_bytes"] for rank in told["ranks"]) == sum(rank["received_bytes"] for rank in told["ranks"])
    written = read_statistics(out)
    assert written["item"].rows_per_step == run["item"].rows_per_step
    assert written["item"].ids_per_sample == (1.0, 5.0)


def test_tables(folder: Path) -> None:
    shown = plan(folder, "--days", "2", "--steps-per-day", "1000").stdout
    for heading in ("sharding type", "rows in 2 days", "lookups", "network", "memory in 2 days"):
        assert heading in shown
    assert shown.splitlines()[-1].startswith("limit  ")
    now = plan(folder).stdout
    assert "in 2 days" not in now
    assert now.index("│ item") < now.index("│ user")


def test_a_parquet_sample(folder: Path) -> None:
    """Ids are integers, strings or lists; what the file of a sample tells is what its rows are."""
    rows = {"u": [f"user {i % 7}" for i in range(40)], "i": [[i, i + 1] for i in range(40)], "j": [None, 3] * 20}
    pq.write_table(pa.table(rows), folder / "clicks.parquet")
    (folder / "features.json").write_text(json.dumps({"user": ["u"], "item": ["i", "j"]}))
    sample = ["--parquet", str(folder / "clicks.parquet"), "--features", str(folder / "features.json")]
    done = plan(folder, *sample, "--batch-size", "20", "--statistics-out", str(folder / "out.json"), sources=("run",))
    assert done.exit_code == 0, done.stderr
    found = read_statistics(folder / "out.json")
    assert found["user"].ids_per_sample == (1.0,)
    assert found["user"].unique_share == 7 / 20
    assert found["item"].ids_per_sample == (2.0, 0.5)
    assert (found["item"].ns_per_id or 0) > 0
    assert found["item"].rows == read_statistics(folder / "run")["item"].rows
    for flags, says in (
        ([*sample, "--batch-size", "41"], "clicks.parquet has no whole batch of 41 rows"),
        (sample[:2], "--parquet and --features need each other"),
    ):
        refused = plan(folder, *flags, sources=("run",))
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert says in refused.stderr
    for document, says in (
        ({"user": ["u"]}, "features.json: it has no field 'item'"),
        ({"user": ["u"], "item": "i"}, "features.json: table 'item' must have a list of columns, got 'i'"),
        ({"user": ["u"], "item": ["k"]}, "clicks.parquet has no column 'k'"),
        ([], "features.json: it is not a JSON object"),
    ):
        (folder / "features.json").write_text(json.dumps(document))
        assert says in plan(folder, *sample, "--batch-size", "20", sources=("run",)).stderr
    (folder / "features.json").write_text(json.dumps({"user": ["u"], "item": ["i", "j"]}))
    for column, says in (
        ([0.5] * 40, "column 'u' must have integers, strings, or lists of them, got 0.5"),
        ([True] * 40, "column 'u' must have integers, strings, or lists of them, got True"),
        (pa.array([2**63] * 40, pa.uint64()), f"column 'u' has the id {2**63}, and ids are signed integers of 64 bits"),
    ):
        pq.write_table(pa.table({**rows, "u": column}), folder / "clicks.parquet")
        assert says in plan(folder, *sample, "--batch-size", "20", sources=("run",)).stderr


def test_refusals(folder: Path) -> None:
    for arguments, sources, says in (
        ((), ("run",), "error: table 'item': ids_per_sample is not known: pass statistics of batches"),
        ((), ("sample.json",), "error: no SOURCE is a checkpoint or a run"),
        ((), ("nothing",), "nothing"),
        (("--days", "3"), ("run", "sample.json"), "error: --days needs --steps-per-day"),
        (
            ("--days", "3", "--steps-per-day", "9"),
            ("run/step-1", "sample.json"),
            "error: table 'item': rows_per_step is not known: pass the folder of a run with several checkpoints",
        ),
        (("--ranks", "3"), ("run", "sample.json"), "error: 3 ranks do not fill hosts with 2 ranks each"),
    ):
        refused = plan(folder, *arguments, sources=sources)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert refused.stdout == ""
        assert says in refused.stderr
    (folder / "hosts.json").write_text(json.dumps({**HOSTS, "memory_per_rank_bytes": 100}))
    refused = plan(folder)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "needs at least" in refused.stderr
