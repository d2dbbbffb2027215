"""Models that only read tables on servers, which other models train."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology

from tests.recstore_server import RecStoreServer
from torchrec_recstore import (
    RecStoreClient,
    RecStoreConstraints,
    RecStoreEmbeddingBagCollection,
    RecStorePlanner,
    RecStoreSharder,
)
from torchrec_recstore.optim import Adam
from torchrec_recstore.options import Servers, TableOptions

IDS = torch.tensor([3, -7, 2**40])


@pytest.fixture
def name() -> str:
    return f"frozen{random.getrandbits(40)}"


def batch(name: str, ids: Tensor = IDS) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([name], values=ids, lengths=torch.ones(len(ids), dtype=torch.long))


def config(name: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=100, feature_names=[name])


def test_a_sharded_model(one_rank: None, server: RecStoreServer, name: str) -> None:
    def sharded(frozen: bool) -> DistributedModelParallel:
        options = TableOptions(servers=Servers([server.address]), frozen=frozen)
        collection = EmbeddingBagCollection([config(name)], device=torch.device("meta"))
        sharder = RecStoreSharder(optimizer=Adam(lr=0.1))
        constraints = {name: RecStoreConstraints(options=options)}
        planner = RecStorePlanner(topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints)
        plan = planner.collective_plan(collection, [sharder], dist.group.WORLD)
        return DistributedModelParallel(collection, plan=plan, sharders=[sharder], device=torch.device("cpu"))

    trains, reads = sharded(False), sharded(True)
    trains(batch(name)).wait().values().sum().backward()
    with RecStoreClient([server.address]) as client:
        rows = client.pull(name, IDS)
        before = client.stats(name)
        out = reads(batch(name, torch.cat([IDS, IDS + 1]))).wait().values()
        assert torch.equal(out[:3], rows)
        assert not out[3:].any()
        out.sum().backward()
        assert client.stats(name) == before
    trains(batch(name)).wait().values().sum().backward()
    assert not torch.equal(reads(batch(name)).wait().values(), rows)


def test_an_eager_module(server: RecStoreServer, name: str) -> None:
    with RecStoreClient([server.address]) as client:
        trains = RecStoreEmbeddingBagCollection([config(name)], optimizer=Adam(lr=0.1), client=client)
        reads = RecStoreEmbeddingBagCollection(
            [config(name)], optimizer=Adam(lr=0.1), options=TableOptions(frozen=True), client=client
        )
        trains(batch(name)).values().sum().backward()
        before = client.stats(name)
        out = reads(batch(name)).values()
        assert torch.equal(out, client.pull(name, IDS))
        assert not out.requires_grad
        assert client.stats(name) == before
        reads.embedding_bags[name].weight.requires_grad_(True)
        with pytest.raises(ValueError, match="is frozen by its options, and its weight requires a gradient"):
            reads(batch(name))


def test_a_clients_table_is_not_frozen() -> None:
    with RecStoreClient() as client, pytest.raises(ValueError, match=r"TableOptions\.frozen is an option of the model"):
        client.init_data("t", (10, 4), options=TableOptions(frozen=True))
