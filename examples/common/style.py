"""The pages that the examples write: the style sheet, parts of a page, and plots as SVG. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

# Colours that colour-blind readers can distinguish. Source: Okabe and Ito, Color Universal Design, 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ON_BLACK = ("#56B4E9", "#FF8C4C", "#2FCB9B", "#E39CC4", "#F0C04A", "#A5D8F5")
REST = "#999"  # of lines without a name

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 348, 62, 130, 34, 44

Points = Sequence[tuple[float, float]]


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
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }}
h1 {{ font-size: 1.6rem; margin: 0.5rem 0 }} h2 {{ font-size: 1.2rem; margin: 2rem 0 0.5rem }}
p {{ margin: 0.3rem 0 }} .faint {{ color: var(--faint) }}
.facts {{ display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 1rem 0; padding: 0 }}
.facts div {{ background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.5rem 1rem;
  flex: 1 1 8rem }}
.facts dt {{ color: var(--faint); font-size: 0.85rem }} .facts dd {{ margin: 0; font-size: 1.3rem; font-weight: 600 }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem }}
.columns {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem }}
figure {{ margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.75rem }}
figure svg {{ display: block; width: 100%; height: auto }}
figure h3 {{ margin: 0 0 0.5rem; font-size: 1rem }}
figcaption {{ margin-top: 0.5rem; color: var(--faint); font-size: 0.85rem }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
th {{ overflow-wrap: normal }}
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
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown.items())
    return f'<dl class="facts">{items}</dl>'


def spread(places: list[float], gap: float) -> list[float]:
    """Moves ascending positions between 0 and 1 apart, to a distance of ``gap`` or less if there is not enough room."""
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
        points: The points, (x, y), with ascending x. At least one.
        colour: A colour of CSS. Default: the colour that follows those of the lines before.
    """

    label: str
    points: Points
    colour: str = ""


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
        stacked: Whether the lines, which have the same positions, are areas on top of each other.
    """
    drawing = _svg(lines, str_of, x_of, unit, x_unit, left, zero, stacked, text) if lines else "<p>No point yet.</p>"
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
    colours = [f"var(--c{number}, {colour})" for number, colour in enumerate(COLOURS)]
    chosen = [line.colour or colours.pop(0) for line in lines]
    paths = [list(line.points) for line in lines]
    if stacked:
        if len(paths[0]) == 1:  # a single point has no area, so a bar is drawn
            paths = [[(x * 0.9, y), (x * 1.1, y)] for ((x, y),) in paths]
        for below, path in pairwise(paths):
            path[:] = [(x, y + bottom) for (x, y), (_, bottom) in zip(path, below, strict=True)]
    xs, ys = zip(*(point for path in paths for point in path), strict=True)
    first = min(xs) if left is None else left
    last = max(*xs, first + 1)
    ticks = _ticks(0.0 if zero or stacked else min(ys), max(ys), 5)
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="14" '
        f'font-family="system-ui, sans-serif" fill="currentColor" aria-label="{escape(text)}">',
        f'<text x="4" y="14">{escape(unit)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_unit)}</text>',
    ]
    for tick in ticks:
        (x1, y), (x2, _) = place(first, tick), place(last, tick)
        parts.append(f'<path d="M{x1:.1f} {y:.1f}H{x2:.1f}" stroke="currentColor" stroke-opacity="0.15"/>')
        parts.append(f'<text x="{x1 - 8:.1f}" y="{y + 5:.1f}" text-anchor="end">{escape(str_of(tick))}</text>')
    for tick in _ticks(first, last, 6):
        if first <= tick <= last:
            x, y = place(tick, low)
            parts.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{escape(x_of(tick))}</text>')
    labels = []
    for number, (line, path, colour) in enumerate(zip(lines, paths, chosen, strict=True)):
        below = [(x, 0.0) for x, _ in path] if number == 0 else paths[number - 1]
        outline = path + below[::-1] if stacked else path
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in outline))
        if stacked:
            parts.append(f'<polygon points="{drawn}" fill="{colour}"/>')
        else:
            width = 1 if line.colour == REST else 2.5
            parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        if not stacked and len(path) < 20:
            dots = (place(*point) for point in path)
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width + 0.5}" fill="{colour}"/>' for x, y in dots]
        if line.label:
            end = (path[-1][1] + below[-1][1]) / 2 if stacked else path[-1][1]
            labels.append((place(last, end)[1], line.label, colour))
    labels.sort()
    heights = spread([(y - TOP) / (HEIGHT - TOP - BOTTOM) for y, *_ in labels], gap=0.062)
    for height, (_, label, colour) in zip(heights, labels, strict=True):
        y = TOP + height * (HEIGHT - TOP - BOTTOM) + 5
        at = f'x="{WIDTH - RIGHT + 8}" y="{y:.1f}"'
        parts.append(f'<text {at} fill="{colour}" font-weight="700">{escape(label)}</text>')
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Returns at most about ``most`` round numbers. The first is not above ``low``, and the last not below ``high``."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        high = low + (abs(low) or 1.0)
    step = 10 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
