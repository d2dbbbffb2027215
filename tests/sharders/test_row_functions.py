"""Scores and the ids that leave, by the name of a model's table: on one rank, of eager
modules, and refusals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import (
    LFU,
    LRU,
    LeftIds,
    RecStoreEmbedding,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollectionSharder,
    Scored,
    TableOptions,
    left_ids,
    load_checkpoint,
    save_checkpoint,
    set_scores,
)
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.table_fields import encoded_score

from .models import bag, batch, collection, sequence, sequences, sharded

MANY = 1000
RECORDED = TableOptions(max_rows=4, eviction=LRU(), left_ids=MANY)
SCORED = TableOptions(max_rows=4, eviction=Scored())


def step(model: nn.Module, **features: list[list[int]]) -> None:
    output = model(batch(**features))
    output = output.wait() if hasattr(output, "wait") else output
    values = (
        output.values()
        if not isinstance(output, dict)
        else torch.cat([rows.values() for rows in output.values()])
    )
    values.sum().backward()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("config", [bag, sequence])
def test_ids_that_leave_and_scores_by_name(config: Any, sharding_type: str) -> None:
    make = sequences if config is sequence else collection
    options = {
        "a": RECORDED,
        "b": TableOptions(max_rows=4, eviction=Scored(), left_ids=MANY),
    }
    model = sharded(
        make(config("a", ["f"]), config("b", ["g"])),
        options=options,
        sharding_type=sharding_type,
    )
    for id_ in range(1, 5):
        step(model, f=[[id_]], g=[[id_]])
    assert (
        set_scores(
            model,
            "b",
            torch.tensor([1, 2, 3, 4, 9]),
            torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]),
        )
        == 4
    )
    step(model, f=[[5], [6]], g=[[5], [6]])
    for name, gone in (("a", [1, 2]), ("b", [3, 4])):
        left = left_ids(model, name)
        assert isinstance(left, LeftIds)
        assert (left.ids.tolist(), left.complete) == (gone, True)
        assert left_ids(model, name).ids.tolist() == []
    with pytest.raises(
        ValueError, match=r"the model has no RecStore table 'c'; it has 'a', 'b'"
    ):
        left_ids(model, "c")


@pytest.mark.usefixtures("one_rank")
def test_eager_modules() -> None:
    scored = RecStoreEmbeddingBagCollection([bag("scored", ["f"])], options=SCORED)
    model = nn.ModuleList(
        [
            scored,
            RecStoreEmbeddingBagCollection([bag("recorded", ["g"])], options=RECORDED),
        ]
    )
    for id_ in range(1, 5):
        step(model[0], f=[[id_]])
        step(model[1], g=[[id_]])
    assert (
        set_scores(
            model, "scored", torch.tensor([4, 1, 9]), torch.tensor([0.5, 2.5, 0.0])
        )
        == 2
    )
    step(model[0], f=[[5]])
    step(model[1], g=[[5]])
    table = scored.embedding_bags["scored"].table
    assert table.ids().tolist() == [1, 2, 3, 5]
    assert table.read_rows(torch.tensor([1]))["frequency"].tolist() == [
        encoded_score(2.5)
    ]
    assert left_ids(model, "recorded").ids.tolist() == [1]
    with pytest.raises(ValueError, match="'scored' does not record which ids leave it"):
        left_ids(model, "scored")
    twice = nn.ModuleList(
        [scored, RecStoreEmbeddingBagCollection([bag("scored", ["f"])], options=SCORED)]
    )
    with pytest.raises(
        ValueError,
        match=r"2 RecStore tables 'scored': name one of '0\.scored', '1\.scored'",
    ):
        set_scores(twice, "scored", torch.tensor([1]), torch.tensor([1.0]))


@pytest.mark.usefixtures("one_rank")
def test_eager_tables_by_their_full_names_beside_others() -> None:
    options = TableOptions(max_rows=4, eviction=Scored(), left_ids=MANY)
    eager = RecStoreEmbeddingBagCollection([bag("a", ["f"])], options=options)
    alone = RecStoreEmbedding(9, 4, name="alone", options=options)
    on_meta = RecStoreEmbedding(9, 4, name="empty", device="meta")
    model = nn.ModuleDict(
        {
            "sharded": sharded(collection(bag("a", ["f"])), options={"a": options}),
            "eager": eager,
            "tower": nn.ModuleDict({"alone": alone}),
            "on_meta": on_meta,  # It has no rows, and must not be in the way.
        }
    )
    step(model["sharded"], f=[[1], [2]])
    step(eager, f=[[2], [3]])
    alone(torch.tensor([4]))
    ids, scores = torch.tensor([1, 2]), torch.tensor([1.0, 2.0])
    assert set_scores(model, "sharded.a", ids, scores) == 2
    assert set_scores(model, "eager.a", ids, scores) == 1
    assert set_scores(model, "alone", torch.tensor([4]), torch.tensor([1.0])) == 1
    assert set_scores(model, "tower.alone", torch.tensor([4]), torch.tensor([1.0])) == 1
    eager.embedding_bags["a"].table.remove(ids)
    assert left_ids(model, "sharded.a").ids.tolist() == []
    assert left_ids(model, "eager.a").ids.tolist() == [2]
    with pytest.raises(
        ValueError, match=r"2 RecStore tables 'a': name one of 'sharded\.a', 'eager\.a'"
    ):
        set_scores(model, "a", ids, scores)
    with pytest.raises(
        ValueError, match=r"2 RecStore tables 'a': name one of 'sharded\.a', 'eager\.a'"
    ):
        left_ids(model, "a")
    with pytest.raises(RuntimeError, match="meta"):
        left_ids(model, "empty")


@pytest.mark.usefixtures("one_rank")
def test_a_load_takes_no_table_whose_name_several_have(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {
            "sharded": sharded(collection(bag("a", ["f"]))),
            "eager": RecStoreEmbeddingBagCollection([bag("a", ["f"])]),
        }
    )
    step(model["sharded"], f=[[1], [2]])
    step(model["eager"], f=[[3]])
    save_checkpoint(model["sharded"], tmp_path / "saved")
    (sharded_table,) = model["sharded"].module.recstore_tables()
    eager_table = model["eager"].embedding_bags["a"].table
    saved = sharded_table.read_rows(sharded_table.ids())["weight"]
    step(model["sharded"], f=[[1], [2]])
    several = r"2 RecStore tables 'a': name one of 'sharded\.a', 'eager\.a'"
    for arguments in (
        {"tables": ["a"]},
        {"rename": {"a": "a"}},
        {"rows": {"a": torch.clone}, "optimizer": False},
    ):
        with pytest.raises(ValueError, match=several):
            load_checkpoint(model, tmp_path / "saved", **arguments)
    assert not torch.equal(
        sharded_table.read_rows(sharded_table.ids())["weight"], saved
    )
    load_checkpoint(model, tmp_path / "saved", tables=["sharded.a"])
    assert torch.equal(sharded_table.read_rows(sharded_table.ids())["weight"], saved)
    assert eager_table.ids().tolist() == [3]
    load_checkpoint(
        model,
        tmp_path / "saved",
        tables=["eager.a"],
        rename={"a": "eager.a"},
        optimizer=False,
    )
    assert torch.equal(eager_table.read_rows(sharded_table.ids())["weight"], saved)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_bag_that_samples_share_counts_once(is_sharded: bool) -> None:
    options = {"t": TableOptions(max_rows=9, eviction=LFU(count="occurrences"))}
    if is_sharded:
        model: nn.Module = sharded(collection(bag("t", ["f", "g"])), options=options)
        (table,) = model.module.recstore_tables()
    else:
        model = RecStoreEmbeddingBagCollection([bag("t", ["f", "g"])], options=options)
        table = model.embedding_bags["t"].table
    features = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 2, 3, 3]),
        lengths=torch.tensor([3, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        # Two samples share the bag of 1, 2 and 2, and three samples share the bag of
        # feature g.
        inverse_indices=(["f", "g"], torch.tensor([[0, 1, 0], [0, 0, 0]])),
    )
    model(features).values().sum().backward()
    frequencies = table.read_rows(torch.tensor([1, 2, 3]))["frequency"]
    assert frequencies.tolist() == [1, 2, 2]


@pytest.mark.usefixtures("one_rank")
def test_deduplicated_ids_have_no_occurrences() -> None:
    module = sequences(sequence("t", ["f"]))
    sharders = [
        RecStoreEmbeddingCollectionSharder({"learning_rate": 0.1}, use_index_dedup=True)
    ]
    for count, refused in (("steps", False), ("occurrences", True)):
        options = TableOptions(max_rows=9, eviction=LFU(count=count))  # type: ignore[arg-type]
        constraints = {
            "t": RecStoreConstraints(sharding_types=["table_wise"], options=options)
        }
        plan = RecStorePlanner(constraints=constraints, debug=False).plan(
            module, sharders
        )
        if refused:
            with pytest.raises(
                ValueError,
                match=r"'t': LFU\(count='occurrences'\) cannot be used with use_ind",
            ):
                DistributedModelParallel(module, plan=plan, sharders=sharders)
        else:
            DistributedModelParallel(module, plan=plan, sharders=sharders)
