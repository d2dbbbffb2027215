"""A model's tensors beside its RecStore tables: the dense part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchrec_recstore.sharders.model_tables import ModelTable, rows_left_out


def dense_tensors(model: nn.Module, tables: Sequence[ModelTable]) -> dict[str, Tensor]:
    """What ``model.state_dict()`` has beside the RecStore tables: the model's own tensors, no copies.

    Raises:
        ValueError: a table on one of TorchRec's own sharded kernels, or something that is no tensor.
    """
    placeholders = {table.weight_key for table in tables}
    with rows_left_out(model):
        state = {key: value for key, value in model.state_dict().items() if key not in placeholders}
    for key, value in state.items():
        # ShardedTensor and DTensor: tables on TorchRec's own kernels (torchrec 1.8.0).
        if type(value) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"{key} is a {type(value).__name__}: a checkpoint holds RecStore tables and plain tensors; "
                "use torch.distributed.checkpoint for tables on TorchRec's own kernels"
            )
    return {key: value.detach() for key, value in state.items()}


def check_dense(saved: Mapping[str, Tensor], own: Mapping[str, Tensor], *, strict: bool) -> None:
    """Compares the tensors of a checkpoint with those of the model, which must be such that can be written.

    Raises:
        ValueError: another shape; with ``strict`` also a name that only one of them has; a tensor of the model that
            was expanded, or made in inference mode.
    """
    for what, names in (("no", own.keys() - saved.keys()), ("an unknown", saved.keys() - own.keys())):
        if strict and names:
            raise ValueError(f"the checkpoint has {what} tensor {min(names)!r}")
    for name in own.keys() & saved.keys():
        if own[name].shape != saved[name].shape:
            raise ValueError(
                f"{name} is of shape {tuple(saved[name].shape)} in the checkpoint, "
                f"of shape {tuple(own[name].shape)} in the model"
            )
        overlaps = any(step == 0 and size > 1 for step, size in zip(own[name].stride(), own[name].shape, strict=True))
        if overlaps or (own[name].is_inference() and not torch.is_inference_mode_enabled()):
            raise ValueError(f"{name} of the model cannot be written: it was expanded, or made in inference mode")


def load_dense(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Copies tensors that :func:`check_dense` has passed into the model."""
    with torch.no_grad():
        for name in own.keys() & saved.keys():
            own[name].copy_(saved[name])
