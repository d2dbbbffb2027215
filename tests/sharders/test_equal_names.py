"""Tables with the same name in two collections of a model: functions accept and return
names with the path, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology

from tests.sharders.models import bag, collection, sequence, sequences
from tests.store.shared_store import ROWS, SharedDictOptions
from torchrec_recstore import (
    RecStoreConstraints,
    RecStoreEmbeddingCollectionSharder,
    RecStorePlanner,
    RecStoreSharder,
    RowWiseAdagrad,
    TableOptions,
    export_dense_weights,
    flush_tables,
    load_checkpoint,
    load_dense_weights,
    load_distributed_checkpoint,
    load_stock_state_dict,
    read_info,
    save_checkpoint,
    stock_optimizer_state_dict,
    stock_state_dict,
    table_stats,
)
from torchrec_recstore.inference import export_delta, export_for_inference, read_delta
from torchrec_recstore.planner.planners import assumed
from torchrec_recstore.sharders.model_tables import (
    ModelTable,
    recstore_tables,
    tables_named,
)

pytestmark = pytest.mark.usefixtures("one_rank")
DIM = 4


class Towers(nn.Module):
    """A model with two bag collections whose tables have the same name, and a sequence
    collection with another name.
    """

    def __init__(self, second: str = "t", device: str = "meta") -> None:
        super().__init__()
        self.user = nn.ModuleDict(
            {"bags": collection(bag("t", ["u"], rows=8), device=device)}
        )
        self.item = collection(bag(second, ["i"], rows=8), device=device)
        self.words = sequences(sequence("w", ["w"], rows=8), device=device)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the sum of all outputs.

        The outputs of the first collection count twice.
        """
        rows = self.words(features)["w"].values()
        user = self.user["bags"](features).values()
        item = self.item(features).values()
        return 2 * user.sum() + item.sum() + rows.sum()


USER, ITEM = "user.bags.t", "item.t"
BATCH = KeyedJaggedTensor(
    keys=["u", "i", "w"],
    values=torch.tensor([1, 2, 1, 2, 3, 5]),
    lengths=torch.tensor([1, 1, 2, 1, 0, 1]),
)


def table_named(model: nn.Module, name: str) -> ModelTable:
    return tables_named(model, [name])[name]


def build(
    second: str = "t", options: TableOptions | None = None
) -> DistributedModelParallel:
    module = Towers(second)
    names = ["t", "w"] if second == "t" else ["t", second, "w"]
    constraints = {
        name: RecStoreConstraints(
            sharding_types=["table_wise"], options=options or TableOptions()
        )
        for name in names
    }
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints=dict(constraints),
        debug=False,
    )
    optimizer = RowWiseAdagrad(lr=0.1)
    sharders = [
        RecStoreSharder(optimizer=optimizer),
        RecStoreEmbeddingCollectionSharder(optimizer=optimizer),
    ]
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        module, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def trained(**more: Any) -> DistributedModelParallel:
    model = build(**more)
    for _ in range(2):
        model(BATCH).backward()
    return model


def held(model: nn.Module) -> list[torch.Tensor]:
    shards = [shard.table for table in recstore_tables(model) for shard in table.shards]
    return [
        value
        for table in shards
        for value in (table.ids(), *table.read_rows(table.ids()).values())
    ]


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for one, two in zip(held(model), held(other), strict=True):
        assert torch.equal(one, two)


def test_names_are_bare_where_they_are_the_only_ones() -> None:
    model = trained()
    stats = table_stats(model)
    assert {name: each.rows for name, each in stats.items()} == {
        USER: 2,
        ITEM: 3,
        "w": 1,
    }
    assert list(table_stats(trained(second="other"))) == ["t", "other", "w"]
    assert list(table_stats(model.module.item)) == ["t"]
    assert [table_named(model, name).name for name in (USER, ITEM, "w", "words.w")] == [
        USER,
        ITEM,
        "w",
        "w",
    ]
    model.module.again = model.module.item  # One collection in two places counts once.
    assert table_stats(model) == stats


def test_a_name_that_may_mean_either_is_refused() -> None:
    model = trained()
    before = held(model)
    with pytest.raises(
        ValueError,
        match=r"2 RecStore tables 't': name one of 'user\.bags\.t', 'item\.t'",
    ):
        export_dense_weights(model, "t", 3)
    with pytest.raises(
        ValueError, match=r"'w' and 'words\.w' are names of the same RecStore table"
    ):
        load_dense_weights(
            model, {"w": torch.zeros(3, DIM), "words.w": torch.ones(3, DIM)}
        )
    with pytest.raises(
        ValueError,
        match=r"no RecStore table 'item\.w'; it has 'user\.bags\.t', 'item\.t', 'w'",
    ):
        stock_state_dict(model, {"item.w": 8})
    assert all(
        torch.equal(one, two) for one, two in zip(before, held(model), strict=True)
    )


def test_initial_rows_differ_and_those_of_the_only_table_stay() -> None:
    model, alone = trained(), trained(second="other")
    first = {
        name: table_named(model, name).shards[0].table.lookup(torch.tensor([1]))
        for name in (USER, ITEM)
    }
    fresh, fresh_alone = build(), build(second="other")

    def initial(model: nn.Module, name: str) -> torch.Tensor:
        return (
            table_named(model, name)
            .shards[0]
            .table.lookup(torch.tensor([7]), train=True)
        )

    assert not torch.equal(initial(fresh, USER), initial(fresh, ITEM))
    assert torch.equal(initial(fresh, "w"), initial(fresh_alone, "w"))
    assert not torch.equal(first[USER], first[ITEM])
    assert [s.table.name for t in recstore_tables(alone) for s in t.shards] == [
        "t",
        "other",
        "w",
    ]


def test_checkpoints_and_deltas(tmp_path: Path) -> None:
    model, other = trained(), build()
    info = save_checkpoint(model, tmp_path / "full")
    assert sorted(info.tables) == [ITEM, USER, "w"]
    model(BATCH).backward()
    save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "full")
    load_checkpoint(other, tmp_path / "delta")
    assert_equal(model, other)
    other(BATCH).backward()
    save_checkpoint(other, tmp_path / "second", delta_of=tmp_path / "delta")
    # In each collection alone, the name of its table is unique. In the model, the full
    # name finds the table.
    save_checkpoint(model.module.item, tmp_path / "item")
    assert sorted(read_info(tmp_path / "item").tables) == ["t"]
    load_checkpoint(other.module.item, tmp_path / "item")
    grown = build(second="other")
    load_checkpoint(grown, tmp_path / "full", strict=False)
    assert {name: stats.rows for name, stats in table_stats(grown).items()} == {
        "t": 2,
        "other": 0,
        "w": 1,
    }
    save_checkpoint(trained(second="other"), tmp_path / "unique")
    with pytest.raises(ValueError, match=r"no table 'item\.t'"):
        load_checkpoint(other, tmp_path / "unique")


def test_a_delta_is_not_taken_of_a_base_without_the_name(tmp_path: Path) -> None:
    model = trained()
    save_checkpoint(model, tmp_path / "full")
    # "t" is unique now, but the base checkpoint has "user.bags.t".
    del model.module.item
    with pytest.raises(ValueError, match="save without delta_of"):
        save_checkpoint(model, tmp_path / "delta", delta_of=tmp_path / "full")


def test_dense_weights_and_stock_state() -> None:
    model, other = trained(), build()
    rows = {
        USER: torch.randn(8, DIM),
        ITEM: torch.randn(8, DIM),
        "words.w": torch.randn(8, DIM),
    }
    load_dense_weights(model, rows)
    for name, weights in rows.items():
        assert torch.equal(export_dense_weights(model, name, 8), weights)
    counts = dict.fromkeys(rows, 8)
    stock = Towers(device="cpu")
    stock.load_state_dict(stock_state_dict(model, counts))
    assert isinstance(stock.item, EmbeddingBagCollection)
    assert torch.equal(stock.item.embedding_bags["t"].weight, rows[ITEM])
    states = stock_optimizer_state_dict(model, counts)
    assert "t.momentum1" in states["state"]["item.embedding_bags.t.weight"]
    load_stock_state_dict(other, stock.state_dict(), states)
    assert torch.equal(export_dense_weights(other, USER, 8), rows[USER])


def test_an_export_and_its_delta(tmp_path: Path) -> None:
    model = build()
    load_dense_weights(model, {USER: torch.ones(3, DIM), ITEM: 2 * torch.ones(4, DIM)})
    export_for_inference(model, tmp_path / "model.pt", dtype=torch.float32)
    served = torch.jit.load(tmp_path / "model.pt")
    assert served.recstore_tables() == [USER, ITEM, "w"]
    load_dense_weights(model, {ITEM: 3 * torch.ones(5, DIM)})
    info = export_delta(model, tmp_path / "delta", base=tmp_path / "model.pt")
    assert {name: table.rows for name, table in info.tables.items()} == {
        USER: 0,
        ITEM: 5,
        "w": 0,
    }
    served.apply_delta(read_delta(tmp_path / "delta"))
    assert served.recstore_rows(ITEM)[1:].unique().tolist() == [3.0]
    assert served.recstore_rows(USER)[1:].unique().tolist() == [1.0]


def test_state_dict_and_distributed_checkpoint(tmp_path: Path) -> None:
    model, other, third = trained(), build(), build()
    state = {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }
    other.load_state_dict(state["model"])
    other.fused_optimizer.load_state_dict(state["optimizer"])
    assert_equal(model, other)
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    load_distributed_checkpoint(third, tmp_path / "saved")
    assert_equal(model, third)


def test_a_shared_cold_store_keeps_them_apart() -> None:
    ROWS.clear()
    model = trained(options=TableOptions(max_rows=8, cold_store=SharedDictOptions()))
    flush_tables(model)
    rows = {name: stored for (_, name), stored in ROWS.items()}
    assert sorted(
        (name.split(".0-")[0], sorted(stored)) for name, stored in rows.items()
    ) == [
        (ITEM, [1, 2, 3]),
        (USER, [1, 2]),
        ("w", [5]),
    ]
    # A plan that is made by hand has no row names.
    for tables in model.plan.plan.values():
        for sharding in tables.values():
            sharding.row_name = None
    by_hand = DistributedModelParallel(
        Towers(),
        plan=model.plan,
        sharders=[RecStoreSharder(), RecStoreEmbeddingCollectionSharder()],
    )
    with pytest.raises(
        ValueError,
        match=r"2 collections have a RecStore table 't' whose rows .*RecStorePlanner",
    ):
        flush_tables(by_hand)


def test_the_planner_names_both() -> None:
    module = Towers()
    constraints = {"t": RecStoreConstraints(options=TableOptions(expected_rows=1000))}
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints=dict(constraints),
        debug=False,
    )
    planner.collective_plan(
        module,
        [RecStoreSharder(), RecStoreEmbeddingCollectionSharder()],
        dist.group.WORLD,
    )
    lines = assumed(planner._best_plan, dict(constraints))
    assert [line.split("'")[1] for line in lines] == [ITEM, USER, "w"]
    assert all(
        "1,000 resident rows assumed (expected_rows)" in line for line in lines[:2]
    )
