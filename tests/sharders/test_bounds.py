"""The part of a table's ``max_rows`` that a shard gets, and the errors.

Tests on several ranks: tests/distributed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.distributed.reference import loss, outputs
from torchrec_recstore.options import (
    LFU,
    LRU,
    ConstantInit,
    MinFrequency,
    TableOptions,
    UniformInit,
    default_initializer,
    shard_options,
)
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreCollection,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    table_stats,
)

from .models import bag, batch, collection, sequence, sequences, sharded, tables


@pytest.mark.parametrize(
    ("max_rows", "parts"), [(8, [2, 2, 2, 2]), (10, [3, 3, 2, 2]), (4, [1, 1, 1, 1])]
)
def test_row_shards_share_the_bound_out(max_rows: int, parts: list[int]) -> None:
    options = TableOptions(
        max_rows=max_rows,
        eviction=LFU(half_life_steps=3),
        initializer=ConstantInit(1.0),
    )
    shards = [shard_options(options, (4, rank), "t") for rank in range(4)]
    assert [shard.max_rows for shard in shards] == parts
    assert {(shard.eviction, shard.initializer) for shard in shards} == {
        (options.eviction, options.initializer)
    }


def test_without_a_row_split_or_a_bound_the_options_are_the_tables() -> None:
    bounded, plain = TableOptions(max_rows=8, eviction=LRU()), TableOptions()
    assert shard_options(bounded, None, "t") is bounded
    assert shard_options(plain, (4, 1), "t") is plain


def test_fewer_rows_than_shards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'t': max_rows=3 is less than the 4 shards"):
        shard_options(TableOptions(max_rows=3), (4, 0), "t")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("config", [bag, sequence])
def test_a_bound_does_not_change_the_initializer_and_the_table_keeps_its_options(
    config: type,
) -> None:
    options = TableOptions(max_rows=3, eviction=LRU())
    make = sequences if config is sequence else collection
    model = sharded(
        make(config(rows=500)), options={"t": options}, sharding_type="row_wise"
    )
    whole = model.module.recstore_state.tables["t"].options
    initializer = default_initializer(TableOptions(), 500)
    assert isinstance(initializer, UniformInit)
    assert (
        whole
        == tables(model)["t"].options
        == TableOptions(max_rows=3, eviction=LRU(), initializer=initializer)
    )


def many(n: int) -> list[list[int]]:
    """Returns bags of distinct ids."""
    return [list(range(begin, min(begin + 4, n))) for begin in range(0, n, 4)] + [
        []
    ] * (8 - -(-n // 4))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("config", [bag, sequence])
def test_a_batch_that_does_not_fit_one_table_changes_none(config: type) -> None:
    """The error is raised for any table of the lookup, and the model trains on the next
    batch.
    """
    make = sequences if config is sequence else collection
    for tight in ("a", "b", "c"):
        options = {
            name: TableOptions(max_rows=20 if name == tight else 40, eviction=LRU())
            for name in "ab"
        }
        if tight == "c":
            # The table has no eviction and cannot grow.
            options["c"] = TableOptions(max_rows=20)
        configs = [config(name, [f"f_{name}"]) for name in "abc"]
        model = sharded(make(*configs), {"learning_rate": 0.1}, options)

        def train(n: int, model: DistributedModelParallel = model) -> None:
            features = {f"f_{name}": many(n) for name in "abc"}
            loss(outputs(model(batch(**features)).wait())).backward()

        train(10)
        shards = tables(model)
        before = {
            name: (shard.stats(), shard.read_rows(shard.ids()))
            for name, shard in shards.items()
        }
        with pytest.raises(ValueError, match=rf"'{tight}'.* 21 rows.*max_rows is 20"):
            train(21)
        for name, shard in shards.items():
            stats, rows = before[name]
            # The index may have grown.
            assert replace(shard.stats(), bytes=0) == replace(stats, bytes=0)
            now = shard.read_rows(shard.ids())
            assert all(torch.equal(now[key], rows[key]) for key in rows)
        train(20)
        assert {
            name: shard.stats().rows for name, shard in shards.items()
        } == dict.fromkeys("abc", 20)


@pytest.mark.usefixtures("one_rank")
def test_rows_of_forwards_that_wait_for_their_backward_stay() -> None:
    model = sharded(
        collection(bag(dim=2)),
        {"learning_rate": 1.0},
        {"t": TableOptions(max_rows=20, eviction=LRU())},
    )
    (table,) = tables(model).values()
    waiting = [
        model(batch(f=[list(range(begin, begin + 8))])).wait().values()
        for begin in (0, 8)
    ]
    with pytest.raises(ValueError, match=r"24 rows.*max_rows is 20"):
        model(batch(f=[[*range(16, 24)]])).wait()
    model(batch(f=[[16, 17, 18, 19]])).wait().values().sum().backward()
    assert table.ids().tolist() == list(range(20))
    for output in waiting:
        output.sum().backward()
    before = table.lookup(table.ids())
    model(batch(f=[[*range(100, 108)]])).wait()
    assert table.ids().tolist() == [
        *range(8, 20),
        *range(100, 108),
    ], "the first to be looked up have left"
    assert torch.equal(table.lookup(torch.arange(8, 20)), before[8:])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("eviction", [LRU(), LFU()])
def test_feature_processed_collections_have_bounds(eviction: LRU | LFU) -> None:
    positions = PositionWeightedModuleCollection({"f": 4}, device=torch.device("cpu"))
    module = FeatureProcessedEmbeddingBagCollection(
        collection(bag(), is_weighted=True), positions
    )
    sharder = RecStoreFeatureProcessedEmbeddingBagCollectionSharder()
    constraints = {
        "t": RecStoreConstraints(options=TableOptions(max_rows=12, eviction=eviction))
    }
    plan = RecStorePlanner(constraints=constraints, debug=False).plan(module, [sharder])
    model = DistributedModelParallel(
        module, plan=plan, sharders=[sharder], device=torch.device("cpu")
    )
    for step in range(10):
        ids = [[step, step + 1, step + 2, 0], [1000 + step]]
        (model(batch(f=ids)).values() ** 2).sum().backward()
        assert table_stats(model)["t"].rows <= 12
    stats = table_stats(model)["t"]
    assert stats.evicted == stats.inserts - stats.rows > 0
    (shard,) = [
        t
        for m in model.modules()
        if isinstance(m, RecStoreCollection)
        for t in m.recstore_tables()
    ]
    assert shard.contains(torch.tensor([0, 9, 10, 11, 1009])).all()


@pytest.mark.usefixtures("one_rank")
def test_ids_that_are_held_back_read_and_give_weights_gradients_as_their_initial_rows() -> (
    None
):
    def first_step(
        options: TableOptions,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None], int]:
        positions = PositionWeightedModuleCollection(
            {"f": 4}, device=torch.device("cpu")
        )
        module = FeatureProcessedEmbeddingBagCollection(
            collection(bag(), is_weighted=True), positions
        )
        sharder = RecStoreFeatureProcessedEmbeddingBagCollectionSharder()
        constraints = {"t": RecStoreConstraints(options=options)}
        plan = RecStorePlanner(constraints=constraints, debug=False).plan(
            module, [sharder]
        )
        model = DistributedModelParallel(
            module, plan=plan, sharders=[sharder], device=torch.device("cpu")
        )
        pooled = model(batch(f=[[1, 2, 3, 1], [], [-5]])).values()
        (pooled**2).sum().backward()
        weights = [p.grad for name, p in model.named_parameters() if "position" in name]
        return pooled.detach(), weights, table_stats(model)["t"].rows

    plain, (plain_grad,), plain_rows = first_step(TableOptions())
    held_back, (grad,), no_rows = first_step(TableOptions(admission=MinFrequency(2)))
    assert plain_grad is not None
    assert grad is not None
    assert plain_grad.abs().sum() > 0
    assert torch.equal(held_back, plain)
    assert torch.equal(grad, plain_grad)
    assert (plain_rows, no_rows) == (4, 0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("config", [bag, sequence])
def test_accumulated_passes_need_room_together(config: type) -> None:
    make = sequences if config is sequence else collection
    for max_rows in (20, 19):
        model = sharded(
            make(config()),
            options={"t": TableOptions(max_rows=max_rows, eviction=LRU())},
            accumulation_steps=2,
        )

        def train(first: int, model: DistributedModelParallel = model) -> None:
            loss(
                outputs(model(batch(f=[[*range(first, first + 10)]])).wait())
            ).backward()

        train(0)
        if max_rows == 19:
            with pytest.raises(ValueError, match=r"20 rows at once, max_rows is 19"):
                train(10)
            continue
        for first in (10, 20, 30):
            train(first)
        (table,) = tables(model).values()
        assert table.ids().tolist() == list(range(20, 40))
        assert table.stats().updates == 40
