from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_recstore.modules.bag_input import bags_of
from torchrec_recstore.modules.drop_in import DropIn, two_dimensional
from torchrec_recstore.modules.lookups import Bags
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions


class RecStoreEmbeddingBag(DropIn):
    """``torch.nn.EmbeddingBag`` whose rows are made as ids come by: any int64 is an id.

    In training a new id gets its row, and backward updates rows with the fused optimizer. In evaluation, or with
    ``weight.requires_grad`` off, nothing changes; an id without a row reads as ``options.missing`` says.

    Args:
        num_embeddings: a hint; ids are not limited by it.
        embedding_dim: columns of a row.
        max_norm: None; others are refused.
        norm_type: without effect, as in torch without ``max_norm``.
        scale_grad_by_freq: divide an id's gradient by how often it is in the batch; not with ``mode="max"``.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: without effect: gradients are always those of the batch's rows alone; not with ``mode="max"``.
        _weight: (num_embeddings, embedding_dim) whose row i becomes id i.
        include_last_offset: whether ``offsets`` end with the end of the last bag.
        padding_idx: the id that is left out of its bags, and never gets a row. A negative one counts from
            ``num_embeddings``, as in torch.
        device: ``cpu`` or ``meta``. Input on another device is copied to the CPU, and the output back.
        dtype: of rows and output: float32, float16 or bfloat16. Arithmetic is float32.
        lr: of the default optimizer.
        optimizer: of ``torchrec_recstore.optim``; None: ``RowWiseAdagrad(lr)``.
        options: how rows are made and kept. Without an initializer new rows are normal with mean 0 and deviation 1, as
            in torch.
        fused: whether backward updates the rows; otherwise it collects gradients for ``SparseSGD`` and the like.
        name: of the table, which decides new rows together with ``options.seed``. None: drawn by torch's generator, so
            that two modules differ and ``torch.manual_seed`` repeats them.

    Raises:
        TypeError, ValueError: an argument that makes no sense or cannot be honoured; the message names it.
        ColdStoreError, ImportError: the cold store cannot be opened.

    Example::

        bags = RecStoreEmbeddingBag(1000, 16, mode="sum")
        bags(torch.tensor([7, -1, 2**60]), torch.tensor([0, 2])).sum().backward()  # makes three rows and updates them
        len(bags.table)  # 3
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        lr: float = 0.01,
        optimizer: Optimizer | None = None,
        options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
        fused: bool = True,
        name: str | None = None,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode must be 'sum', 'mean' or 'max', got {mode!r}")
        for argument, value in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
            if mode == "max" and value:
                raise ValueError(f"{argument} must be False with mode='max', as in torch")
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            device,
            dtype,
            lr,
            optimizer,
            options,
            fused,
            name,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **more: object,
    ) -> RecStoreEmbeddingBag:
        """As ``torch.nn.EmbeddingBag.from_pretrained``: row i of ``embeddings``, (n, dim), becomes id i.

        ``more`` goes to the constructor.
        """
        module = cls(
            *two_dimensional(embeddings),
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            embeddings,
            include_last_offset,
            padding_idx,
            **more,  # type: ignore[arg-type]
        )
        module.weight.requires_grad_(not freeze)
        return module

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled rows of bags of ids; an empty bag is zeros.

        Args:
            input: (B, L), each line a bag, or (N,) with ``offsets``; int32 or int64. A nested tensor's are bags too.
            offsets: (B,) where bags begin, from 0; (B + 1,) with ``include_last_offset``, and ids behind the last one
                are in no bag. int32 or int64.
            per_sample_weights: of the shape of ``input``, floating point; with ``mode="sum"``. They get a gradient
                where they require one.

        Returns:
            (B, embedding_dim), of the module's dtype, on the device of ``input``.

        Raises:
            TypeError, ValueError: input of another dtype or shape, or offsets that do not ascend.
            NotImplementedError: ``per_sample_weights`` with another mode, as in torch.
            RuntimeError: the module is on the meta device and ``input`` is not.
            MemoryError, ColdStoreError: as for :meth:`torchrec_recstore.store.Table.lookup`.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise NotImplementedError(f"per_sample_weights need mode='sum', as in torch; it is {self.mode!r}")
        if self.weight.is_meta and input.is_meta:
            return self._meta_output(input, offsets)
        bags = bags_of(
            input,
            offsets,
            per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
        if self.mode == "max" or self.scale_grad_by_freq:
            out = self._pooled_by_torch(bags)
        else:
            out = self._lookups.bags([self], [0], self.mode, bags, train=self._trains)
        return out.to(input.device, self.weight.dtype)

    def extra_repr(self) -> str:
        """As torch's."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{padding}"

    def _pooled_by_torch(self, bags: Bags) -> Tensor:
        """What the native kernel has no pass for: torch's own pooling, ties included, of the batch's rows."""
        rows = self._rows(bags.ids)
        if len(bags.ids) == 0:  # which torch's pooling does not take; backward is an update all the same
            return rows.new_zeros(len(bags.offsets) - 1, self.embedding_dim) + rows.sum(0)
        return F.embedding_bag(
            torch.arange(len(rows)),
            rows,
            bags.offsets,
            mode=self.mode,
            per_sample_weights=bags.weights,
            include_last_offset=True,
        )

    def _meta_output(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        count = input.shape[0]
        if input.dim() == 1:
            if offsets is None:
                raise ValueError("offsets must be given where input is of the shape (N,)")
            count = offsets.shape[0] - self.include_last_offset
        return input.new_empty((count, self.embedding_dim), dtype=self.weight.dtype)
