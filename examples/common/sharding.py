"""A model's tables sharded by TorchRec, in RecStore or in stock FUSED tables, and their learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from common.run_settings import LrSchedule, RunSettings
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder, TableStats, table_stats


def lr_factor(schedule: LrSchedule, warmup_steps: int, total_steps: int, step: int) -> float:
    """The factor that a step's learning rate is multiplied by.

    It rises in equal parts over the first ``warmup_steps`` steps and reaches 1 with the last of them. From then on it
    is 1 (constant), or falls in equal parts (linear) or as half a cosine wave (cosine) to 0 behind the last step.

    Args:
        schedule: its shape after the warm-up.
        warmup_steps: steps before that.
        total_steps: steps of the run.
        step: counted from 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    # A run that goes on with fewer ranks may take a step an epoch more, and a rate is never below 0.
    left = max(total_steps - step, 0) / max(total_steps - warmup_steps, 1)
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def lr_scheduler(
    optimizer: Optimizer, schedule: LrSchedule, warmup_steps: int, total_steps: int, first_step: int = 0
) -> LambdaLR:
    """Lets an optimizer's learning rates follow the schedule; its ``step()`` comes after the optimizer's.

    The schedule's only state is the number of the step. ``LambdaLR.state_dict`` also lists the rates of all parameter
    groups, and how many a sharded model has differs from rank to rank; so that is not what a checkpoint holds.

    Args:
        optimizer: new; each group's ``lr`` is the rate that the factor belongs to.
        schedule: see :func:`lr_factor`.
        warmup_steps: see :func:`lr_factor`.
        total_steps: steps of the run.
        first_step: the step that comes next, counted from 0.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(
        optimizer,
        lambda step: lr_factor(schedule, warmup_steps, total_steps, step),
        last_epoch=first_step - 1,
    )


EPS = 1e-8


def table_name(feature: str) -> str:
    """Name of a feature's table."""
    return f"t_{feature}"


def _plan(
    settings: RunSettings, features: Sequence[str], model: nn.Module
) -> tuple[ShardingPlan, list[ModuleSharder[Any]]]:
    optimizer = EmbOptimType[f"EXACT_{settings.optimizer.upper()}"]
    fused_params = {"optimizer": optimizer, "learning_rate": settings.lr, "eps": EPS}
    batch_rows = settings.batch_size // dist.get_world_size()
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    names = [table_name(feature) for feature in features]
    sharders: list[ModuleSharder[Any]]
    planner: EmbeddingShardingPlanner
    if settings.backend == "recstore":
        options = settings.bounds.options(settings.seed)
        if settings.sharding == "row_wise":
            # Ids of a click log are small numbers beside the hint, all in the first rank's block.
            options = replace(options, routing="hash")
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


def shard(
    settings: RunSettings, features: Sequence[str], model: nn.Module
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shards a model's tables; collective, the process group stands.

    Args:
        settings: backend, optimizers and sharding.
        features: all that have a table.
        model: unsharded, its tables on the meta device.

    Returns:
        The sharded model and the optimizer of its dense part; the embeddings are updated in backward.
    """
    plan, sharders = _plan(settings, features, model)
    # By default DDP moves its buckets after the first step, and with them the order in which gradients of three or more
    # ranks are summed, so that a run that goes on from a checkpoint would differ in the last bits.
    same_buckets = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)
    sharded = DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu"), data_parallel_wrapper=same_buckets
    )
    dense_parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    # Adagrad here loses up to 0.04 of DLRM's AUC on some seeds: its first steps kill units of the dense layers.
    dense = KeyedOptimizerWrapper(dense_parameters, lambda params: torch.optim.Adam(params, lr=settings.dense_lr))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def dense_part(optimizer: CombinedOptimizer) -> KeyedOptimizer:
    """The dense layers' optimizer of those that ``shard`` combined; its state is the same on every rank."""
    (_, _), (_, dense) = optimizer.optimizers
    return dense


def stats_of_tables(settings: RunSettings, features: Sequence[str], model: nn.Module) -> dict[str, TableStats]:
    """Returns what every table of a sharded model holds, over all ranks, and a RecStore table has done; collective."""
    if settings.backend == "recstore":
        return table_stats(model)
    # FBGEMM on CPU keeps float32: the weights, and one state of the same shape, of one number a row, or none.
    state = {"sgd": 0, "adagrad": settings.dim, "rowwise_adagrad": 1}[settings.optimizer]
    rows = settings.num_embeddings
    return {table_name(f): TableStats(rows=rows, bytes=rows * 4 * (settings.dim + state)) for f in features}
