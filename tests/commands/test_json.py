"""Tests of ``--json`` of compact and serve.

The tests of other commands include their ``--json``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchrec_recstore import save_checkpoint
from torchrec_recstore.cli import app

from ..checkpoint import models

ROOT = Path(__file__).parents[2]


def test_every_command_has_it() -> None:
    for name in (
        "plan",
        "inspect",
        "diff",
        "compact",
        "export",
        "follow",
        "serve",
        "doctor",
        "bench",
    ):
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).stdout
        assert "--json" in shown
        assert "Example: recstore " in shown
        assert "Exit status: 0" in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_compact(one_rank: None, tmp_path: Path) -> None:
    model = models.recstore()
    models.train(model)
    info = save_checkpoint(model, tmp_path / "full")
    done = CliRunner().invoke(
        app, ["compact", str(tmp_path / "full"), str(tmp_path / "new"), "--json"]
    )
    told = json.loads(done.stdout)
    assert told["path"] == str(tmp_path / "new")
    assert told["tables"] == {name: table.rows for name, table in info.tables.items()}
    assert told["rows"] == sum(told["tables"].values()) > 0
    assert told["bytes"] == sum(
        path.stat().st_size
        for path in (tmp_path / "new").iterdir()
        if path.suffix != ".json"
    )


@pytest.mark.slow
def test_serve(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torchrec_recstore.cli",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--json",
    ]
    with subprocess.Popen(
        [*command, "--data", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        begun = json.loads(server.stdout.readline())
        server.send_signal(signal.SIGTERM)
        ended = json.loads(server.communicate(timeout=60)[0])
    assert (begun["event"], begun["pid"], server.returncode) == (
        "serving",
        server.pid,
        0,
    )
    assert begun["address"].startswith("127.0.0.1:")
    assert (ended["event"], ended["address"]) == ("stopped", begun["address"])
    assert ended["seconds"] > 0
