"""Writes ``page.html``, which shows an online run while it runs: a page without scripts that loads itself again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from common.report import plain, short
from common.style import COLOURS, document, facts, spread

RELOAD_S = 2
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 58, 96, 12, 34
NAMES = {"trained": "trained", "served": "served", "frozen": "frozen"}

Points = Sequence[tuple[float, float]]


def page(state: Mapping[str, Any], live: bool) -> str:
    """Returns the page as HTML.

    Args:
        state: The state of the run; see ``Supervisor.state``.
        live: Whether the run goes on, so that the page loads itself again.
    """
    windows, samples, settings = state["windows"], state["samples"], state["settings"]
    last = windows[-1] if windows else {}
    now = samples[-1] if samples else {}
    shown = {
        "clicks trained": f"{state['offset']:,}",
        "samples/s": _number(now.get("samples_per_second"), short),
        **{f"AUC, {name}": _number(last.get(name, {}).get("auc"), "{:.3f}".format) for name in NAMES},
        "age of the served rows": _number(now.get("age_s"), "{:.1f} s".format),
        "rows": f"{sum(state['rows'].values()):,}",
        "rows expired": f"{state['expired']:,}",
        "restarts": f"{sum(each['restarts'] for each in state['processes'].values())}",
    }
    auc = {name: _of_windows(windows, name, "auc", settings["start_ms"]) for name in NAMES}
    calibration = {name: _of_windows(windows, name, "calibration", settings["start_ms"]) for name in NAMES}
    speed = {
        "trained": _of_samples(samples, "samples_per_second"),
        "clicks": [(each["second"], float(settings["rate"])) for each in samples],
    }
    ages = {"served": _of_samples(samples, "age_s"), "trainer": _of_samples(samples, "behind_s")}
    rows = {name: [(each["second"], each["rows"].get(name, 0)) for each in samples] for name in state["rows"]}
    plots = [
        _plot("AUC by window", "Each click is scored before the model is trained on it.", auc, "{:.2f}".format),
        _plot("Calibration by window", "The sum of the predictions over the clicks.", calibration, "{:.2f}".format),
        _plot("Speed", "Clicks that are trained and that arrive, a second.", speed, short, zero=True),
        _plot(
            "Age",
            "Seconds that the served rows, and the trainer, are behind the clicks.",
            ages,
            "{:.3g}".format,
            zero=True,
        ),
        _plot("Rows", "Rows of each table.", rows, short, zero=True),
        _plot("Expired", "Rows that have expired.", {"expired": _of_samples(samples, "expired")}, short, zero=True),
    ]
    body = [
        "<h1>Online training</h1>",
        f'<p class="faint">{escape(str(settings["folder"]))} · {escape(state["status"])}</p>',
        facts(shown),
        f'<div class="plots">{"".join(plots)}</div>',
        '<p class="faint">The horizontal axis has seconds; the clicks before 0 are the history, which is trained on '
        "before anything is published. <b>trained</b>: the model in the trainer. <b>served</b>: the model of "
        "<code>recstore follow</code>, at the moment at which the item was shown. <b>frozen</b>: the first full "
        "export.</p>",
        '<div class="columns">',
        _table("Processes", ["process", "pid", "restarts"], _processes(state)),
        _table("Settings", ["setting", "value"], [[name, plain(value)] for name, value in settings.items()]),
        "</div>",
    ]
    head = f'<meta http-equiv="refresh" content="{RELOAD_S}">\n' if live else ""
    return document("Online training", "\n".join(body), head)


def _of_windows(windows: Sequence[Mapping[str, Any]], name: str, metric: str, start_ms: int) -> Points:
    seconds = [(each["time_ms"] - start_ms) / 1000 for each in windows]
    values = [each[name][metric] for each in windows]
    return [(second, value) for second, value in zip(seconds, values, strict=True) if value is not None]


def _of_samples(samples: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(each["second"], each[name]) for each in samples if each[name] is not None]


def _processes(state: Mapping[str, Any]) -> list[list[str]]:
    return [[name, str(each["pid"]), str(each["restarts"])] for name, each in state["processes"].items()]


def _number(value: float | None, text_of: Any) -> str:
    return "-" if value is None else text_of(value)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<section><h2>{escape(title)}</h2><table><tr>{names}</tr>{cells}</table></section>"


def _plot(title: str, about: str, lines: Mapping[str, Points], text_of: Any, zero: bool = False) -> str:
    """Returns a figure as HTML, with the lines as SVG and their names at their ends."""
    found = {name: points for name, points in lines.items() if points}
    points = [point for line in found.values() for point in line]
    caption = "" if not found else f" Now: {', '.join(f'{n} {text_of(line[-1][1])}' for n, line in found.items())}."
    drawing = _svg(found, points, text_of, zero) if points else "<p>No point yet.</p>"
    return f"<figure><h3>{escape(title)}</h3>{drawing}<figcaption>{escape(about + caption)}</figcaption></figure>"


def _svg(lines: Mapping[str, Points], points: Points, text_of: Any, zero: bool) -> str:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right = min(xs), max(max(xs), min(xs) + 1)
    ticks = _ticks(0.0 if zero else min(ys), max(ys), 5)
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="14" fill="currentColor">']
    for tick in ticks:
        (x1, y), (x2, _) = place(left, tick), place(right, tick)
        parts.append(f'<path d="M{x1:.1f} {y:.1f}H{x2:.1f}" stroke="currentColor" stroke-opacity="0.15"/>')
        parts.append(f'<text x="{x1 - 8:.1f}" y="{y + 5:.1f}" text-anchor="end">{text_of(tick)}</text>')
    for tick in _ticks(left, right, 6):
        if left <= tick <= right:
            x, y = place(tick, low)
            parts.append(f'<text x="{x:.1f}" y="{y + 22:.1f}" text-anchor="middle">{tick:g}</text>')
    ends = sorted((place(*line[-1])[1], name) for name, line in lines.items())
    heights = spread([(y - TOP) / (HEIGHT - TOP - BOTTOM) for y, _ in ends], gap=0.065)
    labels = {name: TOP + height * (HEIGHT - TOP - BOTTOM) for (_, name), height in zip(ends, heights, strict=True)}
    for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        x = WIDTH - RIGHT + 8
        parts.append(
            f'<text x="{x}" y="{labels[name] + 5:.1f}" fill="{colour}" font-weight="700">{escape(name)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Returns at most about ``most`` round numbers. The first is not above ``low``, and the last not below ``high``."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        high = low + (abs(low) or 1.0)
    step = 10 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
