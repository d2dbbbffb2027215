"""docs/command.md has a line for each command."""

from __future__ import annotations

import re
from typing import Any

import typer

from tests.packages import ROOT
from torchrec_recstore.cli import app


def test_every_command_has_a_line() -> None:
    command: Any = typer.main.get_command(app)
    page = (ROOT / "docs" / "command.md").read_text()
    assert set(re.findall(r"^\| `(\w+)", page, flags=re.MULTILINE)) == {
        name for name, each in command.commands.items() if not each.hidden
    }
