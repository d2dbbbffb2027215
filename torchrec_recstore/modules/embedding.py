from __future__ import annotations

import torch
from torch import Tensor

from torchrec_recstore.modules.bag_input import int64_input
from torchrec_recstore.modules.drop_in import DropIn, two_dimensional
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions


class RecStoreEmbedding(DropIn):
    """``torch.nn.Embedding`` whose rows are made as ids come by: any int64 is an id.

    In training a new id gets its row, and backward updates rows with the fused optimizer. In evaluation, or with
    ``weight.requires_grad`` off, nothing changes; an id without a row reads as ``options.missing`` says.

    Args:
        num_embeddings: a hint; ids are not limited by it.
        embedding_dim: columns of a row.
        padding_idx: the id that never gets a row or an update; it reads as zeros, or as the row that was given for it.
            A negative one counts from ``num_embeddings``, as in torch.
        max_norm: None; others are refused.
        norm_type: without effect, as in torch without ``max_norm``.
        scale_grad_by_freq: divide an id's gradient by how often it is in the batch.
        sparse: without effect: gradients are always those of the batch's rows alone.
        _weight: (num_embeddings, embedding_dim) whose row i becomes id i.
        _freeze: whether ``weight.requires_grad`` is off.
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

        emb = RecStoreEmbedding(1000, 16)
        emb(torch.tensor([[7, -1], [2**60, 7]])).sum().backward()  # makes three rows and updates them
        len(emb.table)  # 3
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        lr: float = 0.01,
        optimizer: Optimizer | None = None,
        options: TableOptions = TableOptions(),  # noqa: B008  (frozen)
        fused: bool = True,
        name: str | None = None,
    ) -> None:
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
        self.weight.requires_grad_(not _freeze)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **more: object,
    ) -> RecStoreEmbedding:
        """As ``torch.nn.Embedding.from_pretrained``: row i of ``embeddings``, (n, dim), becomes id i.

        ``more`` goes to the constructor.
        """
        rows, dim = two_dimensional(embeddings)
        return cls(
            rows,
            dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            embeddings,
            freeze,
            **more,  # type: ignore[arg-type]
        )

    def forward(self, input: Tensor) -> Tensor:
        """The rows of ids.

        Args:
            input: any shape, int32 or int64.

        Returns:
            (``*input.shape``, embedding_dim), of the module's dtype, on the device of ``input``.

        Raises:
            TypeError: another dtype.
            RuntimeError: the module is on the meta device and ``input`` is not.
            ValueError, MemoryError, ColdStoreError: as for :meth:`torchrec_recstore.store.Table.lookup`.
        """
        if self.weight.is_meta and input.is_meta:
            return input.new_empty((*input.shape, self.embedding_dim), dtype=self.weight.dtype)
        ids = int64_input(input).reshape(-1)
        out = self._rows(ids) if self.padding_idx is None else self._with_padding(ids, self.padding_idx)
        return out.to(input.device, self.weight.dtype).view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """As torch's."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"

    def _with_padding(self, ids: Tensor, padding: int) -> Tensor:
        places = (ids != padding).nonzero().squeeze(1)
        rows = self._rows(ids[places])
        given = torch.tensor([padding])
        out = torch.zeros(len(ids), self.embedding_dim)
        if len(places) < len(ids) and bool(self.table.contains(given)):
            out += self.table.lookup(given)  # with missing="init" one without a row would not read as zeros
        return out.index_copy(0, places, rows)
