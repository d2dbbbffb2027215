"""Writes ``report.html`` with the settings, the result and the curves of a run, and the plots as PNG files."""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.report import ALL, PART_TITLES, counted_since, plain, share, short, short_bytes, total
from common.run_folder import has_curves, read_about, write_whole
from common.run_log import Curve, read_curves
from common.style import COLOURS, document, facts, spread

from torchrec_recstore import TableStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


REST = "#BBBBBB"
NAMED_TABLES = 5
INCHES, DPI = (6.0, 3.6), 130


class Plot(NamedTuple):
    """One plot.

    Attributes:
        name: The name of the file, without the extension.
        title: The title above the plot.
        text: A description with numbers, for readers who cannot see the plot.
        png: The image.
    """

    name: str
    title: str
    text: str
    png: bytes


def draw(curves: Mapping[str, Curve]) -> list[Plot]:
    """Draws all plots whose curves exist."""
    makers = (_loss, _auc, _rows, _unseen, _rates, _memory, _step_time, _speed, _learning_rate)
    return [plot for make in makers if (plot := make(curves)) is not None]


def _loss(curves: Mapping[str, Curve]) -> Plot | None:
    parts = {"training": "loss/training", "validation": "loss/validation", "test": "loss/test"}
    return _lines("loss", "Loss", curves, parts, "mean loss", "{:.4f}".format, "{:.3g}".format)


def _auc(curves: Mapping[str, Curve]) -> Plot | None:
    parts = {"training": "AUC/training", "validation": "AUC/validation", "test": "AUC/test"}
    return _lines("auc", "AUC", curves, parts, "area under the ROC curve", "{:.4f}".format, "{:.3g}".format)


def _rows(curves: Mapping[str, Curve]) -> Plot | None:
    return _per_table("rows", "Rows of each table", curves, "rows", "rows in memory", short)


def _unseen(curves: Mapping[str, Curve]) -> Plot | None:
    title = "Lookups of ids without a row"
    return _per_table("unseen", title, curves, "unseen_share", "share of the ids looked up", share)


def _rates(curves: Mapping[str, Curve]) -> Plot | None:
    parts = {name: f"{name}_rate/{ALL}" for name in ("hit", "insert", "eviction")}
    words = {"hit": "hits", "insert": "rows made", "eviction": "rows evicted"}
    tags = {words[name]: tag for name, tag in parts.items()}
    return _lines("rates", "Hits, inserts and evictions", curves, tags, "for each id looked up", share, zero=True)


def _memory(curves: Mapping[str, Curve]) -> Plot | None:
    parts = {"processes": "memory/processes", "of these, tables": "memory/tables"}
    return _lines("memory", "Memory", curves, parts, "bytes", short_bytes, zero=True)


def _speed(curves: Mapping[str, Curve]) -> Plot | None:
    parts = {"samples/s": "speed/samples_per_second"}
    return _lines("speed", "Speed", curves, parts, "training samples a second", short, zero=True)


def _learning_rate(curves: Mapping[str, Curve]) -> Plot | None:
    parts = {name: f"learning_rate/{name}" for name in ("embeddings", "dense")}
    if all(len(set(curves[tag].values)) == 1 for tag in parts.values() if tag in curves):
        return None  # constant rates are listed in the settings
    return _lines("learning_rate", "Learning rates", curves, parts, "rate", "{:.2g}".format, zero=True)


def _lines(
    name: str,
    title: str,
    curves: Mapping[str, Curve],
    parts: Mapping[str, str],
    unit: str,
    str_of: Callable[[float], str],
    tick_of: Callable[[float], str] | None = None,
    zero: bool = False,
) -> Plot | None:
    """Draws a line for each curve, with its label."""
    found = {label: curves[tag] for label, tag in parts.items() if tag in curves}
    if not found:
        return None
    picture = _Picture(unit, tick_of or str_of, zero)
    for (label, curve), colour in zip(found.items(), COLOURS, strict=False):
        picture.line(curve, colour, label)
    ends = ", ".join(f"{label} {str_of(curve.values[-1])}" for label, curve in found.items())
    return Plot(name, title, f"{title} over training samples ({unit}). At the end: {ends}.", picture.png())


def _per_table(
    name: str, title: str, curves: Mapping[str, Curve], kind: str, unit: str, str_of: Callable[[float], str]
) -> Plot | None:
    """Draws a line for each table. The tables that are highest at the end have a name; the other lines are grey."""
    tables = {tag.partition("/")[2]: curve for tag, curve in curves.items() if tag.startswith(f"{kind}/")}
    whole = tables.pop(ALL, None)
    if not tables:
        return None
    picture = _Picture(unit, str_of, zero=True)
    by_end = sorted(tables, key=lambda table: (tables[table].values[-1], sum(tables[table].values)), reverse=True)
    named, others = by_end[:NAMED_TABLES], by_end[NAMED_TABLES:]
    for number, table in enumerate(others):
        picture.line(tables[table], REST, f"{len(others)} other tables" if number == 0 else "", thin=True)
    for table, colour in zip(named, COLOURS, strict=False):
        picture.line(tables[table], colour, table)
    if kind != "rows" and whole is not None:
        picture.line(whole, "black", "all tables")
    ends = ", ".join(f"{table} {str_of(tables[table].values[-1])}" for table in named)
    total = "" if whole is None else f"; all tables {str_of(whole.values[-1])}"
    text = f"{title} over training samples ({unit}). Highest at the end: {ends}{total}."
    return Plot(name, title, text, picture.png())


def _step_time(curves: Mapping[str, Curve]) -> Plot | None:
    found = {title: curves[f"step_ms/{part}"] for part, title in PART_TITLES.items() if f"step_ms/{part}" in curves}
    if not found:
        return None
    picture = _Picture("ms a step", "{:.3g}".format, zero=True)
    picture.stack(found)
    whole = sum(sum(curve.values) for curve in found.values())
    shares = ", ".join(f"{title} {share(sum(curve.values) / whole)}" for title, curve in found.items())
    title = "Time of a step"
    return Plot("step_time", title, f"{title} on rank 0 over training samples, in ms. In all: {shares}.", picture.png())


class _Picture:
    """A plot over training samples, with the labels at the ends of the lines, where many names have room."""

    def __init__(self, unit: str, tick_of: Callable[[float], str], zero: bool) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        # pyplot is not used, because it keeps its figures as a state of the whole process.
        self._figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        FigureCanvasAgg(self._figure)
        axes: Axes = self._figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("training samples", fontsize=11)
        axes.set_ylabel(unit, fontsize=11)
        axes.tick_params(labelsize=11)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_of(value)))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        self._axes, self._zero = axes, zero
        self._labels: list[tuple[float, str, str]] = []  # height, text, colour

    def line(self, curve: Curve, colour: str, label: str, thin: bool = False) -> None:
        few = len(curve.samples) < 20
        self._axes.plot(
            curve.samples,
            curve.values,
            color=colour,
            linewidth=1.0 if thin else 2.0,
            marker="o" if few else None,
            markersize=2.5 if thin else 5,
            zorder=1.5 if thin else 2,
        )
        if label:
            self._labels.append((curve.values[-1], label, colour))

    def stack(self, curves: Mapping[str, Curve]) -> None:
        samples = next(iter(curves.values())).samples
        heights = [curve.values for curve in curves.values()]
        colours = COLOURS[: len(curves)]
        if len(samples) == 1:  # a single point has no area, so a bar is drawn
            self._axes.set_xticks(samples)
            bottom = 0.0
            for (height,), colour in zip(heights, colours, strict=True):
                self._axes.bar(samples, height, bottom=bottom, width=samples[0] * 0.2, color=colour)
                bottom += height
        else:
            self._axes.stackplot(samples, heights, colors=colours, linewidth=0)
        top = 0.0
        for (label, curve), colour in zip(curves.items(), colours, strict=True):
            self._labels.append((top + curve.values[-1] / 2, label, colour))
            top += curve.values[-1]

    def png(self) -> bytes:
        self._axes.set_xlim(left=0)
        if self._zero:
            self._axes.set_ylim(bottom=0)
        self._label_ends()
        file = BytesIO()
        self._figure.savefig(file, format="png")
        return file.getvalue()

    def _label_ends(self) -> None:
        low, high = self._axes.get_ylim()
        wanted = sorted(
            (min(max((height - low) / (high - low), 0), 1), text, colour) for height, text, colour in self._labels
        )
        places = spread([place for place, _, _ in wanted], gap=0.085)
        for place, (_, text, colour) in zip(places, wanted, strict=True):
            self._axes.text(
                1.02, place, text, transform=self._axes.transAxes, va="center", fontsize=11,
                color="#666666" if colour == REST else colour, fontweight="bold",
            )  # fmt: skip


PAGE_FILE = "report.html"
TITLES = {"dlrm": "DLRM on a click log", "two_tower": "Two-tower retrieval on MovieLens"}


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` and the plots as PNG files to the folder of a log. The run need not have ended.

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
    plots = draw(curves)
    for plot in plots:
        write_whole(folder / f"{plot.name}.png", plot.png)
    page = folder / PAGE_FILE
    write_whole(page, _page(folder, about, curves, plots).encode())
    return page


def show(log_dir: str | None) -> None:
    """Writes the report of a run that has ended and prints its path. An error is printed as a warning."""
    if log_dir is None:
        return
    try:
        print(f"report: {write_report(Path(log_dir))}", file=sys.stderr)
    except Exception as error:  # no error of the report may lose the result of the run
        print(f"warning: no report was made: {error}", file=sys.stderr)


def _page(folder: Path, about: Mapping[str, Any], curves: Mapping[str, Curve], plots: Sequence[Plot]) -> str:
    title = TITLES.get(about.get("example", ""), "Training run")
    result = about.get("result") or {}
    settings = about.get("settings") or {}
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(_when(folder, about, curves))}</p>',
        _facts(result, curves),
        "<h2>Curves</h2>",
        f'<div class="plots">{"".join(map(_figure, plots))}</div>' if plots else "<p>The run has no point yet.</p>",
        '<p class="faint">A point describes the steps since the previous point. Times are those of rank 0. Lookups '
        "count each id of a step once. Ids without a row are new ids, ids whose row was evicted or has expired, and "
        "ids that are not admitted yet.</p>",
        "<h2>Tables</h2>",
        _tables(result, curves),
        '<div class="columns">',
        _section("Settings", settings),
        _section("Versions", about.get("versions") or {}),
        _section("Machine", about.get("machine") or {}),
        _section("Result", {name: value for name, value in result.items() if not isinstance(value, Mapping)}),
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
    """Returns the main numbers as HTML, from the result or, if there is no result, from the last points."""

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
        "samples/s": result.get("train_samples_per_second", last("speed/samples_per_second")),
        "rows": sum(rows.values()) if rows else last(f"rows/{ALL}"),
        "memory": last("memory/processes"),
    }
    shown = {
        name: short_bytes(value) if name == "memory" else f"{value:.4f}" if abs(value) < 10 else f"{value:,.0f}"
        for name, value in values.items()
        if value is not None
    }
    return facts(shown)


def _figure(plot: Plot) -> str:
    data = b64encode(plot.png).decode("ascii")
    return (
        f"<figure><h3>{escape(plot.title)}</h3>"
        f'<img src="data:image/png;base64,{data}" alt="{escape(plot.text)}">'
        f"<figcaption>{escape(plot.text)}</figcaption></figure>"
    )


def _section(title: str, values: Mapping[str, Any]) -> str:
    """Returns a table of names and values as HTML. A mapping becomes a line for each of its values."""
    lines: list[str] = []
    for name, value in values.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for part, each in parts:
            if part and each is None:
                continue  # a limit that is not set
            whole = f"{name} {part}".strip().replace("_", " ")
            lines.append(f"<tr><th scope=row>{escape(whole)}</th><td>{escape(plain(each))}</td></tr>")
    return f"<section><h2>{escape(title)}</h2><table>{''.join(lines)}</table></section>" if lines else ""


def _tables(result: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    """Returns a table of the statistics of each embedding table as HTML. Counts begin when the run was resumed."""
    rows = result.get("rows") or _last(curves, "rows")
    sizes = result.get("bytes") or _last(curves, "bytes")
    counts = {name: TableStats(**each) for name, each in (result.get("counts") or {}).items()}
    if not rows:
        return "<p>There are no statistics of the tables yet.</p>"
    columns: dict[str, list[str]] = {"table": [*rows]}
    columns["rows"] = [f"{rows[name]:,.0f}" for name in rows]
    columns["bytes"] = [short_bytes(sizes[name]) for name in rows]
    foot = [ALL, f"{sum(rows.values()):,.0f}", short_bytes(sum(sizes.values()))]
    if counts:
        done = [counts.get(name, TableStats()) for name in rows]
        whole = total(counts)
        columns["hit rate"] = [share(stats.hits / stats.lookups) if stats.lookups else "-" for stats in done]
        foot.append(share(whole.hits / whole.lookups))
        for count in ("lookups", "inserts", "evicted", "expired", "refused", "cold_rows", "cold_hits"):
            if getattr(whole, count):
                columns[count.replace("_", " ")] = [f"{getattr(stats, count):,}" for stats in done]
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
    found = {tag.partition("/")[2]: curve.values[-1] for tag, curve in curves.items() if tag.startswith(f"{kind}/")}
    found.pop(ALL, None)
    return found
