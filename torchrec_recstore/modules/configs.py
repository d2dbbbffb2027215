"""From TorchRec's description of a table to the arguments of a :class:`torchrec_recstore.store.Table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import Initializer, TableOptions, UniformInit, default_initializer

_ROW_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}


def table_arguments(config: BaseEmbeddingConfig, optimizer: Optimizer, options: TableOptions) -> dict[str, Any]:
    """What the table of ``config`` is made with: the same rows as its sharded table has.

    Raises:
        ValueError: data type, initial range, ``init_fn`` or virtual table; the message names the table.
    """
    where = f"RecStore table {config.name!r}"
    if config.data_type not in _ROW_DTYPES:
        names = ", ".join(kind.name for kind in _ROW_DTYPES)
        raise ValueError(f"{where}: data_type {config.data_type} is not supported, only {names} are")
    if config.use_virtual_table:
        raise ValueError(f"{where}: use_virtual_table asks for another kernel of TorchRec's")
    if options.initializer is None and not _is_default_init(config):
        raise ValueError(
            f"{where}: init_fn initialises whole tables, but rows are made one at a time: set "
            "TableOptions.initializer, or the config's weight_init_min and weight_init_max"
        )
    try:
        initializer = _initializer(config, options)
    except ValueError as error:
        raise ValueError(f"{where}: weight_init_min, weight_init_max: {error}") from error
    return {
        "dim": config.embedding_dim,
        "dtype": _ROW_DTYPES[config.data_type],
        "optimizer": optimizer,
        "options": replace(options, initializer=initializer),
        "name": config.name,
    }


def options_of_tables(
    options: TableOptions | Mapping[str, TableOptions], configs: Sequence[BaseEmbeddingConfig]
) -> list[TableOptions]:
    """Each table's options, of a mapping by name or one for all.

    Raises:
        TypeError: something else.
        ValueError: a name that no table has.
    """
    if isinstance(options, TableOptions):
        return [options] * len(configs)
    if not isinstance(options, Mapping) or not all(isinstance(value, TableOptions) for value in options.values()):
        raise TypeError("options must be TableOptions, or a mapping of them by table name")
    unknown = sorted(set(options) - {config.name for config in configs})
    if unknown:
        raise ValueError(f"options name unknown table(s) {', '.join(map(repr, unknown))}")
    return [options.get(config.name, TableOptions()) for config in configs]


def _initializer(config: BaseEmbeddingConfig, options: TableOptions) -> Initializer:
    default = default_initializer(options, config.num_embeddings)
    low, high = config.weight_init_min, config.weight_init_max
    if options.initializer is not None or (low is None and high is None):
        return default
    assert isinstance(default, UniformInit)
    return UniformInit(default.low if low is None else low, default.high if high is None else high)


def _is_default_init(config: BaseEmbeddingConfig) -> bool:
    """Whether ``init_fn`` is the one that TorchRec fills in (``BaseEmbeddingConfig.__post_init__``, torchrec 1.8.0)."""
    filled_in = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    init_fn = config.init_fn
    return init_fn is None or (
        isinstance(init_fn, partial) and init_fn.func is nn.init.uniform_ and init_fn.keywords == filled_in
    )
