"""Outputs of 16 bits on several ranks, some of which have no table of a sharding,
against one process and float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.optim import SGD
from torchrec_recstore.planner import RecStoreConstraints
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStoreSharder,
)

from .reference import outputs
from .test_sharded_equals_unsharded import COLUMN, GRID, ROW, TABLE, TABLE_ROW, plan_of
from .workers import run_on_ranks

TORCH_TYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
BAG_TYPES = (TABLE, ROW, COLUMN, "table_column_wise", TABLE_ROW, GRID)
BATCH_SIZE = 5
LEARNING_RATE = 0.05


def bag_tables(count: int) -> list[EmbeddingBagConfig]:
    """Tables in groups of their own, because their rows have other types or other
    poolings.
    """
    types = (DataType.FP32, DataType.FP16, DataType.FP32)
    poolings = (PoolingType.SUM, PoolingType.MEAN, PoolingType.MEAN)
    return [
        EmbeddingBagConfig(
            name=f"t{place}",
            num_embeddings=100,
            embedding_dim=8,
            feature_names=[f"f{place}"],
            data_type=types[place],
            pooling=poolings[place],
        )
        for place in range(count)
    ]


def sequence_tables(count: int) -> list[EmbeddingConfig]:
    types = (DataType.FP32, DataType.FP16, DataType.FP32)
    return [
        EmbeddingConfig(
            name=f"t{place}",
            num_embeddings=100,
            embedding_dim=8,
            feature_names=[f"f{place}"],
            data_type=types[place],
        )
        for place in range(count)
    ]


def batch_of(rank: int, step: int, features: Sequence[str]) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(features) * BATCH_SIZE,), generator=generator)
    ids = torch.randint(-20, 120, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(features), ids, lengths=lengths)


def loss(output: Mapping[str, Tensor]) -> Tensor:
    total = torch.zeros(())
    for value in output.values():
        total = total + ((value.float() + 0.3) ** 2).sum()
    return total


def sharded_model(
    module: nn.Module,
    constraints: Mapping[str, ParameterConstraints],
    output_dtype: DataType | None,
    world_size: int,
) -> DistributedModelParallel:
    fused_params: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_SGD,
        "learning_rate": LEARNING_RATE,
    }
    if output_dtype is not None:
        fused_params["output_dtype"] = output_dtype
    sharders = [
        RecStoreSharder(dict(fused_params)),
        RecStoreEmbeddingCollectionSharder(dict(fused_params)),
    ]
    plan = plan_of(module, constraints, world_size)
    return DistributedModelParallel(
        module, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def compare(
    tables: list[EmbeddingBagConfig] | list[EmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    expected_dtype: torch.dtype,
    rank: int,
    world_size: int,
    *,
    lookup_dtype: torch.dtype,
    output_dtype: DataType | None = None,
) -> None:
    """Trains a sharded model and a float32 module of one process, and compares the
    outputs of each step.

    Args:
        expected_dtype: The data type of the outputs.
        lookup_dtype: The data type to which the results of lookups are rounded.
        output_dtype: The ``output_dtype`` of the sharder. Default: None, it has none.
    """
    meta = torch.device("meta")
    one: nn.Module
    if isinstance(tables[0], EmbeddingBagConfig):
        module: nn.Module = EmbeddingBagCollection(tables, device=meta)
        one = RecStoreEmbeddingBagCollection(tables, optimizer=SGD(lr=LEARNING_RATE))
    else:
        module = EmbeddingCollection(tables, device=meta)
        one = RecStoreEmbeddingCollection(tables, optimizer=SGD(lr=LEARNING_RATE))
    model = sharded_model(module, constraints, output_dtype, world_size)
    features = [name for table in tables for name in table.feature_names]
    where = (
        type(module).__name__,
        len(tables),
        constraints["t0"].sharding_types,
        lookup_dtype,
        expected_dtype,
    )
    tolerance = TOLERANCE[lookup_dtype]
    for step in range(3):
        by_rank = [
            outputs(one(batch_of(other, step, features))) for other in range(world_size)
        ]
        output = outputs(model(batch_of(rank, step, features)).wait())
        for name, value in output.items():
            assert value.dtype == expected_dtype, where
            torch.testing.assert_close(
                value.float(),
                by_rank[rank][name],
                atol=tolerance,
                rtol=tolerance,
                msg=lambda m: f"{where}: {m}",
            )
        total = torch.stack([loss(of_rank) for of_rank in by_rank]).sum() / world_size
        total.backward()
        loss(output).backward()
    model.eval()
    one.eval()
    evaluated = outputs(model(batch_of(rank, 7, features)).wait())
    expected = outputs(one(batch_of(rank, 7, features)))
    for name, value in evaluated.items():
        assert value.dtype == expected_dtype, where
        torch.testing.assert_close(
            value.float(),
            expected[name],
            atol=4 * tolerance,
            rtol=tolerance,
            msg=lambda m: f"evaluated {where}: {m}",
        )


def one_type(rank: int, world_size: int) -> None:
    for output_dtype in (DataType.FP16, DataType.BF16):
        narrow = TORCH_TYPES[output_dtype]
        for count in (1, 2, 3):
            for sharding_type in BAG_TYPES:
                constraints = {
                    f"t{i}": RecStoreConstraints(sharding_types=[sharding_type])
                    for i in range(count)
                }
                # TorchRec divides the sums of rows that are split over ranks by lengths
                # in float32.
                is_divided = count > 1 and sharding_type in (ROW, TABLE_ROW, GRID)
                dtype = torch.float32 if is_divided else narrow
                compare(
                    bag_tables(count),
                    constraints,
                    dtype,
                    rank,
                    world_size,
                    lookup_dtype=narrow,
                    output_dtype=output_dtype,
                )
            for sharding_type in (TABLE, ROW, COLUMN):
                constraints = {
                    f"t{i}": RecStoreConstraints(sharding_types=[sharding_type])
                    for i in range(count)
                }
                compare(
                    sequence_tables(count),
                    constraints,
                    narrow,
                    rank,
                    world_size,
                    lookup_dtype=narrow,
                    output_dtype=output_dtype,
                )


def other_types_for_other_tables(rank: int, world_size: int) -> None:
    """The ranks exchange the results in one collective, so that all of them have the
    widest type.
    """
    for types, expected in (
        ((DataType.FP16, None), torch.float32),
        ((DataType.FP16, DataType.BF16), torch.float32),
        ((DataType.BF16, DataType.BF16), torch.bfloat16),
    ):
        for sharding_type in (TABLE, COLUMN):
            constraints = {
                f"t{i}": RecStoreConstraints(
                    sharding_types=[sharding_type], output_dtype=types[i]
                )
                for i in range(2)
            }
            narrowest = torch.bfloat16 if DataType.BF16 in types else torch.float16
            compare(
                bag_tables(2),
                constraints,
                expected,
                rank,
                world_size,
                lookup_dtype=narrowest,
            )
            compare(
                sequence_tables(2),
                constraints,
                expected,
                rank,
                world_size,
                lookup_dtype=narrowest,
            )


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tables_of_one_sharding_may_have_different_types(world_size: int) -> None:
    run_on_ranks(world_size, other_types_for_other_tables)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_rank_has_outputs_of_16_bits(world_size: int) -> None:
    run_on_ranks(world_size, one_type)
