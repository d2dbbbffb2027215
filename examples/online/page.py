"""Writes ``page.html``, which shows an online run while it runs.

The page has no scripts. It loads itself again.
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
PAINTS = {
    "trained": colour(0),
    "served": colour(1),
    "frozen": colour(2),
    "clicks": colour(3),
    "expired": "currentColor",
}
"""The colours of all lines but those of the tables."""
TABLE_PAINTS = (colour(4), colour(5))
SECONDS = "{:.1f} s".format

MAIN_NUMBERS = 3
"""How many of the numbers are large."""

ABOUT_PLOTS = (
    "The horizontal axis has the seconds since the first live click. The clicks before"
    " 0, left of the dotted line, are the history, which is trained on before anything"
    " is published. A line has a gap where nothing is known."
    " <b>trained</b>: the model in the trainer. <b>served</b>: the model of"
    " <code>recstore follow</code>, at the moment at which the item was shown."
    " <b>frozen</b>: the first full export. A click is <b>unanswered</b> if it was"
    " shown without a score, and <b>late</b> if it was written more than"
    f" {LATE_S:g} s after its time. p50 and p99 are over all live clicks, the"
    " unanswered ones included."
)


def page(state: Mapping[str, Any], live: bool) -> str:
    """Returns the page as HTML.

    Args:
        state: The state of the run; see ``Supervisor.state``.
        live: Whether the run goes on, so that the page loads itself again.
    """
    settings = state["settings"]
    when = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    settings_rows = [[name, plain(value)] for name, value in settings.items()]
    body = [
        "<h1>Online training</h1>",
        (
            f'<p class="faint">{escape(str(settings["folder"]))} ·'
            f" {escape(state['status'])} · written at {when}</p>"
        ),
        facts(_numbers(state), main=MAIN_NUMBERS),
        f'<div class="plots">{"".join(_plots(state))}</div>',
        f'<p class="faint">{ABOUT_PLOTS}</p>',
        '<div class="columns">',
        _table(
            "Processes",
            ["process", "pid", "restarts"],
            _processes(state),
        ),
        _table(
            "Settings",
            ["setting", "value"],
            settings_rows,
        ),
        "</div>",
    ]
    head = f'<meta http-equiv="refresh" content="{RELOAD_S}">\n' if live else ""
    return document("Online training", "\n".join(body), head)


def _numbers(state: Mapping[str, Any]) -> dict[str, str]:
    """Returns the numbers of the run by name.

    The first ``MAIN_NUMBERS`` say how good, how fresh and how fast it is.
    """
    window = state["windows"][-1] if state["windows"] else {}
    sample = state["samples"][-1] if state["samples"] else {}
    age_p50 = _number(state["age_p50_s"], SECONDS)
    age_p99 = _number(state["age_p99_s"], SECONDS)
    restarts = sum(process["restarts"] for process in state["processes"].values())
    aucs = {}
    for name in NAMES:
        auc = window.get(name, {}).get("auc")
        aucs[name] = _number(auc, "{:.3f}".format)
    numbers = {
        "AUC, served": aucs["served"],
        "age of the served rows": _number(sample.get("age_s"), SECONDS),
        "clicks trained a second": _number(sample.get("samples_per_second"), short),
        "AUC, trained": aucs["trained"],
        "AUC, frozen": aucs["frozen"],
        "age, p50 and p99": f"{age_p50}, {age_p99}",
        "clicks trained": f"{state['offset']:,}",
    }
    for name in SERVERS:
        unanswered = _unanswered(state["outcomes"].get(name, {}))
        numbers[f"unanswered, {name}"] = f"{unanswered:,}"
    numbers["late clicks"] = f"{state['late']:,}"
    numbers["rows"] = f"{sum(state['rows'].values()):,}"
    numbers["rows expired"] = f"{state['expired']:,}"
    numbers["restarts"] = str(restarts)
    return numbers


def _plots(state: Mapping[str, Any]) -> list[str]:
    """Returns all plots of the page as HTML."""
    return [
        *_quality_plots(state),
        *_time_plots(state),
        *_row_plots(state),
    ]


def _quality_plots(state: Mapping[str, Any]) -> list[str]:
    """Returns the plots of how good the predictions of the models are."""
    windows = state["windows"]
    start_ms = state["settings"]["start_ms"]
    aucs = {}
    calibrations = {}
    for name in NAMES:
        aucs[name] = _of_windows(windows, name, "auc", start_ms)
        calibrations[name] = _of_windows(windows, name, "calibration", start_ms)
    return [
        _plot(
            "AUC by window",
            "Each click is scored before the model is trained on it.",
            aucs,
            "{:.2f}".format,
            unit="area under the ROC curve",
        ),
        _plot(
            "Calibration by window",
            "The sum of the predictions over the clicks.",
            calibrations,
            "{:.2f}".format,
            unit="predicted clicks for each click",
        ),
    ]


def _time_plots(state: Mapping[str, Any]) -> list[str]:
    """Returns the plots of how fast the run is, and how fresh what it serves."""
    samples = state["samples"]
    speeds = {
        "trained": _of_samples(samples, "samples_per_second"),
        "clicks": _of_samples(samples, "clicks_per_second"),
    }
    ages = {
        "served": _of_samples(samples, "age_s"),
        "trained": _of_samples(samples, "behind_s"),
    }
    live = live_windows(state)
    start_ms = state["settings"]["start_ms"]
    answered = {name: _of_windows(live, name, "answered", start_ms) for name in SERVERS}
    return [
        _plot(
            "Speed",
            "Clicks that are trained and that arrive, a second.",
            speeds,
            short,
            unit="clicks a second",
            zero=True,
        ),
        _plot(
            "Age",
            "Seconds that the served rows, and the trained model, are behind the"
            " clicks. The rows of a follower that does not answer become older.",
            ages,
            "{:.3g}".format,
            unit="seconds behind",
            zero=True,
        ),
        _plot(
            "Answered",
            "The share of the clicks that a server has scored.",
            answered,
            share,
            unit="share of the clicks",
            zero=True,
        ),
    ]


def _row_plots(state: Mapping[str, Any]) -> list[str]:
    """Returns the plots of the rows of the tables."""
    samples = state["samples"]
    rows = {}
    for name in state["rows"]:
        rows[name] = [
            (sample["second"], sample["rows"].get(name, 0)) for sample in samples
        ]
    expired = {"expired": _of_samples(samples, "expired")}
    return [
        _plot(
            "Rows",
            "Rows of each table.",
            rows,
            short,
            unit="rows",
            zero=True,
        ),
        _plot(
            "Expired",
            "Rows that have expired so far.",
            expired,
            short,
            unit="rows",
            zero=True,
        ),
    ]


def live_windows(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the windows without a click of the history.

    No server was asked for the scores of the history.
    """
    settings = state["settings"]
    first = settings["history"] + settings["window"]
    return [window for window in state["windows"] if window["last"] >= first]


def _of_windows(
    windows: Sequence[Mapping[str, Any]],
    name: str,
    metric: str,
    start_ms: int,
) -> Points:
    points = []
    for window in windows:
        second = (window["time_ms"] - start_ms) / 1000
        points.append((second, window[name][metric]))
    return points


def _of_samples(samples: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(sample["second"], sample[name]) for sample in samples]


def _unanswered(outcomes: Mapping[str, int]) -> int:
    return sum(count for outcome, count in outcomes.items() if outcome != "answered")


def _processes(state: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, process in state["processes"].items():
        pid = str(process["pid"])
        restarts = str(process["restarts"])
        rows.append([name, pid, restarts])
    return rows


def _number(value: float | None, text_of: Any) -> str:
    return "-" if value is None else text_of(value)


def _table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = [f"<tr>{names}</tr>"]
    for row in rows:
        cells = "".join(cell(text) for text in row)
        lines.append(f"<tr>{cells}</tr>")
    content = "".join(lines)
    heading = f"<h2>{escape(title)}</h2>"
    return f"<section>{heading}<table>{content}</table></section>"


def _plot(
    title: str,
    about: str,
    lines: Mapping[str, Points],
    text_of: Any,
    *,
    unit: str,
    zero: bool = False,
) -> str:
    """Returns a figure as HTML, with a line for each name that has points.

    A name has one colour in all figures. The horizontal axis begins at 0, or with the
    history.
    """
    drawn = []
    latest = []
    num_tables = 0
    for name, points in lines.items():
        if name in PAINTS:
            paint = PAINTS[name]
        else:
            paint = TABLE_PAINTS[num_tables % 2]
            num_tables += 1
        if any(y is not None for _, y in points):
            drawn.append(Line(name, points, paint))
            _, last_y = points[-1]
            latest.append(f"{name} {_number(last_y, text_of)}")
    if drawn:
        about += f" Now: {', '.join(latest)}."
    first_xs = [points[0][0] for points in lines.values() if points]
    first_x = min(first_xs, default=0.0)
    x_unit = "seconds (before 0: history)" if first_x < 0 else "seconds"
    return figure(
        title,
        about,
        drawn,
        text_of,
        unit=unit,
        x_unit=x_unit,
        first_x=min(first_x, 0.0),
        zero=zero,
    )
