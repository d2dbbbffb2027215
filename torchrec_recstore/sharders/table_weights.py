"""A table's weights in ``state_dict``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.sharders.gather import refused_together


class TableWeights(ShardedTensor):
    """The rows of a table as a (R, dim) tensor, whose ``gather`` makes a tensor of TorchRec's own tables of it.

    It is pickled, copied and cloned as a ``ShardedTensor``.
    """

    _table: str
    _ids: ShardedTensor
    _env: ShardingEnv

    @classmethod
    def of(cls, table: str, weights: ShardedTensor, ids: ShardedTensor, env: ShardingEnv) -> TableWeights:
        """``weights`` (R, dim) of the rows of ``ids`` (R,), which becomes one.

        Args:
            table: The name of the table, for errors.
            weights: as its shards hold it.
            ids: the same.
            env: The environment of the sharded module.
        """
        weights.__class__ = cls  # torch 2.13 makes a ShardedTensor and nothing else of shards and their metadata
        assert isinstance(weights, TableWeights)
        weights._table, weights._ids, weights._env = table, ids, env
        return weights

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Row i of ``out`` becomes the row of id i, zeros where there is none. Collective.

        TorchRec's ``state_dict_gather`` calls it with the weight of an unsharded model.

        Args:
            dst: The rank that gets the rows.
            out: (N, dim). A tensor on the rank ``dst``, None on the others.
            enforce_dtype: Without effect: rows are converted to the dtype of ``out``.
            dtype: Likewise.

        Raises:
            ValueError: ``out`` is missing or of another dim, or there are ids outside [0, N); on every rank, with
                ``out`` as it was.
        """
        mine = dist.get_rank(self._process_group) == dst
        what = f"RecStore table {self._table!r}"
        with refused_together(self._env):
            if mine and (out is None or out.dim() != 2 or out.shape[1] != self.size(1)):
                shape = "None" if out is None else tuple(out.shape)
                raise ValueError(f"{what}: out must have the shape (rows, {self.size(1)}), got {shape}")
        ids = torch.empty(self._ids.size(), dtype=torch.int64) if mine else None
        rows = torch.empty(self.size(), dtype=self.dtype) if mine else None
        if self.size(0):
            self._ids.gather(dst, ids, dtype=torch.int64)
            super().gather(dst, rows, dtype=self.dtype)
        with refused_together(self._env):
            if out is None or ids is None or rows is None:
                return
            outside = int(((ids < 0) | (ids >= len(out))).sum())
            if outside:
                raise ValueError(
                    f"{what} has {outside} ids outside [0, {len(out)}), and row i of the gathered tensor is the row of "
                    "id i: stock_state_dict(model, num_rows, leave_out=True) goes without them; with weight_id, "
                    "local_shards() have all rows"
                )
            with torch.no_grad():
                out.zero_()
                out[ids.to(out.device)] = rows.to(out)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = ShardedTensor._init_from_local_shards_and_global_metadata(
            self.local_shards(), self.metadata(), process_group=self._process_group
        )
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
