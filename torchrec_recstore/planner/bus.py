"""The bytes that the RecStore tables of a plan copy between the host and an accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from torchrec.distributed.planner.estimator.types import ShardPerfContext
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.planner.utils import build_sharder_data
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.utils import convert_to_fbgemm_types
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, DataType, dtype_to_data_type
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_recstore.sharders.fused_params import output_dtype
from torchrec_recstore.sharders.perf import BusBytes, RecStorePerfConfig, bus_bytes


def lookup_type(option: ShardingOption, sharders: Mapping[str, ModuleSharder[nn.Module]]) -> DataType:
    """Returns the data type of the results of a RecStore table's lookups.

    Args:
        option: An option with RecStore's kernel.
        sharders: The sharders, by ``option.module_type_key``.
    """
    if option.output_dtype is not None:
        return option.output_dtype
    fused_params = convert_to_fbgemm_types(dict(build_sharder_data(sharders[option.module_type_key]).fused_params))
    return dtype_to_data_type(output_dtype(fused_params, [option.name]))


def bus_bytes_of(
    option: ShardingOption,
    topology: Topology,
    constraints: dict[str, ParameterConstraints] | None,
    sharders: Mapping[str, ModuleSharder[nn.Module]],
) -> list[BusBytes]:
    """Returns the estimated bytes over the bus in a training step, for each shard of a RecStore table.

    Args:
        option: An option with RecStore's kernel.
        topology: The topology that the option was made for.
        constraints: The constraints, by table name.
        sharders: The sharders, by ``option.module_type_key``.
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
    # TorchRec knows the processors of other modules only (ShardingOption.has_feature_processor, torchrec 1.8.0).
    processed = option.has_feature_processor or isinstance(option.module[1], FeatureProcessedEmbeddingBagCollection)
    return [
        bus_bytes(
            replace(
                context,
                output_data_type_size=itemsize,
                is_weighted=context.is_weighted or processed,
                has_feature_processor=processed,
            )
        )
        for context in contexts
    ]
