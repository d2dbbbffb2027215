"""The command ``recstore plan``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from torchrec_recstore.commands.output import AsJson, errors_in_one_line, in_order, print_json, stdout, table_of

if TYPE_CHECKING:
    from torchrec_recstore.planner.forecasts import Forecast, ForecastTable
    from torchrec_recstore.planner.statistics import TableStatistics


def plan(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Checkpoints, folders of a run's checkpoints, and files of statistics. The first that knows a number "
            "counts. The tables are those of the first checkpoint or run.",
            show_default=False,
        ),
    ],
    topology: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON file with the hosts and the network.", show_default=False)
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.", show_default=False)],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of one rank in a step.")] = 512,
    days: Annotated[float, typer.Option(min=0, help="Days of growth for which memory is planned.")] = 0,
    steps_per_day: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps of the measured run in a day, for --days.", show_default=False),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Parquet file with a sample of training rows, whose ids and times are measured. Needs --features.",
            show_default=False,
        ),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file with the list of columns of each table.", show_default=False),
    ] = None,
    statistics_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the statistics for RecStorePlanner.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a training on a number of ranks without starting one, from measured statistics.

    Shows the place of each table, and for each rank the time of its lookups, of the network and of TorchRec's own work
    in a step, the bytes that it sends and receives, its memory now and after --days of growth, and the limit, the
    longest of the three times. The limit of the plan is memory if a plan for ranks with more memory is faster. The plan
    is that of RecStorePlanner with the same statistics, with table_wise and row_wise tables. The dense part is not
    counted.

    Example: recstore plan run sample.json --topology hosts.json --ranks 8

    Exit status: 0, or 2 if a number is not known or the tables do not fit. One line on stderr then names the table.
    """
    with errors_in_one_line(), _without_warnings():
        from torchrec_recstore.planner.forecasts import forecast, read_machines
        from torchrec_recstore.planner.statistics import write_statistics

        machines = read_machines(topology)
        if days and steps_per_day is None:
            raise ValueError("--days needs --steps-per-day, the training steps of the measured run in a day")
        if (parquet is None) != (features is None):
            raise ValueError("--parquet and --features need each other")
        tables, known = _read(sources)
        if parquet is not None and features is not None:
            known = _measured(tables, known, parquet, features, batch_size)
        known = {name: each for name, each in known.items() if name in tables}
        steps = round(days * (steps_per_day or 0))
        found = forecast(tables, known, machines, ranks, batch_size, steps)
        if statistics_out is not None:
            write_statistics(statistics_out, known)
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found, days)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Drops the warnings of TorchRec, which has one for each topology, and of torch.fx, which TorchRec calls."""
    loggers = [logging.getLogger(name) for name in ("torchrec", "torch.fx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _read(sources: list[Path]) -> tuple[dict[str, ForecastTable], dict[str, TableStatistics]]:
    """Returns the tables of the first checkpoint, and the statistics of all sources."""
    from torchrec_recstore.checkpoint.info import METADATA, read_info
    from torchrec_recstore.planner.forecasts import tables_of
    from torchrec_recstore.planner.statistics import combined_statistics, read_statistics

    tables: dict[str, ForecastTable] = {}
    for path in sources:
        if path.is_dir() and not tables:
            inside = [path] if (path / METADATA).is_file() else [each.parent for each in path.glob(f"*/{METADATA}")]
            if inside:
                tables = tables_of(max((read_info(each) for each in inside), key=lambda info: info.step))
    known = combined_statistics(*(read_statistics(path) for path in sources))
    if not tables:
        raise ValueError("no SOURCE is a checkpoint or a run, and the tables and their optimizer are read from these")
    return tables, known


def _measured(
    tables: dict[str, ForecastTable],
    known: dict[str, TableStatistics],
    parquet: Path,
    features: Path,
    batch_size: int,
) -> dict[str, TableStatistics]:
    """Returns the statistics with those of a Parquet file. What the sources know counts first."""
    from torchrec_recstore.planner.samples import read_features, sample_statistics
    from torchrec_recstore.planner.statistics import combined_statistics

    columns = read_features(features, tables)
    return combined_statistics(known, sample_statistics(tables, columns, parquet, batch_size))


def _as_json(found: Forecast) -> dict[str, Any]:
    return {
        "step_ms": found.step_ms,
        "limit": found.limit,
        "boundless_step_ms": found.boundless_step_ms,
        "tables": [
            {
                "table": table.name,
                "sharding_type": table.sharding_type,
                "ranks": list(table.ranks),
                "rows": table.rows,
                "rows_later": table.rows_later,
            }
            for table in found.tables
        ],
        "ranks": [
            {
                "rank": rank.rank,
                "step_ms": rank.step_ms,
                "lookups_ms": rank.lookups_ms,
                "network_ms": rank.network_ms,
                "torchrec_ms": rank.torchrec_ms,
                "sent_bytes": round(rank.sent_bytes),
                "received_bytes": round(rank.received_bytes),
                "memory_bytes": rank.memory_bytes,
                "memory_later_bytes": rank.memory_later_bytes,
                "limit": rank.limit,
            }
            for rank in found.ranks
        ],
    }


def _print(found: Forecast, days: float) -> None:
    later = [f"in {days:g} days"] if days else []
    shown = table_of(["table", "sharding type", "ranks", "rows", *(f"rows {each}" for each in later)])
    for name, table in in_order({table.name: table for table in found.tables}):
        counts = [table.rows, table.rows_later] if days else [table.rows]
        shown.add_row(name, table.sharding_type, _ranges(table.ranks), *(f"{count:,}" for count in counts))
    out = stdout()
    out.print(shown)
    columns = ["rank", "step", "lookups", "network", "torchrec", "sent", "received", "memory"]
    shown = table_of([*columns, *(f"memory {each}" for each in later), "limit"])
    for rank in found.ranks:
        sizes = [rank.sent_bytes, rank.received_bytes, rank.memory_bytes, *([rank.memory_later_bytes] if days else [])]
        shown.add_row(
            str(rank.rank),
            *(f"{ms:.3f} ms" for ms in (rank.step_ms, rank.lookups_ms, rank.network_ms, rank.torchrec_ms)),
            *(decimal(round(size)) for size in sizes),
            rank.limit,
        )
    out.print(shown)
    why = f": with more memory, a step takes {found.boundless_step_ms:.3f} ms" if found.limit == "memory" else ""
    out.print(f"step   {found.step_ms:.3f} ms on the slowest rank", highlight=False)
    out.print(f"limit  {found.limit}{why}", highlight=False)


def _ranges(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
