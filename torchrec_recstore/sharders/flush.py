"""Rows in shared cold stores, for whoever reads them there."""

from __future__ import annotations

from collections import Counter

from torch import nn

from torchrec_recstore.options import is_shared
from torchrec_recstore.sharders.collection import RecStoreCollection
from torchrec_recstore.sharders.gather import refused_together, whole_environment


def flush_tables(model: nn.Module) -> None:
    """Writes the rows that have changed in memory to the shared cold stores of the model. Collective.

    When it returns, those of every rank are there. Tables with a cold store of their own, or none, are passed over. A
    model is not closed as a :class:`Table` is: what has changed since the last call is lost to others when it is gone.

    Args:
        model: ``DistributedModelParallel``, a sharded module, or anything that contains them.

    Raises:
        ValueError: The model has no RecStore table with a shared cold store, one is being saved, or two tables of one
            name share one store: under a plan that is not ``RecStorePlanner``'s they have the same rows.
        ColdStoreError: a store fails; it may have some of the rows. The call can be repeated. All of these on every
            rank.
    """
    modules = [module for module in model.modules() if isinstance(module, RecStoreCollection)]
    with refused_together(whole_environment()):
        states = [state for module in modules for state in module.recstore_state.tables.values()]
        if not any(is_shared(state.options.cold_store) for state in states):
            raise ValueError("the model has no RecStore table with a shared cold store")
        tables = [table for module in modules for table in module.recstore_tables()]
        shared = [table for table in tables if is_shared(table.options.cold_store)]
        stores = Counter((table.options.cold_store, table.name, table.columns) for table in shared)
        for (store, name, _), times in stores.items():
            if times > 1:
                raise ValueError(
                    f"{times} collections have a RecStore table {name!r} whose rows are in {store!r}, so that they "
                    "share rows: plan the model with RecStorePlanner, or give the tables different names"
                )
        for table in shared:
            table.flush()
