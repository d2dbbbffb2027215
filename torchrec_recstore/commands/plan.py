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

from torchrec_recstore.commands.config_file import ConfigFile
from torchrec_recstore.commands.output import (
    AsJson,
    errors_in_one_line,
    in_order,
    print_json,
    print_line,
    print_table,
)

if TYPE_CHECKING:
    from torchrec_recstore.planner.forecast_inputs import ForecastTable, TableFile
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
    config: ConfigFile = None,
) -> None:
    """Plan a training on a number of ranks without starting one, from measured
    statistics.

    Shows the place of each table, and for each rank the time of its lookups, of the
    network and of TorchRec's own work in a step, the bytes that it sends and receives,
    its memory now and after --days of growth, and the limit, the longest of these
    times. With GPUs in the topology file, the copies between host and GPU are a fourth
    part, and the tables show the rows that RecStorePlanner puts into GPU memory and the
    share of a batch's distinct ids that finds them there. The limit of the plan is
    memory if a plan for ranks with more memory is faster. The plan is that of
    RecStorePlanner with the same statistics, with table_wise and row_wise tables. The
    dense part is not counted.

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
        planned_tables, statistics, sampled_names = _inputs(
            sources or [],
            tables,
            parquet,
            batch_size,
            samples_per_day,
            samples_per_step,
        )
        samples = days * (samples_per_day or 0)
        steps = round(samples / (samples_per_step or batch_size))
        result = forecast(
            planned_tables, statistics, machines, ranks, batch_size, steps
        )
        if statistics_out is not None:
            write_statistics(statistics_out, statistics)
    if as_json:
        print_json(_as_json(result, sampled_names))
    else:
        _print(result, days, sampled_names)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Drops the warnings of TorchRec, which has one for each topology, and of torch.fx,
    which TorchRec calls.
    """
    loggers = [logging.getLogger("torchrec"), logging.getLogger("torch.fx")]
    levels = {logger: logger.level for logger in loggers}
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
    measured = combined_statistics(*(read_statistics(path) for path in sources))
    saved = _saved_tables(sources)
    if tables is None and not saved:
        raise ValueError(
            "no SOURCE is a checkpoint or a run, from which the tables are read: pass"
            " one, or --tables"
        )
    file = TableFile("", {}) if tables is None else read_table_file(tables)
    planned = file.with_saved(saved)
    if samples_per_day is not None and samples_per_step is None:
        _check_growth(file, planned, measured)
    steps_per_day = None
    sample_size = samples_per_step or batch_size
    if samples_per_day is not None:
        steps_per_day = samples_per_day / sample_size
    statistics = combined_statistics(file.statistics(steps_per_day), measured)
    sampled_names: set[str] = set()
    if parquet is not None:
        columns = _columns_of_sample(file)
        sampled = sample_statistics(planned, columns, parquet, batch_size, sample_size)
        for name, table in sampled.items():
            if name not in statistics or statistics[name].rows is None:
                sampled_names.add(name)
            else:
                # The sample does not tell which of its ids have a row already, so it
                # does not tell the growth.
                sampled[name] = replace(table, rows=None, rows_per_step=None)
        statistics = combined_statistics(statistics, sampled)
    planned_statistics = {
        name: table for name, table in statistics.items() if name in planned
    }
    return planned, planned_statistics, sampled_names


def _columns_of_sample(file: TableFile) -> dict[str, tuple[str, ...]]:
    """Returns the columns of the Parquet file with the ids of each table."""
    columns = {
        name: table.features for name, table in file.tables.items() if table.features
    }
    if not columns:
        raise ValueError(
            f"{file.path}: no table has features, the columns of the Parquet file"
        )
    return columns


def _check_growth(
    file: TableFile,
    planned: dict[str, ForecastTable],
    measured: dict[str, TableStatistics],
) -> None:
    """Raises ValueError if the growth of a table is known for a step of another run,
    whose number of samples is not known.
    """
    for name, table in measured.items():
        is_stated = name in file.tables and file.tables[name].rows_per_day is not None
        if name in planned and not is_stated and table.rows_per_step is not None:
            raise ValueError(
                f"table {name!r}: a SOURCE tells its growth for a step: pass"
                " --samples-per-step, the number of samples of all ranks in a step"
                " of the measured run"
            )


def _saved_tables(sources: list[Path]) -> dict[str, ForecastTable]:
    """Returns the tables of the first checkpoint or run.

    Files of statistics have none.
    """
    from torchrec_recstore.checkpoint.info import METADATA, read_info
    from torchrec_recstore.planner.forecast_inputs import ForecastTable

    for path in sources:
        if not path.is_dir():
            continue
        if (path / METADATA).is_file():
            checkpoints = [path]
        else:
            checkpoints = [file.parent for file in path.glob(f"*/{METADATA}")]
        if checkpoints:
            infos = [read_info(checkpoint) for checkpoint in checkpoints]
            newest = max(infos, key=lambda info: info.step)
            return {
                name: ForecastTable(
                    table.dim, table.optimizer, table.dtype, table.options
                )
                for name, table in newest.tables.items()
            }
    return {}


def _as_json(result: Forecast, sampled_names: set[str]) -> dict[str, Any]:
    tables = []
    for table in result.tables:
        numbers = asdict(table)
        tables.append(
            {
                "table": numbers.pop("name"),
                **numbers,
                "rows_of_sample": table.name in sampled_names,
            }
        )
    ranks = []
    for rank in result.ranks:
        entry = {"rank": rank.rank, "step_ms": rank.step_ms, **asdict(rank)}
        entry["sent_bytes"] = round(rank.sent_bytes)
        entry["received_bytes"] = round(rank.received_bytes)
        entry["bus_bytes"] = round(rank.bus_bytes)
        entry["limit"] = rank.limit
        ranks.append(entry)
    return {
        "step_ms": result.step_ms,
        "limit": result.limit,
        "boundless_step_ms": result.boundless_step_ms,
        "tables": tables,
        "ranks": ranks,
    }


def _print(
    result: Forecast,
    days: float,
    sampled_names: set[str],
) -> None:
    _print_tables(result, days)
    _print_ranks(result, days)
    print_line(f"step   {result.step_ms:.3f} ms on the slowest rank")
    limit: str = result.limit
    if limit == "memory":
        limit += f": with more memory, a step takes {result.boundless_step_ms:.3f} ms"
    print_line(f"limit  {limit}")
    if sampled_names:
        names = ", ".join(name for name, _ in in_order(dict.fromkeys(sampled_names)))
        growth = ", and their growth is that of its second half" if days else ""
        print_line(
            f"rows   those of {names} are the distinct ids of the sample{growth}"
        )


def _print_tables(result: Forecast, days: float) -> None:
    columns = ["table", "sharding type", "ranks", "rows"]
    if days:
        columns.append(f"rows in {days:g} days")
    has_gpus = _has_gpus(result)
    if has_gpus:
        columns.extend(["rows on GPU", "hits"])
    rows = []
    for name, table in in_order({table.name: table for table in result.tables}):
        first_rank = table.ranks[0]
        last_rank = table.ranks[-1]
        ranks = str(first_rank)
        if last_rank != first_rank:
            ranks += f" to {last_rank}"
        row = [name, table.sharding_type, ranks, f"{table.rows:,}"]
        if days:
            row.append(f"{table.rows_later:,}")
        if has_gpus:
            hits = "" if table.hit_share is None else f"{table.hit_share:.0%}"
            row.extend([f"{table.device_rows:,}", hits])
        rows.append(row)
    print_table(columns, rows)


def _print_ranks(result: Forecast, days: float) -> None:
    has_gpus = _has_gpus(result)
    columns = ["rank", "step", "lookups", "network", "torchrec"]
    sizes_shown = ["sent", "received", "memory"]
    if has_gpus:
        columns.insert(3, "bus")
        sizes_shown.insert(0, "copied")
    columns.extend(sizes_shown)
    if days:
        columns.append(f"memory in {days:g} days")
    columns.append("limit")
    rows = []
    for rank in result.ranks:
        times = [
            rank.step_ms,
            rank.lookups_ms,
            rank.network_ms,
            rank.torchrec_ms,
        ]
        sizes = [rank.sent_bytes, rank.received_bytes, rank.memory_bytes]
        if has_gpus:
            times.insert(2, rank.bus_ms)
            sizes.insert(0, rank.bus_bytes)
        if days:
            sizes.append(rank.memory_later_bytes)
        row = [str(rank.rank)]
        row.extend(f"{time_ms:.3f} ms" for time_ms in times)
        row.extend(decimal(round(size)) for size in sizes)
        row.append(rank.limit)
        rows.append(row)
    print_table(columns, rows)


def _has_gpus(result: Forecast) -> bool:
    """Whether the ranks have GPUs: each step then copies something."""
    return any(rank.bus_bytes for rank in result.ranks)
