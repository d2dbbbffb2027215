"""From TorchRec's description of a table to the arguments of a :class:`torchrec_recstore.store.Table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions
from torchrec_recstore.table_configs import ROW_DTYPES, check_config, check_init_fn, initializer_of


def table_arguments(config: BaseEmbeddingConfig, optimizer: Optimizer, options: TableOptions) -> dict[str, Any]:
    """What the table of ``config`` is made with: the same rows as its sharded table has.

    Raises:
        ValueError: data type, initial range, ``init_fn`` or virtual table; the message names the table.
    """
    check_config(config)
    check_init_fn(config, options)
    return {
        "dim": config.embedding_dim,
        "dtype": ROW_DTYPES[config.data_type],
        "optimizer": optimizer,
        "options": replace(options, initializer=initializer_of(config, options)),
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
