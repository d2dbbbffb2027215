"""Train on clicks while they arrive, and serve the model a few seconds later.

    python examples/online/run.py                               # or: make online
    python examples/online/run.py --seconds 300 --kills 20      # random processes are killed
    python examples/online/run.py --url redis://127.0.0.1:6379  # clicks on your Redis server
    python examples/online/run.py --url kafka://127.0.0.1:9092  # clicks in a topic of your Kafka broker
    python examples/online/run.py --url file                    # clicks in a file, without Redis
    python examples/online/run.py --folder runs/online-DATE     # continue a run that was interrupted by Ctrl-C

The example starts a Redis server, a generator of clicks whose taste drifts, a trainer,
and two servers of predictions: ``recstore follow`` with the rows that the trainer
publishes, and a second one with the first full export only. Open page.html in the run's
folder, which shows all of it while it runs. docs/online.md describes the parts.
"""

# ruff: noqa: E402, RUF009  (flags are read before the import of torch, which takes seconds, and are fields)

from __future__ import annotations

import json
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
    rate: int = flag(2000, None, "Clicks a second.", min=1)
    publish_every: float = flag(
        5.0, None, "Time between deltas.", min=0.0, metavar="SECONDS"
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
    seed: int = flag(0, None, "Seed of the clicks and of the model.", min=0)
    kills: int = flag(
        0, None, "Number of SIGKILLs of random processes during the run.", min=0
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
    place = (
        flags.folder or Path("runs", f"online-{datetime.now():%Y%m%d-%H%M%S}")
    ).absolute()
    with _continued(place) if place.exists() else _new(place, flags) as settings:
        port = (
            int(settings.url.rpartition(":")[2])
            if settings.url and settings.redis.exists()
            else None
        )
        settings.write()
        console = console_for(flags.json_out)
        console.print(f"page {place / 'page.html'}", soft_wrap=True, highlight=False)
        with Supervisor(settings, port, flags.kills) as supervisor:
            state = supervisor.run(
                10 * (settings.clicks - settings.history) / settings.rate + PATIENCE_S
            )
        result = _result(state)
        _report(console, state, result)
        console.print(
            f"page               {place / 'page.html'}", soft_wrap=True, highlight=False
        )
        write_json(flags.json_out, {**state, **result})
    if state["status"] == INTERRUPTED:
        print(f"interrupted: continue with --folder {place}", file=sys.stderr)
        raise SystemExit(130)


@contextmanager
def _new(place: Path, flags: Flags) -> Iterator[Settings]:
    """Makes the folder of a new run, and locks it."""
    port = _free_port() if flags.url is None and REDIS is not None else None
    url = (
        f"redis://127.0.0.1:{port}"
        if port is not None
        else None
        if flags.url == "file"
        else flags.url
    )
    settings = Settings(
        folder=place,
        url=url,
        stream=place.name,
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
    if port is None and url is not None:
        for problem in server_stream(settings).problems():
            print(f"warning: {problem}", file=sys.stderr)
    with locked_folder(place):
        if port is not None:
            settings.redis.mkdir()
        yield settings


@contextmanager
def _continued(place: Path) -> Iterator[Settings]:
    """Continues the run of a folder on other ports, and locks the folder.

    Raises:
        DataError: The folder has no run, its run has finished, or another command runs
            it.
    """
    if not (place / FILE).is_file():
        raise DataError(
            f"{place} exists and has no run to continue: choose a new folder with"
            " --folder"
        )
    with locked_folder(place):
        settings = Settings.read(place)
        state = place / STATE
        if state.exists() and json.loads(state.read_bytes())["status"] == FINISHED:
            raise DataError(
                f"{place}: this run has finished: choose a new folder with --folder"
            )
        url = (
            f"redis://127.0.0.1:{_free_port()}"
            if settings.redis.exists()
            else settings.url
        )
        # The clicks go on when all processes are ready.
        settings.opened.unlink(missing_ok=True)
        yield replace(settings, url=url, session_ms=_now_ms(), **_addresses())


def _result(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of the end: of each sixth of the live clicks, and of the
    whole run.
    """
    start_ms = state["settings"]["start_ms"]
    live = live_windows(state)
    size = -(-len(live) // 6) or 1
    parts = [
        _part(live[begin : begin + size], start_ms)
        for begin in range(0, len(live), size)
    ]
    last = [
        each
        for each in parts[len(parts) * 2 // 3 :]
        if each["served"] is not None and each["frozen"] is not None
    ]
    return {
        "parts": parts,
        "margin": min((each["served"] - each["frozen"] for each in last), default=None),
        "restarts": {
            name: each["restarts"] for name, each in state["processes"].items()
        },
    }


def _part(windows: Sequence[Mapping[str, Any]], start_ms: int) -> dict[str, Any]:
    """Returns the mean metrics of those windows that have them."""

    def mean(model: str, metric: str) -> float | None:
        values = [
            value for window in windows if (value := window[model][metric]) is not None
        ]
        return sum(values) / len(values) if values else None

    return {
        "until_s": (windows[-1]["time_ms"] - start_ms) / 1000,
        **{model: mean(model, "auc") for model in ("trained", "served", "frozen")},
        "calibration": mean("served", "calibration"),
        "answered": mean("served", "answered"),
    }


def _report(console: Console, state: dict[str, Any], result: dict[str, Any]) -> None:
    table = Table(title="AUC of clicks that were scored before they were trained on")
    for title in (
        "until second",
        "trained",
        "served",
        "frozen",
        "calibration, served",
        "answered, served",
    ):
        table.add_column(title, justify="right")
    for part in result["parts"]:
        second, *metrics = part.values()
        table.add_row(
            f"{second:.0f}",
            *("-" if each is None else f"{each:.4f}" for each in metrics),
        )
    console.print(table)
    restarts = ", ".join(
        f"{name} {count}" for name, count in result["restarts"].items() if count
    )
    lines = {
        "clicks trained": f"{state['offset']:,}",
        "rows": ", ".join(f"{name} {count:,}" for name, count in state["rows"].items()),
        "rows expired": f"{state['expired']:,}",
        "age of served rows": (
            "-"
            if state["age_p50_s"] is None
            else (
                f"p50 {state['age_p50_s']:.1f} s, p99 {state['age_p99_s']:.1f} s over"
                " all live clicks"
            )
        ),
        **{
            f"clicks, {name}": _outcomes(each)
            for name, each in state["outcomes"].items()
        },
        "late clicks": (
            f"{state['late']:,} written more than {LATE_S:g} s after their time"
        ),
        "deltas applied": (
            f"{state['deltas_applied']:,}, full exports loaded"
            f" {state['fulls_loaded']:,}"
        ),
        "restarts": restarts or "none",
        "follower": (
            "equal to a full export of the trained model"
            if state["status"] == FINISHED
            else "not compared with the trained model: the run was interrupted"
        ),
        "served over frozen": (
            "-"
            if result["margin"] is None
            else f"AUC {result['margin']:+.4f} in the last third"
        ),
    }
    for name, value in lines.items():
        console.print(f"{name:<19}{value}", soft_wrap=True, highlight=False)


def _outcomes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items())


def _addresses() -> dict[str, str]:
    return {
        name: f"127.0.0.1:{_free_port()}"
        for name in ("grpc", "http", "frozen_grpc", "frozen_http")
    }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    run(lambda: main(flags))
