"""Forked processes of a process with a table: calls of the table raise an error at
once, and nothing hangs.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.recstore_server import RecStoreServer
from tests.redis_server import PROGRAM, redis_server
from torchrec_recstore import Table

ROOT = Path(__file__).parents[2]
IDS = torch.arange(20_000)


def _run(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.forking", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.slow
def test_children_are_refused_at_once_and_do_not_hang(tmp_path: Path) -> None:
    """The parent has tables with stores in Redis and in a server, too."""
    with ExitStack() as servers:
        redis = (
            ""
            if PROGRAM is None
            else servers.enter_context(redis_server(tmp_path / "redis")).url
        )
        server = RecStoreServer(tmp_path / "data")
        servers.callback(server.kill)
        _run(20, tmp_path, redis, server.address)


class _Batches(Dataset[Tensor]):
    """A data set of ids, or, with a table, of the rows of these ids."""

    def __init__(self, table: Table | None = None) -> None:
        self._table = table

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> Tensor:
        return (
            torch.arange(place, place + 8)
            if self._table is None
            else self._table.lookup(torch.arange(8))
        )


@contextmanager
def _trained_all_the_time(table: Table) -> Iterator[None]:
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            table.update(IDS, table.lookup(IDS, train=True))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.timeout(240)
def test_a_data_loader_forks_its_workers_beside_training() -> None:
    table = Table(16, name="t_user")
    # each worker has a copy of them, and frees it
    outputs = [table.lookup(IDS, train=True)]
    with _trained_all_the_time(table):
        for _ in range(4):
            batches = DataLoader(
                _Batches(), batch_size=8, num_workers=2, multiprocessing_context="fork"
            )
            for ids in batches:
                outputs = [table.lookup(ids.flatten(), train=True)]
        assert outputs[0].shape == (64, 16)
        touching = DataLoader(
            _Batches(table), num_workers=1, multiprocessing_context="fork"
        )
        with pytest.raises(
            ValueError,
            match=(
                r"'t_user': the table was made before this process was forked.* 'spawn'"
            ),
        ):
            next(iter(touching))
