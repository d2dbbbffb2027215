"""Runs one cell on one of its ranks: the sharded model and the unsharded model."""

from __future__ import annotations

from functools import partial

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.test_utils.emb_sharder import TestEBCSharder, TestECSharder
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore.checkpoint import export_dense_weights, load_dense_weights
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreSharder,
)

from .cells import Cell
from .models import Tables, averaging, batches_of, model_of, tables_of

CPU = torch.device("cpu")
STEPS = 3
LEARNING_RATE = 0.1
ROW_LEARNING_RATE = 1000.0  # the model's loss is nearly flat in its rows
FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": ROW_LEARNING_RATE}
# Of the rows and of what is made of them; the unsharded model trains in fp32.
TOLERANCE = {"FP32": 1e-5, "FP16": 2e-3, "BF16": 1.5e-2}


class DifferenceError(AssertionError):
    """The sharded model differs from the unsharded model."""


def ranks_of_a_node(world_size: int) -> int:
    """Four ranks are two nodes, so that shardings within a node and across nodes
    differ.
    """
    return 2 if world_size == 4 else world_size


def run_cell(cell: Cell, kernel: str, rank: int) -> None:
    """Trains the sharded and the unsharded model, and compares their predictions and
    rows.

    Args:
        kernel: "recstore", or "stock" for TorchRec's FUSED kernel.

    Raises:
        DifferenceError: they differ.
    """
    tables = tables_of(cell)
    whole = _in_float32(cell)
    sharded = _recstore(cell, tables) if kernel == "recstore" else _stock(cell, tables)
    start = _load(sharded, whole, kernel)
    rows = _rows(whole)
    in_rows = {id(weight) for weight in rows.values()}
    rest = [
        parameter for parameter in whole.parameters() if id(parameter) not in in_rows
    ]
    optimizers = [
        torch.optim.SGD(rows.values(), lr=ROW_LEARNING_RATE),
        torch.optim.SGD(rest, lr=LEARNING_RATE),
    ]
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        partial(torch.optim.SGD, lr=LEARNING_RATE),
    )
    expected, predicted = [], []
    for step in range(STEPS):
        all_ranks, by_rank = batches_of(cell, tables, step)
        if cell.weighted and cell.pooling == "mean":
            all_ranks = averaging(all_ranks, by_weights=cell.rows_split)
        loss, prediction = whole(all_ranks)
        whole.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        expected.append(prediction.detach().chunk(cell.world_size)[rank])
        loss, prediction = sharded(by_rank[rank])
        dense.zero_grad()
        loss.backward()
        dense.step()
        predicted.append(prediction.detach())
    differing = [
        f"predictions of step {i}"
        for i in range(STEPS)
        if not _close(cell, predicted[i], expected[i])
    ]
    for name, weight in rows.items():
        moved = (weight - start[name]).abs().max()
        assert moved > 2 * TOLERANCE[cell.data_type], (
            f"the rows of {name} have hardly been trained: {moved}"
        )
        # Collective: before anything is raised on one rank alone.
        if kernel == "recstore" and not _close(
            cell, export_dense_weights(sharded, name, len(weight)), weight
        ):
            differing.append(f"rows of {name}")
    if differing:
        raise DifferenceError(f"other {differing[0]} than unsharded")


def _close(cell: Cell, actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[cell.data_type]
    return torch.allclose(actual.float(), expected, atol=tolerance, rtol=tolerance)


def _in_float32(cell: Cell) -> nn.Module:
    # Starting from what a row of the cell's data type can hold.
    whole = model_of(cell, tables_of(cell, unsharded=True)).float()
    dtype = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}[
        cell.data_type
    ]
    with torch.no_grad():
        for weight in _rows(whole).values():
            weight.copy_(weight.to(dtype))
    return whole


def _rows(whole: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name.split(".")[-2]: parameter
        for name, parameter in whole.named_parameters()
        if ".embedding_bags." in name or ".embeddings." in name
    }


def _recstore(cell: Cell, tables: Tables) -> DistributedModelParallel:
    sharders = [
        RecStoreSharder(dict(FUSED_PARAMS)),
        RecStoreEmbeddingCollectionSharder(dict(FUSED_PARAMS)),
    ]
    model = model_of(cell, tables)
    return DistributedModelParallel(
        model, plan=_plan(cell, tables, model), sharders=sharders, device=CPU
    )


def _plan(cell: Cell, tables: Tables, model: nn.Module) -> ShardingPlan:
    columns_split = "column" in cell.sharding or cell.sharding == "grid_shard"
    constraints = {
        table.name: RecStoreConstraints(
            sharding_types=[cell.sharding],
            min_partition=table.embedding_dim // 2 if columns_split else None,
        )
        for table in (*tables.plain, *tables.weighted)
    }
    planner = RecStorePlanner(
        topology=_topology(cell), constraints=constraints, debug=False
    )
    # The same on every rank, and so is an error, for which collective_plan would let
    # all but one of them wait.
    return planner.plan(
        model, [RecStoreSharder(), RecStoreEmbeddingCollectionSharder()]
    )


def _topology(cell: Cell) -> Topology:
    return Topology(
        world_size=cell.world_size,
        local_world_size=ranks_of_a_node(cell.world_size),
        compute_device="cpu",
    )


def _stock(cell: Cell, tables: Tables) -> DistributedModelParallel:
    model = model_of(cell, tables)
    sharders = [
        kind(cell.sharding, "fused", dict(FUSED_PARAMS))
        for kind in (TestEBCSharder, TestECSharder)
    ]
    if cell.sequential:  # with shardings that RecStore's planner does not plan
        plan = EmbeddingShardingPlanner(topology=_topology(cell), debug=False).plan(
            model, sharders
        )
    else:  # with shardings that the stock planner does not plan on CPU
        plan = on_fused_kernels(_plan(cell, tables, model))
    return DistributedModelParallel(model, plan=plan, sharders=sharders, device=CPU)


def on_fused_kernels(plan: ShardingPlan) -> ShardingPlan:
    """Places the tables of a plan of RecStore's planner on TorchRec's FUSED kernels,
    and returns the plan.
    """
    for of_module in plan.plan.values():
        for name, sharding in of_module.items():
            of_module[name] = ParameterSharding(
                sharding.sharding_type, "fused", sharding.ranks, sharding.sharding_spec
            )
    return plan


def _load(
    sharded: DistributedModelParallel, whole: nn.Module, kernel: str
) -> dict[str, Tensor]:
    # RecStore tables in both ways that a user has, the second with other rows, so that
    # neither hides the other.
    rows = _rows(whole)
    if kernel == "recstore":
        sharded.load_state_dict(whole.state_dict())
        for name, weight in rows.items():
            assert torch.equal(
                export_dense_weights(sharded, name, len(weight)).float(), weight
            ), name
    with torch.no_grad():
        for weight in rows.values():
            weight.neg_()
    if kernel == "recstore":
        load_dense_weights(sharded, rows)
    else:
        _copy_into_shards(sharded, whole)
    return {name: weight.detach().clone() for name, weight in rows.items()}


def _copy_into_shards(sharded: DistributedModelParallel, whole: nn.Module) -> None:
    # As TorchRec's own copy_state_dict, whose module the wheel cannot import.
    source = whole.state_dict()
    for key, value in sharded.state_dict().items():
        if not hasattr(value, "local_shards"):
            value.detach().copy_(source[key])
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            shard.tensor.detach().copy_(
                source[key][row : row + rows, column : column + columns]
            )
