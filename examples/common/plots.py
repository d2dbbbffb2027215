"""The plots of a run's report, drawn from its curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from common.curves import Curve
from common.words import ALL, PART_TITLES, share, short, short_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by the colour-blind too. Source: Okabe and Ito, Color Universal Design, 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
REST = "#BBBBBB"
NAMED_TABLES = 5
INCHES, DPI = (6.0, 3.6), 130


class Plot(NamedTuple):
    """One plot.

    Attributes:
        name: of its file, without the ending.
        title: shown over it.
        text: what it shows, in words and numbers, for who does not see it.
        png: the picture.
    """

    name: str
    title: str
    text: str
    png: bytes


def draw(curves: Mapping[str, Curve]) -> list[Plot]:
    """Draws what there are curves of."""
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
        return None  # constant: that stands among the settings
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
    """One line a curve, by their labels."""
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
    """One line a table: those highest at the end by name, the others in grey."""
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
    """A plot over training samples, labelled at the lines' ends, where there is room for the names of any number."""

    def __init__(self, unit: str, tick_of: Callable[[float], str], zero: bool) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        # Without pyplot, whose figures are the whole process's.
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
        if len(samples) == 1:  # no area: a bar
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


def spread(places: list[float], gap: float) -> list[float]:
    """Moves ascending places, from 0 to 1, as far apart as ``gap``, where that many have room."""
    gap = min(gap, 1 / max(len(places) - 1, 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    limit = 1.0
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], limit)
        limit = moved[number] - gap
    return moved
