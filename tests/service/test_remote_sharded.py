"""Sharded models whose tables are on servers, compared with models whose tables are on
the ranks, to the bit.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.distributed.workers import run_on_ranks
from tests.recstore_server import RecStoreServer
from torchrec_recstore import (
    RecStoreClient,
    RecStoreConstraints,
    RecStoreEmbeddingCollectionSharder,
    RecStorePlanner,
    RecStorePrefetchPipeline,
    RecStoreSharder,
    RecStoreWarning,
    Servers,
    Table,
    TableOptions,
    export_dense_weights,
    flush_tables,
    load_checkpoint,
    save_checkpoint,
    set_time,
    table_stats,
)
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.optim import Adam, Optimizer

FEATURES = ["f", "g", "h"]
ROWS = 2**40


def batch(number: int, rank: int = 0) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    ids = torch.randint(
        -(2**62), 2**62, (20,), generator=torch.Generator().manual_seed(0)
    )
    lengths = torch.randint(0, 5, (15,), generator=generator)
    if number == 1:
        lengths[10:] = 0
    return KeyedJaggedTensor(
        FEATURES,
        ids[torch.randint(0, 20, (int(lengths.sum()),), generator=generator)],
        None,
        lengths,
    )


class Model(nn.Module):
    """A DLRM, and a sequence collection beside it."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        meta = torch.device("meta")
        bags = [
            EmbeddingBagConfig(
                name=f"{prefix}a",
                embedding_dim=8,
                num_embeddings=ROWS,
                feature_names=["f", "g"],
            ),
            EmbeddingBagConfig(
                name=f"{prefix}b",
                embedding_dim=8,
                num_embeddings=ROWS,
                feature_names=["h"],
            ),
        ]
        for config, kind in zip(
            bags,
            ((PoolingType.SUM, DataType.FP32), (PoolingType.MEAN, DataType.FP16)),
            strict=True,
        ):
            config.pooling, config.data_type = kind
        self.dlrm = DLRM(
            EmbeddingBagCollection(tables=bags, device=meta), 3, [8, 8], [8, 1]
        )
        rows = [
            EmbeddingConfig(
                name=f"{prefix}c",
                embedding_dim=8,
                num_embeddings=ROWS,
                feature_names=["f"],
            )
        ]
        self.rows = EmbeddingCollection(tables=rows, device=meta)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        logits = self.dlrm(torch.ones(5, 3), features)
        loss = logits.square().mean() + self.rows(features)["f"].values().square().sum()
        return loss, loss.detach()


def sharded(
    prefix: str,
    servers: Servers | None,
    optimizer: Optimizer,
    more: dict[str, Any] | None = None,
    on_servers: str = "abc",
) -> DistributedModelParallel:
    model = Model(prefix)
    constraints = {
        f"{prefix}{name}": RecStoreConstraints(
            sharding_types=["table_wise"],
            options=TableOptions(
                seed=4, servers=servers if name in on_servers else None, **(more or {})
            ),
        )
        for name in "abc"
    }
    sharders = [
        RecStoreSharder(optimizer=optimizer),
        RecStoreEmbeddingCollectionSharder(optimizer=optimizer),
    ]
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    plan = RecStorePlanner(topology=topology, constraints=constraints).collective_plan(
        model, sharders, dist.group.WORLD
    )
    return DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def dense_optimizer(model: DistributedModelParallel) -> KeyedOptimizerWrapper:
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(
        parameters, lambda params: torch.optim.Adam(params, lr=0.01)
    )


def train(model: DistributedModelParallel, rank: int, steps: int = 4) -> Tensor:
    optimizer, losses = dense_optimizer(model), []
    for number in range(steps):
        optimizer.zero_grad()
        loss, _ = model(batch(number, rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        # as a schedule of the learning rate does
        for group in model.fused_optimizer.param_groups:
            group["lr"] *= 0.7
    return torch.stack(losses)


def pipelined(model: DistributedModelParallel, rank: int, steps: int = 4) -> Tensor:
    optimizer = dense_optimizer(model)
    pipeline = RecStorePrefetchPipeline(model, optimizer, torch.device("cpu"))
    batches = iter([batch(number, rank) for number in range(steps)])
    return torch.stack([pipeline.progress(batches) for _ in range(steps)])


def _as_on_the_ranks(
    rank: int, world_size: int, servers: Servers, stale: Servers, prefix: str
) -> None:
    here = sharded(f"{prefix}s", None, Adam(lr=0.05, max_gradient=0.5))
    there = sharded(f"{prefix}s", servers, Adam(lr=0.05, max_gradient=0.5))
    assert torch.equal(train(here, rank), train(there, rank))
    for model in (here, there):
        model.eval()
    assert torch.equal(here(batch(7, rank))[0], there(batch(7, rank))[0])
    own, of_servers = table_stats(here), table_stats(there)
    assert {n: (s.rows, s.updates, s.steps) for n, s in own.items()} == {
        n: (s.rows, s.updates, s.steps) for n, s in of_servers.items()
    }
    # Some tables on servers and others on the ranks, with a prefetch of the next batch.
    here, there = (
        sharded(f"{prefix}p", of, Adam(lr=0.05), on_servers="bc")
        for of in (None, servers)
    )
    assert torch.equal(pipelined(here, rank), pipelined(there, rank))
    # Updates that are in progress: after flush_tables they are on the servers.
    model = sharded(f"{prefix}u", stale, Adam(lr=0.05))
    losses = pipelined(model, rank, 40)
    assert losses[-4:].sum() < losses[:4].sum()
    flush_tables(model)
    with RecStoreClient(stale.addresses) as client:
        assert client.stats(f"{prefix}ua").steps == 40
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_as_on_the_ranks(world_size: int, two_servers: list[RecStoreServer]) -> None:
    addresses = [server.address for server in two_servers]
    servers, stale = Servers(addresses), Servers(addresses, staleness=1)
    run_on_ranks(
        world_size,
        partial(
            _as_on_the_ranks,
            servers=servers,
            stale=stale,
            prefix=f"{random.getrandbits(40)}",
        ),
    )


def _state(
    rank: int, world_size: int, servers: Servers, prefix: str, folder: str
) -> None:
    model = sharded(prefix, servers, Adam(lr=0.05))
    train(model, rank, 2)
    with pytest.warns(
        RecStoreWarning,
        match="state_dict does not contain the rows of tables on servers",
    ):
        state = model.state_dict()
    assert not any(f"{prefix}{name}" in key for key in state for name in "abc")
    sharded(prefix, servers, Adam(lr=0.05)).load_state_dict(state)
    local = sharded(f"{prefix}", None, Adam(lr=0.05))
    train(local, rank, 1)
    with pytest.raises(
        (ValueError, RuntimeError),
        match=rf"{prefix}a.weight has rows, but the table .* is on servers",
    ):
        model.load_state_dict(local.state_dict())
    model.fused_optimizer.state_dict()
    save_checkpoint(local, f"{folder}/saved")
    calls = (
        lambda: save_checkpoint(model, f"{folder}/other"),
        lambda: load_checkpoint(model, f"{folder}/saved"),
        lambda: export_dense_weights(model, f"{prefix}a", 10),
        lambda: export_for_inference(model),
        lambda: set_time(model, 10.0),
    )
    for call in calls:
        with pytest.raises(ValueError, match=rf"table '{prefix}a' is on servers"):
            call()
    for _, module in model.named_modules():
        if hasattr(module, "register_post_lookup_tracker_fn"):
            with pytest.raises(NotImplementedError, match="is on servers: trackers"):
                module.register_post_lookup_tracker_fn(lambda *arguments: None)


def test_state_belongs_to_the_servers(server: RecStoreServer, tmp_path: object) -> None:
    run_on_ranks(
        1,
        partial(
            _state,
            servers=Servers([server.address]),
            prefix=f"{random.getrandbits(40)}",
            folder=str(tmp_path),
        ),
    )


def _refused(rank: int, world_size: int, servers: Servers, prefix: str) -> None:
    def shard(
        sharding: str,
        fused_params: dict[str, Any],
        accumulation_steps: int = 1,
        data_type: str = "FP32",
    ) -> None:
        config = EmbeddingBagConfig(
            name=prefix, embedding_dim=8, num_embeddings=ROWS, feature_names=["f"]
        )
        config.data_type = DataType[data_type]
        model = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        constraints = {
            prefix: RecStoreConstraints(
                sharding_types=[sharding], options=TableOptions(servers=servers)
            )
        }
        sharder = RecStoreSharder(
            fused_params={"optimizer": EmbOptimType.ADAM, **fused_params},
            accumulation_steps=accumulation_steps,
        )
        planner = RecStorePlanner(
            topology=Topology(world_size=1, compute_device="cpu"),
            constraints=constraints,
        )
        plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
        DistributedModelParallel(
            model, plan=plan, sharders=[sharder], device=torch.device("cpu")
        )

    with pytest.raises(PlannerError, match="sharding type must be table_wise"):
        shard("row_wise", {})
    for arguments, error in (
        (("table_wise", {"state_dtype": torch.float16}), "optimizer state in float16"),
        (
            ("table_wise", {"stochastic_rounding": True}, 1, "FP16"),
            "stochastic_rounding of torch.float16 rows",
        ),
        (("table_wise", {}, 2), "accumulation_steps=2"),
    ):
        with pytest.raises(
            ValueError,
            match=(
                f"RecStore table '{prefix}' is on servers, which do not support {error}"
            ),
        ):
            shard(*arguments)  # type: ignore[arg-type]


def test_what_is_refused(server: RecStoreServer) -> None:
    run_on_ranks(
        1,
        partial(
            _refused,
            servers=Servers([server.address]),
            prefix=f"r{random.getrandbits(40)}",
        ),
    )
    for arguments, kind, error in (
        ({"addresses": "a:1"}, TypeError, "Servers.addresses must be a list"),
        ({"addresses": ["a"]}, ValueError, "Servers.addresses must be HOST:PORT"),
        (
            {"addresses": ["a:1"], "staleness": -1},
            ValueError,
            "Servers.staleness must be at least 0, got -1",
        ),
        ({"addresses": ["a:1"], "token": "a b"}, ValueError, "Servers.token must be"),
        (
            {"addresses": ["a:1"], "tls_cert": "x"},
            ValueError,
            "tls_key must be set together",
        ),
        (
            {"addresses": ["a:1"], "timeout_s": 0},
            ValueError,
            "Servers.timeout_s must be positive",
        ),
    ):
        with pytest.raises(kind, match=error):
            Servers(**arguments)  # type: ignore[arg-type]
    assert Servers(["a:1", "b:2"]) == Servers(("a:1", "b:2"))
    with pytest.raises(
        TypeError, match=r"TableOptions.servers must be Servers, got list"
    ):
        TableOptions(servers=["a:1"])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"options.servers must be None for a table in this process"
    ):
        Table(4, options=TableOptions(servers=Servers(["a:1"])))
    with pytest.raises(
        ValueError, match=r"options.servers must be None: the client names the servers"
    ):
        RecStoreClient().init_data(
            "t", (10, 4), options=TableOptions(servers=Servers(["a:1"]))
        )
