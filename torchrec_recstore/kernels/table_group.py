"""The base class of groups of tables: how a lookup works with autograd and in graphs.

In eager mode a lookup is one autograd function, which is the fastest way. In a graph
(``torch.compile``, ``make_fx``) it consists of the four operators at the end of this
module, which call the same methods. The rows that these operators change are not
tensors of the graph. The operators are therefore ordered effects: compilers do not
drop, repeat or reorder them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchrec_recstore import ops
from torchrec_recstore.fake_ops import PYTHON_OPS, register_python_op
from torchrec_recstore.kernels.device_copies import (
    Arriving,
    CopyTarget,
    staging,
    to_device,
    traced,
    up,
)
from torchrec_recstore.kernels.device_lookups import HostBatch, Lookups
from torchrec_recstore.kernels.device_passes import DevicePass
from torchrec_recstore.kernels.device_rows import DeviceRows
from torchrec_recstore.kernels.row_service import RemoteTable
from torchrec_recstore.store import Table
from torchrec_recstore.torch_seams import is_in_autograd_function, keeps_graph
from torchrec_recstore.utils import warn_user

_graph_handles = itertools.count(1)
_groups: weakref.WeakValueDictionary[int, TableGroup] = weakref.WeakValueDictionary()
_ops = torch.ops.recstore_ops
# the place of the per-sample weights among the inputs of _TrainingLookup and _EvaluationLookup
_WEIGHTS = 6


class TableGroup(nn.Module):
    """The base class of groups of tables, which are looked up and updated together.

    ``passes`` is the number of native passes of a training lookup.

    In all methods, ``ids``, (N,) int64, are those of a batch, ``offsets``, (F * B + 1,)
    int32 or int64, those of the bags, None if the group does not pool, ``counts`` the
    number of ids of each table, empty if it pools, and ``weights``, (N,) float32 or
    None, the per-sample weights.
    """

    learning_rate: Callable[[], float] | None
    """Returns the learning rate.

    It is called in each backward. None: each table's ``optimizer.lr``.
    """

    untrained = False
    """Whether the caller does not train the rows now, so that a backward that updates
    no row is not a mistake.
    """

    frozen = False
    """Whether the tables are frozen (``TableOptions.frozen``): every lookup is one for
    evaluation, also in training.
    """

    keeps_gradient = False
    """Whether ``update`` keeps the gradient after it has returned.

    The memory of the gradient is then not given to anyone else.
    """

    device_rows: DeviceRows | None = None
    """The rows of the group on a device, None if it has none there."""

    updates_late = True
    """Whether backward on an accelerator returns before the rows have been updated."""

    def __init__(
        self, tables: Sequence[Table] | Sequence[RemoteTable], passes: int
    ) -> None:
        super().__init__()
        self.passes = passes
        self._anchor = torch.empty(0, requires_grad=True)
        # names the tables in errors
        self._label = f"tables {', '.join(table.name for table in tables)}"
        self.frozen = _all_frozen(
            [table for table in tables if isinstance(table, Table)]
        )
        self._warned = False
        self._graph_handle = next(_graph_handles)
        _groups[self._graph_handle] = self

    def training_lookup(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Looks up a batch for training.

        Returns the output, float32, and the context for ``update``, (passes,) int64.
        The slots of the rows are not reused as long as the context lives.

        ``out``, of :meth:`output_shape`, float32, is memory for the output. A group that
        writes the output there returns ``out`` itself.
        """
        raise NotImplementedError

    def update(
        self,
        context: Tensor,
        grad: Tensor,
        weight_grads: bool,
        counts: Sequence[int] = (),
        rate: float | None = None,
    ) -> Tensor | None:
        """Updates the rows of one training lookup, whose output has the gradient
        ``grad``, float32.

        ``rate`` is the learning rate, None the current one. Returns the gradient of the
        per-sample weights, (N,) float32, or None without ``weight_grads``.
        """
        raise NotImplementedError

    def own_gradient(self, grad: Tensor) -> Tensor:
        """Returns a gradient on the host for ``update``: a copy, if ``update`` keeps it,
        because others may change the memory of the gradient of a backward.
        """
        if self.keeps_gradient and grad.dtype is torch.float32:
            return grad.clone()
        return grad

    def wait_for_updates(self) -> None:
        """Waits for updates that are carried out elsewhere, or raises the error of one."""

    def resident(
        self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int]
    ) -> AbstractContextManager[object]:
        """Brings the rows of a training step to memory, and keeps them there while the
        caller runs the step.
        """
        return nullcontext()

    def learning_rates(self, rate: float | None) -> list[float]:
        """Returns the learning rate of each table for the next update.

        They are ``rate`` unless that is None.
        """
        raise NotImplementedError

    def make_device_rows(
        self,
        lookups: Lookups,
        tables: Sequence[Table],
        device: torch.device,
        rows: Sequence[int],
    ) -> DeviceRows:
        """Gives each table of the group ``rows`` device slots on a device."""
        rates = _learning_rates_of(weakref.ref(self))
        self.device_rows = DeviceRows(lookups, tables, device, rows, rates)
        # The lock of the rows on the device must not be taken in any later call.
        self.updates_late = False
        return self.device_rows

    def trains_on_device(self) -> bool:
        """Returns whether a training lookup in eager mode, whose output goes to a
        device, is done there.
        """
        return self.device_rows is not None

    def lookup_on_device(
        self, batch: HostBatch, to: CopyTarget
    ) -> tuple[Tensor, Tensor, DevicePass | None]:
        """Looks up a batch for training.

        Returns the output and the pass of :meth:`DeviceRows.training_lookup`, and
        between them the context.
        """
        assert self.device_rows is not None
        with self.device_rows.lock:
            context = self._begin(batch)
            out, on_device = self.device_rows.training_lookup(context, batch, to)
        return out, context, on_device

    def lookup_on_host(
        self, batch: HostBatch, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Looks up a batch for training, like :meth:`training_lookup`, of a group with
        rows on a device.
        """
        assert self.device_rows is not None
        with self.device_rows.lock:
            context = self._begin(batch)
            return self.device_rows.lookup_on_host(context, batch, out), context

    def _begin(self, batch: HostBatch) -> Tensor:
        assert self.device_rows is not None
        with self.resident(batch.ids, batch.offsets, batch.counts):
            return self.device_rows.begin(batch)

    def update_on_device(
        self,
        context: Tensor,
        on_device: DevicePass,
        grad: Tensor,
        weight_grads: bool,
        counts: Sequence[int],
    ) -> Tensor | None:
        """Updates the rows of one training lookup on the device, where ``grad`` is, or
        on the host if the device cannot do it.

        Returns the gradient of the per-sample weights on the host; see :meth:`update`.
        """
        assert self.device_rows is not None
        rate = None if self.learning_rate is None else self.learning_rate()
        rates = self.learning_rates(rate)
        with self.device_rows.lock:
            updated = self.device_rows.update(
                context, on_device, grad, rates, weight_grads
            )
            if updated is not None:
                return updated.weight_gradients
            on_host = Arriving(grad).wait().float()
            return self.update(context, on_host, weight_grads, counts, rate)

    def update_later(
        self, context: Tensor, arriving: Arriving, counts: Sequence[int]
    ) -> None:
        """Calls :meth:`update` with the learning rate of now when the gradient has come.

        The update is carried out before the next call that reads or changes a table.
        """
        rate = None if self.learning_rate is None else self.learning_rate()

        def update() -> None:
            grad = arriving.wait().float()
            with ops.native_errors(self._label):
                self.update(context, grad, False, counts, rate)

        ops.waiting_updates.append(update)

    def evaluation_lookup(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Looks up a batch for evaluation, and returns the output, float32.

        For ``out`` see :meth:`training_lookup`.
        """
        raise NotImplementedError

    def weight_gradients(
        self, ids: Tensor, offsets: Tensor | None, grad: Tensor
    ) -> Tensor:
        """Returns the gradient of the per-sample weights of an evaluation lookup, (N,)
        float32, with the rows of now.

        ``grad``, float32, is the gradient of the lookup's output.
        """
        raise NotImplementedError

    def read_backward(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        grad: Tensor,
        *,
        warns: bool,
        weight_grads: bool,
    ) -> Tensor | None:
        """The backward of an evaluation lookup, which updates no row.

        It may warn of that, once for each group.

        Returns :meth:`weight_gradients`, or None without ``weight_grads``.
        """
        if warns and not self._warned and not self.frozen:
            self._warned = True
            warn_user(
                f"{self._label}: backward of a lookup in evaluation mode updates no row,"
                " although TorchRec's own tables are updated in this mode: call"
                " train() of the model before a training step"
            )
        if not weight_grads:
            return None
        ops.finish_updates()
        with ops.native_errors(self._label):
            return self.weight_gradients(ids, offsets, grad)

    def output_shape(
        self, offsets: Tensor | None, counts: Sequence[int]
    ) -> tuple[int, ...]:
        """Returns the shape of the output. Its sizes may be symbolic."""
        raise NotImplementedError

    def _run(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        train: bool,
        to: CopyTarget | None,
    ) -> Tensor:
        has_grad = torch.is_grad_enabled()
        is_training = train and not self.frozen
        # The evaluation lookup of a group that is trained warns in its backward.
        anchor = self._anchor if has_grad and not self.untrained else None
        if traced():
            if is_training and has_grad:
                out = _ops.graph_lookup(
                    self._graph_handle, self._anchor, ids, offsets, counts, weights
                )[0]
            else:
                out = _ops.graph_read(
                    self._graph_handle, anchor, ids, offsets, counts, weights
                )
            return out if to is None else to_device(out, to)
        ops.finish_updates()
        with ops.native_errors(self._label):
            if is_training and has_grad:
                return _apply_training(
                    self._anchor, self, to, ids, offsets, counts, weights
                )
            if is_training:
                _refuse_reentrant_checkpoint(self._label)
            if has_grad:
                return _apply_evaluation(
                    anchor, self, to, ids, offsets, counts, weights
                )
            return _evaluated(self, to, ids, offsets, counts, weights)


def _learning_rates_of(
    group: weakref.ref[TableGroup],
) -> Callable[[], Sequence[float]]:
    """Returns a function that returns the learning rates of a group, and does not keep
    the group.
    """

    def learning_rates() -> Sequence[float]:
        group_now = group()
        assert group_now is not None
        return group_now.learning_rates(None)

    return learning_rates


def _all_frozen(tables: Sequence[Table]) -> bool:
    """Returns whether the tables are frozen.

    Raises ValueError, which names two tables, if only some of them are.
    """
    frozen = [table.name for table in tables if table.options.frozen]
    trained = [table.name for table in tables if not table.options.frozen]
    if frozen and trained:
        raise ValueError(
            f"table {frozen[0]!r} is frozen, and table {trained[0]!r} is not: use a"
            " group for each of them"
        )
    return bool(frozen)


def _evaluated(
    group: TableGroup,
    to: CopyTarget | None,
    ids: Tensor,
    offsets: Tensor | None,
    counts: Sequence[int],
    weights: Tensor | None,
) -> Tensor:
    """Returns the output of an evaluation lookup, on the device of ``to``."""
    if to is None:
        return group.evaluation_lookup(ids, offsets, counts, weights)
    if group.device_rows is not None:
        batch = HostBatch(ids, offsets, counts, weights)
        out = group.device_rows.evaluation_lookup(batch, to)
        if out is not None:
            return out
    staged = staging(group.output_shape(offsets, counts), to)
    out = group.evaluation_lookup(ids, offsets, counts, weights, staged)
    return up(out, to, staged=staged)


class _TrainingLookup(torch.autograd.Function):
    """A training lookup in eager mode.

    The backward updates the rows, and returns the gradient of the weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        group: TableGroup,
        to: CopyTarget | None,
        *batch: Any,
    ) -> Tensor:
        ids, offsets, counts, weights = batch
        ctx.on_device = None
        if to is not None and group.trains_on_device():
            batch_on_host = HostBatch(ids, offsets, counts, weights)
            out, context, ctx.on_device = group.lookup_on_device(batch_on_host, to)
        else:
            staged = None
            if to is not None:
                staged = staging(group.output_shape(offsets, counts), to)
            out, context = group.training_lookup(ids, offsets, counts, weights, staged)
            if to is not None:
                out = up(out, to, staged=staged)
        # The backward reads the weights again. They are saved, so that autograd raises
        # if they are changed in place.
        ctx.save_for_backward(weights)
        # The context is not saved for backward: a saved-tensor hook could replace it by
        # a copy, and the native pass lives only as long as this tensor.
        ctx.group = group
        ctx.counts = counts
        ctx.context = context
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Grad is enabled if the backward itself may be differentiated, which raises.
        # Otherwise the decorator would do nothing, and it takes a tenth of the backward
        # of a small batch.
        if not torch.is_grad_enabled():
            return _TrainingLookup._update(ctx, *grads)
        return once_differentiable(_TrainingLookup._update)(ctx, *grads)

    @staticmethod
    def _update(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # raises if the weights have been changed or the graph has been freed
        _ = ctx.saved_tensors
        group = ctx.group
        context = ctx.context
        # The context is freed when autograd frees saved tensors.
        if not keeps_graph():
            ctx.context = None
        grad = grads[0]
        weight_grads = ctx.needs_input_grad[_WEIGHTS]
        if ctx.on_device is not None:
            ops.finish_updates()
            with ops.native_errors(group._label):
                grad_weights = group.update_on_device(
                    context, ctx.on_device, grad, weight_grads, ctx.counts
                )
            return None, None, None, None, None, None, grad_weights
        if not grad.is_cpu:
            arriving = Arriving(grad, beside_current=True)
            if group.updates_late and not weight_grads:
                group.update_later(context, arriving, ctx.counts)
                return (None,) * 7
            grad = arriving.wait()
        else:
            grad = group.own_gradient(grad)
        ops.finish_updates()
        with ops.native_errors(group._label):
            grad = grad if grad.dtype is torch.float32 else grad.float()
            grad_weights = group.update(context, grad, weight_grads, ctx.counts)
        return None, None, None, None, None, None, grad_weights


class _EvaluationLookup(torch.autograd.Function):
    """An evaluation lookup in eager mode, while grad is enabled.

    See ``TableGroup.read_backward``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor | None,
        group: TableGroup,
        to: CopyTarget | None,
        *batch: Any,
    ) -> Tensor:
        ids, offsets, counts, weights = batch
        ctx.group = group
        if ctx.needs_input_grad[_WEIGHTS]:
            ctx.save_for_backward(ids, offsets)
        return _evaluated(group, to, ids, offsets, counts, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        warns = ctx.needs_input_grad[0]
        weight_grads = ctx.needs_input_grad[_WEIGHTS]
        grad = grads[0]
        # without weight_grads, no tensor is read
        ids = grad
        offsets = None
        if weight_grads:
            ids, offsets = ctx.saved_tensors
            grad = grad.to("cpu", torch.float32)
        grad_weights = ctx.group.read_backward(
            ids, offsets, grad, warns=warns, weight_grads=weight_grads
        )
        return None, None, None, None, None, None, grad_weights


_apply_training: Callable[..., Tensor] = _TrainingLookup.apply
_apply_evaluation: Callable[..., Tensor] = _EvaluationLookup.apply


def _refuse_reentrant_checkpoint(label: str) -> None:
    """Raises in the first forward of a reentrant checkpoint: it runs without grad,
    although it is a training step. So does the forward of each autograd function.
    """
    if is_in_autograd_function():
        raise RuntimeError(
            f"{label}: a reentrant checkpoint runs its first forward without grad, so"
            " that ids without a row do not get one: use"
            " torch.utils.checkpoint.checkpoint(..., use_reentrant=False); another"
            " autograd function has to get the rows as an argument"
        )


def _group_of(handle: int) -> TableGroup:
    group = _groups.get(handle)
    if group is None:
        raise ValueError(
            f"no group of this process has the handle {handle}: a graph with RecStore"
            " tables runs only in the process that made it, and only as long as its"
            " model lives; use export_for_inference for other processes"
        )
    return group


# The implementations of the operators, and their fake versions.


def _lookup(handle: int, anchor: Tensor, *batch: Any) -> tuple[Tensor, Tensor]:
    group = _group_of(handle)
    ids, offsets, counts, weights = batch
    # The backward reads ids and weights again, and a compiled graph may reuse their
    # memory before the backward.
    ops.finish_updates()
    ids = ids.clone()
    weights = None if weights is None else weights.clone()
    with ops.native_errors(group._label):
        return group.training_lookup(ids, offsets, counts, weights)


def _fake_lookup(
    handle: int, anchor: Tensor, ids: Tensor, *batch: Any
) -> tuple[Tensor, Tensor]:
    out = _fake_read(handle, anchor, ids, *batch)
    context = ids.new_empty(_group_of(handle).passes)
    return out, context


def _update(
    handle: int,
    context: Tensor,
    grad: Tensor,
    counts: Sequence[int],
    weight_grads: int | None,
) -> Tensor:
    group = _group_of(handle)
    grad = group.own_gradient(grad)
    ops.finish_updates()
    with ops.native_errors(group._label):
        grad_weights = group.update(context, grad, weight_grads is not None, counts)
    return grad.new_empty(0) if grad_weights is None else grad_weights


def _read(handle: int, anchor: Tensor | None, *batch: Any) -> Tensor:
    group = _group_of(handle)
    ops.finish_updates()
    with ops.native_errors(group._label):
        return group.evaluation_lookup(*batch)


def _fake_read(
    handle: int,
    anchor: Tensor | None,
    ids: Tensor,
    offsets: Tensor | None,
    counts: Sequence[int],
    weights: Any,
) -> Tensor:
    group = _group_of(handle)
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            f"{group._label}: torch.export cannot hold the rows of RecStore tables in"
            " its program: export the model that"
            " torchrec_recstore.inference.export_for_inference returns"
        )
    return ids.new_empty(group.output_shape(offsets, counts), dtype=torch.float32)


def _read_backward(
    handle: int,
    ids: Tensor,
    offsets: Tensor | None,
    grad: Tensor,
    warns: bool,
    weight_grads: int | None,
) -> Tensor:
    group = _group_of(handle)
    grad_weights = group.read_backward(
        ids, offsets, grad, warns=warns, weight_grads=weight_grads is not None
    )
    return grad.new_empty(0) if grad_weights is None else grad_weights


def _fake_weight_gradients(handle: int, values: Tensor, *arguments: Any) -> Tensor:
    weight_grads = arguments[-1]
    weight_count = 0 if weight_grads is None else weight_grads
    return values.new_empty(weight_count, dtype=torch.float32)


def _keep_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    _keep_for_read_backward(ctx, inputs, output)
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    weight_grads = ctx.weight_count if ctx.needs_input_grad[5] else None
    grad_weights = _ops.graph_update(
        ctx.handle, ctx.saved_tensors[0], grad, ctx.counts, weight_grads
    )
    return None, None, None, None, None, None if weight_grads is None else grad_weights


def _keep_for_read_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.handle, _, ids, offsets, ctx.counts, weights = inputs
    ctx.weight_count = None if weights is None else weights.shape[0]
    ctx.save_for_backward(ids, offsets)


def _backward_of_read(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight_grads = ctx.weight_count if ctx.needs_input_grad[5] else None
    ids, offsets = ctx.saved_tensors
    warns = ctx.needs_input_grad[1]
    grad_weights = _ops.graph_read_backward(
        ctx.handle, ids, offsets, grad, warns, weight_grads
    )
    return None, None, None, None, None, None if weight_grads is None else grad_weights


# A training lookup returns its output and the context of its backward. weight_grads is
# the number of per-sample weights, or None if the weights need no gradient.
_BATCH = "Tensor ids, Tensor? offsets, SymInt[] counts, Tensor? weights"
register_python_op(
    f"graph_lookup(int group, Tensor anchor, {_BATCH}) -> (Tensor, Tensor)",
    _lookup,
    _fake_lookup,
)
register_python_op(
    "graph_update(int group, Tensor context, Tensor grad, SymInt[] counts, SymInt?"
    " weight_grads) -> Tensor",
    _update,
    _fake_weight_gradients,
)
register_python_op(
    f"graph_read(int group, Tensor? anchor, {_BATCH}) -> Tensor", _read, _fake_read
)
register_python_op(
    "graph_read_backward(int group, Tensor ids, Tensor? offsets, Tensor grad, bool"
    " warns, SymInt? weight_grads) -> Tensor",
    _read_backward,
    _fake_weight_gradients,
)
torch.library.register_autograd(
    "recstore_ops::graph_lookup",
    _backward,
    setup_context=_keep_for_backward,
    lib=PYTHON_OPS,
)
torch.library.register_autograd(
    "recstore_ops::graph_read",
    _backward_of_read,
    setup_context=_keep_for_read_backward,
    lib=PYTHON_OPS,
)
