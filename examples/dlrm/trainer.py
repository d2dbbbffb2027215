"""Runs ``train.py``: creates the process group, trains, evaluates and reports."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoints import Checkpoints
from common.command import DataError
from common.page import show
from common.processes import on_rank_0, process_group, progress_bar
from common.report import check_file, console_for, in_words, print_tables, result_of, since, write_json
from common.run_folder import log_folder, sole_use
from common.run_log import RunLog
from common.run_settings import Bounds
from common.sharding import lr_scheduler, stats_of_tables
from criteo import ID_NAMES
from loops import Training, evaluate, plain_steps, prefetched_steps, train_epoch
from rich.console import Console
from settings import Settings
from sharded import build
from sources import RowSource, behind, open_on_all_ranks, open_source, splits, steps_in_epoch, steps_of
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

EXAMPLE = "dlrm"
EVALUATION_ROWS = 4096


def train(settings: Settings) -> None:
    """Creates the process group, trains, evaluates and reports.

    Raises:
        DataError: The data or the checkpoints cannot be used, or the settings do not fit the group. It is raised on
            every rank.
    """
    with process_group():
        on_rank_0(partial(check_file, settings.json_out))
        result = train_in_group(settings)
        if dist.get_rank() == 0:
            _report(console_for(settings.json_out), result, settings.bounds)
            show(result["log_dir"])
            write_json(settings.json_out, result)


def train_in_group(settings: Settings) -> dict[str, Any]:
    """Trains and evaluates. Collective; the process group must be initialized.

    Returns:
        The settings and the result of the run.

    Raises:
        DataError: See :func:`train`.
    """
    settings.check(dist.get_world_size())
    with ExitStack() as folders:
        # A resumed run must find the log again, so its folder is below the folder of checkpoints.
        fixed = settings.checkpoint / "log" if settings.checkpoint else None
        if settings.checkpoint:
            folders.enter_context(sole_use(settings.checkpoint))
        checkpoints = Checkpoints(settings)
        folder = folders.enter_context(log_folder(settings, EXAMPLE, fixed))
        source = open_on_all_ranks(settings)
        shown = settings.shown() | {"data": source.path, "world_size": dist.get_world_size()}
        result = _fit(settings, source, checkpoints, folder, shown)
        return shown | {"log_dir": str(folder) if folder else None} | result


def _fit(
    settings: Settings, source: RowSource, checkpoints: Checkpoints, folder: Path | None, shown: dict[str, Any]
) -> dict[str, Any]:
    training_part, validation, test = splits(source)
    total_steps = steps_in_epoch(settings, source, training_part) * settings.epochs
    if settings.warmup_steps > total_steps:
        raise DataError(f"--warmup-steps {settings.warmup_steps} is more than the run's {total_steps:,} steps")
    checkpoints.identify(source.fingerprint)
    training = checkpoints.restore(*build(settings))
    progress = training.progress
    resumed = None
    if checkpoints.resumed_from:
        resumed = f"resumed at step {progress.step:,} of {total_steps:,} from {checkpoints.resumed_from}"
        _say(resumed)
    schedule = (settings.lr_schedule, settings.warmup_steps, total_steps)
    scheduler = lr_scheduler(training.optimizer, *schedule, first_step=progress.step)
    samples_before, seconds, loss, val_auc = progress.samples, 0.0, float("nan"), None
    table_stats = partial(stats_of_tables, settings, ID_NAMES, training.model)
    tables, first_step = table_stats(), progress.step
    run = (training.model, training.optimizer, table_stats, progress.step, progress.samples)
    log = RunLog(folder, EXAMPLE, settings, shown, *run)
    for epoch in range(progress.epoch, settings.epochs):
        if epoch > progress.epoch:
            progress.next_epoch()
        label = f"epoch {epoch + 1}/{settings.epochs}"
        part = f"{label}, resumed" if progress.epoch_steps else label
        begin = time.perf_counter()
        _finish_epoch(settings, source, training_part, training, scheduler, checkpoints, log, part)
        loss = progress.mean_loss()
        seconds += time.perf_counter() - begin
        val_auc, val_logloss = _evaluate(settings, source, validation, training.model, "validation")
        log.add({"AUC/validation": val_auc, "loss/validation": val_logloss})
        _say(f"{label}: training loss {loss:.4f}, validation AUC {_number(val_auc)}")
        before, tables = tables, table_stats()
        if settings.bounds.flags():
            _say(f"{part}: {in_words(since(before, tables), settings.bounds)}")
    test_auc, test_logloss = _evaluate(settings, source, test, training.model, "test")
    log.add({"AUC/test": test_auc, "loss/test": test_logloss})
    result = {
        "resumed": resumed,
        "train_steps": progress.step,
        "train_samples": progress.samples,
        "skipped_rows": source.bad_rows,
        "train_samples_per_second": (progress.samples - samples_before) / seconds,
        "train_loss": loss,
        "val_auc": val_auc,
        "test_auc": test_auc,
        "test_logloss": test_logloss,
        **result_of(table_stats(), first_step),
    }
    log.finish(result)
    return result


def _finish_epoch(
    settings: Settings,
    source: RowSource,
    part: range,
    training: Training,
    scheduler: LRScheduler,
    checkpoints: Checkpoints,
    log: RunLog,
    label: str,
) -> None:
    """Trains on the rest of an epoch, and saves checkpoints when they are due and at the end."""
    progress = training.progress
    left = behind(source.bad_lines, part, progress.epoch_steps * settings.batch_size)
    with (
        progress_bar(desc=label, unit=" samples", total=len(part), initial=progress.epoch_samples) as bar,
        closing(steps_of(settings, source, left, settings.batch_size, even=True)) as steps,
    ):
        run = prefetched_steps if settings.servers else plain_steps
        train_epoch(training, scheduler, run(training, steps, log), bar, checkpoints.save_if_due, log)
        checkpoints.save(training)


def _evaluate(
    settings: Settings, source: RowSource, part: range, model: nn.Module, label: str
) -> tuple[float | None, float | None]:
    with (
        progress_bar(desc=label, unit=" samples", total=len(part), leave=False) as bar,
        closing(steps_of(settings, source, part, max(settings.batch_size, EVALUATION_ROWS))) as steps,
    ):
        return evaluate(model, steps, bar)


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _report(console: Console, result: dict[str, Any], bounds: Bounds) -> None:
    console.print(f"{result['backend']}, {result['sharding']}, world size {result['world_size']}")
    print_tables(console, result, bounds)
    if result["resumed"]:
        console.print(result["resumed"], soft_wrap=True, highlight=False)
    if result["skip_bad_rows"]:
        console.print(f"bad rows skipped   {result['skipped_rows']:,}")
    console.print(f"training samples   {result['train_samples']:,}")
    console.print(f"training samples/s {result['train_samples_per_second']:,.0f}")
    console.print(f"test AUC           {_number(result['test_auc'])}")
    console.print(f"test logloss       {_number(result['test_logloss'])}")


def read(settings: Settings) -> None:
    """Reads all data, makes the batches of training without training on them, and prints the rate.

    Raises:
        DataError: The data cannot be used, or the result cannot be written.
    """
    check_file(settings.json_out)
    source = open_source(settings)
    samples = 0
    begin = time.perf_counter()
    with (
        progress_bar(desc="reading", unit=" samples", total=source.num_rows, leave=False) as bar,
        closing(steps_of(settings, source, range(source.num_rows), settings.batch_size)) as steps,
    ):
        for step in steps:
            samples += step.global_rows
            bar.update(step.global_rows)
    rate = samples / (time.perf_counter() - begin)
    console = console_for(settings.json_out)
    skipped = f"{source.bad_rows:,} bad rows skipped"
    console.print(f"{samples:,} samples read from {source.path}, {skipped}", soft_wrap=True, highlight=False)
    console.print(f"reader samples/s   {rate:,.0f}", highlight=False)
    write_json(
        settings.json_out,
        {
            "data": source.path,
            "batch_size": settings.batch_size,
            "samples": samples,
            "skipped_rows": source.bad_rows,
            "reader_samples_per_second": rate,
        },
    )
