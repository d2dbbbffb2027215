"""A drop-in replacement for ``torch.nn.EmbeddingBag``."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_recstore.kernels.device_copies import CopyTarget, to_device
from torchrec_recstore.modules.bag_input import bags_of
from torchrec_recstore.modules.drop_in import DropIn, two_dimensional
from torchrec_recstore.modules.lookups import Bags
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions


class RecStoreEmbeddingBag(DropIn):
    """A replacement for ``torch.nn.EmbeddingBag`` that accepts any int64 id and makes rows when ids are first trained.

    In training, the forward pass makes a row for each new id, and the backward pass updates the rows with the fused
    optimizer. In evaluation, or if ``weight.requires_grad`` is False, nothing changes, and ``options.missing``
    determines the row that is read for an id without a row.

    Args:
        num_embeddings: The expected number of rows. It does not limit the ids.
        embedding_dim: The number of columns of a row.
        max_norm: Must be None. Other values raise an error.
        norm_type: Has no effect, as in torch without ``max_norm``.
        scale_grad_by_freq: Whether the gradient of an id is divided by the number of times that the id is in the batch.
            Must be False with ``mode="max"``. Default: False.
        mode: The pooling: ``"sum"``, ``"mean"`` or ``"max"``. Default: ``"mean"``.
        sparse: Has no effect. Only the rows of the batch have gradients. Must be False with ``mode="max"``.
        _weight: (num_embeddings, embedding_dim). Row i becomes the row of id i. Default: None, an empty table.
        include_last_offset: Whether ``offsets`` include the end of the last bag. Default: False.
        padding_idx: The id that is left out of its bags and never gets a row. A negative value counts from
            ``num_embeddings``, as in torch. Default: None.
        device: ``cpu`` or ``meta``. Input on another device is copied to the CPU, and the output is copied back.
            Default: None, ``meta`` if it is torch's default device, else ``cpu``.
        dtype: The dtype of rows and output: float32, float16, bfloat16 or int8, with float32 output. Arithmetic is
            float32. Default: None, the dtype of ``_weight``, or float32 without ``_weight``.
        lr: The learning rate of the default optimizer. Default: 0.01.
        optimizer: The optimizer, from ``torchrec_recstore.optim``. Default: None, ``RowWiseAdagrad(lr)``.
        options: The table's options. If they have no initializer, new rows are drawn from the normal distribution with
            mean 0 and standard deviation 1, as in torch. Default: ``TableOptions()``.
        fused: Whether the backward pass updates the rows. If False, it collects gradients for a sparse optimizer, for
            example ``SparseSGD``. Default: True.
        name: The table's name. The name and ``options.seed`` determine new rows. Default: None, a name drawn from
            torch's generator, so that two modules have different rows and ``torch.manual_seed`` reproduces them.
        state_dtype: The data type in which optimizer state is stored, ``torch.float32`` or ``float16``. See
            :class:`torchrec_recstore.store.Table`. Default: ``torch.float32``.

    Raises:
        TypeError: An argument has an unsupported type; the message names the argument.
        ValueError: An argument has an unsupported value; the message names the argument.
        ColdStoreError: The cold store cannot be opened.
        ImportError: The package of the cold store is not installed.

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
        state_dtype: torch.dtype = torch.float32,
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
            state_dtype,
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
        """Returns a module with the rows ``embeddings``, (n, dim), as ``torch.nn.EmbeddingBag.from_pretrained`` does.

        Row i of ``embeddings`` becomes the row of id i. If ``freeze`` is True, the rows are not trained. The other
        arguments, including ``more``, are those of the constructor.

        Raises:
            ValueError: ``embeddings`` does not have two dimensions.
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
        """Returns the pooled rows of bags of ids. The output for an empty bag is zeros.

        Args:
            input: (B, L), or (N,) with ``offsets``; int32 or int64. The ids. Each row of a (B, L) tensor and each
                component of a nested tensor is a bag.
            offsets: (B,), or (B + 1,) with ``include_last_offset``; int32 or int64. The positions in ``input`` where
                the bags begin; the first is 0. With ``include_last_offset``, ids after the last offset belong to no
                bag.
            per_sample_weights: The shape of ``input``, floating point. The weight of each id; ``mode`` must be
                ``"sum"``. The weights get a gradient if they require one.

        Returns:
            (B, embedding_dim), the module's dtype, on the device of ``input``.

        Raises:
            TypeError: A tensor has an unsupported dtype.
            ValueError: A tensor has an unsupported shape, or the offsets do not ascend within the input.
            NotImplementedError: ``per_sample_weights`` are given and ``mode`` is not ``"sum"``, as in torch.
            RuntimeError: The module is on the meta device and ``input`` is not.
            MemoryError, ColdStoreError: See :meth:`torchrec_recstore.store.Table.lookup`.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise NotImplementedError(f"per_sample_weights require mode='sum', as in torch, got mode={self.mode!r}")
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
        return to_device(out, CopyTarget(input.device, self.weight.dtype))

    def extra_repr(self) -> str:
        """Returns the arguments that the module's repr shows, as in torch."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{padding}"

    def _pooled_by_torch(self, bags: Bags) -> Tensor:
        """Returns the rows of the batch pooled by torch, for the cases that the native kernel does not support."""
        rows = self._rows(bags.ids)
        if len(bags.ids) == 0:
            # torch's pooling does not accept an empty batch. The sum keeps the rows in the graph, because backward
            # counts as an update of the table even without ids.
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
                raise ValueError("offsets must be given if input has the shape (N,)")
            count = offsets.shape[0] - self.include_last_offset
        return input.new_empty((count, self.embedding_dim), dtype=self.weight.dtype)
