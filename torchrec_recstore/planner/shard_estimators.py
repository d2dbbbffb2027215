"""The planner's estimate of the memory of RecStore tables."""

from __future__ import annotations

import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Shard, SharderDataMap, ShardingOption, Storage
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.optim import Optimizer, state_bytes
from torchrec_recstore.options import resident_rows
from torchrec_recstore.planner.constraints import options_of
from torchrec_recstore.row_types import row_bytes
from torchrec_recstore.sharders import RECSTORE_KERNEL
from torchrec_recstore.sharders.fused_params import optimizer_from_fused_params
from torchrec_recstore.sharders.plan import ResidentParameter
from torchrec_recstore.table_configs import ROW_DTYPES
from torchrec_recstore.torchrec_seams import collection_inside, configs_of, constraints_of, marked_optimizer

OVERHEAD_BYTES_PER_ROW = 32
"""The bytes of index, bookkeeping and alignment per row. Measured: 27 to 30 for 10,000 to 2 million rows."""


class RecStoreStorageEstimator(EmbeddingStorageEstimator):  # type: ignore[misc]
    """A storage estimator that estimates RecStore tables by the host memory of their resident rows.

    The estimate of a RecStore table has the rows that are expected to be resident, with their optimizer state, index
    and bookkeeping, and the table's inputs and outputs, which TorchRec's estimator computes. If the table has an
    admission policy, the estimate of each shard includes the counter of sightings. Tables on TorchRec's kernels are
    estimated by TorchRec's estimator.
    """

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Sets the estimated storage, in bytes, of every shard of the options.

        Args:
            sharding_options: The options whose shards are estimated.
            sharder_data_map: The sharders' data, by module type.

        Raises:
            ValueError: RecStore does not support the optimizer of a RecStore table.
        """
        super().estimate([o for o in sharding_options if o.compute_kernel != RECSTORE_KERNEL], sharder_data_map)
        for option in sharding_options:
            if option.compute_kernel != RECSTORE_KERNEL:
                continue
            fused_params = sharder_data_map[option.module_type_key].fused_params
            optimizer = _optimizer(option.tensor, fused_params, option.name)
            options = options_of(constraints_of(self), option.name)
            rows = resident_rows(options, option.tensor.shape[0])
            counter_bytes = 0 if options.admission is None else options.admission.counter_bytes
            without_rows = _without_rows(option)
            super().estimate([without_rows], sharder_data_map)
            for shard, io in zip(option.shards, without_rows.shards, strict=True):
                shard_rows = -(-rows * shard.size[0] // option.tensor.shape[0])
                of_row = OVERHEAD_BYTES_PER_ROW + _bytes_per_row(shard.size[1], _dtype(option), optimizer)
                resident_bytes = shard_rows * of_row + counter_bytes
                shard.storage = Storage(hbm=io.storage.hbm, ddr=io.storage.ddr + resident_bytes)


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


def _optimizer(parameter: torch.Tensor, fused_params: dict[str, object], table_name: str) -> Optimizer:
    """Returns the table's optimizer: the marks of the parameter take precedence over the sharder's ``fused_params``."""
    optimizer_class, marked = marked_optimizer(parameter)
    if optimizer_class is not None and "optimizer" not in marked:
        marked["optimizer"] = optimizer_type_to_emb_opt_type(optimizer_class)
    if "lr" in marked:
        marked["learning_rate"] = marked.pop("lr")
    return optimizer_from_fused_params({**fused_params, **marked}, [table_name])


def _dtype(option: ShardingOption) -> torch.dtype:
    """Returns the data type of the table's rows. The parameter of an INT8 table is float16 (torchrec 1.8.0)."""
    collection = option.module[1]
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        collection = collection_inside(collection)
    kinds = {config.name: ROW_DTYPES.get(config.data_type) for config in configs_of(collection)}
    return kinds.get(option.name) or option.tensor.dtype


def _bytes_per_row(columns: int, dtype: torch.dtype, optimizer: Optimizer) -> int:
    return row_bytes(dtype, columns) + state_bytes(optimizer, columns)
