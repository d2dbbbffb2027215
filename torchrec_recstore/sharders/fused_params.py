"""What TorchRec's ``fused_params`` mean for a RecStore table: its optimizer, and its options on their way to it.

FBGEMM's names and defaults: ``SplitTableBatchedEmbeddingBagsCodegen.__init__`` (fbgemm-gpu 1.8.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.embedding_types import OptimType

from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import TableOptions

OPTIONS_KEY = "recstore_options"
"""The key in ``fused_params`` under which a table's :class:`TableOptions` travel."""

_OPTIMIZERS: dict[Enum, type[Optimizer]] = {
    EmbOptimType.SGD: SGD,  # FBGEMM's inexact form of the same update: it differs only in the order of sums
    EmbOptimType.EXACT_SGD: SGD,
    OptimType.SGD: SGD,
    EmbOptimType.EXACT_ADAGRAD: Adagrad,
    OptimType.ADAGRAD: Adagrad,
    EmbOptimType.ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
    OptimType.ROWWISE_ADAGRAD: RowWiseAdagrad,
}

_READ = frozenset(
    {"optimizer", "learning_rate", "lr", "eps", "weight_decay", "weight_decay_mode", OPTIONS_KEY},
)

# Keys that cannot change a RecStore table's numbers, whatever their value.
_IGNORED: frozenset[str] = frozenset(
    {
        # Where FBGEMM keeps rows on an accelerator, and how it moves them: RecStore rows live in host memory.
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
        # Rounding of 16-bit weights: RecStore rows are fp32.
        "stochastic_rounding",
        # Every int64 is a valid id, and it is never narrowed.
        "bounds_check_mode",
        "embedding_table_index_type",
        "embedding_table_offset_type",
        # Which kernel computes the same numbers.
        "_batch_key",
        "use_experimental_tbe",
        "use_one_tbe_per_table",
        # Arguments of optimizers other than the ones supported here; FBGEMM passes them by as well.
        "beta1",
        "beta2",
        "eta",
        # Read by FBGEMM only together with gradient_clipping, which is refused below.
        "max_gradient",
    }
)

# Keys that would change the numbers; accepted only where they ask for nothing.
_NEUTRAL: dict[str, object] = {
    "counter_based_regularization": None,
    "cowclip_regularization": None,
    "emainplace_mode": None,
    "enable_raw_embedding_streaming": False,
    "ensemble_mode": None,
    "extra_optimizer_config": None,
    "global_weight_decay": None,
    "gradient_clipping": False,
    "max_norm": 0.0,
    # FBGEMM's SGD silently has none; whoever sets it expects it.
    "momentum": 0.0,
    "optimizer_state_dtypes": None,
    "output_dtype": SparseType.FP32,
    "weights_precision": SparseType.FP32,
}


class CarriedOptions:
    """Takes a table's options through ``fused_params`` without splitting groups.

    TorchRec's ``group_tables`` (torchrec 1.8.0) puts tables into one kernel where the values of their ``fused_params``
    compare equal and hash alike. Tables that differ in options alone must share a kernel, because each kernel costs a
    pass over the batch, so every carrier equals every other. Read it from the table's own ``fused_params``, never from
    the group's, which keep those of one table only.
    """

    def __init__(self, options: TableOptions) -> None:
        self.options = options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CarriedOptions)

    def __hash__(self) -> int:
        return hash(CarriedOptions)

    def __repr__(self) -> str:
        return f"CarriedOptions({self.options!r})"


def table_options(fused_params: Mapping[str, Any] | None) -> TableOptions:
    """The options that a table's own ``fused_params`` carry; default options where the plan carried none."""
    carried = (fused_params or {}).get(OPTIONS_KEY)
    return carried.options if isinstance(carried, CarriedOptions) else TableOptions()


def optimizer_from_fused_params(fused_params: Mapping[str, Any] | None, table_names: Sequence[str]) -> Optimizer:
    """The fused optimizer that ``fused_params`` select; FBGEMM's default, SGD with lr 0.01, where they name none.

    Args:
        fused_params: a table's merged ``fused_params``.
        table_names: the tables concerned, for error messages.

    Raises:
        ValueError: an optimizer, a key or a value that RecStore does not support; the message names it and the tables.
    """
    params = dict(fused_params or {})
    where = f"RecStore table(s) {', '.join(map(repr, table_names))}"
    _check_keys(params, where)
    selected = params.get("optimizer", EmbOptimType.EXACT_SGD)
    optimizer = _OPTIMIZERS.get(selected)
    if optimizer is None:
        supported = ", ".join(str(name) for name in _OPTIMIZERS if isinstance(name, EmbOptimType))
        raise ValueError(f"{where}: optimizer {selected} is not supported; supported are {supported}")
    arguments = {"lr": float(params.get("learning_rate", params.get("lr", 0.01)))}
    arguments["weight_decay"] = _weight_decay(params, where)
    if optimizer is not SGD:
        arguments["eps"] = float(params.get("eps", 1.0e-8))
    try:
        return optimizer(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_keys(params: Mapping[str, Any], where: str) -> None:
    for key, value in params.items():
        if key in _READ or key in _IGNORED or key.startswith("__register_"):  # the latter: TorchRec's inference marks
            continue
        if key not in _NEUTRAL:
            raise ValueError(f"{where}: unknown key {key!r} in fused_params")
        neutral = _NEUTRAL[key]
        if value is not None and value != neutral and not (neutral is None and value == {}):
            raise ValueError(f"{where}: fused_params[{key!r}] = {value!r} is not supported (only {neutral!r} is)")


def _weight_decay(params: Mapping[str, Any], where: str) -> float:
    mode = WeightDecayMode(params.get("weight_decay_mode", WeightDecayMode.NONE))
    if mode not in (WeightDecayMode.NONE, WeightDecayMode.L2):
        raise ValueError(
            f"{where}: fused_params['weight_decay_mode'] = {mode} is not supported (only NONE and L2 are; "
            "either way weight_decay is added to the gradient)"
        )
    return float(params.get("weight_decay", 0.0))
