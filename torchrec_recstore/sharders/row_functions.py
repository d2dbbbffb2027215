"""The functions of users that take a model and the name of one of its tables.

Tests: tests/sharders/test_row_functions.py, tests/distributed/test_row_functions.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_recstore.sharders.gather import (
    all_gathered,
    refused_together,
    whole_environment,
)
from torchrec_recstore.sharders.model_tables import (
    EagerModelTable,
    ModelTable,
    any_table_named,
    refuse_remote_tables,
)
from torchrec_recstore.store import LeftIds, Table
from torchrec_recstore.store.arguments import check_ids, check_scores


def set_scores(
    model: nn.Module,
    name: str,
    ids: Tensor,
    scores: Tensor,
) -> int:
    """Sets the scores by which ``eviction=Scored()`` selects the rows to evict.

    Collective.

    Each rank passes some of the scores, for example those of its own batches; the
    scores of all ranks are set, wherever the rows are. Of an id that several ranks
    pass, or that occurs several times, the last score counts, in the order of the
    ranks. Ids without a row are ignored: a row that is made later has no score.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or eager modules.
        name: The name of the table, or the path of its collection, a dot and the name.
        ids: (N,) int64, on the CPU. N may differ between the ranks, and may be 0.
        scores: (N,) float32, finite. The score of each entry of ``ids``. Rows with
            lower scores are evicted first.

    Returns:
        The number of rows of the whole table whose score was set, the same on every
        rank.

    Raises:
        TypeError, ValueError: ``ids`` or ``scores`` has another dtype or shape, a score
            is not finite, the model has no table of this name, or the table has no
            ``eviction=Scored()``. No score has changed.
        ColdStoreError: A cold store fails. Some scores may have been set; the call can
            be repeated.

    All of these errors are raised on every rank.
    """
    env = whole_environment()
    with refused_together(env):
        check_ids(ids, "set_scores: ")
        check_scores(scores, ids, "set_scores: ")
        table = table_of(model, name, "set_scores")
        shards = table.shards
        for shard in shards:
            # This raises the error of a table without scores.
            shard.table.set_scores(ids[:0], scores[:0])
    gathered = all_gathered((ids, scores.detach()), env)
    all_ids = torch.cat([ids_of_rank for ids_of_rank, _ in gathered])
    all_scores = torch.cat([scores_of_rank for _, scores_of_rank in gathered])
    rows = 0
    with refused_together(env):
        for shard in shards:
            owned = shard.owned(all_ids)
            scored = shard.table.set_scores(all_ids[owned], all_scores[owned])
            if shard.table.columns.start == 0:
                rows += scored
    if isinstance(table, EagerModelTable):  # Each rank has rows of its own.
        return rows
    return sum(all_gathered(rows, env))


def left_ids(model: nn.Module, name: str) -> LeftIds:
    """Returns the ids whose rows have left a table since the last call.

    The call begins a new record.

    Collective.

    A feature store or an index that follows the table deletes these ids. A row leaves
    by eviction without a cold store, by expiry, by removal, or when
    ``load_checkpoint``, ``reset_rows`` or a ``state_dict`` replaces the rows of the
    table. A row that moves to the cold store, or to another shard in ``reshard``, has
    not left. An id that has left and has a row again is not in the result. The first
    call returns the ids since the model was made. The record is not in checkpoints:
    after a restart, compare all ids once.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules
            or eager modules.
        name: The name of the table, or the path of its collection, a dot and the name.
            The table has ``TableOptions(left_ids=...)``.

    Returns:
        The ids of all ranks, each once, the same on every rank. If more ids have left a
        shard than ``TableOptions.left_ids``, ``complete`` is False and ``ids`` is
        empty: compare all ids once. For an eager module, the ids of the rank's own
        table.

    Raises:
        ValueError: The model has no table of this name, or the table has no
            ``left_ids``.
        ColdStoreError: A cold store fails. The call can be repeated.

    All of these errors are raised on every rank, and the record goes on.
    """
    env = whole_environment()
    records: list[tuple[Table, LeftIds]] = []
    try:
        with refused_together(env):
            table = table_of(model, name, "left_ids")
            for shard in table.shards:
                records.append((shard.table, shard.table.left_ids()))
        local = LeftIds.merged(record for _, record in records)
        if isinstance(table, EagerModelTable):
            return local
        return LeftIds.merged(all_gathered(local, env))
    except BaseException:
        for shard_table, record in records:
            shard_table.add_left_ids(record)
        raise


def table_of(
    model: nn.Module,
    name: str,
    function: str,
) -> ModelTable | EagerModelTable:
    """Returns the table with this name or full name.

    Raises ValueError if there is not exactly one, or if the model has tables on
    servers.
    """
    refuse_remote_tables(
        model,
        f"{function}: {{}} is on servers: call {function} for models without tables on"
        " servers",
    )
    return any_table_named(model, name)
