"""The plan's entries for RecStore tables, and the arguments that sharders add to them.

Tests: tests/sharders/test_stock_tables.py, tests/planner/test_planners.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    ParameterConstraints,
)
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    KeyValueParams,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_recstore.display import html_table, text_table
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import (
    MAX_DEVICE_ROWS,
    Servers,
    TableOptions,
    check_int,
    resident_rows,
)
from torchrec_recstore.sharders.fused_params import (
    ACCUMULATION_KEY,
    OPTIMIZER_KEY,
    OPTIONS_KEY,
    STATE_KEYS,
    CarriedOptions,
    optimizer_from_fused_params,
    state_dtype,
)
from torchrec_recstore.sharders.kernel import ROW_SPLIT
from torchrec_recstore.table_configs import check_init_fn
from torchrec_recstore.torchrec_seams.models import marked_optimizer
from torchrec_recstore.utils import warn_user

RECSTORE_KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
"""The name of RecStore's kernel in plans and constraints. (TorchRec uses this name for
all kernels but its own.)
"""

DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
SHARDING_TYPES = [kind.value for kind in ShardingType if kind.value != DATA_PARALLEL]
# The keys of fused_params that deal_out moves to the plan.
_RECSTORE_KEYS = {OPTIMIZER_KEY, ACCUMULATION_KEY, *STATE_KEYS}
# The columns of a printed plan.
_SHOWN = ("table in RecStore", "sharding type", "ranks", "options")

# Whether a sharded module of RecStore reads the entries of a plan, and not TorchRec's.
_is_read_by_recstore: ContextVar[bool] = ContextVar(
    "is_read_by_recstore",
    default=False,
)

# The tables that a warning was given about, because their sharding names no kernel,
# until they are sharded.
_stock_by_default: set[str] = set()


class RecStoreModulePlan(EmbeddingModuleShardingPlan):  # type: ignore[misc]
    """A module's plan from ``RecStorePlanner``.

    Tables are on TorchRec's kernels only by constraint.
    """

    def __str__(self) -> str:
        stock_text = str(super().__str__())
        cells = self._cells()
        if not cells:
            return stock_text
        return f"{stock_text}\n\n{text_table(_SHOWN, cells)}\n"

    def _repr_html_(self) -> str:
        return html_table(_SHOWN, self._cells())

    def _cells(self) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = []
        for name, sharding in self.items():
            if isinstance(sharding, RecStoreParameterSharding):
                ranks = ", ".join(map(str, sharding.ranks or ()))
                kind = str(sharding.sharding_type)
                cells.append((name, kind, ranks, repr(sharding.options)))
        return cells


@dataclass
class OptionsInPlan(KeyValueParams):  # type: ignore[misc]
    """A table's options in the field ``key_value_params`` of its constraints.

    TorchRec's planner copies this field from the constraints to its plan, and its
    estimators read it for tables on its own key-value kernels only (torchrec 1.7.0 to
    1.9.2). In the sharded model, the options are in a
    :class:`RecStoreParameterSharding`.
    """

    options: TableOptions = field(default_factory=TableOptions)
    stock: KeyValueParams | None = None
    """What the user has set for TorchRec's own kernels. The fields are the same here."""
    __hash__ = KeyValueParams.__hash__

    @classmethod
    def of(cls, options: TableOptions, stock: KeyValueParams | None) -> OptionsInPlan:
        """Returns the options beside what the user has set for TorchRec's kernels."""
        values: dict[str, Any] = {}
        if stock is not None:
            for stock_field in fields(KeyValueParams):
                values[stock_field.name] = getattr(stock, stock_field.name)
        return cls(**values, options=options, stock=stock)


def stock_key_value_params(params: KeyValueParams | None) -> KeyValueParams | None:
    """Returns the ``key_value_params`` of TorchRec's own kernels, without options."""
    return params.stock if isinstance(params, OptionsInPlan) else params


@dataclass
class RecStoreParameterSharding(ParameterSharding):  # type: ignore[misc]
    """A plan's entry for a RecStore table, with the table's options.

    It is pickled with the plan.

    The other fields are those of TorchRec's ``ParameterSharding``. The sharder sets the
    last three, from its arguments.

    Args:
        options: The table's options. Default: ``TableOptions()``.
        row_name: The name that determines the table's initial rows and keeps them apart
            in a cold store. A planner sets it if several collections of the model have
            tables with the same name. Default: None, the name in the table's config.
        optimizer: The ``optimizer`` argument of the sharder. Default: None.
        accumulation_steps: The ``accumulation_steps`` argument of the sharder. Default:
            1.
        state_dtype: The data type of optimizer state. Default: None, float32.
    """

    options: TableOptions = field(default_factory=TableOptions)
    row_name: str | None = None
    optimizer: Optimizer | None = None
    accumulation_steps: int = 1
    state_dtype: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        sharding: ParameterSharding,
        options: TableOptions,
        row_name: str | None = None,
    ) -> RecStoreParameterSharding:
        """Returns a copy of ``sharding`` with ``options`` and ``row_name``."""
        stock = {f.name: getattr(sharding, f.name) for f in fields(ParameterSharding)}
        stock["key_value_params"] = stock_key_value_params(sharding.key_value_params)
        return cls(**stock, options=options, row_name=row_name)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Returns the entries that the table's ``fused_params`` get from the plan."""
        # add_params_from_parameter_sharding calls this method for customized kernels,
        # whichever sharder it is called for (torchrec 1.8.0).
        if not _is_read_by_recstore.get():
            raise ValueError(
                "the plan places tables in RecStore, and TorchRec's own sharder got it:"
                " pass the sharders of the planner to DistributedModelParallel, too:"
                " DistributedModelParallel(model, plan=plan, sharders=sharders)"
            )
        params: dict[str, Any] = {
            OPTIONS_KEY: CarriedOptions(self.options, self.row_name)
        }
        if self.optimizer is not None:
            params[OPTIMIZER_KEY] = self.optimizer
        if self.accumulation_steps > 1:
            params[ACCUMULATION_KEY] = self.accumulation_steps
        if self.state_dtype is not None:
            params["state_dtype"] = self.state_dtype
        return params


@contextmanager
def entries_are_read_by_recstore() -> Iterator[None]:
    """Lets TorchRec read the entries of RecStore tables, for a sharded module of ours."""
    token = _is_read_by_recstore.set(True)
    try:
        yield
    finally:
        _is_read_by_recstore.reset(token)


class ResidentParameter(nn.Parameter):
    """A view of a table's parameter whose ``numel`` counts resident rows only.

    TorchRec plans a table's memory by ``numel()`` (``get_tensor_size_bytes``, torchrec
    1.8.0), and shards by ``shape``.
    """

    @classmethod
    def of(
        cls,
        parameter: nn.Parameter,
        rows: int | None = None,
        name: str = "",
    ) -> ResidentParameter:
        """Returns a view of a parameter with ``rows`` over all ranks.

        Default: those of the default options.
        """
        if rows is None:
            rows = resident_rows(TableOptions(), parameter.shape[0])
        view = cls(parameter.data, requires_grad=parameter.requires_grad)
        # This copies the attributes that apply_optimizer_in_backward sets.
        view.__dict__.update(parameter.__dict__)
        view._resident_rows = rows
        view._table_name = name
        return view

    _resident_rows: int
    _table_name: str

    @property
    def _in_backward_optimizers(self) -> list[object]:
        # table_wise() and the like read this attribute if they get no compute_kernel,
        # and then choose TorchRec's, even if the sharder does not offer it
        # (_get_compute_kernel, torchrec 1.8.0).
        _stock_by_default.add(self._table_name)
        warn_user(
            f"table {self._table_name!r} is planned on TorchRec's own kernel, since its"
            f" sharding names none: pass compute_kernel={RECSTORE_KERNEL!r} to"
            " table_wise(...) or the other sharding function for RecStore, or pass the"
            " name of TorchRec's kernel"
        )
        if "_in_backward_optimizers" not in self.__dict__:
            raise AttributeError("_in_backward_optimizers")
        return self.__dict__["_in_backward_optimizers"]  # type: ignore[no-any-return]

    def numel(self) -> int:
        """Returns the number of elements of the resident rows."""
        return self._resident_rows * self.shape[1]

    nelement = numel


def with_own_arguments(
    fused_params: Mapping[str, Any] | None,
    optimizer: Optimizer | None,
    accumulation_steps: int,
) -> dict[str, Any] | None:
    """Returns a sharder's ``fused_params`` with its own arguments.

    The planner reads them, too.
    """
    check_int("accumulation_steps", accumulation_steps, 1)
    params = dict(fused_params or {})
    if accumulation_steps != 1:
        params[ACCUMULATION_KEY] = accumulation_steps
    if optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizer must be one of torchrec_recstore.optim, got"
                f" {type(optimizer).__name__}"
            )
        params[OPTIMIZER_KEY] = optimizer
        optimizer_from_fused_params(params, [])
    return None if fused_params is None and not params else params


def with_marks(
    fused_params: Mapping[str, Any],
    parameter: nn.Parameter | None,
) -> dict[str, Any]:
    """Returns a table's ``fused_params``.

    The marks of its parameter take precedence over those of the sharder.
    """
    optimizer_class, marked = marked_optimizer(parameter)
    if optimizer_class is not None and "optimizer" not in marked:
        marked["optimizer"] = optimizer_type_to_emb_opt_type(optimizer_class)
    if "lr" in marked:
        marked["learning_rate"] = marked.pop("lr")
    return {**fused_params, **marked}


def deal_out(
    sharder: ModuleSharder[nn.Module],
    plan: dict[str, ParameterSharding],
    env: ShardingEnv,
    parameters: Mapping[str, nn.Parameter],
) -> tuple[dict[str, Any] | None, dict[str, ParameterSharding]]:
    """Checks a plan, and moves arguments of the sharder to its RecStore entries.

    These are the arguments that only RecStore's sharders have, and ``STATE_KEYS``.

    Returns the sharder's ``fused_params`` without what has been moved, for TorchRec's
    kernels, and the plan with it. Raises ValueError and NotImplementedError as
    ``RecStoreSharder.shard``.
    """
    if isinstance(env, ShardingEnv2D):
        _refuse_replicas(plan)
    _warn_of_stock_tables(sharder, plan)
    plan = with_options(plan, parameters)
    fused_params = sharder.fused_params
    _check_marks(fused_params or {}, plan, parameters)
    if fused_params is None:
        return None, plan
    stock_params: dict[str, Any] = {}
    recstore_params: dict[str, Any] = {}
    for key, value in fused_params.items():
        if key in _RECSTORE_KEYS:
            recstore_params[key] = value
        else:
            stock_params[key] = value
    if not recstore_params:
        return fused_params, plan
    entries = dict(plan)
    for name, sharding in plan.items():
        parameter = parameters.get(name)
        dtype = state_dtype(with_marks(fused_params, parameter), [name])
        if sharding.compute_kernel == RECSTORE_KERNEL:
            if not isinstance(sharding, RecStoreParameterSharding):
                sharding = RecStoreParameterSharding.of(sharding, TableOptions())
            entries[name] = replace(
                sharding,
                optimizer=recstore_params.get(OPTIMIZER_KEY),
                accumulation_steps=recstore_params.get(ACCUMULATION_KEY, 1),
                state_dtype=None if dtype is torch.float32 else dtype,
            )
        elif sharding.compute_kernel.startswith("fused"):
            marked_class, _ = marked_optimizer(parameter)
            _check_stock_table(
                f"table {name!r} is on TorchRec's kernel {sharding.compute_kernel!r},"
                " which does not take",
                recstore_params,
                has_narrow_state=dtype is not torch.float32,
                has_optimizer="optimizer" in stock_params or marked_class is not None,
            )
    return stock_params, entries


def _refuse_replicas(plan: Mapping[str, ParameterSharding]) -> None:
    # DMPCollection averages only tables on TorchRec's kernels.
    tables = [
        repr(name)
        for name, sharding in plan.items()
        if sharding.compute_kernel == RECSTORE_KERNEL
    ]
    if tables:
        raise NotImplementedError(
            f"RecStore table(s) {', '.join(tables)}: DMPCollection would not"
            " average their replicas, which would drift apart: use"
            " DistributedModelParallel, which shards tables over all ranks and"
            " replicates the other layers, or TorchRec's own kernels"
        )


def _check_stock_table(
    refusal: str,
    recstore_params: Mapping[str, Any],
    *,
    has_narrow_state: bool,
    has_optimizer: bool,
) -> None:
    """Raises ValueError if an argument would have no effect on TorchRec's kernel."""
    if has_narrow_state:
        keys = " and ".join(key for key in STATE_KEYS if key in recstore_params)
        raise ValueError(
            f"{refusal} {keys}: leave it out of fused_params, or place the table in"
            " RecStore"
        )
    optimizer = recstore_params.get(OPTIMIZER_KEY)
    if optimizer is not None and not has_optimizer:
        raise ValueError(
            f"{refusal} optimizer={optimizer!r}: select its optimizer by fused_params or"
            " apply_optimizer_in_backward"
        )


def with_options(
    plan: Mapping[str, ParameterSharding],
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, ParameterSharding]:
    """Returns a plan whose RecStore entries have all of their options.

    These are the options that the constraints of TorchRec's planner have brought, the
    ``device_rows`` of the entry's ``CacheParams``, and ``frozen`` if the table's
    parameter requires no gradient.

    TorchRec's own kernels train such tables all the same (torchrec 1.8.0).
    """
    entries = dict(plan)
    for name, sharding in plan.items():
        brought = sharding.key_value_params
        is_in_recstore = sharding.compute_kernel == RECSTORE_KERNEL
        if isinstance(brought, OptionsInPlan):
            # An entry of the user's own has its options.
            is_own = isinstance(sharding, RecStoreParameterSharding)
            if is_in_recstore and not is_own:
                sharding = RecStoreParameterSharding.of(sharding, brought.options)
            else:
                sharding = replace(sharding, key_value_params=brought.stock)
            entries[name] = sharding
        if not is_in_recstore:
            continue
        parameter = parameters.get(name)
        if parameter is None:
            continue
        sharding = _with_device_rows(name, sharding, parameter.shape[0])
        entries[name] = sharding
        if parameter.requires_grad:
            continue
        if not isinstance(sharding, RecStoreParameterSharding):
            sharding = RecStoreParameterSharding.of(sharding, TableOptions())
        frozen_options = replace(sharding.options, frozen=True)
        entries[name] = replace(sharding, options=frozen_options)
    return entries


def _with_device_rows(
    name: str,
    sharding: ParameterSharding,
    num_embeddings: int,
) -> ParameterSharding:
    """Returns a RecStore table's entry with the ``device_rows`` of its load factor."""
    cache_params = sharding.cache_params
    if cache_params is None or cache_params.load_factor is None:
        return sharding
    if not isinstance(sharding, RecStoreParameterSharding):
        sharding = RecStoreParameterSharding.of(sharding, TableOptions())
    rows = resident_rows(sharding.options, num_embeddings)
    options = with_load_factor(name, sharding.options, cache_params, rows)
    return replace(sharding, options=options)


def with_load_factor(
    name: str,
    options: TableOptions,
    cache_params: CacheParams | None,
    rows: int,
) -> TableOptions:
    """Returns options with the ``device_rows`` of TorchRec's load factor: the part of
    ``rows`` that are on the device.

    ``device_rows`` that are set take precedence. Tables on servers have none.

    Raises:
        ValueError: The load factor is not from 0 to 1. The message names the table.
    """
    if cache_params is None or cache_params.load_factor is None:
        return options
    factor = cache_params.load_factor
    if not 0 <= factor <= 1:
        raise ValueError(
            f"RecStore table {name!r}: CacheParams.load_factor={factor} is not from 0 to"
            " 1: it is the part of the table's rows in the memory of the device"
        )
    if options.device_rows is not None or options.servers is not None:
        return options
    device_rows = min(math.ceil(factor * rows), MAX_DEVICE_ROWS)
    return replace(options, device_rows=device_rows)


def _check_marks(
    fused_params: Mapping[str, Any],
    plan: Mapping[str, ParameterSharding],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    # In TorchRec, the marks silently take precedence (merge_fused_params, torchrec
    # 1.8.0), which hides a mistake.
    if "optimizer" not in fused_params:
        return
    for name, sharding in plan.items():
        marked, _ = marked_optimizer(parameters.get(name))
        if marked is None or sharding.compute_kernel != RECSTORE_KERNEL:
            continue
        by_params = optimizer_from_fused_params(fused_params, [name])
        mark = {"optimizer": optimizer_type_to_emb_opt_type(marked)}
        by_mark = optimizer_from_fused_params(mark, [name])
        if type(by_params) is not type(by_mark):
            raise ValueError(
                f"RecStore table {name!r}: fused_params select"
                f" {type(by_params).__name__}, apply_optimizer_in_backward selects"
                f" {type(by_mark).__name__}: use only one of them"
            )


def check_plan(
    config: BaseEmbeddingConfig,
    sharding: ParameterSharding,
    supported: Collection[str],
    collection: str,
) -> None:
    """Raises ValueError if the sharding type or the ``init_fn`` is not supported."""
    if sharding.compute_kernel != RECSTORE_KERNEL:
        return
    refusal = (
        f"RecStore table {config.name!r}: sharding type {sharding.sharding_type!r} is"
        " not supported"
    )
    if sharding.sharding_type not in supported:
        raise ValueError(
            f"{refusal} in {collection}; supported are {', '.join(supported)}"
        )
    is_remote = remote_options(sharding) is not None
    if is_remote and sharding.sharding_type != ShardingType.TABLE_WISE.value:
        raise ValueError(
            f"{refusal} for a table on servers, which distribute its rows: use"
            " table_wise"
        )
    has_options = isinstance(sharding, RecStoreParameterSharding)
    check_init_fn(config, sharding.options if has_options else None)


def remote_options(sharding: ParameterSharding | None) -> Servers | None:
    """Returns the servers on which a plan's entry places a table.

    Returns None if its rows are on the ranks.
    """
    if (
        isinstance(sharding, RecStoreParameterSharding)
        and sharding.compute_kernel == RECSTORE_KERNEL
    ):
        return sharding.options.servers
    return None


def hashed_features(
    configs: Sequence[BaseEmbeddingConfig],
    shardings: Mapping[str, ParameterSharding],
) -> frozenset[str]:
    """Returns the features of tables with hash routing.

    Their ids are mixed before the input distribution.

    Raises ValueError, which names both tables, if a feature also belongs to a table
    whose ids must not be mixed.
    """
    hashed: dict[str, str] = {}  # The name of the table of each feature.
    for config in configs:
        if _is_hashed(shardings[config.name]):
            hashed.update(dict.fromkeys(config.feature_names, config.name))
    for config in configs:
        shared = sorted(hashed.keys() & set(config.feature_names))
        if shared and not _is_hashed(shardings[config.name]):
            raise ValueError(
                f"RecStore table {hashed[shared[0]]!r} with routing='hash' shares"
                f" feature(s) {shared} with table {config.name!r}, whose ids are routed"
                " in another way: use routing='hash' and a row-wise sharding type for"
                " both tables or for neither"
            )
    return frozenset(hashed)


def _is_hashed(sharding: ParameterSharding) -> bool:
    return (
        isinstance(sharding, RecStoreParameterSharding)
        and sharding.compute_kernel == RECSTORE_KERNEL
        and sharding.sharding_type in ROW_SPLIT
        and sharding.options.routing == "hash"
    )


def asks_for_recstore(constraint: ParameterConstraints | None) -> bool:
    """Returns whether the constraint allows RecStore for a table of a RecStore sharder."""
    if constraint is None:
        return True
    if constraint.compute_kernels:
        return RECSTORE_KERNEL in constraint.compute_kernels
    return bool(constraint.sharding_types != [DATA_PARALLEL])


def _warn_of_stock_tables(
    sharder: ModuleSharder[nn.Module],
    plan: Mapping[str, ParameterSharding],
) -> None:
    # RecStorePlanner places tables on TorchRec's kernels only by constraint. Other
    # plans have no RecStore tables if they were made with other sharders than those
    # that shard the model.
    kernels = {
        name: sharding.compute_kernel
        for name, sharding in plan.items()
        if sharding.sharding_type != DATA_PARALLEL
    }
    if isinstance(plan, RecStoreModulePlan) or RECSTORE_KERNEL in kernels.values():
        return
    tables = [name for name in kernels if name not in _stock_by_default]
    _stock_by_default.difference_update(kernels)
    if tables:
        ours = type(sharder).__name__
        warn_user(
            f"table(s) {', '.join(map(repr, tables))} are not in RecStore: the plan for"
            f" {ours} has only TorchRec's own kernels: pass {ours} to the planner as"
            " well, or use TorchRec's sharder"
        )


def warn_of_overridden(
    sharders: Sequence[ModuleSharder[nn.Module]],
    model: nn.Module,
    constraints: Mapping[str, ParameterConstraints],
) -> None:
    """Warns of tables that are not in RecStore because of a later sharder.

    TorchRec uses the last sharder of the same collections.
    """
    for place, sharder in enumerate(sharders):
        if not hasattr(sharder, "with_stock_kernels"):
            continue
        collection_type = sharder.module_type
        theirs = ""
        for later in sharders[place + 1 :]:
            is_stock = not hasattr(later, "with_stock_kernels")
            if is_stock and later.module_type is collection_type:
                theirs = type(later).__name__
        if not theirs:
            continue
        tables: list[str] = []
        for module in model.modules():
            if type(module) is collection_type:
                tables += sharder.shardable_parameters(module)
        tables = [name for name in tables if asks_for_recstore(constraints.get(name))]
        if not tables:
            continue
        ours = type(sharder).__name__
        warn_user(
            f"table(s) {', '.join(map(repr, tables))} are not in RecStore: {theirs},"
            f" which comes later in the list of sharders, overrides {ours}: put {ours}"
            f" after it, or leave {theirs} out"
        )


def warn_of_stock_enumerator(compute_device: str) -> None:
    """Warns that TorchRec's enumerator plans RecStore tables for an accelerator."""
    if compute_device != "cpu":
        warn_user(
            "TorchRec's enumerator counts the rows of RecStore tables as memory of"
            f" {compute_device!r}, and they are in host memory: use RecStorePlanner, or"
            " pass enumerator=RecStoreEnumerator(topology, ...) to TorchRec's planner"
        )
