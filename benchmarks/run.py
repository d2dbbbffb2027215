"""Runs all benchmarks, and writes their results and the tables of the pages.

    python benchmarks/run.py [--only kernel,growth]
    # writes the tables and charts again from the results
    python benchmarks/run.py --only none

The results are in ``benchmarks/results.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from charts import draw
from figures import (
    KERNEL,
    LIMIT,
    OPTIONS,
    OTHER,
    RESULTS,
    SERVING,
    kernel_figures,
    limit_figures,
    machine,
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
PROGRESSIVE = FOLDER / "progressive.json"
PEERS = FOLDER / "peers.json"
BEGIN = "<!-- benchmarks: written by make bench -->"
END = "<!-- end of benchmarks -->"
BEGIN_RESULTS = "<!-- results: written by make bench -->"
END_RESULTS = "<!-- end of results -->"


def load(path: Path) -> list[dict[str, Any]]:
    """Returns the results of a JSON file, or no results if there is no file."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the tables of docs/measured.md as lines of Markdown."""
    return [
        *markdown(KERNEL, kernel_figures(rows)),
        "",
        *markdown(LIMIT, limit_figures(rows)),
        "",
        *markdown(OTHER, other_figures(rows)),
    ]


def write_between(
    page: str,
    begin: str,
    end: str,
    lines: list[str],
) -> None:
    """Writes lines of Markdown between two marks of a page."""
    path = ROOT / page
    text = path.read_text()
    start = text.index(begin) + len(begin)
    stop = text.index(end, start)
    head = text[:start]
    tail = text[stop:]
    written = "\n".join(lines)
    path.write_text(f"{head}\n\n{written}\n\n{tail}")


def conditions(rows: list[dict[str, Any]]) -> str:
    """Returns the processor, torch and the commits of the rows as one line."""
    benchmarks_of: dict[str, list[str]] = {}
    for row in rows:
        benchmarks = benchmarks_of.setdefault(row["commit"], [])
        if row["benchmark"] not in benchmarks:
            benchmarks.append(row["benchmark"])
    commits = [
        f"{commit} ({', '.join(benchmarks)})"
        for commit, benchmarks in benchmarks_of.items()
    ]
    first = rows[0]
    threads = "1 thread" if first["threads"] == 1 else f"{first['threads']} threads"
    return (
        f"{machine(first['cpu'])}, {threads}, torch {first['torch']}, commit"
        f" {', '.join(commits)}; medians."
    )


def script_of(row: dict[str, Any]) -> str:
    """Returns the name of the script that measured a row."""
    return SCRIPT_OF.get(row["benchmark"], row["benchmark"])


def write_tables(
    page: str,
    rows: list[dict[str, Any]],
    lines: list[str],
) -> None:
    """Writes lines of Markdown between the marks of a page.

    The conditions of the rows are before them.
    """
    write_between(page, BEGIN, END, [conditions(rows), "", *lines])


def main() -> None:
    """Runs the requested benchmarks.

    The figures of other benchmarks are not changed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(SCRIPTS), help="benchmarks to run")
    requested = parser.parse_args().only
    only = [] if requested == "none" else requested.split(",")
    rows = load(MEASURED)
    rows = [row for row in rows if script_of(row) not in only]
    for name in tqdm(only, disable=not sys.stderr.isatty()):
        rows += run_lanes(str(FOLDER / f"{name}.py"), lanes_of(name))
    rows.sort(key=lambda row: SCRIPTS.index(script_of(row)))
    MEASURED.write_text(json.dumps(rows, indent=1) + "\n")
    write_pages(rows)


def write_pages(rows: list[dict[str, Any]]) -> None:
    """Writes the tables of the pages, and prints them."""
    option_rows = [row for row in rows if script_of(row) == "options"]
    serving_rows = [row for row in rows if script_of(row) == "serving"]
    with_own_page = ("options", "serving")
    measured_rows = [row for row in rows if script_of(row) not in with_own_page]
    measured_lines = tables(measured_rows)
    option_lines = markdown(OPTIONS, option_figures(option_rows))
    serving_lines = markdown(SERVING, serving_figures(serving_rows))
    if measured_rows:
        draw(measured_rows)
        write_tables("docs/measured.md", measured_rows, measured_lines)
        first = measured_rows[0]
        result_conditions = (
            f"Default settings, {first['threads']} threads on {machine(first['cpu'])},"
            f" torch {first['torch']}; medians."
        )
        results = result_figures(rows, load(PROGRESSIVE), load(PEERS))
        result_lines = markdown(RESULTS, results)
        write_between(
            "README.md",
            BEGIN_RESULTS,
            END_RESULTS,
            [result_conditions, "", *result_lines],
        )
    if option_rows:
        write_tables("docs/options.md", option_rows, option_lines)
    if serving_rows:
        write_tables("docs/serving.md", serving_rows, serving_lines)
    print(
        "\n".join(
            [
                *measured_lines,
                "",
                *serving_lines,
                "",
                *option_lines,
            ]
        )
    )


if __name__ == "__main__":
    main()
