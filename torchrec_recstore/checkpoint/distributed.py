"""RecStore tables in checkpoints of ``torch.distributed.checkpoint`` (DCP, torch 2.13)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.checkpoint.new_rows import check_replaceable, exchange_all
from torchrec_recstore.checkpoint.saved_rows import SavedTable, SavedTensors
from torchrec_recstore.sharders.gather import refused_together, whole_environment
from torchrec_recstore.sharders.model_tables import ModelTable, recstore_tables, rows_left_out
from torchrec_recstore.store import Table


def load_distributed_checkpoint(model: DistributedModelParallel, checkpoint_id: str | Path) -> None:
    """Loads what ``dcp.save`` or ``dcp.async_save`` wrote, at any world size and sharding. Collective.

    DCP's own load needs tensors of the right size beforehand, and how many rows a RecStore table has only the
    checkpoint knows. Two layouts are understood, ``model.state_dict()`` itself and, with the fused optimizer's state::

        dcp.save({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=path)

    A table that was saved from TorchRec's own kernels is loaded as well: its row i becomes id i, its optimizer state
    starts anew. Every rank reads each RecStore table that it has a shard of, piece by piece as it was saved (RecStore
    tables in pieces of at most 2**18 rows), and keeps the rows that belong to it: in new tables, which take the place
    of the model's own when all is well.

    Args:
        model: ``DistributedModelParallel``.
        checkpoint_id: the directory.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: a RecStore table of the model is not in it or has another dim, its state does not fit its rows or
            lacks something, or a file is missing or shorter than it was; no table has changed.
    """
    if not (Path(checkpoint_id) / ".metadata").exists():
        raise FileNotFoundError(f"no checkpoint of torch.distributed.checkpoint at {checkpoint_id}")
    tensors = SavedTensors(checkpoint_id)
    nested = any(key.startswith("model.") for key in tensors.saved)
    prefix = "model." if nested else ""
    tables = recstore_tables(model)
    rows = [SavedTable(tensors, table.state, prefix + table.weight_key, _states(table)) for table in tables]
    loaded: list[tuple[Table, Table]] = []
    with refused_together(whole_environment()):
        tensors.check_files()
        for saved in rows:
            saved.check()
        for saved in rows:
            loaded += saved.loaded()
        check_replaceable(old for old, _ in loaded)
    _load_the_rest(model, tables, tensors.saved, nested, checkpoint_id)
    exchange_all(loaded)


def _states(table: ModelTable) -> str:
    return f"optimizer.state.{table.weight_key}.rows."


def _load_the_rest(
    model: DistributedModelParallel,
    tables: list[ModelTable],
    saved: Mapping[str, Any],
    nested: bool,
    checkpoint_id: str | Path,
) -> None:
    """All but the RecStore tables, by DCP's own load, into the model's own tensors."""
    mine = {table.weight_key for table in tables}
    with rows_left_out(model):
        weights = {key: value for key, value in model.state_dict().items() if key not in mine}
        state: dict[str, Any] = {}
        if weights:
            state.update({"model": weights} if nested else weights)
        optimizer = None
        if any(key.startswith("optimizer.state.") for key in saved):
            optimizer = model.fused_optimizer.state_dict()["state"]
            others = {key: states for key, states in optimizer.items() if key not in mine}
            if others:
                state["optimizer"] = {"state": others}
        if state:
            load(state, checkpoint_id=checkpoint_id)
        model.load_state_dict(weights)
        if optimizer is not None:
            model.fused_optimizer.load_state_dict({"state": {**optimizer, **others}})
