"""Models whose tables are in different states, the batches that they are trained on,
and the tables that never move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore import optim, set_time
from torchrec_recstore.modules import RecStoreEmbeddingBagCollection
from torchrec_recstore.options import (
    LFU,
    LRU,
    ConstantInit,
    Expiry,
    MinFrequency,
    SSDStore,
    TableOptions,
)
from torchrec_recstore.planner import RecStoreConstraints, RecStorePlanner
from torchrec_recstore.sharders import RecStoreSharder
from torchrec_recstore.sharders.layout import LocalShard
from torchrec_recstore.store import Table

from ..kernels.optimizer_cases import NADAM

LEG_STEPS = 4
"""The number of training steps before each road."""
MOST_ROADS = 5
"""The number of roads of the longest journey of a group with bounds.

There are more new ids after it, so that these tables evict soon.
"""
LAST_STEPS = 24
"""The number of training steps after the last road.

With the steps before it, they are more than the longest expiry, of 20 steps.
"""
BAGS = 6
STEP_SECONDS = 10.0
START_SECONDS = 1_000_000.0


@dataclass(frozen=True)
class State:
    """A table in a model.

    Args:
        options: The table's options, made of the path of a directory for cold stores.
        dim: The number of columns. Default: 6.
        data_type: The type of the rows. Default: float32.
        ids: The ids of the bags in a step, made of the step and a generator. Default:
            old ids, and a few new ones.
    """

    options: Callable[[str], TableOptions] = lambda path: TableOptions()
    dim: int = 6
    data_type: DataType = DataType.FP32
    ids: Callable[[int, torch.Generator], Tensor] = lambda step, rng: some_ids(
        step, rng
    )


def some_ids(step: int, rng: torch.Generator) -> Tensor:
    """Returns ids: 14 old ones again and again, negative ones, and new ones that are
    seen in two steps only, of which there are more after the last road.
    """
    known = torch.randint(-10, 10, (14,), generator=rng) * 7_000_000_000_000_001
    new_ids = 2 if step < MOST_ROADS * LEG_STEPS else 6
    return torch.cat([known, torch.arange(2 * new_ids) + new_ids * step])


def no_ids_at_first(step: int, rng: torch.Generator) -> Tensor:
    """Returns ids in the steps after the last road only, so that the table has no rows
    before.
    """
    return some_ids(step, rng)[: 0 if step < MOST_ROADS * LEG_STEPS else None]


BOUNDED: dict[str, Any] = {"max_rows": 256}
"""The shards of four ranks have room for the rows from before the last road, so that
none is evicted before it: the evictions of a layout depend on its shards.

The steps after it evict.
"""

ROWS_IN_MEMORY = 96
"""The bound of the tables with cold stores.

Four ranks move rows to the cold store before the last roads, and each of three servers,
which have no cold stores, has room for its part of the rows of a journey.
"""

PLAIN = {
    "fp32": State(),
    "fp16": State(dim=3, data_type=DataType.FP16),
    "bf16": State(dim=5, data_type=DataType.BF16),
    "int8_rows": State(dim=7, data_type=DataType.INT8),
}
"""The states of a table that differ by its optimizer: one of each row type, with odd
dims.
"""

OPTIONS = {
    **PLAIN,
    "int8_of_one_column": State(dim=1, data_type=DataType.INT8),
    "constant": State(
        lambda path: TableOptions(
            initializer=ConstantInit(0.25), missing="init", seed=3
        )
    ),
    "lru": State(lambda path: TableOptions(eviction=LRU(), **BOUNDED)),
    "lfu": State(lambda path: TableOptions(eviction=LFU(half_life_steps=5), **BOUNDED)),
    "expiry_by_steps": State(lambda path: TableOptions(expiry=Expiry(steps=8))),
    "expiry_by_seconds": State(
        lambda path: TableOptions(expiry=Expiry(seconds=8 * STEP_SECONDS))
    ),
    "admission": State(
        lambda path: TableOptions(admission=MinFrequency(3, counter_bytes=2**14))
    ),
    "all_bounds": State(
        lambda path: TableOptions(
            eviction=LFU(),
            expiry=Expiry(seconds=12 * STEP_SECONDS),
            admission=MinFrequency(2),
            **BOUNDED,
        )
    ),
    "cold": State(
        lambda path: TableOptions(
            max_rows=ROWS_IN_MEMORY, eviction=LRU(), cold_store=SSDStore(path)
        )
    ),
    "cold_with_expiry": State(
        lambda path: TableOptions(
            max_rows=ROWS_IN_MEMORY,
            expiry=Expiry(seconds=20 * STEP_SECONDS),
            cold_store=SSDStore(path),
        ),
        dim=5,
        data_type=DataType.INT8,
    ),
    "one_row": State(ids=lambda step, rng: torch.tensor([-(2**63)])),
    "one_row_of_int8": State(
        dim=5, data_type=DataType.INT8, ids=lambda step, rng: torch.tensor([2**63 - 1])
    ),
    "empty": State(ids=no_ids_at_first),
}
"""The states of a table that differ by its options and its rows."""


@dataclass(frozen=True)
class Group:
    """A model: its tables by name, and the optimizer of all of them.

    Args:
        tables: The tables.
        optimizer: The optimizer.
        state_dtype: The data type of the optimizer's states. Default: float32.
    """

    tables: dict[str, State]
    optimizer: optim.Optimizer
    state_dtype: torch.dtype = torch.float32


GROUPS = {
    "options": Group(OPTIONS, optim.Adam(lr=0.01)),
    "half": Group(
        {**PLAIN, "cold": OPTIONS["cold"]}, optim.Adam(lr=0.01), torch.float16
    ),
    "half_rows": Group(PLAIN, optim.RowWiseAdagrad(lr=0.1), torch.float16),
    "sgd": Group(PLAIN, optim.SGD(lr=0.1)),
    "momentum": Group(PLAIN, optim.SGD(lr=0.1, momentum=0.9)),
    "own": Group(PLAIN, NADAM),
    "adagrad": Group(PLAIN, optim.Adagrad(lr=0.1)),
    "rowwise": Group(PLAIN, optim.RowWiseAdagrad(lr=0.1)),
    "adamw": Group(PLAIN, optim.AdamW(lr=0.01, weight_decay=0.01)),
    "partial_adam": Group(PLAIN, optim.PartialRowWiseAdam(lr=0.01)),
    "lamb": Group(PLAIN, optim.LAMB(lr=0.01)),
    "partial_lamb": Group(PLAIN, optim.PartialRowWiseLAMB(lr=0.01)),
    "lars": Group(PLAIN, optim.LARSSGD(lr=0.1)),
    "ftrl": Group(PLAIN, optim.Ftrl(lr=0.1)),
}
# The other optimizers have no options that change what a row keeps.
GROUPS |= {
    name.lower(): Group(PLAIN, kind(lr=0.01))
    for name, kind in optim.OPTIMIZERS.items()
    if kind not in {type(group.optimizer) for group in GROUPS.values()}
}


BY_ROW = (
    optim.RowWiseAdagrad,
    optim.PartialRowWiseAdam,
    optim.LAMB,
    optim.PartialRowWiseLAMB,
    optim.LARSSGD,
)
"""The optimizers with a state of a row, or the norm of a row: one for each column
shard, so that a table goes on differently when its columns are split in another way.

The others update each column by itself.
"""


def configs_of(group: Group) -> list[EmbeddingBagConfig]:
    """Returns TorchRec's configs of a group's tables."""
    return [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=state.dim,
            num_embeddings=1000,
            feature_names=[f"f_{name}"],
            data_type=state.data_type,
        )
        for name, state in group.tables.items()
    ]


def eager(group: Group, path: str) -> RecStoreEmbeddingBagCollection:
    """Returns the model of a group without sharding. See :func:`build`."""
    return RecStoreEmbeddingBagCollection(
        configs_of(group),
        optimizer=group.optimizer,
        options={name: state.options(path) for name, state in group.tables.items()},
        state_dtype=group.state_dtype,
    )


def build(
    group: Group, sharding: str, path: str, *, accumulation_steps: int = 1
) -> DistributedModelParallel:
    """Returns the model of a group.

    Tables whose columns cannot be split without a change of their values are table-wise
    under ``column_wise``: those of 8-bit rows, which have a scale for each column
    shard, and those of the optimizers in :data:`BY_ROW`.

    Args:
        group: The group.
        sharding: ``table_wise``, ``row_wise``, ``hash`` (row-wise by a hash of the id)
            or ``column_wise``.
        path: The directory of cold stores.
        accumulation_steps: The number of backward passes of an update. Default: 1.
    """
    constraints = {}
    for name, state in group.tables.items():
        kind = "row_wise" if sharding == "hash" else sharding
        by_column = (
            type(group.optimizer) not in BY_ROW and state.data_type is not DataType.INT8
        )
        if kind == "column_wise" and (state.dim % 2 or not by_column):
            kind = "table_wise"
        options = replace(
            state.options(path), routing="hash" if sharding == "hash" else "block"
        )
        constraints[name] = RecStoreConstraints(
            sharding_types=[kind],
            min_partition=state.dim // 2 if kind == "column_wise" else None,
            options=options,
        )
    module = EmbeddingBagCollection(
        tables=configs_of(group), device=torch.device("meta")
    )
    sharder = RecStoreSharder(
        optimizer=group.optimizer,
        fused_params={"state_dtype": group.state_dtype},
        accumulation_steps=accumulation_steps,
    )
    world = dist.get_world_size()
    planner = RecStorePlanner(
        topology=Topology(
            world_size=world, local_world_size=world, compute_device="cpu"
        ),
        constraints=constraints,
        debug=False,
    )
    plan = planner.collective_plan(module, [sharder], dist.group.WORLD)
    return DistributedModelParallel(
        module, plan=plan, sharders=[sharder], device=torch.device("cpu")
    )


def batch_of(name: str, state: State, step: int) -> tuple[Tensor, Tensor]:
    """Returns the ids of a table in a step, (N,) int64, and the number of ids of each
    bag, (BAGS,) int64.
    """
    rng = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    ids = state.ids(step, rng)
    ends = torch.randint(0, len(ids) + 1, (BAGS - 1,), generator=rng).sort().values
    edges = torch.cat([torch.tensor([0]), ends, torch.tensor([len(ids)])])
    return ids, edges.diff()


def gradients_of(name: str, state: State, step: int) -> Tensor:
    """Returns the gradient of each bag in a step, (BAGS, dim) float32, which does not
    depend on the rows.
    """
    rng = torch.Generator().manual_seed(1000 * step + sum(name.encode()) + 1)
    return torch.randn(BAGS, state.dim, generator=rng)


def train(model: nn.Module, group: Group, steps: range) -> None:
    """Trains a sharded or an eager model.

    The first rank has the whole batch, so that every number of ranks makes the same
    updates.
    """
    rank, world = (
        (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    )
    for step in steps:
        set_time(model, START_SECONDS + STEP_SECONDS * step)
        parts = [batch_of(name, state, step) for name, state in group.tables.items()]
        if rank:
            parts = [(ids[:0], torch.zeros_like(lengths)) for ids, lengths in parts]
        features = KeyedJaggedTensor(
            keys=[f"f_{name}" for name in group.tables],
            values=torch.cat([ids for ids, _ in parts]),
            lengths=torch.cat([lengths for _, lengths in parts]),
        )
        pooled = model(features)
        pooled = (
            pooled.wait() if isinstance(model, DistributedModelParallel) else pooled
        )
        loss = torch.zeros(())
        for name, state in group.tables.items():
            # TorchRec divides the gradients by the number of ranks, which is a power of
            # two.
            loss = loss + (
                pooled[f"f_{name}"] * gradients_of(name, state, step)
            ).sum() * (0 if rank else world)
        loss.backward()


def shards_of(model: nn.Module) -> list[tuple[str, LocalShard]]:
    """Returns the shards of this rank with the names of their tables."""
    if isinstance(model, RecStoreEmbeddingBagCollection):
        return [
            (name, LocalShard(module.table, None))
            for name, module in model.embedding_bags.items()
        ]
    tables = model.module.recstore_state.shards
    return [(name, shard) for name, shards in tables.items() for shard in shards]


def undisturbed(
    shard: LocalShard, name: str, state: State, steps: Sequence[int]
) -> Table:
    """Returns a table that has the options of a shard, and has made all steps without
    ever moving.
    """
    table = shard.table.empty_copy()
    for step in steps:
        replay(table, shard, name, state, step)
    return table


def replay(table: Table, shard: LocalShard, name: str, state: State, step: int) -> None:
    """Makes a step of :func:`train` in a bare table that stands for a shard."""
    if table.options.expiry is not None and table.options.expiry.seconds is not None:
        table.set_time(START_SECONDS + STEP_SECONDS * step)
    ids, lengths = batch_of(name, state, step)
    grads = gradients_of(name, state, step).repeat_interleave(lengths, dim=0)
    mine = shard.owned(ids)
    columns = table.columns
    table.lookup(ids[mine], train=True)
    table.update(ids[mine], grads[mine][:, columns.start : columns.stop].contiguous())
