"""Collections with 16-bit rows, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType

from torchrec_recstore.checkpoint import export_dense_weights, load_dense_weights
from torchrec_recstore.options import NormalInit, TableOptions
from torchrec_recstore.row_types import as_stored, row_bytes, value_dtype
from torchrec_recstore.row_types import values as values_of
from torchrec_recstore.sharders.fused_params import output_dtype, stochastic_rounding

from .models import bag, batch, collection, sequence, sequences, sharded, tables

pytestmark = pytest.mark.usefixtures("one_rank")

DTYPES = {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}
SGD_PARAMS = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
IDS = [[1, 2, 2], [], [-7]]


def bags(data_type: DataType = DataType.BF16, **more: Any) -> EmbeddingBagCollection:
    return collection(bag(dim=8, data_type=data_type, **more))


def values(out: Any) -> torch.Tensor:
    """Returns the values of a KeyedTensor, or of the only feature of an
    EmbeddingCollection.
    """
    found: torch.Tensor = out["f"].values() if hasattr(out, "items") else out.values()
    return found


MAKERS: list[Callable[[DataType], nn.Module]] = [
    lambda data_type: bags(data_type),
    lambda data_type: bags(data_type, pooling=PoolingType.MEAN),
    lambda data_type: sequences(sequence(dim=8, data_type=data_type)),
]


@pytest.mark.parametrize("data_type", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_rows_are_those_of_the_float32_model_rounded(
    data_type: DataType, make: Callable[[DataType], nn.Module], sharding_type: str
) -> None:
    options = {"t": TableOptions(NormalInit(0.0, 0.5))}
    narrow, wide = (
        sharded(make(kind), SGD_PARAMS, options, sharding_type)
        for kind in (data_type, DataType.FP32)
    )
    (table,), (reference,) = tables(narrow).values(), tables(wide).values()
    ids = torch.tensor([-7, 1, 2])
    assert table.dtype is DTYPES[data_type]
    for step in range(3):
        outs = [values(model(batch(f=IDS))) for model in (narrow, wide)]
        if step == 0:  # The rows have just been made.
            torch.testing.assert_close(outs[0], outs[1], atol=1e-2, rtol=1e-2)
            reference.insert(ids, table.lookup(ids).float())
            outs[1] = values(wide(batch(f=IDS)))
        assert torch.equal(outs[0], outs[1])
        assert outs[0].dtype is torch.float32
        for out in outs:
            out.square().sum().backward()
        reference.insert(ids, reference.lookup(ids).to(table.dtype).float())
        assert torch.equal(table.lookup(ids).float(), reference.lookup(ids))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_rows_of_eight_bits_are_those_of_the_float32_model_rounded(
    make: Callable[[DataType], nn.Module], sharding_type: str
) -> None:
    options = {"t": TableOptions(NormalInit(0.0, 0.5))}
    narrow, wide = (
        sharded(make(kind), SGD_PARAMS, options, sharding_type)
        for kind in (DataType.INT8, DataType.FP32)
    )
    (table,), (reference,) = tables(narrow).values(), tables(wide).values()
    ids = torch.tensor([-7, 1, 2])
    assert table.dtype is torch.int8
    assert table.stochastic_rounding
    for step in range(3):
        outs = [values(model(batch(f=IDS))) for model in (narrow, wide)]
        if step == 0:  # The rows have just been made.
            exact = as_stored(reference.lookup(ids), torch.int8)
            assert torch.equal(table.read_rows(ids)["weight"], exact)
            reference.insert(ids, table.lookup(ids))
            outs[1] = values(wide(batch(f=IDS)))
        assert torch.equal(outs[0], outs[1])
        assert outs[0].dtype is torch.float32
        for out in outs:
            out.square().sum().backward()
        rows = table.read_rows(ids)["weight"]
        scale = rows[:, -8:-4].contiguous().view(torch.float32)
        assert ((values_of(rows) - reference.lookup(ids)).abs() <= scale * 1.001).all()
        reference.insert(ids, table.lookup(ids))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("asked", [SparseType.FP16, SparseType.BF16, SparseType.FP32])
def test_outputs_are_of_the_dtype_asked_for(
    make: Callable[[DataType], nn.Module], asked: SparseType
) -> None:
    model = sharded(make(DataType.BF16), {**SGD_PARAMS, "output_dtype": asked})
    plain = sharded(make(DataType.BF16), SGD_PARAMS)
    out, expected = values(model(batch(f=IDS))), values(plain(batch(f=IDS)))
    assert out.dtype is asked.as_dtype()
    assert torch.equal(out, expected.to(out.dtype))
    out.sum().backward()
    expected.sum().backward()
    ids = torch.tensor([-7, 1, 2])
    assert torch.equal(
        *(t.lookup(ids) for m in (model, plain) for t in tables(m).values())
    )


@pytest.mark.parametrize(
    "cast", [nn.Module.bfloat16, nn.Module.half, lambda model: model.to(torch.float64)]
)
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.BF16, DataType.INT8])
@pytest.mark.parametrize("index", [0, 2])
def test_casting_the_model_leaves_rows_and_lookups_as_they_are(
    cast: Callable[[nn.Module], nn.Module], data_type: DataType, index: int
) -> None:
    model, same = (sharded(MAKERS[index](data_type), SGD_PARAMS) for _ in range(2))
    for each in (model, same):
        values(each(batch(f=IDS))).sum().backward()
    cast(model)
    (table,), (other,) = tables(model).values(), tables(same).values()
    assert table.dtype is other.dtype
    for _ in range(2):
        out, expected = values(model(batch(f=IDS))), values(same(batch(f=IDS)))
        assert out.dtype is torch.float32
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
        assert torch.equal(table.lookup(table.ids()), other.lookup(other.ids()))
    state = model.state_dict()
    (key,) = [key for key in state if key.endswith("t.weight")]
    assert state[key].dtype is value_dtype(table.dtype)
    same.load_state_dict(state)
    assert torch.equal(table.lookup(table.ids()), other.lookup(table.ids()))


@pytest.mark.parametrize("saved", [DataType.FP32, *DTYPES, DataType.INT8])
@pytest.mark.parametrize("loaded", [DataType.FP32, *DTYPES, DataType.INT8])
def test_state_dict_has_the_rows_dtype_and_loads_from_any(
    saved: DataType, loaded: DataType
) -> None:
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    source, target = sharded(bags(saved), params), sharded(bags(loaded), params)
    values(source(batch(f=IDS))).sum().backward()
    state = source.state_dict()
    (from_,), (to,) = tables(source).values(), tables(target).values()
    assert state["embedding_bags.t.weight"].dtype is value_dtype(from_.dtype)
    assert state["embedding_bags.t.weight"].local_shards()[
        0
    ].tensor.dtype is value_dtype(from_.dtype)
    target.load_state_dict(state)
    stored = as_stored(from_.read_rows(from_.ids())["weight"], to.dtype)
    assert torch.equal(to.read_rows(from_.ids())["weight"], stored)
    target.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    assert torch.equal(
        to.read_rows(from_.ids())["sum"], from_.read_rows(from_.ids())["sum"]
    )
    assert to.read_rows(from_.ids())["sum"].dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dense_weights_of_any_dtype_go_in_and_float32_comes_out(
    dtype: torch.dtype,
) -> None:
    model, rows = (
        sharded(bags(DataType.BF16), SGD_PARAMS),
        torch.randn(5, 8, dtype=torch.float64).to(dtype),
    )
    load_dense_weights(model, {"t": rows})
    out = export_dense_weights(model, "t", 6)
    assert out.dtype is torch.float32
    assert torch.equal(out[:5], rows.float().bfloat16().float())


def test_random_rounding_is_asked_for_by_fused_params() -> None:
    for asked in (True, False):
        model = sharded(bags(), {**SGD_PARAMS, "stochastic_rounding": asked})
        assert tables(model)["t"].stochastic_rounding is asked
    assert not tables(sharded(bags(), SGD_PARAMS))["t"].stochastic_rounding
    assert not stochastic_rounding(None, ["t"], torch.bfloat16)
    assert stochastic_rounding(None, ["t"], torch.int8)
    with pytest.raises(ValueError, match=r"'t'.*stochastic_rounding.*INT8"):
        stochastic_rounding({"stochastic_rounding": False}, ["t"], torch.int8)
    with pytest.raises(ValueError, match=r"'t'.*stochastic_rounding.*bool"):
        stochastic_rounding({"stochastic_rounding": "yes"}, ["t"], torch.bfloat16)
    with pytest.raises(ValueError, match=r"'t'.*output_dtype.*INT8"):
        output_dtype({"output_dtype": SparseType.INT8}, ["t"])


@pytest.mark.parametrize("data_type", [DataType.INT4, DataType.UINT8])
def test_other_data_types_are_refused_by_the_tables_name(data_type: DataType) -> None:
    ebc = bags(DataType.FP32)
    ebc.embedding_bag_configs()[0].data_type = data_type
    with pytest.raises(
        ValueError, match=f"'t'.*{data_type.name}.*only FP32, FP16, BF16, INT8"
    ):
        sharded(ebc, SGD_PARAMS)


def test_the_planner_counts_the_bytes_of_the_type() -> None:
    for dtype, expected in (
        (torch.float32, 28),
        (torch.float16, 16),
        (torch.bfloat16, 16),
        (torch.int8, 16),
    ):
        assert row_bytes(dtype, 7) == expected


def test_kjt_weights_of_a_weighted_collection() -> None:
    model = sharded(
        collection(bag(dim=8, data_type=DataType.FP16), is_weighted=True), SGD_PARAMS
    )
    plain = batch(f=IDS)
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0])
    features = KeyedJaggedTensor(plain.keys(), plain.values(), weights, plain.lengths())
    out = values(model(features))
    rows = tables(model)["t"].lookup(plain.values()).float() * weights[:, None]
    torch.testing.assert_close(
        out,
        torch.stack([rows[:3].sum(0), torch.zeros(8), rows[3]]),
        atol=1e-6,
        rtol=1e-5,
    )
