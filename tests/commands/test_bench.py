"""Tests of ``recstore bench`` on this machine with quick sizes."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.packages import PYTHON_PATH
from torchrec_recstore.cli import app
from torchrec_recstore.commands import scripts as bench_module

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the import path, which the command extends, and lets the processes of
    benchmarks find the package.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)


def test_list() -> None:
    told = json.loads(bench("--list", "--json").stdout)
    scripts = importlib.import_module("scripts")
    assert tuple(told) == scripts.SCRIPTS
    assert all(about.endswith(".") and '"' not in about for about in told.values())
    assert bench("--list").stdout.splitlines()[0].split(maxsplit=1) == [
        "kernel",
        told["kernel"],
    ]
    for name in scripts.SCRIPTS:
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert all(
            f'"{flag}"' in text for flag in scripts.QUICK[name] if flag.startswith("--")
        ), name
        for benchmark in re.findall(r'"benchmark": "(\w+)"', text):
            assert scripts.SCRIPT_OF.get(benchmark, benchmark) == name


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the last full run are printed, because a run takes an hour."""
    bench("--list")
    rows = json.loads((ROOT / "benchmarks/results.json").read_text())
    bench_module.print_figures(rows, quick=True)
    shown = capsys.readouterr().out.splitlines()
    figures = importlib.import_module("figures")
    made = [
        *figures.kernel_figures(rows),
        *figures.other_figures(rows),
        *figures.serving_figures(rows),
    ]
    made += figures.option_figures(rows)
    assert len(made) > 30
    for cells in made:
        wanted = [cell.replace("`", "") for cell in cells]
        assert [
            line
            for line in shown
            if [cell.strip() for cell in line.strip("│").split("│")] == wanted
        ], wanted
    assert shown[-1].endswith("medians. Quick sizes: do not quote these results.")
    assert f"threads, torch {rows[0]['torch']}, {rows[0]['commit']}" in shown[-1]


@pytest.mark.slow
def test_json_and_a_benchmark_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench("--list")
    scripts = importlib.import_module("scripts")
    monkeypatch.setitem(scripts.QUICK, "growth", ["--rows", "no number"])
    before = {
        path: path.stat().st_mtime_ns
        for path in (ROOT / "benchmarks").iterdir()
        if path.is_file()
    }
    done = bench("store", "growth", "--quick", "--json")
    assert done.exit_code == 1
    (row,) = json.loads(done.stdout)
    assert row["benchmark"] == "store"
    assert row["rows"] == 100_000
    assert row["million_ids_per_second_one_thread"]["median"] > 0
    assert {"commit", "cpu", "torch", "threads"} <= row.keys()
    *said, last = done.stderr.splitlines()
    assert (
        said[-1] == "growth.py: error: argument --rows: invalid int value: 'no number'"
    )
    assert last == "error: the benchmark growth ended with status 2"
    assert {
        path: path.stat().st_mtime_ns
        for path in (ROOT / "benchmarks").iterdir()
        if path.is_file()
    } == before


def test_a_name_that_is_none() -> None:
    refused = bench("stores")
    assert refused.exit_code == 2
    assert refused.stderr.startswith(
        "error: there is no benchmark 'stores': kernel, growth, "
    )
    assert refused.stderr.count("\n") == 1


def test_the_tables_of_the_pages_are_what_was_measured() -> None:
    bench("--list")
    figures = importlib.import_module("figures")
    rows = json.loads((ROOT / "benchmarks/results.json").read_text())
    for page, columns, made in (
        (
            "README.md",
            figures.RESULTS,
            figures.result_figures(rows, results("progressive"), results("peers")),
        ),
        ("docs/measured.md", figures.KERNEL, figures.kernel_figures(rows)),
        ("docs/measured.md", figures.OTHER, figures.other_figures(rows)),
    ):
        written = (ROOT / page).read_text().splitlines()
        lines = figures.markdown(columns, made)
        at = written.index(lines[0])
        assert written[at : at + len(lines)] == lines


def results(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def test_the_readme_s_first_figures() -> None:
    (kernel,) = [
        row
        for row in results("results")
        if row["benchmark"] == "kernel"
        and row["case"] == "criteo"
        and row["optimizer"] == "rowwise_adagrad"
        and row["lane"] == "shipped"
    ]
    first = " ".join((ROOT / "README.md").read_text().split("## Install")[0].split())
    said = re.search(
        r"([\d.]+) times as fast as with FBGEMM's .* ([\d.]+) times:", first
    )
    assert said is not None
    assert [float(number) for number in said.groups()] == [
        round(kernel["forward_over_fbgemm"], 1),
        round(kernel["total_over_fbgemm"], 1),
    ]
    assert f"{kernel['ids']:,} ids" in first


def test_the_readme_s_words_on_predictions() -> None:
    """On the stream, RecStore is as good as managed collision within the seeds, and
    better than modulo by more; on the fixed split, a vocabulary is better.
    """
    bench("--list")
    figures = importlib.import_module("figures")
    first = " ".join((ROOT / "README.md").read_text().split("## Install")[0].split())
    assert "as good as with TorchRec's managed collision" in first
    assert "better than with ids modulo the rows" in first
    assert "a vocabulary is ahead" in first
    stream = figures.mean_aucs(results("progressive"), "stream")
    managed = stream["managed collision, LRU"]
    assert abs(stream["RecStore, LRU"] - managed) < 0.002
    assert stream["RecStore, LRU"] > stream["modulo"] + 0.01
    fixed: dict[str, list[float]] = {}
    for row in results("quality"):
        if row["budget_mb"] == 5:
            fixed.setdefault(row["side"], []).append(row["test_auc"])
    vocabulary = fixed["vocabulary, one row for all other ids"]
    assert sum(vocabulary) > sum(fixed["RecStore, LFU"])


@pytest.mark.parametrize("name", ["quality", "progressive"])
def test_the_tables_of_predictions_are_what_was_measured(name: str) -> None:
    bench("--list")
    script = importlib.import_module(name)
    page = (ROOT / "docs/measured.md").read_text()
    lines = script.table(results(name))
    assert "\n".join([script.BEGIN, "", *lines, ""]) in page
    # the same runs for all sides, and as much memory as the budget at most
    for row in results(name):
        sides = {side.name for side in script.SIDES}
        assert row["side"] in sides


def test_vocabulary_renewed_keeps_the_rows_of_ids_that_stay() -> None:
    bench("--list")
    tables = importlib.import_module("click_tables")
    vocabulary = tables.Vocabulary([torch.tensor([5, -3, 2**62])], 4, sizes=[3])
    ids = torch.tensor([[5, -3, 2**62, 8]])
    before = vocabulary(ids)
    vocabulary.renew(0, torch.tensor([8, 2**62]))
    after = vocabulary(ids)
    assert torch.equal(after[2], before[2])
    others = before[3]  # the row of ids outside of the vocabulary
    assert torch.equal(after[0], others)
    assert torch.equal(after[1], others)
    assert not torch.equal(after[3], others)


def test_tables_of_a_fixed_size_keep_to_the_budget() -> None:
    bench("--list")
    quality = importlib.import_module("quality")
    logs = importlib.import_module("click_logs")
    ids = torch.stack([torch.arange(3_000), torch.arange(3_000) % 7])
    log = logs.ClickLog(
        name="made",
        features=("many", "few"),
        ids=ids,
        dense=torch.ones(3_000, 1),
        labels=torch.zeros(3_000),
    )
    training = quality.Training(log, [ids[0].unique(), ids[1].unique()])
    budget_mb = 0.1
    for side in quality.SIDES:
        limit = quality.limit_of(side, training, budget_mb)
        tables = side.make(training, limit)
        rows = tables(ids[:, :64])
        assert rows.shape == (64, 2, quality.DIM)
        assert tables.memory_bytes() <= budget_mb * 1e6
        if not side.name.startswith("RecStore"):
            assert tables.memory_bytes() == side.bytes_of(training, limit)
