"""The click logs of quality.py and progressive.py, in the order of time."""

from __future__ import annotations

import gzip
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from measure import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "examples" / "dlrm"))

from criteo import ID_NAMES, CriteoFile, concat

GOOD_RATING = 4
STREAM_SAMPLES = 240_000
STREAM_PLACES = 4_000
"""The number of items that can be shown at any moment."""
STREAM_LIFE = 40_000
"""The samples after which the item at a place is replaced by a new one."""
STREAM_USERS = 2_000


@dataclass(frozen=True)
class ClickLog:
    """Samples in the order of time, each with one id for each feature.

    Args:
        name: The name of the log.
        features: The names of the F features.
        ids: (F, N) int64. The raw ids.
        dense: (N, D) float32. The dense features.
        labels: (N,) float32. 0 or 1.
    """

    name: str
    features: tuple[str, ...]
    ids: Tensor
    dense: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, begin: int, end: int) -> ClickLog:
        """Returns the samples from ``begin`` to ``end``."""
        return ClickLog(
            name=self.name,
            features=self.features,
            ids=self.ids[:, begin:end],
            dense=self.dense[begin:end],
            labels=self.labels[begin:end],
        )


def criteo(path: str) -> ClickLog:
    """Reads a Criteo click log, whose lines are in the order of time."""
    file = CriteoFile(path)
    file.scan()
    rows = concat(list(file.rows(0, file.num_rows)))
    return ClickLog(
        name="criteo",
        features=ID_NAMES,
        ids=torch.from_numpy(np.ascontiguousarray(rows.ids.T)),
        dense=torch.from_numpy(rows.dense),
        labels=torch.from_numpy(rows.labels).float(),
    )


def movielens(folder: str) -> ClickLog:
    """Reads MovieLens-100k in the format of RecBole, in the order of the timestamps.

    The label is whether the rating is at least 4.
    """
    compressed = (Path(folder) / "ml-100k.inter.gz").read_bytes()
    ratings = pl.read_csv(
        gzip.decompress(compressed),
        separator="\t",
        quote_char=None,
    )
    ratings = ratings.sort("timestamp:float", maintain_order=True)
    users = ratings["user_id:token"].to_numpy()
    items = ratings["item_id:token"].to_numpy()
    ids = np.stack([users, items]).astype(np.int64)
    labels = (ratings["rating:float"] >= GOOD_RATING).to_numpy()
    return ClickLog(
        name="movielens",
        features=("user", "item"),
        ids=torch.from_numpy(ids),
        dense=torch.ones(len(labels), 1),
        labels=torch.from_numpy(labels).float(),
    )


def games(path: str) -> ClickLog:
    """Reads Amazon "Games" as SASRec has prepared it.

    The file has no times, only the order of each user's items. The log has the first
    item of all users, then the second one, and so on. Each interaction with label 1 is
    followed by one of the same user with label 0, with an item that is drawn from all
    interactions.
    """
    numbers = Path(path).read_text().split()
    pairs = np.array(numbers, dtype=np.int64).reshape(-1, 2)
    count = len(pairs)
    users = pairs[:, 0]
    is_first = np.append(True, users[1:] != users[:-1])
    begins = np.flatnonzero(is_first)
    number_of_user = np.cumsum(is_first) - 1
    turns = np.arange(count) - begins[number_of_user]

    # Users of the same turn are in a random order.
    generator = np.random.default_rng(0)
    random_places = generator.permutation(count)
    order = np.lexsort((random_places, turns))
    pairs = pairs[order]
    users = pairs[:, 0]
    items = pairs[:, 1]

    # Items of earlier interactions alone, so that a negative does not tell of an item
    # that appears later.
    earlier = generator.random(count) * np.arange(1, count + 1)
    negatives = items[earlier.astype(int)]
    ids = np.empty((2, 2 * count), dtype=np.int64)
    ids[0] = users.repeat(2)
    ids[1, 0::2] = items
    ids[1, 1::2] = negatives
    labels_of_pair = np.array([1.0, 0.0], dtype=np.float32)
    labels = np.tile(labels_of_pair, count)
    return ClickLog(
        name="games",
        features=("user", "item"),
        ids=torch.from_numpy(ids),
        dense=torch.ones(len(labels), 1),
        labels=torch.from_numpy(labels),
    )


def stream() -> ClickLog:
    """Generates a stream whose items come and go, always the same.

    An item is shown at one of 4,000 places, which are chosen by Zipf's law. The item at
    a place is replaced by a new one after 40,000 samples; places begin at different
    times. Users stay. The logit of a click is the inner product of a vector of the user
    and one of the item, plus a bias of the item.
    """
    generator = np.random.default_rng(1)
    weights = 1 / np.arange(1, STREAM_PLACES + 1)
    shares = weights / weights.sum()
    places = generator.choice(STREAM_PLACES, STREAM_SAMPLES, p=shares)
    begins = generator.integers(0, STREAM_LIFE, STREAM_PLACES)
    moments = np.arange(STREAM_SAMPLES) + begins[places]
    turns = moments // STREAM_LIFE
    items = turns * STREAM_PLACES + places
    users = generator.zipf(1.3, STREAM_SAMPLES) % STREAM_USERS

    num_items = int(items.max()) + 1
    item_vectors = generator.normal(size=(num_items, 5))
    user_vectors = generator.normal(size=(STREAM_USERS, 4))
    tastes = item_vectors[items, :4] * user_vectors[users]
    popularity = item_vectors[items, 4]
    logits = 0.5 * tastes.sum(axis=1) + 1.5 * popularity - 1.0
    probabilities = 1 / (1 + np.exp(-logits))
    labels = generator.random(STREAM_SAMPLES) < probabilities

    # Raw ids are 63 bits of a hash; an odd factor modulo 2**63 is one-to-one.
    factor = np.int64(0x1E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        user_ids = users.astype(np.int64) * factor
        item_ids = items * factor
    ids = np.stack([user_ids, item_ids])
    return ClickLog(
        name="stream",
        features=("user", "item"),
        ids=torch.from_numpy(ids & np.int64(2**63 - 1)),
        dense=torch.ones(STREAM_SAMPLES, 1),
        labels=torch.from_numpy(labels.astype(np.float32)),
    )
