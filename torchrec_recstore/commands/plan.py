"""The command ``recstore plan``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from torchrec_recstore.commands.output import (
    AsJson,
    errors_in_one_line,
    in_order,
    print_json,
    print_line,
    print_table,
)

if TYPE_CHECKING:
    from torchrec_recstore.planner.forecast_inputs import ForecastTable
    from torchrec_recstore.planner.forecasts import Forecast
    from torchrec_recstore.planner.statistics import TableStatistics


def plan(
    topology: Annotated[
        Path,
        typer.Option(metavar="FILE", help="JSON file with the hosts and the network."),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")],
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SOURCE",
            help=(
                "Checkpoints, folders of a run's checkpoints, and files of statistics."
                " The first that knows a number "
                "counts. The tables are those of the first checkpoint or run, and of"
                " --tables."
            ),
        ),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "JSON file with the optimizer, and with features, dim, dtype, rows,"
                " rows_per_day and max_rows of "
                "each table. Its numbers count before those of a SOURCE."
            ),
        ),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Parquet file with a sample of training rows, whose ids and times are"
                " measured. Needs the features of "
                "--tables."
            ),
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples of one rank in a step.")
    ] = 512,
    days: Annotated[
        float, typer.Option(min=0, help="Days of growth for which memory is planned.")
    ] = 0,
    samples_per_day: Annotated[
        int | None, typer.Option(min=1, help="Training samples in a day, for --days.")
    ] = None,
    samples_per_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples of all ranks in a step of the measured run, for its growth.",
        ),
    ] = None,
    statistics_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the statistics for RecStorePlanner."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a training on a number of ranks without starting one, from measured
    statistics.

    Shows the place of each table, and for each rank the time of its lookups, of the
    network and of TorchRec's own work in a step, the bytes that it sends and receives,
    its memory now and after --days of growth, and the limit, the longest of the three
    times. The limit of the plan is memory if a plan for ranks with more memory is
    faster. The plan is that of RecStorePlanner with the same statistics, with
    table_wise and row_wise tables. The dense part is not counted.

    Example: recstore plan --parquet clicks.parquet --tables tables.json --topology
    hosts.json --ranks 8

    Exit status: 0, or 2 if a number is not known or the tables do not fit. One line on
    stderr then names the table.
    """
    with errors_in_one_line(), _without_warnings():
        from torchrec_recstore.planner.forecast_inputs import read_machines
        from torchrec_recstore.planner.forecasts import forecast
        from torchrec_recstore.planner.statistics import write_statistics

        machines = read_machines(topology)
        if days and samples_per_day is None:
            raise ValueError(
                "--days needs --samples-per-day, the number of training samples in"
                " a day"
            )
        planned, known, of_sample = _inputs(
            sources or [],
            tables,
            parquet,
            batch_size,
            samples_per_day,
            samples_per_step,
        )
        steps = round(days * (samples_per_day or 0) / (samples_per_step or batch_size))
        found = forecast(planned, known, machines, ranks, batch_size, steps)
        if statistics_out is not None:
            write_statistics(statistics_out, known)
    if as_json:
        print_json(_as_json(found, of_sample))
    else:
        _print(found, days, of_sample)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Drops the warnings of TorchRec, which has one for each topology, and of torch.fx,
    which TorchRec calls.
    """
    levels = {
        logger: logger.level
        for logger in map(logging.getLogger, ("torchrec", "torch.fx"))
    }
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _inputs(
    sources: list[Path],
    tables: Path | None,
    parquet: Path | None,
    batch_size: int,
    samples_per_day: int | None,
    samples_per_step: int | None,
) -> tuple[dict[str, ForecastTable], dict[str, TableStatistics], set[str]]:
    """Returns the tables, their statistics, and the names of the tables whose rows are
    the ids of the sample.
    """
    from torchrec_recstore.planner.forecast_inputs import (
        TableFile,
        read_table_file,
        sample_statistics,
    )
    from torchrec_recstore.planner.statistics import (
        combined_statistics,
        read_statistics,
    )

    if parquet is not None and tables is None:
        raise ValueError(
            "--parquet needs --tables, a JSON file with the features of each table"
        )
    known = combined_statistics(*(read_statistics(path) for path in sources))
    saved = _saved_tables(sources)
    if tables is None and not saved:
        raise ValueError(
            "no SOURCE is a checkpoint or a run, from which the tables are read: pass"
            " one, or --tables"
        )
    file = TableFile("", {}) if tables is None else read_table_file(tables)
    planned = file.with_saved(saved)
    if samples_per_day is not None and samples_per_step is None:
        stated = {
            name
            for name, table in file.tables.items()
            if table.rows_per_day is not None
        }
        for name, table in known.items():
            if (
                name in planned
                and name not in stated
                and table.rows_per_step is not None
            ):
                raise ValueError(
                    f"table {name!r}: a SOURCE tells its growth for a step: pass"
                    " --samples-per-step, the number of samples of all ranks in a step"
                    " of the measured run"
                )
    per_step = samples_per_step or batch_size
    known = combined_statistics(
        file.statistics(samples_per_day and samples_per_day / per_step), known
    )
    of_sample: set[str] = set()
    if parquet is not None:
        columns = {
            name: table.features
            for name, table in file.tables.items()
            if table.features
        }
        if not columns:
            raise ValueError(
                f"{file.path}: no table has features, the columns of the Parquet file"
            )
        sampled = sample_statistics(planned, columns, parquet, batch_size, per_step)
        of_sample = {
            name for name in sampled if name not in known or known[name].rows is None
        }
        for name in sampled.keys() - of_sample:
            # The sample does not tell which of its ids have a row already, so it does
            # not tell the growth.
            sampled[name] = replace(sampled[name], rows=None, rows_per_step=None)
        known = combined_statistics(known, sampled)
    return (
        planned,
        {name: each for name, each in known.items() if name in planned},
        of_sample,
    )


def _saved_tables(sources: list[Path]) -> dict[str, ForecastTable]:
    """Returns the tables of the first checkpoint or run.

    Files of statistics have none.
    """
    from torchrec_recstore.checkpoint.info import METADATA, read_info
    from torchrec_recstore.planner.forecast_inputs import ForecastTable

    for path in sources:
        if path.is_dir():
            inside = (
                [path]
                if (path / METADATA).is_file()
                else [each.parent for each in path.glob(f"*/{METADATA}")]
            )
            if inside:
                tables = max(
                    (read_info(each) for each in inside), key=lambda info: info.step
                ).tables
                return {
                    name: ForecastTable(t.dim, t.optimizer, t.dtype, t.options)
                    for name, t in tables.items()
                }
    return {}


def _as_json(found: Forecast, of_sample: set[str]) -> dict[str, Any]:
    tables = []
    for table in found.tables:
        numbers = asdict(table)
        tables.append(
            {
                "table": numbers.pop("name"),
                **numbers,
                "rows_of_sample": table.name in of_sample,
            }
        )
    ranks = []
    for rank in found.ranks:
        whole_bytes = {
            "sent_bytes": round(rank.sent_bytes),
            "received_bytes": round(rank.received_bytes),
        }
        ranks.append(
            {
                "rank": rank.rank,
                "step_ms": rank.step_ms,
                **asdict(rank),
                **whole_bytes,
                "limit": rank.limit,
            }
        )
    return {
        "step_ms": found.step_ms,
        "limit": found.limit,
        "boundless_step_ms": found.boundless_step_ms,
        "tables": tables,
        "ranks": ranks,
    }


def _print(found: Forecast, days: float, of_sample: set[str]) -> None:
    later = [f"in {days:g} days"] if days else []
    rows = []
    for name, table in in_order({table.name: table for table in found.tables}):
        counts = [table.rows, table.rows_later] if days else [table.rows]
        ranks = " to ".join(map(str, dict.fromkeys((table.ranks[0], table.ranks[-1]))))
        rows.append(
            [name, table.sharding_type, ranks, *(f"{count:,}" for count in counts)]
        )
    print_table(
        [
            "table",
            "sharding type",
            "ranks",
            "rows",
            *(f"rows {each}" for each in later),
        ],
        rows,
    )
    rows = []
    for rank in found.ranks:
        times = (rank.step_ms, rank.lookups_ms, rank.network_ms, rank.torchrec_ms)
        sizes = [
            rank.sent_bytes,
            rank.received_bytes,
            rank.memory_bytes,
            *([rank.memory_later_bytes] if days else []),
        ]
        shown = [
            *(f"{ms:.3f} ms" for ms in times),
            *(decimal(round(size)) for size in sizes),
        ]
        rows.append([str(rank.rank), *shown, rank.limit])
    columns = [
        "rank",
        "step",
        "lookups",
        "network",
        "torchrec",
        "sent",
        "received",
        "memory",
    ]
    print_table([*columns, *(f"memory {each}" for each in later), "limit"], rows)
    why = (
        f": with more memory, a step takes {found.boundless_step_ms:.3f} ms"
        if found.limit == "memory"
        else ""
    )
    print_line(f"step   {found.step_ms:.3f} ms on the slowest rank")
    print_line(f"limit  {found.limit}{why}")
    if of_sample:
        names = ", ".join(name for name, _ in in_order(dict.fromkeys(of_sample)))
        growth = ", and their growth is that of its second half" if days else ""
        print_line(
            f"rows   those of {names} are the distinct ids of the sample{growth}"
        )
