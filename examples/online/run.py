"""Train on clicks while they arrive, and serve the model a few seconds later.

    python examples/online/run.py                               # or: make online
    python examples/online/run.py --seconds 300 --kills 20      # random processes are killed
    python examples/online/run.py --url redis://127.0.0.1:6379  # clicks on your Redis server
    python examples/online/run.py --url file                    # clicks in a file, without Redis

The example starts a Redis server, a generator of clicks whose taste drifts, a trainer, and two servers of predictions:
``recstore follow`` with the rows that the trainer publishes, and a second one with the first full export only. Open
page.html in the run's folder, which shows all of it while it runs. docs/online.md describes the parts.
"""

from __future__ import annotations

import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.command import DataError, prepare_torch, run
from common.run_settings import JsonOut
from online.settings import Settings

from torchrec_recstore.commands.output import errors_in_one_line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

HISTORY = 140_000
"""The number of clicks of the history. They are trained on at full speed."""
PATIENCE_S = 600


@app.command()
def main(
    seconds: Annotated[
        int, typer.Option(min=1, help="Seconds of live clicks, which begin when all processes are ready.")
    ] = 90,
    rate: Annotated[int, typer.Option(min=1, help="Clicks a second.")] = 2000,
    publish_every: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Time between deltas.")] = 5.0,
    expire: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="Rows without a click for this time are deleted.")
    ] = 30,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Redis server of the clicks, redis://host:port/db, or file for a file without Redis.",
            show_default="a server that the example starts, or file if Redis is not installed",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the clicks and of the model.")] = 0,
    kills: Annotated[int, typer.Option(min=0, help="Number of SIGKILLs of random processes during the run.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder of the run.", show_default="runs/online-<date>")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Train on generated clicks while they arrive, publish deltas, serve them, and show all of it on a page.

    Exit status: 0, or 2 with one line on stderr if the run fails.
    """
    prepare_torch()
    from common.report import check_file, console_for, write_json
    from online.streams import RedisStream
    from online.supervisor import REDIS, Supervisor

    with errors_in_one_line():
        check_file(json_out)
        place = (folder or Path("runs", f"online-{datetime.now():%Y%m%d-%H%M%S}")).absolute()
        if place.exists():
            raise DataError(f"{place} exists: choose a new folder with --folder")
        port = _free_port() if url is None and REDIS is not None else None
        redis_url = f"redis://127.0.0.1:{port}" if port is not None else None if url == "file" else url
        addresses = [f"127.0.0.1:{_free_port()}" for _ in range(4)]
        settings = Settings(
            folder=place,
            url=redis_url,
            stream=place.name,
            seed=seed,
            history=HISTORY,
            clicks=HISTORY + seconds * rate,
            rate=rate,
            start_ms=time.time_ns() // 1_000_000,
            window=4 * rate,
            publish_every_s=publish_every,
            expire_s=expire,
            **dict(zip(("grpc", "http", "frozen_grpc", "frozen_http"), addresses, strict=True)),
        )
        if port is None and redis_url is not None:
            for problem in RedisStream(redis_url, settings.stream).problems():
                print(f"warning: {problem}", file=sys.stderr)
        place.mkdir(parents=True)
        settings.write()
        console = console_for(json_out)
        console.print(f"page {place / 'page.html'}", soft_wrap=True, highlight=False)
        with Supervisor(settings, port, kills) as supervisor:
            state = supervisor.run(10 * seconds + PATIENCE_S)
        result = _result(state)
        _report(console, state, result)
        console.print(f"page               {place / 'page.html'}", soft_wrap=True, highlight=False)
        write_json(json_out, {**state, **result})


def _result(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of the end: of each sixth of the live clicks, and of the whole run."""
    start_ms = state["settings"]["start_ms"]
    live = [window for window in state["windows"] if window["time_ms"] >= start_ms]
    size = -(-len(live) // 6) or 1
    parts = [_part(live[begin : begin + size], start_ms) for begin in range(0, len(live), size)]
    ages = sorted(each["age_s"] for each in state["samples"] if each["age_s"] is not None)
    last = [each for each in parts[len(parts) * 2 // 3 :] if each["served"] is not None and each["frozen"] is not None]
    return {
        "parts": parts,
        "margin": min((each["served"] - each["frozen"] for each in last), default=None),
        "age_p50_s": ages[len(ages) // 2] if ages else None,
        "age_p99_s": ages[len(ages) * 99 // 100] if ages else None,
        "restarts": {name: each["restarts"] for name, each in state["processes"].items()},
    }


def _part(windows: list[dict[str, Any]], start_ms: int) -> dict[str, Any]:
    """Returns the mean metrics of those windows that have them."""

    def mean(model: str, metric: str) -> float | None:
        values = [value for window in windows if (value := window[model][metric]) is not None]
        return sum(values) / len(values) if values else None

    return {
        "until_s": (windows[-1]["time_ms"] - start_ms) / 1000,
        **{model: mean(model, "auc") for model in ("trained", "served", "frozen")},
        "calibration": mean("served", "calibration"),
    }


def _report(console: Console, state: dict[str, Any], result: dict[str, Any]) -> None:
    table = Table(title="AUC of clicks that were scored before they were trained on")
    for title in ("until second", "trained", "served", "frozen", "calibration, served"):
        table.add_column(title, justify="right")
    for part in result["parts"]:
        second, *metrics = part.values()
        table.add_row(f"{second:.0f}", *("-" if each is None else f"{each:.4f}" for each in metrics))
    console.print(table)
    restarts = ", ".join(f"{name} {count}" for name, count in result["restarts"].items() if count)
    lines = {
        "clicks trained": f"{state['offset']:,}",
        "rows": ", ".join(f"{name} {count:,}" for name, count in state["rows"].items()),
        "rows expired": f"{state['expired']:,}",
        "age of served rows": "-"
        if result["age_p50_s"] is None
        else f"p50 {result['age_p50_s']:.1f} s, p99 {result['age_p99_s']:.1f} s",
        "deltas applied": f"{state['deltas_applied']:,}, full exports loaded {state['fulls_loaded']:,}",
        "restarts": restarts or "none",
        "follower": "equal to a full export of the trained model",
        "served over frozen": "-" if result["margin"] is None else f"AUC {result['margin']:+.4f} in the last third",
    }
    for name, value in lines.items():
        console.print(f"{name:<19}{value}", soft_wrap=True, highlight=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    run(app)
