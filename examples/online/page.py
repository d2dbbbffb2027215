"""Writes ``page.html``, which shows an online run while it runs: a page without scripts that loads itself again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from common.report import plain, short
from common.style import Line, Points, document, facts, figure

RELOAD_S = 2
NAMES = {"trained": "trained", "served": "served", "frozen": "frozen"}


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
    """Returns a figure as HTML, with a line for each name that has points."""
    found = [Line(name, points) for name, points in lines.items() if points]
    now = ", ".join(f"{line.label} {text_of(line.points[-1][1])}" for line in found)
    caption = f" Now: {now}." if found else ""
    return figure(title, about + caption, found, text_of, zero=zero)
