"""Unsharded training as a reference for sharded training, with TorchRec's own
collection of the ids that occur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)

from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import TableOptions, default_initializer
from torchrec_recstore.store import Table

INT64 = torch.iinfo(torch.int64)


TableConfig = EmbeddingBagConfig | EmbeddingConfig


@dataclass(frozen=True)
class Case:
    """A collection, and how it is trained.

    Args:
        tables: The collection's tables, all of bags or all of sequences.
        stock: The tables on TorchRec's own kernels. Their ids are below
            ``num_embeddings``.
        options: The options of RecStore tables that are not the default options.
        empty: The steps in which the batch of rank 0 has no ids. In the last of these
            steps no rank has ids.
        varying: Whether the sharded model gets only the distinct bags of each feature
            (variable batch per feature).
    """

    tables: Sequence[TableConfig]
    optimizer: Optimizer = field(default_factory=lambda: SGD(lr=0.1))
    stock: frozenset[str] = frozenset()
    options: Mapping[str, TableOptions] = field(default_factory=dict)
    weighted: bool = False
    steps: int = 5
    empty: Sequence[int] = ()
    varying: bool = False

    @property
    def sequential(self) -> bool:
        """Whether the collection is an ``EmbeddingCollection``."""
        return isinstance(self.tables[0], EmbeddingConfig)

    def collection(self, tables: Sequence[TableConfig], device: str) -> nn.Module:
        """Returns the unsharded module of ``tables``."""
        if self.sequential:
            return EmbeddingCollection(tables=list(tables), device=torch.device(device))
        return EmbeddingBagCollection(
            tables=list(tables), is_weighted=self.weighted, device=torch.device(device)
        )

    def batch(self, step: int, rank: int, batch_size: int = 6) -> KeyedJaggedTensor:
        """Returns the batch of a rank: bags of 0 to 4 ids with duplicates, with raw
        int64 ids for RecStore tables.
        """
        generator = torch.Generator().manual_seed(1000 * step + rank)
        keys, values, lengths = [], [], []
        for feature, pool in self._pools().items():
            bags = torch.randint(0, 5, (batch_size,), generator=generator)
            if step in self.empty and (rank == 0 or step == self.empty[-1]):
                bags = torch.zeros_like(bags)
            keys.append(feature)
            lengths.append(bags)
            values.append(
                pool[
                    torch.randint(0, len(pool), (int(bags.sum()),), generator=generator)
                ]
            )
        ids = torch.cat(values)
        weights = (
            torch.rand(len(ids), generator=generator) + 0.5 if self.weighted else None
        )
        plain = KeyedJaggedTensor.from_lengths_sync(
            keys, ids, torch.cat(lengths), weights
        )
        return (
            _whole_batch(plain, self._bags_of(plain, step)) if self.varying else plain
        )

    def sharded_batch(self, step: int, rank: int) -> KeyedJaggedTensor:
        """Returns the same batch in the form that the sharded model gets."""
        plain = replace(self, varying=False).batch(step, rank)
        return (
            _distinct_bags(plain, self._bags_of(plain, step)) if self.varying else plain
        )

    def _pools(self) -> dict[str, torch.Tensor]:
        pools: dict[str, torch.Tensor] = {}
        for table in self.tables:
            pool = (
                torch.arange(min(10, table.num_embeddings))
                if table.name in self.stock
                else raw_ids(table)
            )
            for feature in table.feature_names:
                pools.setdefault(feature, pool)
        return pools

    def _bags_of(self, plain: KeyedJaggedTensor, step: int) -> torch.Tensor:
        # (features, batch): the number of each sample's bag. Feature i has 1 + (i +
        # step) % batch distinct bags.
        batch_size = plain.stride()
        samples = torch.arange(batch_size)
        return torch.stack(
            [samples % (1 + (i + step) % batch_size) for i in range(len(plain.keys()))]
        )


def _whole_batch(plain: KeyedJaggedTensor, bags_of: torch.Tensor) -> KeyedJaggedTensor:
    jagged = [
        JaggedTensor.from_dense([plain[key].to_dense()[bag] for bag in bags])
        for key, bags in zip(plain.keys(), bags_of.tolist(), strict=True)
    ]
    return KeyedJaggedTensor.from_jt_dict(dict(zip(plain.keys(), jagged, strict=True)))


def _distinct_bags(
    plain: KeyedJaggedTensor, bags_of: torch.Tensor
) -> KeyedJaggedTensor:
    counts = [int(bags.max()) + 1 for bags in bags_of]
    bags = [
        plain[key].to_dense()[:count]
        for key, count in zip(plain.keys(), counts, strict=True)
    ]
    return KeyedJaggedTensor(
        keys=plain.keys(),
        values=torch.cat([ids for feature in bags for ids in feature]),
        lengths=torch.tensor([len(ids) for feature in bags for ids in feature]),
        stride_per_key_per_rank=[[count] for count in counts],
        inverse_indices=(plain.keys(), bags_of),
    )


def raw_ids(table: TableConfig) -> torch.Tensor:
    """Returns the smallest and largest ids, ids around ``num_embeddings``, and many
    random ids.
    """
    n = table.num_embeddings
    edges = [
        -1,
        0,
        1,
        INT64.max,
        INT64.min,
        INT64.max - 1,
        INT64.min + 1,
        n - 1,
        n,
        n + 1,
        -n,
        n // 2,
    ]
    some = torch.randint(
        INT64.min, INT64.max, (30,), generator=torch.Generator().manual_seed(7)
    )
    return torch.cat([torch.tensor(edges), some])


class Unsharded:
    """The same training without shards, on the batches of all ranks.

    Gradients are averaged over ranks.
    """

    def __init__(self, case: Case, world_size: int) -> None:
        self.case, self.world_size = case, world_size
        self.vocabulary = {table.name: self._vocabulary(table) for table in case.tables}
        vocabularies = [
            replace(t, num_embeddings=len(self.vocabulary[t.name]))
            for t in self._separate_features()
        ]
        self.collection = case.collection(vocabularies, "cpu")
        for table in case.tables:
            if table.name not in case.stock:
                self.weights(table.name).data.copy_(self._initial_rows(table))
        self._steps = {
            name: _step(case.optimizer, self.weights(name)) for name in self.vocabulary
        }

    def weights(self, table_name: str) -> nn.Parameter:
        """(len(vocabulary), dim)."""
        tables = (
            self.collection.embeddings
            if self.case.sequential
            else self.collection.embedding_bags
        )
        return tables[table_name].weight

    def forward(self, batch: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Pooled rows, or rows, by the key that TorchRec's sharded module uses."""
        ids, lengths, keys, weights = [], [], [], []
        for table in self.case.tables:
            for feature in table.feature_names:
                jagged = batch[feature]
                keys.append(f"{feature}@{table.name}")
                ids.append(
                    torch.searchsorted(self.vocabulary[table.name], jagged.values())
                )
                lengths.append(jagged.lengths())
                if self.case.weighted:
                    weights.append(jagged.weights())
        kjt = KeyedJaggedTensor.from_lengths_sync(
            keys,
            torch.cat(ids),
            torch.cat(lengths),
            torch.cat(weights) if weights else None,
        )
        return {
            self._sharded_key(key): value
            for key, value in outputs(self.collection(kjt)).items()
        }

    def train_step(self, step: int) -> list[dict[str, torch.Tensor]]:
        """One step on the batches of all ranks. Returns the outputs by rank."""
        by_rank = [
            self.forward(self.case.batch(step, rank)) for rank in range(self.world_size)
        ]
        (sum(loss(output) for output in by_rank) / self.world_size).backward()
        for update in self._steps.values():
            update()
        self.collection.zero_grad()
        return [
            {key: value.detach() for key, value in output.items()} for output in by_rank
        ]

    def _vocabulary(self, table: TableConfig) -> torch.Tensor:
        batches = [
            self.case.batch(s, r)
            for s in range(self.case.steps)
            for r in range(self.world_size)
        ]
        if table.name in self.case.stock:
            return torch.arange(table.num_embeddings)
        return torch.cat(
            [batch[f].values() for batch in batches for f in table.feature_names]
        ).unique()

    def _initial_rows(self, table: TableConfig) -> torch.Tensor:
        options = self.case.options.get(table.name, TableOptions())
        initializer = default_initializer(options, table.num_embeddings)
        options = replace(options, initializer=initializer, missing="init")
        with Table(table.embedding_dim, options=options, name=table.name) as bare:
            return bare.lookup(self.vocabulary[table.name]).clone()

    def _separate_features(self) -> list[TableConfig]:
        return [
            replace(t, feature_names=[f"{f}@{t.name}" for f in t.feature_names])
            for t in self.case.tables
        ]

    def _sharded_key(self, key: str) -> str:
        feature = key.split("@")[0]
        shared = sum(feature in table.feature_names for table in self.case.tables) > 1
        return key if shared else feature


def outputs(module_output: Any) -> dict[str, torch.Tensor]:
    """The outputs of a collection, sharded or not, by key: pooled rows or sequences of
    rows.
    """
    if isinstance(module_output, KeyedTensor):
        pooled: dict[str, torch.Tensor] = module_output.to_dict()
        return pooled
    return {key: jagged.values() for key, jagged in module_output.items()}


def loss(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A loss whose gradients depend on the rows."""
    total = torch.zeros(())
    for key in sorted(outputs):
        total = total + ((outputs[key] + 0.3) ** 2).sum()
    return total


def _step(optimizer: Optimizer, weights: nn.Parameter) -> object:
    if isinstance(optimizer, SGD):
        return torch.optim.SGD([weights], lr=optimizer.lr).step
    if type(optimizer) is Adagrad:
        return torch.optim.Adagrad([weights], lr=optimizer.lr, eps=optimizer.eps).step
    state = torch.zeros(len(weights), 1)

    def step() -> None:
        assert isinstance(optimizer, RowWiseAdagrad)
        state.add_((weights.grad**2).mean(1, keepdim=True))
        weights.data.sub_(optimizer.lr * weights.grad / (state.sqrt() + optimizer.eps))

    return step
