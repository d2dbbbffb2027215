"""Changes the plan of a model in place: rows move between ranks and shardings, without a file."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import ShardingPlan

from torchrec_recstore.sharders.gather import refused_together, whole_environment
from torchrec_recstore.sharders.model_tables import collections_by_path, recstore_tables
from torchrec_recstore.sharders.resharding import Change, refuse_pipelined, reshard_collections
from torchrec_recstore.torchrec_seams.models import collection_inside, follow_collection_inside, set_plan


def reshard(model: nn.Module, plan: ShardingPlan) -> None:
    """Moves the rows of the model's RecStore tables to the shards of a new plan, without a file. Collective.

    Afterwards the model is as if ``save_checkpoint`` had saved it and ``load_checkpoint`` had loaded it into a model
    with the new plan: rows, optimizer states, counts of updates and steps, frequencies, last steps, times of expiry,
    counts of admission and cold rows are the same, to the bit. The model, its sharded modules and its fused optimizer
    stay the same objects, so that optimizers, schedulers and trackers which refer to them go on. Other tensors of the
    model do not change. Call it between two training steps: the backward of an earlier forward must have run.

    Rows move in parts, and leave the old tables as they arrive in the new tables. Statistics start anew. A delta of a
    checkpoint from before the call cannot be saved: save a full checkpoint first.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules.
        plan: The new plan, the same on every rank, for the same tables: the result of
            ``planner.collective_plan(...)`` of another planner. It has an entry for each collection with RecStore
            tables. Options of tables in the plan replace those of the old plan.

    Raises:
        ValueError: The plan does not fit the model: a collection or a table is missing, a table of the collection is
            on one of TorchRec's own kernels and the plan of the collection changes, or the reasons of
            ``RecStoreSharder.shard``. Or a table is being saved, is in a shared cold store or on servers, or a train
            pipeline uses the model. The error is raised on every rank, and the model has not changed.
        RuntimeError: A rank has died while the rows moved. Then, and after any other error while the rows moved, such
            as a ``MemoryError``, every rank raises the error, and every later use of the tables raises RuntimeError:
            start the job again.
    """
    with refused_together(whole_environment()):
        recstore_tables(model)  # This refuses tables on servers, and tables that have lost rows.
        changes = _changes(model, plan)
    reshard_collections(changes)
    for module, _ in _feature_processed(model, changes):
        follow_collection_inside(module)
    if isinstance(model, DistributedModelParallel):
        new = {str(change.path): change.collection.module_sharding_plan for change in changes}
        set_plan(model, ShardingPlan({**model.plan.plan, **new}))


def _feature_processed(model: nn.Module, changes: Sequence[Change]) -> list[tuple[nn.Module, Change]]:
    """Returns the feature-processed collections whose bags change."""
    modules = [each for each in model.modules() if isinstance(each, ShardedFeatureProcessedEmbeddingBagCollection)]
    return [(each, change) for each in modules for change in changes if collection_inside(each) is change.collection]


def _changes(model: nn.Module, plan: ShardingPlan) -> list[Change]:
    changes = []
    for path, collection in collections_by_path(model).items():
        if not collection.recstore_table_names():
            continue
        entries = plan.get_plan_for_module(path)
        if entries is None:
            raise ValueError(f"reshard: the plan has no collection {path!r}; it has {sorted(plan.plan)}")
        changes.append(collection.change(entries, path))
    found = [change for change in changes if change is not None]
    for module, change in _feature_processed(model, found):
        refuse_pipelined(module, change.plan)
    return found
