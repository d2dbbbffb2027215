"""A drop-in replacement for ``torch.nn.Embedding``."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_recstore.kernels.device_copies import CopyTarget, to_device
from torchrec_recstore.modules.bag_input import int64_input
from torchrec_recstore.modules.drop_in import DropIn, two_dimensional
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions


class RecStoreEmbedding(DropIn):
    """A replacement for ``torch.nn.Embedding`` that accepts any int64 id and makes rows when ids are first trained.

    In training, the forward pass makes a row for each new id, and the backward pass updates the rows with the fused
    optimizer. In evaluation, or if ``weight.requires_grad`` is False, nothing changes, and ``options.missing``
    determines the output for an id without a row.

    Args:
        num_embeddings: The expected number of rows. It does not limit the ids.
        embedding_dim: The number of columns of a row.
        padding_idx: The id that never gets a row or an update. Its output is zeros, or its row in ``_weight`` or in a
            loaded ``state_dict``. A negative value counts from ``num_embeddings``, as in torch. Default: None.
        max_norm: Must be None. Other values raise an error.
        norm_type: Has no effect, as in torch without ``max_norm``.
        scale_grad_by_freq: Whether the gradient of an id is divided by the number of times that the id is in the batch.
            Default: False.
        sparse: Has no effect. Only the rows of the batch have gradients.
        _weight: (num_embeddings, embedding_dim). Row i becomes the row of id i. Default: None, an empty table.
        _freeze: Whether ``weight.requires_grad`` is False. Default: False.
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
        state_dtype: torch.dtype = torch.float32,
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
            state_dtype,
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
        """Returns a module with the rows ``embeddings``, (n, dim), as ``torch.nn.Embedding.from_pretrained`` does.

        Row i of ``embeddings`` becomes the row of id i. If ``freeze`` is True, the rows are not trained. The other
        arguments, including ``more``, are those of the constructor.

        Raises:
            ValueError: ``embeddings`` does not have two dimensions.
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
        """Returns the rows of ids.

        Args:
            input: Any shape, int32 or int64. The ids.

        Returns:
            (``*input.shape``, embedding_dim), the module's dtype, on the device of ``input``.

        Raises:
            TypeError: ``input`` has another dtype.
            RuntimeError: The module is on the meta device and ``input`` is not.
            ValueError, MemoryError, ColdStoreError: See :meth:`torchrec_recstore.store.Table.lookup`.
        """
        if self.weight.is_meta and input.is_meta:
            return input.new_empty((*input.shape, self.embedding_dim), dtype=self.weight.dtype)
        ids = int64_input(input).reshape(-1)
        out = self._rows(ids) if self.padding_idx is None else self._with_padding(ids, self.padding_idx)
        return to_device(out, CopyTarget(input.device, self.weight.dtype)).view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Returns the arguments that the module's repr shows, as in torch."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"

    def _with_padding(self, ids: Tensor, padding: int) -> Tensor:
        places = (ids != padding).nonzero().squeeze(1)
        rows = self._rows(ids[places])
        given = torch.tensor([padding])
        out = torch.zeros(len(ids), self.embedding_dim)
        if len(places) < len(ids) and bool(self.table.contains(given)):
            # The id has a row. (Without a row, and with missing="init", the lookup would not return zeros.)
            out += self.table.lookup(given)
        return out.index_copy(0, places, rows)
