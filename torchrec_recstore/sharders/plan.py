"""The plan's entries for RecStore tables, what a plan may ask of them, and how a sharder's arguments reach them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions, resident_rows
from torchrec_recstore.sharders.fused_params import (
    ACCUMULATION_KEY,
    OPTIMIZER_KEY,
    OPTIONS_KEY,
    CarriedOptions,
    optimizer_from_fused_params,
)
from torchrec_recstore.sharders.kernel import ROW_SPLIT
from torchrec_recstore.table_configs import check_init_fn
from torchrec_recstore.torchrec_seams import caller_that_enumerates, constraints_of, marked_optimizer
from torchrec_recstore.utils import warn_user

RECSTORE_KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
"""TorchRec's name, in plans and constraints, for the kernel that RecStore provides."""


class RecStoreModulePlan(EmbeddingModuleShardingPlan):  # type: ignore[misc]
    """A module's plan in which TorchRec's own kernels are those that constraints ask for."""


@dataclass
class RecStoreParameterSharding(ParameterSharding):  # type: ignore[misc]
    """A :class:`ParameterSharding` that takes a table's options to every rank. Pickles with the plan.

    Args:
        options: the table's options.
        row_name: The name that decides the table's initial rows and keeps them apart in cold stores; None: the name in
            the table's config. A planner sets it where several collections of the model have a table of that name.
        optimizer, accumulation_steps: those of the sharder, on their way to the kernel; a planner leaves them out.
    """

    options: TableOptions = field(default_factory=TableOptions)
    row_name: str | None = None
    optimizer: Optimizer | None = None
    accumulation_steps: int = 1

    @classmethod
    def of(
        cls, sharding: ParameterSharding, options: TableOptions, row_name: str | None = None
    ) -> RecStoreParameterSharding:
        """``sharding`` with ``options`` and ``row_name`` attached."""
        stock = {f.name: getattr(sharding, f.name) for f in fields(ParameterSharding)}
        return cls(**stock, options=options, row_name=row_name)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Called by TorchRec for customized kernels (``add_params_from_parameter_sharding``, torchrec 1.8.0)."""
        params: dict[str, Any] = {OPTIONS_KEY: CarriedOptions(self.options, self.row_name)}
        if self.optimizer is not None:
            params[OPTIMIZER_KEY] = self.optimizer
        if self.accumulation_steps > 1:
            params[ACCUMULATION_KEY] = self.accumulation_steps
        return params


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


def with_own_arguments(
    fused_params: Mapping[str, Any] | None, optimizer: Optimizer | None, accumulation_steps: int
) -> dict[str, Any] | None:
    """A sharder's ``fused_params`` that carry its own arguments; the planner weighs the optimizer's states by them.

    Raises:
        TypeError: ``optimizer`` is none of :mod:`torchrec_recstore.optim`, ``accumulation_steps`` no int.
        ValueError: ``fused_params`` ask for another optimizer; ``accumulation_steps`` below 1.
    """
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int):
        raise TypeError(f"accumulation_steps must be an int, got {type(accumulation_steps).__name__}")
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps must be at least 1, got {accumulation_steps}")
    if optimizer is None and accumulation_steps == 1:
        return fused_params if fused_params is None else dict(fused_params)
    carrying = dict(fused_params or {})
    if accumulation_steps > 1:
        carrying[ACCUMULATION_KEY] = accumulation_steps
    if optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be one of torchrec_recstore.optim, got {type(optimizer).__name__}")
        carrying[OPTIMIZER_KEY] = optimizer
        optimizer_from_fused_params(carrying, [])
    return carrying


def deal_out(
    fused_params: dict[str, Any] | None, plan: dict[str, ParameterSharding], parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Any] | None, dict[str, ParameterSharding]]:
    """``fused_params`` as TorchRec's kernels take them, and a plan whose RecStore entries carry the arguments instead.

    Args:
        fused_params: what :func:`with_own_arguments` made.
        plan: the module's entries by table.
        parameters: the module's tables by name, with the marks of ``apply_optimizer_in_backward``.

    Raises:
        ValueError: a table on one of TorchRec's fused kernels, to which nothing else gives an optimizer; a RecStore
            table whose mark and ``fused_params`` name different optimizers.
    """
    _check_marks(fused_params or {}, plan, parameters)
    own = {key: fused_params[key] for key in (OPTIMIZER_KEY, ACCUMULATION_KEY) if fused_params and key in fused_params}
    if fused_params is None or not own:
        return fused_params, plan
    stock = {key: value for key, value in fused_params.items() if key not in own}
    dealt = dict(plan)
    for name, sharding in plan.items():
        if sharding.compute_kernel == RECSTORE_KERNEL:
            if not isinstance(sharding, RecStoreParameterSharding):
                sharding = RecStoreParameterSharding.of(sharding, TableOptions())
            dealt[name] = replace(
                sharding, optimizer=own.get(OPTIMIZER_KEY), accumulation_steps=own.get(ACCUMULATION_KEY, 1)
            )
        elif (
            OPTIMIZER_KEY in own
            and sharding.compute_kernel.startswith("fused")
            and "optimizer" not in stock
            and marked_optimizer(parameters.get(name))[0] is None
        ):
            raise ValueError(
                f"table {name!r} is on TorchRec's kernel {sharding.compute_kernel!r}, which does not take "
                f"optimizer={own[OPTIMIZER_KEY]!r}: select its optimizer by fused_params or apply_optimizer_in_backward"
            )
    return stock, dealt


def _check_marks(
    fused_params: Mapping[str, Any], plan: Mapping[str, ParameterSharding], parameters: Mapping[str, nn.Parameter]
) -> None:
    # TorchRec lets the mark win without a word (merge_fused_params, torchrec 1.8.0), which hides a mistake.
    if "optimizer" not in fused_params:
        return
    for name, sharding in plan.items():
        marked, _ = marked_optimizer(parameters.get(name))
        if marked is None or sharding.compute_kernel != RECSTORE_KERNEL:
            continue
        by_params = optimizer_from_fused_params(fused_params, [name])
        by_mark = optimizer_from_fused_params({"optimizer": optimizer_type_to_emb_opt_type(marked)}, [name])
        if type(by_params) is not type(by_mark):
            raise ValueError(
                f"RecStore table {name!r}: fused_params select {type(by_params).__name__}, "
                f"apply_optimizer_in_backward {type(by_mark).__name__}: give one of them"
            )


def check_plan(
    config: BaseEmbeddingConfig, sharding: ParameterSharding, supported: Collection[str], collection: str
) -> None:
    """Refuses a sharding type or an ``init_fn`` that a RecStore table cannot have.

    Args:
        config: of one of the collection's tables, on whichever kernel.
        sharding: the plan's entry for it.
        supported: sharding types.
        collection: what the table belongs to, for messages.

    Raises:
        ValueError: the message names the table.
    """
    if sharding.compute_kernel != RECSTORE_KERNEL:
        return
    if sharding.sharding_type not in supported:
        raise ValueError(
            f"RecStore table {config.name!r}: sharding type {sharding.sharding_type!r} is not supported in "
            f"{collection}; supported are {', '.join(supported)}"
        )
    check_init_fn(config, sharding.options if isinstance(sharding, RecStoreParameterSharding) else None)


def refuse_replicas(plan: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
    """Refuses RecStore tables in a ``DMPCollection``, which averages the replicas' stock tables alone.

    Args:
        plan: of one collection, by table.
        env: that the collection is to be sharded in.

    Raises:
        NotImplementedError: a RecStore table would have replicas, which would drift apart; the message names it.
    """
    tables = [name for name, sharding in plan.items() if sharding.compute_kernel == RECSTORE_KERNEL]
    if tables and isinstance(env, ShardingEnv2D):
        raise NotImplementedError(
            f"RecStore table(s) {', '.join(map(repr, tables))}: DMPCollection would not average their replicas, which "
            "would drift apart: use DistributedModelParallel, which shards tables over all ranks and replicates the "
            "other layers, or TorchRec's own kernels"
        )


def hashed_features(
    configs: Sequence[BaseEmbeddingConfig], shardings: Mapping[str, ParameterSharding]
) -> frozenset[str]:
    """The features whose ids are mixed before they are split: those of row-split tables with ``routing="hash"``.

    Raises:
        ValueError: such a feature also belongs to a table that needs its ids as they are; the message names both.
    """
    hashed = {feature: c.name for c in configs if _is_hashed(shardings[c.name]) for feature in c.feature_names}
    for config in configs:
        shared = sorted(hashed.keys() & set(config.feature_names))
        if shared and not _is_hashed(shardings[config.name]):
            raise ValueError(
                f"RecStore table {hashed[shared[0]]!r} with routing='hash' shares feature(s) {shared} with table "
                f"{config.name!r}, whose ids are not routed so: give both routing='hash' and a sharding by rows, or "
                "neither"
            )
    return frozenset(hashed)


def _is_hashed(sharding: ParameterSharding) -> bool:
    return (
        isinstance(sharding, RecStoreParameterSharding)
        and sharding.compute_kernel == RECSTORE_KERNEL
        and sharding.sharding_type in ROW_SPLIT
        and sharding.options.routing == "hash"
    )


DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


def asks_for_recstore(constraint: ParameterConstraints | None) -> bool:
    """Whether a table of a sharder for RecStore tables is to be in RecStore, as far as its constraint says."""
    if constraint is None:
        return True
    if constraint.compute_kernels:
        return RECSTORE_KERNEL in constraint.compute_kernels
    return bool(constraint.sharding_types != [DATA_PARALLEL])


def warn_of_stock_tables(sharder: ModuleSharder[nn.Module], plan: Mapping[str, ParameterSharding]) -> None:
    """Warns where a module's plan has no RecStore table, and nobody has asked for that.

    ``RecStorePlanner`` plans tables on TorchRec's kernels where constraints ask for it. Other plans leave RecStore out
    where they are made with other sharders than those that shard the model.

    Args:
        sharder: for RecStore tables; it is given the plan.
        plan: of one module, by table.
    """
    kernels = {name: s.compute_kernel for name, s in plan.items() if s.sharding_type != DATA_PARALLEL}
    if isinstance(plan, RecStoreModulePlan) or RECSTORE_KERNEL in kernels.values():
        return
    tables = [name for name in kernels if name not in stock_by_default]
    stock_by_default.difference_update(kernels)
    if tables:
        ours = type(sharder).__name__
        warn_user(
            f"table(s) {', '.join(map(repr, tables))} are not in RecStore: the plan that {ours} is given has none but "
            f"TorchRec's own kernels: give {ours} to the planner as well, or use TorchRec's sharder"
        )


def warn_if_overridden(sharder: ModuleSharder[nn.Module], kind: type[nn.Module]) -> None:
    """Warns where a planner makes a map of a list in which one of TorchRec's sharders overrides ``sharder``.

    Such a map has the last sharder of each type, and TorchRec reads nothing but ``module_type`` of the others. The
    list, the model and the constraints are therefore taken from the caller, ``EmbeddingEnumerator.enumerate``
    (torchrec 1.8.0); there is no warning where it is another.

    Args:
        sharder: whose property ``module_type`` calls this.
        kind: that ``module_type``.
    """
    caller = caller_that_enumerates(2)
    if caller is None:
        return
    enumerator, module, sharders = caller
    behind = sharders[[other is sharder for other in sharders].index(True) + 1 :]
    # One that is for RecStore as well is left out: reading its type would bring it here.
    stock = [other for other in behind if not hasattr(other, "with_stock_kernels") and other.module_type is kind]
    if not stock:
        return
    constraints = constraints_of(enumerator)
    tables = [
        name
        for each in module.modules()
        if type(each) is kind
        for name in sharder.shardable_parameters(each)
        if asks_for_recstore(constraints.get(name))
    ]
    if tables:
        ours, theirs = type(sharder).__name__, type(stock[-1]).__name__
        warn_user(
            f"table(s) {', '.join(map(repr, tables))} are not in RecStore: {theirs}, which comes later in the list of "
            f"sharders, overrides {ours}: put {ours} after it, or leave {theirs} out"
        )
