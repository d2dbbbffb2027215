"""Checkpoints of tables with bounds contain the rows of cold stores and the counts of
admission.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel

from tests.distributed.workers import run_on_ranks
from tests.processes import run_forked_command
from tests.store.dict_store import DictStore, DictStoreOptions
from torchrec_recstore import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    RedisStore,
    RocksDBStore,
    Table,
    TableOptions,
    async_save,
    compact_checkpoint,
    load_checkpoint,
    read_info,
    save_checkpoint,
    table_stats,
)
from torchrec_recstore.checkpoint import writer
from torchrec_recstore.checkpoint.compare import compare_chains
from torchrec_recstore.checkpoint.info import read_chain

from . import models

MAX_ROWS = 24
COLD = TableOptions(max_rows=MAX_ROWS, eviction=LRU(), cold_store=DictStoreOptions())
ADAM = EmbOptimType.ADAM


def trained(
    options: TableOptions, seed: int = 0, steps: int = 10, **kinds: Any
) -> DistributedModelParallel:
    model = models.recstore(options=options, **kinds)
    train(model, seed, steps)
    return model


def train(model: DistributedModelParallel, seed: int = 0, steps: int = 10) -> None:
    for step in range(steps):
        model(models.batch(seed + step, distinct=120)).sum().backward()


def shards_of(model: DistributedModelParallel) -> list[Table]:
    return [
        shard.table
        for shards in model.module.sparse.recstore_state.shards.values()
        for shard in shards
    ]


def cold_rows(model: DistributedModelParallel) -> int:
    return sum(table.stats().cold_rows for table in shards_of(model))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 700)


@pytest.mark.usefixtures("one_rank", "small_parts")
@pytest.mark.parametrize("ascending", [True, False])
def test_a_checkpoint_holds_cold_rows_and_loads_anywhere(
    tmp_path: Path, ascending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DictStore, "ascending_snapshots", ascending)
    model, unbounded = (
        trained(COLD, optimizer=ADAM),
        trained(TableOptions(), optimizer=ADAM),
    )
    held = models.shards(unbounded)
    models.assert_holds(model, held)
    assert cold_rows(model) > MAX_ROWS
    save_checkpoint(model, tmp_path / "cold")
    save_checkpoint(unbounded, tmp_path / "unbounded")
    difference = compare_chains(
        read_chain(tmp_path / "cold"), read_chain(tmp_path / "unbounded")
    )
    assert all(
        set(table.facts) == {"options"} and table.changed == 0
        for table in difference.tables.values()
    )
    for options in (
        COLD,
        TableOptions(),
        TableOptions(max_rows=500, cold_store=RocksDBStore(str(tmp_path / "other"))),
    ):
        other = trained(options, seed=50, optimizer=ADAM)
        load_checkpoint(other, tmp_path / "cold")
        models.assert_holds(other, held)
        for one in (other, model) if options is COLD else ():
            train(one, seed=99)
    models.assert_holds(
        other := trained(COLD, seed=50, optimizer=ADAM), models.shards(other)
    )


@pytest.mark.usefixtures("one_rank")
def test_without_a_cold_store_a_load_keeps_what_eviction_keeps(tmp_path: Path) -> None:
    unbounded = trained(TableOptions())
    save_checkpoint(unbounded, tmp_path / "saved")
    model = trained(TableOptions(max_rows=MAX_ROWS, eviction=LRU()), seed=50)
    load_checkpoint(model, tmp_path / "saved")
    for table, whole in zip(shards_of(model), shards_of(unbounded), strict=True):
        assert MAX_ROWS * 7 // 8 <= len(table) <= MAX_ROWS
        rows, expected = table.read_rows(table.ids()), whole.read_rows(table.ids())
        assert all(torch.equal(rows[key], expected[key]) for key in expected)
        best = (
            whole.read_rows(whole.ids())["last_step"]
            .sort(descending=True)
            .values[: MAX_ROWS // 2]
        )
        assert int(
            rows["last_step"].sort(descending=True).values[MAX_ROWS // 2 - 1]
        ) >= int(best[-1])
    full = models.recstore(options=TableOptions(max_rows=MAX_ROWS))
    with pytest.raises(ValueError, match=rf"max_rows is {MAX_ROWS}.* no eviction"):
        load_checkpoint(full, tmp_path / "saved")
    assert all(len(table) == 0 for table in shards_of(full))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank", "small_parts")
@pytest.mark.parametrize(
    ("ascending", "expiry"),
    [
        (True, Expiry(7)),
        (False, None),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, Expiry(7), marks=pytest.mark.slow),
    ],
)
def test_deltas_follow_rows_through_the_cold_store(
    tmp_path: Path,
    ascending: bool,
    expiry: Expiry | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DictStore, "ascending_snapshots", ascending)
    options = TableOptions(
        max_rows=MAX_ROWS, eviction=LFU(), cold_store=DictStoreOptions(), expiry=expiry
    )
    model = trained(options, optimizer=ADAM)
    save_checkpoint(model, tmp_path / "0")
    for number in range(1, 5):
        train(model, seed=20 * number, steps=3)
        for table in shards_of(model):
            assert table.remove(table.ids()[number::11]) > 0
        save_checkpoint(
            model, tmp_path / str(number), delta_of=tmp_path / str(number - 1)
        )
        if number > 1:
            continue
        untouched = save_checkpoint(
            model, tmp_path / "nothing", delta_of=tmp_path / "1"
        )
        assert (
            expiry
            or sum(
                part.rows for table in untouched.tables.values() for part in table.parts
            )
            == 0
        )
    save_checkpoint(model, tmp_path / "full")
    assert compare_chains(
        read_chain(tmp_path / "4"), read_chain(tmp_path / "full")
    ).equal
    compact_checkpoint(tmp_path / "4", tmp_path / "compact")
    other = models.recstore(options=options, optimizer=ADAM)
    for path in ("4", "compact"):
        load_checkpoint(other, tmp_path / path)
        models.assert_holds(other, models.shards(model))
    for each in (other, model):
        train(each, seed=7)
    models.assert_holds(other, models.shards(model))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank", "small_parts")
def test_a_delta_after_more_has_left_than_stays(tmp_path: Path) -> None:
    options = TableOptions(max_rows=600, eviction=LRU(), cold_store=DictStoreOptions())
    model = models.recstore(options=options)
    table = shards_of(model)[0]
    for start in range(0, 3000, 300):
        table.insert(torch.arange(start, start + 300), torch.rand(300, models.DIM))
    save_checkpoint(model, tmp_path / "0")
    # The log of ids that left holds at least 2**16 ids.
    for start in range(0, 70_000, 500):
        table.insert(
            torch.arange(start, start + 500) % 3000, torch.rand(500, models.DIM)
        )
    table.remove(torch.arange(100, 200))
    info = save_checkpoint(model, tmp_path / "1", delta_of=tmp_path / "0")
    assert {table.removal for table in info.tables.values()} == {"left", "stay"}
    other = models.recstore(options=TableOptions())
    load_checkpoint(other, tmp_path / "1")
    models.assert_holds(other, models.shards(model))


@pytest.mark.usefixtures("one_rank", "small_parts")
@pytest.mark.parametrize("store", ["dict", "spooled", "rocksdb"])
def test_an_async_save_is_of_its_moment(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DictStore, "ascending_snapshots", store == "dict")
    cold = (
        RocksDBStore(str(tmp_path / "rows"))
        if store == "rocksdb"
        else DictStoreOptions()
    )
    options = TableOptions(max_rows=MAX_ROWS, cold_store=cold)
    model = trained(options, optimizer=ADAM)
    held = models.shards(model)
    saving = async_save(model, tmp_path / "saved")
    before = [table.stats().bytes for table in shards_of(model)]
    train(model, seed=30, steps=30)
    saving.wait()
    other = models.recstore(options=COLD, optimizer=ADAM)
    load_checkpoint(other, tmp_path / "saved")
    models.assert_holds(other, held)
    # Slots of rows that the snapshot has read are reused while the snapshot exists.
    assert all(
        table.stats().bytes < 3 * size
        for table, size in zip(shards_of(model), before, strict=True)
    )


def evicts_on_two(rank: int, world_size: int, *, path: Path) -> None:
    options = TableOptions(max_rows=2 * MAX_ROWS, eviction=LRU(), routing="hash")
    model = models.recstore("row_wise", options=options)
    train(model, seed=100 * rank)
    save_checkpoint(model, path / "full")
    (table,) = (
        shard.table for shard in model.module.sparse.recstore_state.shards["user"]
    )
    before, mark = table.ids(), table.mark()
    train(model, seed=100 * rank + 20)
    save_checkpoint(model, path / "delta", delta_of=path / "full")
    with table.snapshot(since=mark) as snapshot:
        assert snapshot.left is not None
        left = set(snapshot.left.tolist())
    gone = set(before.tolist()) - set(table.ids().tolist())
    assert gone
    assert gone <= left
    assert not left & set(table.ids().tolist())
    of_ranks: list[set[int]] = [set()] * world_size
    dist.all_gather_object(of_ranks, left)
    assert of_ranks[0].isdisjoint(of_ranks[1])
    for bound in (options, TableOptions(routing="hash")):
        other = models.recstore("row_wise", options=bound)
        load_checkpoint(other, path / "delta")
        models.assert_holds(other, models.shards(model))


@pytest.mark.slow
def test_a_delta_knows_what_was_evicted_on_each_of_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(2, partial(evicts_on_two, path=tmp_path))


def saves_on_two(rank: int, world_size: int, *, path: Path, sharding: str) -> None:
    options = TableOptions(
        max_rows=2 * MAX_ROWS,
        cold_store=RocksDBStore(str(path / "rows")),
        admission=MinFrequency(2, 2**12),
    )
    model = models.recstore(sharding, optimizer=ADAM, options=options)
    models.train(model, steps=12, distinct=120)
    assert sum(stats.cold_rows for stats in table_stats(model).values()) > 0
    assert all(stats.rows <= 2 * MAX_ROWS for stats in table_stats(model).values())
    save_checkpoint(model, path / "saved")
    models.write_down(model, path / "before")


def loads(rank: int, world_size: int, *, path: Path, sharding: str) -> None:
    options = TableOptions(
        max_rows=2 * MAX_ROWS,
        cold_store=RocksDBStore(str(path / "others")),
        admission=MinFrequency(2, 2**13),
    )
    model = models.recstore(sharding, optimizer=ADAM, options=options)
    load_checkpoint(model, path / "saved")
    models.write_down(model, path / f"after{world_size}")
    # Ids that were seen once before the save get a row with the next sighting. Other
    # ids do not.
    seen_once = torch.load(path / "seen_once.pt")
    for shard in model.module.sparse.recstore_state.shards["user"]:
        mine = seen_once[shard.owned(seen_once)]
        new = torch.arange(10**6, 10**6 + 40)
        new = new[shard.owned(new)]
        shard.table.lookup(torch.cat([mine, new]), train=True)
        assert shard.table.contains(mine).all()
        assert not shard.table.contains(new).any()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_at_other_ranks(tmp_path: Path, sharding: str) -> None:
    for name in ("before", "after1", "after2"):
        (tmp_path / name).mkdir()
    run_on_ranks(2, partial(saves_on_two, path=tmp_path, sharding=sharding))
    before = models.whole_tables(tmp_path / "before")
    looked_up: dict[int, int] = {}
    for step in range(12):
        batches = [
            models.batch(100 * rank + step, distinct=120)["u"].values()
            for rank in (0, 1)
        ]
        for i in torch.cat(batches).unique().tolist():
            looked_up[i] = looked_up.get(i, 0) + 1
    once = [i for i, count in looked_up.items() if count == 1]
    assert len(once) > 5
    assert not before["user"].keys() & set(once)
    torch.save(torch.tensor(once), tmp_path / "seen_once.pt")
    run_on_ranks(1, partial(loads, path=tmp_path, sharding=sharding))
    for name, rows in models.whole_tables(tmp_path / "after1").items():
        assert rows.keys() == before[name].keys()
        assert all(
            torch.equal(rows[i][key], before[name][i][key])
            for i in rows
            for key in rows[i]
        )


@pytest.mark.usefixtures("one_rank")
def test_admission_goes_on_where_it_was(tmp_path: Path) -> None:
    options = TableOptions(admission=MinFrequency(3, 2**12))
    model = trained(options)
    save_checkpoint(model, tmp_path / "saved")
    other = trained(options, seed=60)
    load_checkpoint(other, tmp_path / "saved")
    for seed in range(10, 20):
        for each in (model, other):
            train(each, seed=seed, steps=1)
        models.assert_holds(other, models.shards(model))
    before = [table.stats().refused for table in shards_of(model)]
    assert min(before) > 0
    save_checkpoint(other, tmp_path / "later")
    difference = compare_chains(
        read_chain(tmp_path / "saved"), read_chain(tmp_path / "later")
    )
    assert "sightings" in difference.tables["user"].facts
    plain = models.recstore()
    # A table without admission ignores the counts.
    load_checkpoint(plain, tmp_path / "saved")


@pytest.mark.usefixtures("one_rank")
def test_no_password_gets_into_a_checkpoint(tmp_path: Path) -> None:
    model = trained(COLD)
    for table in model.module.sparse.recstore_state.tables.values():
        table.options = TableOptions(
            max_rows=3, cold_store=RedisStore("redis://me:secret@localhost:1/0")
        )
    info = save_checkpoint(model, tmp_path / "saved")
    assert "secret" not in (tmp_path / "saved" / "metadata.json").read_text()
    assert (
        read_info(tmp_path / "saved").tables["user"].options
        == TableOptions(max_rows=3)
        == info.tables["user"].options
    )


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from torchrec_recstore import *
from torchrec_recstore.store import Table
options = TableOptions(max_rows=300, cold_store=RocksDBStore(sys.argv[1]))
table = Table(8, optimizer=Adam(lr=0.1), options=options)
for step in range(40):
    ids = torch.arange(step * 50, step * 50 + 200)
    table.update(ids, table.lookup(ids, train=True))
print(table.stats().cold_rows, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_rows_of_a_killed_run_are_neither_read_nor_kept(tmp_path: Path) -> None:
    killed = run_forked_command(["-c", KILLED, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert int(killed.stdout) > 1000
    before = {entry for entry in tmp_path.rglob("*") if entry.is_dir()}
    table = Table(
        8, options=TableOptions(max_rows=300, cold_store=RocksDBStore(str(tmp_path)))
    )
    assert len(table) == 0
    assert not table.contains(torch.arange(2000)).any()
    assert not [
        entry for entry in before if os.path.basename(entry) == "db" and entry.exists()
    ]
