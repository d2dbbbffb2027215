"""The group that pools, its cold rows, and the gradients of per-sample weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple
from typing import Literal

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.kernels.device_lookups import BagLookups, HostBatch
from torchrec_recstore.kernels.routing import BlockRouting, one_routing_each
from torchrec_recstore.kernels.table_group import TableGroup
from torchrec_recstore.options import check_int
from torchrec_recstore.store import Table
from torchrec_recstore.store.cold_tier import ColdTier
from torchrec_recstore.store.memory_tier import holding


class PooledGroup(TableGroup):
    """A group of tables whose rows are pooled by bag.

    Forward is one native call, and so is backward.

    Symbols: ``F`` is the number of features, ``B`` the batch size, ``N`` the number of
    ids in the batch.

    Args:
        tables: The tables of the group.
        feature_tables: The index of each feature's table in ``tables``, in the order of
            the features in the batch.
        pooling: The way in which the rows of a bag are pooled.
        routings: For each table, the mapping that TorchRec's input distribution has
            applied to its ids. An entry is None if its ids are raw ids. Default: None,
            which means that all ids are raw ids.
        accumulation_steps: The number of backward passes after which the rows are
            updated, once, with the sum of the gradients and the learning rate of the
            last pass. Until then, lookups read the rows unchanged. A forward without a
            backward does not count. Default: 1.

    Raises:
        ValueError: An argument has an invalid value or does not fit the other
            arguments.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        feature_tables: Sequence[int],
        pooling: Literal["sum", "mean"],
        *,
        routings: Sequence[BlockRouting | None] | None = None,
        accumulation_steps: int = 1,
    ) -> None:
        super().__init__(tables, 1)
        if pooling not in ("sum", "mean"):
            raise ValueError(f"pooling must be 'sum' or 'mean', got {pooling!r}")
        routings = one_routing_each(tables, routings)
        check_int("accumulation_steps", accumulation_steps, 1)
        self.tables = list(tables)
        self.accumulation_steps = accumulation_steps
        # context and gradient of each pass before the next update
        self._pending: list[tuple[Tensor, Tensor]] = []
        if accumulation_steps > 1:
            self.keeps_gradient = True
            for table in self.tables:
                table.pending_passes = self._pending
        self.learning_rate = None
        self.rows_lock: AbstractContextManager[object] = nullcontext()
        """Keeps rows from moving while they are copied to a device."""
        routing_numbers = [
            (0, 0, 0, False) if routing is None else astuple(routing)
            for routing in routings
        ]
        self.handle = ops.group_create(
            [table.handle for table in self.tables],
            feature_tables,
            routing_numbers,
            pooling == "mean",
        )
        """The handle of the native group, for other lookups of the same tables.

        It is valid as long as this object.
        """
        self._free = weakref.finalize(self, ops.group_destroy, self.handle)
        self.cold_rows = ColdRows(self.tables, self.handle)
        self._features = len(feature_tables)
        self._feature_tables = list(feature_tables)
        self._pooling: Literal["sum", "mean"] = pooling
        self._columns = sum(
            len(self.tables[number].columns) for number in feature_tables
        )

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        train: bool,
        to: CopyTarget | None = None,
    ) -> Tensor:
        """Looks up a batch and pools it.

        Args:
            ids: (N,) int64, feature by feature. The ids of the batch.
            offsets: (F * B + 1,) int32 or int64. The position in ``ids`` where each bag
                begins, and N at the end.
            weights: (N,) float32. The per-sample weights. Their gradient is computed if
                they require one. Default: None.
            train: Whether the lookup is a training step. If it is, and grad is enabled,
                each id without a row gets one, and the backward updates the rows.
                Otherwise nothing changes, and a backward warns once, unless
                ``untrained`` is set.
            to: The device and the data type of the output. The gradient of the output
                is then copied from this device, and the rows are updated before the
                next call that reads or changes a table. Default: None, the host and
                float32.

        Returns:
            (B, sum of the features' columns) float32, for rows of every data type, or
            of the dtype of ``to``.

        Raises:
            TypeError: A tensor has the wrong dtype. The message names the tensor.
            ValueError: A tensor has the wrong shape, the offsets do not ascend, a table
                is closed, or the batch needs more rows of a table at once than its
                ``max_rows``.
            ColdStoreError: A cold store fails. Every row is where it was before the
                call.
            MemoryError: There is no memory for the new rows. Nothing has changed.
        """
        self.check(ids, offsets, weights)
        return self._run(ids, offsets, (), weights, train, to)

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Prepares a batch for its training forward: creates missing rows, resolves ids
        to slots and reads cold rows. Rows that the device does not have are copied
        there, beside the kernels of the current stream.

        It may run in a separate thread while other calls run. It creates no rows in
        tables with ``max_rows`` or ``admission``, and does nothing if the tables are
        frozen.

        The group keeps a copy of the ids and their slots, 12 bytes for each id. The
        next training forward of the same ids takes the slots, and does not look them up
        again. The slots do not pin the rows: the forward looks up the ids whose rows
        have been evicted, removed or moved since. The group keeps the four newest
        batches. It frees a batch when a later one is used, or when four training
        forwards have not used it.

        Args:
            ids: (N,) int64, feature by feature. The ids of the batch.
            counts: The number of ids of each feature.

        Raises:
            TypeError, ValueError, MemoryError, ColdStoreError: See :meth:`forward`.
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        if self.frozen:
            return
        ops.finish_updates()
        with ops.native_errors(self._label):
            with self.rows_lock:
                ops.group_prefetch(self.handle, ids, counts)
                # Updates that are accumulated run on the host.
                if self.device_rows is not None and self.accumulation_steps == 1:
                    self.device_rows.prefetch()
            self.cold_rows.prefetch(ids, counts)

    def check(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
        """Raises TypeError if an argument of :meth:`forward` has the wrong dtype.

        The message names the argument.
        """
        if ids.dtype is not torch.int64:
            raise TypeError(f"ids must be int64, got {ids.dtype}")
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"offsets must be int32 or int64, got {offsets.dtype}")
        if weights is not None and weights.dtype is not torch.float32:
            raise TypeError(f"weights must be float32, got {weights.dtype}")

    def training_lookup(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``TableGroup.training_lookup``."""
        assert offsets is not None
        if self.device_rows is not None:
            return self.lookup_on_host(HostBatch(ids, offsets, counts, weights), out)
        if not self.cold_rows.tiers:
            return self._lookup(ids, offsets, weights, True, out)
        with self.cold_rows.resident(ids, offsets):
            return self._lookup(ids, offsets, weights, True, out)

    def evaluation_lookup(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        counts: Sequence[int],
        weights: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``TableGroup.evaluation_lookup``."""
        assert offsets is not None
        if self.device_rows is None:
            return self._read(ids, offsets, weights, out)
        batch = HostBatch(ids, offsets, counts, weights)
        with self.device_rows.settled_batch(batch):
            return self._read(ids, offsets, weights, out)

    def _read(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """Returns the output of an evaluation lookup on the host."""
        if self.cold_rows.tiers:
            return self.cold_rows.read(ids, offsets, weights)
        return self._lookup(ids, offsets, weights, False, out)[0]

    def resident(
        self, ids: Tensor, offsets: Tensor | None, counts: Sequence[int]
    ) -> AbstractContextManager[object]:
        """See ``TableGroup.resident``."""
        return self.cold_rows.resident(ids, offsets)

    def trains_on_device(self) -> bool:
        """See ``TableGroup.trains_on_device``. Gradients are accumulated on the host."""
        return self.accumulation_steps == 1 and super().trains_on_device()

    def _lookup(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        train: bool,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, which is ``out`` unless that is None, and the context."""
        if out is None:
            return ops.group_forward(self.handle, ids, offsets, weights, train)
        context = ops.group_forward_into(self.handle, ids, offsets, weights, train, out)
        return out, context

    def weight_gradients(
        self, ids: Tensor, offsets: Tensor | None, grad: Tensor
    ) -> Tensor:
        """See ``TableGroup.weight_gradients``."""
        ids_of_tables = ops.group_table_ids(self.handle, ids, offsets)
        rows = [
            table.lookup(table_ids)
            for table, table_ids in zip(self.tables, ids_of_tables, strict=True)
        ]
        return self.weight_gradients_of(rows, offsets, grad)

    def weight_gradients_of(
        self, rows: Sequence[Tensor], offsets: Tensor | None, grad: Tensor
    ) -> Tensor:
        """Returns the gradient of per-sample weights, (N,) float32.

        See :func:`weight_gradients` for the arguments.
        """
        assert offsets is not None
        return weight_gradients(
            rows, self._feature_tables, self._pooling, offsets, grad
        )

    def output_shape(
        self, offsets: Tensor | None, counts: Sequence[int]
    ) -> tuple[int, ...]:
        """See ``TableGroup.output_shape``."""
        assert offsets is not None
        return (offsets.shape[0] - 1) // max(self._features, 1), self._columns

    def update(
        self,
        context: Tensor,
        grad: Tensor,
        weight_grads: bool,
        counts: Sequence[int] = (),
        rate: float | None = None,
    ) -> Tensor | None:
        """See ``TableGroup.update``.

        With ``accumulation_steps`` above 1, most calls only keep the gradient.
        """
        if self.device_rows is None:
            return self._update(context, grad, weight_grads, rate)
        with self.device_rows.lock:
            self.device_rows.settle_pass(context)
            for pending, _ in self._pending:
                self.device_rows.settle_pass(pending)
            return self._update(context, grad, weight_grads, rate)

    def _update(
        self, context: Tensor, grad: Tensor, weight_grads: bool, rate: float | None
    ) -> Tensor | None:
        grad_weights: Tensor | None
        if self.accumulation_steps == 1:
            grad_weights = ops.group_backward(
                context, grad, self.learning_rates(rate), weight_grads
            )
            return grad_weights if weight_grads else None
        # The gradient of the weights depends on the rows of the forward, so it is
        # computed before the update.
        grad_weights = None
        if weight_grads:
            grad_weights = ops.group_weight_gradients(context, grad)
        self._pending.append((context, grad))
        if len(self._pending) == self.accumulation_steps:
            contexts = [context for context, _ in self._pending]
            grads = [grad for _, grad in self._pending]
            self._pending.clear()
            ops.group_accumulated_backward(contexts, grads, self.learning_rates(rate))
        return grad_weights

    def put_on_device(self, device: torch.device, rows: Sequence[int]) -> None:
        """Gives each table ``rows`` device slots on a device, before the first lookup.

        Raises:
            ValueError: The rows of a table cannot be on a device. The message names the
                table and the option.
        """
        lookups = BagLookups(
            self.handle, self.tables, self._feature_tables, self._pooling == "mean"
        )
        self.rows_lock = self.make_device_rows(lookups, self.tables, device, rows).lock

    def learning_rates(self, rate: float | None) -> list[float]:
        """See ``TableGroup.learning_rates``."""
        if rate is None and self.learning_rate is not None:
            rate = self.learning_rate()
        if rate is not None:
            return [rate] * len(self.tables)
        return [table.optimizer.lr for table in self.tables]


class ColdRows:
    """The rows of a group of tables that are in cold stores.

    In all methods, ``ids``, (N,) int64, are those of a batch, as they are passed to the
    native group, and ``offsets``, (F * B + 1,) int32 or int64, are None if the group
    does not pool.
    """

    def __init__(self, tables: Sequence[Table], group: int) -> None:
        self._tables = tables
        self._group = group
        self.tiers = [
            table.tier for table in tables if isinstance(table.tier, ColdTier)
        ]

    @contextmanager
    def resident(self, ids: Tensor, offsets: Tensor | None) -> Iterator[None]:
        """Brings the rows of a training step to memory, and keeps them there while the
        caller runs the step.
        """
        with holding(self.tiers):
            if self.tiers:
                ids_of_tables = ops.group_table_ids(self._group, ids, offsets)
                for table, table_ids in zip(self._tables, ids_of_tables, strict=True):
                    table.tier.bring(table_ids, "lookup")
            yield
            for tier in self.tiers:
                tier.end_step()

    def read(
        self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """Looks up a batch for evaluation, with the per-sample weights.

        Cold rows stay in their cold store.

        Returns the pooled rows, (B, columns) float32, or (N, columns) if ``offsets`` is
        None.
        """
        with holding(self.tiers):
            ids_of_tables = ops.group_table_ids(self._group, ids, offsets)
            cold_ids = []
            images = []
            for table, table_ids in zip(self._tables, ids_of_tables, strict=True):
                table_cold_ids, table_images = table.tier.read(table_ids)
                cold_ids.append(table_cold_ids)
                images.append(table_images)
            return ops.group_read(self._group, ids, offsets, weights, cold_ids, images)

    def prefetch(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Reads the cold rows of a coming batch with ``counts`` ids of each feature, so
        that its lookup is fast.
        """
        if not self.tiers:
            return
        offsets = torch.tensor([0, *counts]).cumsum(0)
        ids_of_tables = ops.group_table_ids(self._group, ids, offsets)
        for table, table_ids in zip(self._tables, ids_of_tables, strict=True):
            table.tier.prefetch(table_ids)


def weight_gradients(
    rows: Sequence[Tensor],
    feature_tables: Sequence[int],
    pooling: Literal["sum", "mean"],
    offsets: Tensor,
    grad: Tensor,
) -> Tensor:
    """Returns the gradient of the per-sample weights of a pooled lookup, (N,) float32.

    ``rows`` are those of each table's ids, (n, columns), feature by feature.
    ``feature_tables`` is the index of each feature's table in ``rows``. ``offsets``, (F
    * B + 1,), are where each bag begins, and N. ``grad``, (B, sum of the features'
    columns) float32, is the gradient of the lookup's output.
    """
    bags = grad.shape[0]
    dims = [rows[table].shape[1] for table in feature_tables]
    grads_of_features = torch.split(grad, dims, dim=1)
    first_rows = [0] * len(rows)  # of the next feature of each table
    parts = [grad.new_empty(0)]
    for number, table in enumerate(feature_tables):
        first_bag = number * bags
        feature_offsets = offsets[first_bag : first_bag + bags + 1]
        first = first_rows[table]
        end = first + int(feature_offsets[-1] - feature_offsets[0])
        first_rows[table] = end
        grads_of_bags = grads_of_features[number]
        scales = bag_scales(feature_offsets, pooling)
        if scales is not None:
            grads_of_bags = grads_of_bags * scales[:, None]
        grads_of_ids = grads_of_bags[bag_of(feature_offsets)]
        rows_of_ids = rows[table][first:end].float()
        parts.append((rows_of_ids * grads_of_ids).sum(1))
    return torch.cat(parts)


def bag_scales(offsets: Tensor, pooling: Literal["sum", "mean"]) -> Tensor | None:
    """Returns the factor of each bag's sum, (bags,) float32: 1 / length for a mean.

    Returns None for a sum.
    """
    if pooling == "sum":
        return None
    lengths = offsets[1:] - offsets[:-1]
    return 1.0 / lengths.clamp(min=1).float()


def bag_of(offsets: Tensor) -> Tensor:
    """Returns the bag of each id, (n,) int64, for bags that begin at ``offsets``."""
    lengths = offsets[1:] - offsets[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)
