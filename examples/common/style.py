"""The pages that the examples write: the style sheet, parts of a page, and plots as
SVG.

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
REST = "#999"  # of lines without a name

SIDE = 1000
"""The width and the height of a plot in its own units, which stretch to the size on the
page.

Texts do not stretch.
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


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(COLOURS)};
  --back: #fff; --fore: #1a1a1a; --faint: #5c5c5c; --line: #d9d9d9; --card: #f6f6f6 }}
@media (prefers-color-scheme: dark) {{
  :root {{ {_variables(ON_BLACK)};
    --back: #16181c; --fore: #e8e8e8; --faint: #a5a5a5; --line: #3a3d42; --card: #202329 }}
}}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--back); color: var(--fore);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word }}
h1 {{ font-size: 1.6rem; margin: 0.5rem 0 }} h2 {{ font-size: 1.2rem; margin: 2rem 0 0.5rem }}
p {{ margin: 0.3rem 0 }} .faint {{ color: var(--faint) }}
.facts {{ display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 1rem 0; padding: 0 }}
.facts div {{ background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.5rem 1rem;
  flex: 1 1 8rem }}
.facts dt {{ color: var(--faint); font-size: 0.85rem }} .facts dd {{ margin: 0; font-size: 1.3rem; font-weight: 600 }}
.facts dd, .number {{ white-space: nowrap; font-variant-numeric: tabular-nums }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem }}
.columns {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem }}
figure {{ margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.75rem }}
.plot {{ padding: 1.7rem calc(var(--right) * 1ch + 1.9rem) 2.8rem calc(var(--left) * 1ch + 0.7rem); font-size: 0.8rem }}
.plot > svg {{ display: block; width: 100%; height: 15rem; overflow: visible }}
@media (max-width: {NARROW_REM}rem) {{ .plot .between {{ display: none }} table {{ font-size: 0.85rem }} }}
figure h3 {{ margin: 0 0 0.5rem; font-size: 1rem }}
figcaption {{ margin-top: 0.5rem; color: var(--faint); font-size: 0.85rem }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
td.long {{ overflow-wrap: anywhere }}
th, td {{ padding: 0.2rem 0.6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }}
.wide th, .wide td {{ text-align: right; white-space: nowrap }} .wide tr > :first-child {{ text-align: left }}
tfoot td {{ font-weight: 600 }}
"""


def document(title: str, body: str, head: str = "") -> str:
    """Returns a page as HTML.

    Args:
        title: The title of the page, as plain text.
        body: The body, as HTML.
        head: More elements of the head, as HTML. Default: none.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{head}<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def facts(shown: Mapping[str, str]) -> str:
    """Returns the main numbers of a page as HTML, by name."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in shown.items()
    )
    return f'<dl class="facts">{items}</dl>'


def cell(text: str) -> str:
    """Returns a cell of a table as HTML.

    Only a long text, such as a path, may break anywhere: a number must not.
    """
    return f'<td class="{"number" if len(text) < LONG else "long"}">{escape(text)}</td>'


def spread(places: list[float], gap: float) -> list[float]:
    """Moves ascending positions between 0 and 1 apart, to a distance of ``gap`` or less
    if there is not enough room.
    """
    gap = min(gap, 1 / max(len(places) - 1, 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
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
    left: float | None = None,
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
        left: The begin of the horizontal axis. Default: the smallest position.
        zero: Whether the vertical axis begins at zero.
        stacked: Whether the lines, which have the same positions, are areas on top of
            each other.
    """
    drawing = (
        _svg(lines, str_of, x_of, unit, x_unit, left, zero, stacked, text)
        if lines
        else "<p>No point yet.</p>"
    )
    return f"<figure><h3>{escape(title)}</h3>{drawing}<figcaption>{escape(text)}</figcaption></figure>"


def _svg(
    lines: Sequence[Line],
    str_of: Callable[[float], str],
    x_of: Callable[[float], str],
    unit: str,
    x_unit: str,
    left: float | None,
    zero: bool,
    stacked: bool,
    text: str,
) -> str:
    rest = [colour(number) for number in range(len(COLOURS))]
    chosen = [line.colour or rest.pop(0) for line in lines]
    paths = [list(line.points) for line in lines]
    if stacked:
        paths = _stacked(paths)
    xs = [x for path in paths for x, _ in path]
    ys = [y for path in paths for _, y in path if y is not None]
    first = min(xs) if left is None else left
    last = max(*xs, first + 1)
    ticks = _ticks(0.0 if zero or stacked else min(ys), max(ys), 5)
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - first) / (last - first) * SIDE, (high - y) / (high - low) * SIDE

    texts, grid, drawn = [], [], []
    heights = [str_of(tick) for tick in ticks]
    for tick, height in zip(ticks, heights, strict=True):
        at = place(first, tick)[1]
        grid.append(
            f'<path d="M0 {at:.1f}H{SIDE}" stroke="currentColor" stroke-opacity="0.15"'
            f" {_STEADY}/>"
        )
        texts.append(
            f'<text y="{at / SIDE:.2%}" dx="-8" dy="5"'
            f' text-anchor="end">{escape(height)}</text>'
        )
    shown = [tick for tick in _ticks(first, last, 6) if first <= tick <= last]
    for number, tick in enumerate(shown):
        kind = ' class="between"' if number % 2 and len(shown) > 3 else ""
        at = place(tick, low)[0] / SIDE
        texts.append(
            f'<text{kind} x="{at:.2%}" y="100%" dy="20"'
            f' text-anchor="middle">{escape(x_of(tick))}</text>'
        )
    labels = []
    for number, (line, path, paint) in enumerate(
        zip(lines, paths, chosen, strict=True)
    ):
        below = [(x, 0.0) for x, _ in path] if number == 0 else paths[number - 1]
        if stacked:
            corners = " ".join(
                f"{x:.1f},{y:.1f}"
                for x, y in (place(*point) for point in path + below[::-1])
            )
            drawn.append(f'<polygon points="{corners}" fill="{paint}"/>')
        else:
            drawn += _drawn(line, paint, place)
        if line.label:
            end = next(y for _, y in reversed(path) if y is not None)
            labels.append(
                (
                    place(last, (end + below[-1][1]) / 2 if stacked else end)[1] / SIDE,
                    line.label,
                    paint,
                )
            )
    labels.sort()
    ends = spread([at for at, *_ in labels], gap=0.07)
    for at, (_, label, paint) in zip(ends, labels, strict=True):
        mark = f'<tspan fill="{paint}">\u25a0</tspan>'
        texts.append(
            f'<text x="100%" y="{at:.2%}" dx="8" dy="5">{mark}<tspan'
            f' dx="5">{escape(label)}</tspan></text>'
        )
    room = (
        f"--left: {max(map(len, heights))}; --right:"
        f" {max((len(label) for _, label, _ in labels), default=0)}"
    )
    return (
        f'<div class="plot" style="{room}"><svg role="img" fill="currentColor"'
        f' aria-label="{escape(text)}">'
        f'<text dy="-14">{escape(unit)}</text>'
        f'<text x="50%" y="100%" dy="40" text-anchor="middle">{escape(x_unit)}</text>'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" width="100%"'
        ' height="100%" overflow="visible">'
        f"{''.join(grid + drawn)}</svg>{''.join(texts)}</svg></div>"
    )


# The width of a line does not stretch with the plot.
_STEADY = 'vector-effect="non-scaling-stroke"'


def _stacked(paths: list[Any]) -> list[Any]:
    """Returns the lines on top of each other."""
    if len(paths[0]) == 1:  # a single point has no area, so a bar is drawn
        paths = [[(x * 0.9, y), (x * 1.1, y)] for ((x, y),) in paths]
    for below, path in pairwise(paths):
        path[:] = [
            (x, y + bottom) for (x, y), (_, bottom) in zip(path, below, strict=True)
        ]
    return paths


def _drawn(
    line: Line, paint: str, place: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    """Draws the parts of a line between its gaps.

    Few points, and a point on its own, are dots.
    """
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in line.points:
        if y is not None:
            parts[-1].append(place(x, y))
        elif parts[-1]:
            parts.append([])
    width = 1 if line.colour == REST else 2.5
    paint = f'fill="none" stroke="{paint}" {_STEADY}'
    dashes = ' stroke-dasharray="6 5"' if line.dashed else ""
    drawn = []
    for part in filter(None, parts):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in part)
        drawn.append(
            f'<polyline points="{points}" {paint} stroke-width="{width}"{dashes}/>'
        )
    few = sum(map(len, parts)) < 20
    dots = [point for part in parts if few or len(part) == 1 for point in part]
    # A line of no length with round ends is a dot of the same size wherever the plot
    # stretches.
    if dots:
        ends = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in dots)
        drawn.append(
            f'<path d="{ends}" {paint} stroke-width="{2 * width + 1}"'
            ' stroke-linecap="round"/>'
        )
    return drawn


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Returns at most about ``most`` round numbers.

    The first is not above ``low``, and the last not below ``high``.
    """
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        high = low + (abs(low) or 1.0)
    step = 10 ** math.floor(math.log10((high - low) / most))
    step *= next(
        factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
