"""Writes ``report.html`` with the settings, the result and the curves of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from common.curves import Curve, has_curves, read_curves
from common.report import (
    ALL,
    PART_TITLES,
    counted_since,
    plain,
    share,
    short,
    short_bytes,
    total,
    write_whole,
)
from common.style import REST, Line, Points, cell, document, facts, figure

from torchrec_recstore import TableStats

NAMED_TABLES = 5


def draw(curves: Mapping[str, Curve]) -> dict[str, str]:
    """Returns the plots whose curves exist as HTML, by name."""
    kinds = ("training", "validation", "test")
    rates = {"hits": "hit", "rows made": "insert", "rows evicted": "eviction"}
    learning = {name: f"learning_rate/{name}" for name in ("embeddings", "dense")}
    if all(
        len(set(curves[tag].values)) == 1 for tag in learning.values() if tag in curves
    ):
        learning = {}  # constant rates are listed in the settings
    four, three = "{:.4f}".format, "{:.3g}".format
    memory = {"processes": "memory/processes", "of these, tables": "memory/tables"}
    unseen = (
        "Lookups of ids without a row",
        curves,
        "unseen_share",
        "share of the ids looked up",
        share,
    )
    figures = {
        "loss": _lines(
            "Loss",
            curves,
            {kind: f"loss/{kind}" for kind in kinds},
            "mean loss",
            four,
            three,
        ),
        "auc": _lines(
            "AUC",
            curves,
            {kind: f"AUC/{kind}" for kind in kinds},
            "area under the ROC curve",
            four,
            three,
        ),
        "rows": _per_table(
            "Rows of each table", curves, "rows", "rows in memory", short
        ),
        "unseen": _per_table(*unseen),
        "rates": _lines(
            "Hits, inserts and evictions",
            curves,
            {name: f"{tag}_rate/{ALL}" for name, tag in rates.items()},
            "for each id looked up",
            share,
        ),
        "memory": _lines("Memory", curves, memory, "bytes", short_bytes),
        "step_time": _step_time(curves),
        "speed": _lines(
            "Speed",
            curves,
            {"samples/s": "speed/samples_per_second"},
            "training samples a second",
            short,
        ),
        "learning_rate": _lines(
            "Learning rates", curves, learning, "rate", "{:.2g}".format
        ),
    }
    return {name: figure for name, figure in figures.items() if figure}


def _lines(
    title: str,
    curves: Mapping[str, Curve],
    parts: Mapping[str, str],
    unit: str,
    str_of: Callable[[float], str],
    tick_of: Callable[[float], str] | None = None,
) -> str:
    """Draws a line for each curve, with its label.

    Axes of losses and AUCs do not begin at zero.
    """
    found = {label: curves[tag] for label, tag in parts.items() if tag in curves}
    ends = ", ".join(
        f"{label} {str_of(curve.values[-1])}" for label, curve in found.items()
    )
    text = f"{title} over training samples ({unit}). At the end: {ends}."
    lines = [Line(label, _points(curve)) for label, curve in found.items()]
    return _figure(title, text, lines, tick_of or str_of, unit, zero=tick_of is None)


def _per_table(
    title: str,
    curves: Mapping[str, Curve],
    kind: str,
    unit: str,
    str_of: Callable[[float], str],
) -> str:
    """Draws a line for each table.

    The tables that are highest at the end have a name; the other lines are grey.
    """
    tables = {
        tag.partition("/")[2]: curve
        for tag, curve in curves.items()
        if tag.startswith(f"{kind}/")
    }
    whole = tables.pop(ALL, None)
    by_end = sorted(
        tables,
        key=lambda table: (tables[table].values[-1], sum(tables[table].values)),
        reverse=True,
    )
    named, others = by_end[:NAMED_TABLES], by_end[NAMED_TABLES:]
    lines = [
        Line(
            f"{len(others)} other tables" if number == 0 else "",
            _points(tables[table]),
            REST,
        )
        for number, table in enumerate(others)
    ]
    lines += [Line(table, _points(tables[table])) for table in named]
    if kind != "rows" and whole is not None:
        lines.append(Line("all tables", _points(whole), "currentColor"))
    ends = ", ".join(f"{table} {str_of(tables[table].values[-1])}" for table in named)
    every = "" if whole is None else f"; all tables {str_of(whole.values[-1])}"
    text = f"{title} over training samples ({unit}). Highest at the end: {ends}{every}."
    return _figure(title, text, lines, str_of, unit)


def _step_time(curves: Mapping[str, Curve]) -> str:
    found = {
        title: curves[f"step_ms/{part}"]
        for part, title in PART_TITLES.items()
        if f"step_ms/{part}" in curves
    }
    whole = sum(sum(curve.values) for curve in found.values())
    shares = ", ".join(
        f"{title} {share(sum(curve.values) / whole)}" for title, curve in found.items()
    )
    text = f"Time of a step on rank 0 over training samples, in ms. In all: {shares}."
    lines = [Line(title, _points(curve)) for title, curve in found.items()]
    return _figure("Time of a step", text, lines, short, "ms a step", stacked=True)


def _points(curve: Curve) -> Points:
    return list(zip(curve.samples, curve.values, strict=True))


def _figure(
    title: str,
    text: str,
    lines: Sequence[Line],
    tick_of: Callable[[float], str],
    unit: str,
    **how: Any,
) -> str:
    axes = {
        "x_of": short,
        "x_unit": "training samples",
        "unit": unit,
        "left": 0.0,
        "zero": True,
    }
    return figure(title, text, lines, tick_of, **axes | how) if lines else ""


RUN_FILE, PAGE_FILE = "run.json", "report.html"
TITLES = {"dlrm": "DLRM on a click log"}


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` to the folder of a log. The run need not have ended.

    Args:
        folder: The folder of the log.

    Returns:
        The path of the report.

    Raises:
        FileNotFoundError: The folder contains no curves.
        OSError: A file cannot be read or written.
    """
    if not has_curves(folder):
        raise FileNotFoundError(f"{folder}: no run has written curves there")
    about, curves = read_about(folder), read_curves(folder)
    page = folder / PAGE_FILE
    write_whole(page, _page(folder, about, curves).encode())
    return page


def read_about(folder: Path) -> dict[str, Any]:
    """Returns the description of a run.

    It is empty if the file is missing or incomplete.
    """
    try:
        about = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _page(folder: Path, about: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    title = TITLES.get(about.get("example", ""), "Training run")
    result = about.get("result") or {}
    settings = about.get("settings") or {}
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(_when(folder, about, curves))}</p>',
        _facts(result, curves),
        "<h2>Curves</h2>",
        (
            "<div"
            f' class="plots">{"".join(draw(curves).values()) or "<p>The run has no point yet.</p>"}</div>'
        ),
        (
            '<p class="faint">A point describes the steps since the previous point.'
            " Times are those of rank 0. Lookups count each id of a step once. Ids"
            " without a row are new ids, ids whose row was evicted or has expired, and"
            " ids that are not admitted yet.</p>"
        ),
        "<h2>Tables</h2>",
        _tables(result, curves),
        '<div class="columns">',
        _section("Settings", settings),
        _section("Versions", about.get("versions") or {}),
        _section("Machine", about.get("machine") or {}),
        _section(
            "Result",
            {
                name: value
                for name, value in result.items()
                if not isinstance(value, Mapping)
            },
        ),
        "</div>",
    ]
    return document(f"{title} - {folder.absolute().name}", "\n".join(body))


def _when(folder: Path, about: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    parts = [str(folder.absolute())]
    started = about.get("started") or []
    if started:
        parts.append(f"began {started[0]}")
    if len(started) > 1:
        parts.append(f"resumed {', '.join(started[1:])}")
    if not about.get("result"):
        last = max((curve.samples[-1] for curve in curves.values()), default=0)
        parts.append(f"has not ended: the last point is at {last:,} training samples")
    return " · ".join(parts)


def _facts(result: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    """Returns the main numbers as HTML, from the result or, if there is no result, from
    the last points.
    """

    def last(tag: str) -> float | None:
        return curves[tag].values[-1] if tag in curves else None

    rows = result.get("rows")
    values = {
        "test AUC": result.get("test_auc"),
        "test logloss": result.get("test_logloss"),
        "recall@10": result.get("recall_at_10"),
        "validation AUC": result.get("val_auc", last("AUC/validation")),
        "training loss": result.get("train_loss", last("loss/training")),
        "samples": result.get("train_samples"),
        "samples/s": result.get(
            "train_samples_per_second", last("speed/samples_per_second")
        ),
        "rows": sum(rows.values()) if rows else last(f"rows/{ALL}"),
        "memory": last("memory/processes"),
    }
    shown = {
        name: (
            short_bytes(value)
            if name == "memory"
            else f"{value:.4f}"
            if abs(value) < 10
            else f"{value:,.0f}"
        )
        for name, value in values.items()
        if value is not None
    }
    return facts(shown)


def _section(title: str, values: Mapping[str, Any]) -> str:
    """Returns a table of names and values as HTML.

    A mapping becomes a line for each of its values.
    """
    lines: list[str] = []
    for name, value in values.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for part, each in parts:
            if part and each is None:
                continue  # a limit that is not set
            whole = f"{name} {part}".strip().replace("_", " ")
            lines.append(
                f"<tr><th scope=row>{escape(whole)}</th>{cell(plain(each))}</tr>"
            )
    return (
        f"<section><h2>{escape(title)}</h2><table>{''.join(lines)}</table></section>"
        if lines
        else ""
    )


def _tables(result: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    """Returns a table of the statistics of each embedding table as HTML.

    Counts begin when the run was resumed.
    """
    rows = result.get("rows") or _last(curves, "rows")
    sizes = result.get("bytes") or _last(curves, "bytes")
    counts = {
        name: TableStats(**each) for name, each in (result.get("counts") or {}).items()
    }
    if not rows:
        return "<p>There are no statistics of the tables yet.</p>"
    columns: dict[str, list[str]] = {"table": [*rows]}
    columns["rows"] = [f"{rows[name]:,.0f}" for name in rows]
    columns["bytes"] = [short_bytes(sizes[name]) for name in rows]
    foot = [ALL, f"{sum(rows.values()):,.0f}", short_bytes(sum(sizes.values()))]
    if counts:
        done = [counts.get(name, TableStats()) for name in rows]
        whole = total(counts)
        columns["hit rate"] = [
            share(stats.hits / stats.lookups) if stats.lookups else "-"
            for stats in done
        ]
        foot.append(share(whole.hits / whole.lookups))
        for count in (
            "lookups",
            "inserts",
            "evicted",
            "expired",
            "refused",
            "cold_rows",
            "cold_hits",
            "nonfinite",
        ):
            if getattr(whole, count):
                columns[count.replace("_", " ")] = [
                    f"{getattr(stats, count):,}" for stats in done
                ]
                foot.append(f"{getattr(whole, count):,}")
    note = counted_since(result) if counts else None
    lines = "".join(_row("td", cells) for cells in zip(*columns.values(), strict=True))
    head = f"<thead>{_row('th', columns)}</thead>"
    body = f"<tbody>{lines}</tbody><tfoot>{_row('td', foot)}</tfoot>"
    text = f'<p class="faint">{escape(note[0].upper() + note[1:])}</p>' if note else ""
    return f'{text}<div class="wide"><table>{head}{body}</table></div>'


def _row(cell: str, texts: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in texts)}</tr>"


def _last(curves: Mapping[str, Curve], kind: str) -> dict[str, float]:
    """Returns the last value of the curve of each table."""
    found = {
        tag.partition("/")[2]: curve.values[-1]
        for tag, curve in curves.items()
        if tag.startswith(f"{kind}/")
    }
    found.pop(ALL, None)
    return found
