"""Small models for export, batches for them, and the error bound of a quantised row."""

# Not with annotations from __future__: fx, and with it TorchRec's tracer, copies them
# into code as they are.

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)

from torchrec_recstore.modules import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.options import TableOptions

FEATURES = ("g", "h", "f", "x")
ID_SPAN = 40
BAGS = [
    EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=100, feature_names=["f", "g"]
    ),
    EmbeddingBagConfig(
        name="m",
        embedding_dim=4,
        num_embeddings=100,
        feature_names=["h"],
        pooling=PoolingType.MEAN,
    ),
    EmbeddingBagConfig(
        name="u", embedding_dim=20, num_embeddings=100, feature_names=["f"]
    ),
]
SEQUENCES = [
    EmbeddingConfig(name="s", embedding_dim=8, num_embeddings=100, feature_names=["h"])
]

DEFAULTS = TableOptions()


def batch(
    bags: int = 12, *, weighted: bool = False, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """Bags of 0 to 4 ids.

    Half of the ids are negative. One int64 id in ten is the least or the greatest
    int64.
    """
    lengths = torch.randint(0, 5, (len(FEATURES) * bags,))
    count = int(lengths.sum())
    ids = torch.randint(-ID_SPAN, ID_SPAN, (count,))
    if dtype == torch.int64:
        ends = torch.tensor([-(2**63), 2**63 - 1])[torch.randint(0, 2, (count,))]
        ids = torch.where(torch.rand(count) < 0.1, ends, ids)
    weights = torch.rand(count) if weighted else None
    return KeyedJaggedTensor(
        list(FEATURES), ids.to(dtype), lengths=lengths, weights=weights
    )


class Model(nn.Module):
    """Both eager collections and a dense layer.

    Args:
        options: The options of all tables.
        weighted: Whether the bags have weights.
    """

    def __init__(
        self,
        options: TableOptions = DEFAULTS,
        weighted: bool = False,
    ) -> None:
        super().__init__()
        self.bags = RecStoreEmbeddingBagCollection(
            BAGS, lr=0.3, options=options, is_weighted=weighted
        )
        self.rows = RecStoreEmbeddingCollection(
            SEQUENCES, lr=0.3, options=options, need_indices=True
        )
        self.over = nn.Sequential(nn.Linear(40, 3), nn.ReLU(), nn.Linear(3, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, 1)."""
        pooled: KeyedTensor = self.bags(features)
        rows: dict[str, JaggedTensor] = self.rows(features)
        out: Tensor = self.over(pooled.values())
        return out + rows["h"].values().sum()


def train(model: nn.Module, steps: int = 4, *, weighted: bool = False) -> nn.Module:
    """Trains on batches of :func:`batch`.

    The model is in evaluation mode afterwards.
    """
    model.train()
    for _ in range(steps):
        model(batch(weighted=weighted)).sum().backward()
    return model.eval()


class OfPlainTensors(nn.Module):
    """A whole model with plain tensors as arguments, as a server in C++ calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = RecStoreEmbeddingBagCollection(BAGS, lr=0.3)
        self.over = nn.Sequential(nn.Linear(43, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """dense (B, 3), values (N,) ids, lengths (4 * B,) -> (B, 1)."""
        features = KeyedJaggedTensor(
            keys=["g", "h", "f", "x"], values=values, lengths=lengths
        )
        pooled: KeyedTensor = self.bags(features)
        out: Tensor = self.over(torch.cat([dense, pooled.values()], dim=1))
        return out


def plain_batch(bags: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of :class:`OfPlainTensors`."""
    features = batch(bags)
    return torch.randn(bags, 3), features.values(), features.lengths()


def quantisation_bound(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The greatest error of a rounded weight, for each row: (R,).

    The weights are (R, dim).

    FBGEMM's rows have a scale and a bias in fp16. The bound is half a quantisation
    step, plus the rounding error of the bias, plus the rounding error of the scale
    times the number of steps.
    """
    if dtype == torch.float16:
        return weight.abs().amax(1) * 2.0**-11 + 2.0**-25
    levels = {torch.int8: 255, torch.quint4x2: 15}[dtype]
    low, high = weight.amin(1), weight.amax(1)
    half_bits = 2.0**-11
    step = (high - low + low.abs() * half_bits) / levels * (1 + half_bits) + 2.0**-24
    return step * (0.5 + levels * half_bits) + 2 * low.abs() * half_bits
