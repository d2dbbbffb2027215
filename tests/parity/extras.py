"""Batches that carry more than an unweighted collection needs, or the same features in
another form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.test_utils.test_model import ModelInput

FURTHER = ("further_0", "further_1", "further_2")
"""The features that no table has."""

Change = Callable[[KeyedJaggedTensor, int, list[torch.Generator]], KeyedJaggedTensor]
"""Changes the features of a batch.

Its arguments are the features, the number of examples of each rank, and the random
generator of each rank.
"""


def with_extra(
    batch: ModelInput, extra: str, step: int, ranks: Sequence[int], examples: int
) -> ModelInput:
    """Returns a batch whose unweighted features carry more.

    Args:
        batch: The batch of one rank, or of all ranks together.
        extra: A key of :data:`EXTRAS`.
        step: The step of training, which determines the random parts.
        ranks: The ranks that the batch is for.
        examples: The number of examples of each rank.
    """
    features = batch.idlist_features
    assert features is not None
    generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
    return replace(batch, idlist_features=EXTRAS[extra](features, examples, generators))


def _weights(
    features: KeyedJaggedTensor, examples: int, generators: list[torch.Generator]
) -> KeyedJaggedTensor:
    weights = torch.rand(len(features.values()), generator=generators[0])
    return KeyedJaggedTensor(
        features.keys(), features.values(), weights, features.lengths()
    )


def _further_features(
    features: KeyedJaggedTensor, examples: int, generators: list[torch.Generator]
) -> KeyedJaggedTensor:
    bags = examples * len(generators)
    by_name = {
        name: (feature.values(), feature.lengths())
        for name, feature in features.to_dict().items()
    }
    for name in FURTHER:
        lengths = torch.randint(0, 4, (bags,), generator=generators[0])
        by_name[name] = (
            torch.randint(
                -(2**40), 2**40, (int(lengths.sum()),), generator=generators[0]
            ),
            lengths,
        )
    # The features are in another order in each step, and on each rank.
    names = [
        list(by_name)[place]
        for place in torch.randperm(len(by_name), generator=generators[0]).tolist()
    ]
    return KeyedJaggedTensor(
        names,
        torch.cat([by_name[name][0] for name in names]),
        lengths=torch.cat([by_name[name][1] for name in names]),
    )


def _int64_lengths(
    features: KeyedJaggedTensor, examples: int, generators: list[torch.Generator]
) -> KeyedJaggedTensor:
    lengths = features.lengths().to(torch.int64)
    offsets = features.offsets().to(torch.int64)
    return KeyedJaggedTensor(
        features.keys(), features.values(), lengths=lengths, offsets=offsets
    )


def _int32_ids(
    features: KeyedJaggedTensor, examples: int, generators: list[torch.Generator]
) -> KeyedJaggedTensor:
    ids = features.values().to(torch.int32)
    return KeyedJaggedTensor(
        features.keys(), ids, lengths=features.lengths().to(torch.int32)
    )


def _offsets(
    features: KeyedJaggedTensor, examples: int, generators: list[torch.Generator]
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        features.keys(), features.values(), offsets=features.offsets()
    )


def _inverse(
    features: KeyedJaggedTensor, examples: int, generators: list[torch.Generator]
) -> tuple[list[str], Tensor]:
    by_rank = [
        torch.randint(
            0, examples, (len(features.keys()), examples), generator=generator
        )
        + place * examples
        for place, generator in enumerate(generators)
    ]
    return features.keys(), torch.cat(by_rank, dim=1)


def _inverse_indices(
    features: KeyedJaggedTensor, examples: int, generators: list[torch.Generator]
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths(),
        inverse_indices=_inverse(features, examples, generators),
    )


def _strides(
    features: KeyedJaggedTensor, examples: int, generators: list[torch.Generator]
) -> KeyedJaggedTensor:
    bags = examples * len(generators)
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths(),
        stride_per_key_per_rank=[[bags]] * len(features.keys()),
    )


EXTRAS: dict[str, Change] = {
    "weights": _weights,
    "further features": _further_features,
    "int64 lengths": _int64_lengths,
    "int32 ids": _int32_ids,
    "only offsets": _offsets,
    "inverse indices": _inverse_indices,
    "stride per key": _strides,
}
"""What a batch carries, by name."""
