"""Tests of ``recstore top`` and ``neighbours``, of the list of a run's checkpoints, and
of the flags of the command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import torchrec_recstore
from torchrec_recstore import neighbours, save_checkpoint, top_rows
from torchrec_recstore.cli import app

from ..checkpoint import models


def recstore(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def run(one_rank: None, tmp_path: Path) -> Path:
    """A folder with two checkpoints, the second one a delta of the first."""
    model = models.recstore()
    models.train(model)
    save_checkpoint(model, tmp_path / "step-1")
    models.train(model, steps=8, distinct=80)
    save_checkpoint(model, tmp_path / "step-2", delta_of=tmp_path / "step-1")
    return tmp_path


def test_top_and_neighbours(run: Path) -> None:
    flags = ["--table", "item", "--by", "drift", "--since", run / "step-1", "-n", "4"]
    told = json.loads(recstore("top", run / "step-2", *flags, "--json").stdout)
    found = top_rows(run / "step-2", "item", by="drift", since=run / "step-1", count=4)
    assert told["ids"] == found.ids.tolist()
    assert told["columns"]["drift"] == pytest.approx(found.columns["drift"].tolist())
    assert (told["rows"], told["added"], told["gone"]) == (
        found.rows,
        found.added,
        found.gone,
    )
    shown = recstore("top", run / "step-2", *flags).stdout
    assert f"{found.added:,} added, {found.gone:,} gone" in shown
    assert "median" in shown
    assert all(str(id) in shown for id in found.ids.tolist())

    id = int(found.ids[0])
    told = json.loads(
        recstore(
            "neighbours", run / "step-2", "--table", "item", "--json", "--", id
        ).stdout
    )
    ids, near = neighbours(run / "step-2", id, "item")
    assert told == {"ids": ids.tolist(), "cosine": pytest.approx(near.tolist())}
    assert (
        str(int(ids[0]))
        in recstore("neighbours", run / "step-2", "--table", "item", "--", id).stdout
    )

    refused = recstore("top", run / "step-2")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "name one of its tables: item, user" in refused.stderr


def test_a_run_s_checkpoints_are_listed(run: Path) -> None:
    told = json.loads(recstore("inspect", run, "--json").stdout)["checkpoints"]
    assert [Path(each["path"]).name for each in told] == ["step-1", "step-2"]
    assert told[1]["delta_of"] == told[0]["path"]
    assert told[0]["rows"] > 0
    shown = recstore("inspect", run).stdout
    assert [name for name in ("step-1", "step-2") if name in shown] == [
        "step-1",
        "step-2",
    ]
    (run / "empty").mkdir()
    refused = recstore("inspect", run / "empty")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_an_export_is_not_replaced_unless_asked(run: Path) -> None:
    assert (
        recstore(
            "export", run / "step-2", run / "out.pt", "--dtype", "float32"
        ).exit_code
        == 0
    )
    written = (run / "out.pt").read_bytes()
    refused = recstore("export", run / "step-1", run / "out.pt", "--dtype", "float32")
    assert refused.exit_code == 2
    assert (
        refused.stderr
        == f"error: {run / 'out.pt'} exists already: name a path that does not, or pass"
        " --overwrite\n"
    )
    assert (run / "out.pt").read_bytes() == written
    assert (
        recstore(
            "export",
            run / "step-1",
            run / "out.pt",
            "--dtype",
            "float32",
            "--overwrite",
        ).exit_code
        == 0
    )
    assert (run / "out.pt").read_bytes() != written
    assert torch.jit.load(run / "out.pt")


def test_version_help_and_completion() -> None:
    assert recstore("--version").stdout == f"recstore {torchrec_recstore.__version__}\n"
    assert recstore("-h").stdout == recstore("--help").stdout
    assert "CHECKPOINT" in recstore("diff", "-h").stdout.upper()
    command = [sys.executable, "-m", "torchrec_recstore.cli"]
    environment = {
        "_RECSTORE_COMPLETE": "complete_bash",
        "COMP_WORDS": "recstore ne",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["neighbours"]
