"""Shards the tables of a model, as RecStore tables or as stock FUSED tables, and schedules the learning rates."""

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

EPS = 1e-8


def lr_factor(schedule: LrSchedule, warmup_steps: int, total_steps: int, step: int) -> float:
    """Returns the factor by which the learning rate of a step is multiplied.

    The factor rises linearly during the first ``warmup_steps`` steps and reaches 1 in the last of them. Then it stays 1
    (constant), falls linearly (linear), or falls as half a cosine wave (cosine). It would reach 0 in the step after the
    last one.

    Args:
        schedule: The shape of the schedule after the warm-up.
        warmup_steps: The number of warm-up steps.
        total_steps: The number of steps of the run.
        step: The number of the step, counted from 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    # A run that is resumed on fewer ranks may take one more step in each epoch; max keeps the factor from falling below
    # 0.
    left = max(total_steps - step, 0) / max(total_steps - warmup_steps, 1)
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def lr_scheduler(
    optimizer: Optimizer, schedule: LrSchedule, warmup_steps: int, total_steps: int, first_step: int = 0
) -> LambdaLR:
    """Returns a scheduler of the learning rates. Call its ``step()`` after the optimizer's ``step()``.

    The number of the step is the whole state of the schedule, so a checkpoint holds only this number.
    ``LambdaLR.state_dict`` would also contain the rates of all parameter groups, and the number of parameter groups of
    a sharded model differs between ranks.

    Args:
        optimizer: A new optimizer. The factor multiplies the ``lr`` of each parameter group.
        schedule: See :func:`lr_factor`.
        warmup_steps: See :func:`lr_factor`.
        total_steps: The number of steps of the run.
        first_step: The number of the next step, counted from 0. Default: 0.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(
        optimizer,
        lambda step: lr_factor(schedule, warmup_steps, total_steps, step),
        last_epoch=first_step - 1,
    )


def table_name(feature: str) -> str:
    """Returns the name of a feature's table."""
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
        options = settings.options()
        if settings.sharding == "row_wise":
            # The ids of a click log are much smaller than the hint, so block routing would put all on the first rank.
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
    """Shards the tables of a model. Collective; the process group must be initialized.

    Args:
        settings: The settings of the run, with the backend, the optimizers and the sharding type.
        features: The features that have a table.
        model: The unsharded model, with its tables on the meta device.

    Returns:
        The sharded model, and the optimizer of its dense part. The embeddings are updated in the backward pass.
    """
    plan, sharders = _plan(settings, features, model)
    # By default, DDP rearranges its buckets after the first step. This changes the order in which the gradients of
    # three or more ranks are summed, so a resumed run would differ in the last bits.
    same_buckets = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)
    sharded = DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu"), data_parallel_wrapper=same_buckets
    )
    dense_parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    # With Adagrad for the dense layers, DLRM loses up to 0.04 of its AUC for some seeds, because the first steps make
    # units of the dense layers inactive.
    dense = KeyedOptimizerWrapper(dense_parameters, lambda params: torch.optim.Adam(params, lr=settings.dense_lr))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def dense_part(optimizer: CombinedOptimizer) -> KeyedOptimizer:
    """Returns the optimizer of the dense layers from the result of :func:`shard`. Its state is equal on all ranks."""
    (_, _), (_, dense) = optimizer.optimizers
    return dense


def stats_of_tables(settings: RunSettings, features: Sequence[str], model: nn.Module) -> dict[str, TableStats]:
    """Returns the statistics of each table over all ranks. Stock tables have only rows and bytes. Collective."""
    if settings.backend == "recstore":
        return table_stats(model)
    # FBGEMM on CPU stores float32 weights and, depending on the optimizer, a state of the same shape, of one number for
    # each row, or none.
    state = {"sgd": 0, "adagrad": settings.dim, "rowwise_adagrad": 1}[settings.optimizer]
    rows = settings.num_embeddings
    return {table_name(f): TableStats(rows=rows, bytes=rows * 4 * (settings.dim + state)) for f in features}
