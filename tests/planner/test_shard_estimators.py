from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import (
    EmbeddingPerfEstimatorConfig,
    EmbeddingPerfEstimatorFactory,
)
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import get_tensor_size_bytes
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore.optim import Ftrl
from torchrec_recstore.options import MAX_INIT_ROWS, TableOptions
from torchrec_recstore.planner import RecStoreConstraints, RecStoreEnumerator
from torchrec_recstore.sharders import RecStoreSharder
from torchrec_recstore.sharders.plan_entries import ResidentParameter

DIM, ROWS, WORLD = 64, 1000, 2
OVERHEAD = 32


def collection(rows: int = 2**40) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"]
            )
        ],
        device=torch.device("meta"),
    )


def topology(device: str = "cpu") -> Topology:
    return Topology(world_size=WORLD, local_world_size=WORLD, compute_device=device)


def options_by_type(
    ebc: EmbeddingBagCollection,
    fused_params: dict[str, Any] | None = None,
    expected_rows: int | None = ROWS,
    device: str = "cpu",
) -> dict[str, ShardingOption]:
    constraints = {
        "t": RecStoreConstraints(
            options=TableOptions(expected_rows=expected_rows), min_partition=DIM // 2
        )
    }
    enumerator = RecStoreEnumerator(
        topology(device), batch_size=1, constraints=constraints
    )
    found = enumerator.enumerate(ebc, [RecStoreSharder(fused_params=fused_params)])
    assert {option.compute_kernel for option in found} == {"customized_kernel"}
    return {option.sharding_type: option for option in found}


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (EmbOptimType.EXACT_SGD, lambda columns: 0),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, lambda columns: 4),
        (EmbOptimType.EXACT_ADAGRAD, lambda columns: 4 * columns),
        (EmbOptimType.ADAM, lambda columns: 8 * columns),
        (EmbOptimType.PARTIAL_ROWWISE_LAMB, lambda columns: 4 * columns + 4),
    ],
)
def test_storage_is_that_of_resident_rows(optimizer: EmbOptimType, state: Any) -> None:
    found = options_by_type(collection(), {"optimizer": optimizer})
    assert set(found) == {
        "table_wise",
        "column_wise",
        "table_column_wise",
        "row_wise",
        "table_row_wise",
    }
    io_limit = 2048  # The input and output of one bag with one id on each rank.
    for sharding_type, rows, columns in (
        ("table_wise", ROWS, DIM),
        ("row_wise", ROWS // WORLD, DIM),
        ("column_wise", ROWS, DIM // 2),
    ):
        for shard in found[sharding_type].shards:
            expected = rows * (4 * columns + state(columns) + OVERHEAD)
            assert expected < shard.storage.ddr < expected + io_limit
            assert shard.storage.hbm == shard.storage.ssd == 0


def test_the_sharders_own_optimizer_counts() -> None:
    def bytes_with(sharder: RecStoreSharder) -> int:
        constraints = {
            "t": RecStoreConstraints(
                options=TableOptions(expected_rows=ROWS), sharding_types=["table_wise"]
            )
        }
        (option,) = RecStoreEnumerator(topology(), 1, constraints).enumerate(
            collection(), [sharder]
        )
        return int(option.total_storage.ddr)

    assert (
        bytes_with(RecStoreSharder(optimizer=Ftrl())) - bytes_with(RecStoreSharder())
        == ROWS * 8 * DIM
    )


@pytest.mark.parametrize(
    ("data_type", "row_bytes"),
    [(DataType.FP16, 2 * DIM), (DataType.BF16, 2 * DIM), (DataType.INT8, DIM + 8)],
)
def test_narrow_rows_take_less(data_type: DataType, row_bytes: int) -> None:
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=2**40,
        embedding_dim=DIM,
        feature_names=["f"],
        data_type=data_type,
    )
    narrow = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    wide, less = (
        options_by_type(ebc)["table_wise"].total_storage.ddr
        for ebc in (collection(), narrow)
    )
    assert wide - less == pytest.approx(ROWS * (4 * DIM - row_bytes), abs=2048)


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        (EmbOptimType.ADAM, 8 * DIM),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 4),
        (EmbOptimType.EXACT_SGD, 0),
    ],
)
def test_states_in_float16_take_half(optimizer: EmbOptimType, state_bytes: int) -> None:
    params: dict[str, Any] = {"optimizer": optimizer}
    found = [
        options_by_type(collection(), {**params, **more})[
            "table_wise"
        ].total_storage.ddr
        for more in ({}, {"state_dtype": torch.float16})
    ]
    assert found[0] - found[1] == ROWS * state_bytes // 2


def test_the_parameters_own_optimizer_counts() -> None:
    ebc = collection()
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    one = options_by_type(ebc)["table_wise"].total_storage.ddr
    other = options_by_type(collection(), {"optimizer": EmbOptimType.EXACT_ADAGRAD})[
        "table_wise"
    ].total_storage.ddr
    assert one == other


def test_without_expected_rows_the_hint_counts_up_to_a_bound() -> None:
    small = options_by_type(collection(rows=500), expected_rows=None)[
        "table_wise"
    ].total_storage.ddr
    assert 500 * (4 * DIM + OVERHEAD) < small < 510 * (4 * DIM + OVERHEAD)
    large = options_by_type(collection(), expected_rows=None)[
        "table_wise"
    ].total_storage.ddr
    assert (
        MAX_INIT_ROWS * (4 * DIM + OVERHEAD)
        < large
        < (MAX_INIT_ROWS + 10) * (4 * DIM + OVERHEAD)
    )


def test_inputs_and_outputs_are_estimated_as_for_stock_tables() -> None:
    ebc = collection(rows=ROWS)
    stock = EmbeddingEnumerator(topology(), batch_size=512).enumerate(
        ebc, [EmbeddingBagCollectionSharder()]
    )
    stock_table_wise = next(
        option for option in stock if option.sharding_type == "table_wise"
    )
    mine = RecStoreEnumerator(topology(), batch_size=512).enumerate(
        ebc, [RecStoreSharder()]
    )
    table_wise = next(option for option in mine if option.sharding_type == "table_wise")
    assert (
        table_wise.total_storage.ddr - stock_table_wise.total_storage.ddr
        == ROWS * OVERHEAD
    )


def test_rows_stay_in_host_memory_under_a_gpu() -> None:
    storage = options_by_type(collection(), device="cuda")["table_wise"].total_storage
    assert storage.hbm < 4096
    # and the batch, which is copied
    assert storage.ddr == ROWS * (4 * DIM + OVERHEAD) + storage.hbm


@pytest.mark.parametrize("device", ["cpu", "cuda", "mtia"])
def test_stock_estimates_do_not_change(device: str) -> None:
    ebc, where = collection(rows=ROWS), topology(device)
    registered = EmbeddingPerfEstimatorFactory.create(
        DEFAULT_PERF_ESTIMATOR, topology=where
    )
    original = EmbeddingPerfEstimatorFactory.create_with_config(
        EmbeddingPerfEstimatorConfig(), topology=where
    )
    enumerated = [
        EmbeddingEnumerator(
            where, 512, estimator=[perf, EmbeddingStorageEstimator(where)]
        ).enumerate(ebc, [EmbeddingBagCollectionSharder()])
        for perf in (registered, original)
    ]
    assert [[s.perf for s in o.shards] for o in enumerated[0]] == [
        [s.perf for s in o.shards] for o in enumerated[1]
    ]


def test_stock_kernels_of_the_sharder_are_estimated_in_full() -> None:
    constraints = {
        "t": RecStoreConstraints(
            compute_kernels=["fused"], sharding_types=["table_wise"]
        )
    }
    (option,) = RecStoreEnumerator(topology(), 1, constraints).enumerate(
        collection(10**6), [RecStoreSharder()]
    )
    assert option.total_storage.ddr >= 10**6 * DIM * 4


def test_resident_parameter_keeps_shape_and_marks_and_takes_no_memory() -> None:
    ebc = collection()
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    (parameter,) = ebc.parameters()
    view = RecStoreSharder().shardable_parameters(ebc)["t"]
    assert isinstance(view, ResidentParameter)
    assert isinstance(view, torch.nn.Parameter)
    assert view.shape == (2**40, DIM)
    assert view.device.type == "meta"
    assert view._optimizer_classes == parameter._optimizer_classes
    assert get_tensor_size_bytes(view) == MAX_INIT_ROWS * DIM * 4
    assert get_tensor_size_bytes(parameter) == 2**40 * DIM * 4
    assert (
        RecStoreSharder().with_stock_kernels().shardable_parameters(ebc)["t"]
        is parameter
    )


def test_a_copy_that_offers_stock_kernels_leaves_the_sharder_alone() -> None:
    sharder = RecStoreSharder()
    offer = sharder.with_stock_kernels()
    assert sharder.compute_kernels("table_wise", "cpu") == ["customized_kernel"]
    assert sharder.compute_kernels("data_parallel", "cpu") == []
    assert "data_parallel" not in sharder.sharding_types("cpu")
    assert offer.compute_kernels("table_wise", "cpu") == ["customized_kernel", "fused"]
    assert offer.compute_kernels("row_wise", "cpu") == ["customized_kernel"]
    assert offer.compute_kernels("data_parallel", "cpu") == ["dense"]
    assert "fused" in offer.compute_kernels("row_wise", "cuda")
    assert copy.deepcopy(offer).sharding_types("cpu") == offer.sharding_types("cpu")
