"""The planner's estimates of memory, collectives and copies for RecStore tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.estimator.annotations import bwd_comms, fwd_comms
from torchrec.distributed.planner.estimator.types import ShardPerfContext
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    SharderDataMap,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.planner.utils import build_sharder_data
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.distributed.utils import convert_to_fbgemm_types
from torchrec.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    DataType,
    dtype_to_data_type,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.optim import Optimizer, state_bytes, without_state
from torchrec_recstore.options import LEFT_ID_BYTES, TableOptions, device_rows_of
from torchrec_recstore.planner.constraints import planned_options, planned_rows
from torchrec_recstore.planner.statistics import TableStatistics
from torchrec_recstore.planner.traffic import (
    PlacedTable,
    RankTraffic,
    milliseconds,
    rank_traffic,
)
from torchrec_recstore.row_types import row_bytes
from torchrec_recstore.sharders import RECSTORE_KERNEL
from torchrec_recstore.sharders.fused_params import (
    optimizer_from_fused_params,
    output_dtype,
    state_dtype,
)
from torchrec_recstore.sharders.perf_config import (
    BusBytes,
    RecStorePerfConfig,
    bus_bytes,
    evaluator_of,
)
from torchrec_recstore.sharders.plan_entries import (
    SHARDING_TYPES,
    ResidentParameter,
    with_marks,
)
from torchrec_recstore.table_configs import ROW_DTYPES
from torchrec_recstore.torchrec_seams.models import collection_inside, configs_of
from torchrec_recstore.torchrec_seams.planning import (
    constraints_of,
    default_backward_comms_ms,
    default_forward_comms_ms,
    topology_of,
)
from torchrec_recstore.utils import aligned, ceil_div

OVERHEAD_BYTES_PER_ROW = 32
"""The bytes of index, bookkeeping and alignment per row.

Measured: 27 to 30 for 10,000 to 2 million rows.
"""

_DEVICE_ROW_ALIGNMENT = 16
"""See ``ArenaLayout.stride``."""
_DEVICE_SLOT_BYTES = 16
_DEVICE_NUMBER_BYTES = 4
"""See ``DeviceSlots`` in csrc/rows/device_slots.h."""

_COUNTED = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.ROW_WISE.value,
)


class RecStoreStorageEstimator(EmbeddingStorageEstimator):  # type: ignore[misc]
    """An estimator of the host memory of the resident rows of RecStore tables.

    The estimate of a RecStore table has the rows that are expected to be resident, with
    their optimizer state, index and bookkeeping, and the table's inputs and outputs,
    which TorchRec's estimator computes. If the topology's ``compute_device`` is an
    accelerator, the inputs and outputs are in its memory and, for the copies, in host
    memory, too, and the ``device_rows`` of tables are in its memory. If the table has
    an admission policy, the estimate of each shard includes the counter of sightings.
    Tables on TorchRec's kernels are estimated by TorchRec's estimator.

    Args:
        statistics: The statistics of tables by name. A table has at least the measured
            rows, and at most ``max_rows``. Default: None.
        args, kwargs: The arguments of TorchRec's ``EmbeddingStorageEstimator``, in the
            same order.
    """

    def __init__(
        self,
        *args: Any,
        statistics: Mapping[str, TableStatistics] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._statistics = dict(statistics or {})

    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_data_map: SharderDataMap,
    ) -> None:
        """Sets the estimated storage, in bytes, of every shard of the options.

        Args:
            sharding_options: The options whose shards are estimated.
            sharder_data_map: The sharders' data, by module type.

        Raises:
            ValueError: RecStore does not support the optimizer or the ``state_dtype``
                of a RecStore table.
        """
        stock_options = []
        for option in sharding_options:
            if option.compute_kernel == RECSTORE_KERNEL:
                self._estimate_recstore(option, sharder_data_map)
            else:
                stock_options.append(option)
        super().estimate(stock_options, sharder_data_map)

    def _estimate_recstore(
        self,
        option: ShardingOption,
        sharder_data_map: SharderDataMap,
    ) -> None:
        """Sets the estimated storage of every shard of a RecStore table."""
        sharder_data = sharder_data_map[option.module_type_key]
        params = with_marks(sharder_data.fused_params, option.tensor)
        optimizer = optimizer_from_fused_params(params, [option.name])
        itemsize = state_dtype(params, [option.name]).itemsize

        num_embeddings = option.tensor.shape[0]
        measured = self._statistics.get(option.name)
        options = planned_options(
            constraints_of(self),
            option.name,
            num_embeddings,
            measured,
        )
        if options.frozen or not option.tensor.requires_grad:
            optimizer = without_state(optimizer)
        rows = 0
        counter_bytes = 0
        if options.servers is None:
            rows = planned_rows(options, num_embeddings, measured)
            if options.admission is not None:
                counter_bytes = options.admission.counter_bytes
        record_bytes = LEFT_ID_BYTES * (options.left_ids or 0)
        without_rows = _without_rows(option)
        super().estimate([without_rows], sharder_data_map)
        for shard, io_shard in zip(option.shards, without_rows.shards, strict=True):
            columns = shard.size[1]
            weight_bytes = row_bytes(dtype_of(option), columns)
            states_bytes = state_bytes(optimizer, columns, itemsize)
            bytes_per_row = OVERHEAD_BYTES_PER_ROW + weight_bytes + states_bytes
            # The part of the rows that belongs to the shard, rounded up.
            shard_rows = ceil_div(rows * shard.size[0], num_embeddings)
            io_storage = io_shard.storage
            hbm = io_storage.hbm
            ddr = io_storage.ddr
            if topology_of(self).compute_device != "cpu":
                device_rows = device_rows_of_shard(options, option, shard)
                row_on_device = device_row_bytes(option, columns, optimizer)
                hbm += device_rows * row_on_device
                ddr += device_slot_bytes(device_rows, shard_rows)
            ddr += shard_rows * bytes_per_row
            ddr += counter_bytes + record_bytes
            ddr += io_storage.hbm  # for the copies; 0 on the CPU
            shard.storage = Storage(hbm=hbm, ddr=ddr)


def device_rows_of_shard(
    options: TableOptions,
    option: ShardingOption,
    shard: Shard,
) -> int:
    """Returns the number of ``device_rows`` of a shard."""
    rows = device_rows_of(options) * shard.size[0]
    return ceil_div(rows, option.tensor.shape[0])


def device_slot_bytes(device_rows: int, rows: int) -> int:
    """Returns the bytes by which the host knows which of its rows are on the device."""
    if not device_rows:
        return 0
    return _DEVICE_SLOT_BYTES * device_rows + _DEVICE_NUMBER_BYTES * rows


def device_row_bytes(
    option: ShardingOption,
    columns: int,
    optimizer: Optimizer,
) -> int:
    """Returns the bytes of a row of a shard in the memory of the device.

    Each row has the weights and the states of the optimizer, padded to 16 bytes.
    """
    bytes_of_row = row_bytes(dtype_of(option), columns) + state_bytes(
        optimizer,
        columns,
    )
    return aligned(bytes_of_row, _DEVICE_ROW_ALIGNMENT)


def _without_rows(option: ShardingOption) -> ShardingOption:
    """Returns ``option`` for a table without rows.

    TorchRec's estimate of it has only the inputs and outputs.
    """
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


def dtype_of(option: ShardingOption) -> torch.dtype:
    """Returns the data type of the table's rows.

    The parameter of an INT8 table is float16 (torchrec 1.8.0).
    """
    collection = option.module[1]
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        collection = collection_inside(collection)
    for config in configs_of(collection):
        if config.name == option.name and config.data_type in ROW_DTYPES:
            return ROW_DTYPES[config.data_type]
    dtype: torch.dtype = option.tensor.dtype
    return dtype


class MeasuredPerfConfig(RecStorePerfConfig):
    """The config of TorchRec's performance estimator with measured speeds.

    They are by the names of the tables.

    TorchRec's formulas count the pooled rows and their gradients, and not the ids,
    their lengths and their weights, and add the time of a copy on a GPU to the
    gradients of row-wise tables (torchrec 1.8.0). For RecStore tables that were
    measured, the bytes of :func:`rank_traffic` count instead, at the topology's
    bandwidths.
    """

    @fwd_comms(SHARDING_TYPES)  # type: ignore[untyped-decorator]
    def forward_comms_ms(self, context: ShardPerfContext) -> float:
        """Returns the milliseconds of the collectives before and after the lookups."""
        return self._comms_ms(context, default_forward_comms_ms, of_gradients=False)

    @bwd_comms(SHARDING_TYPES)  # type: ignore[untyped-decorator]
    def backward_comms_ms(self, context: ShardPerfContext) -> float:
        """Returns the estimated milliseconds of the collectives with gradients."""
        return self._comms_ms(context, default_backward_comms_ms, of_gradients=True)

    def _comms_ms(
        self,
        context: ShardPerfContext,
        default: Callable[..., float],
        *,
        of_gradients: bool,
    ) -> float:
        if not self._counts(context):
            return default(evaluator_of(context), context, self)
        bandwidths = context.comms_bandwidths
        assert bandwidths is not None
        total_ms = 0.0
        for traffic in _traffic(context):
            if (traffic.collective == "gradients") == of_gradients:
                total_ms += milliseconds(
                    traffic,
                    bandwidths.intra_host_bw,
                    bandwidths.inter_host_bw,
                    "cuda" if self._over_bus else "cpu",
                )
        return total_ms

    def _counts(self, context: ShardPerfContext) -> bool:
        # On one rank no bytes are exchanged. TorchRec's formulas then prefer table-wise
        # tables, which need no copies.
        return (
            context.table_name in self._measured
            and context.world_size > 1
            and context.compute_kernel == RECSTORE_KERNEL
            and context.sharding_type in _COUNTED
            and context.is_pooled
        )


def _traffic(context: ShardPerfContext) -> list[RankTraffic]:
    """Returns the bytes of the rank with the shard.

    Those of ranks without a shard of the table are not counted.
    """
    bags = 0.0
    ids = 0.0
    for poolings, batch_size, length in zip(
        context.num_poolings,
        context.batch_sizes,
        context.input_lengths,
        strict=True,
    ):
        bags += poolings * batch_size
        ids += poolings * batch_size * length
    if context.sharding_type == ShardingType.ROW_WISE.value:
        sharding_type = "row_wise"
        ranks = tuple(range(context.world_size))
        element_bytes = context.fwd_sr_comm_data_type_size
    else:
        # The evaluation is that of one shard: a shard of columns exchanges as much as a
        # table with its columns does.
        sharding_type = "table_wise"
        ranks = (0,)
        element_bytes = context.fwd_a2a_comm_data_type_size
    table = PlacedTable(
        sharding_type=sharding_type,
        ranks=ranks,
        dim=context.emb_dim,
        features=round(bags),
        ids_per_sample=ids,
        weighted=context.is_weighted,
        element_bytes=element_bytes,
    )
    return rank_traffic(
        [table],
        0,
        context.world_size,
        1,
        context.local_world_size,
    )


def lookup_type(
    option: ShardingOption,
    sharders: Mapping[str, ModuleSharder[nn.Module]],
) -> DataType:
    """Returns the data type of the results of a RecStore table's lookups.

    See :func:`bus_bytes_of` for sharders.
    """
    if option.output_dtype is not None:
        return option.output_dtype
    sharder_data = build_sharder_data(sharders[option.module_type_key])
    fused_params = convert_to_fbgemm_types(dict(sharder_data.fused_params))
    return dtype_to_data_type(output_dtype(fused_params, [option.name]))


def bus_bytes_of(
    option: ShardingOption,
    topology: Topology,
    constraints: dict[str, ParameterConstraints] | None,
    sharders: Mapping[str, ModuleSharder[nn.Module]],
) -> list[BusBytes]:
    """Returns the bytes between host and accelerator in a step, for each shard.

    They are estimates for a RecStore table.

    The sharders are by ``option.module_type_key``.
    """
    contexts = ShardPerfContext.build_shard_perf_contexts(
        RecStorePerfConfig(),
        [shard.size for shard in option.shards],
        option,
        topology,
        constraints,
        build_sharder_data(sharders[option.module_type_key]),
    )
    itemsize = DATA_TYPE_NUM_BITS[lookup_type(option, sharders)] / 8
    # TorchRec knows the processors of other modules only
    # (ShardingOption.has_feature_processor, torchrec 1.8.0).
    processed = option.has_feature_processor or isinstance(
        option.module[1],
        FeatureProcessedEmbeddingBagCollection,
    )
    shard_bytes = []
    for context in contexts:
        corrected = replace(
            context,
            is_weighted=context.is_weighted or processed,
            output_data_type_size=itemsize,
            has_feature_processor=processed,
        )
        shard_bytes.append(bus_bytes(corrected))
    return shard_bytes
