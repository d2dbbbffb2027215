"""Tests of cold rows on parameter servers: conformance, training, sharing between
processes, and failures.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel

from tests.checkpoint import models
from tests.distributed.workers import run_on_ranks
from tests.recstore_server import Proxy, RecStoreServer
from tests.store.test_tier_failures import Pair, train_until_it_fails
from torchrec_recstore import (
    ServerStore,
    Table,
    TableOptions,
    export_dense_weights,
    flush_tables,
    load_dense_weights,
    ops,
    save_checkpoint,
)
from torchrec_recstore.checkpoint.info import read_chain
from torchrec_recstore.checkpoint.reader import load_rows
from torchrec_recstore.optim import Adagrad, Adam, RowWiseAdagrad
from torchrec_recstore.options import LRU, Expiry, MinFrequency
from torchrec_recstore.store import ColdStoreError, open_cold_store
from torchrec_recstore.store.conformance import check_cold_store
from torchrec_recstore_service.client.connection import Connection
from torchrec_recstore_service.client.server_set import ServerSet
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits
from torchrec_recstore_service.wire.access import Access
from torchrec_recstore_service.wire.table_spec import TableSpec

MAX_ROWS = 24
ADAM = EmbOptimType.ADAM


@pytest.fixture
def both(two_servers: list[RecStoreServer]) -> str:
    return ",".join(server.address for server in two_servers)


def tables_of(servers: str) -> list[set[str]]:
    tables = []
    for address in servers.split(","):
        connection = Connection(address, Access())
        tables.append(set(connection.describe().tables))
        connection.close()
    return tables


@pytest.mark.slow
def test_it_keeps_the_promises_of_a_cold_store(
    server: RecStoreServer, both: str
) -> None:
    before = tables_of(both)
    check_cold_store(ServerStore(server.address))
    check_cold_store(ServerStore(both))
    assert tables_of(both) == before
    check_cold_store(ServerStore(both, shared="conformance"))


_FORGETFUL = """
import sys
import torch
from torchrec_recstore import ServerStore, Table, TableOptions
table = Table(4, options=TableOptions(max_rows=5, cold_store=ServerStore(sys.argv[1])))
for first in range(0, 50, 5):
    table.insert(torch.arange(first, first + 5), torch.ones(5, 4))
assert table.stats().cold_rows == 45
"""


@pytest.mark.slow
def test_a_process_that_ends_leaves_nothing(both: str) -> None:
    before = tables_of(both)
    run = subprocess.run(
        [sys.executable, "-c", _FORGETFUL, both],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert tables_of(both) == before


def test_every_pattern_of_bits_comes_back(both: str) -> None:
    # Infinities, quiet and signalling NaNs, denormal numbers and -0.0, also in rows
    # whose size is not a multiple of 4.
    words = [0x7F800000, 0x7F800001, -1, -(2**31), 1, 0x7FC00000, -0x7FFFFF, 0x3F800000]
    rows = torch.tensor(words, dtype=torch.int32).repeat(50, 1).view(torch.uint8)
    for row_bytes in (32, 31, 29):
        store = open_cold_store(ServerStore(both), name="bits", row_bytes=row_bytes)
        store.put(torch.arange(50), rows[:, :row_bytes])
        found, got = store.get(torch.arange(50))
        assert found.all()
        assert torch.equal(got, rows[:, :row_bytes])
        store.close()


def test_more_rows_than_one_call_takes(
    both: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torchrec_recstore_service.client.server_cold_store._CALL_BYTES", 1000
    )
    store = open_cold_store(ServerStore(both), name="calls", row_bytes=100)
    ids, rows = torch.randperm(95), torch.randint(0, 256, (95, 100), dtype=torch.uint8)
    store.put(ids, rows)
    found, got = store.get(torch.arange(200))
    assert torch.equal(found, torch.arange(200) < 95)
    assert torch.equal(got, rows[ids.argsort()])
    scanned, its_rows = (torch.cat(parts) for parts in zip(*store.scan(), strict=True))
    assert torch.equal(scanned, torch.arange(95))
    assert torch.equal(its_rows, got)
    store.close()


def test_a_server_with_a_bound_gives_no_row_up(
    monkeypatch: pytest.MonkeyPatch, server: RecStoreServer
) -> None:
    made: list[TableSpec] = []
    monkeypatch.setattr(
        ServerSet, "create", lambda self, table, spec: made.append(spec)
    )
    monkeypatch.setattr(ServerSet, "delete", lambda self, table, ids: 0)
    open_cold_store(
        ServerStore(server.address, shared="made"), name="t", row_bytes=8
    ).close()
    # The limits of recstore serve --max-rows 1000 --eviction lru --expire-steps 1
    # --min-frequency 2.
    limits = Limits(
        max_rows=1000, eviction=LRU(), expiry=Expiry(1), admission=MinFrequency(2)
    )
    tables = HostedTables(limits)
    tables.create("t", made[0])
    ids, rows = torch.arange(1000), torch.rand(1000, 2)
    tables.push("t", ids, rows)
    with pytest.raises(ValueError, match="max_rows is 1000"):
        tables.push("t", ids[:10] + 1000, rows[:10])
    found, got = tables.found_rows("t", ids)
    assert found.all()
    assert torch.equal(got, rows)
    tables.close()


@pytest.mark.slow
def test_a_cut_and_a_slow_connection(server: RecStoreServer, proxy: Proxy) -> None:
    store = open_cold_store(
        ServerStore(proxy.address, timeout_s=1.5), name="far", row_bytes=100
    )
    ids, rows = (
        torch.arange(5000),
        torch.randint(0, 256, (5000, 100), dtype=torch.uint8),
    )
    store.put(ids, rows)
    proxy.cut_after = 200_000
    assert torch.equal(store.get(ids)[1], rows)
    assert proxy.cut_after is None
    proxy.held.set()
    for call in (
        lambda: store.get(ids),
        lambda: store.put(ids, rows.flip(0)),
        lambda: store.delete(ids),
        store.scan,
    ):
        begin = time.monotonic()
        with pytest.raises(
            ColdStoreError,
            match=rf"'cold/.*far' on server {proxy.address} (has not|cannot)",
        ):
            call()
        assert time.monotonic() - begin > 0.3
    proxy.held.clear()
    store.put(ids, rows)
    assert torch.equal(store.get(ids)[1], rows)
    store.close()


def train(model: DistributedModelParallel, steps: int) -> None:
    dense = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    for step in range(steps):
        dense.zero_grad()
        model(models.batch(step, distinct=120)).sigmoid().sum().backward()
        dense.step()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_a_model_trains_as_without_a_bound(both: str, sharding_type: str) -> None:
    bounded = TableOptions(max_rows=MAX_ROWS, cold_store=ServerStore(both))
    model, unbounded = (
        models.recstore(sharding_type, ADAM, options=each)
        for each in (bounded, TableOptions())
    )
    for each in (model, unbounded):
        train(each, 20)
    tables = [
        shard.table
        for shards in model.module.sparse.recstore_state.shards.values()
        for shard in shards
    ]
    cold = [table.stats() for table in tables]
    assert all(
        stats.cold_rows > MAX_ROWS // 2 and stats.cold_hits > MAX_ROWS // 2
        for stats in cold
    ), cold
    models.assert_holds(model, models.shards(unbounded))
    assert torch.equal(model.module.over.weight, unbounded.module.over.weight)
    for table in tables:
        table.close()


def trained_on_a_rank(
    rank: int, world_size: int, servers: str, directory: Path
) -> None:
    shared = TableOptions(
        max_rows=2 * MAX_ROWS, cold_store=ServerStore(servers, shared="ranks")
    )
    # Rows and columns are split: each rank has two shards of a table.
    model, unbounded = (
        models.recstore("grid_shard", ADAM, options=options)
        for options in (shared, TableOptions())
    )
    for each in (model, unbounded):
        models.train(each, steps=12, distinct=120)
    flush_tables(model)
    models.assert_holds(model, models.shards(unbounded))
    for name, each in (("shared", model), ("unbounded", unbounded)):
        save_checkpoint(each, directory / name)
    weights = {name: torch.ones(200, 8) for name in models.TABLES}
    load_dense_weights(model, weights)
    flush_tables(model)
    for name, expected in weights.items():
        assert torch.equal(export_dense_weights(model, name, 200), expected)


@pytest.mark.slow
def test_ranks_write_what_processes_of_another_job_read(
    both: str, tmp_path: Path
) -> None:
    run_on_ranks(2, partial(trained_on_a_rank, servers=both, directory=tmp_path))
    bounded = TableOptions(max_rows=10, cold_store=ServerStore(both, shared="ranks"))
    for name in models.TABLES:
        for columns in (range(4), range(4, 8)):
            whole, saved, reader = (
                Table(
                    8,
                    optimizer=Adam(lr=0.1),
                    options=options,
                    name=name,
                    columns=columns,
                )
                for options in (TableOptions(), TableOptions(), bounded)
            )
            load_rows(whole, name, read_chain(tmp_path / "unbounded"))
            load_rows(saved, name, read_chain(tmp_path / "shared"))
            reader.set_state(replace(reader.state(), steps=whole.steps))
            ids, expected = whole.ids(), whole.read_rows(whole.ids())
            assert len(ids) > 2 * MAX_ROWS
            for table, loaded in ((saved, ids[:0]), (reader, torch.arange(200))):
                assert torch.equal(table.ids(), torch.cat([ids, loaded]).unique())
                rows = table.read_rows(ids)
                assert all(torch.equal(rows[key], expected[key]) for key in expected)
    # another split of columns
    assert len(Table(8, optimizer=Adam(lr=0.1), options=bounded, name="user")) == 0
    assert (
        len(
            Table(
                8, torch.float16, Adam(lr=0.1), bounded, name="user", columns=range(4)
            )
        )
        == 0
    )
    Table(8, optimizer=Adagrad(lr=0.1), options=bounded, name="sums")
    with pytest.raises(
        ColdStoreError,
        match=(
            r"table 'cold/ranks/sums.*' exists already with another specification: dim"
        ),
    ):
        Table(8, optimizer=RowWiseAdagrad(lr=0.1), options=bounded, name="sums")


@pytest.mark.slow
def test_a_server_stopped_and_one_killed(
    own_server: RecStoreServer, tmp_path: Path
) -> None:
    other, alone = (
        RecStoreServer(tmp_path / "other"),
        RecStoreServer(tmp_path / "alone"),
    )
    shared = ServerStore(alone.address, shared="kept", timeout_s=10.0)
    store = open_cold_store(shared, name="t", row_bytes=8)
    ids, rows = torch.arange(100), torch.randint(0, 256, (100, 8), dtype=torch.uint8)
    store.put(ids, rows)
    alone.stop()
    alone.start()  # as it was
    assert torch.equal(store.get(ids)[1], rows)
    store.put(ids + 100, rows)

    both = f"{other.address},{own_server.address}"
    pair = Pair(TableOptions(max_rows=500, cold_store=ServerStore(both, timeout_s=3.0)))
    for _ in range(10):
        pair.train()
    own_server.kill()
    begin = time.monotonic()
    gone = (
        rf"cold store ServerStore\(.*server {re.escape(own_server.address)} (cannot be"
        r" reached|has not answered)"
    )
    train_until_it_fails(pair, gone)
    assert time.monotonic() - begin >= 0.5  # the client has retried
    alone.kill()
    alone.start()
    own_server.start()  # lost rows are an error, unlike rows that never existed
    train_until_it_fails(pair, rf"server {re.escape(own_server.address)}.*restarted")
    resident = ops.table_ids(pair.tiered.handle)
    assert len(resident) > 400
    rows_now, expected = pair.tiered.read_rows(resident), pair.whole.read_rows(resident)
    assert all(torch.equal(rows_now[key], expected[key]) for key in expected)
    with pytest.raises(ColdStoreError, match="restarted"):
        store.get(ids)
    # a new store continues from the last save
    again = open_cold_store(shared, name="t", row_bytes=8)
    assert again.get(torch.arange(200))[0].tolist() == [True] * 100 + [False] * 100
    pair.tiered.close()
    other.kill()
    alone.kill()
