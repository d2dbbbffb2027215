"""Training while the cold store fails for some time: no row is lost, and no row starts
again as a new row.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.redis_server import needs_redis, redis_server
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import Adam
from torchrec_recstore.options import RedisStore, RocksDBStore, SSDStore, TableOptions
from torchrec_recstore.store import ColdStoreError, Table

MAX_ROWS = 500
DIM = 16


class Pair:
    """A table with a cold store and a table without max_rows, which are trained on the
    same batches.
    """

    def __init__(self, options: TableOptions, dim: int = DIM) -> None:
        self.tiered = Table(dim, optimizer=Adam(lr=0.1), options=options)
        self.whole = Table(dim, optimizer=Adam(lr=0.1))
        self._groups = [
            PooledGroup([table], [0], "sum") for table in (self.tiered, self.whole)
        ]
        self._step = 0

    def batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._step)
        return torch.randint(0, 300 + 100 * self._step, (400,), generator=generator)

    def train(self) -> None:
        """Trains both tables for one step.

        If the cold store fails, it trains neither.
        """
        ids = self.batch()
        outputs = [
            group(ids, torch.arange(0, 401, 2), train=True) for group in self._groups
        ]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        self._step += 1

    def assert_same(self) -> None:
        ids = self.whole.ids()
        assert torch.equal(self.tiered.ids(), ids)
        rows, expected = self.tiered.read_rows(ids), self.whole.read_rows(ids)
        assert all(torch.equal(rows[key], expected[key]) for key in expected)


def train_until_it_fails(pair: Pair, names: str, most: int = 1000) -> None:
    """Trains until a step fails, repeats that step, and asserts that the failed steps
    change nothing.
    """

    def steps() -> None:
        for _ in range(most):
            pair.train()

    with pytest.raises(ColdStoreError, match=names):
        steps()
    before = pair.tiered.stats()
    with pytest.raises(ColdStoreError, match=names):
        pair.train()
    after = pair.tiered.stats()
    assert after == before
    assert after.steps == pair.whole.stats().steps


@needs_redis
def test_redis_stopped_in_mid_training(tmp_path: Path) -> None:
    with redis_server(
        tmp_path, "--appendonly", "yes", "--appendfsync", "always"
    ) as server:
        options = TableOptions(
            max_rows=MAX_ROWS, cold_store=RedisStore(server.url, retry_seconds=0.3)
        )
        pair = Pair(options)
        for _ in range(10):
            pair.train()
        server.kill()
        begin = time.monotonic()
        train_until_it_fails(pair, f"{re.escape(server.url)}.*cannot be reached")
        assert time.monotonic() - begin >= 0.5  # the call has been repeated
        server.start()
        for _ in range(10):
            pair.train()
        assert pair.tiered.stats().cold_hits > MAX_ROWS
        pair.assert_same()
        pair.tiered.close()


@needs_redis
def test_redis_back_before_the_retries_end(tmp_path: Path) -> None:
    with redis_server(
        tmp_path, "--appendonly", "yes", "--appendfsync", "always"
    ) as server:
        pair = Pair(
            TableOptions(
                max_rows=MAX_ROWS, cold_store=RedisStore(server.url, retry_seconds=20)
            )
        )
        for _ in range(10):
            pair.train()
        server.kill()
        back = threading.Timer(0.5, server.start)
        back.start()
        # A call that was repeated must leave nothing to the garbage collector that
        # keeps a step's rows from eviction.
        gc.disable()
        try:
            for _ in range(10):
                pair.train()
        finally:
            gc.enable()
        back.join()
        pair.assert_same()
        pair.tiered.close()


@needs_redis
@pytest.mark.parametrize("flush", [False, True])
def test_rows_that_redis_has_lost_do_not_start_anew(
    tmp_path: Path, flush: bool
) -> None:
    with redis_server(tmp_path) as server:
        pair = Pair(
            TableOptions(
                max_rows=MAX_ROWS, cold_store=RedisStore(server.url, retry_seconds=0.3)
            )
        )
        for _ in range(10):
            pair.train()
        if flush:
            with server.client() as client:
                client.flushall()
        else:
            server.kill()
            server.start()
        train_until_it_fails(pair, "has lost its rows")
        pair.tiered.close()


@pytest.mark.parametrize("store", [SSDStore, RocksDBStore])
def test_a_full_disk_in_mid_training(
    small_disk: Path, store: type[SSDStore | RocksDBStore]
) -> None:
    pair = Pair(
        TableOptions(max_rows=MAX_ROWS, cold_store=store(str(small_disk))), dim=400
    )
    train_until_it_fails(pair, f"{small_disk}.*No space")
    rows = pair.tiered.read_rows(pair.tiered.ids())  # the rows can still be read
    assert len(rows["weight"]) == len(pair.tiered)
    (small_disk / "ballast").unlink()
    for _ in range(3):
        pair.train()
    pair.assert_same()
    pair.tiered.close()


def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: RocksDBStore(str(tmp_path / "file")), "file"),
        (lambda: SSDStore(str(tmp_path / "file")), "file"),
        (
            lambda: RedisStore("redis://me:secret@127.0.0.1:1", retry_seconds=0),
            r"redis://127\.0\.0\.1:1",
        ),
    ]
    for store, names in cases:
        with pytest.raises(ColdStoreError, match=names) as failure:
            Table(4, options=TableOptions(max_rows=10, cold_store=store()))  # type: ignore[arg-type]
        assert "secret" not in str(failure.value)
    with pytest.raises(TypeError, match="no cold store is registered for str"):
        Table(4, options=TableOptions(max_rows=10, cold_store="/tmp"))


def test_a_forked_process_ends_no_rows_of_its_parent(tmp_path: Path) -> None:
    options = TableOptions(max_rows=10, cold_store=SSDStore(str(tmp_path)))
    table = Table(4, options=options)
    ids, rows = torch.arange(100), torch.randn(100, 4)
    for part in ids.split(10):
        table.insert(part, rows[part])
    child = os.fork()
    if child == 0:
        table.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(table.lookup(ids), rows)
    table.close()
