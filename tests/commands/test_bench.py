"""``recstore bench`` on this machine, in quick sizes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from torchrec_recstore.cli import app

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts its scripts' folder on the path, and benchmarks run in processes that need the package."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_list() -> None:
    told = json.loads(bench("--list", "--json").stdout)
    scripts = importlib.import_module("scripts")
    assert tuple(told) == scripts.SCRIPTS
    assert all(about.endswith(".") and '"' not in about for about in told.values())
    assert bench("--list").stdout.splitlines()[0].split(maxsplit=1) == ["kernel", told["kernel"]]
    for name in scripts.SCRIPTS:
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert all(f'"{flag}"' in text for flag in scripts.QUICK[name] if flag.startswith("--")), name


def test_one_benchmark() -> None:
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks").iterdir() if path.is_file()}
    shown = bench("store", "--quick")
    assert shown.exit_code == 0
    assert "lookups of 500 ids at 512 B, one thread" in shown.stdout
    assert "M ids/s" in shown.stdout
    assert "threads, torch 2." in shown.stdout
    assert "not to be quoted" in shown.stdout
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks").iterdir() if path.is_file()} == before


def test_json_and_a_benchmark_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench("--list")
    scripts = importlib.import_module("scripts")
    monkeypatch.setitem(scripts.QUICK, "growth", ["--rows", "no number"])
    done = bench("store", "growth", "--quick", "--json")
    assert done.exit_code == 1
    (row,) = json.loads(done.stdout)
    assert row["benchmark"] == "store"
    assert row["rows"] == 100_000
    assert row["million_ids_per_second_one_thread"]["median"] > 0
    assert {"commit", "cpu", "torch", "threads"} <= row.keys()
    *said, last = done.stderr.splitlines()
    assert said[-1] == "growth.py: error: argument --rows: invalid int value: 'no number'"
    assert last == "error: the benchmark growth ended with status 2"


def test_a_name_that_is_none() -> None:
    refused = bench("stores")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: there is no benchmark 'stores': kernel, growth, ")
    assert refused.stderr.count("\n") == 1


def test_the_readme_s_table_is_what_was_measured() -> None:
    bench("--list")
    figures = importlib.import_module("figures")
    rows = json.loads((ROOT / "benchmarks/results.json").read_text())
    readme = (ROOT / "README.md").read_text().splitlines()
    for columns, made in (
        (figures.KERNEL, figures.kernel_figures(rows)),
        (figures.OTHER, figures.other_figures(rows)),
    ):
        lines = figures.markdown(columns, made)
        at = readme.index(lines[0])
        assert readme[at : at + len(lines)] == lines
