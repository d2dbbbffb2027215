from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.embedding_types import OptimType
from torchrec.distributed.types import BoundsCheckMode, CacheAlgorithm

from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from torchrec_recstore.options import TableOptions
from torchrec_recstore.sharders import RecStoreParameterSharding
from torchrec_recstore.sharders.fused_params import (
    OPTIMIZER_KEY,
    OPTIONS_KEY,
    CarriedOptions,
    optimizer_from_fused_params,
    state_dtype,
    table_options,
)
from torchrec_recstore.sharders.plan_entries import entries_are_read_by_recstore

ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
BOTH = {"momentum1": SparseType.FP16, "momentum2": SparseType.FP16}


@pytest.mark.parametrize(
    ("fused_params", "expected"),
    [
        (None, SGD(lr=0.01)),
        ({}, SGD(lr=0.01)),
        ({"learning_rate": 0.5}, SGD(lr=0.5)),
        ({"lr": 0.25, "learning_rate": 0.5}, SGD(lr=0.5)),
        ({"learning_rate": 0.5, "lr": 0.25}, SGD(lr=0.5)),
        ({"lr": 0.5}, SGD(lr=0.5)),
        (
            {"optimizer": EmbOptimType.SGD, "weight_decay": 0.1},
            SGD(lr=0.01, weight_decay=0.1),
        ),
        ({"optimizer": OptimType.SGD, "eps": 0.5}, SGD(lr=0.01)),
        (
            {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.2},
            Adagrad(lr=0.2, eps=1e-8),
        ),
        ({"optimizer": OptimType.ADAGRAD, "eps": 1e-3}, Adagrad(lr=0.01, eps=1e-3)),
        (
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-3},
            RowWiseAdagrad(lr=0.01, eps=1e-3),
        ),
        ({"optimizer": EmbOptimType.ROWWISE_ADAGRAD}, RowWiseAdagrad()),
        (
            {
                "optimizer": OptimType.ROWWISE_ADAGRAD,
                "weight_decay": 0.1,
                "weight_decay_mode": WeightDecayMode.L2,
            },
            RowWiseAdagrad(weight_decay=0.1),
        ),
        (
            {
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "weight_decay_mode": WeightDecayMode.DECOUPLE,
                "max_norm": 2,
            },
            RowWiseAdagrad(weight_decay_mode="decouple", max_norm=2.0),
        ),
        (
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "max_norm": 0.0},
            RowWiseAdagrad(),
        ),
        (
            {"momentum": 0.9, "nesterov": False, "dampening": 0, "foreach": None},
            SGD(momentum=0.9),
        ),
        ({"gradient_clipping": True}, SGD(max_gradient=1.0)),
        ({"gradient_clipping": True, "max_gradient": 0.5}, SGD(max_gradient=0.5)),
        ({"max_gradient_norm": 0.5}, SGD(max_gradient_norm=0.5)),
        ({"optimizer": EmbOptimType.ADAM}, Adam(lr=0.01, betas=(0.9, 0.999), eps=1e-8)),
        (
            {"optimizer": EmbOptimType.ADAM, "beta1": 0.8, "weight_decay": 0.1},
            Adam(betas=(0.8, 0.999), weight_decay=0.1),
        ),
        (
            {"optimizer": OptimType.ADAM, "betas": [0.8, 0.9], "amsgrad": False},
            Adam(betas=(0.8, 0.9)),
        ),
        (
            {
                "optimizer": EmbOptimType.ADAM,
                "weight_decay_mode": WeightDecayMode.DECOUPLE,
            },
            Adam(),
        ),
        ({"optimizer": OptimType.ADAMW, "lr": 0.1}, AdamW(lr=0.1)),
        (
            {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "beta2": 0.9},
            PartialRowWiseAdam(betas=(0.9, 0.9)),
        ),
        ({"optimizer": EmbOptimType.LAMB, "eps": 1e-6}, LAMB(eps=1e-6)),
        ({"optimizer": OptimType.PARTIAL_ROWWISE_LAMB}, PartialRowWiseLAMB()),
        (
            {"optimizer": EmbOptimType.LARS_SGD},
            LARSSGD(lr=0.01, momentum=0.9, eta=0.001),
        ),
        (
            {"optimizer": OptimType.LARS_SGD, "eta": 0.1, "momentum": 0.0},
            LARSSGD(momentum=0.0, eta=0.1),
        ),
        ({OPTIMIZER_KEY: Ftrl(lr=0.05)}, Ftrl(lr=0.05)),
        ({OPTIMIZER_KEY: Ftrl(lr=0.05), "learning_rate": 0.05}, Ftrl(lr=0.05)),
        ({OPTIMIZER_KEY: Adam(lr=0.05), "optimizer": EmbOptimType.ADAM}, Adam(lr=0.05)),
    ],
)
def test_optimizer(fused_params: dict[str, Any] | None, expected: Optimizer) -> None:
    assert optimizer_from_fused_params(fused_params, ["t"]) == expected


@pytest.mark.parametrize(
    ("fused_params", "named"),
    [
        ({"optimizer": EmbOptimType.SHAMPOO}, "shampoo"),
        ({"optimizer": OptimType.LION}, "LION"),
        ({"optimizer": "sgd"}, "sgd"),
        ({"learning_rte": 0.1}, "learning_rte"),
        ({"momentum": 1.5}, "momentum"),
        ({"eps": "small", "optimizer": EmbOptimType.ADAM}, "eps.*small"),
        ({"betas": 0.9, "optimizer": EmbOptimType.ADAM}, "betas.*0.9"),
        ({"beta1": None, "optimizer": EmbOptimType.LAMB}, "beta1"),
        ({OPTIMIZER_KEY: Ftrl(), "weight_decay": 0.1}, "weight_decay"),
        ({"optimizer": EmbOptimType.ADAM, "momentum": 0.9}, "momentum"),
        ({"optimizer": EmbOptimType.ADAM, "beta1": 1.0}, "betas"),
        (
            {"optimizer": EmbOptimType.ADAM, "betas": (0.8, 0.9), "beta1": 0.9},
            "betas.*beta1",
        ),
        (
            {"optimizer": EmbOptimType.ADAM, "weight_decay_mode": WeightDecayMode.L2},
            "weight_decay_mode.*Adam",
        ),
        ({"optimizer": EmbOptimType.ADAM, "amsgrad": True}, "amsgrad"),
        ({"nesterov": True}, "nesterov"),
        ({"gradient_clipping": True, "max_gradient": 0.0}, "max_gradient"),
        (
            {OPTIMIZER_KEY: Ftrl(), "optimizer": EmbOptimType.EXACT_SGD},
            r"Ftrl\(.*exact_sgd",
        ),
        (
            {OPTIMIZER_KEY: Ftrl(lr=0.05), "learning_rate": 0.1},
            r"Ftrl\(.*0\.05.*Ftrl\(.*0\.1",
        ),
        ({OPTIMIZER_KEY: SGD(), "weight_decay": 0.1}, "SGD.*weight_decay=0.1"),
        ({"max_norm": 1.0}, "max_norm"),
        ({"weights_precision": SparseType.FP16}, "weights_precision"),
        ({"weight_decay_mode": WeightDecayMode.DECOUPLE}, "weight_decay_mode"),
        ({"learning_rate": -1.0}, "lr"),
        ({"learning_rate": float("nan")}, "lr"),
    ],
)
def test_refusals_name_the_key_and_the_tables(
    fused_params: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named) as error:
        optimizer_from_fused_params(fused_params, ["t_user", "t_item"])
    assert "'t_user', 't_item'" in str(error.value)


def test_keys_that_cannot_change_the_numbers_are_passed_by() -> None:
    harmless = {
        "cache_algorithm": CacheAlgorithm.LFU,
        "cache_load_factor": 0.1,
        "cache_precision": SparseType.FP16,
        "prefetch_pipeline": True,
        "enforce_hbm": True,
        "stochastic_rounding": True,
        "bounds_check_mode": BoundsCheckMode.FATAL,
        "output_dtype": SparseType.FP32,
        "weights_precision": SparseType.FP32,
        "gradient_clipping": False,
        "max_gradient": 1.0,
        "momentum": 0.0,
        "beta1": 0.9,
        "optimizer_state_dtypes": {"momentum1": SparseType.FP16},
        "state_dtype": torch.float16,
        "embedding_table_index_type": torch.int64,
        "__register_tbe_bounds_check_mode": None,
    }
    assert optimizer_from_fused_params(harmless, ["t"]) == SGD()


@pytest.mark.parametrize(
    ("fused_params", "expected"),
    [
        ({}, torch.float32),
        ({"state_dtype": None, "optimizer_state_dtypes": None}, torch.float32),
        ({"state_dtype": torch.float32, "optimizer_state_dtypes": {}}, torch.float32),
        ({"state_dtype": torch.float16}, torch.float16),
        ({"state_dtype": SparseType.FP16}, torch.float16),
        (
            {**ADAGRAD, "optimizer_state_dtypes": {"momentum1": SparseType.FP32}},
            torch.float32,
        ),
        (
            {**ADAGRAD, "optimizer_state_dtypes": {"momentum1": SparseType.FP16}},
            torch.float16,
        ),
        ({OPTIMIZER_KEY: Adam(), "optimizer_state_dtypes": BOTH}, torch.float16),
        (
            {
                OPTIMIZER_KEY: Adam(),
                "optimizer_state_dtypes": BOTH,
                "state_dtype": torch.float16,
            },
            torch.float16,
        ),
    ],
)
def test_the_data_type_of_states(
    fused_params: dict[str, Any], expected: torch.dtype
) -> None:
    assert state_dtype(fused_params, ["t"]) is expected


@pytest.mark.parametrize(
    ("fused_params", "named"),
    [
        (
            {"state_dtype": torch.bfloat16},
            r"\['state_dtype'\] = torch\.bfloat16.*only float32 and float16",
        ),
        (
            {"state_dtype": [torch.float16]},
            r"\['state_dtype'\] = \[torch\.float16\].*only float32 and float16",
        ),
        (
            {"optimizer_state_dtypes": {"momentum1": SparseType.BF16}},
            r"\['momentum1'\] = .*BF16.*only float32",
        ),
        (
            {"optimizer_state_dtypes": {"sum": SparseType.FP16}},
            "optimizer_state_dtypes.*'sum'.*'momentum1'",
        ),
        (
            {"optimizer_state_dtypes": SparseType.FP16},
            "optimizer_state_dtypes.*'momentum1'",
        ),
        (
            {
                OPTIMIZER_KEY: Adam(),
                "optimizer_state_dtypes": {"momentum1": SparseType.FP16},
            },
            "optimizer_state_dtypes.*one data type: name each of momentum1, momentum2",
        ),
        (
            {**ADAGRAD, "optimizer_state_dtypes": BOTH, "state_dtype": torch.float32},
            "float32 disagrees with .*FP16",
        ),
    ],
)
def test_other_data_types_of_states_are_refused(
    fused_params: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named) as error:
        state_dtype(fused_params, ["t_user", "t_item"])
    assert "'t_user', 't_item'" in str(error.value)


def test_options_travel_without_splitting_groups() -> None:
    one, other = (
        CarriedOptions(TableOptions(seed=1)),
        CarriedOptions(TableOptions(seed=2)),
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one != TableOptions(seed=1)
    assert {(OPTIONS_KEY, one), (OPTIONS_KEY, other)} == {(OPTIONS_KEY, other)}
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert table_options({OPTIONS_KEY: copied}) == TableOptions(seed=1)
    assert table_options(None) == table_options({}) == TableOptions()


def test_parameter_sharding_pickles_and_compares_with_its_options() -> None:
    sharding = RecStoreParameterSharding(
        "row_wise", "customized_kernel", ranks=[0], options=TableOptions(seed=5)
    )
    assert pickle.loads(pickle.dumps(sharding)) == sharding
    assert RecStoreParameterSharding.of(sharding, TableOptions()) != sharding
    with entries_are_read_by_recstore():
        params = sharding.get_additional_fused_params()
        with_optimizer = replace(sharding, optimizer=Ftrl())
        params_with_optimizer = with_optimizer.get_additional_fused_params()
    assert table_options(params) == TableOptions(seed=5)
    assert OPTIMIZER_KEY not in params
    assert params_with_optimizer[OPTIMIZER_KEY] == Ftrl()
    with pytest.raises(ValueError, match="TorchRec's own sharder got it"):
        sharding.get_additional_fused_params()
