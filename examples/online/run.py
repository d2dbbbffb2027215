"""Train on clicks while they arrive, and serve the model a few seconds later.

    # or: make online
    python examples/online/run.py
    # random processes are killed
    python examples/online/run.py --seconds 300 --kills 20
    # clicks on your Redis server
    python examples/online/run.py --url redis://127.0.0.1:6379
    # clicks in a topic of your Kafka broker
    python examples/online/run.py --url kafka://127.0.0.1:9092
    # clicks in a file, without Redis
    python examples/online/run.py --url file
    # continue a run that was interrupted by Ctrl-C
    python examples/online/run.py --folder runs/online-DATE

The example starts a Redis server, a generator of clicks whose taste drifts, a trainer,
and two servers of predictions: ``recstore follow`` with the rows that the trainer
publishes, and a second one with the first full export only. Open page.html in the run's
folder, which shows all of it while it runs. docs/online.md describes the parts.
"""

# Flags are read before the import of torch, which takes seconds: E402.
# A flag is the field of a dataclass: RUF009.
# ruff: noqa: E402, RUF009

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import DataError, run
from common.settings import flag, settings_of_flags

HISTORY = 140_000
"""The number of clicks of the history. They are trained on at full speed."""
PATIENCE_S = 600


@dataclass(frozen=True)
class Flags:
    """Train on generated clicks while they arrive, publish deltas, serve them, and show
    all of it on a page.

    Exit status: 0, 130 after Ctrl-C, or 2 with one line on stderr if the run fails.
    """

    seconds: int = flag(
        90,
        None,
        "Seconds of live clicks, which begin when all processes are ready.",
        min=1,
    )
    rate: int = flag(
        2000,
        None,
        "Clicks a second.",
        min=1,
    )
    publish_every: float = flag(
        5.0,
        None,
        "Time between deltas.",
        min=0.0,
        metavar="SECONDS",
    )
    expire: int = flag(
        30,
        None,
        "Rows without a click for this time are deleted.",
        min=1,
        metavar="SECONDS",
    )
    url: str | None = flag(
        None,
        None,
        "Redis server of the clicks, redis://host:port/db, Kafka broker,"
        " kafka://host:port, or file.",
        metavar="URL",
        show_default=(
            "a server that the example starts, or file if Redis is not installed"
        ),
    )
    seed: int = flag(
        0,
        None,
        "Seed of the clicks and of the model.",
        min=0,
    )
    kills: int = flag(
        0,
        None,
        "Number of SIGKILLs of random processes during the run.",
        min=0,
    )
    folder: Path | None = flag(
        None,
        None,
        "Folder of the run. A run that was interrupted continues in its folder, with"
        " its own settings.",
        metavar="DIR",
        show_default="runs/online-<date>",
    )
    json_out: Path | None = flag(
        None,
        None,
        "Write the result as JSON to this file. With -, write it to stdout, and the"
        " tables to stderr.",
        "--json",
        metavar="OUT",
        allow_dash=True,
    )


flags = settings_of_flags(Flags) if __name__ == "__main__" else None

from common.report import check_file, console_for, write_json
from common.run import locked_folder

from online.clicks import LATE_S
from online.page import live_windows
from online.settings import FILE, Settings
from online.streams import server_stream
from online.supervisor import FINISHED, INTERRUPTED, REDIS, STATE, Supervisor


def main(flags: Flags) -> None:
    """Starts the processes, waits for the end of the run, and prints its result."""
    check_file(flags.json_out)
    default_folder = Path("runs", f"online-{datetime.now():%Y%m%d-%H%M%S}")
    folder = (flags.folder or default_folder).absolute()
    page = folder / "page.html"
    opened = _continued(folder) if folder.exists() else _new(folder, flags)
    with opened as settings:
        redis_port = None
        if settings.url and settings.redis.exists():
            redis_port = int(settings.url.rpartition(":")[2])
        settings.write()
        console = console_for(flags.json_out)
        console.print(f"page {page}", soft_wrap=True, highlight=False)
        live_s = (settings.clicks - settings.history) / settings.rate
        with Supervisor(settings, redis_port, flags.kills) as supervisor:
            state = supervisor.run(until_s=10 * live_s + PATIENCE_S)
        result = _result(state)
        _report(console, state, result)
        console.print(f"page               {page}", soft_wrap=True, highlight=False)
        write_json(flags.json_out, {**state, **result})
    if state["status"] == INTERRUPTED:
        print(f"interrupted: continue with --folder {folder}", file=sys.stderr)
        raise SystemExit(130)


@contextmanager
def _new(folder: Path, flags: Flags) -> Iterator[Settings]:
    """Makes the folder of a new run, and locks it."""
    url = flags.url
    redis_port = None
    if url is None and REDIS is not None:
        redis_port = _free_port()
        url = f"redis://127.0.0.1:{redis_port}"
    elif url == "file":
        url = None
    settings = Settings(
        folder=folder,
        url=url,
        stream=folder.name,
        seed=flags.seed,
        history=HISTORY,
        clicks=HISTORY + flags.seconds * flags.rate,
        rate=flags.rate,
        start_ms=_now_ms(),
        session_ms=_now_ms(),
        window=4 * flags.rate,
        publish_every_s=flags.publish_every,
        expire_s=flags.expire,
        **_addresses(),
    )
    if redis_port is None and url is not None:
        for problem in server_stream(settings).problems():
            print(f"warning: {problem}", file=sys.stderr)
    with locked_folder(folder):
        if redis_port is not None:
            settings.redis.mkdir()
        yield settings


@contextmanager
def _continued(folder: Path) -> Iterator[Settings]:
    """Continues the run of a folder on other ports, and locks the folder.

    Raises:
        DataError: The folder has no run, its run has finished, or another command runs
            it.
    """
    if not (folder / FILE).is_file():
        raise DataError(
            f"{folder} exists and has no run to continue: choose a new folder with"
            " --folder"
        )
    with locked_folder(folder):
        settings = Settings.read(folder)
        state = folder / STATE
        if state.exists() and json.loads(state.read_bytes())["status"] == FINISHED:
            raise DataError(
                f"{folder}: this run has finished: choose a new folder with --folder"
            )
        url = settings.url
        if settings.redis.exists():
            url = f"redis://127.0.0.1:{_free_port()}"
        # The clicks go on when all processes are ready.
        settings.opened.unlink(missing_ok=True)
        yield replace(
            settings,
            url=url,
            session_ms=_now_ms(),
            **_addresses(),
        )


def _result(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of the run.

    ``parts`` has the metrics of each sixth of the live clicks. ``margin`` is the
    smallest difference between the AUC of the served and of the frozen model in the
    last third of them. ``restarts`` are counted for each process.
    """
    start_ms = state["settings"]["start_ms"]
    live = live_windows(state)
    size = max(math.ceil(len(live) / 6), 1)
    parts = []
    for begin in range(0, len(live), size):
        windows = live[begin : begin + size]
        parts.append(_part(windows, start_ms))

    margins = []
    last_third = parts[len(parts) * 2 // 3 :]
    for part in last_third:
        served = part["served"]
        frozen = part["frozen"]
        if served is not None and frozen is not None:
            margins.append(served - frozen)

    restarts = {}
    for name, process in state["processes"].items():
        restarts[name] = process["restarts"]
    return {
        "parts": parts,
        "margin": min(margins, default=None),
        "restarts": restarts,
    }


def _part(windows: Sequence[Mapping[str, Any]], start_ms: int) -> dict[str, Any]:
    """Returns the means of the metrics over the windows that have them."""

    def mean(model: str, metric: str) -> float | None:
        values = []
        for window in windows:
            value = window[model][metric]
            if value is not None:
                values.append(value)
        return sum(values) / len(values) if values else None

    return {
        "until_s": (windows[-1]["time_ms"] - start_ms) / 1000,
        "trained": mean("trained", "auc"),
        "served": mean("served", "auc"),
        "frozen": mean("frozen", "auc"),
        "calibration": mean("served", "calibration"),
        "answered": mean("served", "answered"),
    }


# The columns of the printed table, by the name of their number.
PART_TITLES = {
    "until_s": "until second",
    "trained": "trained",
    "served": "served",
    "frozen": "frozen",
    "calibration": "calibration, served",
    "answered": "answered, served",
}


def _report(
    console: Console,
    state: dict[str, Any],
    result: dict[str, Any],
) -> None:
    """Prints the result."""
    table = Table(title="AUC of clicks that were scored before they were trained on")
    for title in PART_TITLES.values():
        table.add_column(title, justify="right")
    for part in result["parts"]:
        cells = [f"{part['until_s']:.0f}"]
        for name in list(PART_TITLES)[1:]:
            cells.append("-" if part[name] is None else f"{part[name]:.4f}")
        table.add_row(*cells)
    console.print(table)
    for name, value in _lines(state, result).items():
        console.print(f"{name:<19}{value}", soft_wrap=True, highlight=False)


def _lines(state: dict[str, Any], result: dict[str, Any]) -> dict[str, str]:
    """Returns the lines below the table, by name."""
    ages = "-"
    if state["age_p50_s"] is not None:
        ages = (
            f"p50 {state['age_p50_s']:.1f} s, p99 {state['age_p99_s']:.1f} s over all"
            " live clicks"
        )
    follower = "not compared with the trained model: the run was interrupted"
    if state["status"] == FINISHED:
        follower = "equal to a full export of the trained model"
    margin = "-"
    if result["margin"] is not None:
        margin = f"AUC {result['margin']:+.4f} in the last third"
    rows = [f"{name} {count:,}" for name, count in state["rows"].items()]
    restarts = [
        f"{name} {count}" for name, count in result["restarts"].items() if count
    ]

    lines = {
        "clicks trained": f"{state['offset']:,}",
        "rows": ", ".join(rows),
        "rows expired": f"{state['expired']:,}",
        "age of served rows": ages,
    }
    for name, counts in state["outcomes"].items():
        outcomes = [f"{count:,} {outcome}" for outcome, count in counts.items()]
        lines[f"clicks, {name}"] = ", ".join(outcomes)
    lines["late clicks"] = (
        f"{state['late']:,} written more than {LATE_S:g} s after their time"
    )
    lines["deltas applied"] = (
        f"{state['deltas_applied']:,}, full exports loaded {state['fulls_loaded']:,}"
    )
    lines["restarts"] = ", ".join(restarts) or "none"
    lines["follower"] = follower
    lines["served over frozen"] = margin
    return lines


def _addresses() -> dict[str, str]:
    """Returns the settings of the followers' addresses, with free ports."""
    names = ("grpc", "http", "frozen_grpc", "frozen_http")
    return {name: f"127.0.0.1:{_free_port()}" for name in names}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    run(lambda: main(flags))
