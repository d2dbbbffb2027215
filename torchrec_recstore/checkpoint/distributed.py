"""RecStore tables in checkpoints of ``torch.distributed.checkpoint`` (DCP, torch 2.13)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore.checkpoint.tables import ModelTable, recstore_tables


def load_distributed_checkpoint(model: DistributedModelParallel, checkpoint_id: str | Path) -> None:
    """Loads what ``dcp.save`` or ``dcp.async_save`` wrote, at any world size and sharding. Collective.

    DCP's own load needs tensors of the right size beforehand, and how many rows a RecStore table has only the
    checkpoint knows. Two layouts are understood, ``model.state_dict()`` itself and, with the fused optimizer's state::

        dcp.save({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=path)

    A table that was saved from TorchRec's own kernels is loaded as well: its row i becomes id i, its optimizer state
    starts anew. Every rank reads each RecStore table whole and keeps the rows that belong to it.

    Args:
        model: ``DistributedModelParallel``.
        checkpoint_id: the directory.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: a RecStore table of the model is not in it, or has another dim; nothing has changed.
    """
    if not (Path(checkpoint_id) / ".metadata").exists():
        raise FileNotFoundError(f"no checkpoint of torch.distributed.checkpoint at {checkpoint_id}")
    saved: Mapping[str, Any] = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    tables = recstore_tables(model)
    nested = any(key.startswith("model.") for key in saved)
    prefix = "model." if nested else ""
    rows = {key: value for table in tables for key, value in _empty_rows(table, saved, prefix).items()}
    mine = {key for table in tables for key in (table.weight_key, f"{table.weight_key}_id")}
    weights = {**{key: value for key, value in model.state_dict().items() if key not in mine}, **rows}
    state: dict[str, Any] = {"model": weights} if nested else weights
    optimizer = None
    if any(key.startswith("optimizer.state.") for key in saved):
        optimizer = model.fused_optimizer.state_dict()
        kept = {
            t.weight_key: optimizer["state"].pop(t.weight_key) for t in tables if t.weight_key in optimizer["state"]
        }
        saved_states = {key: _empty_states(key, saved) for key in kept}
        optimizer["state"].update({key: states for key, states in saved_states.items() if states["rows"]})
        state["optimizer"] = optimizer
    load(state, checkpoint_id=checkpoint_id)
    model.load_state_dict(weights)
    if optimizer is not None:
        started_anew = {
            key: model.fused_optimizer.state_dict()["state"][key] for key in kept if key not in optimizer["state"]
        }
        optimizer["state"].update(started_anew)
        model.fused_optimizer.load_state_dict(optimizer)


def _empty_rows(table: ModelTable, saved: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    key = table.weight_key
    if prefix + key not in saved:
        raise ValueError(f"the checkpoint has no RecStore table {table.name!r} ({prefix + key})")
    weight = _empty_like(saved[prefix + key])
    if weight.dim() != 2 or weight.shape[1] != table.dim:
        raise ValueError(
            f"table {table.name!r} is of shape {tuple(weight.shape)} in the checkpoint, "
            f"its dim in the model is {table.dim}"
        )
    ids = saved.get(f"{prefix}{key}_id")
    return {key: weight} if ids is None else {key: weight, f"{key}_id": _empty_like(ids)}


def _empty_states(weight_key: str, saved: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    prefix = f"optimizer.state.{weight_key}.rows."
    return {"rows": {k.removeprefix(prefix): _empty_like(v) for k, v in saved.items() if k.startswith(prefix)}}


def _empty_like(metadata: TensorStorageMetadata) -> Tensor:
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)
