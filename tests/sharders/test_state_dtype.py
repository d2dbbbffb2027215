"""Collections with optimizer state in float16, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore import (
    RecStoreEmbedding,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.checkpoint import load_checkpoint, save_checkpoint
from torchrec_recstore.optim import Adam, PartialRowWiseAdam
from torchrec_recstore.options import NormalInit, TableOptions
from torchrec_recstore.planner import RecStoreConstraints
from torchrec_recstore.store import Table

from .models import bag, batch, collection, sequence, sequences, sharded, tables

pytestmark = pytest.mark.usefixtures("one_rank")

PARTIAL = {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "learning_rate": 0.1}
HALF = {**PARTIAL, "state_dtype": torch.float16}
BY_FBGEMM = {
    **PARTIAL,
    "optimizer_state_dtypes": {
        "momentum1": SparseType.FP16,
        "momentum2": SparseType.FP16,
    },
}
OPTIONS = {"t": TableOptions(NormalInit(0.0, 0.5))}
IDS = torch.tensor([-7, 1, 2])
MAKERS: list[Callable[[DataType], nn.Module]] = [
    lambda data_type: collection(bag(dim=8, data_type=data_type)),
    lambda data_type: sequences(sequence(dim=8, data_type=data_type)),
]


def table_of(model: DistributedModelParallel) -> Table:
    (table,) = tables(model).values()
    return table


def train(model: nn.Module, steps: int = 2) -> None:
    for _ in range(steps):
        out: Any = model(batch(f=[[1, 2, 2], [], [-7]]))
        (
            out["f"].values() if hasattr(out, "items") else out.values()
        ).square().sum().backward()


def assert_equal_rows(one: Table, other: Table) -> None:
    assert torch.equal(one.ids(), other.ids())
    rows, others = one.read_rows(one.ids()), other.read_rows(one.ids())
    for name in rows:
        assert torch.equal(rows[name], others[name]), name


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.INT8])
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_every_sharding_has_the_rows_of_a_table_by_itself(
    make: Callable[[DataType], nn.Module], data_type: DataType, sharding_type: str
) -> None:
    models = [
        sharded(make(data_type), params, OPTIONS, sharding_type)
        for params in (HALF, BY_FBGEMM)
    ]
    options = TableOptions(NormalInit(0.0, 0.5))
    dtype = table_of(models[0]).dtype
    alone = Table(
        8,
        dtype,
        PartialRowWiseAdam(lr=0.1),
        options,
        name="t",
        state_dtype=torch.float16,
    )
    for model in models:
        train(model, 1)
        assert table_of(model).state_dtype is torch.float16
    weights = alone.lookup(torch.tensor([1, 2, 2, -7]), train=True).float()
    pooled = make is MAKERS[0]
    grads = 2 * (weights[:3].sum(0).expand(3, -1) if pooled else weights[:3])
    alone.update(torch.tensor([1, 2, 2, -7]), torch.cat([grads, 2 * weights[3:]]))
    for model in models:
        assert_equal_rows(table_of(model), alone)


def test_eager_modules_have_the_rows_of_the_sharded_module() -> None:
    half = torch.float16
    eager = RecStoreEmbeddingBagCollection(
        [bag(dim=8)],
        optimizer=PartialRowWiseAdam(lr=0.1),
        options=OPTIONS,
        state_dtype=half,
    )
    model = sharded(collection(bag(dim=8)), HALF, OPTIONS)
    for each in (eager, model):
        train(each)
    table = eager.embedding_bags["t"].table
    assert_equal_rows(table, table_of(model))
    # A state dict has float32 states, and loads into tables of both data types.
    for kind in (half, torch.float32):
        copy = RecStoreEmbeddingBagCollection(
            [bag(dim=8)],
            optimizer=PartialRowWiseAdam(lr=0.1),
            options=OPTIONS,
            state_dtype=kind,
        )
        copy.load_state_dict(eager.state_dict())
        assert_equal_rows(copy.embedding_bags["t"].table, table)
    sequential = RecStoreEmbeddingCollection([sequence()], state_dtype=half)
    assert sequential.embeddings["t"].table.state_dtype is half
    module = RecStoreEmbedding(10, 4, optimizer=Adam(), state_dtype=half)
    module(torch.tensor([3])).sum().backward()
    module.use_optimizer(Adam(lr=0.5))
    assert module.table.state_dtype is half
    with pytest.raises(ValueError, match="state_dtype must be one of"):
        RecStoreEmbedding(10, 4, state_dtype=torch.bfloat16)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.INT8])
def test_checkpoints_move_between_data_types_of_states(
    data_type: DataType, tmp_path: Path
) -> None:
    def model(
        params: dict[str, Any], sharding_type: str = "table_wise"
    ) -> DistributedModelParallel:
        return sharded(
            collection(bag(dim=8, data_type=data_type)), params, OPTIONS, sharding_type
        )

    half, full = model(HALF), model(PARTIAL)
    for number, (source, name) in enumerate(((half, "half"), (full, "full"))):
        train(source)
        save_checkpoint(source, tmp_path / name)
        table_of(source).update(torch.tensor([5 + number]), torch.ones(1, 8))
        save_checkpoint(source, tmp_path / f"{name}_delta", delta_of=tmp_path / name)
    for path in ("half", "half_delta"):
        loaded = [
            model(params, kind)
            for params in (HALF, PARTIAL)
            for kind in ("table_wise", "row_wise")
        ]
        for each in loaded:
            load_checkpoint(each, tmp_path / path)
            assert_equal_rows(table_of(each), table_of(loaded[0]))
        if path == "half_delta":
            assert_equal_rows(table_of(loaded[0]), table_of(half))
            train(half)
            train(loaded[0])
            assert_equal_rows(table_of(loaded[0]), table_of(half))
    rounded = model(HALF)
    load_checkpoint(rounded, tmp_path / "full_delta")
    rows, exact = table_of(rounded).read_rows(IDS), table_of(full).read_rows(IDS)
    assert torch.equal(rows["weight"], exact["weight"])
    assert torch.equal(rows["exp_avg"], exact["exp_avg"].half().float())
    torch.testing.assert_close(
        rows["exp_avg_sq"], exact["exp_avg_sq"], rtol=2e-3, atol=0.0
    )
    assert not torch.equal(rows["exp_avg_sq"], exact["exp_avg_sq"])


def test_optimizers_without_state_are_as_in_float32() -> None:
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    asked: list[dict[str, Any]] = [{}, {"state_dtype": SparseType.FP16}]
    models = [
        sharded(collection(bag(dim=8)), {**params, **more}, OPTIONS) for more in asked
    ]
    for model in models:
        train(model)
    assert_equal_rows(*map(table_of, models))


def test_tables_on_the_kernels_of_torchrec() -> None:
    def model(params: dict[str, Any]) -> DistributedModelParallel:
        stock = ParameterConstraints(
            compute_kernels=["fused"], sharding_types=["table_wise"]
        )
        constraints = {
            "t": RecStoreConstraints(sharding_types=["table_wise"]),
            "s": stock,
        }
        return sharded(
            collection(bag(dim=8), bag("s", ["g"], dim=8)),
            params,
            constraints=constraints,
        )

    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    assert (
        table_of(model({**params, "state_dtype": torch.float32})).state_dtype
        is torch.float32
    )
    asked = {
        "state_dtype": torch.float16,
        "optimizer_state_dtypes": {"momentum1": SparseType.FP16},
    }
    for key, value in asked.items():
        with pytest.raises(
            ValueError,
            match=(
                f"table 's' is on TorchRec's kernel 'fused', which does not take {key}"
            ),
        ):
            model({**params, key: value})


def test_states_of_marked_parameters() -> None:
    ebc = collection(bag(dim=8))
    apply_optimizer_in_backward(torch.optim.Adam, ebc.parameters(), {"lr": 0.1})
    params = {
        key: value
        for key, value in BY_FBGEMM.items()
        if key == "optimizer_state_dtypes"
    }
    assert table_of(sharded(ebc, params, OPTIONS)).state_dtype is torch.float16
