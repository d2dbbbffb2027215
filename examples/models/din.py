"""DIN, a click model with attention over a user's history, on MovieLens-100k.

    python examples/models/din.py --data ml-100k

The ids are raw, and words are hashed to ids.

The folder contains ml-100k.inter, ml-100k.user and ml-100k.item of RecBole, plain or
.gz. A rating of 4 or 5 is a like. The model predicts from the user's earlier likes
whether the user likes a movie. The split is by time: the model is trained on the first
90 % of the ratings, and tested on the later ones. It ends with a test AUC of about
0.72.

Source: Zhou et al., Deep Interest Network for Click-Through Rate Prediction, arXiv
1706.06978.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import polars as pl
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.mlp import MLP

from torchrec_recstore import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    tune_threads,
)

PROFILE = [
    "user_id",
    "age",
    "gender",
    "occupation",
    "zip_code",
    "release_year",
    "class",  # the genres
]
DIM = 16
HISTORY = 50  # the number of likes that the model reads
HIDDEN = [64, 32]
BATCH = 256
TEST_BATCH = 4096
LR = 0.02  # of the tables: row-wise Adagrad
DENSE_LR = 0.001  # of the layers: Adam
INIT = 0.05  # new rows are uniform in +-INIT


class Feature(NamedTuple):
    """A list of ids for each rating. Lists may overlap."""

    ids: Tensor  # the ids of all lists, int64
    begins: Tensor  # (ratings,) int64: where each list begins
    ends: Tensor  # (ratings,) int64: where each list ends


def string_id(text: str) -> int:
    """Returns the 64-bit id of a string. It is the same on every machine."""
    return xxhash.xxh3_64_intdigest(text.encode()) - 2**63


def table(folder: Path, kind: str) -> pl.DataFrame:
    """Reads one file.

    The first column is an id. Other columns of words become lists of the words' ids.
    """
    paths = list(folder.glob(f"ml-100k.{kind}*"))
    if not paths:
        sys.exit(f"error: {folder} has no ml-100k.{kind}")
    rows = pl.read_csv(
        paths[0],
        separator="\t",
        infer_schema=kind == "inter",
    )
    rows = rows.rename({name: name.split(":")[0] for name in rows.columns})
    if kind == "inter":
        return rows
    id_column, *word_columns = rows.columns
    columns = [rows[id_column].cast(pl.Int64)]
    for name in word_columns:
        ids = [word_ids(text) for text in rows[name]]
        columns.append(pl.Series(name, ids))
    return pl.DataFrame(columns)


def word_ids(text: str | None) -> list[int]:
    """Returns the ids of the words of a text."""
    return [string_id(word) for word in (text or "").split()]


def read(folder: Path) -> tuple[Tensor, dict[str, Feature]]:
    """Reads all ratings in the order of time.

    Returns:
        The labels, (ratings,) float32, and the features, by name.
    """
    ratings = (
        table(folder, "inter")
        .join(table(folder, "user"), on="user_id")
        .join(table(folder, "item"), on="item_id")
    )
    ratings = ratings.sort("timestamp", maintain_order=True).with_columns(
        liked=pl.col("rating") >= 4
    )
    ratings = ratings.with_columns(
        pl.concat_list(name).alias(name) for name in ("user_id", "item_id")
    )
    features = {name: lists(ratings[name]) for name in [*PROFILE, "item_id"]}
    features["history"] = earlier_likes(ratings)
    return ratings["liked"].cast(pl.Float32).to_torch(), features


def lists(column: pl.Series) -> Feature:
    """Returns a column of lists of ids as a feature."""
    ids = column.explode(empty_as_null=False).to_torch()
    lengths = column.list.len().cast(pl.Int64).to_torch()
    ends = lengths.cumsum(0)
    return Feature(ids, begins=ends - lengths, ends=ends)


def earlier_likes(ratings: pl.DataFrame) -> Feature:
    """Returns the last ``HISTORY`` movies that the user has liked before each rating."""
    by_user = ratings.with_row_index("place").sort("user_id", "place")
    # the number of all likes before this rating, of this and of earlier users
    by_user = by_user.with_columns(end=pl.col("liked").cum_sum() - pl.col("liked"))
    by_user = by_user.with_columns(first=pl.col("end").min().over("user_id"))
    by_user = by_user.cast({"end": pl.Int64, "first": pl.Int64})
    likes = by_user.filter("liked")["item_id"].list.first().to_torch()
    by_time = by_user.sort("place")
    first = by_time["first"].to_torch()
    ends = by_time["end"].to_torch()
    return Feature(likes, begins=torch.maximum(first, ends - HISTORY), ends=ends)


def keyed(
    features: dict[str, Feature],
    names: list[str],
    rows: Tensor,
) -> KeyedJaggedTensor:
    """Returns the named features of the ratings ``rows``."""
    values = []
    lengths = []
    for name in names:
        feature = features[name]
        begins = feature.begins[rows]
        length = feature.ends[rows] - begins
        batch_begins = length.cumsum(0) - length
        # the distance of each list in the feature from its place in the batch
        shifts = begins - batch_begins
        batch_places = torch.arange(int(length.sum()))
        places = batch_places + shifts.repeat_interleave(length)
        values.append(feature.ids[places])
        lengths.append(length)
    return KeyedJaggedTensor(
        names,
        torch.cat(values),
        lengths=torch.cat(lengths),
    )


class Attention(nn.Module):
    """Weighs the movies of a history and sums them, without a softmax.

    The weight of a movie is an MLP of the movie and the movie in question.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.Linear(4 * DIM, 36),
            nn.PReLU(),
            nn.Linear(36, 1),
        )

    def forward(
        self,
        item: Tensor,
        history: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Returns (B, DIM).

        Args:
            item: (B, DIM). The movies in question.
            history: (total, DIM). The movies of all histories, one history after
                another.
            lengths: (B,) int64. The number of movies of each history.
        """
        sample = torch.arange(len(item)).repeat_interleave(lengths)
        question = item[sample]
        pairs = [
            history,
            question,
            history - question,
            history * question,
        ]
        weights = self.weigh(torch.cat(pairs, dim=1))
        return torch.zeros_like(item).index_add(0, sample, weights * history)


class DIN(nn.Module):
    """An MLP on the profile, the movie, and the user's interest in the movie.

    The profile describes user and movie. The interest is the part of the history that
    matters for the movie.
    """

    def __init__(self) -> None:
        super().__init__()
        options = {
            "embedding_dim": DIM,
            "num_embeddings": 2**40,
            "weight_init_min": -INIT,
            "weight_init_max": INIT,
        }
        profile = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                feature_names=[name],
                pooling=PoolingType.MEAN,
                **options,
            )
            for name in PROFILE
        ]
        items = EmbeddingConfig(
            name="t_item",
            feature_names=["item_id", "history"],
            **options,
        )
        self.profile = RecStoreEmbeddingBagCollection(profile, lr=LR)
        self.items = RecStoreEmbeddingCollection([items], lr=LR)
        self.attention = Attention()
        self.deep = nn.Sequential(
            MLP(DIM * (len(PROFILE) + 2), HIDDEN), nn.Linear(HIDDEN[-1], 1)
        )

    def forward(self, profile: KeyedJaggedTensor, items: KeyedJaggedTensor) -> Tensor:
        """Returns the logits of a like, (B,)."""
        rows = self.items(items)
        item = rows["item_id"].values()
        history = rows["history"]
        interest = self.attention(item, history.values(), history.lengths())
        pooled = self.profile(profile).values()
        x = torch.cat([pooled, item, interest], dim=1)
        return self.deep(x).squeeze(1)


def main(data: Path, epochs: int, seed: int) -> None:
    """Trains, and prints the AUC of the later ratings."""
    tune_threads()
    torch.manual_seed(seed)
    labels, features = read(data)
    num_train = int(0.9 * len(labels))
    test = torch.arange(num_train, len(labels))
    model = DIN()
    # of the layers; tables update their rows themselves
    optimizer = torch.optim.Adam(model.parameters(), lr=DENSE_LR)

    def logits(rows: Tensor) -> Tensor:
        return model(
            keyed(features, PROFILE, rows),
            keyed(features, ["item_id", "history"], rows),
        )

    seconds = 0.0
    for epoch in range(epochs):
        model.train()
        losses = []
        begin = time.perf_counter()
        for rows in torch.randperm(num_train).split(BATCH):
            loss = F.binary_cross_entropy_with_logits(logits(rows), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # also updates the rows of the tables
            optimizer.step()
            losses.append(loss.item())
        seconds += time.perf_counter() - begin
        model.eval()
        with torch.no_grad():
            predicted = torch.cat([logits(rows) for rows in test.split(TEST_BATCH)])
        auc = binary_auroc(predicted, labels[test].long()).item()
        mean_loss = sum(losses) / len(losses)
        print(
            f"epoch {epoch + 1}: training loss {mean_loss:.4f}, test AUC {auc:.4f}",
            flush=True,
        )
    print(f"{epochs * num_train / seconds:,.0f} samples/s in training")
    print(f"test AUC {auc:.4f}")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with ml-100k.inter, .user and .item",
    )
    flags.add_argument("--epochs", type=int, default=4)
    flags.add_argument("--seed", type=int, default=0)
    main(**vars(flags.parse_args()))
