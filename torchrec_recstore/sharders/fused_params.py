"""The optimizer and the options of a RecStore table in TorchRec's ``fused_params``.

The names and defaults are those of FBGEMM's
``SplitTableBatchedEmbeddingBagsCodegen.__init__`` (fbgemm-gpu 1.8.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.embedding_types import OptimType

from torchrec_recstore import optim
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.options import Servers, TableOptions

# RecStore's own keys in fused_params: of a table's CarriedOptions, and of the arguments
# of RecStoreSharder.
OPTIONS_KEY = "recstore_options"
OPTIMIZER_KEY = "recstore_optimizer"
ACCUMULATION_KEY = "recstore_accumulation_steps"

_NAMES: dict[type[Optimizer], tuple[Enum, ...]] = {
    # FBGEMM's inexact form of the same update differs only in the order of sums.
    optim.SGD: (EmbOptimType.SGD, EmbOptimType.EXACT_SGD, OptimType.SGD),
    optim.Adagrad: (EmbOptimType.EXACT_ADAGRAD, OptimType.ADAGRAD),
    optim.RowWiseAdagrad: (
        EmbOptimType.ROWWISE_ADAGRAD,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        OptimType.ROWWISE_ADAGRAD,
    ),
    optim.Adam: (EmbOptimType.ADAM, OptimType.ADAM),
    optim.AdamW: (OptimType.ADAMW,),
    optim.PartialRowWiseAdam: (
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        OptimType.PARTIAL_ROWWISE_ADAM,
    ),
    optim.LAMB: (EmbOptimType.LAMB, OptimType.LAMB),
    optim.PartialRowWiseLAMB: (
        EmbOptimType.PARTIAL_ROWWISE_LAMB,
        OptimType.PARTIAL_ROWWISE_LAMB,
    ),
    optim.LARSSGD: (EmbOptimType.LARS_SGD, OptimType.LARS_SGD),
}
_OPTIMIZERS = {name: kind for kind, names in _NAMES.items() for name in names}

# The keys that this module reads. If the selected optimizer does not have an argument,
# it is ignored, as in FBGEMM.
_READ = {
    ACCUMULATION_KEY,
    OPTIONS_KEY,
    OPTIMIZER_KEY,
    "optimizer",
    "learning_rate",
    "lr",
    "eps",
    "eta",
    "beta1",
    "beta2",
    "betas",
    "weight_decay_mode",
    "gradient_clipping",
    "max_gradient",
    "max_gradient_norm",
    "optimizer_state_dtypes",
    "state_dtype",
    "output_dtype",
    "stochastic_rounding",
}

# The keys that cannot change the results of a RecStore table, whatever their value.
_IGNORED = {
    # Where FBGEMM keeps rows on an accelerator, and how it moves them. RecStore's rows
    # are in host memory.
    "cache_algorithm",
    "cache_load_factor",
    "cache_sets",
    "cache_reserved_memory",
    "cache_precision",
    "enforce_hbm",
    "gather_uvm_cache_stats",
    "multipass_prefetch_config",
    "prefetch_pipeline",
    "record_cache_metrics",
    "stats_reporter_config",
    "uvm_host_mapped",
    "uvm_non_rowwise_momentum",
    # Every int64 is a valid id, and ids are never converted to a smaller type.
    "bounds_check_mode",
    "embedding_table_index_type",
    "embedding_table_offset_type",
    # These keys select one of several kernels that compute the same results.
    "_batch_key",
    "use_experimental_tbe",
    "use_one_tbe_per_table",
    # These keys select one of several ways in which torch.optim computes the same
    # results.
    "capturable",
    "differentiable",
    "foreach",
    "fused",
}

# FBGEMM silently ignores these keys if the selected optimizer does not have them.
# RecStore raises an error for other values, because the user expects that a key has an
# effect.
_NEUTRAL_UNLESS_READ: dict[str, object] = {
    "max_norm": 0.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
}

# The keys that would change the results. RecStore does not support them and accepts
# only values without effect.
_NEUTRAL: dict[str, object] = {
    "counter_based_regularization": None,
    "cowclip_regularization": None,
    "emainplace_mode": None,
    "ensemble_mode": None,
    "extra_optimizer_config": None,
    "global_weight_decay": None,
    "dampening": 0.0,
    "initial_accumulator_value": 0.0,
    "lr_decay": 0.0,
    "amsgrad": False,
    "enable_raw_embedding_streaming": False,
    "maximize": False,
    "nesterov": False,
    "weights_precision": SparseType.FP32,
}

# The keys of the data type of optimizer state. TorchRec's kernels do not take the
# first, and TorchRec cannot group tables with the second, because its value is a dict
# (torchrec 1.8.0).
STATE_KEYS = ("state_dtype", "optimizer_state_dtypes")

# FBGEMM's names of an optimizer's states.
_MOMENTA = {"momentum1", "momentum2"}

_STATE_DTYPES = {
    torch.float32: torch.float32,
    SparseType.FP32: torch.float32,
    torch.float16: torch.float16,
    SparseType.FP16: torch.float16,
}
_OUTPUT_DTYPES = {
    SparseType.FP32: torch.float32,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
}

_DISAGREES = "of the sharder disagrees with"
_ELSEWHERE = "that fused_params or apply_optimizer_in_backward ask for"


@dataclass(frozen=True, eq=False)
class CarriedOptions:
    """A table's options in its ``fused_params``.

    All objects are equal whose ``servers`` and ``frozen`` are, and which have
    ``device_rows`` or have none.

    TorchRec's ``group_tables`` (torchrec 1.8.0) places tables in one kernel, which
    saves a pass over the batch, if their ``fused_params`` are equal. Never read the
    options of a group, which are those of only one of its tables.
    """

    options: TableOptions
    row_name: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CarriedOptions) and self._of_group == other._of_group

    def __hash__(self) -> int:
        return hash((CarriedOptions, *self._of_group))

    @property
    def _of_group(self) -> tuple[Servers | None, bool, bool]:
        """The options that all tables of a kernel have in common."""
        has_device_rows = bool(self.options.device_rows)
        return self.options.servers, self.options.frozen, has_device_rows


def carried_options(fused_params: Mapping[str, Any] | None) -> CarriedOptions:
    """Returns the options and the row name in a table's ``fused_params``.

    Default: the default options, and no name.
    """
    carried = (fused_params or {}).get(OPTIONS_KEY)
    if isinstance(carried, CarriedOptions):
        return carried
    return CarriedOptions(TableOptions())


def table_options(fused_params: Mapping[str, Any] | None) -> TableOptions:
    """Returns the options in a table's ``fused_params``. Default: the default options."""
    return carried_options(fused_params).options


def accumulation_steps(fused_params: Mapping[str, Any] | None) -> int:
    """Returns the number of backward passes of one update."""
    return int((fused_params or {}).get(ACCUMULATION_KEY, 1))


def stochastic_rounding(
    fused_params: Mapping[str, Any] | None,
    table_names: Sequence[str],
    dtype: torch.dtype,
) -> bool:
    """Returns whether updates of narrow rows are rounded stochastically.

    Default: for 8-bit rows, as in FBGEMM on CPU.

    Raises ValueError, which names the tables, for another value than a bool, or False
    for 8-bit rows.
    """
    rounding = (fused_params or {}).get("stochastic_rounding", dtype is torch.int8)
    subject = f"{_subject(table_names)}: fused_params['stochastic_rounding']"
    if not isinstance(rounding, bool):
        raise ValueError(f"{subject} must be a bool, got {rounding!r}")
    if dtype is torch.int8 and not rounding:
        raise ValueError(
            f"{subject} = False is not supported for data_type INT8, because small"
            " updates would be lost: leave it out"
        )
    return rounding


def state_dtype(
    fused_params: Mapping[str, Any] | None,
    table_names: Sequence[str],
) -> torch.dtype:
    """Returns the data type of a table's optimizer states: float32 or float16.

    Default: float32.

    ``optimizer_state_dtypes`` is FBGEMM's form: a mapping from ``momentum1`` and
    ``momentum2``, the states in the order of :func:`state_names`, to ``SparseType``.
    Raises ValueError, which names the tables, if the keys disagree.
    """
    params = dict(fused_params or {})
    subject = _subject(table_names)
    of_all_states = _one_state_dtype(
        params.get("state_dtype"),
        "['state_dtype']",
        subject,
    )
    by_state = params.get("optimizer_state_dtypes")
    if not by_state:
        return of_all_states or torch.float32
    setting = f"fused_params['optimizer_state_dtypes'] = {by_state!r}"
    states = state_names(optimizer_from_fused_params(params, table_names))
    names = [f"momentum{number}" for number in range(1, len(states) + 1)]
    if not isinstance(by_state, Mapping) or not set(by_state) <= _MOMENTA:
        raise ValueError(
            f"{subject}: {setting} must map 'momentum1' and 'momentum2' to data types"
        )
    dtypes: set[torch.dtype] = set()
    for name in {*names, *by_state}:
        key = f"['optimizer_state_dtypes'][{name!r}]"
        dtype = _one_state_dtype(by_state.get(name), key, subject)
        dtypes.add(dtype or torch.float32)
    if len(dtypes) > 1:
        raise ValueError(
            f"{subject}: {setting} is not supported, because all states of a table have"
            f" one data type: name each of {', '.join(names)} with the same"
        )
    dtype_by_state = dtypes.pop()
    if of_all_states is not None and of_all_states != dtype_by_state:
        raise ValueError(
            f"{subject}: fused_params['state_dtype'] = {params['state_dtype']!r}"
            f" disagrees with {setting}"
        )
    return dtype_by_state


def _one_state_dtype(
    value: object,
    key: str,
    subject: str,
) -> torch.dtype | None:
    if value is None:
        return None
    try:
        return _STATE_DTYPES[value]
    except (KeyError, TypeError):
        raise ValueError(
            f"{subject}: fused_params{key} = {value!r} is not supported: only float32 and"
            " float16 are"
        ) from None


def output_dtype(
    fused_params: Mapping[str, Any] | None,
    table_names: Sequence[str],
) -> torch.dtype:
    """Returns the dtype of lookups' results.

    Raises ValueError if it is not FP32, the default, FP16 or BF16.
    """
    dtype = (fused_params or {}).get("output_dtype", SparseType.FP32)
    if dtype not in _OUTPUT_DTYPES:
        names = ", ".join(kind.name for kind in _OUTPUT_DTYPES)
        raise ValueError(
            f"{_subject(table_names)}: fused_params['output_dtype'] = {dtype!r} is not"
            f" supported (only {names} are)"
        )
    return _OUTPUT_DTYPES[dtype]


def _subject(table_names: Sequence[str]) -> str:
    if not table_names:
        return "the sharder"
    return f"RecStore table(s) {', '.join(map(repr, table_names))}"


def optimizer_from_fused_params(
    fused_params: Mapping[str, Any] | None,
    table_names: Sequence[str],
) -> Optimizer:
    """Returns the fused optimizer that ``fused_params`` select.

    Default: SGD with lr 0.01, as in FBGEMM.

    The optimizer of frozen tables on the ranks is always SGD, which has no state.

    Raises ValueError, which names the setting and the tables (all of the sharder, if
    ``table_names`` is empty), if it is not supported. The formulas are FBGEMM's: the
    weight decay of Adam is decoupled, also that of torch.optim.Adam.
    """
    params = dict(fused_params or {})
    subject = _subject(table_names)
    of_sharder: Optimizer | None = params.get(OPTIMIZER_KEY)
    selected = params.get("optimizer")
    kind: type[Optimizer] | None = optim.SGD
    if selected is not None:
        kind = _OPTIMIZERS.get(selected)
    elif of_sharder is not None:
        kind = type(of_sharder)
    if kind is None:
        supported = ", ".join(
            str(name) for name in _OPTIMIZERS if isinstance(name, EmbOptimType)
        )
        raise ValueError(
            f"{subject}: optimizer {selected} is not supported; supported are {supported}"
        )
    if of_sharder is None:
        optimizer = _read(params, kind(), subject)
    else:
        argument = f"optimizer={of_sharder!r}"
        if kind is not type(of_sharder):
            raise ValueError(
                f"{subject}: {argument} {_DISAGREES} optimizer {selected} {_ELSEWHERE}"
            )
        optimizer = _read(params, of_sharder, subject)
        if optimizer != of_sharder:
            raise ValueError(
                f"{subject}: {argument} {_DISAGREES} {optimizer!r} {_ELSEWHERE}"
            )
    options = table_options(params)
    # The optimizer of a table on servers belongs to those who train it.
    if options.frozen and options.servers is None:
        return optim.without_state(optimizer)
    return optimizer


def _read(
    params: Mapping[str, Any],
    default: Optimizer,
    subject: str,
) -> Optimizer:
    """Returns ``default`` with the arguments in ``params``."""
    arguments = {field.name for field in fields(default)}
    _check_keys(params, arguments, subject)
    values: dict[str, Any] = {}
    # The last key takes precedence, as in TorchRec.
    for key in ("lr", "learning_rate"):
        if params.get(key) is not None:
            values["lr"] = _number(params, key, subject)
    for key in ("eps", "weight_decay", "momentum", "eta"):
        if key in arguments and key in params:
            values[key] = _number(params, key, subject)
    if params.get("max_norm"):
        values["max_norm"] = _number(params, "max_norm", subject)
    if params.get("max_gradient_norm") is not None:
        values["max_gradient_norm"] = _number(params, "max_gradient_norm", subject)
    if params.get("gradient_clipping"):
        clipping = {"max_gradient": 1.0, **params}
        values["max_gradient"] = _number(clipping, "max_gradient", subject)
    if isinstance(default, optim.Adam):
        values["betas"] = _betas(params, default.betas, subject)
    mode = _weight_decay_mode(params, default, subject)
    if mode is not None:
        values["weight_decay_mode"] = mode
    try:
        return replace(default, **values)
    except ValueError as error:
        raise ValueError(f"{subject}: {error}") from error


def _number(
    params: Mapping[str, Any],
    key: str,
    subject: str,
) -> float:
    try:
        return float(params[key])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{subject}: fused_params[{key!r}] must be a number, got {params[key]!r}"
        ) from error


def _check_keys(
    params: Mapping[str, Any],
    arguments: Set[str],
    subject: str,
) -> None:
    accepted = _READ | _IGNORED | (arguments & _NEUTRAL_UNLESS_READ.keys())
    neutral_values = {**_NEUTRAL, **_NEUTRAL_UNLESS_READ}
    for key, value in params.items():
        # TorchRec adds the latter keys for inference.
        if key in accepted or key.startswith("__register_"):
            continue
        if key not in neutral_values:
            raise ValueError(f"{subject}: unknown key {key!r} in fused_params")
        neutral = neutral_values[key]
        is_empty = neutral is None and value == {}
        if value is not None and value != neutral and not is_empty:
            raise ValueError(
                f"{subject}: fused_params[{key!r}] = {value!r} is not supported (only"
                f" {neutral!r} is)"
            )


def _betas(
    params: Mapping[str, Any],
    default: tuple[float, float],
    subject: str,
) -> tuple[float, float]:
    merged = {
        "beta1": default[0],
        "beta2": default[1],
        **params,
    }
    single = (_number(merged, "beta1", subject), _number(merged, "beta2", subject))
    if "betas" not in params:
        return single
    try:
        first, second = params["betas"]
        betas = (float(first), float(second))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{subject}: betas must be two numbers, got {params['betas']!r}"
        ) from error
    if ("beta1" in params or "beta2" in params) and betas != single:
        raise ValueError(
            f"{subject}: betas={betas} disagrees with beta1 and beta2, which are {single}"
        )
    return betas


def _weight_decay_mode(
    params: Mapping[str, Any],
    optimizer: Optimizer,
    subject: str,
) -> str | None:
    if "weight_decay_mode" not in params:
        return None
    mode = WeightDecayMode(params["weight_decay_mode"])
    if isinstance(optimizer, optim.SGD | optim.Adagrad):
        # Mode NONE is FBGEMM's default. A weight decay that is set must have an effect,
        # so NONE means L2 here.
        allowed = {WeightDecayMode.NONE: "l2", WeightDecayMode.L2: "l2"}
        if not isinstance(optimizer, optim.SGD):
            allowed[WeightDecayMode.DECOUPLE] = "decouple"
    else:
        allowed = {WeightDecayMode.NONE: "", WeightDecayMode.DECOUPLE: ""}
    if mode not in allowed:
        names = " and ".join(allowed_mode.name for allowed_mode in allowed)
        raise ValueError(
            f"{subject}: fused_params['weight_decay_mode'] = {mode} is not supported for"
            f" {type(optimizer).__name__} (only {names} are)"
        )
    return allowed[mode] if isinstance(optimizer, optim.Adagrad) else None
