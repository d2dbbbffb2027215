"""Small sharded models on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from torchrec.distributed.planner.types import ParameterConstraints

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreSharder,
)
from torchrec_recstore.store import Table


def bag(
    name: str = "t",
    features: Sequence[str] = ("f",),
    dim: int = 4,
    rows: int = 1000,
    **more: Any,
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=list(features),
        **more,
    )


def collection(
    *tables: EmbeddingBagConfig, device: str = "meta", **more: Any
) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=list(tables), device=torch.device(device), **more
    )


def sequence(
    name: str = "t",
    features: Sequence[str] = ("f",),
    dim: int = 4,
    rows: int = 1000,
    **more: Any,
) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=list(features),
        **more,
    )


def sequences(
    *tables: EmbeddingConfig, device: str = "meta", **more: Any
) -> EmbeddingCollection:
    return EmbeddingCollection(tables=list(tables), device=torch.device(device), **more)


def sharded(
    ebc: nn.Module,
    fused_params: Mapping[str, Any] | None = None,
    options: Mapping[str, TableOptions] | None = None,
    sharding_type: str = "table_wise",
    constraints: Mapping[str, ParameterConstraints] | None = None,
    optimizer: Optimizer | None = None,
    accumulation_steps: int = 1,
) -> DistributedModelParallel:
    """``ebc`` sharded on this rank.

    All tables are in RecStore unless ``constraints`` say otherwise.
    """
    options = options or {}
    sequential = isinstance(ebc, EmbeddingCollection)
    if constraints is None:
        constraints = {
            config.name: RecStoreConstraints(
                sharding_types=[sharding_type],
                options=options.get(config.name, TableOptions()),
            )
            for config in (
                ebc.embedding_configs() if sequential else ebc.embedding_bag_configs()
            )
        }
    params = None if fused_params is None else dict(fused_params)
    sharder = RecStoreEmbeddingCollectionSharder if sequential else RecStoreSharder
    sharders = [
        sharder(params, optimizer=optimizer, accumulation_steps=accumulation_steps)
    ]
    topology = Topology(world_size=1, compute_device="cpu")
    planner = RecStorePlanner(
        topology=topology, constraints=dict(constraints), debug=False
    )
    plan = planner.collective_plan(ebc, sharders, dist.group.WORLD)
    return DistributedModelParallel(ebc, plan=plan, sharders=sharders)


def batch(
    dtype: torch.dtype = torch.int64, **features: list[list[int]]
) -> KeyedJaggedTensor:
    """A batch with the bags of ids of each feature."""
    return KeyedJaggedTensor.from_lengths_sync(
        list(features),
        torch.tensor(
            [i for bags in features.values() for ids in bags for i in ids], dtype=dtype
        ),
        torch.tensor([len(ids) for bags in features.values() for ids in bags]),
    )


def tables(model: DistributedModelParallel) -> dict[str, Table]:
    """The shards of this rank."""
    return {table.name: table for table in model.module.recstore_tables()}
