"""Quantization by torch and TorchRec refuses RecStore tables, and leaves other layers
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    default_qconfig,
    float_qparams_weight_only_qconfig,
    quantize_dynamic,
)
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.quant import EmbeddingBagCollection as QuantEmbeddingBagCollection

from tests.sharders.models import bag, batch, collection, sequence, sequences, sharded
from torchrec_recstore import (
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)

EMBEDDINGS = {
    nn.EmbeddingBag: float_qparams_weight_only_qconfig,
    EmbeddingBagCollection: float_qparams_weight_only_qconfig,
    EmbeddingCollection: float_qparams_weight_only_qconfig,
}
EAGER = [
    lambda: RecStoreEmbeddingBagCollection([bag("t", ["f"])]),
    lambda: RecStoreEmbeddingCollection([sequence("t", ["f"])]),
    lambda: RecStoreEmbeddingBag(10, 4, name="t"),
    lambda: RecStoreEmbedding(10, 4, name="t"),
]
SHARDED = [
    lambda: sharded(collection(bag("t", ["f"]))),
    lambda: sharded(sequences(sequence("t", ["f"]))),
]
REQUESTS: list[Callable[[nn.Module], Any]] = [
    lambda module: quantize_dynamic(module, inplace=True),
    lambda module: quantize_dynamic(module, dtype=torch.quint8, inplace=True),
    lambda module: quantize_dynamic(
        nn.Sequential(nn.Linear(4, 1), module), dtype=torch.quint8, inplace=True
    ),
    lambda module: quantize_dynamic(nn.Sequential(module), EMBEDDINGS, inplace=True),
    lambda module: quantize_dynamic(
        nn.Sequential(module), {type(module)}, inplace=True
    ),
    lambda module: quantize_dynamic(
        nn.Sequential(module), {"0": default_qconfig}, inplace=True
    ),
    lambda module: quantize_embeddings(
        nn.Sequential(module), torch.qint8, inplace=True
    ),
    lambda module: quantize_inference_model(nn.Sequential(module)),
]


def refused(module: nn.Module, quantize: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(
        NotImplementedError, match=r"inference\.export_for_inference"
    ) as error:
        quantize(module)
    tables = module.module if isinstance(module, DistributedModelParallel) else module
    assert str(error.value).startswith(
        f"{type(tables).__name__} cannot be quantized in place: torchrec_recstore."
    )


@pytest.mark.parametrize("quantize", range(len(REQUESTS)))
@pytest.mark.parametrize("module", EAGER)
def test_eager_modules_are_refused(
    module: Callable[[], nn.Module], quantize: int
) -> None:
    refused(module(), REQUESTS[quantize])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("module", SHARDED)
def test_sharded_modules_are_refused(module: Callable[[], nn.Module]) -> None:
    refused(module(), REQUESTS[0])  # the whole model, in its wrapper
    for quantize in REQUESTS:
        refused(module().module, quantize)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("module", [*EAGER, *SHARDED])
def test_other_layers_are_quantized_again_and_again(
    module: Callable[[], nn.Module],
) -> None:
    tables = module()
    tables = tables.module if isinstance(tables, DistributedModelParallel) else tables
    model = nn.ModuleDict({"tables": tables, "dense": nn.Linear(4, 1)})
    for spec in (
        {nn.Linear},
        None,
        {"dense": torch.ao.quantization.default_dynamic_qconfig},
    ):
        model["dense"] = nn.Linear(4, 1)
        quantize_dynamic(model, spec, inplace=True)
        assert type(model["dense"]).__module__.startswith(
            "torch.ao.nn.quantized.dynamic"
        )
        assert model["tables"] is tables
        assert not hasattr(tables, "qconfig")
    refused(tables, lambda _: quantize_dynamic(model, EMBEDDINGS, inplace=True))


def test_what_is_left_out_by_its_qconfig_stays() -> None:
    tables, stock = (
        RecStoreEmbeddingBagCollection([bag("t", ["f"])]),
        collection(bag("s", ["g"]), device="cpu"),
    )
    model = nn.ModuleDict({"tables": tables, "stock": stock})
    for module in tables.modules():
        if hasattr(type(module), "qconfig"):
            module.qconfig = None  # type: ignore[assignment]
    quantize_embeddings(model, torch.qint8, inplace=True)
    assert isinstance(model["stock"], QuantEmbeddingBagCollection)
    assert model["tables"] is tables
    assert tables(batch(f=[[1]])).values().shape == (1, 4)
    tables.qconfig = None  # type: ignore[assignment]
    assert tables.qconfig is None
    with pytest.raises(NotImplementedError, match="cannot be quantized"):
        tables.qconfig = default_qconfig
