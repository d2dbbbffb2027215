"""Models that only read tables on servers, which other models train."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology

from tests.recstore_server import RecStoreServer
from torchrec_recstore import (
    RecStoreClient,
    RecStoreConstraints,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollectionSharder,
    RecStorePlanner,
    RecStoreSharder,
)
from torchrec_recstore.optim import Adam
from torchrec_recstore.options import Servers, TableOptions
from torchrec_recstore_service.client.plain_client import PlainClient
from torchrec_recstore_service.wire.row_requests import RowRead

IDS = torch.tensor([3, -7, 2**40])


@pytest.fixture
def name() -> str:
    return f"frozen{random.getrandbits(40)}"


def batch(name: str, ids: Tensor = IDS) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        [name], values=ids, lengths=torch.ones(len(ids), dtype=torch.long)
    )


def config(name: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=4, num_embeddings=100, feature_names=[name]
    )


def sharded(
    server: RecStoreServer,
    name: str,
    frozen: bool,
    kind: type[nn.Module] = EmbeddingBagCollection,
) -> DistributedModelParallel:
    options = TableOptions(servers=Servers([server.address]), frozen=frozen)
    if kind is EmbeddingBagCollection:
        collection = EmbeddingBagCollection([config(name)], device=torch.device("meta"))
        sharder = RecStoreSharder(optimizer=Adam(lr=0.1))
    else:
        table = EmbeddingConfig(
            name=name, embedding_dim=4, num_embeddings=100, feature_names=[name]
        )
        collection = EmbeddingCollection([table], device=torch.device("meta"))
        sharder = RecStoreEmbeddingCollectionSharder(optimizer=Adam(lr=0.1))
    constraints = {name: RecStoreConstraints(options=options)}
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(collection, [sharder], dist.group.WORLD)
    return DistributedModelParallel(
        collection, plan=plan, sharders=[sharder], device=torch.device("cpu")
    )


def rows_of(model: DistributedModelParallel, features: KeyedJaggedTensor) -> Tensor:
    """Returns the row of each id, (N, 4). Each bag has one id."""
    out = model(features).wait()
    return (
        out.values()
        if isinstance(out, KeyedTensor)
        else out[features.keys()[0]].values()
    )


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_a_prefetch_of_a_sharded_model(
    one_rank: None,
    server: RecStoreServer,
    name: str,
    kind: type[nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pulls = []
    original = PlainClient.pull_each

    def counted(client: PlainClient, reads: Sequence[RowRead]) -> list[Tensor]:
        pulls.append([read.table for read in reads])
        return original(client, reads)

    trains = sharded(server, name, False, kind)
    reads = sharded(server, name, True, kind)
    rows_of(trains, batch(name)).sum().backward()
    monkeypatch.setattr(PlainClient, "pull_each", counted)
    features = batch(name, torch.cat([IDS, IDS + 1]))

    def prefetch() -> None:
        for kernels in reads.module.sharding_kernels:
            kernels.prefetch(features)

    with RecStoreClient([server.address]) as client:
        rows = client.pull(name, IDS)
        reads(features)  # The first batch.
        assert len(pulls) == 1
        for _ in range(6):
            prefetch()
            found = rows_of(reads, features)
            assert torch.equal(found[:3], rows)
            assert not found[3:].any()
        assert len(pulls) == 1
        # A lookup in evaluation reads the rows of now, and so does a later one without
        # a prefetch.
        prefetch()
        rows_of(trains, batch(name)).sum().backward()
        newer = client.pull(name, IDS)
        assert not torch.equal(newer, rows)
        for training in (False, True):
            assert torch.equal(rows_of(reads.train(training), features)[:3], newer)


def test_a_sharded_model(one_rank: None, server: RecStoreServer, name: str) -> None:
    trains, reads = sharded(server, name, False), sharded(server, name, True)
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
        trains = RecStoreEmbeddingBagCollection(
            [config(name)], optimizer=Adam(lr=0.1), client=client
        )
        reads = RecStoreEmbeddingBagCollection(
            [config(name)],
            optimizer=Adam(lr=0.1),
            options=TableOptions(frozen=True),
            client=client,
        )
        trains(batch(name)).values().sum().backward()
        before = client.stats(name)
        out = reads(batch(name)).values()
        assert torch.equal(out, client.pull(name, IDS))
        assert not out.requires_grad
        assert client.stats(name) == before
        reads.embedding_bags[name].weight.requires_grad_(True)
        with pytest.raises(
            ValueError,
            match="is frozen by its options, and its weight requires a gradient",
        ):
            reads(batch(name))


def test_a_clients_table_is_not_frozen() -> None:
    with (
        RecStoreClient() as client,
        pytest.raises(
            ValueError, match=r"TableOptions\.frozen is an option of the model"
        ),
    ):
        client.init_data("t", (10, 4), options=TableOptions(frozen=True))
