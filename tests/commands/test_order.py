"""Tests of the order of tables in the output of commands."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from typer.testing import CliRunner

from torchrec_recstore import RecStoreClient
from torchrec_recstore.cli import app


def test_tables_are_in_order(tmp_path: Path) -> None:
    names = ["t_1", "t_2", "t_10", "u"]
    client = RecStoreClient()
    for name in reversed(names):
        client.init_data(name, (100, 4), torch.float32)
        client.update(name, torch.arange(5), torch.ones(5, 4))
    client.save(tmp_path / "saved")
    saved = str(tmp_path / "saved")
    for command in (
        ["inspect", saved],
        ["diff", saved, saved],
        ["export", saved, str(tmp_path / "out.pt")],
    ):
        shown = CliRunner().invoke(app, command, catch_exceptions=False)
        assert shown.exit_code == 0, shown.stderr
        assert re.findall(r"^│ (t_\d+|u) +│", shown.stdout, re.MULTILINE) == names
