"""Replaces the rows of all tables of a model by initial rows."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import refused_together, whole_environment
from torchrec_recstore.sharders.model_tables import tables_of_rank
from torchrec_recstore.store import Table
from torchrec_recstore.store.exchange import check_replaceable, exchange_all


def reset_rows(model: nn.Module) -> None:
    """Removes all rows of the model's tables, so that each id begins with its initial row again. Collective.

    Training for several epochs overfits the rows of rare ids. A call at the beginning of each epoch but the first
    prevents this: the dense layers are kept, and the rows are learnt anew. Call it between two training steps. All
    tables are reset, or none. Other tensors of the model do not change.

    The states of the fused optimizer begin anew, with its count of updates, and so do the frequencies of ``LFU`` and
    the counts of ``MinFrequency``: an id must be seen ``count`` times again before it gets a row. Rows in cold stores
    are removed too. The clock goes on: ``TableStats.steps``, and the time by which rows expire. A backward of an
    earlier forward changes no row. A checkpoint has the rows from before the reset or from after it. A delta of a
    checkpoint from before the reset cannot be saved: save a full checkpoint first.

    Args:
        model: ``DistributedModelParallel``, or any module that contains sharded modules or eager modules.

    Raises:
        ValueError: A checkpoint of the model is being written, the rows of a table are in a shared cold store or on
            servers, which other jobs may use.
        MemoryError: There is no memory for the new tables.
        ColdStoreError: A new cold store cannot be opened. All of these errors are raised on every rank, and no table
            has changed.
    """
    env = whole_environment()
    pairs: list[tuple[Table, Table]] = []
    with refused_together(env):
        tables = tables_of_rank(
            model, "reset_rows: {} is on servers, whose rows other jobs may use: delete them with RecStoreClient.delete"
        )
        check_replaceable(tables)
        try:
            for table in tables:
                pairs.append((table, table.empty_copy()))
                pairs[-1][1].set_state(replace(table.state(), optimizer_steps=0, sightings=None))
        except BaseException:
            for _, fresh in pairs:
                fresh.close()
            raise
    exchange_all(pairs)
    for module in model.modules():
        if isinstance(module, RecStoreCollection):
            for state in module.recstore_state.tables.values():
                state.forget_copies()
