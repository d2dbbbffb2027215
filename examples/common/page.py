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
    hit_rate,
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
"""The number of tables that have their own colour and name in a plot."""

LOSSES = {
    "training": "loss/training",
    "validation": "loss/validation",
    "test": "loss/test",
}
AUCS = {
    "training": "AUC/training",
    "validation": "AUC/validation",
    "test": "AUC/test",
}
RATES = {
    "hits": f"hit_rate/{ALL}",
    "rows made": f"insert_rate/{ALL}",
    "rows evicted": f"eviction_rate/{ALL}",
}
MEMORY = {
    "processes": "memory/processes",
    "of these, tables": "memory/tables",
}
SPEED = {"samples/s": "speed/samples_per_second"}
LEARNING_RATES = {
    "embeddings": "learning_rate/embeddings",
    "dense": "learning_rate/dense",
}

SHOWN_COUNTS = (
    "lookups",
    "inserts",
    "evicted",
    "expired",
    "refused",
    "cold_rows",
    "cold_hits",
    "nonfinite",
    "device_rows",
    "device_hits",
    "device_arrivals",
    "device_written_back",
)


def draw(curves: Mapping[str, Curve]) -> dict[str, str]:
    """Returns the plots whose curves exist as HTML, by name."""
    figures = {
        "loss": _lines(
            "Loss",
            curves,
            LOSSES,
            unit="mean loss",
            str_of="{:.4f}".format,
            tick_of="{:.3g}".format,
        ),
        "auc": _lines(
            "AUC",
            curves,
            AUCS,
            unit="area under the ROC curve",
            str_of="{:.4f}".format,
            tick_of="{:.3g}".format,
        ),
        "rows": _per_table(
            "Rows of each table",
            curves,
            kind="rows",
            unit="rows in memory",
            str_of=short,
        ),
        "unseen": _per_table(
            "Lookups of ids without a row",
            curves,
            kind="unseen_share",
            unit="share of the ids looked up",
            str_of=share,
        ),
        "rates": _lines(
            "Hits, inserts and evictions",
            curves,
            RATES,
            unit="for each id looked up",
            str_of=share,
        ),
        "memory": _lines("Memory", curves, MEMORY, unit="bytes", str_of=short_bytes),
        "step_time": _step_time(curves),
        "speed": _lines(
            "Speed", curves, SPEED, unit="training samples a second", str_of=short
        ),
        "learning_rate": _learning_rates(curves),
    }
    return {name: figure for name, figure in figures.items() if figure}


def _learning_rates(curves: Mapping[str, Curve]) -> str:
    """Draws the learning rates, unless all are constant.

    Constant rates are listed in the settings.
    """
    rates = [curves[tag] for tag in LEARNING_RATES.values() if tag in curves]
    if all(len(set(curve.values)) == 1 for curve in rates):
        return ""
    return _lines(
        "Learning rates",
        curves,
        LEARNING_RATES,
        unit="rate",
        str_of="{:.2g}".format,
    )


def _lines(
    title: str,
    curves: Mapping[str, Curve],
    parts: Mapping[str, str],
    unit: str,
    str_of: Callable[[float], str],
    tick_of: Callable[[float], str] | None = None,
) -> str:
    """Draws a line for each curve that exists, with its label.

    Args:
        title: The title of the plot.
        curves: All curves of the run, by tag.
        parts: The tags of the plot's curves, by label.
        unit: The unit of the heights.
        str_of: A function that formats a height in the text below the plot.
        tick_of: A function that formats a height at the axis, which then does not begin
            at zero. Losses and AUCs need it. Default: ``str_of``.
    """
    lines = []
    ends = []
    for label, tag in parts.items():
        if tag in curves:
            curve = curves[tag]
            lines.append(Line(label, _points(curve)))
            ends.append(f"{label} {str_of(curve.values[-1])}")
    text = f"{title} over training samples ({unit}). Last points: {', '.join(ends)}."
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
    tables = _curves_of_tables(curves, kind)
    total_curve = tables.pop(ALL, None)

    def height(table: str) -> tuple[float, float]:
        values = tables[table].values
        return values[-1], sum(values)

    by_height = sorted(tables, key=height, reverse=True)
    named = by_height[:NAMED_TABLES]
    unnamed = by_height[NAMED_TABLES:]
    lines = []
    for number, table in enumerate(unnamed):
        label = f"{len(unnamed)} other tables" if number == 0 else ""
        lines.append(Line(label, _points(tables[table]), REST))
    for table in named:
        lines.append(Line(table, _points(tables[table])))
    if kind != "rows" and total_curve is not None:
        lines.append(Line("all tables", _points(total_curve), "currentColor"))

    ends_of_tables = []
    for table in named:
        last_value = tables[table].values[-1]
        ends_of_tables.append(f"{table} {str_of(last_value)}")
    ends = ", ".join(ends_of_tables)
    if total_curve is not None:
        ends += f"; all tables {str_of(total_curve.values[-1])}"
    text = f"{title} over training samples ({unit}). Highest at the end: {ends}."
    return _figure(title, text, lines, str_of, unit)


def _curves_of_tables(curves: Mapping[str, Curve], kind: str) -> dict[str, Curve]:
    """Returns the curves of a kind by table, with ``ALL`` for their sum."""
    by_table = {}
    for tag, curve in curves.items():
        tag_kind, _, table = tag.partition("/")
        if tag_kind == kind:
            by_table[table] = curve
    return by_table


def _step_time(curves: Mapping[str, Curve]) -> str:
    """Draws the parts of a step's time on top of each other."""
    parts = {}
    for part, title in PART_TITLES.items():
        tag = f"step_ms/{part}"
        if tag in curves:
            parts[title] = curves[tag]
    total_ms = sum(sum(curve.values) for curve in parts.values())
    lines = []
    shares = []
    for title, curve in parts.items():
        lines.append(Line(title, _points(curve)))
        part_ms = sum(curve.values)
        shares.append(f"{title} {share(part_ms / total_ms)}")
    text = (
        "Time of a step on rank 0 over training samples, in ms. In all:"
        f" {', '.join(shares)}."
    )
    return _figure("Time of a step", text, lines, short, "ms a step", stacked=True)


def _points(curve: Curve) -> Points:
    return list(zip(curve.samples, curve.values, strict=True))


def _figure(
    title: str,
    text: str,
    lines: Sequence[Line],
    tick_of: Callable[[float], str],
    unit: str,
    zero: bool = True,
    stacked: bool = False,
) -> str:
    """Returns a plot over the training samples, or an empty text without lines."""
    if not lines:
        return ""
    return figure(
        title,
        text,
        lines,
        tick_of,
        unit=unit,
        x_of=short,
        x_unit="training samples",
        first_x=0.0,
        zero=zero,
        stacked=stacked,
    )


MAIN_NUMBERS = 3
"""How many of the numbers of a run are large."""
RUN_FILE = "run.json"
PAGE_FILE = "report.html"
TITLES = {"dlrm": "DLRM on a click log"}

ABOUT_CURVES = (
    "A point describes the steps since the previous point, so that the last point of"
    " the training loss is not the mean of the epoch above. Times are those of rank 0."
    " Lookups count each id of a step once. Ids without a row are new ids, ids whose row"
    " was evicted or has expired, and ids that are not admitted yet."
)


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
    text = _page(folder, read_about(folder), read_curves(folder))
    page = folder / PAGE_FILE
    write_whole(page, text.encode())
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


def _page(
    folder: Path,
    about: Mapping[str, Any],
    curves: Mapping[str, Curve],
) -> str:
    title = TITLES.get(about.get("example", ""), "Training run")
    result = about.get("result") or {}
    plots = "".join(draw(curves).values()) or "<p>The run has no point yet.</p>"
    plain_results = {}
    for name, value in result.items():
        if not isinstance(value, Mapping):
            plain_results[name] = value
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(_when(folder, about, curves))}</p>',
        _facts(result, curves),
        "<h2>Curves</h2>",
        f'<div class="plots">{plots}</div>',
        f'<p class="faint">{ABOUT_CURVES}</p>',
        "<h2>Tables</h2>",
        _tables(result, curves),
        '<div class="columns">',
        _section("Settings", about.get("settings") or {}),
        _section("Versions", about.get("versions") or {}),
        _section("Machine", about.get("machine") or {}),
        _section("Result", plain_results),
        "</div>",
    ]
    return document(f"{title} - {folder.absolute().name}", "\n".join(body))


def _when(
    folder: Path,
    about: Mapping[str, Any],
    curves: Mapping[str, Curve],
) -> str:
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
    """Returns the main numbers of a run as HTML.

    They are those of the result or, if there is no result, of the last points.
    """

    def last(tag: str) -> float | None:
        return curves[tag].values[-1] if tag in curves else None

    rows = result.get("rows")
    sizes = result.get("bytes")
    values = {
        "test AUC": result.get("test_auc"),
        "recall@10": result.get("recall_at_10"),
        "samples/s": result.get("train_samples_per_second"),
        "memory of tables": sum(sizes.values()) if sizes else last("memory/tables"),
        "test logloss": result.get("test_logloss"),
        "validation AUC": result.get("val_auc", last("AUC/validation")),
        "training loss, last epoch": result.get("train_loss"),
        "samples": result.get("train_samples"),
        "rows": sum(rows.values()) if rows else last(f"rows/{ALL}"),
        "memory of processes": last("memory/processes"),
    }
    if not result:  # the run has not ended
        values["training loss, last point"] = last("loss/training")
        values["samples/s, last point"] = last("speed/samples_per_second")
    shown = {}
    for name, value in values.items():
        if value is None:
            continue
        if name.startswith("memory"):
            shown[name] = short_bytes(value)
        elif abs(value) < 10:
            shown[name] = f"{value:.4f}"
        else:
            shown[name] = f"{value:,.0f}"
    return facts(shown, main=MAIN_NUMBERS)


def _section(title: str, values: Mapping[str, Any]) -> str:
    """Returns a table of names and values as HTML.

    A mapping becomes a line for each of its values.
    """
    shown: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            for part, part_value in value.items():
                if part_value is not None:  # None is a limit that is not set
                    shown[f"{name} {part}"] = part_value
        else:
            shown[name] = value
    if not shown:
        return ""
    lines = []
    for name, value in shown.items():
        label = escape(name.replace("_", " "))
        lines.append(f"<tr><th scope=row>{label}</th>{cell(plain(value))}</tr>")
    table = f"<table>{''.join(lines)}</table>"
    return f"<section><h2>{escape(title)}</h2>{table}</section>"


def _tables(result: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    """Returns a table of the statistics of each embedding table as HTML.

    Counts begin when the run was resumed.
    """
    rows = result.get("rows") or _last(curves, "rows")
    sizes = result.get("bytes") or _last(curves, "bytes")
    if not rows:
        return "<p>There are no statistics of the tables yet.</p>"
    # the cells of each column, one for each table, and the cell of their sum
    columns: dict[str, list[str]] = {
        "table": list(rows),
        "rows": [f"{rows[name]:,.0f}" for name in rows],
        "bytes": [short_bytes(sizes[name]) for name in rows],
    }
    sums = [
        ALL,
        f"{sum(rows.values()):,.0f}",
        short_bytes(sum(sizes.values())),
    ]
    note = None
    counts = {}
    for name, numbers in (result.get("counts") or {}).items():
        counts[name] = TableStats(**numbers)
    if counts:
        note = counted_since(result)
        tables = [counts.get(name, TableStats()) for name in rows]
        total_stats = total(counts)
        columns["hit rate"] = [_hit_share(stats) for stats in tables]
        sums.append(_hit_share(total_stats))
        for count in SHOWN_COUNTS:
            if getattr(total_stats, count):
                title = count.replace("_", " ")
                columns[title] = [f"{getattr(stats, count):,}" for stats in tables]
                sums.append(f"{getattr(total_stats, count):,}")

    cells_of_tables = zip(*columns.values(), strict=True)
    lines = "".join(_row("td", cells) for cells in cells_of_tables)
    head = _row("th", columns)
    foot = _row("td", sums)
    table = f"<thead>{head}</thead><tbody>{lines}</tbody><tfoot>{foot}</tfoot>"
    text = ""
    if note is not None:
        sentence = note[0].upper() + note[1:]
        text = f'<p class="faint">{escape(sentence)}</p>'
    return f'{text}<div class="wide"><table>{table}</table></div>'


def _hit_share(stats: TableStats) -> str:
    rate = hit_rate(stats)
    return "-" if rate is None else share(rate)


def _row(cell: str, texts: Iterable[str]) -> str:
    cells = [f"<{cell}>{escape(text)}</{cell}>" for text in texts]
    return f"<tr>{''.join(cells)}</tr>"


def _last(curves: Mapping[str, Curve], kind: str) -> dict[str, float]:
    """Returns the last value of the curve of each table."""
    by_table = _curves_of_tables(curves, kind)
    by_table.pop(ALL, None)
    return {table: curve.values[-1] for table, curve in by_table.items()}
