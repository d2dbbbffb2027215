"""A table's parameter as the planner should see it: its declared shape, the memory of its resident rows."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from torchrec_recstore.options import TableOptions, resident_rows
from torchrec_recstore.warn import warn_user

stock_by_default: set[str] = set()
"""The tables of which it has been said that their sharding names no kernel, until they are sharded."""


class ResidentParameter(nn.Parameter):
    """A view of a table's parameter whose ``numel`` counts resident rows only.

    TorchRec's storage estimator takes a table's bytes from ``numel() * element_size()`` (``get_tensor_size_bytes``,
    torchrec 1.8.0) and everything else, shard sizes, offsets and row-wise blocks, from ``shape``. So with this view a
    table declared with 2**40 rows is planned by the memory it will take, and sharded by its declared shape.
    """

    @classmethod
    def of(cls, parameter: nn.Parameter, rows: int | None = None, name: str = "") -> ResidentParameter:
        """A view of ``parameter`` of shape (num_embeddings, dim), with its attributes.

        Args:
            parameter: the unsharded table, usually on the meta device; shared, not copied.
            rows: resident rows over all ranks; by default what default options say.
            name: the table's.
        """
        view = cls(parameter.data, requires_grad=parameter.requires_grad)
        view.__dict__.update(parameter.__dict__)  # the marks of apply_optimizer_in_backward
        num_embeddings = parameter.shape[0]
        view._resident_rows = resident_rows(TableOptions(), num_embeddings) if rows is None else rows
        view._table_name = name
        return view

    _resident_rows: int
    _table_name: str

    @property
    def _in_backward_optimizers(self) -> list[object]:
        # Read by the generators of sharding_plan, table_wise() and its like, where no compute_kernel is given: they
        # choose between TorchRec's kernels by it, whatever the sharder offers (_get_compute_kernel, torchrec 1.8.0).
        stock_by_default.add(self._table_name)
        warn_user(
            f"table {self._table_name!r} is planned on TorchRec's own kernel, since its sharding names none: pass "
            f"compute_kernel={EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value!r} to table_wise(...) and its like for "
            "RecStore, or the name of TorchRec's kernel"
        )
        if "_in_backward_optimizers" not in self.__dict__:
            raise AttributeError("_in_backward_optimizers")
        optimizers: list[object] = self.__dict__["_in_backward_optimizers"]
        return optimizers

    def numel(self) -> int:
        """Elements of the resident rows."""
        return self._resident_rows * self.shape[1]

    def nelement(self) -> int:
        """Elements of the resident rows."""
        return self.numel()
