"""Checks of TorchRec's table configs, and the initializer that a config asks for.

For sharded and unsharded tables.

Tests: tests/sharders/test_embeddingbag.py, tests/modules/test_embedding_modules.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_recstore.options import (
    Initializer,
    TableOptions,
    UniformInit,
    default_initializer,
)

ROW_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT8: torch.int8,
}


def check_dim(config: BaseEmbeddingConfig) -> None:
    """Raises ValueError, which names the table, if its rows have no columns."""
    if config.embedding_dim < 1:
        raise ValueError(
            f"RecStore table {config.name!r}: embedding_dim must be at least 1, got"
            f" {config.embedding_dim}"
        )


def check_config(config: BaseEmbeddingConfig) -> None:
    """Raises ValueError if rows cannot have a config's dim or data type, or if the
    config asks for another kernel.
    """
    check_dim(config)
    if config.data_type not in ROW_DTYPES:
        raise ValueError(
            f"RecStore table {config.name!r}: data_type {config.data_type} is not"
            f" supported, only {', '.join(kind.name for kind in ROW_DTYPES)} are"
        )
    if config.use_virtual_table:
        raise ValueError(
            f"RecStore table {config.name!r}: use_virtual_table asks for TorchRec's own"
            " kernels: leave it out"
        )


def missing_features(
    features: Sequence[str],
    configs: Iterable[BaseEmbeddingConfig],
) -> str:
    """Describes the features of tables that a batch with ``features`` lacks.

    Is empty if it has them all.
    """
    missing = []
    for config in configs:
        for name in config.feature_names:
            if name not in features:
                missing.append(f"{name!r} of table {config.name!r}")
    if not missing:
        return ""
    return f"the batch has no feature {', '.join(missing)}: it has {list(features)}"


def check_init_fn(config: BaseEmbeddingConfig, options: TableOptions | None) -> None:
    """Raises ValueError if a config has an ``init_fn`` of the user, and ``options``
    have no initializer.
    """
    has_initializer = options is not None and options.initializer is not None
    if not has_initializer and not _is_default_init(config):
        raise ValueError(
            f"RecStore table {config.name!r}: init_fn initializes whole tables, but"
            " rows are created one at a time: set TableOptions.initializer, or the"
            " config's weight_init_min and weight_init_max"
        )


def initializer_of(config: BaseEmbeddingConfig, options: TableOptions) -> Initializer:
    """Returns the initializer of ``options``, or a uniform one with the config's
    ``weight_init_min`` and ``_max``.

    A bound that the config does not set is that of the default initializer. Raises
    ValueError, which names the table, if the range is not valid.
    """
    default = default_initializer(options, config.num_embeddings)
    low = config.weight_init_min
    high = config.weight_init_max
    if options.initializer is not None or (low is None and high is None):
        return default
    if not isinstance(default, UniformInit):
        raise AssertionError("the default initializer is uniform")
    try:
        return UniformInit(
            low=default.low if low is None else low,
            high=default.high if high is None else high,
        )
    except ValueError as error:
        raise ValueError(
            f"RecStore table {config.name!r}: weight_init_min, weight_init_max: {error}"
        ) from error


def _is_default_init(config: BaseEmbeddingConfig) -> bool:
    """Returns whether ``init_fn`` is TorchRec's default
    (``BaseEmbeddingConfig.__post_init__``, torchrec 1.8.0).
    """
    filled_in = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    init_fn = config.init_fn
    return init_fn is None or (
        isinstance(init_fn, partial)
        and init_fn.func is nn.init.uniform_
        and init_fn.keywords == filled_in
    )
