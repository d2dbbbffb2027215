"""``RecStoreEmbedding`` and ``RecStoreEmbeddingBag`` for inference."""

# Not with annotations from __future__: fx copies those of forward as they are, and TorchScript reads them.

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrec_recstore.inference.served_tables import pooled_in_order, served_table
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag


class StaticEmbedding(nn.Module):
    """The rows of raw ids.

    Args:
        module: that it stands for.
        ids: (R,) int64, ascending.
        rows: (R + 1, ...) in the row format, the first one for ids that have none.
        row_format: of :data:`torchrec_recstore.inference.row_formats.FORMATS`.
    """

    def __init__(self, module: RecStoreEmbedding, ids: Tensor, rows: Tensor, row_format: str) -> None:
        super().__init__()
        self.table = served_table(module.table.name, module.embedding_dim, row_format, ids, rows)
        self._has_padding = module.padding_idx is not None
        self._padding = module.padding_idx or 0
        self._output = module.weight.dtype

    def forward(self, input: Tensor) -> Tensor:
        """Any shape of int32 or int64 ids -> (*input.shape, dim), of the dtype of the module it stands for."""
        values = input.reshape(-1).to(torch.int64)
        rows = self.table.lookup(values)
        if self._has_padding:  # without a row it reads as zeros, whatever other ids do
            nothing = (values == self._padding) & (self.table.row_numbers(values) == 0)
            rows = rows.masked_fill(nothing.unsqueeze(1), 0.0)
        shape: list[int] = list(input.shape)
        return rows.to(self._output).view(shape + [rows.shape[1]])  # noqa: RUF005  (TorchScript)


class StaticEmbeddingBag(nn.Module):
    """Pooled rows of bags of raw ids; arguments as for :class:`StaticEmbedding`."""

    def __init__(self, module: RecStoreEmbeddingBag, ids: Tensor, rows: Tensor, row_format: str) -> None:
        super().__init__()
        self.table = served_table(module.table.name, module.embedding_dim, row_format, ids, rows)
        self._has_padding = module.padding_idx is not None
        self._padding = module.padding_idx or 0
        self._output = module.weight.dtype
        self._mode = str(module.mode)
        self._by_torch = self._mode == "max" or bool(module.scale_grad_by_freq)
        self._include_last_offset = bool(module.include_last_offset)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """As ``RecStoreEmbeddingBag.forward``, without nested tensors."""
        weights = per_sample_weights
        if input.dim() == 2:
            bounds = torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
        else:
            assert offsets is not None, "offsets must be given where input is of the shape (N,)"
            bounds = offsets.to(torch.int64)
            if not self._include_last_offset:
                bounds = F.pad(bounds, [0, 1], value=float(input.shape[0]))
        end = int(bounds[-1])
        values = input.reshape(-1)[:end].to(torch.int64)
        if weights is not None:
            weights = weights.reshape(-1)[:end]
        if self._has_padding:
            stays = values != self._padding
            before = F.pad(stays.to(torch.int64).cumsum(0), [1, 0])
            bounds, values = before[bounds], values[stays]
            if weights is not None:
                weights = weights[stays]
        rows = self.table.lookup(values)
        places = torch.arange(values.shape[0], device=values.device)
        if not self._by_torch:
            out = pooled_in_order(rows, places, bounds, weights, self._mode == "mean")
        elif values.shape[0] == 0:  # which torch's pooling does not take
            out = torch.zeros(bounds.shape[0] - 1, rows.shape[1])
        else:
            if weights is not None:
                weights = weights.to(torch.float32)
            out = F.embedding_bag(
                places,
                rows,
                bounds,
                norm_type=2.0,
                mode=self._mode,
                per_sample_weights=weights,
                include_last_offset=True,
            )
        return out.to(self._output)
