"""The figures in docs/options.md, docs/serving.md and docs/operations.md are those that
were measured.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.packages import ROOT

RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text())
OPTIONS = (ROOT / "docs" / "options.md").read_text()


def lines_behind(mark: str, page: str = OPTIONS) -> list[str]:
    begin = page.index(mark) + len(mark)
    return [
        line
        for line in page[begin : page.index("<!-- end", begin)].splitlines()
        if line.startswith("|")
    ]


def test_the_tables_are_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import figures
    from scripts import SCRIPT_OF

    options = figures.option_figures(RESULTS)
    assert len(options) == 28
    assert lines_behind(
        "<!-- benchmarks: written by make bench -->"
    ) == figures.markdown(figures.OPTIONS, options)
    bounds = figures.other_figures(
        [row for row in RESULTS if SCRIPT_OF.get(row["benchmark"], "tiers") == "tiers"]
    )
    bound_lines = figures.markdown(figures.OTHER, bounds)[2:]
    measured = (ROOT / "docs" / "measured.md").read_text()
    assert len(bound_lines) >= 10
    assert set(bound_lines) <= set(
        lines_behind("<!-- benchmarks: written by make bench -->", measured)
    )


def test_the_table_of_serving_is_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import figures

    made = figures.serving_figures(RESULTS)
    written = lines_behind(
        "<!-- benchmarks: written by make bench -->",
        (ROOT / "docs" / "serving.md").read_text(),
    )
    assert written == (figures.markdown(figures.SERVING, made) if made else [])


def test_what_is_said_of_models_is_in_the_page_that_measures_it() -> None:
    memory = (ROOT / "docs" / "memory.md").read_text()
    said = re.findall(
        r"0\.7\d{3}|\d+,\d{3} instead|\d+,\d{3} rows",
        OPTIONS[OPTIONS.index("## Field by field") :],
    )
    assert len(said) >= 5
    assert all(re.sub(r" \w+", "", number) in memory for number in said)


def test_the_figures_of_operations() -> None:
    text = " ".join((ROOT / "docs" / "operations.md").read_text().split())
    rows = {row["benchmark"]: row for row in RESULTS}
    payload, overhead = re.search(
        r"row-wise Adagrad: (\d+) \+ (\d+) bytes at seven million rows", text
    ).groups()
    memory = rows["memory"]
    assert int(payload) == memory["payload_bytes_per_row"]
    assert int(overhead) == round(
        memory["resident_bytes_per_row"] - memory["payload_bytes_per_row"]
    )
    without, with_it = re.search(
        r"([\d.]+) million rows a second without it, ([\d.]+) with it", text
    ).groups()
    growth = rows["growth"]
    assert float(without) == round(
        growth["new_rows_per_second_without_first_touch"] / 1e6, 1
    )
    assert float(with_it) == round(growth["new_rows_per_second"] / 1e6, 1)
