"""Runs ``train.py``: trains the two-tower model, computes the recall and reports."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.command import DataError
from common.page import show
from common.processes import on_rank_0, process_group, progress_bar
from common.report import check_file, console_for, print_tables, result_of, write_json
from common.run_folder import log_folder
from common.run_log import RunLog
from common.run_settings import Bounds
from common.sharding import shard, stats_of_tables
from rich.console import Console
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from two_tower.batches import FeatureStore, shuffled
from two_tower.movielens import MovieLens, load
from two_tower.settings import Settings
from two_tower.towers import TwoTower, in_batch_softmax

EXAMPLE = "two_tower"
TOP = 10
EVALUATION_ROWS = 1024
LOSS_EVERY_STEPS = 20


class Data:
    """The interactions and the features of users and items as tensors.

    Args:
        movielens: The data that was read.
        modulo: The divisor that ids are taken modulo of. None: raw ids.
    """

    def __init__(self, movielens: MovieLens, modulo: int | None) -> None:
        self.users = FeatureStore(movielens.users, modulo)
        self.items = FeatureStore(movielens.items, modulo)
        self.train = torch.from_numpy(movielens.train)
        self.test = torch.from_numpy(movielens.test)
        counts = self.train[:, 1].bincount(minlength=self.items.num_rows)
        self.log_shares = (counts / len(self.train)).log()


def train(settings: Settings) -> None:
    """Creates the process group, trains, evaluates and reports.

    Raises:
        DataError: The data cannot be used, or the settings do not fit the data or the group. It is raised on every
            rank.
    """
    with process_group():
        on_rank_0(partial(check_file, settings.json_out))
        data = Data(load(settings.data), settings.modulo)
        samples = len(data.train)
        if settings.batch_size > samples:
            raise DataError(f"--batch-size {settings.batch_size} is more than the {samples} training interactions")
        settings.check(dist.get_world_size())
        shown = settings.shown() | {"world_size": dist.get_world_size()}
        with log_folder(settings, EXAMPLE) as folder:
            result = shown | {"log_dir": str(folder) if folder else None} | _fit(settings, data, folder, shown)
        if dist.get_rank() == 0:
            _report(console_for(settings.json_out), result, settings.bounds)
            show(result["log_dir"])
            write_json(settings.json_out, result)


def _fit(settings: Settings, data: Data, folder: Path | None, shown: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    towers = TwoTower(data.users.names, data.items.names, settings.dim, settings.declared_rows)
    features = [*data.users.names, *data.items.names]
    model, optimizer = shard(settings, features, towers)
    table_stats = partial(stats_of_tables, settings, features, model)
    log = RunLog(folder, EXAMPLE, settings, shown, model, optimizer, table_stats)
    samples, loss = 0, float("nan")
    begin = time.perf_counter()
    for epoch in range(settings.epochs):
        epoch_samples, loss = train_epoch(model, optimizer, data, settings, epoch, log)
        samples += epoch_samples
    seconds = time.perf_counter() - begin
    recalled = recall(model, data)
    log.add({"recall/test": recalled})
    result = {
        "train_samples": samples,
        "train_samples_per_second": samples / seconds,
        "train_loss": loss,
        "test_users": len(data.test),
        "items": data.items.num_rows,
        f"recall_at_{TOP}": recalled,
        **result_of(table_stats()),
    }
    log.finish(result)
    return result


def train_epoch(
    model: nn.Module, optimizer: CombinedOptimizer, data: Data, settings: Settings, epoch: int, log: RunLog
) -> tuple[int, float]:
    """Trains on every interaction once. Collective.

    Returns:
        The number of samples over all ranks, and their mean loss.
    """
    model.train()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    label = f"epoch {epoch + 1}/{settings.epochs}"
    # Every epoch of every run has a different seed.
    order_seed = settings.seed * settings.epochs + epoch
    steps = 0
    # A list of the loss tensors would fragment the memory that each step frees, and the memory use would grow in each
    # step by the size of a batch's scores.
    loss_sum = torch.zeros((), dtype=torch.float64)
    with progress_bar(desc=label, unit=" samples", total=len(data.train)) as bar:
        log.wants_batch()
        for pairs in shuffled(data.train, settings.batch_size, order_seed, rank, world_size):
            log.has_batch()
            users, items = pairs[:, 0], pairs[:, 1]
            optimizer.zero_grad(set_to_none=True)
            user_vectors, item_vectors = model(data.users.pick(users), data.items.pick(items))
            loss = in_batch_softmax(user_vectors, item_vectors, items, data.log_shares[items])
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
            steps += 1
            log.step(settings.batch_size, loss)
            if steps % LOSS_EVERY_STEPS == 1:
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update(settings.batch_size)
            log.wants_batch()
    log.point()
    dist.all_reduce(loss_sum)
    mean = float(loss_sum) / (steps * world_size)
    if rank == 0:
        print(f"{label}: training loss {mean:.4f}", file=sys.stderr)
    return steps * settings.batch_size, mean


@torch.no_grad()
def recall(model: DistributedModelParallel, data: Data) -> float:
    """Returns the share of test users whose test item is among the ``TOP`` best items that they were not trained on.

    Collective. Every rank ranks the items for all users, because distributing so little work would not be faster.
    """
    model.eval()
    towers: TwoTower = model.module
    item_vectors = _in_pieces(towers.item, data.items)
    user_vectors = _in_pieces(towers.user, data.users)
    seen = torch.zeros(data.users.num_rows, data.items.num_rows, dtype=torch.bool)
    seen[data.train[:, 0], data.train[:, 1]] = True
    hits = 0
    for pairs in data.test.split(EVALUATION_ROWS):
        users, items = pairs[:, 0], pairs[:, 1]
        scores = (user_vectors[users] @ item_vectors.T).masked_fill(seen[users], -torch.inf)
        best = scores.topk(min(TOP, data.items.num_rows)).indices
        hits += int((best == items[:, None]).sum())
    return hits / len(data.test)


def _in_pieces(tower: nn.Module, features: FeatureStore) -> Tensor:
    pieces = torch.arange(features.num_rows).split(EVALUATION_ROWS)
    return torch.cat([tower(features.pick(rows)) for rows in pieces])


def _report(console: Console, result: dict[str, Any], bounds: Bounds) -> None:
    console.print(f"{result['backend']}, {result['sharding']}, world size {result['world_size']}")
    print_tables(console, result, bounds)
    console.print(f"training samples   {result['train_samples']:,}")
    console.print(f"training samples/s {result['train_samples_per_second']:,.0f}")
    console.print(f"test users, items  {result['test_users']:,}, {result['items']:,}")
    console.print(f"recall@{TOP}          {result[f'recall_at_{TOP}']:.4f}")
