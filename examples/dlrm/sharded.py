"""DLRM with its tables sharded by TorchRec: in RecStore, or in stock FUSED tables to compare with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from criteo_format import ID_NAMES, NUM_DENSE
from settings import Settings
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

EPS = 1e-8


def table_name(feature: str) -> str:
    """Name of a feature's table."""
    return f"t_{feature}"


def _unsharded(settings: Settings) -> DLRMTrain:
    # A RecStore table has no size; the number is a hint that nobody has to think about.
    num_embeddings = settings.num_embeddings if settings.backend == "fused" else 2**40
    tables = [
        EmbeddingBagConfig(
            name=table_name(feature),
            embedding_dim=settings.dim,
            num_embeddings=num_embeddings,
            feature_names=[feature],
        )
        for feature in ID_NAMES
    ]
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[512, 256, settings.dim],
        over_arch_layer_sizes=[512, 512, 256, 1],
    )
    return DLRMTrain(dlrm)


def _plan(settings: Settings, model: nn.Module) -> tuple[ShardingPlan, list[ModuleSharder[Any]]]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    optimizer = EmbOptimType[f"EXACT_{settings.optimizer.upper()}"]
    fused_params = {"optimizer": optimizer, "learning_rate": settings.lr, "eps": EPS}
    batch_rows = settings.batch_size // dist.get_world_size()
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    names = [table_name(feature) for feature in ID_NAMES]
    sharders: list[ModuleSharder[Any]]
    planner: EmbeddingShardingPlanner
    if settings.backend == "recstore":
        from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder, TableOptions

        options = TableOptions(seed=settings.seed)
        sharders = [RecStoreSharder(fused_params=fused_params)]
        dynamic = {name: RecStoreConstraints(sharding_types=[settings.sharding], options=options) for name in names}
        planner = RecStorePlanner(topology=topology, batch_size=batch_rows, constraints=dynamic)
    else:
        kernels = [EmbeddingComputeKernel.FUSED.value]
        sharders = [EmbeddingBagCollectionSharder(fused_params=fused_params)]
        static = {
            name: ParameterConstraints(sharding_types=[settings.sharding], compute_kernels=kernels) for name in names
        }
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch_rows, constraints=static)
    group = dist.group.WORLD
    assert group is not None
    return planner.collective_plan(model, sharders, group), sharders


def build(settings: Settings) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Builds the sharded model and its optimizer; collective, the process group stands.

    Returns:
        The model, from a ``Batch`` to (loss, (loss, logits, labels)), and the optimizer of its dense part; the
        embeddings are updated in backward.
    """
    torch.manual_seed(settings.seed)
    model = _unsharded(settings)
    plan, sharders = _plan(settings, model)
    sharded = DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))
    dense_parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    # Adagrad here loses up to 0.04 of AUC on some seeds: its first steps kill units of the dense layers.
    dense = KeyedOptimizerWrapper(dense_parameters, lambda params: torch.optim.Adam(params, lr=settings.dense_lr))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def table_sizes(settings: Settings, model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
    """Returns rows and bytes of every table over all ranks; collective."""
    if settings.backend == "recstore":
        from torchrec_recstore import table_stats

        stats = table_stats(model)
        return {name: each.rows for name, each in stats.items()}, {name: each.bytes for name, each in stats.items()}
    # FBGEMM on CPU keeps float32: the weights, and one state of the same shape, of one number a row, or none.
    state = {"sgd": 0, "adagrad": settings.dim, "rowwise_adagrad": 1}[settings.optimizer]
    names = [table_name(feature) for feature in ID_NAMES]
    row_bytes = 4 * (settings.dim + state)
    return dict.fromkeys(names, settings.num_embeddings), dict.fromkeys(names, settings.num_embeddings * row_bytes)
