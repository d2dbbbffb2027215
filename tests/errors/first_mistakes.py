"""The mistakes that most users make first, where torch or TorchRec fails before any code
of this package runs. docs/errors.md begins with them.
"""

from __future__ import annotations

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from tests.errors.situations import situation
from tests.sharders.models import bag, collection, sequence, sequences
from torchrec_recstore import RecStoreSharder

# TorchRec's own tables of this size fit into no address space
ROWS = 2**50
CPU = torch.device("cpu")


@situation(
    "RuntimeError",
    "... DefaultCPUAllocator: can't allocate memory: you tried to allocate ... bytes."
    " ...",
    first=True,
)
def not_on_meta() -> None:
    """A collection that is not on the meta device.

    Cause: `EmbeddingBagCollection(...)` without `device=torch.device("meta")` allocates
    all `num_embeddings` rows, 35184372088832 bytes for `num_embeddings=2**40` and
    `embedding_dim=8`. The last line of the traceback that is yours makes the collection.
    Fix: pass `device=torch.device("meta")`, which allocates nothing.
    """
    collection(bag("t_user", dim=8, rows=ROWS), device="cpu")


@situation(
    "RuntimeError",
    "... DefaultCPUAllocator: can't allocate memory: you tried to allocate ... bytes."
    " ...",
    first=True,
)
def sequences_without_sharder(one_rank: None) -> None:
    """An `EmbeddingCollection` with `sharders=[RecStoreSharder()]`.

    Cause: `RecStoreSharder` is the sharder of `EmbeddingBagCollection` only. TorchRec
    takes the tables of other collections for dense parameters, and
    `DistributedModelParallel` allocates them, in the last line of the traceback that is
    yours. Fix: pass `sharders=get_recstore_sharders(...)`, which has a sharder for each
    kind of collection. `RecStorePlanner` names the collection.
    """
    model = sequences(sequence("t_item", dim=8, rows=ROWS))
    DistributedModelParallel(model, sharders=[RecStoreSharder()], device=CPU)


@situation(
    "PlannerError",
    "Unable to find a plan for this model because of insufficient storage. ... Per rank"
    " reservation for dense storage: Storage(hbm = 0.0 GB, ddr = 201326592.0 GB), ...",
    first=True,
)
def sequences_beside_bags(one_rank: None) -> None:
    """An `EmbeddingCollection` beside other collections.

    Cause: no sharder takes the `EmbeddingCollection`, as above, and the planner reserves
    the memory of its tables as dense storage. Fix: pass
    `sharders=get_recstore_sharders(...)`.
    """
    clicks = sequences(sequence("t_item", dim=8, rows=ROWS))
    model = nn.ModuleDict({"bags": collection(bag("t_user")), "clicks": clicks})
    DistributedModelParallel(model, sharders=[RecStoreSharder()], device=CPU)


@situation(
    "PlannerError",
    "Unable to find a plan for this model because of insufficient storage. ... Per rank"
    " reservation for dense storage: Storage(hbm = 0.0 GB, ddr = 0.0 GB), ... Global"
    " storage requirement for model parallel: Storage(hbm = 0.0 GB, ddr = 33554432.0 GB)) ...",
    first=True,
)
def without_sharders(one_rank: None) -> None:
    """`DistributedModelParallel` without `sharders`.

    Cause: without `sharders=...`, TorchRec uses its own sharders and tables, which need
    the memory of all `num_embeddings` rows: 32768 GB or more for `num_embeddings=2**40`.
    Fix: pass `sharders=[RecStoreSharder(...)]` or `sharders=get_recstore_sharders(...)`.
    """
    model = collection(bag("t_user", dim=8, rows=ROWS))
    DistributedModelParallel(model, device=CPU)


@situation(
    "ValueError",
    "Compute kernel not supported EmbeddingComputeKernel.CUSTOMIZED_KERNEL",
    first=True,
)
def plan_of_the_stock_planner_without_sharders(one_rank: None) -> None:
    """A plan with RecStore tables, without the sharders.

    Cause: the planner of TorchRec got a `RecStoreSharder`, and
    `DistributedModelParallel(model, plan=plan)` uses TorchRec's own sharders. A plan of
    `RecStorePlanner` says so itself. Fix: pass the same sharders to both,
    `DistributedModelParallel(model, plan=plan, sharders=sharders)`.
    """
    model = collection(bag("t_user", dim=8))
    planner = EmbeddingShardingPlanner(Topology(world_size=1, compute_device="cpu"))
    plan = planner.plan(model, [RecStoreSharder()])
    DistributedModelParallel(model, plan=plan, device=CPU)
