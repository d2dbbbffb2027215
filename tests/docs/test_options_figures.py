"""The figures in docs/options.md are those that were measured, of every row of the benchmark."""

from __future__ import annotations

import json
import sys

import pytest

from .pages import ROOT

BEGIN, END = "<!-- benchmarks: written by make bench -->", "<!-- end of benchmarks -->"


def test_the_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from figures import OPTIONS, markdown, option_figures

    rows = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    text = (ROOT / "docs" / "options.md").read_text()
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip().splitlines()
    figures = option_figures(rows)
    assert len(figures) == 13
    assert written[2:] == markdown(OPTIONS, figures)
