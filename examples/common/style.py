"""The pages that the examples write: style sheet, parts of a page, and SVG plots.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

# Colours that colour-blind readers can distinguish. Source: Okabe and Ito, Color
# Universal Design, 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ON_BLACK = ("#56B4E9", "#FF8C4C", "#2FCB9B", "#E39CC4", "#F0C04A", "#A5D8F5")
REST = "#999"
"""The colour of lines without a name."""

SIDE = 1000
"""The width and the height of a plot in its own units.

The units stretch to the size on the page. Texts do not stretch.
"""
LONG = 28  # characters
# At this width of the page and below, a plot has fewer numbers on its horizontal axis.
NARROW_REM = 40

Points = Sequence[tuple[float, float | None]]
"""Points (x, y) with ascending x. Where y is None, a line is interrupted."""


def colour(number: int) -> str:
    """Returns a colour of ``COLOURS`` for CSS. It is a lighter one on a dark page."""
    return f"var(--c{number}, {COLOURS[number]})"


def _variables(colours: Sequence[str]) -> str:
    return "; ".join(f"--c{number}: {colour}" for number, colour in enumerate(colours))


# The sheet is the same for every page; the colours stand in variables.
_SHEET = """
* { box-sizing: border-box }
body {
  margin: 0 auto;
  padding: 1rem;
  max-width: 84rem;
  background: var(--back);
  color: var(--fore);
  font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: break-word;
}
h1 { font-size: 1.6rem; margin: 0.5rem 0 }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem }
p { margin: 0.3rem 0 }
.faint { color: var(--faint) }

.facts {
  display: flex;
  flex-wrap: wrap;
  gap: 0.75rem;
  margin: 1rem 0;
  padding: 0;
}
.facts div {
  background: var(--card);
  border: 1px solid var(--line);
  border-radius: 0.5rem;
  padding: 0.5rem 1rem;
  flex: 1 1 8rem;
}
.facts dt { color: var(--faint); font-size: 0.85rem }
.facts dd { margin: 0; font-size: 1.3rem; font-weight: 600 }
.main { margin-bottom: 0.75rem }
.main div { flex-basis: 14rem }
.main dt { font-size: 1rem }
.main dd { font-size: 2.2rem; line-height: 1.3 }
.main + .facts { margin-top: 0; gap: 0.5rem }
.main + .facts div { padding: 0.3rem 0.75rem; flex-basis: 7rem }
.main + .facts dd { font-size: 1rem }
.facts dd, .number { white-space: nowrap; font-variant-numeric: tabular-nums }

.plots {
  display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr));
  gap: 1rem;
}
.columns {
  display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 0 2rem;
}

figure {
  margin: 0;
  background: var(--card);
  border: 1px solid var(--line);
  border-radius: 0.5rem;
  padding: 0.75rem;
}
.plot {
  padding-top: 1.7rem;
  padding-right: calc(var(--right) * 1ch + 1.9rem);
  padding-bottom: 2.8rem;
  padding-left: calc(var(--left) * 1ch + 0.7rem);
  font-size: 0.8rem;
}
.plot > svg { display: block; width: 100%; height: 15rem; overflow: visible }
figure h3 { margin: 0 0 0.5rem; font-size: 1rem }
figcaption { margin-top: 0.5rem; color: var(--faint); font-size: 0.85rem }

.wide { overflow-x: auto }
table {
  border-collapse: collapse;
  width: 100%;
  font-variant-numeric: tabular-nums;
}
td.long { overflow-wrap: anywhere }
th, td {
  padding: 0.2rem 0.6rem;
  border-bottom: 1px solid var(--line);
  text-align: left;
  vertical-align: top;
}
.wide th, .wide td { text-align: right; white-space: nowrap }
.wide tr > :first-child { text-align: left }
tfoot td { font-weight: 600 }
"""

STYLE = f"""
:root {{
  color-scheme: light dark;
  {_variables(COLOURS)};
  --back: #fff;
  --fore: #1a1a1a;
  --faint: #5c5c5c;
  --line: #d9d9d9;
  --card: #f6f6f6;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    {_variables(ON_BLACK)};
    --back: #16181c;
    --fore: #e8e8e8;
    --faint: #a5a5a5;
    --line: #3a3d42;
    --card: #202329;
  }}
}}
{_SHEET}
@media (max-width: {NARROW_REM}rem) {{
  .plot .between {{ display: none }}
  table {{ font-size: 0.85rem }}
}}
"""


def document(title: str, body: str, head: str = "") -> str:
    """Returns a page as HTML.

    Args:
        title: The title of the page, as plain text.
        body: The body, as HTML.
        head: More elements of the head, as HTML. Default: none.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{head}<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def facts(shown: Mapping[str, str], main: int = 0) -> str:
    """Returns the numbers of a page as HTML, by name.

    Args:
        shown: The numbers, the most important ones first.
        main: How many of them are large, in a row of their own. Default: 0, all have
            the same size.
    """
    items = []
    for name, value in shown.items():
        items.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>")
    rest = f'<dl class="facts">{"".join(items[main:])}</dl>'
    if not main:
        return rest
    return f'<dl class="facts main">{"".join(items[:main])}</dl>{rest}'


def cell(text: str) -> str:
    """Returns a cell of a table as HTML.

    Only a long text, such as a path, may break anywhere: a number must not.
    """
    kind = "number" if len(text) < LONG else "long"
    return f'<td class="{kind}">{escape(text)}</td>'


def spread(places: list[float], gap: float) -> list[float]:
    """Moves ascending positions between 0 and 1 apart, to a distance of ``gap``.

    The distance is smaller if there is not enough room.
    """
    num_gaps = max(len(places) - 1, 1)
    gap = min(gap, 1 / num_gaps)
    moved: list[float] = []
    for place in places:
        if moved:
            place = max(place, moved[-1] + gap)
        moved.append(place)
    limit = 1.0
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], limit)
        limit = moved[number] - gap
    return moved


class Line(NamedTuple):
    """A line of a plot.

    Attributes:
        label: The name at the end of the line. Empty: the line has none.
        points: The points. At least one has a height.
        colour: A colour of CSS. Default: the colour that follows those of the lines
            before.
        dashed: Whether the line is dashed.
    """

    label: str
    points: Points
    colour: str = ""
    dashed: bool = False


def figure(
    title: str,
    text: str,
    lines: Sequence[Line],
    str_of: Callable[[float], str],
    *,
    x_of: Callable[[float], str] = "{:g}".format,
    unit: str = "",
    x_unit: str = "",
    first_x: float | None = None,
    zero: bool = False,
    stacked: bool = False,
) -> str:
    """Returns a plot as HTML, with its title and its text below.

    Args:
        title: The title.
        text: A description with numbers, for readers who cannot see the plot.
        lines: The lines. Without lines, the figure says so.
        str_of: A function that formats a height.
        x_of: A function that formats a position on the horizontal axis.
        unit: The unit of the heights.
        x_unit: The unit of the horizontal axis.
        first_x: The begin of the horizontal axis. Default: the smallest position.
        zero: Whether the vertical axis begins at zero.
        stacked: Whether the lines, which have the same positions, are areas on top of
            each other.
    """
    if lines:
        paths = [list(line.points) for line in lines]
        if stacked:
            paths = _stacked(paths)
        axes = _axes(paths, first_x, from_zero=zero or stacked)
        drawing = _svg(lines, paths, axes, str_of, x_of, unit, x_unit, stacked, text)
    else:
        drawing = "<p>No point yet.</p>"
    caption = f"<figcaption>{escape(text)}</figcaption>"
    return f"<figure><h3>{escape(title)}</h3>{drawing}{caption}</figure>"


class _Axes(NamedTuple):
    """The axes of a plot.

    Attributes:
        first_x: The begin of the horizontal axis.
        last_x: The end of the horizontal axis.
        ticks: The marked heights. The first and the last are the ends of the vertical
            axis.
    """

    first_x: float
    last_x: float
    ticks: list[float]

    def place_x(self, x: float) -> float:
        """Returns a horizontal position in units of the plot."""
        return (x - self.first_x) / (self.last_x - self.first_x) * SIDE

    def place_y(self, y: float) -> float:
        """Returns a vertical position in units of the plot, from the top."""
        low = self.ticks[0]
        high = self.ticks[-1]
        return (high - y) / (high - low) * SIDE


def _axes(
    paths: list[Any],
    first_x: float | None,
    from_zero: bool,
) -> _Axes:
    """Returns the axes of a plot that has room for all points."""
    points = [point for path in paths for point in path]
    xs = [x for x, _ in points]
    ys = [y for _, y in points if y is not None]
    if first_x is None:
        first_x = min(xs)
    low = 0.0 if from_zero else min(ys)
    return _Axes(
        first_x=first_x,
        last_x=max(*xs, first_x + 1),
        ticks=_ticks(low, max(ys), max_ticks=5),
    )


def _svg(
    lines: Sequence[Line],
    paths: list[Any],
    axes: _Axes,
    str_of: Callable[[float], str],
    x_of: Callable[[float], str],
    unit: str,
    x_unit: str,
    stacked: bool,
    text: str,
) -> str:
    """Draws the lines between their axes, and their labels beside them."""
    grid = [_grid_line(axes.place_y(tick)) for tick in axes.ticks]
    if axes.first_x < 0 < axes.last_x:
        grid.append(_zero_line(axes.place_x(0.0)))
    heights = [str_of(tick) for tick in axes.ticks]
    texts = _y_texts(axes, heights) + _x_texts(axes, x_of)

    shapes: list[str] = []
    labels: list[tuple[float, str, str]] = []  # height, label, colour
    unused_colours = [colour(number) for number in range(len(COLOURS))]
    for number, (line, path) in enumerate(zip(lines, paths, strict=True)):
        paint = line.colour or unused_colours.pop(0)
        label_y = next(y for _, y in reversed(path) if y is not None)
        if stacked:
            bottom = [(x, 0.0) for x, _ in path]
            if number > 0:
                bottom = paths[number - 1]
            _, bottom_y = bottom[-1]
            label_y = (label_y + bottom_y) / 2
            shapes.append(_area(path + bottom[::-1], paint, axes))
        else:
            shapes += _line(line, paint, axes)
        if line.label:
            labels.append((axes.place_y(label_y) / SIDE, line.label, paint))
    labels.sort()
    texts += _label_texts(labels)

    longest_height = max(len(height) for height in heights)
    longest_label = max((len(label) for _, label, _ in labels), default=0)
    return (
        f'<div class="plot" style="--left: {longest_height}; --right: {longest_label}">'
        f'<svg role="img" fill="currentColor" aria-label="{escape(text)}">'
        f'<text dy="-14">{escape(unit)}</text>'
        f'<text x="50%" y="100%" dy="40" text-anchor="middle">{escape(x_unit)}</text>'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none"'
        ' width="100%" height="100%" overflow="visible">'
        f"{''.join(grid + shapes)}</svg>{''.join(texts)}</svg></div>"
    )


# The width of a line does not stretch with the plot.
_STEADY = 'vector-effect="non-scaling-stroke"'


def _grid_line(y: float) -> str:
    return (
        f'<path d="M0 {y:.1f}H{SIDE}" stroke="currentColor" stroke-opacity="0.15"'
        f" {_STEADY}/>"
    )


def _zero_line(x: float) -> str:
    return (
        f'<path d="M{x:.1f} 0V{SIDE}" stroke="currentColor" stroke-opacity="0.5"'
        f' stroke-dasharray="2 4" {_STEADY}/>'
    )


def _y_texts(axes: _Axes, heights: Sequence[str]) -> list[str]:
    """Returns the numbers beside the vertical axis."""
    texts = []
    for tick, height in zip(axes.ticks, heights, strict=True):
        y = axes.place_y(tick) / SIDE
        texts.append(
            f'<text y="{y:.2%}" dx="-8" dy="5" text-anchor="end">{escape(height)}</text>'
        )
    return texts


def _x_texts(axes: _Axes, x_of: Callable[[float], str]) -> list[str]:
    """Returns the numbers below the horizontal axis. A narrow page shows every other."""
    ticks = _ticks(axes.first_x, axes.last_x, max_ticks=6)
    ticks = [tick for tick in ticks if axes.first_x <= tick <= axes.last_x]
    texts = []
    for number, tick in enumerate(ticks):
        hidden_if_narrow = number % 2 == 1 and len(ticks) > 3
        kind = ' class="between"' if hidden_if_narrow else ""
        x = axes.place_x(tick) / SIDE
        texts.append(
            f'<text{kind} x="{x:.2%}" y="100%" dy="20"'
            f' text-anchor="middle">{escape(x_of(tick))}</text>'
        )
    return texts


def _label_texts(labels: list[tuple[float, str, str]]) -> list[str]:
    """Returns the labels at the ends of the lines, from (height, label, colour)."""
    heights = spread([height for height, _, _ in labels], gap=0.07)
    texts = []
    for y, (_, label, paint) in zip(heights, labels, strict=True):
        square = f'<tspan fill="{paint}">\u25a0</tspan>'
        name = f'<tspan dx="5">{escape(label)}</tspan>'
        texts.append(f'<text x="100%" y="{y:.2%}" dx="8" dy="5">{square}{name}</text>')
    return texts


def _stacked(paths: list[Any]) -> list[Any]:
    """Returns the lines on top of each other."""
    if len(paths[0]) == 1:  # a single point has no area, so a bar is drawn
        bars = []
        for path in paths:
            x, y = path[0]
            bars.append([(x * 0.9, y), (x * 1.1, y)])
        paths = bars
    for below, path in pairwise(paths):
        for number, ((x, y), (_, bottom)) in enumerate(zip(path, below, strict=True)):
            path[number] = (x, y + bottom)
    return paths


def _area(
    outline: list[tuple[float, float]],
    paint: str,
    axes: _Axes,
) -> str:
    corners = [(axes.place_x(x), axes.place_y(y)) for x, y in outline]
    return f'<polygon points="{_places(corners)}" fill="{paint}"/>'


def _places(points: list[tuple[float, float]]) -> str:
    """Returns points of the plot as an attribute of SVG."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _line(line: Line, paint: str, axes: _Axes) -> list[str]:
    """Draws the parts of a line between its gaps.

    The points of a line of few points, and a point on its own, are dots.
    """
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in line.points:
        if y is not None:
            parts[-1].append((axes.place_x(x), axes.place_y(y)))
        elif parts[-1]:
            parts.append([])
    if not parts[-1]:
        parts.pop()
    has_few_points = sum(len(part) for part in parts) < 20

    width = 1 if line.colour == REST else 2.5
    paint = f'fill="none" stroke="{paint}" {_STEADY}'
    dashes = ' stroke-dasharray="6 5"' if line.dashed else ""
    shapes = []
    dots = []
    for part in parts:
        shapes.append(
            f'<polyline points="{_places(part)}" {paint}'
            f' stroke-width="{width}"{dashes}/>'
        )
        if has_few_points or len(part) == 1:
            dots += part
    # A line of no length with round ends is a dot of the same size wherever the plot
    # stretches.
    if dots:
        ends = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in dots)
        shapes.append(
            f'<path d="{ends}" {paint} stroke-width="{2 * width + 1}"'
            ' stroke-linecap="round"/>'
        )
    return shapes


def _ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Returns at most about ``max_ticks`` round numbers.

    The first is not above ``low``, and the last not below ``high``.
    """
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        high = low + (abs(low) or 1.0)
    smallest_step = (high - low) / max_ticks
    step = 10 ** math.floor(math.log10(smallest_step))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= max_ticks:
            break
    step *= factor
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
