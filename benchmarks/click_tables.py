"""The embedding tables that quality.py and progressive.py compare.

All sides train with row-wise Adagrad and TorchRec's initial rows. The tables with a
fixed number of rows are those of FBGEMM's kernel, which TorchRec's FUSED tables are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from torchrec_recstore import (
    RecStoreEmbeddingBagCollection,
    RowWiseAdagrad,
    TableOptions,
)

LR = 0.01
EPS = 1e-8
CPU = torch.device("cpu")
ID_BYTES = 8
STATE_BYTES = 4
MCH_LFU_BYTES = 24
"""Managed collision: an id, its place and its count, all int64."""
RECSTORE_ROW_BYTES = 105
"""At most the bytes of a row of dim 16 in RecStore. The measured bytes are reported."""
MCH_POLICIES = {
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
    "distance lfu": DistanceLFU_EvictionPolicy,
}
MCH_EVICTION_STEPS = 1
"""The steps between two eviction rounds. With 1, an id has its row at once."""


class Tables(Protocol):
    """One embedding table for each feature of a log."""

    passes: int
    """How often the data of a part is read before and while it is trained on."""

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the rows (B, F, dim) of raw ids (F, B) int64."""
        ...

    def memory_bytes(self) -> int:
        """Returns the bytes of rows, optimizer state and everything that finds them."""
        ...


def row_bytes(dim: int) -> int:
    """Returns the bytes of a row of FBGEMM and its state."""
    return 4 * dim + STATE_BYTES


def counted(ids: Tensor) -> list[Tensor]:
    """Returns the distinct ids of each feature, the most frequent ones first.

    Args:
        ids: (F, N) int64.
    """
    ranked = []
    for feature_ids in ids:
        values, counts = feature_ids.unique(return_counts=True)
        order = counts.argsort(descending=True, stable=True)
        ranked.append(values[order])
    return ranked


class FixedRows(nn.Module):
    """FBGEMM's tables with a fixed number of rows.

    Args:
        rows: The number of rows of each table.
        dim: The columns of all tables.
        lr: The learning rate.
    """

    def __init__(
        self,
        rows: Sequence[int],
        dim: int,
        lr: float = LR,
    ) -> None:
        super().__init__()
        self.rows = torch.tensor(rows)
        self.dim = dim
        specs = []
        for count in rows:
            spec = (
                count,
                dim,
                EmbeddingLocation.HOST,
                ComputeDevice.CPU,
            )
            specs.append(spec)
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            specs,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=lr,
            eps=EPS,
        )
        for weights in self.kernel.split_embedding_weights():
            bound = len(weights) ** -0.5
            nn.init.uniform_(weights, -bound, bound)

    def forward(self, places: Tensor) -> Tensor:
        """Returns the rows (B, T, dim) at the places (T, B) int64 of the tables."""
        num_features, batch = places.shape
        offsets = torch.arange(places.numel() + 1)
        pooled = self.kernel(places.reshape(-1), offsets)
        return pooled.view(batch, num_features, self.dim)

    def memory_bytes(self) -> int:
        """Returns the bytes of the rows and their state."""
        return int(self.rows.sum()) * row_bytes(self.dim)

    @torch.no_grad()
    def reset(self, table: int, places: Tensor) -> None:
        """Makes new rows at places (N,) int64 of a table."""
        weights = self.kernel.split_embedding_weights()[table]
        bound = len(weights) ** -0.5
        new_rows = torch.empty(len(places), self.dim)
        weights[places] = new_rows.uniform_(-bound, bound)
        (state,) = self.kernel.split_optimizer_states()[table]
        state[places] = 0


class Modulo(nn.Module):
    """Ids modulo the number of rows.

    Args:
        rows: The number of rows of each feature.
        dim: The columns.
        lr: The learning rate.
    """

    passes = 1

    def __init__(
        self,
        rows: Sequence[int],
        dim: int,
        lr: float = LR,
    ) -> None:
        super().__init__()
        self.tables = FixedRows(rows, dim, lr)

    def forward(self, ids: Tensor) -> Tensor:
        """See :class:`Tables`."""
        places = ids % self.tables.rows.unsqueeze(1)
        rows: Tensor = self.tables(places)
        return rows

    def memory_bytes(self) -> int:
        """See :class:`Tables`."""
        return self.tables.memory_bytes()


class Vocabulary(nn.Module):
    """A row for each id of a vocabulary, and for each feature a row for all other ids.

    Args:
        vocabularies: The ids of each feature.
        dim: The columns.
        sizes: The most ids of each feature. Default: None, those of its vocabulary.
        lr: The learning rate.
    """

    passes = 2

    def __init__(
        self,
        vocabularies: Sequence[Tensor],
        dim: int,
        sizes: Sequence[int] | None = None,
        lr: float = LR,
    ) -> None:
        super().__init__()
        if sizes is None:
            sizes = [len(ids) for ids in vocabularies]
        self.tables = FixedRows([size + 1 for size in sizes], dim, lr)
        self.ids: list[Tensor] = []
        self.places: list[Tensor] = []
        for ids in vocabularies:
            ordered, _ = ids.sort()
            self.ids.append(ordered)
            self.places.append(torch.arange(1, len(ids) + 1))

    def forward(self, ids: Tensor) -> Tensor:
        """See :class:`Tables`."""
        places = torch.zeros_like(ids)
        for feature, feature_ids in enumerate(ids):
            places[feature] = self.find(feature, feature_ids)
        rows: Tensor = self.tables(places)
        return rows

    def find(self, feature: int, ids: Tensor) -> Tensor:
        """Returns the places (N,) of the ids (N,) of a feature.

        The place of an id that is not in the vocabulary is 0.
        """
        vocabulary = self.ids[feature]
        places = self.places[feature]
        numbers = torch.searchsorted(vocabulary, ids)
        numbers.clamp_(max=len(vocabulary) - 1)
        has_place = vocabulary[numbers] == ids
        return torch.where(has_place, places[numbers], 0)

    def renew(self, feature: int, vocabulary: Tensor) -> None:
        """Changes the vocabulary of a feature.

        Ids that stay keep their rows and state. New ids get new rows in the places of
        ids that leave.
        """
        ordered, _ = vocabulary.sort()
        places = self.find(feature, ordered)
        is_new = places == 0
        num_new = int(is_new.sum())
        num_rows = int(self.tables.rows[feature])
        is_free = torch.ones(num_rows, dtype=torch.bool)
        is_free[0] = False
        is_free[places] = False
        free_places = is_free.nonzero().squeeze(1)
        new_places = free_places[:num_new]
        places[is_new] = new_places
        self.tables.reset(feature, new_places)
        self.ids[feature] = ordered
        self.places[feature] = places

    def memory_bytes(self) -> int:
        """See :class:`Tables`.

        The vocabulary is the least that finds a place: the ids in order, 8 bytes each.
        """
        vocabulary_rows = int((self.tables.rows - 1).sum())
        vocabulary_bytes = ID_BYTES * vocabulary_rows
        return self.tables.memory_bytes() + vocabulary_bytes


class VocabularyOrModulo(nn.Module):
    """A vocabulary for each feature with few ids, and modulo for the others.

    Args:
        ranked: The ids of each feature.
        dim: The columns.
        limit: The most ids of a feature with a vocabulary, and the rows of the others.
    """

    passes = 2

    def __init__(
        self,
        ranked: Sequence[Tensor],
        dim: int,
        limit: int,
    ) -> None:
        super().__init__()
        self.ids: list[Tensor | None] = []
        rows = []
        for ids in ranked:
            if len(ids) <= limit:
                ordered, _ = ids.sort()
                self.ids.append(ordered)
                rows.append(len(ids) + 1)
            else:
                self.ids.append(None)
                rows.append(limit)
        self.tables = FixedRows(rows, dim)

    def forward(self, ids: Tensor) -> Tensor:
        """See :class:`Tables`."""
        places = ids % self.tables.rows.unsqueeze(1)
        for feature, vocabulary in enumerate(self.ids):
            if vocabulary is not None:
                feature_ids = ids[feature]
                numbers = torch.searchsorted(vocabulary, feature_ids)
                numbers.clamp_(max=len(vocabulary) - 1)
                has_place = vocabulary[numbers] == feature_ids
                places[feature] = torch.where(has_place, numbers + 1, 0)
        rows: Tensor = self.tables(places)
        return rows

    def memory_bytes(self) -> int:
        """See :class:`Tables`."""
        vocabulary_ids = sum(len(ids) for ids in self.ids if ids is not None)
        vocabulary_bytes = ID_BYTES * vocabulary_ids
        return self.tables.memory_bytes() + vocabulary_bytes


class QuotientRemainder(nn.Module):
    """The quotient-remainder trick: the sum of two rows, by remainder and by quotient.

    Source: Shi et al., Compositional Embeddings Using Complementary Partitions for
    Memory-Efficient Recommendation Systems, 2020, which multiplies or adds them.

    Args:
        distinct: The number of distinct ids of each feature. A feature that needs at
            most ``2 * limit`` rows has one row for each, by modulo.
        dim: The columns.
        limit: The rows of each of the two tables of the other features.
    """

    passes = 1

    def __init__(
        self,
        distinct: Sequence[int],
        dim: int,
        limit: int,
    ) -> None:
        super().__init__()
        self.is_split = torch.tensor(distinct) > 2 * limit
        rows = []
        for count in distinct:
            rows.append(limit if count > 2 * limit else count)
        quotient_rows = [limit] * int(self.is_split.sum())
        self.features = len(distinct)
        self.tables = FixedRows(rows + quotient_rows, dim)

    def forward(self, ids: Tensor) -> Tensor:
        """See :class:`Tables`."""
        rows = self.tables.rows.unsqueeze(1)
        feature_rows = rows[: self.features]
        quotient_rows = rows[self.features :]
        split_ids = ids[self.is_split]
        quotients = split_ids.div(quotient_rows, rounding_mode="floor")
        places = torch.cat([ids % feature_rows, quotients % quotient_rows])

        embeddings = self.tables(places)
        sums = list(embeddings[:, : self.features].unbind(1))
        of_quotients = embeddings[:, self.features :].unbind(1)
        split_features = self.is_split.nonzero().squeeze(1).tolist()
        for feature, embedding in zip(split_features, of_quotients, strict=True):
            sums[feature] = sums[feature] + embedding
        return torch.stack(sums, 1)

    def memory_bytes(self) -> int:
        """See :class:`Tables`."""
        return self.tables.memory_bytes()


def ones(ids: Tensor, features: Sequence[str]) -> KeyedJaggedTensor:
    """Returns raw ids (F, B) as one id for each feature of each sample."""
    _, batch = ids.shape
    return KeyedJaggedTensor(
        keys=list(features),
        values=ids.reshape(-1),
        lengths=torch.ones(ids.numel(), dtype=torch.int32),
        stride=batch,
        length_per_key=[batch] * len(features),
    )


class ManagedCollision(nn.Module):
    """TorchRec's managed collision with the sorted module, in front of FBGEMM's tables.

    TorchRec's sharded collection cannot make the row of a new id anew on a CPU with
    row-wise Adagrad: ``fbgemm::reset_weight_momentum`` has no kernel there. This class
    does the same in Python. The modules and their evictions are TorchRec's.

    Args:
        rows: The rows of each feature: ``zch_size``.
        features: The names of the features.
        dim: The columns.
        policy: A name of ``MCH_POLICIES``.
        lr: The learning rate.
    """

    passes = 1

    def __init__(
        self,
        rows: Sequence[int],
        features: Sequence[str],
        dim: int,
        policy: str,
        lr: float = LR,
    ) -> None:
        super().__init__()
        self.features = list(features)
        self.tables = FixedRows(rows, dim, lr)
        configs = []
        modules = {}
        for name, count in zip(features, rows, strict=True):
            config = EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=dim,
                num_embeddings=count,
                feature_names=[name],
            )
            configs.append(config)
            modules[config.name] = MCHManagedCollisionModule(
                count,
                CPU,
                MCH_POLICIES[policy](),
                eviction_interval=MCH_EVICTION_STEPS,
            )
        self.managed = ManagedCollisionCollection(modules, configs)

    def forward(self, ids: Tensor) -> Tensor:
        """See :class:`Tables`."""
        remapped = self.managed(ones(ids, self.features))
        for table, places in enumerate(self.managed.evict().values()):
            if places is not None:
                self.tables.reset(table, places)
        rows: Tensor = self.tables(remapped.values().view(ids.shape))
        return rows

    def memory_bytes(self) -> int:
        """See :class:`Tables`.

        The module of a table has a number of vectors of int64 with one entry for each
        row. The history of the ids of a step is not counted.
        """
        module_bytes = 0
        for name, buffer in self.managed.named_buffers():
            if "_mch_" in name and "_mch_slots" not in name:
                module_bytes += buffer.numel() * buffer.element_size()
        return self.tables.memory_bytes() + module_bytes


class RecStoreTables(nn.Module):
    """RecStore's tables, with raw ids.

    Args:
        features: The names of the features.
        dim: The columns.
        options: The options of all tables, or of each table by name.
        lr: The learning rate.
    """

    passes = 1

    def __init__(
        self,
        features: Sequence[str],
        dim: int,
        options: TableOptions | Mapping[str, TableOptions],
        lr: float = LR,
    ) -> None:
        super().__init__()
        self.features = list(features)
        self.dim = dim
        configs = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=dim,
                num_embeddings=2**40,
                feature_names=[name],
            )
            for name in features
        ]
        self.collection = RecStoreEmbeddingBagCollection(
            configs,
            optimizer=RowWiseAdagrad(lr, eps=EPS),
            options=options,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """See :class:`Tables`."""
        num_features, batch = ids.shape
        pooled = self.collection(ones(ids, self.features))
        rows: Tensor = pooled.values().view(batch, num_features, self.dim)
        return rows

    def memory_bytes(self) -> int:
        """See :class:`Tables`."""
        bags = self.collection.embedding_bags.values()
        return sum(bag.table.stats().bytes for bag in bags)
