"""The common base class of ``RecStoreEmbedding`` and ``RecStoreEmbeddingBag``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrec_recstore.modules.lookups import Lookups
from torchrec_recstore.modules.owned_table import load_table_state
from torchrec_recstore.modules.table_module import LearningRate, TableModule, optimizer_of
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import NormalInit, TableOptions


class DropIn(TableModule):
    """A module with one table and the constructor of an embedding module of ``torch.nn``.

    Args:
        num_embeddings: The expected number of rows. It does not limit the ids.
        embedding_dim: The number of columns of a row.
        padding_idx: The padding id. See the subclasses.
        max_norm: Must be None.
        norm_type: Has no effect, as in torch without ``max_norm``.
        scale_grad_by_freq: Whether the gradient of an id is divided by the number of times that the id is in the batch.
        sparse: Has no effect. Only the rows of the batch have gradients.
        weight: (num_embeddings, embedding_dim) or None. Row i becomes the row of id i.
        device: ``cpu``, ``meta`` or None.
        dtype: float32, float16, bfloat16 or int8. Default: None, the dtype of ``weight``; float32 without ``weight``.
        lr, optimizer, options, fused, name, state_dtype: See the subclasses.

    Raises:
        TypeError: An argument has an unsupported type; the message names the argument.
        ValueError: An argument has an unsupported value; the message names the argument.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        weight: Tensor | None,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        lr: float,
        optimizer: Optimizer | None,
        options: TableOptions,
        fused: bool,
        name: str | None,
        state_dtype: torch.dtype,
    ) -> None:
        for argument, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
        if num_embeddings < 0:
            raise ValueError(f"num_embeddings must not be negative, got {num_embeddings}")
        if max_norm is not None:
            raise ValueError(
                f"max_norm={max_norm} is not supported, since lookups do not change rows: "
                "optimizer=RowWiseAdagrad(max_norm=...) bounds them in their updates"
            )
        if weight is not None and tuple(weight.shape) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"_weight must have the shape {(num_embeddings, embedding_dim)}, got {tuple(weight.shape)}"
            )
        if not isinstance(options, TableOptions):
            raise TypeError(f"options must be TableOptions, got {type(options).__name__}")
        if dtype is None:
            dtype = torch.float32 if weight is None else weight.dtype
        if name is None:
            # New rows depend on the name. A name from torch's generator gives two modules different rows, as two
            # modules of torch have different weights.
            name = f"embedding_{int(torch.randint(2**62, (), device='cpu')):016x}"
        optimizer = optimizer_of(optimizer, lr)
        arguments = {
            "dim": embedding_dim,
            "dtype": dtype,
            "optimizer": optimizer,
            "options": replace(options, initializer=options.initializer or NormalInit(0.0, 1.0)),
            "name": name,
            "state_dtype": state_dtype,
        }
        super().__init__(arguments, LearningRate(optimizer.lr), fused=fused, device=device)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _padding_id(padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self._lookups = Lookups()
        if weight is not None and self._owned is not None:
            load_table_state(self._owned.table, {"weight": weight})

    @property
    def _trains(self) -> bool:
        return self.training and self.weight.requires_grad

    def _rows(self, ids: Tensor) -> Tensor:
        """Returns the rows, (N, dim) float32, of ids (N,) int64.

        With ``scale_grad_by_freq``, the gradient of each id is divided by the number of its occurrences in ``ids``.
        """
        (rows,) = self._lookups.rows([self], ids, [len(ids)], train=self._trains)
        if self.scale_grad_by_freq and rows.requires_grad:
            _, place, counts = torch.unique(ids, return_inverse=True, return_counts=True)
            rows = _ScaledGradient.apply(rows, counts[place])  # type: ignore[no-untyped-call]
        return rows

    def _apply(self, *args: Any, **kwargs: Any) -> DropIn:
        super()._apply(*args, **kwargs)
        self._lookups.clear()
        return self


class _ScaledGradient(torch.autograd.Function):
    """Returns rows (N, dim) unchanged in forward, and divides their gradients by counts (N,) in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.saved_tensors[0][:, None], None


def two_dimensional(embeddings: Tensor) -> tuple[int, int]:
    """Returns the shape (n, dim) of the argument of ``from_pretrained``.

    Raises:
        ValueError: ``embeddings`` does not have two dimensions.
    """
    if embeddings.dim() != 2:
        raise ValueError(f"embeddings must have the shape (n, dim), got {tuple(embeddings.shape)}")
    return embeddings.shape[0], embeddings.shape[1]


def _padding_id(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise TypeError(f"padding_idx must be an int, got {type(padding_idx).__name__}")
    if not -num_embeddings <= padding_idx < 2**63:
        raise ValueError(f"padding_idx must be between -num_embeddings and 2**63 - 1, got {padding_idx}")
    return padding_idx if padding_idx >= 0 else num_embeddings + padding_idx
