"""Writes ``page.html``, which shows an online run while it runs: a page without scripts
that loads itself again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from common.report import plain, share, short
from common.style import Line, Points, cell, colour, document, facts, figure
from online.clicks import LATE_S

RELOAD_S = 2
NAMES = ("trained", "served", "frozen")
SERVERS = ("served", "frozen")
PAINTS = {name: colour(number) for number, name in enumerate((*NAMES, "clicks"))} | {
    "expired": "currentColor"
}
"""The colour of each line but those of the tables, which have the colours after these.
"""
SECONDS = "{:.1f} s".format


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
        **{
            f"AUC, {name}": _number(last.get(name, {}).get("auc"), "{:.3f}".format)
            for name in NAMES
        },
        "age of the served rows": _number(now.get("age_s"), SECONDS),
        "age, p50 and p99": (
            f"{_number(state['age_p50_s'], SECONDS)},"
            f" {_number(state['age_p99_s'], SECONDS)}"
        ),
        **{
            f"unanswered, {name}": _unanswered(state["outcomes"].get(name, {}))
            for name in SERVERS
        },
        "late clicks": f"{state['late']:,}",
        "rows": f"{sum(state['rows'].values()):,}",
        "rows expired": f"{state['expired']:,}",
        "restarts": f"{sum(each['restarts'] for each in state['processes'].values())}",
    }
    auc = {
        name: _of_windows(windows, name, "auc", settings["start_ms"]) for name in NAMES
    }
    calibration = {
        name: _of_windows(windows, name, "calibration", settings["start_ms"])
        for name in NAMES
    }
    speed = {
        "trained": _of_samples(samples, "samples_per_second"),
        "clicks": _of_samples(samples, "clicks_per_second"),
    }
    ages = {
        "served": _of_samples(samples, "age_s"),
        "trained": _of_samples(samples, "behind_s"),
    }
    answered = {
        name: _of_windows(live_windows(state), name, "answered", settings["start_ms"])
        for name in SERVERS
    }
    rows = {
        name: [(each["second"], each["rows"].get(name, 0)) for each in samples]
        for name in state["rows"]
    }
    plots = [
        _plot(
            "AUC by window",
            "Each click is scored before the model is trained on it.",
            auc,
            "{:.2f}".format,
        ),
        _plot(
            "Calibration by window",
            "The sum of the predictions over the clicks.",
            calibration,
            "{:.2f}".format,
        ),
        _plot(
            "Speed",
            "Clicks that are trained and that arrive, a second.",
            speed,
            short,
            zero=True,
        ),
        _plot(
            "Age",
            "Seconds that the served rows, and the trained model, are behind the"
            " clicks. The rows of a follower that does not answer become older.",
            ages,
            "{:.3g}".format,
            zero=True,
        ),
        _plot(
            "Answered",
            "The share of the clicks that a server has scored.",
            answered,
            share,
            zero=True,
        ),
        _plot("Rows", "Rows of each table.", rows, short, zero=True),
        _plot(
            "Expired",
            "Rows that have expired.",
            {"expired": _of_samples(samples, "expired")},
            short,
            zero=True,
        ),
    ]
    body = [
        "<h1>Online training</h1>",
        (
            f'<p class="faint">{escape(str(settings["folder"]))} ·'
            f" {escape(state['status'])} · written at"
            f" {datetime.now():%Y-%m-%d %H:%M:%S}</p>"
        ),
        facts(shown),
        f'<div class="plots">{"".join(plots)}</div>',
        (
            '<p class="faint">The horizontal axis has seconds; the clicks before 0 are'
            " the history, which is trained on before anything is published. A line"
            " has a gap where nothing is known. <b>trained</b>: the model in the"
            " trainer. <b>served</b>: the model of <code>recstore follow</code>, at"
            " the moment at which the item was shown. <b>frozen</b>: the first full"
            " export. A click is <b>unanswered</b> if it was shown without a score,"
            f" and <b>late</b> if it was written more than {LATE_S:g} s after its time."
            " p50 and p99 are over all live clicks, the unanswered ones included.</p>"
        ),
        '<div class="columns">',
        _table("Processes", ["process", "pid", "restarts"], _processes(state)),
        _table(
            "Settings",
            ["setting", "value"],
            [[name, plain(value)] for name, value in settings.items()],
        ),
        "</div>",
    ]
    head = f'<meta http-equiv="refresh" content="{RELOAD_S}">\n' if live else ""
    return document("Online training", "\n".join(body), head)


def live_windows(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the windows without a click of the history, for which no server was
    asked.
    """
    first = state["settings"]["history"] + state["settings"]["window"]
    return [window for window in state["windows"] if window["last"] >= first]


def _of_windows(
    windows: Sequence[Mapping[str, Any]], name: str, metric: str, start_ms: int
) -> Points:
    seconds = [(each["time_ms"] - start_ms) / 1000 for each in windows]
    values = [each[name][metric] for each in windows]
    return list(zip(seconds, values, strict=True))


def _of_samples(samples: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(each["second"], each[name]) for each in samples]


def _unanswered(outcomes: Mapping[str, int]) -> str:
    return f"{sum(count for outcome, count in outcomes.items() if outcome != 'answered'):,}"


def _processes(state: Mapping[str, Any]) -> list[list[str]]:
    return [
        [name, str(each["pid"]), str(each["restarts"])]
        for name, each in state["processes"].items()
    ]


def _number(value: float | None, text_of: Any) -> str:
    return "-" if value is None else text_of(value)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<section><h2>{escape(title)}</h2><table><tr>{names}</tr>{cells}</table></section>"


def _plot(
    title: str,
    about: str,
    lines: Mapping[str, Points],
    text_of: Any,
    zero: bool = False,
) -> str:
    """Returns a figure as HTML, with a line for each name that has points.

    A name has one colour in all figures.
    """
    tables = [name for name in lines if name not in PAINTS]
    paints = PAINTS | {
        name: colour(len(NAMES) + 1 + number % 2) for number, name in enumerate(tables)
    }
    found = [
        Line(name, points, paints[name])
        for name, points in lines.items()
        if any(y is not None for _, y in points)
    ]
    now = ", ".join(
        f"{line.label} {_number(line.points[-1][1], text_of)}" for line in found
    )
    caption = f" Now: {now}." if found else ""
    return figure(title, about + caption, found, text_of, zero=zero)
