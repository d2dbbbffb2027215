"""Exported models and batches that carry more or less than a model needs: the same
result as the model, or an error.
"""

# Not with annotations from __future__: TorchRec's tracer copies them into code as they
# are.

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from torchrec_recstore import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.inference import export_for_inference

FEATURES = ["f", "g"]
BAGS = [
    EmbeddingBagConfig(
        name="sums", embedding_dim=8, num_embeddings=100, feature_names=["f", "g"]
    ),
    EmbeddingBagConfig(
        name="means",
        embedding_dim=4,
        num_embeddings=100,
        feature_names=["g"],
        pooling=PoolingType.MEAN,
    ),
]
ROWS = [
    EmbeddingConfig(
        name="rows", embedding_dim=8, num_embeddings=100, feature_names=["f", "g"]
    )
]
IDS = torch.tensor([1, 2, 3, 4, 5, 6])
LENGTHS = torch.tensor([2, 1, 1, 2])


class Bags(nn.Module):
    """A collection of bags."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        self.bags = RecStoreEmbeddingBagCollection(BAGS, lr=0.3, is_weighted=weighted)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(features)
        out: Tensor = pooled.values()
        return out


class Rows(nn.Module):
    """A collection of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = RecStoreEmbeddingCollection(ROWS, lr=0.3)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(features)
        return torch.cat([rows["f"].values(), rows["g"].values()])


class Traced(nn.Module):
    """A collection of bags in a module that only TorchRec's tracer compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = RecStoreEmbeddingBagCollection(BAGS, lr=0.3)

    def forward(self, features: KeyedJaggedTensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = (lambda pooled: pooled.values())(self.bags(features)) * scale
        return out


def weighted_bags() -> nn.Module:
    return Bags(weighted=True)


def plain(weights: Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(FEATURES, IDS, weights=weights, lengths=LENGTHS)


def trained(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    weights = torch.rand(len(IDS)) if make is weighted_bags else None
    for _ in range(2):
        model(plain(weights)).sum().backward()
    return model.eval()


def served(model: nn.Module, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields the name and the model of each form of an export."""
    for dtype in (torch.float32, torch.int8):
        for index in ("sorted", "hash"):
            path = folder / f"{dtype}_{index}.pt"
            eager = export_for_inference(model, path, dtype=dtype, index=index)
            yield f"{dtype} {index}", torch.jit.load(path)
        yield f"{dtype} eager", eager


def refuses(model: Any, batch: KeyedJaggedTensor, message: str, form: str) -> None:
    error = ""
    try:
        model(batch)
    except (
        ValueError,
        RuntimeError,
        torch.jit.Error,
    ) as raised:  # the last two: of TorchScript
        error = str(raised)
    assert message in error, f"{form}: {error or 'no error'}"


MODELS = [
    pytest.param(Bags, marks=pytest.mark.slow),
    weighted_bags,
    Rows,
    pytest.param(Traced, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_a_batch_may_carry(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = trained(make)
    weights = torch.rand(len(IDS))
    wanted = model(plain(weights))
    further = KeyedJaggedTensor(
        ["x", "g", "f", "y"],
        torch.cat([torch.tensor([9]), IDS[3:], IDS[:3], torch.tensor([9, 9])]),
        weights=torch.cat([torch.ones(1), weights[3:], weights[:3], torch.ones(2)]),
        lengths=torch.tensor([1, 0, 1, 2, 2, 1, 2, 0]),
    )
    accepted = {
        "weights": plain(weights),
        "further features in another order": further,
        "int32": KeyedJaggedTensor(
            FEATURES, IDS.int(), weights=weights, lengths=LENGTHS.int()
        ),
        "only offsets": KeyedJaggedTensor(
            FEATURES, IDS, weights=weights, offsets=torch.tensor([0, 2, 3, 4, 6])
        ),
    }
    for form, export in served(model, tmp_path):
        for name, batch in accepted.items():
            tolerance = 1e-6 if "float32" in form else 0.05
            assert torch.allclose(export(batch), wanted, atol=tolerance, rtol=0), (
                f"{form}, {name}"
            )


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_a_batch_must_not_carry(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = trained(make)
    weights = torch.rand(len(IDS))
    inverse = (FEATURES, torch.tensor([[1, 0], [0, 0]]))
    varying = KeyedJaggedTensor(
        FEATURES,
        IDS,
        weights=weights,
        lengths=LENGTHS,
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(FEATURES, torch.tensor([[0, 0, 0], [0, 1, 2]])),
    )
    refused = {
        "stride_per_key_per_rank": varying,
        "no feature f": KeyedJaggedTensor(
            ["g"], IDS[3:], weights=weights[3:], lengths=LENGTHS[2:]
        ),
        "lengths": KeyedJaggedTensor(
            FEATURES, IDS, weights=weights, lengths=torch.tensor([3, -1, 2, 2])
        ),
    }
    if make is not Rows:
        refused["inverse indices"] = KeyedJaggedTensor(
            FEATURES, IDS, weights=weights, lengths=LENGTHS, inverse_indices=inverse
        )
    if make is weighted_bags:
        refused["weights"] = plain()
    for form, export in served(model, tmp_path):
        for message, batch in refused.items():
            refuses(export, batch, message, f"{form}, {message}")
