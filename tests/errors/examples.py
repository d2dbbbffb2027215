"""Errors of the example scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.errors.situations import situation

EXAMPLES = Path(__file__).parents[2] / "examples"


@situation("Data that an example cannot read")
def no_movielens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from two_tower.movielens import load

    load(tmp_path / "ml-100k")


@situation("A line that is not a row of the Criteo log")
def bad_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES / "dlrm"))
    from criteo import CriteoFile

    (tmp_path / "train.txt").write_bytes(b"0\tx" + b"\t" * 38)
    CriteoFile(tmp_path / "train.txt").scan()
