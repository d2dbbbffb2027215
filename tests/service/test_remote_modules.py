"""Eager collections whose tables are on two servers, compared with collections in the
process, to the bit.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.distributed.workers import run_on_ranks
from tests.recstore_server import RecStoreServer
from torchrec_recstore import (
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    RecStoreWarning,
    ServiceError,
    TableOptions,
    save_checkpoint,
    set_time,
)
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.optim import SGD, Adagrad, Adam

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
OPTIONS = TableOptions(seed=5)
FEATURES = ["f", "g", "h"]
_prefixes = itertools.count()


@pytest.fixture
def client(two_servers: list[RecStoreServer]) -> Iterator[RecStoreClient]:
    with RecStoreClient([server.address for server in two_servers]) as client:
        yield client


def bags(
    prefix: str, second: PoolingType = SUM, dtype: DataType = DataType.FP32
) -> list[EmbeddingBagConfig]:
    common = {"num_embeddings": 1000, "data_type": dtype}
    return [
        EmbeddingBagConfig(
            name=f"{prefix}a", embedding_dim=8, feature_names=["f", "g"], **common
        ),
        EmbeddingBagConfig(
            name=f"{prefix}b",
            embedding_dim=8,
            feature_names=["h"],
            pooling=second,
            **common,
        ),
    ]


def batch(number: int, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 5, (15,), generator=generator)
    if number == 1:
        lengths[10:] = 0  # a step without ids of the second table
    ids = torch.randint(
        -(2**62), 2**62, (20,), generator=torch.Generator().manual_seed(0)
    )
    values = ids[torch.randint(0, 20, (int(lengths.sum()),), generator=generator)]
    weights = (
        torch.rand(len(values), generator=generator).requires_grad_()
        if weighted
        else None
    )
    return KeyedJaggedTensor(FEATURES, values, weights, lengths)


def prefix() -> str:
    return f"m{next(_prefixes)}"


@pytest.mark.parametrize("pooling", [SUM, MEAN])
@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.FP16, DataType.INT8])
@pytest.mark.parametrize("prefetching", [False, True])
def test_bags(
    client: RecStoreClient, pooling: PoolingType, dtype: DataType, prefetching: bool
) -> None:
    weighted, tables = pooling is SUM, prefix()
    arguments: dict[str, Any] = {
        "is_weighted": weighted,
        "optimizer": Adam(lr=0.1, max_gradient=0.5),
        "options": OPTIONS,
    }
    here = RecStoreEmbeddingBagCollection(bags(tables, pooling, dtype), **arguments)
    there = RecStoreEmbeddingBagCollection(
        bags(tables, pooling, dtype), **arguments, client=client
    )
    for number in range(4):
        given = [batch(number, weighted) for _ in range(2)]
        outs = [
            module(some).values()
            for module, some in zip((here, there), given, strict=True)
        ]
        assert torch.equal(*outs)
        if prefetching:
            there.prefetch(batch(number + 1, weighted))
        grad = torch.randn(outs[0].shape)
        for out in outs:
            out.backward(grad)
        if weighted:
            assert torch.equal(given[0].weights().grad, given[1].weights().grad)
    for module in (here, there):
        module.eval()
    assert torch.equal(
        here(batch(9, weighted)).values(), there(batch(9, weighted)).values()
    )
    own = here.embedding_bags[f"{tables}b"].table
    stats = client.stats(f"{tables}b")
    assert (stats.rows, stats.updates) == (own.stats().rows, own.stats().updates)  # type: ignore[union-attr]


def test_rows(client: RecStoreClient) -> None:
    tables = prefix()
    configs = [
        EmbeddingConfig(
            name=f"{tables}{name}",
            embedding_dim=8,
            num_embeddings=1000,
            feature_names=features,
        )
        for name, features in (("a", ["f", "g"]), ("b", ["h"]))
    ]
    here = RecStoreEmbeddingCollection(configs, need_indices=True)
    there = RecStoreEmbeddingCollection(configs, need_indices=True, client=client)
    for number in range(3):
        there.prefetch(batch(number))
        outs = [module(batch(number)) for module in (here, there)]
        for feature in FEATURES:
            values = [out[feature].values() for out in outs]
            assert torch.equal(*values)
            for value in values:
                value.pow(3).sum().backward(retain_graph=True) if len(value) else None
    assert torch.equal(
        here.eval()(batch(2))["g"].values(), there.eval()(batch(2))["g"].values()
    )


def dlrm(tables: str, **arguments: Any) -> DLRM:
    torch.manual_seed(1)
    collection = RecStoreEmbeddingBagCollection(
        bags(tables), options=OPTIONS, **arguments
    )
    return DLRM(collection, 3, [8, 8], [8, 1])


def train(
    model: nn.Module,
    forward: Callable[[Tensor, KeyedJaggedTensor], Tensor],
    steps: int = 4,
) -> list[Tensor]:
    dense = [
        parameter
        for name, parameter in model.named_parameters()
        if "embedding_bags" not in name
    ]
    optimizer = torch.optim.Adam(dense, lr=0.01)
    losses = []
    for number in range(steps):
        number %= 4
        out = forward(
            torch.rand(5, 3, generator=torch.Generator().manual_seed(number)),
            batch(number),
        )
        loss = (out - number % 2).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        model.sparse_arch.embedding_bag_collection.learning_rate *= 0.7
    return losses


def test_a_dlrm(client: RecStoreClient) -> None:
    here, there = dlrm(tables := prefix()), dlrm(tables, client=client)
    assert torch.equal(torch.stack(train(here, here)), torch.stack(train(there, there)))


@pytest.mark.slow
def test_a_dlrm_with_a_checkpoint_and_in_a_compiled_graph(
    client: RecStoreClient,
) -> None:
    here, there = dlrm(tables := prefix()), dlrm(tables, client=client)

    def recomputed(model: nn.Module) -> Callable[[Tensor, KeyedJaggedTensor], Tensor]:
        return lambda dense, features: checkpoint(
            model, dense, features, use_reentrant=False
        )

    assert torch.equal(
        torch.stack(train(here, recomputed(here))),
        torch.stack(train(there, recomputed(there))),
    )
    compiled = [torch.compile(model, backend="aot_eager") for model in (here, there)]
    losses = [
        torch.stack(train(model, graph))
        for model, graph in zip((here, there), compiled, strict=True)
    ]
    assert torch.equal(*losses)


def test_feature_processors(client: RecStoreClient) -> None:
    tables, models = prefix(), []
    for of_client in (None, client):
        torch.manual_seed(2)
        collection = RecStoreEmbeddingBagCollection(
            bags(tables), is_weighted=True, client=of_client
        )
        processors = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, 5))
        models.append(FeatureProcessedEmbeddingBagCollection(collection, processors))
    for number in range(3):
        outs = [model(batch(number)).values() for model in models]
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()
    for first, second in zip(
        models[0].parameters(), models[1].parameters(), strict=True
    ):
        assert (first.grad is None) == (second.grad is None)
        assert first.grad is None or torch.equal(first.grad, second.grad)


def test_an_update_may_be_in_progress(client: RecStoreClient) -> None:
    # a fixed name, on which the initial rows and so the losses depend
    tables = "in_progress_"
    model = dlrm(tables, client=client, staleness=1, optimizer=Adagrad(lr=0.1))
    losses = train(model, model, 30)
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    model.eval()(torch.rand(5, 3), batch(0))  # waits for the last update
    assert client.stats(f"{tables}a").steps == 30


def test_a_server_that_stops_is_an_error_of_the_step(
    own_server: RecStoreServer,
) -> None:
    with RecStoreClient([own_server.address], timeout_s=1.0) as client:
        model = RecStoreEmbeddingBagCollection(
            bags(prefix()), client=client, staleness=1
        )
        model(batch(0)).values().sum().backward()
        model.eval()(batch(0))
        out = model.train()(batch(0)).values().sum()
        own_server.kill()
        out.backward()
        with pytest.raises(ServiceError, match="cannot be reached"):
            model.eval()(batch(0))


def test_state_belongs_to_the_servers(client: RecStoreClient, tmp_path: Path) -> None:
    model = dlrm(tables := prefix(), client=client)
    local = dlrm(tables)
    train(model, model)
    with pytest.warns(
        RecStoreWarning,
        match="state_dict does not contain the rows of tables on servers: client.save",
    ):
        state = model.state_dict()
    assert not any("embedding_bags" in key for key in state)
    missing, unexpected = dlrm(tables).load_state_dict(state, strict=False)
    assert sorted({key.split(".")[3] for key in missing}) == [
        f"{tables}a",
        f"{tables}b",
    ]
    assert not unexpected
    dlrm(tables, client=client).load_state_dict(state)
    with pytest.raises(
        RuntimeError,
        match=rf"{tables}a.weight has rows, but the table of the model is on servers",
    ):
        model.load_state_dict(local.state_dict())
    name = f"models-{random.getrandbits(64)}"
    rows = client.pull(f"{tables}a", batch(0).values())
    client.save(name)
    train(model, model)
    assert not torch.equal(client.pull(f"{tables}a", batch(0).values()), rows)
    client.load(name)
    assert torch.equal(client.pull(f"{tables}a", batch(0).values()), rows)
    model(torch.rand(5, 3), batch(0))
    with pytest.raises(
        ValueError,
        match=(
            rf"table '{tables}a' is on servers, which own its rows: save the rows with"
            r" client"
        ),
    ):
        save_checkpoint(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(
        ValueError, match=rf"table '{tables}a' is on servers, which own"
    ):
        export_for_inference(model)
    with pytest.raises(ValueError, match=rf"set_time: table '{tables}a' is on servers"):
        set_time(model, 10.0)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_gradients_that_are_not_finite(
    nonfinite: Literal["skip", "raise"], client: RecStoreClient
) -> None:
    tables, ids = prefix(), torch.arange(3)
    client.init_data(
        tables,
        (10, 4),
        torch.float32,
        options=TableOptions(nonfinite=nonfinite),
        optimizer=SGD(lr=1.0),
    )
    client.update(tables, ids, torch.ones(3, 4))
    before, grads = client.pull(tables, ids), torch.ones(3, 4)
    grads[1, 1] = torch.nan
    if nonfinite == "raise":
        grads[:, 2] = torch.inf  # on both servers: each checks its own rows
        with pytest.raises(
            ValueError, match=f"table '{tables}': a gradient is NaN or infinite"
        ):
            client.update(tables, ids, grads)
        assert torch.equal(client.pull(tables, ids), before)
    else:
        client.update(tables, ids, grads)
        assert torch.equal(
            client.pull(tables, ids), before - torch.tensor([[1.0], [0.0], [1.0]])
        )


def test_what_is_refused(client: RecStoreClient) -> None:
    tables = prefix()

    def make(**arguments: Any) -> RecStoreEmbeddingBagCollection:
        return RecStoreEmbeddingBagCollection(
            bags(tables), **{"client": client, **arguments}
        )

    for arguments, kind, error in (
        ({"fused": False}, ValueError, "fused must be True with client"),
        (
            {"state_dtype": torch.float16},
            ValueError,
            "state_dtype must be torch.float32 with client",
        ),
        ({"device": "meta"}, ValueError, "device must be cpu with client, got meta"),
        (
            {"client": "127.0.0.1:7700"},
            TypeError,
            "client must be a RecStoreClient, got str",
        ),
        ({"client": None, "staleness": 1}, ValueError, "staleness=1 needs client"),
        ({"staleness": -1}, ValueError, "staleness must be at least 0, got -1"),
        ({"optimizer": SGD(lr=0.1), "lr": 0.2}, ValueError, "disagrees"),
    ):
        with pytest.raises(kind, match=error):
            make(**arguments)
    assert f"{tables}a" not in client._specs
    model = make()
    with pytest.raises(
        ValueError,
        match=(
            f"table '{tables}a' exists already with another specification: options.seed"
        ),
    ):
        make(options=OPTIONS)
    with pytest.raises(ValueError, match="lr must"):
        model.learning_rate = -0.5
    for call, error in (
        (model.reset_parameters, "rows cannot be reset"),
        (model.share_memory, "cannot be shared by processes"),
        (lambda: copy.deepcopy(model), "cannot be copied"),
        (lambda: pickle.dumps(model), "cannot be copied or pickled"),
        (lambda: model.to("meta"), "cannot be moved to the meta device"),
    ):
        with pytest.raises(
            RuntimeError,
            match=rf"table '{tables}a' belongs to RecStoreClient\(.*{error}",
        ):
            call()
    assert model.to(torch.float64).double().device == torch.device("cpu")
    with pytest.raises(
        ValueError,
        match=(
            r"no feature 'f' of table '\w+', 'g' of table '\w+', 'h' of .*it has"
            r" \['i'\]"
        ),
    ):
        model(
            KeyedJaggedTensor(
                ["i"], torch.tensor([1]), torch.tensor([1.0]), torch.tensor([1])
            )
        )
    with pytest.raises(TypeError, match="ids must be integers"):
        model(
            KeyedJaggedTensor(
                FEATURES, torch.rand(3), lengths=torch.ones(3, dtype=torch.int64)
            )
        )


def _replicated(rank: int, world_size: int, addresses: list[str], tables: str) -> None:
    with RecStoreClient(addresses) as client:
        model = dlrm(tables, client=client)
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.over_arch.parameters(), lr=0.1)
        for number in range(5):
            optimizer.zero_grad()
            ddp(torch.ones(5, 3), batch(10 * number + rank)).square().mean().backward()
            optimizer.step()
        dist.barrier()
        whole = [
            torch.empty_like(parameter) for parameter in model.over_arch.parameters()
        ]
        for own, other in zip(model.over_arch.parameters(), whole, strict=True):
            other.copy_(own.detach())
            dist.broadcast(other, 0)
            assert torch.equal(own, other)
        assert client.stats(f"{tables}a").steps == 5 * world_size


@pytest.mark.slow
def test_workers_with_replicas_of_the_dense_layers(
    two_servers: list[RecStoreServer],
) -> None:
    addresses = [server.address for server in two_servers]
    run_on_ranks(
        2,
        partial(
            _replicated, addresses=addresses, tables=f"ddp{random.getrandbits(40)}"
        ),
    )
