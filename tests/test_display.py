"""What is printed of options, constraints, sharders, plans, statistics and models, and
shown in notebooks.
"""

from __future__ import annotations

import torch
from torch.distributed import group
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology

from torchrec_recstore import (
    LFU,
    SGD,
    Expiry,
    RecStoreConstraints,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStorePlanner,
    RecStoreSharder,
    RedisStore,
    Servers,
    TableOptions,
    TableStats,
    table_stats,
)
from torchrec_recstore.display import text_table
from torchrec_recstore.store.table_state import StatsByTable


def test_dataclasses_show_the_fields_that_are_set() -> None:
    assert repr(TableOptions()) == "TableOptions()"
    options = TableOptions(max_rows=9, eviction=LFU(), expiry=Expiry(steps=3), seed=1)
    assert (
        repr(options)
        == "TableOptions(seed=1, max_rows=9, eviction=LFU(), expiry=Expiry(steps=3))"
    )
    assert eval(repr(options)) == options
    secret = repr(
        TableOptions(max_rows=1, cold_store=RedisStore("redis://:password@host"))
    )
    assert "password" not in secret
    assert (
        repr(Servers(["a:1"], token="x" * 16 + "abcdefgh"))
        == "Servers(addresses=('a:1',))"
    )
    assert repr(RecStoreConstraints()) == "RecStoreConstraints()"
    told = repr(
        RecStoreConstraints(
            sharding_types=["row_wise"], options=TableOptions(max_rows=9)
        )
    )
    assert (
        told == "RecStoreConstraints(sharding_types=['row_wise'],"
        " options=TableOptions(max_rows=9))"
    )


def test_sharders_planner_plan_model_and_statistics(one_rank: None) -> None:
    sharder = RecStoreSharder(optimizer=SGD(lr=0.5), accumulation_steps=2)
    assert (
        repr(sharder)
        == "RecStoreSharder(optimizer=SGD(lr=0.5, weight_decay=0.0), accumulation_steps=2)"
        or (
            repr(sharder).startswith("RecStoreSharder(optimizer=SGD(lr=0.5")
            and "accumulation_steps=2" in repr(sharder)
        )
    )
    assert (
        repr(RecStoreSharder(fused_params={"learning_rate": 0.1}))
        == "RecStoreSharder(fused_params={'learning_rate': 0.1})"
    )
    processed = RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
        ebc_sharder=RecStoreSharder()
    )
    assert repr(processed).endswith("(ebc_sharder=RecStoreSharder())")

    tables = [
        EmbeddingBagConfig(
            name=f"t_{n}", embedding_dim=8, num_embeddings=2**40, feature_names=[n]
        )
        for n in ("a", "b")
    ]
    ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
    constraints = {"t_a": RecStoreConstraints(options=TableOptions(max_rows=9))}
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    shown = repr(planner)
    assert (
        shown == "RecStorePlanner(constraints={'t_a':"
        " RecStoreConstraints(options=TableOptions(max_rows=9))})"
    )

    plan = planner.collective_plan(ebc, [sharder], group.WORLD)
    line = next(line for line in str(plan).splitlines() if "max_rows" in line)
    assert line.split(maxsplit=3) == [
        "t_a",
        "table_wise",
        "0",
        "TableOptions(max_rows=9)",
    ]
    assert "<td>TableOptions(max_rows=9)</td>" in plan.plan[""]._repr_html_()

    model = DistributedModelParallel(
        ebc, plan=plan, sharders=[sharder], device=torch.device("cpu")
    )
    assert "tables={t_a: 8, t_b: 8}, optimizer=SGD(lr=0.5" in repr(model)
    features = KeyedJaggedTensor(
        ["a", "b"], torch.arange(4), lengths=torch.tensor([2, 2])
    )
    model(features).wait()
    stats = table_stats(model)
    heads, _, first, _second = str(stats).splitlines()
    assert heads.split("  ")[0] == "table"
    assert "evicted" not in heads  # 0 for all tables
    assert first.split()[:2] == ["t_a", "2"]
    assert "<th>rows</th>" in stats._repr_html_()
    assert stats == dict(stats)


def test_tables_align_and_escape() -> None:
    assert (
        text_table(["a", "n"], [["x", "1"], ["long", "1,000"]])
        == "a         n\n----  -----\nx         1\nlong  1,000"
    )
    stats = StatsByTable({"<b>": TableStats(rows=1, evicted=3)})
    assert "<td>&lt;b&gt;</td>" in stats._repr_html_()
    assert "evicted" in str(stats)
    assert str(StatsByTable()) == "{}"
