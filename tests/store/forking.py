"""Forks processes while a thread looks up rows without a pause.

It runs in a separate process.

python -m tests.store.forking CHILDREN DIRECTORY [REDIS_URL [SERVER]]

Each child does everything that a forked process may do with the objects of its parent:
it calls tables, drops tables and outputs, collects garbage, makes its own tables, and
exits. No child may hang.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrec_recstore import SGD, RowWiseAdagrad, Table, TableOptions
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.options import RedisStore, RocksDBStore, ServerStore
from torchrec_recstore.store import ColdStoreError
from torchrec_recstore_service import RecStoreClient

DEADLINE_S = 200.0
IDS = torch.arange(50_000)
STATUS = 7


def refused(call: Callable[[], object], text: str = "'spawn'") -> None:
    """Checks that ``call`` raises an error that suggests a fix."""
    with pytest.raises((ValueError, ColdStoreError), match=text):
        call()


class Parent:
    """Tables of several kinds, and a thread that uses all tables."""

    def __init__(self, directory: Path, redis: str, server: str) -> None:
        self.rocksdb = RocksDBStore(str(directory / "cold"))
        stores: list[RocksDBStore | RedisStore | ServerStore] = [self.rocksdb]
        stores += [RedisStore(redis)] if redis else []
        stores += [ServerStore(server)] if server else []
        self.plain = Table(16, name="plain")
        self.cold = [
            Table(4, name="cold", options=TableOptions(max_rows=3000, cold_store=store))
            for store in stores
        ]
        self.pooled = PooledGroup(
            [Table(8, optimizer=SGD(lr=0.1), name="pooled")], [0], "sum"
        )
        self.output = self.forward()  # with a graph, whose backward has not run
        self.rows = self.plain.lookup(IDS, train=True)
        self.snapshot = self.plain.snapshot()
        self.clients = [
            RecStoreClient(),
            *([RecStoreClient([server])] if server else []),
        ]
        for client in self.clients:
            client.init_data("t", (10, 8))
        self.rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def forward(self) -> Tensor:
        out: Tensor = self.pooled(IDS, torch.arange(0, len(IDS) + 1, 5), train=True)
        return out

    def __enter__(self) -> Parent:
        self._thread.start()
        while self.rounds == 0:
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            self.plain.lookup(IDS + self.rounds, train=True)
            self.plain.update(IDS, torch.ones(len(IDS), 16))
            self.forward().sum().backward()
            some = torch.arange(2000) + 500 * self.rounds % 20000
            for table in self.cold:
                table.lookup(some, train=True)
                table.update(some, torch.ones(2000, 4))
            for client in self.clients:
                client.update("t", some, torch.ones(2000, 8))
                client.wait_for_prefetch(client.prefetch("t", some))
            self.rounds += 1


def in_child(parent: Parent) -> None:
    for call in (
        lambda: parent.plain.lookup(IDS),
        lambda: parent.plain.update(IDS, torch.ones(len(IDS), 16)),
        lambda: len(parent.plain),
        parent.plain.snapshot,
        lambda: parent.snapshot.read(1),
        parent.forward,
        parent.output.sum().backward,
        lambda: Table(4, options=TableOptions(max_rows=10, cold_store=parent.rocksdb)),
    ):
        refused(call)
    for table in parent.cold:
        refused(lambda: table.lookup(IDS[:100], train=True))  # noqa: B023
        refused(lambda: table.remove(IDS[:100]))  # noqa: B023
        refused(table.ids)
        table.close()
    for client in parent.clients:
        refused(lambda: client.pull("t", IDS), "make one in each")  # noqa: B023
        refused(lambda: client.wait_for_prefetch(1), "make one in each")  # noqa: B023
        client.close()
    own = Table(16, optimizer=RowWiseAdagrad(lr=0.1), name="own")
    own.update(IDS, own.lookup(IDS, train=True))
    assert len(own) == len(IDS)
    parent.rows.add_(1)  # the rows have their own memory
    del (
        parent.rows,
        parent.output,
        parent.pooled,
        parent.snapshot,
        parent.plain,
        parent.cold,
        parent.clients,
    )
    gc.collect()


def fork(work: Callable[[], None], leave: Callable[[int], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        leave(STATUS)
    return child


def main(count: int, directory: Path, redis: str = "", server: str = "") -> None:
    children = {}
    with Parent(directory, redis, server) as parent:
        for number in range(count):
            time.sleep(0.003 * (number % 20))
            # multiprocessing ends with os._exit(). sys.exit() runs the exit functions
            # and drops all objects.
            children[
                fork(lambda: in_child(parent), os._exit if number % 2 else sys.exit)
            ] = number
        deadline = time.monotonic() + DEADLINE_S
        hung, failed = [], []
        for child, number in children.items():
            while (ended := os.waitpid(child, os.WNOHANG))[
                0
            ] == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            if ended[0] == 0:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                hung.append(number)
            elif os.waitstatus_to_exitcode(ended[1]) != STATUS:
                failed.append(number)
    print(
        f"{count} children beside {parent.rounds} rounds: {len(hung)} hung {hung},"
        f" {len(failed)} failed {failed}"
    )
    # The parent still works, and has all of its cold rows.
    parent.plain.update(IDS, parent.plain.lookup(IDS))
    for table in parent.cold:
        ids = table.ids()
        assert len(table.read_rows(ids)["weight"]) == len(table) > 3000
        table.close()
    sys.exit(bool(hung or failed))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
