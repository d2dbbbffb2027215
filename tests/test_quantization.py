"""Quantization by torch and TorchRec refuses RecStore tables, or warns that it leaves
them out, and quantizes other layers.
"""

from __future__ import annotations

import warnings
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
    RecStoreWarning,
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
OF_TABLES: list[Callable[[nn.Module], Any]] = [
    lambda module: quantize_dynamic(
        nn.Sequential(module), {type(module)}, inplace=True
    ),
    lambda module: quantize_dynamic(
        nn.Sequential(module), {"0": default_qconfig}, inplace=True
    ),
    lambda module: quantize_dynamic(
        nn.Sequential(module), {"": default_qconfig}, inplace=True
    ),
]
"""Requests that name the type or the place of the module."""

OF_OTHERS: list[Callable[[nn.Module], Any]] = [
    lambda module: quantize_dynamic(module, inplace=True),
    lambda module: quantize_dynamic(module, dtype=torch.quint8, inplace=True),
    lambda module: quantize_dynamic(
        nn.Sequential(nn.Linear(4, 1), module), dtype=torch.quint8, inplace=True
    ),
    lambda module: quantize_dynamic(nn.Sequential(module), EMBEDDINGS, inplace=True),
    lambda module: quantize_embeddings(
        nn.Sequential(module), torch.qint8, inplace=True
    ),
    lambda module: quantize_inference_model(nn.Sequential(module)),
]
"""Requests that name other types of tables, or none. Torch does not tell the module."""


def tables_of(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedModelParallel) else module  # type: ignore[return-value]


def has_qconfig(module: nn.Module) -> bool:
    """Does not look for the attribute: torch does so before it sets it."""
    return "_left_out_by" in vars(module)


def refused(module: nn.Module, quantize: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(
        NotImplementedError, match=r"inference\.export_for_inference"
    ) as error:
        quantize(module)
    assert str(error.value).startswith(
        f"{type(tables_of(module)).__name__} cannot be quantized in place:"
        " torchrec_recstore."
    )


def left_out(module: nn.Module, quantize: Callable[[nn.Module], Any]) -> None:
    name = type(tables_of(module)).__name__
    with pytest.warns(
        RecStoreWarning,
        match=rf"^{name} is left out of this quantization.*export_for_inference",
    ):
        quantize(module)
    assert not has_qconfig(tables_of(module))


@pytest.mark.parametrize("module", EAGER)
def test_eager_modules_are_not_quantized(module: Callable[[], nn.Module]) -> None:
    for quantize in OF_TABLES:
        refused(module(), quantize)
    for quantize in OF_OTHERS:
        left_out(module(), quantize)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("module", SHARDED)
def test_sharded_modules_are_not_quantized(module: Callable[[], nn.Module]) -> None:
    left_out(module(), OF_OTHERS[0])  # the whole model, in its wrapper
    for quantize in OF_TABLES:
        refused(tables_of(module()), quantize)
    for quantize in OF_OTHERS:
        left_out(tables_of(module()), quantize)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("module", [*EAGER, *SHARDED])
def test_other_layers_are_quantized_again_and_again(
    module: Callable[[], nn.Module],
) -> None:
    tables: Any = tables_of(module())
    model = nn.ModuleDict({"tables": tables, "dense": nn.Linear(4, 1)})

    def quantized(spec: Any) -> None:
        model["dense"] = nn.Linear(4, 1)
        quantize_dynamic(model, spec, inplace=True)
        assert type(model["dense"]).__module__.startswith(
            "torch.ao.nn.quantized.dynamic"
        )
        assert model["tables"] is tables
        assert not has_qconfig(tables)

    for spec in (
        {nn.Linear},
        None,
        {"dense": torch.ao.quantization.default_dynamic_qconfig},
    ):
        left_out(tables, lambda _, spec=spec: quantized(spec))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RecStoreWarning)
            tables.qconfig = None
            quantized(spec)
    left_out(tables, lambda _: quantize_dynamic(model, EMBEDDINGS, inplace=True))


@pytest.mark.parametrize("module", EAGER)
def test_a_module_with_two_parents_is_left_out_with_one_warning(
    module: Callable[[], nn.Module],
) -> None:
    """Torch comes to it twice."""
    shared = module()

    def quantize(table: nn.Module) -> None:
        parents = {"query": nn.Sequential(table), "item": nn.Sequential(table)}
        quantize_dynamic(nn.ModuleDict(parents), EMBEDDINGS, inplace=True)

    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quantize(shared)
        of_ours = [w for w in caught if issubclass(w.category, RecStoreWarning)]
        assert len(of_ours) == 1
    fresh: Any = module()
    fresh.qconfig = None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        quantize(fresh)
    del fresh.qconfig  # as often as one likes


def test_what_is_left_out_by_its_qconfig_stays() -> None:
    tables, stock = (
        RecStoreEmbeddingBagCollection([bag("t", ["f"])]),
        collection(bag("s", ["g"]), device="cpu"),
    )
    model = nn.ModuleDict({"tables": tables, "stock": stock})
    tables.qconfig = None  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        quantize_embeddings(model, torch.qint8, inplace=True)
    assert isinstance(model["stock"], QuantEmbeddingBagCollection)
    assert model["tables"] is tables
    assert tables(batch(f=[[1]])).values().shape == (1, 4)
    tables.qconfig = None  # type: ignore[assignment]
    assert tables.qconfig is None
    with pytest.raises(NotImplementedError, match="cannot be quantized"):
        tables.qconfig = default_qconfig
