"""The planner's estimate of the memory of RecStore tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Shard, SharderDataMap, ShardingOption, Storage
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.optim import state_bytes
from torchrec_recstore.planner.constraints import options_of, planned_rows
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.row_types import row_bytes
from torchrec_recstore.sharders import RECSTORE_KERNEL
from torchrec_recstore.sharders.fused_params import optimizer_from_fused_params, state_dtype
from torchrec_recstore.sharders.plan import ResidentParameter, with_marks
from torchrec_recstore.table_configs import ROW_DTYPES
from torchrec_recstore.torchrec_seams.models import collection_inside, configs_of
from torchrec_recstore.torchrec_seams.planning import constraints_of

OVERHEAD_BYTES_PER_ROW = 32
"""The bytes of index, bookkeeping and alignment per row. Measured: 27 to 30 for 10,000 to 2 million rows."""


class RecStoreStorageEstimator(EmbeddingStorageEstimator):  # type: ignore[misc]
    """A storage estimator that estimates RecStore tables by the host memory of their resident rows.

    The estimate of a RecStore table has the rows that are expected to be resident, with their optimizer state, index
    and bookkeeping, and the table's inputs and outputs, which TorchRec's estimator computes. If the topology's
    ``compute_device`` is an accelerator, the inputs and outputs are in its memory and, for the copies, in host memory,
    too. If the table has an admission policy, the estimate of each shard includes the counter of sightings. Tables on
    TorchRec's kernels are estimated by TorchRec's estimator.

    Args:
        statistics: The statistics of tables by name. A table has at least the measured rows, and at most ``max_rows``.
            Default: None.
        args, kwargs: The arguments of TorchRec's ``EmbeddingStorageEstimator``, in the same order.
    """

    def __init__(self, *args: Any, statistics: Mapping[str, TableStatistics] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._statistics = dict(statistics or {})

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Sets the estimated storage, in bytes, of every shard of the options.

        Args:
            sharding_options: The options whose shards are estimated.
            sharder_data_map: The sharders' data, by module type.

        Raises:
            ValueError: RecStore does not support the optimizer or the ``state_dtype`` of a RecStore table.
        """
        super().estimate([o for o in sharding_options if o.compute_kernel != RECSTORE_KERNEL], sharder_data_map)
        for option in sharding_options:
            if option.compute_kernel != RECSTORE_KERNEL:
                continue
            fused_params = sharder_data_map[option.module_type_key].fused_params
            params = with_marks(fused_params, option.tensor)
            optimizer = optimizer_from_fused_params(params, [option.name])
            itemsize = state_dtype(params, [option.name]).itemsize
            options = options_of(constraints_of(self), option.name)
            remote = options.servers is not None
            measured = self._statistics.get(option.name)
            rows = 0 if remote else planned_rows(options, option.tensor.shape[0], measured)
            counter_bytes = 0 if options.admission is None or remote else options.admission.counter_bytes
            without_rows = _without_rows(option)
            super().estimate([without_rows], sharder_data_map)
            for shard, io in zip(option.shards, without_rows.shards, strict=True):
                shard_rows = -(-rows * shard.size[0] // option.tensor.shape[0])
                columns = shard.size[1]
                of_row = row_bytes(_dtype(option), columns) + state_bytes(optimizer, columns, itemsize)
                resident_bytes = shard_rows * (OVERHEAD_BYTES_PER_ROW + of_row) + counter_bytes
                copied_bytes = io.storage.hbm  # 0 on the CPU
                shard.storage = Storage(hbm=io.storage.hbm, ddr=io.storage.ddr + resident_bytes + copied_bytes)


def _without_rows(option: ShardingOption) -> ShardingOption:
    """Returns ``option`` for a table without rows. TorchRec's estimate of it has only the inputs and outputs."""
    return ShardingOption(
        name=option.name,
        tensor=ResidentParameter.of(option.tensor, rows=0),
        module=option.module,
        input_lengths=option.input_lengths,
        batch_size=option.batch_size,
        sharding_type=option.sharding_type,
        partition_by=option.partition_by,
        compute_kernel=option.compute_kernel,
        shards=[Shard(size=shard.size, offset=shard.offset) for shard in option.shards],
        cache_params=option.cache_params,
        is_pooled=option.is_pooled,
        feature_names=option.feature_names,
        output_dtype=option.output_dtype,
        num_poolings=option.num_poolings,
    )


def _dtype(option: ShardingOption) -> torch.dtype:
    """Returns the data type of the table's rows. The parameter of an INT8 table is float16 (torchrec 1.8.0)."""
    collection = option.module[1]
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        collection = collection_inside(collection)
    kinds = {config.name: ROW_DTYPES.get(config.data_type) for config in configs_of(collection)}
    return kinds.get(option.name) or option.tensor.dtype
