"""Models with several collections, also with feature processors, and the spread of rows
over ranks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore import export_dense_weights, load_checkpoint, save_checkpoint
from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStoreSharder,
    table_stats,
)

from .workers import run_on_ranks

LR = 0.1
INIT = ConstantInit(0.25)
META = torch.device("meta")


class Several(nn.Module):
    """A model with two bag collections, one of them weighted, a sequence collection and
    feature processors.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(
                name=n, num_embeddings=10, embedding_dim=4, feature_names=["f"]
            )
            for n in "abp"
        ]
        rows = [
            EmbeddingConfig(
                name=n, num_embeddings=10, embedding_dim=4, feature_names=["f"]
            )
            for n in "cd"
        ]
        self.plain = EmbeddingBagCollection(tables=bags[:1], device=device)
        self.weighted = EmbeddingBagCollection(
            tables=bags[1:2], device=device, is_weighted=True
        )
        self.rows = EmbeddingCollection(tables=rows, device=device)
        positions = PositionWeightedModuleCollection(
            {"f": 3}, device=torch.device("cpu")
        )
        for weight in positions.parameters():
            weight.data.copy_(torch.tensor([0.5, 1.0, 2.0]))
        processed = EmbeddingBagCollection(
            tables=bags[2:], device=device, is_weighted=True
        )
        self.processed = FeatureProcessedEmbeddingBagCollection(processed, positions)

    def forward(
        self,
        kjt: KeyedJaggedTensor,
        weighted: KeyedJaggedTensor,
        processed: KeyedJaggedTensor,
    ) -> Any:
        pooled = [
            self.plain(kjt)["f"],
            self.weighted(weighted)["f"],
            self.processed(processed)["f"],
        ]
        rows = [jagged.values() for _, jagged in sorted(self.rows(kjt).items())]
        return sum(((part + 0.3) ** 2).sum() for part in [*pooled, *rows])


def batches(
    rank: int,
) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, KeyedJaggedTensor]:
    ids = torch.tensor([[1, 2, 1, 7], [2, 3, 9, 1]][rank])
    weights = torch.tensor([0.5, 1.0, 2.0, 1.5])
    lengths = torch.tensor([3, 0, 1])
    plain, weighted, processed = (
        KeyedJaggedTensor.from_lengths_sync(["f"], ids, lengths, w)
        for w in (None, weights, None)
    )
    return plain, weighted, processed


def sharded_equals_unsharded(rank: int, world_size: int) -> None:
    sharders = [
        RecStoreSharder(fused_params={"learning_rate": LR}),
        RecStoreEmbeddingCollectionSharder(fused_params={"learning_rate": LR}),
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
            RecStoreSharder(fused_params={"learning_rate": LR})
        ),
    ]
    for sharding_type in ("table_wise", "row_wise"):
        reference = Several(torch.device("cpu"))
        tables = {
            name.split(".")[-2]: parameter
            for name, parameter in reference.named_parameters()
            if "embedding" in name.split(".")[-3]
        }
        assert sorted(tables) == list("abcdp")
        for parameter in tables.values():
            nn.init.constant_(parameter, INIT.value)
        optimizer = torch.optim.SGD(tables.values(), lr=LR)

        options = TableOptions(initializer=INIT, routing="hash")
        constraints = {
            n: RecStoreConstraints(sharding_types=[sharding_type], options=options)
            for n in tables
        }
        topology = Topology(
            world_size=world_size, local_world_size=world_size, compute_device="cpu"
        )
        module = Several(META)
        plan = RecStorePlanner(
            topology=topology, constraints=constraints, debug=False
        ).collective_plan(module, sharders, dist.group.WORLD)
        model = DistributedModelParallel(module, plan=plan, sharders=sharders)
        for _ in range(3):
            losses = [reference(*batches(r)) for r in range(world_size)]
            reference.zero_grad()
            (sum(losses) / world_size).backward()
            loss = model(*batches(rank))
            torch.testing.assert_close(loss, losses[rank], atol=1e-5, rtol=0)
            model.zero_grad()
            loss.backward()
            (expected,) = [
                p.grad for n, p in reference.named_parameters() if "position" in n
            ]
            (found,) = [p.grad for n, p in model.named_parameters() if "position" in n]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            optimizer.step()
        distinct = 3 if world_size == 1 else 5
        assert {
            name: stats.rows for name, stats in table_stats(model).items()
        } == dict.fromkeys("abcdp", distinct)
        for collection in model.modules():
            for table in getattr(collection, "recstore_tables", list)():
                torch.testing.assert_close(
                    table.lookup(table.ids()),
                    tables[table.name].detach()[table.ids()],
                    atol=1e-5,
                    rtol=0,
                )


def rows_spread_over_ranks(rank: int, world_size: int) -> None:
    """Sequential ids and multiples of the world size, above ``num_embeddings`` or in
    its first block.
    """
    for ids in (torch.arange(4000), torch.arange(4000) * world_size + 2**50):
        most = {}
        for routing in ("block", "hash"):
            table = EmbeddingBagConfig(
                name="t", num_embeddings=2**40, embedding_dim=4, feature_names=["f"]
            )
            ebc = EmbeddingBagCollection(tables=[table], device=META)
            constraints = {
                "t": RecStoreConstraints(
                    sharding_types=["row_wise"], options=TableOptions(routing=routing)
                )
            }
            topology = Topology(
                world_size=world_size, local_world_size=world_size, compute_device="cpu"
            )
            plan = RecStorePlanner(
                topology=topology, constraints=constraints, debug=False
            ).collective_plan(ebc, [RecStoreSharder()], dist.group.WORLD)
            model = DistributedModelParallel(
                ebc, plan=plan, sharders=[RecStoreSharder()]
            )
            model(
                KeyedJaggedTensor.from_lengths_sync(
                    ["f"], ids, torch.tensor([len(ids)])
                )
            ).values().sum().backward()
            rows = torch.tensor(
                [sum(len(shard) for shard in model.module.recstore_tables())]
            )
            dist.all_reduce(rows, op=dist.ReduceOp.MAX)
            assert table_stats(model)["t"].rows == len(ids)
            most[routing] = rows.item() * world_size / len(ids)
        assert most["block"] == world_size
        assert most["hash"] < 1.1


class OneName(nn.Module):
    """A model with a bag collection and a feature-processed collection, whose tables
    have the same name.
    """

    def __init__(self) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(
                name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"]
            )
            for _ in range(2)
        ]
        self.plain = EmbeddingBagCollection(tables=bags[:1], device=META)
        processed = EmbeddingBagCollection(
            tables=bags[1:], device=META, is_weighted=True
        )
        positions = PositionWeightedModuleCollection(
            {"f": 3}, device=torch.device("cpu")
        )
        self.processed = FeatureProcessedEmbeddingBagCollection(processed, positions)

    def forward(
        self, kjt: KeyedJaggedTensor, processed: KeyedJaggedTensor
    ) -> torch.Tensor:
        total: torch.Tensor = (
            self.plain(kjt)["f"].square().sum() + self.processed(processed)["f"].sum()
        )
        return total


def equal_names(rank: int, world_size: int, *, path: Path) -> None:
    """Each table has its own rows, also in a checkpoint.

    A rank may have no shard of a table.
    """
    sharders = [
        RecStoreSharder(),
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder(),
    ]

    def build(sharding_type: str) -> DistributedModelParallel:
        constraints = {"t": RecStoreConstraints(sharding_types=[sharding_type])}
        topology = Topology(
            world_size=world_size, local_world_size=world_size, compute_device="cpu"
        )
        planner = RecStorePlanner(
            topology=topology, constraints=constraints, debug=False
        )
        module = OneName()
        plan = planner.collective_plan(module, sharders, dist.group.WORLD)
        return DistributedModelParallel(module, plan=plan, sharders=sharders)

    plain, _, processed = batches(rank)
    for sharding_type, other_type in (
        ("table_wise", "row_wise"),
        ("row_wise", "table_wise"),
    ):
        model, other = build(sharding_type), build(other_type)
        model(plain, processed).backward()
        save_checkpoint(model, path / sharding_type)
        load_checkpoint(other, path / sharding_type)
        rows = []
        for each in (model, other):
            distinct = 3 if world_size == 1 else 5
            counts = {name: stats.rows for name, stats in table_stats(each).items()}
            assert counts == {"plain.t": distinct, "processed.t": distinct}
            rows.append([export_dense_weights(each, name, 10) for name in counts])
        assert all(torch.equal(one, two) for one, two in zip(*rows, strict=True))
        assert not torch.equal(*rows[0])
        with pytest.raises(
            ValueError,
            match=r"2 RecStore tables 't': name one of 'plain\.t', 'processed\.t'",
        ):
            export_dense_weights(model, "t", 10)


def all_of_it(rank: int, world_size: int, *, path: Path) -> None:
    sharded_equals_unsharded(rank, world_size)
    rows_spread_over_ranks(rank, world_size)
    equal_names(rank, world_size, path=path)


@pytest.mark.usefixtures("one_rank")
def test_one_rank(tmp_path: Path) -> None:
    sharded_equals_unsharded(0, 1)
    equal_names(0, 1, path=tmp_path)


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(2, partial(all_of_it, path=tmp_path))
