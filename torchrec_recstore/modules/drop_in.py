"""Drop-in replacements for ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``.

Tests: tests/modules/test_embedding.py, tests/modules/test_embedding_bag.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrec_recstore.kernels.device_copies import (
    CopyTarget,
    to_device,
    to_host,
    weights_to_host,
)
from torchrec_recstore.modules.eager_groups import Bags, EagerGroups
from torchrec_recstore.modules.owned_table import load_table_state
from torchrec_recstore.modules.table_module import (
    LearningRate,
    TableModule,
    optimizer_of,
)
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import NormalInit, TableOptions, check_int
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.table_parameter import are_trained


class DropIn(TableModule):
    """The common base class of the drop-in replacements: a module with one table."""

    def __init__(
        self,
        *,
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
        optimizer = optimizer_of(optimizer, lr)
        table_arguments = _table_arguments(
            dim=embedding_dim,
            weight=weight,
            dtype=dtype,
            optimizer=optimizer,
            options=options,
            name=name,
            state_dtype=state_dtype,
        )
        _check_shape(num_embeddings, embedding_dim, max_norm, weight)
        super().__init__(
            table_arguments,
            LearningRate(optimizer.lr),
            fused=fused,
            device=device,
        )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _padding_id(padding_idx, num_embeddings)
        self.scale_grad_by_freq = scale_grad_by_freq
        # torch's module has these attributes, which have no effect here.
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.sparse = sparse
        self._table_groups = EagerGroups()
        if weight is not None and self._owned is not None:
            load_table_state(self._owned.table, {"weight": weight})

    def extra_repr(self) -> str:
        """Returns the arguments that the module's repr shows, as in torch."""
        parts = [str(self.num_embeddings), str(self.embedding_dim)]
        for name in ("mode", "padding_idx"):
            value = getattr(self, name, None)
            if value is not None:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)

    @property
    def _output_dtype(self) -> torch.dtype:
        return value_dtype(self._arguments["dtype"])

    @property
    def _trains(self) -> bool:
        return self.training and are_trained([self.weight])[0]

    def _target(self, input: Tensor) -> CopyTarget:
        """Returns the device and the data type of the output for an input."""
        return CopyTarget(input.device, self._output_dtype)

    def _rows(self, ids: Tensor, to: CopyTarget) -> Tensor:
        """Returns the rows, (N, dim), of ids (N,) int64: on the device of ``to`` if the
        table has rows there, else on the CPU, in float32.
        """
        if self.scale_grad_by_freq:
            to = to._replace(dtype=torch.float32)  # the gradients are divided
        (rows,) = self._table_groups.rows(
            [self],
            ids,
            [len(ids)],
            train=self._trains,
            to=_unless_cpu(to),
        )
        if self.scale_grad_by_freq and rows.requires_grad:
            _, numbers, counts = torch.unique(
                ids,
                return_inverse=True,
                return_counts=True,
            )
            times = counts[numbers].to(rows.device)
            rows = _ScaledGradient.apply(rows, times)  # type: ignore[no-untyped-call]
        return rows

    def _apply(self, *args: Any, **kwargs: Any) -> DropIn:
        super()._apply(*args, **kwargs)
        self._table_groups.clear()
        return self


class RecStoreEmbedding(DropIn):
    """A replacement for ``torch.nn.Embedding`` that accepts any int64 id and makes rows
    when ids are first trained.

    In training, the forward pass makes a row for each new id, and the backward pass
    updates the rows with the fused optimizer. In evaluation, or if
    ``weight.requires_grad`` is False, nothing changes, and ``options.missing``
    determines the output for an id without a row.

    Args:
        num_embeddings: The expected number of rows. It does not limit the ids.
        embedding_dim: The number of columns of a row.
        padding_idx: The id that never gets a row or an update. Its output is zeros, or
            its row in ``_weight`` or in a loaded ``state_dict``. A negative value
            counts from ``num_embeddings``, as in torch.
        max_norm: Must be None. Other values raise an error.
        norm_type: Has no effect, as in torch without ``max_norm``.
        scale_grad_by_freq: Whether the gradient of an id is divided by the number of
            times that the id is in the batch.
        sparse: Has no effect. Only the rows of the batch have gradients.
        _weight: (num_embeddings, embedding_dim). Row i becomes the row of id i.
            Default: None, an empty table.
        _freeze: Whether ``weight.requires_grad`` is False.
        device: ``cpu`` or ``meta``. Input on another device is copied to the CPU, and
            the output is copied back. Default: None, ``meta`` if it is torch's default
            device, else ``cpu``.
        dtype: The dtype of rows and output: float32, float16, bfloat16 or int8, with
            float32 output. Arithmetic is float32. Default: None, the dtype of
            ``_weight``, or float32 without ``_weight``.
        lr: The learning rate of the default optimizer.
        optimizer: The optimizer, from ``torchrec_recstore.optim``. Default: None,
            ``RowWiseAdagrad(lr)``.
        options: The table's options. If they have no initializer, new rows are drawn
            from the normal distribution with mean 0 and standard deviation 1, as in
            torch.
        fused: Whether the backward pass updates the rows. If False, it collects
            gradients for a sparse optimizer, for example ``SparseSGD``.
        name: The table's name. The name and ``options.seed`` determine new rows.
            Default: None, a name drawn from torch's generator, so that two modules have
            different rows and ``torch.manual_seed`` reproduces them.
        state_dtype: The data type of stored optimizer state. See
            :class:`torchrec_recstore.store.Table`.

    Raises:
        TypeError, ValueError: An argument has an unsupported type or value; the message
            names the argument.
        ColdStoreError: The cold store cannot be opened.
        ImportError: The package of the cold store is not installed.

    Example::

        emb = RecStoreEmbedding(1000, 16)
        rows = emb(torch.tensor([[7, -1], [2**60, 7]]))  # makes three rows
        rows.sum().backward()  # updates them
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
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            weight=_weight,
            device=device,
            dtype=dtype,
            lr=lr,
            optimizer=optimizer,
            options=options,
            fused=fused,
            name=name,
            state_dtype=state_dtype,
        )
        self.weight.requires_grad_(not (_freeze or self.is_frozen))

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
        **arguments: object,
    ) -> RecStoreEmbedding:
        """Returns a module with the rows ``embeddings``, (n, dim), as
        ``torch.nn.Embedding.from_pretrained`` does.

        Row i of ``embeddings`` becomes the row of id i. If ``freeze`` is True, the rows
        are not trained. The other arguments, including ``arguments``, are those of the
        constructor.

        Raises:
            ValueError: ``embeddings`` does not have two dimensions.
        """
        num_embeddings, embedding_dim = _shape_of(embeddings)
        return cls(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            _weight=embeddings,
            _freeze=freeze,
            **arguments,  # type: ignore[arg-type]
        )

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of ids.

        Args:
            input: Any shape, int32 or int64. The ids.

        Returns:
            (``*input.shape``, embedding_dim), the module's dtype, on the device of
            ``input``.

        Raises:
            TypeError: ``input`` has another dtype.
            RuntimeError: The module is on the meta device and ``input`` is not.
            ValueError, MemoryError, ColdStoreError: See
                :meth:`torchrec_recstore.store.Table.lookup`.
        """
        if self._owned is None and input.is_meta:
            return input.new_empty(
                (*input.shape, self.embedding_dim),
                dtype=self._output_dtype,
            )
        ids = _int64_input(input).reshape(-1)
        target = self._target(input)
        if self.padding_idx is None:
            rows = self._rows(ids, target)
        else:
            rows = self._rows_beside_padding(ids, self.padding_idx, target)
        rows = _at_target(rows, target)
        return rows.view(*input.shape, self.embedding_dim)

    def _rows_beside_padding(
        self,
        ids: Tensor,
        padding: int,
        to: CopyTarget,
    ) -> Tensor:
        """Returns the rows, (N, dim), of ids (N,) int64; see :meth:`_rows`.

        The row of the id ``padding`` is only read.
        """
        positions = (ids != padding).nonzero().squeeze(1)
        trained_rows = self._rows(ids[positions], to)
        out = torch.zeros(len(ids), self.embedding_dim)
        if len(positions) < len(ids):
            padding_id = torch.tensor([padding])
            # Without a row, and with missing="init", the lookup would not return zeros.
            if bool(self.table.contains(padding_id)):
                out += self.table.lookup(padding_id)
        out = out.to(trained_rows.device, trained_rows.dtype)
        return out.index_copy(0, positions.to(out.device), trained_rows)


class RecStoreEmbeddingBag(DropIn):
    """A replacement for ``torch.nn.EmbeddingBag`` that accepts any int64 id and makes
    rows when ids are first trained.

    Rows are made, updated and read as by :class:`RecStoreEmbedding`.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type: See
            :class:`RecStoreEmbedding`.
        scale_grad_by_freq: Whether the gradient of an id is divided by the number of
            times that the id is in the batch. Must be False with ``mode="max"``.
        mode: The pooling: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Has no effect. Must be False with ``mode="max"``.
        include_last_offset: Whether ``offsets`` include the end of the last bag.
        padding_idx: The id that is left out of its bags and never gets a row. A
            negative value counts from ``num_embeddings``, as in torch.
        _weight, device, dtype, lr, optimizer, options, fused, name, state_dtype: See
            :class:`RecStoreEmbedding`.

    Raises:
        TypeError, ValueError, ColdStoreError, ImportError: See
            :class:`RecStoreEmbedding`.

    Example::

        bags = RecStoreEmbeddingBag(1000, 16, mode="sum")
        sums = bags(torch.tensor([7, -1, 2**60]), torch.tensor([0, 2]))  # three rows
        sums.sum().backward()  # updates them
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
        if mode == "max":
            if scale_grad_by_freq:
                raise ValueError(
                    "scale_grad_by_freq must be False with mode='max', as in torch"
                )
            if sparse:
                raise ValueError("sparse must be False with mode='max', as in torch")
        super().__init__(
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            weight=_weight,
            device=device,
            dtype=dtype,
            lr=lr,
            optimizer=optimizer,
            options=options,
            fused=fused,
            name=name,
            state_dtype=state_dtype,
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
        **arguments: object,
    ) -> RecStoreEmbeddingBag:
        """Returns a module with the rows ``embeddings``, (n, dim), as
        ``torch.nn.EmbeddingBag.from_pretrained`` does.

        See :meth:`RecStoreEmbedding.from_pretrained`.
        """
        num_embeddings, embedding_dim = _shape_of(embeddings)
        module = cls(
            num_embeddings,
            embedding_dim,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            _weight=embeddings,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
            **arguments,  # type: ignore[arg-type]
        )
        module.weight.requires_grad_(not freeze)
        return module

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the pooled rows of bags of ids. The output for an empty bag is zeros.

        Args:
            input: (B, L), or (N,) with ``offsets``; int32 or int64. The ids. Each row
                of a (B, L) tensor and each component of a nested tensor is a bag.
            offsets: (B,), or (B + 1,) with ``include_last_offset``; int32 or int64. The
                positions in ``input`` where the bags begin; the first is 0. In the
                second case, ids after the last offset belong to no bag.
            per_sample_weights: The shape of ``input``, floating point. The weight of
                each id; ``mode`` must be ``"sum"``. The weights get a gradient if they
                require one.

        Returns:
            (B, embedding_dim), the module's dtype, on the device of ``input``.

        Raises:
            TypeError: A tensor has an unsupported dtype.
            ValueError: A tensor has an unsupported shape, or the offsets do not ascend
                within the input.
            NotImplementedError: ``per_sample_weights`` are given and ``mode`` is not
                ``"sum"``, as in torch.
            RuntimeError: The module is on the meta device and ``input`` is not.
            MemoryError, ColdStoreError: See
                :meth:`torchrec_recstore.store.Table.lookup`.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise NotImplementedError(
                "per_sample_weights require mode='sum', as in torch, got"
                f" mode={self.mode!r}"
            )
        if self._owned is None and input.is_meta:
            return self._meta_output(input, offsets)
        bags = _bags_of(
            input,
            offsets,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )
        target = self._target(input)
        if self.mode == "max" or self.scale_grad_by_freq:
            self._check_pools_by_torch(target)
            out = self._pooled_by_torch(bags)
        else:
            out = self._table_groups.bags(
                [self],
                [0],
                self.mode,
                bags,
                train=self._trains,
                to=_unless_cpu(target),
            )
        return _at_target(out, target)

    def _check_pools_by_torch(self, to: CopyTarget) -> None:
        """Raises ValueError if the table has rows on a device."""
        if to.device.type == "cpu" or not self.has_device_rows:
            return
        reason = "scale_grad_by_freq=True"
        if self.mode == "max":
            reason = "mode='max'"
        raise ValueError(
            f"table {self.table.name!r}: rows cannot be in the memory of a device:"
            f" torch pools them on the host with {reason}; use device_rows=0"
        )

    def _pooled_by_torch(self, bags: Bags) -> Tensor:
        """Returns the rows of the batch pooled by torch, for the cases that a
        ``PooledGroup`` does not support.
        """
        rows = self._rows(bags.ids, CopyTarget(torch.device("cpu"), torch.float32))
        if len(bags.ids) == 0:
            # torch's pooling refuses an empty batch. The sum keeps the rows in the
            # graph: backward counts as an update.
            zeros = rows.new_zeros(len(bags.offsets) - 1, self.embedding_dim)
            return zeros + rows.sum(0)
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
        return input.new_empty((count, self.embedding_dim), dtype=self._output_dtype)


def _check_shape(
    num_embeddings: int,
    embedding_dim: int,
    max_norm: float | None,
    weight: Tensor | None,
) -> None:
    check_int("num_embeddings", num_embeddings, 0)
    check_int("embedding_dim", embedding_dim, 1)
    if max_norm is not None:
        raise ValueError(
            f"max_norm={max_norm} is not supported, since lookups do not change rows: "
            "optimizer=RowWiseAdagrad(max_norm=...) bounds them in their updates"
        )
    shape = (num_embeddings, embedding_dim)
    if weight is not None and tuple(weight.shape) != shape:
        raise ValueError(
            f"_weight must have the shape {shape}, got {tuple(weight.shape)}"
        )


def _table_arguments(
    *,
    dim: int,
    weight: Tensor | None,
    dtype: torch.dtype | None,
    optimizer: Optimizer,
    options: TableOptions,
    name: str | None,
    state_dtype: torch.dtype,
) -> dict[str, Any]:
    """Returns the arguments of the module's ``Table``, by name."""
    if not isinstance(options, TableOptions):
        raise TypeError(f"options must be TableOptions, got {type(options).__name__}")
    if dtype is None:
        dtype = torch.float32 if weight is None else weight.dtype
    if name is None:
        # New rows depend on the name, and two modules have different rows, as in torch.
        name = f"embedding_{int(torch.randint(2**62, (), device='cpu')):016x}"
    options = replace(options, initializer=options.initializer or NormalInit(0.0, 1.0))
    return {
        "dim": dim,
        "dtype": dtype,
        "optimizer": optimizer,
        "options": options,
        "name": name,
        "state_dtype": state_dtype,
    }


def _shape_of(embeddings: Tensor) -> tuple[int, int]:
    if embeddings.dim() != 2:
        raise ValueError(
            f"embeddings must have the shape (n, dim), got {tuple(embeddings.shape)}"
        )
    return embeddings.shape[0], embeddings.shape[1]


def _padding_id(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    check_int("padding_idx", padding_idx, -num_embeddings)
    return padding_idx if padding_idx >= 0 else num_embeddings + padding_idx


def _unless_cpu(target: CopyTarget) -> CopyTarget | None:
    return None if target.device.type == "cpu" else target


def _at_target(rows: Tensor, target: CopyTarget) -> Tensor:
    """Returns rows where those of an input go. A group may have put them there."""
    if rows.device == target.device:
        return rows.to(target.dtype)
    return to_device(rows, target)


class _ScaledGradient(torch.autograd.Function):
    """Returns rows (N, dim) unchanged; backward divides gradients by counts (N,)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.saved_tensors[0][:, None], None


def _bags_of(
    input: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Bags:
    """Returns the bags of an input of :class:`RecStoreEmbeddingBag`, without the
    padding id, or raises its errors.
    """
    input, offsets, per_sample_weights = _on_host(input, offsets, per_sample_weights)
    ids = _int64_input(input)
    if input.is_nested:
        ids = _int64_input(input.values())
        offsets = input.offsets()  # type: ignore[attr-defined]
        include_last_offset = True
        if per_sample_weights is not None:
            if not per_sample_weights.is_nested:
                raise ValueError(
                    "per_sample_weights must be a nested tensor if input is one"
                )
            per_sample_weights = per_sample_weights.values()
    weights = None
    if per_sample_weights is not None:
        weights = _weights_on_host(per_sample_weights, ids)
    if ids.dim() == 2:
        if offsets is not None:
            raise ValueError(
                "offsets must be None if input has the shape (B, L): each row of input"
                " is a bag"
            )
        # arange with a step cannot make these bounds: L may be 0.
        bounds = torch.arange(ids.shape[0] + 1) * ids.shape[1]
        ids = ids.reshape(-1)
        weights = None if weights is None else weights.reshape(-1)
    else:
        bounds = _bounds(ids, offsets, include_last_offset)
        end = int(bounds[-1])
        ids = ids[:end]
        weights = None if weights is None else weights[:end]
    if padding_idx is not None:
        is_pooled = ids != padding_idx
        zero = torch.zeros(1, dtype=torch.int64)
        pooled_before = torch.cat([zero, is_pooled.cumsum(0)])
        ids = ids[is_pooled]
        bounds = pooled_before[bounds]
        weights = None if weights is None else weights[is_pooled]
    return Bags(ids, bounds, weights)


def _int64_input(input: Tensor) -> Tensor:
    """Returns ``input`` as int64 on the CPU, or unchanged if it is a nested tensor."""
    if not isinstance(input, Tensor) or input.dtype not in (torch.int32, torch.int64):
        kind = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"input must be an int32 or int64 tensor, got {kind}")
    return input if input.is_nested else _on_host(input)[0].to(torch.int64)


def _on_host(*tensors: Tensor | None) -> list[Any]:
    """Returns the tensors on the CPU, copied together.

    Nested tensors, and weights whose gradient or dtype needs a copy of its own, are
    returned as they are.
    """
    device_tensors = {
        number: tensor
        for number, tensor in enumerate(tensors)
        if isinstance(tensor, Tensor) and _is_copied_with_others(tensor)
    }
    results: list[Any] = list(tensors)
    if device_tensors:
        copies = to_host([tensor.reshape(-1) for tensor in device_tensors.values()])
        for number, copy in zip(device_tensors, copies, strict=True):
            results[number] = copy.view(device_tensors[number].shape)
    return results


def _is_copied_with_others(tensor: Tensor) -> bool:
    return (
        tensor.device.type != "cpu"
        and tensor.itemsize in (4, 8)
        and not tensor.is_nested
        and not tensor.requires_grad
    )


def _weights_on_host(weights: Tensor, ids: Tensor) -> Tensor:
    if not weights.is_floating_point():
        raise TypeError(
            f"per_sample_weights must be of a floating-point dtype, got {weights.dtype}"
        )
    if weights.shape != ids.shape:
        shapes = f"{tuple(ids.shape)}, got {tuple(weights.shape)}"
        raise ValueError(f"per_sample_weights must have the shape of input, {shapes}")
    return weights_to_host(weights.float())


def _bounds(
    ids: Tensor,
    offsets: Tensor | None,
    include_last_offset: bool,
) -> Tensor:
    """Returns the positions where the bags begin and where the last bag ends, (B + 1,)
    int64, on the CPU.
    """
    if ids.dim() != 1:
        raise ValueError(
            f"input must have the shape (B, L) or (N,), got {tuple(ids.shape)}"
        )
    if offsets is None:
        raise ValueError("offsets must be given if input has the shape (N,)")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"offsets must be an int32 or int64 tensor, got {offsets.dtype}"
        )
    if offsets.dim() != 1 or (include_last_offset and len(offsets) == 0):
        shape = "(B + 1,)" if include_last_offset else "(B,)"
        raise ValueError(
            f"offsets must have the shape {shape}, got {tuple(offsets.shape)}"
        )
    bounds: Tensor = _on_host(offsets)[0].to(torch.int64)
    if not include_last_offset:
        if len(bounds) == 0:
            return torch.zeros(1, dtype=torch.int64)
        bounds = torch.cat([bounds, torch.tensor([len(ids)])])
    if (
        int(bounds[0]) != 0
        or int(bounds[-1]) > len(ids)
        or not bool((bounds[1:] >= bounds[:-1]).all())
    ):
        raise ValueError(
            f"offsets must ascend from 0 to at most the {len(ids)} ids of input"
        )
    return bounds
