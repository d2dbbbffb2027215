"""The groups of eager modules, and backward passes that only collect gradients.

Tests: tests/modules/test_embedding_bag.py, tests/modules/test_compile.py,
tests/device/test_eager_rows.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.kernels.device_copies import CopyTarget, traced
from torchrec_recstore.kernels.device_placement import put_asked_rows_on_device
from torchrec_recstore.kernels.pooled_group import bag_of, bag_scales
from torchrec_recstore.modules.table_module import RemoteTableModule, TableModule
from torchrec_recstore.table_parameter import are_trained
from torchrec_recstore.torch_seams import is_in_data_parallel

Pooling = Literal["sum", "mean"]

EagerTable = TableModule | RemoteTableModule
"""A module with one table: in this process, or of a client."""

_Group = TypeVar("_Group", PooledGroup, SequenceGroup)

_REASON = (
    "the rows of eager RecStore modules are looked up outside of compiled graphs; shard"
    " the model with RecStoreSharder to compile it as one graph"
)


@dataclass(frozen=True)
class Bags:
    """The bags of ``F`` features with ``B`` bags each, feature by feature, on the CPU.

    ``ids`` are (N,) int64; ``offsets``, (F * B + 1,) int64, are the positions where
    bags begin, and N; the per-sample ``weights`` are (N,) float32.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None = None


class EagerGroups:
    """The groups by which a module looks up its tables.

    A group is made when a call first needs it. If its tables have ``device_rows``, the
    first lookup of a batch on a device puts their rows there. The group then lives as
    long as the tables.

    In all lookups, ``to`` is the device and the data type of the output, None if the
    batch is on the CPU. Without rows on this device, the output stays on the CPU in
    float32, and the caller copies it.

    Copies and pickles of the module start without groups.
    """

    def __init__(self) -> None:
        self._groups: dict[object, PooledGroup | SequenceGroup] = {}
        self._on_device: weakref.WeakValueDictionary[
            object, PooledGroup | SequenceGroup
        ] = weakref.WeakValueDictionary()
        self._handles: dict[int, int] = {}
        self._anchor = torch.empty(0, requires_grad=True)

    def __reduce__(self) -> tuple[type[EagerGroups], tuple[()]]:
        return EagerGroups, ()

    def clear(self) -> None:
        """Removes all groups, and with them the references to the tables.

        A group with rows on a device is used again as long as its tables live.
        """
        self._groups.clear()
        self._handles.clear()

    def bags(
        self,
        tables: Sequence[EagerTable],
        feature_tables: Sequence[int],
        pooling: Pooling,
        bags: Bags,
        *,
        train: bool,
        to: CopyTarget | None = None,
    ) -> Tensor:
        """Returns the pooled rows of bags, (B, sum of the features' columns), by one
        native call.

        ``feature_tables`` are the positions in ``tables`` of the features' tables. If
        ``train``, and gradients are enabled, the lookup makes missing rows and backward
        trains them. Per-sample weights that require a gradient get one in evaluation,
        too.
        """
        if torch.compiler.is_dynamo_compiling():
            return _outside_the_graph(  # type: ignore[no-any-return]
                self.bags,
                tables,
                feature_tables,
                pooling,
                bags,
                train=train,
                to=to,
            )
        trains_rows = train and torch.is_grad_enabled()
        if trains_rows:
            _check_training(tables)
        group = self._pooled_group(tables, feature_tables, pooling, to)
        # The group refuses a training lookup whose grad is disabled by a reentrant
        # checkpoint.
        out: Tensor = group(
            bags.ids,
            bags.offsets,
            bags.weights,
            train=train,
            to=_target(group, to),
        )
        if not trains_rows or tables[0].fused:
            return out
        features = [tables[number] for number in feature_tables]
        collect = partial(_collect_bags, features, pooling)
        return _Collect.apply(  # type: ignore[no-any-return, no-untyped-call]
            self._anchor,
            out,
            collect,
            bags.ids,
            bags.offsets,
            bags.weights,
        )

    def rows(
        self,
        tables: Sequence[EagerTable],
        ids: Tensor,
        counts: Sequence[int],
        *,
        train: bool,
        to: CopyTarget | None = None,
    ) -> list[Tensor]:
        """Returns each table's rows, (its number of ids, dim), in the order of its ids,
        by one native call.

        ``ids`` are (N,) int64, on the CPU, table by table; ``counts`` are the numbers
        of ids of the tables. See :meth:`bags` for ``tables`` and ``train``.
        """
        if torch.compiler.is_dynamo_compiling():
            return _outside_the_graph(  # type: ignore[no-any-return]
                self.rows,
                tables,
                ids,
                counts,
                train=train,
                to=to,
            )
        trains_rows = train and torch.is_grad_enabled()
        if trains_rows:
            _check_training(tables)
        group = self._sequence_group(tables, to)
        out: Tensor = group(
            ids,
            counts,
            train=train,
            to=_target(group, to),
        )
        if trains_rows and not tables[0].fused:
            collect = partial(_collect_rows, list(tables), list(counts))
            out = _Collect.apply(self._anchor, out.detach(), collect, ids)  # type: ignore[no-untyped-call]
        rows = []
        first = 0
        for module, count in zip(tables, counts, strict=True):
            end = first + count * module.table.dim
            # The rows are slices because autograd forbids in-place changes of the
            # results of torch.split.
            rows.append(out[first:end].view(count, module.table.dim))
            first = end
        return rows

    def prefetch_bags(
        self,
        tables: Sequence[EagerTable],
        feature_tables: Sequence[int],
        pooling: Pooling,
        bags: Bags,
        *,
        to: CopyTarget | None = None,
    ) -> None:
        """Prepares a batch for :meth:`bags`, with the same arguments."""
        features = [tables[number] for number in feature_tables]
        counts = []
        for _, first, end in _parts(features, bags.offsets):
            counts.append(end - first)
        group = self._pooled_group(tables, feature_tables, pooling, to)
        group.prefetch(bags.ids, counts)

    def prefetch_rows(
        self,
        tables: Sequence[EagerTable],
        ids: Tensor,
        counts: Sequence[int],
        *,
        to: CopyTarget | None = None,
    ) -> None:
        """Prepares a batch for :meth:`rows`, with the same arguments."""
        self._sequence_group(tables, to).prefetch(ids, counts)

    def _pooled_group(
        self,
        tables: Sequence[EagerTable],
        feature_tables: Sequence[int],
        pooling: Pooling,
        to: CopyTarget | None,
    ) -> PooledGroup:
        key = (
            tables[0].fused,
            pooling,
            *feature_tables,
            *map(id, tables),
        )
        make_group: Callable[..., PooledGroup]
        if isinstance(tables[0], RemoteTableModule):
            make_group = tables[0].client.pooled_group
        elif tables[0].fused:
            make_group = PooledGroup
        else:
            make_group = _PooledWithoutUpdate
        return self._group(
            key,
            tables,
            lambda group_tables: make_group(group_tables, feature_tables, pooling),
            to,
        )

    def _sequence_group(
        self,
        tables: Sequence[EagerTable],
        to: CopyTarget | None,
    ) -> SequenceGroup:
        make_group: Callable[[list[Any]], SequenceGroup] = SequenceGroup
        if isinstance(tables[0], RemoteTableModule):
            make_group = tables[0].client.sequence_group
        return self._group(
            tuple(map(id, tables)),
            tables,
            make_group,
            to,
        )

    def _group(
        self,
        key: object,
        modules: Sequence[EagerTable],
        make_group: Callable[[list[Any]], _Group],
        to: CopyTarget | None,
    ) -> _Group:
        tables = [module.table for module in modules]
        handles = {
            id(module): table.handle
            for module, table in zip(modules, tables, strict=True)
        }
        for module, handle in handles.items():
            if self._handles.get(module, handle) != handle:
                # A module's table was replaced, and a group would keep the old table.
                self.clear()
                break
        self._handles |= handles
        group = self._groups.get(key)
        if group is None:
            group = self._on_device.get(key)
            if group is None or group.tables != tables:
                group = make_group(tables)
                group.learning_rate = modules[0].rate
            self._groups[key] = group
        if isinstance(modules[0], TableModule):
            _check_has_rows(group)
            if to is not None and group.device_rows is None and not traced():
                self._put_on_device(key, group, modules, to.device)
        (trains,) = are_trained([modules[0].weight])
        # to set an attribute of a module takes a microsecond
        if group.untrained is trains:
            group.untrained = not group.untrained
        return group  # type: ignore[return-value]

    def _put_on_device(
        self,
        key: object,
        group: PooledGroup | SequenceGroup,
        modules: Sequence[EagerTable],
        device: torch.device,
    ) -> None:
        """Puts rows on a device if the options of the tables have ``device_rows``."""
        if not modules[0].has_device_rows:
            return
        _check_fused(modules)
        put_asked_rows_on_device(group, group.tables, device)
        if group.device_rows is not None:
            # The tables cannot have rows on a device by another group.
            group.device_rows.group = group
            self._on_device[key] = group


def _target(
    group: PooledGroup | SequenceGroup,
    to: CopyTarget | None,
) -> CopyTarget | None:
    """Returns ``to`` if the group has rows on this device, None if it has none."""
    if to is None or group.device_rows is None:
        return None
    return to if group.device_rows.device == to.device else None


# Lookups stay outside of compiled graphs, because load_state_dict() replaces the tables
# that the group depends on, and because modules with fused=False collect gradients in
# Python.
@torch.compiler.disable(reason=_REASON)  # type: ignore[no-untyped-call, untyped-decorator]
def _outside_the_graph(
    look_up: Callable[..., Any],
    *args: Any,
    train: bool,
    to: CopyTarget | None,
) -> Any:
    return look_up(*args, train=train, to=to)


class _PooledWithoutUpdate(PooledGroup):
    """A pooled group whose backward computes the gradients of per-sample weights and
    does not update the rows.
    """

    def update(
        self,
        context: Tensor,
        grad: Tensor,
        weight_grads: bool,
        counts: Sequence[int] = (),
        rate: float | None = None,
    ) -> Tensor | None:
        return ops.group_weight_gradients(context, grad) if weight_grads else None


class _Collect(torch.autograd.Function):
    """Returns rows unchanged in forward.

    Backward passes their gradient, and the tensors ``saved``, to ``collect``.

    ``anchor`` makes the result require a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        rows: Tensor,
        collect: Callable[..., None],
        *saved: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.collect = collect
        # The result is not a view, so that the caller may change it in place.
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        saved = ctx.saved_tensors
        ctx.collect(grad, *saved)
        grad_rows = None
        if ctx.needs_input_grad[1]:
            grad_rows = grad
        none_of_saved = [None] * len(saved)
        return None, grad_rows, None, *none_of_saved


def _collect_bags(
    features: Sequence[EagerTable],
    pooling: Pooling,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
) -> None:
    dims = [feature.table.dim for feature in features]
    grads_of_features = torch.split(grad.float(), dims, dim=1)
    scales = bag_scales(offsets, pooling)
    bag_count = grad.shape[0]
    for number, (feature, first, end) in enumerate(_parts(features, offsets)):
        # a client's table has no sparse optimizer
        assert isinstance(feature, TableModule)
        first_bag = number * bag_count
        end_bag = first_bag + bag_count
        bags = bag_of(offsets[first_bag : end_bag + 1])
        grads_of_bags = grads_of_features[number]
        grads_of_ids = grads_of_bags[bags]

        factors = None if weights is None else weights[first:end]
        if scales is not None:
            scales_of_bags = scales[first_bag:end_bag]
            scales_of_ids = scales_of_bags[bags]
            factors = scales_of_ids if factors is None else factors * scales_of_ids
        if factors is not None:
            grads_of_ids = grads_of_ids * factors[:, None]
        feature.collect(ids[first:end], grads_of_ids)


def _collect_rows(
    tables: Sequence[EagerTable],
    counts: Sequence[int],
    grad: Tensor,
    ids: Tensor,
) -> None:
    # The backward of slicing made this gradient, so that no other code holds it, and
    # tables may keep its parts.
    ids_of_tables = torch.split(ids, list(counts))
    first = 0
    for module, table_ids in zip(tables, ids_of_tables, strict=True):
        # a client's table has no sparse optimizer
        assert isinstance(module, TableModule)
        dim = module.table.dim
        end = first + len(table_ids) * dim
        module.collect(table_ids, grad[first:end].view(-1, dim))
        first = end


def _parts(
    features: Sequence[EagerTable],
    offsets: Tensor,
) -> Iterator[tuple[EagerTable, int, int]]:
    """Yields each feature's table, and where the feature's ids begin and end."""
    bags_of_feature = (len(offsets) - 1) // len(features)
    bounds = [0] * (len(features) + 1)
    if bags_of_feature:
        bounds = offsets[::bags_of_feature].tolist()
    begins = bounds[:-1]
    ends = bounds[1:]
    return zip(features, begins, ends, strict=True)


def _names(tables: Sequence[EagerTable]) -> str:
    return ", ".join(repr(module.table.name) for module in tables)


def _check_fused(modules: Sequence[EagerTable]) -> None:
    for module in modules:
        if not module.fused:
            raise ValueError(
                f"table {module.table.name!r}: rows cannot be in the memory of a device:"
                " the module has fused=False, whose optimizer updates rows on the host;"
                " use device_rows=0"
            )


def _check_has_rows(group: PooledGroup | SequenceGroup) -> None:
    """Raises ValueError if another group has put rows of a table on a device: this group
    would read the host's rows, which are older.
    """
    for table in group.tables:
        on_device = table.device_rows
        if on_device is not None and on_device is not group.device_rows:
            raise ValueError(
                f"table {table.name!r} has rows in the memory of a device, and is now"
                " looked up with other tables or in another way than before: use"
                " device_rows=0; or make the module with enable_fusion=False if it"
                " changes which of its weights require a gradient"
            )


def _check_training(tables: Sequence[EagerTable]) -> None:
    for module in tables:
        if module.is_frozen:
            raise ValueError(
                f"table {module.table.name!r} is frozen by its options, and its weight"
                " requires a gradient: make the module without"
                " TableOptions(frozen=True) to train it, or call"
                " weight.requires_grad_(False)"
            )
    if not tables[0].fused and get_proxy_mode() is not None:
        raise NotImplementedError(
            f"table(s) {_names(tables)}: modules with fused=False collect gradients in"
            " Python, which a traced graph does not contain: make the modules with"
            " fused=True, or trace the model without them"
        )
    # Each rank would train different rows, and nothing would report it. The rows of a
    # client are those of all ranks.
    if is_in_data_parallel() and not isinstance(tables[0], RemoteTableModule):
        raise RuntimeError(
            f"table(s) {_names(tables)}: DistributedDataParallel cannot keep the rows"
            " of eager modules equal on all ranks: shard the model with"
            " RecStoreSharder and DistributedModelParallel"
        )
