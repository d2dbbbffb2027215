"""A table's parameter as the planner should see it: its declared shape, the memory of its resident rows."""

from __future__ import annotations

from torch import nn

from torchrec_recstore.options import TableOptions, resident_rows


class ResidentParameter(nn.Parameter):
    """A view of a table's parameter whose ``numel`` counts resident rows only.

    TorchRec's storage estimator takes a table's bytes from ``numel() * element_size()`` (``get_tensor_size_bytes``,
    torchrec 1.8.0) and everything else, shard sizes, offsets and row-wise blocks, from ``shape``. So with this view a
    table declared with 2**40 rows is planned by the memory it will take, and sharded by its declared shape.
    """

    @classmethod
    def of(cls, parameter: nn.Parameter, rows: int | None = None) -> ResidentParameter:
        """A view of ``parameter`` of shape (num_embeddings, dim), with its attributes.

        Args:
            parameter: the unsharded table, usually on the meta device; shared, not copied.
            rows: resident rows over all ranks; by default what default options say.
        """
        view = cls(parameter.data, requires_grad=parameter.requires_grad)
        view.__dict__.update(parameter.__dict__)  # the marks of apply_optimizer_in_backward
        num_embeddings = parameter.shape[0]
        view._resident_rows = resident_rows(TableOptions(), num_embeddings) if rows is None else rows
        return view

    _resident_rows: int

    def numel(self) -> int:
        """Elements of the resident rows."""
        return self._resident_rows * self.shape[1]

    def nelement(self) -> int:
        """Elements of the resident rows."""
        return self.numel()
