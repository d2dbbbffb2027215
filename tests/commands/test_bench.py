"""Tests of ``recstore bench`` on this machine with quick sizes."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
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
        ("README.md", figures.RESULTS, figures.result_figures(rows)),
        ("docs/measured.md", figures.KERNEL, figures.kernel_figures(rows)),
        ("docs/measured.md", figures.OTHER, figures.other_figures(rows)),
    ):
        written = (ROOT / page).read_text().splitlines()
        lines = figures.markdown(columns, made)
        at = written.index(lines[0])
        assert written[at : at + len(lines)] == lines


def test_the_readme_s_ninth_of_the_memory() -> None:
    """RecStore with at most a ninth of the memory is within the seeds' range of FUSED
    at its best.
    """
    rows = json.loads((ROOT / "benchmarks/quality.json").read_text())
    of: dict[tuple[str, int | None], list[dict[str, float]]] = {}
    for row in rows:
        of.setdefault((row["backend"], row["limit"]), []).append(row)
    aucs = {
        key: sum(row["test_auc"] for row in seeds) / len(seeds)
        for key, seeds in of.items()
    }
    best = max((key for key in of if key[0] == "fused"), key=lambda key: aucs[key])
    small = [
        key
        for key in of
        if key[0] == "recstore" and of[key][0]["bytes"] * 9 <= of[best][0]["bytes"]
    ]
    spread = max(
        max(row["test_auc"] for row in seeds) - min(row["test_auc"] for row in seeds)
        for seeds in of.values()
    )
    assert max(aucs[key] for key in small) > aucs[best] - spread
    assert "a ninth of their memory" in (ROOT / "README.md").read_text()
