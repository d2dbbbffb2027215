"""The functions of users that take a whole model, such as ``table_stats``.

Tests: tests/sharders/test_reset.py, tests/distributed/test_reshard.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fp_embeddingbag import (
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import ShardingPlan

from torchrec_recstore.options import is_shared
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.sharders.model_tables import (
    all_tables,
    collections_by_path,
    collections_of,
    recstore_tables,
    tables_of_rank,
)
from torchrec_recstore.sharders.plan_change import (
    Change,
    refuse_pipelined,
    reshard_collections,
)
from torchrec_recstore.store import Table, TableStats
from torchrec_recstore.store.arguments import check_time
from torchrec_recstore.store.table import check_replaceable, exchange_all
from torchrec_recstore.store.table_state import StatsByTable, combined, set_event_time
from torchrec_recstore.torchrec_seams.models import (
    collection_inside,
    follow_collection_inside,
    set_plan,
)

_Shard = tuple[int, TableStats]  # The first column and the statistics of a shard.


def table_stats(model: nn.Module) -> dict[str, TableStats]:
    """Returns the statistics of each RecStore table of the model over all ranks.

    Collective: every rank must call it.

    Args:
        model: A ``DistributedModelParallel``, a sharded module, or a module that
            contains them.

    Returns:
        The statistics by table name, which ``print`` and notebooks show as a table.
        They are the same on every rank. Tables on TorchRec's kernels have no entry. If
        several collections have tables with the same name, the name is the path of the
        collection, a dot and the table's name. Counts are summed over the ranks. A row
        that is split by columns counts once, with the bytes of all its columns.
        ``steps`` and ``refused_times`` are the largest values.
    """
    stats = StatsByTable()
    gathered: dict[RecStoreCollection, list[dict[str, list[_Shard]]]] = {}
    for table in all_tables(model):
        module = table.module
        if module not in gathered:
            gathered[module] = _all_shards(module)
        shards: list[_Shard] = []
        for shards_of_rank in gathered[module]:
            shards += shards_of_rank[table.config_name]
        stats[table.name] = _stats_of_whole_table(shards)
    return stats


def _stats_of_whole_table(shards: Sequence[_Shard]) -> TableStats:
    # Shards of other columns have the same rows, which count once.
    first_column = min(column for column, _ in shards)
    of_first_columns = [stats for column, stats in shards if column == first_column]
    of_whole_rows = combined(of_first_columns)
    return replace(
        of_whole_rows,
        bytes=sum(stats.bytes for _, stats in shards),
        steps=max(stats.steps for _, stats in shards),
    )


def _all_shards(module: RecStoreCollection) -> list[dict[str, list[_Shard]]]:
    local: dict[str, list[_Shard]] = {}
    for name, shards in module.recstore_state.shards.items():
        local[name] = []
        for shard in shards:
            table = shard.table
            local[name].append((table.columns.start, table.stats()))
    # One rank has each table on servers; its statistics are those of all servers.
    for name in module.remote_table_names():
        local[name] = []

    with refused_together(module.ranks_env):
        module.wait_for_updates()
        for kernel in module.recstore_kernels():
            if not kernel.remote_tables:
                continue
            names = kernel.config.table_names()
            for name, remote in zip(names, kernel.remote_tables, strict=True):
                stats = remote.client.stats(remote.name)
                local[name] = [(0, stats)]
    return all_gathered(local, module.ranks_env)


def flush_tables(model: nn.Module) -> None:
    """Writes the rows that have changed to the shared cold stores of the model.

    Collective.

    When the call returns, the cold stores have the rows of every rank. Parameter
    servers have applied the updates of every rank to tables with
    ``TableOptions.servers``, so that ``RecStoreClient.save`` saves them. Other tables
    are skipped. Rows that change after the last call are not written to the cold stores
    when the process ends.

    Args:
        model: A ``DistributedModelParallel``, a sharded module, or a module that
            contains them.

    Raises:
        ValueError: The model has no RecStore table with a shared cold store or on
            servers, or a table is being saved. Or two tables with the same name share a
            cold store, so that they have the same rows; the plans of
            ``RecStorePlanner`` keep these tables apart. The error is raised on every
            rank.
        ServiceError: A server has not applied an update. The error is raised on every
            rank.
        ColdStoreError: A cold store fails, on every rank. It may have some of the rows;
            the call can be repeated.
    """
    modules = collections_of(model)
    with refused_together(whole_environment()):
        if not any(_has_rows_outside(module) for module in modules):
            raise ValueError(
                "the model has no RecStore table with a shared cold store or on servers"
            )
        for module in modules:
            module.wait_for_updates()
        tables = [table for module in modules for table in module.recstore_tables()]
        shared = [table for table in tables if is_shared(table.options.cold_store)]
        _check_rows_are_apart(shared)
        for table in shared:
            table.flush()


def _has_rows_outside(module: RecStoreCollection) -> bool:
    """Returns whether a table is in a shared cold store or on servers."""
    if module.remote_table_names():
        return True
    states = module.recstore_state.tables.values()
    return any(is_shared(state.options.cold_store) for state in states)


def _check_rows_are_apart(tables: Sequence[Table]) -> None:
    """Raises ValueError if two tables have the same rows in a shared cold store."""
    places = Counter(
        (table.options.cold_store, table.name, table.columns) for table in tables
    )
    for (store, name, _), times in places.items():
        if times > 1:
            raise ValueError(
                f"{times} collections have a RecStore table {name!r} whose rows are"
                f" in {store!r}, so that they share rows: plan the model with"
                " RecStorePlanner, or use different names for the tables"
            )


def reset_rows(model: nn.Module) -> None:
    """Removes all rows of the model's tables: each id begins with its initial row.

    Collective.

    Training for several epochs overfits the rows of rare ids. A call at the beginning
    of each epoch but the first prevents this: the dense layers are kept, and the rows
    are learnt anew. Call it between two training steps.

    The states of the fused optimizer begin anew, with its count of updates, and so do
    the frequencies of ``LFU`` and the counts of ``MinFrequency``: an id must be seen
    ``count`` times again before it gets a row. Rows in cold stores are removed too. The
    clock goes on: ``TableStats.steps``, and the time by which rows expire. A backward
    of an earlier forward changes no row. A checkpoint has the rows from before the
    reset or from after it. A delta of a checkpoint from before the reset cannot be
    saved: save a full checkpoint first.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or eager modules.

    Raises:
        ValueError: A checkpoint of the model is being written, or the rows of a table
            are in a shared cold store or on servers, which other jobs may use.
        MemoryError: There is no memory for the new tables.
        ColdStoreError: A new cold store cannot be opened.

    Every rank raises the error, and no table has changed.
    """
    env = whole_environment()
    pairs: list[tuple[Table, Table]] = []
    with refused_together(env):
        tables = tables_of_rank(
            model,
            "reset_rows: {} is on servers, whose rows other jobs may use: delete them"
            " with RecStoreClient.delete",
        )
        check_replaceable(tables)
        try:
            for table in tables:
                empty_table = table.empty_copy()
                pairs.append((table, empty_table))
                empty_table.set_state(
                    replace(table.state(), optimizer_steps=0, sightings=None)
                )
        except BaseException:
            for _, empty_table in pairs:
                empty_table.close()
            raise
    exchange_all(pairs)
    for module in collections_of(model):
        for name in module.recstore_state.tables:
            module.recstore_state.forget_replaced(name)


def set_time(model: nn.Module, unix_seconds: float) -> None:
    """Sets the time by which rows expire to that of the events.

    It is for tables with ``Expiry(seconds=...)``.

    Collective.

    Without this call, tables read the system's clock; the tables of a sharded model all
    read that of the first rank. From the first call on, training steps are made at the
    time of the last call. Checkpoints save this, so that a run that is repeated or
    resumed expires the same rows in the same steps. About ten calls within
    ``Expiry.seconds`` are enough.

    The first call sets the time to the latest ``unix_seconds`` of all ranks. After it,
    a time that is more than ``Expiry.max_jump_s`` later or earlier than the present one
    is refused, and the latest of the others counts. If this one is earlier than the
    present one, the call changes nothing, because events may be slightly out of order.
    ``TableStats.refused_times`` counts the calls that refuse a time. The first, tenth,
    hundredth and so on warns.

    If ten calls in a row refuse the times of all ranks and agree, the last of them sets
    the time, so that neither a pause of the events nor a wrong time stops the expiry.
    Of each call, the time that is nearest to the present one counts. Calls agree if the
    time of each is at most ``Expiry.max_jump_s`` away from that of the call before. If
    the time goes back in this way, or in the first call because the system's clock is
    later, no row expires too early: rows age on by the time that passes from then on.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or eager modules.
        unix_seconds: The time in seconds since 1970.

    Raises:
        TypeError: ``unix_seconds`` is not a number.
        ValueError: ``unix_seconds`` is negative or not finite, or the model has tables
            on servers. All of these errors are raised on every rank, and no table has
            changed.
    """
    tables = tables_of_rank(
        model,
        "set_time: {} is on servers, whose rows expire by the servers' clocks: call"
        " set_time for models without tables on servers",
    )
    env = whole_environment()
    with refused_together(env):
        seconds = check_time(unix_seconds)
    set_event_time(tables, all_gathered(seconds, env))


def reshard(model: nn.Module, plan: ShardingPlan) -> None:
    """Moves the rows of the model's RecStore tables to the shards of a new plan.

    It needs no file.

    Collective.

    Afterwards the model is, to the bit, as if ``save_checkpoint`` had saved it and
    ``load_checkpoint`` had loaded it into a model with the new plan. The model, its
    sharded modules and its fused optimizer stay the same objects, so that optimizers,
    schedulers and trackers which refer to them go on. Other tensors of the model do not
    change. Call it between two training steps: the backward of an earlier forward must
    have run.

    Rows move in parts, and leave the old tables as they arrive in the new tables.
    Statistics start anew. A delta of a checkpoint from before the call cannot be saved:
    save a full checkpoint first.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded
            modules.
        plan: The new plan, the same on every rank, for the same tables: the result of
            ``planner.collective_plan(...)`` of another planner. It has an entry for
            each collection with RecStore tables. Options of tables in the plan replace
            those of the old plan.

    Raises:
        ValueError: The plan does not fit the model: a collection or a table is missing,
            a table of the collection is on one of TorchRec's own kernels and the plan
            of the collection changes, or the reasons of ``RecStoreSharder.shard``. Or a
            table is being saved, is in a shared cold store or on servers, or a train
            pipeline uses the model. The error is raised on every rank, and the model
            has not changed.
        RuntimeError: A rank has died while the rows moved; all others raise this. After
            any error while the rows moved, such as a ``MemoryError``, every later use
            of the tables raises RuntimeError: start the job again.
    """
    with refused_together(whole_environment()):
        # This refuses tables on servers, and tables that have lost rows.
        recstore_tables(model)
        changes = _changes(model, plan)
    reshard_collections(changes)
    for module, _ in _feature_processed(model, changes):
        follow_collection_inside(module)
    if isinstance(model, DistributedModelParallel):
        entries = dict(model.plan.plan)
        for change in changes:
            entries[str(change.path)] = change.collection.module_sharding_plan
        set_plan(model, ShardingPlan(entries))


def _feature_processed(
    model: nn.Module,
    changes: Sequence[Change],
) -> list[tuple[nn.Module, Change]]:
    """Returns the feature-processed collections that change, and their changes.

    The change is one of the collection inside.
    """
    pairs: list[tuple[nn.Module, Change]] = []
    for module in model.modules():
        if isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
            inside = collection_inside(module)
            for change in changes:
                if change.collection is inside:
                    pairs.append((module, change))
    return pairs


def _changes(model: nn.Module, plan: ShardingPlan) -> list[Change]:
    changes: list[Change] = []
    for path, collection in collections_by_path(model).items():
        if not collection.recstore_table_names():
            continue
        entries = plan.get_plan_for_module(path)
        if entries is None:
            raise ValueError(
                f"reshard: the plan has no collection {path!r}; it has"
                f" {sorted(plan.plan)}"
            )
        change = collection.change(entries, path)
        if change is not None:
            changes.append(change)
    for module, change in _feature_processed(model, changes):
        refuse_pipelined(module, change.plan)
    for change in changes:
        change.collection.refuse_begun()
    return changes
