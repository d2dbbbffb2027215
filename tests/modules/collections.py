"""Batches and tables for the eager collections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType

IDS = torch.tensor([0, 1, 2, -1, -(2**63), 2**63 - 1, 2**30, 2**40 + 7, 99, 1000])
"""Ids of every kind, also with more than 30 bits, which ``fusion_k=30`` does not limit.
"""


def bag_tables(*poolings: PoolingType, stock: bool = False) -> list[EmbeddingBagConfig]:
    """Three tables.

    Two of them share the feature ``b``, and one of the two also has a feature of its
    own.

    Args:
        poolings: The poolings of the tables. One pooling applies to all tables.
        stock: Whether the tables have as many rows as :data:`IDS` has ids, for
            TorchRec's own module.
    """
    kinds = (
        list(poolings)
        if len(poolings) == 3
        else list(poolings or [PoolingType.SUM]) * 3
    )
    features, dims = (["b", "a"], ["c"], ["b"]), (4, 6, 8)
    rows = len(IDS) if stock else 2**40
    return [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=rows,
            embedding_dim=dims[i],
            feature_names=features[i],
            pooling=p,
        )
        for i, p in enumerate(kinds)
    ]


def sequence_tables(stock: bool = False) -> list[EmbeddingConfig]:
    """The tables of :func:`bag_tables`, all of one dim."""
    rows = len(IDS) if stock else 2**40
    return [
        EmbeddingConfig(
            name=f"t{i}", num_embeddings=rows, embedding_dim=4, feature_names=features
        )
        for i, features in enumerate((["b", "a"], ["c"], ["b"]))
    ]


def batch(
    seed: int,
    weighted: bool = False,
    keys: Sequence[str] = ("a", "b", "c"),
    batch_size: int = 5,
) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids of :data:`IDS`, with duplicates."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * batch_size,), generator=generator)
    count = int(lengths.sum())
    ids = IDS[torch.randint(0, len(IDS), (count,), generator=generator)]
    weights = (
        torch.rand(count, generator=generator).requires_grad_() if weighted else None
    )
    return KeyedJaggedTensor.from_lengths_sync(list(keys), ids, lengths, weights)


def places(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch for TorchRec's own module: each id is replaced by its index in
    :data:`IDS`.
    """
    weights = kjt.weights_or_none()
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=torch.searchsorted(IDS.sort().values, kjt.values()),
        lengths=kjt.lengths(),
        weights=None if weights is None else weights.detach().clone().requires_grad_(),
        stride_per_key_per_rank=(
            kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
        ),
        inverse_indices=kjt.inverse_indices_or_none(),
    )


def rows_of(table: object) -> Tensor:
    """The rows of :data:`IDS` in ascending order of the ids. Missing rows are zeros."""
    return table.lookup(IDS.sort().values)  # type: ignore[attr-defined, no-any-return]
