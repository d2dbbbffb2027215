"""Bounded tables on several ranks keep to ``max_rows`` in every step of every sharding,
and column shards agree.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType

from tests.redis_server import needs_redis, redis_server
from tests.store.dict_store import DictStoreOptions
from torchrec_recstore.optim import Adam
from torchrec_recstore.options import (
    LFU,
    LRU,
    Expiry,
    MinFrequency,
    RedisStore,
    RocksDBStore,
    SSDStore,
    TableOptions,
)
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreCollection,
    RecStoreEmbeddingCollectionSharder,
    RecStoreSharder,
    table_stats,
)
from torchrec_recstore.store import ColdStoreError, Table, TableStats

from .reference import Case, TableConfig, loss, outputs
from .workers import run_on_ranks

DIM, BAGS, STEPS, MAX_ROWS = 8, 24, 25, 201
ROW, TABLE, COLUMN = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
)
TABLE_ROW, GRID = ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value
OF_BAGS = (ROW, TABLE, COLUMN, TABLE_ROW, GRID)
OF_SEQUENCES = (ROW, TABLE, COLUMN)
IDS = torch.randint(
    -(2**63), 2**63 - 1, (3000,), generator=torch.Generator().manual_seed(1)
)


def bags(name: str = "t", **more: Any) -> EmbeddingBagConfig:
    features = [f"{name}0", f"{name}1"]
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=2**40,
        embedding_dim=DIM,
        feature_names=features,
        **more,
    )


def rows(name: str = "t") -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name,
        num_embeddings=2**40,
        embedding_dim=DIM,
        feature_names=[f"{name}0", f"{name}1"],
    )


def batch_of(table: TableConfig, step: int, rank: int) -> KeyedJaggedTensor:
    """Returns ids of which few are frequent.

    About a fifth of them are new in each step.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (2 * BAGS,), generator=generator)
    ranks = (len(IDS) ** torch.rand(int(lengths.sum()), generator=generator)).long() - 1
    return KeyedJaggedTensor.from_lengths_sync(table.feature_names, IDS[ranks], lengths)


def ids_of_step(table: TableConfig, step: int, world_size: int) -> set[int]:
    return {
        int(i)
        for rank in range(world_size)
        for i in batch_of(table, step, rank).values()
    }


def build(
    config: TableConfig,
    sharding_type: str,
    options: TableOptions,
    world_size: int,
    fused_params: dict[str, Any] | None = None,
) -> tuple[DistributedModelParallel, list[Table]]:
    """Returns the sharded collection of one table, and this rank's shards."""
    constraint = RecStoreConstraints(
        sharding_types=[sharding_type], options=options, min_partition=DIM // 2
    )
    module = Case([config]).collection([config], "meta")
    return planned(module, {config.name: constraint}, world_size, fused_params)


def planned(
    module: nn.Module,
    constraints: Mapping[str, ParameterConstraints],
    world_size: int,
    fused_params: dict[str, Any] | None = None,
) -> tuple[DistributedModelParallel, list[Table]]:
    kinds = (RecStoreSharder, RecStoreEmbeddingCollectionSharder)
    sharders = [kind(fused_params, optimizer=Adam(lr=0.05)) for kind in kinds]
    topology = Topology(
        world_size=world_size,
        local_world_size=ranks_of_node(world_size),
        compute_device="cpu",
    )
    planner = RecStorePlanner(
        topology=topology, constraints=dict(constraints), debug=False
    )
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    model = DistributedModelParallel(module, plan=plan, sharders=sharders)
    shards = [
        t
        for m in model.modules()
        if isinstance(m, RecStoreCollection)
        for t in m.recstore_tables()
    ]
    return model, shards


def train_step(
    model: DistributedModelParallel, batch: KeyedJaggedTensor
) -> dict[str, torch.Tensor]:
    output = outputs(model(batch).wait())
    loss(output).backward()
    return {key: value.detach() for key, value in output.items()}


def gathered(value: Any, world_size: int) -> list[Any]:
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def each_sharding() -> Iterator[tuple[TableConfig, str]]:
    yield from ((bags(), sharding_type) for sharding_type in OF_BAGS)
    yield from ((rows(), sharding_type) for sharding_type in OF_SEQUENCES)


def keeps_its_bound(rank: int, world_size: int) -> None:
    for config, sharding_type in each_sharding():
        options = TableOptions(max_rows=MAX_ROWS, eviction=LRU())
        model, shards = build(config, sharding_type, options, world_size)
        lookups, last_seen = 0, {}
        for step in range(STEPS):
            train_step(model, batch_of(config, step, rank))
            ids = ids_of_step(config, step, world_size)
            lookups += len(ids)
            last_seen.update(dict.fromkeys(ids, step))
            stats = table_stats(model)["t"]
            assert stats.rows <= MAX_ROWS
            # A row that is split by columns counts once.
            assert (stats.lookups, stats.hits + stats.misses, stats.steps) == (
                lookups,
                lookups,
                step + 1,
            )
            assert stats.inserts - stats.evicted == stats.rows
        assert stats.evicted > 0
        of_ranks = gathered([describe(shard) for shard in shards], world_size)
        check_shards(of_ranks, sharding_type, stats)
        check_parts(of_ranks)
        for shard in shards:
            held = set(shard.ids().tolist())
            gone = {
                i for i in last_seen if owned(shard, i, sharding_type, world_size, rank)
            } - held
            assert max(last_seen[i] for i in gone) <= min(last_seen[i] for i in held), (
                "not the least recent ones"
            )


def frequent_rows_stay(rank: int, world_size: int) -> None:
    for config, sharding_type in ((bags(), COLUMN), (bags(), GRID), (rows(), ROW)):
        options = TableOptions(
            max_rows=MAX_ROWS, eviction=LFU(half_life_steps=4), expiry=Expiry(9)
        )
        model, shards = build(config, sharding_type, options, world_size)
        for step in range(STEPS):
            train_step(model, batch_of(config, step, rank))
            stats = table_stats(model)["t"]
            assert stats.rows <= MAX_ROWS
            assert stats.inserts - stats.evicted - stats.expired == stats.rows
        of_ranks = gathered([describe(shard) for shard in shards], world_size)
        check_shards(of_ranks, sharding_type, stats)
        held = {i for _, _, ids in itertools.chain(*of_ranks) for i in ids}
        assert held >= set(IDS[:8].tolist()), "those that nearly every step looks up"


def owned(shard: Table, i: int, sharding_type: str, world_size: int, rank: int) -> bool:
    # TorchRec sends an id that is not below num_embeddings to rank id % ranks; negative
    # ids count as uint64.
    ranks = {
        ROW: world_size,
        TABLE_ROW: ranks_of_node(world_size),
        GRID: ranks_of_node(world_size),
    }
    return i % 2**64 % ranks.get(sharding_type, 1) == rank % ranks.get(sharding_type, 1)


def ranks_of_node(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


Shard = tuple[range, int | None, list[int]]


def describe(shard: Table) -> Shard:
    return shard.columns, shard.options.max_rows, shard.ids().tolist()


def check_shards(
    of_ranks: list[list[Shard]], sharding_type: str, stats: TableStats
) -> None:
    by_columns: dict[range, list[int]] = {}
    for columns, _, ids in itertools.chain(*of_ranks):
        by_columns.setdefault(columns, []).extend(ids)
    assert len(by_columns) == (2 if sharding_type in (COLUMN, GRID) else 1)
    residents = [sorted(ids) for ids in by_columns.values()]
    assert len(residents[0]) == len(set(residents[0])) == stats.rows
    assert all(ids == residents[0] for ids in residents), (
        "column shards hold different rows"
    )


def check_parts(of_ranks: list[list[Shard]]) -> None:
    by_columns: dict[range, list[int]] = {}
    for columns, max_rows, ids in itertools.chain(*of_ranks):
        assert max_rows is not None
        assert len(ids) <= max_rows
        by_columns.setdefault(columns, []).append(max_rows)
    for parts in by_columns.values():
        assert sum(parts) == MAX_ROWS
        assert max(parts) - min(parts) <= 1


def a_wide_bound_changes_no_bit(rank: int, world_size: int) -> None:
    for config, sharding_type in each_sharding():
        wide = TableOptions(
            max_rows=2 * len(IDS),
            eviction=LFU(half_life_steps=3),
            expiry=Expiry(10 * STEPS),
        )
        pair = [
            build(config, sharding_type, options, world_size)
            for options in (TableOptions(), wide)
        ]
        for step in range(STEPS):
            one, other = (
                train_step(model, batch_of(config, step, rank)) for model, _ in pair
            )
            assert all(torch.equal(one[key], other[key]) for key in one)
        # The frequency is halved.
        compare_shards(*(shards for _, shards in pair), but=["frequency"])


def expiry_and_admission(rank: int, world_size: int) -> None:
    for config, sharding_type in each_sharding():
        options = TableOptions(admission=MinFrequency(2), expiry=Expiry(6))
        model, shards = build(config, sharding_type, options, world_size)
        sightings: dict[int, int] = {}
        refused, last_seen = 0, {}
        for step in range(STEPS):
            train_step(model, batch_of(config, step, rank))
            for i in ids_of_step(config, step, world_size):
                last_seen[i] = step
                sightings[i] = sightings.get(i, 0) + 1
                refused += sightings[i] == 1
            young = sum(
                step - last <= 6 for i, last in last_seen.items() if sightings[i] > 1
            )
            alive = sum(
                step - last <= 9 for i, last in last_seen.items() if sightings[i] > 1
            )
            stats = table_stats(model)["t"]
            # The counter sometimes admits an id too early, and an id that returns may
            # have to be admitted again.
            assert 0.97 * young <= stats.rows <= 1.05 * alive + 2
            assert stats.inserts - stats.expired == stats.rows
        assert stats.refused == pytest.approx(refused, rel=0.1)
        assert stats.expired > 0
        check_shards(
            gathered([describe(shard) for shard in shards], world_size),
            sharding_type,
            stats,
        )


def beside_stock_tables(rank: int, world_size: int) -> None:
    bounded, stock = bags("t"), bags("s")
    stock.num_embeddings = 50
    case = Case([bounded, stock], stock=frozenset({"s"}))
    constraints: dict[str, ParameterConstraints] = {
        "t": RecStoreConstraints(
            sharding_types=[ROW],
            options=TableOptions(max_rows=MAX_ROWS, eviction=LFU(half_life_steps=5)),
        ),
        "s": ParameterConstraints(
            compute_kernels=["dense"], sharding_types=["data_parallel"]
        ),
    }
    model, _ = planned(case.collection(case.tables, "meta"), constraints, world_size)
    for step in range(STEPS):
        mine, other = batch_of(bounded, step, rank), batch_of(stock, step, rank)
        small = KeyedJaggedTensor.from_lengths_sync(
            other.keys(), other.values() % 50, other.lengths()
        )
        output = train_step(model, KeyedJaggedTensor.concat([mine, small]))
        assert output["t0"].shape == output["s0"].shape == (BAGS, DIM)
        stats = table_stats(model)
        assert set(stats) == {"t"}
        assert stats["t"].rows <= MAX_ROWS
    assert stats["t"].evicted > 0


def too_small(rank: int, world_size: int) -> None:
    """The error is raised on every rank, also on a rank whose shard would get a row."""
    for config, sharding_type in (
        (bags(), ROW),
        (bags(), TABLE_ROW),
        (bags(), GRID),
        (rows(), ROW),
    ):
        with pytest.raises(
            ValueError, match=r"'t': max_rows=1 is less than the 2 shards"
        ):
            build(
                config,
                sharding_type,
                TableOptions(max_rows=1, eviction=LRU()),
                world_size,
            )
    build(bags(), COLUMN, TableOptions(max_rows=1, eviction=LRU()), world_size)
    build(bags(), ROW, TableOptions(max_rows=2, eviction=LRU()), world_size)


def cold_rows_come_back_as_they_were(rank: int, world_size: int) -> None:
    for config, sharding_type in each_sharding():
        as_without_a_bound(
            rank,
            world_size,
            config=config,
            sharding_type=sharding_type,
            store=DictStoreOptions(),
        )


def as_without_a_bound(
    rank: int,
    world_size: int,
    *,
    config: TableConfig,
    sharding_type: str,
    store: Hashable,
) -> None:
    cold = TableOptions(max_rows=MAX_ROWS, cold_store=store)
    pair = [
        build(config, sharding_type, options, world_size)
        for options in (TableOptions(), cold)
    ]
    for step in range(STEPS):
        one, other = (
            train_step(model, batch_of(config, step, rank)) for model, _ in pair
        )
        assert all(torch.equal(one[key], other[key]) for key in one)
        stats = table_stats(pair[1][0])["t"]
        assert stats.rows <= MAX_ROWS
    everything = table_stats(pair[0][0])["t"]
    assert (
        stats.rows + stats.cold_rows
        == everything.rows
        == everything.inserts
        == stats.inserts
    )
    assert (stats.lookups, stats.updates) == (everything.lookups, everything.updates)
    assert stats.misses - stats.cold_hits == everything.misses
    assert 0 < stats.cold_hits < stats.evicted
    compare_shards(*(shards for _, shards in pair))
    unseen = batch_of(config, STEPS, rank)
    for model, _ in pair:
        model.eval()
    one, other = (outputs(model(unseen).wait()) for model, _ in pair)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert table_stats(pair[1][0])["t"] == stats


def hash_routing_uses_all_of_a_bound(rank: int, world_size: int) -> None:
    for routing, held in (("block", MAX_ROWS // 2 + 1), ("hash", MAX_ROWS)):
        options = TableOptions(max_rows=MAX_ROWS, eviction=LRU(), routing=routing)  # type: ignore[arg-type]
        model, _ = build(bags(), ROW, options, world_size)
        # The ids are in TorchRec's first block of num_embeddings.
        for step in range(20):
            ids = torch.arange(40 * step + 20 * rank, 40 * step + 20 * (rank + 1))
            train_step(
                model,
                KeyedJaggedTensor.from_lengths_sync(
                    ["t0", "t1"], ids, torch.tensor([10, 10])
                ),
            )
        assert held - 8 <= table_stats(model)["t"].rows <= held


def compare_shards(
    shards: list[Table], others: list[Table], but: Sequence[str] = ()
) -> None:
    for one, other in zip(shards, others, strict=True):
        ids = one.ids()
        assert torch.equal(ids, other.ids())
        rows, same = one.read_rows(ids), other.read_rows(ids)
        assert all(torch.equal(rows[key], same[key]) for key in rows if key not in but)


SCENARIOS = (keeps_its_bound, hash_routing_uses_all_of_a_bound, too_small)
# On two ranks; expiry_and_admission and beside_stock_tables run on one rank as well,
# and test_the_shards_of_all_ranks_share_a_directory compares cold rows of two
# shardings.
SLOW_SCENARIOS = (
    cold_rows_come_back_as_they_were,
    frequent_rows_stay,
    a_wide_bound_changes_no_bit,
    expiry_and_admission,
    beside_stock_tables,
)


def every_one(
    rank: int, world_size: int, *, scenarios: Sequence[Callable[[int, int], None]]
) -> None:
    for scenario in scenarios:
        scenario(rank, world_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenarios", [SCENARIOS, pytest.param(SLOW_SCENARIOS, marks=pytest.mark.slow)]
)
def test_two_ranks(scenarios: Sequence[Callable[[int, int], None]]) -> None:
    run_on_ranks(2, partial(every_one, scenarios=scenarios))


def two_nodes(rank: int, world_size: int) -> None:
    """Each rank is a node.

    Grid shards split columns over nodes, and rows within a node, so rows are not split.
    """
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GROUP_RANK=str(rank))
    keeps_its_bound(rank, world_size)


# test_sharded_equals_unsharded has grid shards on two nodes, without bounds
@pytest.mark.slow
def test_two_nodes() -> None:
    run_on_ranks(2, two_nodes)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scenario", [expiry_and_admission, beside_stock_tables])
def test_one_rank(scenario: Callable[[int, int], None]) -> None:
    scenario(0, 1)


def does_not_fit(rank: int, world_size: int, *, sharding_type: str) -> None:
    """The rank whose shard overflows raises the error.

    The other ranks get an error instead of waiting for it.
    """
    model, _ = build(
        bags(), sharding_type, TableOptions(max_rows=20, eviction=LRU()), world_size
    )
    # Even ids that are not below num_embeddings belong to rank 0. A table that is not
    # split is on rank 0, too.
    ids = 2**50 + 2 * torch.arange(40)
    few = KeyedJaggedTensor.from_lengths_sync(
        ["t0", "t1"], ids[:4], torch.tensor([2, 2])
    )
    train_step(model, few)
    many = KeyedJaggedTensor.from_lengths_sync(
        ["t0", "t1"], ids, torch.tensor([20, 20])
    )
    error = ValueError if rank == 0 else RuntimeError
    with pytest.raises(error) as raised:
        train_step(model, many)
    if rank == 0:
        said = str(raised.value)
        assert "'t'" in said or "t:" in said
        assert "40" in said
        assert ("10" if sharding_type == ROW else "20") in said
    # A process that does not catch the error ends like this, and the collectives of
    # other ranks fail.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("sharding_type", [ROW, TABLE])
def test_a_working_set_that_does_not_fit_ends_the_job(sharding_type: str) -> None:
    run_on_ranks(2, partial(does_not_fit, sharding_type=sharding_type))


def through_one_store(rank: int, world_size: int, *, store: Hashable) -> None:
    """Shards with the same name, on several ranks and, for a grid, on one rank."""
    for config, sharding_type in ((bags(), GRID), (rows(), COLUMN)):
        as_without_a_bound(
            rank, world_size, config=config, sharding_type=sharding_type, store=store
        )


@pytest.mark.slow
@pytest.mark.parametrize("store", [SSDStore, RocksDBStore])
def test_the_shards_of_all_ranks_share_a_directory(
    tmp_path: Path, store: type[SSDStore | RocksDBStore]
) -> None:
    run_on_ranks(2, partial(through_one_store, store=store(str(tmp_path / "cold"))))


@needs_redis
# test_the_shards_of_all_ranks_share_a_directory is the same with a directory
@pytest.mark.slow
def test_the_shards_of_all_ranks_share_a_server(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        run_on_ranks(2, partial(through_one_store, store=RedisStore(server.url)))


def out_of_reach_for_one(rank: int, world_size: int, *, path: Path) -> None:
    here = path / str(rank)
    here.mkdir()
    os.chdir(here)
    if rank == 1:
        Path("cold").write_text("a file where the store wants a directory")
    for config, sharding_type in ((bags(), ROW), (rows(), ROW), (bags(), TABLE)):
        options = TableOptions(max_rows=MAX_ROWS, cold_store=RocksDBStore("cold"))
        if sharding_type == TABLE:  # The table is on rank 0, which can open the store.
            build(config, sharding_type, options, world_size)
            continue
        with pytest.raises(ColdStoreError, match=r"RocksDBStore\('cold'\)"):
            build(config, sharding_type, options, world_size)


def test_a_store_that_one_rank_cannot_open_is_an_error_on_all(tmp_path: Path) -> None:
    run_on_ranks(2, partial(out_of_reach_for_one, path=tmp_path))
