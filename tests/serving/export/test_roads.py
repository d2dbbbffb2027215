"""TorchRec's functions for serving, and ``torch.export``, work on exported models."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torchrec import KeyedJaggedTensor
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from torchrec.inference.modules import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)

from torchrec_recstore.inference import export_for_inference, scriptable
from torchrec_recstore.modules import RecStoreEmbedding, RecStoreEmbeddingBag
from torchrec_recstore_serving.export.scriptable_modules import served_tables

from ..models import Model, batch, train


@pytest.fixture(scope="module")
def exported() -> dict[torch.dtype, nn.Module]:
    torch.manual_seed(0)
    model = train(Model())
    return {
        dtype: export_for_inference(model, dtype=dtype)
        for dtype in (torch.float32, torch.int8)
    }


@pytest.fixture
def _devices_as_given() -> Iterator[None]:
    # The default is CUDA devices for TorchRec's quantised shards (1.8.0).
    set_propogate_device(True)
    yield
    set_propogate_device(False)


def test_quantised_by_torchrec(exported: dict[torch.dtype, nn.Module]) -> None:
    some = batch()
    assert isinstance(exported[torch.float32].bags.collection, EmbeddingBagCollection)
    quantised = quantize_inference_model(copy.deepcopy(exported[torch.float32]))
    assert isinstance(quantised.bags.collection, QuantEmbeddingBagCollection)
    assert torch.equal(quantised(some), exported[torch.int8](some))
    assert torch.equal(scriptable(quantised)(some), quantised(some))
    # torch.ao.quantization.quantize_dynamic quantises only the bags.
    bags = quantize_embeddings(exported[torch.float32], torch.qint8, inplace=False)
    assert torch.equal(
        bags.bags(some).values(), exported[torch.int8].bags(some).values()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_traced_and_scripted(
    exported: dict[torch.dtype, nn.Module], dtype: torch.dtype
) -> None:
    model, some = exported[dtype], batch()
    traced = torchrec.fx.symbolic_trace(model)
    assert torch.equal(traced(some), model(some))
    assert torch.equal(torch.jit.script(traced)(some), model(some))
    assert torch.equal(torch.jit.script(scriptable(model))(some), model(some))


def test_single_tables_are_traced_as_leaves() -> None:
    model = nn.Sequential(RecStoreEmbedding(5, 4, name="t"), nn.Linear(4, 1))
    model(torch.tensor([1, -2])).sum().backward()
    exported = export_for_inference(model, dtype=torch.float32)
    traced = torchrec.fx.symbolic_trace(
        exported, leaf_modules=["StaticEmbedding", "StaticEmbeddingBag"]
    )
    some = torch.tensor([1, -2, 3])
    assert torch.equal(torch.jit.script(traced)(some), model.eval()(some))


def test_float_is_scripted_as_it_is(exported: dict[torch.dtype, nn.Module]) -> None:
    model, some = exported[torch.float32], batch()
    assert torch.equal(torch.jit.script(model)(some), model(some))


@pytest.mark.usefixtures("_devices_as_given")
def test_sharded_by_torchrec(exported: dict[torch.dtype, nn.Module]) -> None:
    model, some = exported[torch.int8], batch()
    weights = get_table_to_weights_from_tbe(model)
    sharded, _ = shard_quant_model(
        copy.deepcopy(model), compute_device="cpu", sharding_device="cpu"
    )
    assert isinstance(sharded.bags.collection, ShardedQuantEmbeddingBagCollection)
    # TorchRec's shards have no weights at first.
    assign_weights_to_tbe(sharded, weights)
    assert torch.equal(sharded(some), model(some))
    traced = torchrec.fx.symbolic_trace(
        sharded, leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]
    )
    assert torch.equal(torch.jit.script(traced)(some), model(some))


@pytest.mark.parametrize("index", ["sorted", "hash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_torch_export(
    exported: dict[torch.dtype, nn.Module],
    dtype: torch.dtype,
    index: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, some = scriptable(exported[dtype], index=index), batch()
    given = KeyedJaggedTensor(some.keys(), some.values(), lengths=some.lengths())
    shapes = ShapesCollection()
    shapes[given.values()] = {0: Dim.DYNAMIC}
    program = torch.export.export(
        model, (given,), dynamic_shapes=shapes, strict=False
    ).module()
    # The batches have equal numbers of bags and different numbers of ids.
    for other in (some, batch()):
        assert torch.equal(program(other), model(other))
    assert not [
        record for record in caplog.records if "recstore" in record.getMessage()
    ]


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_torch_export_of_a_bag(mode: str, padding: int | None) -> None:
    bag = RecStoreEmbeddingBag(50, 8, mode=mode, padding_idx=padding, lr=0.3)

    def given(bags: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 50, (4 * bags,)), torch.arange(0, 4 * bags, 4)

    bag.train()(*given(9)).sum().backward()
    served = scriptable(
        export_for_inference(bag.eval(), dtype=torch.float32), index="hash"
    )
    any_size = ({0: Dim.AUTO}, {0: Dim.AUTO})
    program = torch.export.export(
        served, given(5), dynamic_shapes=any_size, strict=False
    ).module()
    for bags in (2, 7):
        some = given(bags)
        assert torch.equal(program(*some), bag(*some))
    beyond = torch.tensor([7, 3, 8]), torch.tensor([0, 2, 2])
    assert torch.equal(program(*beyond), bag(*beyond))
    with pytest.raises(
        RuntimeError, match=r"values must be integers of shape \(N,\)|floats|dtype"
    ):
        program(beyond[0].float(), beyond[1])


def test_torch_export_of_what_is_no_lookup(
    exported: dict[torch.dtype, nn.Module],
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [table for _, table in served_tables(served)]
            self.table = tables[0]

        def forward(self, values: Tensor) -> Tensor:
            return values + self.table.row_count()

    served = scriptable(exported[torch.float32], index="hash")
    with pytest.raises(NotImplementedError, match="cannot trace count"):
        torch.export.export(Counting(), (torch.arange(3),), strict=False)


def test_torch_export_of_torchrecs_quantised_module(
    exported: dict[torch.dtype, nn.Module],
) -> None:
    """TorchRec's modules cannot be exported without ``scriptable``.

    If this test passes, it is no longer needed.
    """
    with pytest.raises(
        RuntimeError, match="AtomicCounter haven't registered a fake class"
    ):
        torch.export.export(exported[torch.int8], (batch(),), strict=False)
