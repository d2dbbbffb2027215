"""Models for trainings beside threads: ten that TorchScript compiles, and eleven that
only TorchRec's tracer can compile.

All of them are called with dense features and bags of ids, and have dropout, so that
they use torch's generator.
"""

# Not with annotations from __future__: fx, and with it TorchRec's tracer, copies them
# into code as they are.

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection

from torchrec_recstore import RecStoreClient, TableOptions
from torchrec_recstore.modules import (
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)

DENSE = 4
DIM = 8
FEATURES = ["f0", "f1", "f2"]
BATCH = 16


def bags() -> RecStoreEmbeddingBagCollection:
    """A collection of a table for each feature."""
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=DIM,
            num_embeddings=100,
            feature_names=[name],
        )
        for name in FEATURES
    ]
    return RecStoreEmbeddingBagCollection(configs, lr=0.1)


def sequences() -> RecStoreEmbeddingCollection:
    """A collection of a table for each feature, whose rows are not pooled."""
    configs = [
        EmbeddingConfig(
            name=f"t_{name}",
            embedding_dim=DIM,
            num_embeddings=100,
            feature_names=[name],
        )
        for name in FEATURES
    ]
    return RecStoreEmbeddingCollection(configs, lr=0.1)


def batch(generator: torch.Generator) -> tuple[Tensor, KeyedJaggedTensor]:
    """Returns (BATCH, DENSE) dense features, and two ids for each bag."""
    count = len(FEATURES) * BATCH
    ids = torch.randint(-200, 200, (2 * count,), generator=generator)
    features = KeyedJaggedTensor(FEATURES, ids, lengths=torch.full((count,), 2))
    return torch.randn(BATCH, DENSE, generator=generator), features


class OfTorchRec(nn.Module):
    """One of TorchRec's models, after dropout of the dense features."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.model = model

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.model(self.dropout(dense), features)
        return out


class Pooled(nn.Module):
    """Pooled rows, dropout and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags()
        self.dropout = nn.Dropout(0.2)
        self.over = nn.Linear(len(FEATURES) * DIM + DENSE, 1)

    def joined(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """Returns the pooled rows after dropout, beside the dense features."""
        pooled: KeyedTensor = self.bags(features)
        return torch.cat([self.dropout(pooled.values()), dense], dim=1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.joined(dense, features))
        return out


class ByMethods(Pooled):
    """A model with a branch that depends on its mode, a list of layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(4 * DIM - DENSE, 4 * DIM - DENSE) for _ in range(2)
        )
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out = self.joined(dense, features)
        for layer in self.layers:
            out = torch.relu(layer(out))
        if self.training:
            out = out * self.scale
        last: Tensor = self.over(out)
        return last


class Sequences(nn.Module):
    """The rows of a feature, and the sum of the dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = sequences()
        self.dropout = nn.Dropout(0.2)
        self.over = nn.Linear(2 * DIM, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        rows: dict[str, JaggedTensor] = self.rows(features)
        first = self.dropout(rows["f0"].values()).view(dense.shape[0], -1)
        out: Tensor = self.over(first)
        return out + dense.sum(1, keepdim=True)


class Attention(nn.Module):
    """Self-attention over the two rows of each bag."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = sequences()
        self.attention = nn.MultiheadAttention(DIM, 2, dropout=0.2, batch_first=True)
        self.over = nn.Linear(DIM, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        found: dict[str, JaggedTensor] = self.rows(features)
        rows = found["f1"].values().view(dense.shape[0], 2, -1)
        out: Tensor = self.over(self.attention(rows, rows, rows)[0].sum(1))
        return out + dense.sum(1, keepdim=True)


class Single(nn.Module):
    """The modules without a collection, in front of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = RecStoreEmbeddingBag(100, DIM, name="t_bag", mode="sum", lr=0.1)
        self.rows = RecStoreEmbedding(100, DIM, name="t_rows", lr=0.1)
        self.recurrent = nn.GRU(DIM, DIM, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.over = nn.Linear(2 * DIM, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        by_name = features.to_dict()
        pooled: Tensor = self.bag(by_name["f0"].values().view(-1, 2))
        rows: Tensor = self.rows(by_name["f1"].values().view(-1, 2))
        states: Tensor = self.recurrent(rows)[0]
        out: Tensor = self.over(self.dropout(torch.cat([pooled, states.sum(1)], dim=1)))
        return out + dense.sum(1, keepdim=True)


class Towers(nn.Module):
    """Two towers on the rows of two features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags()
        self.user = nn.Sequential(
            nn.Linear(DIM, DIM), nn.ReLU(), nn.Dropout(0.2), nn.Linear(DIM, DIM)
        )
        self.item = nn.Sequential(
            nn.Linear(DIM, DIM), nn.ReLU(), nn.Dropout(0.2), nn.Linear(DIM, DIM)
        )

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        pooled: KeyedTensor = self.bags(features)
        product = self.user(pooled["f0"]) * self.item(pooled["f1"])
        out: Tensor = product.sum(1, keepdim=True) + dense.sum(1, keepdim=True)
        return out


class DeepFM(nn.Module):
    """TorchRec's DeepFM, whose first argument is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.model = SimpleDeepFMNN(DENSE, bags(), 8, 4)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.model(
            dense_features=self.dropout(dense), sparse_features=features
        )
        return out


class KeywordOnly(Pooled):
    """A model with an argument that is passed by name only and has a default, which
    TorchScript refuses.
    """

    def forward(
        self, dense: Tensor, features: KeyedJaggedTensor, *, scale: float = 0.5
    ) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.joined(dense, features)) * scale
        return out


class WithLambda(Pooled):
    """A model that calls a lambda, which TorchScript cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = lambda values: torch.relu(values) * 0.5

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.activation(self.joined(dense, features)))
        return out


class WithPartial(Pooled):
    """A model that calls a partial function."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = functools.partial(
            nn.functional.leaky_relu, negative_slope=0.3
        )

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.activation(self.joined(dense, features)))
        return out


@dataclass
class Settings:
    """Settings of a model, in a class that TorchScript does not know."""

    scale: float


class WithSettings(Pooled):
    """A model that reads an object of a class of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings(0.25)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.joined(dense, features) * self.settings.scale)
        return out


class WithTry(Pooled):
    """A model that catches an error, which TorchScript refuses."""

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        joined = self.joined(dense, features)
        try:
            layer = self.last
        except AttributeError:
            layer = self.over
        out: Tensor = layer(joined)
        return out


class WithSuper(Pooled):
    """A model that calls the ``forward`` of its base class."""

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        return super().forward(dense, features) * 2


class ByName(Pooled):
    """A model that finds its layers by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_0 = nn.Linear(4 * DIM - DENSE, 4 * DIM - DENSE)
        self.layer_1 = nn.Linear(4 * DIM - DENSE, 4 * DIM - DENSE)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out = self.joined(dense, features)
        for number in range(2):
            layer = getattr(self, f"layer_{number}")
            out = torch.relu(layer(out))
        last: Tensor = self.over(out)
        return last


class WithGenerator(Pooled):
    """A model with a generator expression, which TorchScript refuses."""

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        joined = self.joined(dense, features)
        scaled = tuple(joined * scale for scale in (0.25, 0.5, 0.75))
        out: Tensor = self.over(torch.stack(scaled).sum(0))
        return out


class WithClosure(Pooled):
    """A model that calls a function which it has made."""

    def __init__(self) -> None:
        super().__init__()
        factor = 0.5

        def halved(values: Tensor) -> Tensor:
            return (lambda given: given * factor)(values)

        self.halved = halved

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.halved(self.joined(dense, features)))
        return out


class WithConstant(Pooled):
    """A model with a constant, which TorchScript writes into the code of a method."""

    scale: Final[float]

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def scaled(self, values: Tensor) -> Tensor:
        """Returns the values times the constant."""
        return values * self.scale

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(self.scaled(self.joined(dense, features)))
        return out


class InManyWays(ByName):
    """A model with all that the models above have, which the tracer compiles.

    None of it changes what another part of it does.
    """

    def __init__(self) -> None:
        super().__init__()
        factor = 0.5

        def halved(values: Tensor) -> Tensor:
            return (lambda given: given * factor)(values)

        self.halved = halved
        self.activation = lambda values: torch.tanh(values) * 0.5
        self.leaky = functools.partial(nn.functional.leaky_relu, negative_slope=0.3)
        self.settings = Settings(0.25)

    def forward(
        self, dense: Tensor, features: KeyedJaggedTensor, *, scale: float = 0.5
    ) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out = super().forward(dense, features) * scale
        try:
            function = self.absent
        except AttributeError:
            function = self.halved
        out = self.leaky(self.activation(function(out))) * self.settings.scale
        scaled = tuple(out * factor for factor in (0.25, 0.5, 0.75))
        return torch.stack(scaled).sum(0)


class Refused(Pooled):
    """A model that neither TorchScript nor the tracer can compile while ``refused`` is
    set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused = False

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        if self.refused and bool((dense > 100).any()):
            return eval("dense")  # type: ignore[no-any-return]
        out: Tensor = self.over(self.joined(dense, features)) * len([*{1: 2}])
        return out


class Gated(WithLambda):
    """A model whose trace waits for a call of another module in another thread."""

    def __init__(self, tracing: threading.Event, called: threading.Event) -> None:
        super().__init__()

        def activation(values: Tensor) -> Tensor:
            if isinstance(values, torch.fx.Proxy):
                tracing.set()
                assert called.wait(60)
            return values * 0.5

        activation.__deepcopy__ = lambda memo: activation  # type: ignore[attr-defined]
        self.activation = activation


class OnServers(nn.Module):
    """A table on servers, dropout and a dense layer."""

    def __init__(self, client: RecStoreClient) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=DIM,
                num_embeddings=100,
                feature_names=[name],
            )
            for name in FEATURES
        ]
        self.bags = RecStoreEmbeddingBagCollection(
            configs, lr=0.1, options=TableOptions(seed=7), client=client
        )
        self.dropout = nn.Dropout(0.2)
        self.over = nn.Linear(len(FEATURES) * DIM + DENSE, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(B, DENSE) and the bags -> (B, 1)."""
        out: Tensor = self.over(
            torch.cat([self.dropout(self.bags(features).values()), dense], dim=1)
        )
        return out


class Sharded(nn.Module):
    """TorchRec's DLRM_DCN after dropout, as a pipeline calls it."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=DIM,
                num_embeddings=100,
                feature_names=[name],
            )
            for name in FEATURES
        ]
        tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.dropout = nn.Dropout(0.2)
        self.model = DLRM_DCN(tables, DENSE, [16, DIM], [16, 1], 2, 4)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """The bags -> the loss, and (B, 1)."""
        dense = (
            features.lengths()
            .view(len(FEATURES), -1)
            .sum(0)
            .float()[:, None]
            .expand(-1, DENSE)
        )
        out: Tensor = self.model(self.dropout(dense), features)
        return ((out - 1) ** 2).mean(), out.detach()


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "dlrm": lambda: OfTorchRec(DLRM(bags(), DENSE, [16, DIM], [16, 1])),
    "dlrm_projection": lambda: OfTorchRec(
        DLRM_Projection(bags(), DENSE, [16, DIM], [16, 1], [16, 4 * DIM], [8, 4 * DIM])
    ),
    "deepfm": DeepFM,
    "pooled": Pooled,
    "by_methods": ByMethods,
    "sequences": Sequences,
    "attention": Attention,
    "single": Single,
    "towers": Towers,
    "two_of_one": lambda: OfTorchRec(Pooled()),
}
TRACED: dict[str, Callable[[], nn.Module]] = {
    "dlrm_dcn": lambda: OfTorchRec(DLRM_DCN(bags(), DENSE, [16, DIM], [16, 1], 2, 4)),
    "keyword_only": KeywordOnly,
    "lambda": WithLambda,
    "partial": WithPartial,
    "settings": WithSettings,
    "try": WithTry,
    "super": WithSuper,
    "by_name": ByName,
    "generator": WithGenerator,
    "closure": WithClosure,
    "many_ways": InManyWays,
}
