"""The run behind ``train.py``: process group, training loop, evaluation, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator as ReadAhead
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from batches import BatchMaker, RowSource, Step, read_steps
from common.command import DataError
from common.processes import process_group, progress_bar, rank_and_world_size
from common.report import check_folder, print_tables, write_json
from common.sharding import table_sizes
from criteo import CriteoFile
from criteo_format import ID_NAMES
from generator import Generator
from rich.console import Console
from settings import Settings
from sharded import build
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from tqdm import tqdm

GENERATED_ROWS = 800_000
EVALUATION_ROWS = 4096
LOSS_EVERY_STEPS = 20


def open_source(settings: Settings) -> RowSource:
    """Opens the data; a file is read through once, to count its lines and check each.

    Raises:
        DataError: the file cannot be read, or see ``CriteoFile.scan``.
    """
    if settings.data is None:
        return Generator(settings.limit_rows or GENERATED_ROWS, settings.seed)
    file = CriteoFile(settings.data, skip_bad_rows=settings.skip_bad_rows, limit_rows=settings.limit_rows)
    try:
        with progress_bar(desc="checking", unit=" rows", leave=False) as bar:
            file.scan(bar.update)
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror}") from error
    return file


def open_on_all_ranks(settings: Settings) -> RowSource:
    """``open_source`` on rank 0, whose findings the others take over; an error is an error on every rank.

    Raises:
        DataError: rank 0 cannot use the data, or another rank cannot open the file.
    """
    source: RowSource | None = None
    error: str | None = None
    try:
        if dist.get_rank() == 0:
            source = open_source(settings)
        elif settings.data is not None:
            settings.data.open("rb").close()
    except DataError as caught:
        error = str(caught)
    except OSError as caught:
        error = f"{settings.data} on rank {dist.get_rank()}: {caught.strerror}"
    found: list[tuple[RowSource | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(found, (source, error))
    for _, message in found:
        if message is not None:
            raise DataError(message)
    source = found[0][0]
    assert source is not None
    return source


def splits(source: RowSource) -> tuple[range, range, range]:
    """Splits rows by time into 80 % training, 10 % validation, 10 % test.

    Raises:
        DataError: a part would be empty.
    """
    bounds = [0, source.num_rows * 8 // 10, source.num_rows * 9 // 10, source.num_rows]
    train, validation, test = (range(*pair) for pair in pairwise(bounds))
    if not (train and validation and test):
        raise DataError(f"{source.path}: {source.num_rows} rows are too few to split 80/10/10")
    return train, validation, test


def steps_of(
    settings: Settings, source: RowSource, part: range, batch_rows: int, even: bool = False
) -> ReadAhead[Step, None, None]:
    """Yields this rank's steps of a part of the log, as many as every other rank's; ``even``: see ``BatchMaker``."""
    rank, world_size = rank_and_world_size()
    return read_steps(source, part.start, part.stop, batch_rows, BatchMaker(rank, world_size, settings.modulo, even))


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[Step], bar: tqdm[Any]
) -> tuple[int, float]:
    """Trains on every step once; collective.

    Returns:
        Samples over all ranks, and their mean loss.
    """
    model.train()
    samples = 0
    loss_sum = torch.zeros((), dtype=torch.float64)
    for number, (batch, global_rows) in enumerate(steps):
        optimizer.zero_grad(set_to_none=True)
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach() * global_rows
        samples += global_rows
        if number % LOSS_EVERY_STEPS == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        bar.update(global_rows)
    dist.all_reduce(loss_sum)
    return samples, float(loss_sum) / (samples * dist.get_world_size()) if samples else float("nan")


@torch.no_grad()
def evaluate(model: nn.Module, steps: Iterator[Step]) -> tuple[float | None, float | None]:
    """Computes AUC and logloss over all ranks; collective.

    Returns:
        (AUC, logloss); the AUC is None where only one label occurs, both where there is no sample.
    """
    model.eval()
    auc, logloss, positives = BinaryAUROC(), MeanMetric(), MeanMetric()
    samples = 0
    for batch, global_rows in steps:
        _, (loss, logits, labels) = model(batch)
        # In double: float32's sigmoid makes ties of confident predictions.
        auc.update(torch.sigmoid(logits.double()), labels)
        logloss.update(loss.double(), len(labels))
        positives.update(labels.double())
        samples += global_rows
    if not samples:
        return None, None
    one_label = float(positives.compute()) in (0.0, 1.0)
    area = float(auc.compute())
    return None if one_label else area, float(logloss.compute())


def train(settings: Settings) -> None:
    """Trains, evaluates and reports, on every rank of the group.

    Raises:
        DataError: the data cannot be used, on every rank alike, or the settings do not fit the group.
    """
    check_folder(settings.json_out)
    with process_group():
        settings.check(dist.get_world_size())
        source = open_on_all_ranks(settings)
        result = asdict(settings) | {"data": source.path, "world_size": dist.get_world_size()}
        del result["json_out"]
        result |= _fit(settings, source)
        if dist.get_rank() == 0:
            _report(result)
            write_json(settings.json_out, result)


def _fit(settings: Settings, source: RowSource) -> dict[str, Any]:
    training, validation, test = splits(source)
    evaluation_rows = max(settings.batch_size, EVALUATION_ROWS)
    model, optimizer = build(settings)
    samples, seconds, loss, val_aucs = 0, 0.0, float("nan"), []
    for epoch in range(settings.epochs):
        label = f"epoch {epoch + 1}/{settings.epochs}"
        with (
            progress_bar(desc=label, unit=" samples", total=len(training)) as bar,
            closing(steps_of(settings, source, training, settings.batch_size, even=True)) as steps,
        ):
            begin = time.perf_counter()
            epoch_samples, loss = train_epoch(model, optimizer, steps, bar)
            seconds += time.perf_counter() - begin
            samples += epoch_samples
        with closing(steps_of(settings, source, validation, evaluation_rows)) as steps:
            val_aucs.append(evaluate(model, steps)[0])
        if dist.get_rank() == 0:
            print(f"{label}: training loss {loss:.4f}, validation AUC {_number(val_aucs[-1])}", file=sys.stderr)
    with closing(steps_of(settings, source, test, evaluation_rows)) as steps:
        test_auc, test_logloss = evaluate(model, steps)
    rows, sizes = table_sizes(settings, ID_NAMES, model)
    return {
        "train_samples": samples,
        "skipped_rows": source.bad_rows,
        "train_samples_per_second": samples / seconds,
        "train_loss": loss,
        "val_auc": val_aucs[-1],
        "test_auc": test_auc,
        "test_logloss": test_logloss,
        "rows": rows,
        "bytes": sizes,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _report(result: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{result['backend']}, {result['sharding']}, world size {result['world_size']}")
    print_tables(console, result["rows"], result["bytes"])
    if result["skip_bad_rows"]:
        console.print(f"bad rows skipped   {result['skipped_rows']:,}")
    console.print(f"training samples   {result['train_samples']:,}")
    console.print(f"training samples/s {result['train_samples_per_second']:,.0f}")
    console.print(f"test AUC           {_number(result['test_auc'])}")
    console.print(f"test logloss       {_number(result['test_logloss'])}")


def read(settings: Settings) -> None:
    """Runs the reader alone over the whole log, making the batches of training, and prints its rate.

    Raises:
        DataError: the data cannot be used.
    """
    source = open_source(settings)
    samples = 0
    begin = time.perf_counter()
    with closing(steps_of(settings, source, range(source.num_rows), settings.batch_size)) as steps:
        for step in steps:
            samples += step.global_rows
    rate = samples / (time.perf_counter() - begin)
    print(f"{samples:,} samples read from {source.path}, {source.bad_rows:,} bad rows skipped")
    print(f"reader samples/s   {rate:,.0f}")
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
