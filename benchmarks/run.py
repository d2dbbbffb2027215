"""Runs all benchmarks and writes ``benchmarks/results.json`` and the tables of the
README and the docs.

python benchmarks/run.py [--only kernel,growth]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from figures import (
    KERNEL,
    LIMIT,
    OPTIONS,
    OTHER,
    RESULTS,
    SERVING,
    kernel_figures,
    limit_figures,
    markdown,
    option_figures,
    other_figures,
    result_figures,
    serving_figures,
)
from measure import ROOT, run_lanes
from scripts import SCRIPT_OF, SCRIPTS, lanes_of
from tqdm import tqdm

FOLDER = Path(__file__).resolve().parent
MEASURED = FOLDER / "results.json"
BEGIN, END = "<!-- benchmarks: written by make bench -->", "<!-- end of benchmarks -->"
BEGIN_BOUNDS = "<!-- benchmarks of bounds: written by make bench -->"
BEGIN_RESULTS, END_RESULTS = (
    "<!-- results: written by make bench -->",
    "<!-- end of results -->",
)


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the tables of docs/measured.md as lines of Markdown."""
    return [
        *markdown(KERNEL, kernel_figures(rows)),
        "",
        *markdown(LIMIT, limit_figures(rows)),
        "",
        *markdown(OTHER, other_figures(rows)),
    ]


def write_between(page: str, begin: str, end: str, lines: list[str]) -> None:
    """Writes lines of Markdown between two marks of a page."""
    path = ROOT / page
    text = path.read_text()
    start = text.index(begin) + len(begin)
    written = "\n".join(lines)
    path.write_text(f"{text[:start]}\n\n{written}\n\n{text[text.index(end, start) :]}")


def conditions(rows: list[dict[str, Any]]) -> str:
    """Returns the processor, torch and the commits of the rows as one line."""
    r = rows[0]
    commits: dict[str, list[str]] = {}
    for row in rows:
        of = commits.setdefault(row["commit"], [])
        of += [row["benchmark"]] if row["benchmark"] not in of else []
    at = ", ".join(f"{commit} ({', '.join(of)})" for commit, of in commits.items())
    threads = f"{r['threads']} thread{'s' * (r['threads'] != 1)}"
    return f"{r['cpu']}, {threads}, torch {r['torch']}, commit {at}; medians."


def write_tables(
    page: str, rows: list[dict[str, Any]], lines: list[str], mark: str = BEGIN
) -> None:
    """Writes the conditions of the rows and the lines of Markdown between the marks of
    a page.
    """
    write_between(page, mark, END, [conditions(rows), "", *lines])


def main() -> None:
    """Runs the requested benchmarks.

    The figures of other benchmarks are not changed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SCRIPTS), help="benchmarks to run")
    only = parser.parse_args().only.split(",")
    rows = json.loads(MEASURED.read_text()) if MEASURED.exists() else []
    rows = [
        row
        for row in rows
        if SCRIPT_OF.get(row["benchmark"], row["benchmark"]) not in only
    ]
    for name in tqdm(only, disable=not sys.stderr.isatty()):
        rows += run_lanes(str(FOLDER / f"{name}.py"), lanes_of(name))
    rows.sort(
        key=lambda row: SCRIPTS.index(SCRIPT_OF.get(row["benchmark"], row["benchmark"]))
    )
    MEASURED.write_text(json.dumps(rows, indent=1) + "\n")
    of_options = [row for row in rows if row["benchmark"].startswith("options_")]
    of_serving = [row for row in rows if SCRIPT_OF.get(row["benchmark"]) == "serving"]
    others = [row for row in rows if row not in of_options and row not in of_serving]
    if others:
        write_tables("docs/measured.md", others, tables(others))
        r = others[0]
        where = f"{r['cpu']}, {r['threads']} threads, torch {r['torch']}; medians."
        write_between(
            "README.md",
            BEGIN_RESULTS,
            END_RESULTS,
            [where, "", *markdown(RESULTS, result_figures(rows))],
        )
    if of_options:
        write_tables(
            "docs/options.md", of_options, markdown(OPTIONS, option_figures(of_options))
        )
    of_bounds = [
        row
        for row in rows
        if SCRIPT_OF.get(row["benchmark"], row["benchmark"]) == "tiers"
    ]
    if of_bounds:
        write_tables(
            "docs/options.md",
            of_bounds,
            markdown(OTHER, other_figures(of_bounds)),
            BEGIN_BOUNDS,
        )
    if of_serving:
        write_tables(
            "docs/serving.md",
            of_serving,
            markdown(SERVING, serving_figures(of_serving)),
        )
    lines = [*tables(others), "", *markdown(SERVING, serving_figures(of_serving))]
    print("\n".join([*lines, "", *markdown(OPTIONS, option_figures(of_options))]))


if __name__ == "__main__":
    main()
