"""DIN, a click model with attention over a user's history, on MovieLens-100k, with raw
ids and hashed words.

    python examples/models/din.py --data ml-100k

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

import polars as pl
import torch
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

# class: the genres
PROFILE = [
    "user_id",
    "age",
    "gender",
    "occupation",
    "zip_code",
    "release_year",
    "class",
]
DIM, HISTORY, HIDDEN = 16, 50, [64, 32]
BATCH, LR, DENSE_LR = 256, 0.02, 0.001  # row-wise Adagrad for tables, Adam for layers
INIT = 0.05  # new rows are uniform in +-INIT

Feature = tuple[Tensor, Tensor, Tensor]
"""The ids of all lists, int64, and begin and end of the list of each rating, (ratings,)
int64.

Lists may overlap.
"""


def string_id(text: str) -> int:
    """Returns the 64-bit id of a string. It is the same on every machine."""
    return xxhash.xxh3_64_intdigest(text.encode()) - 2**63


def table(folder: Path, kind: str) -> pl.DataFrame:
    """Reads one file.

    The first column is an id. Other columns of words become lists of the words' ids.
    """
    paths = list(folder.glob(f"ml-100k.{kind}*")) or sys.exit(
        f"error: {folder} has no ml-100k.{kind}"
    )
    rows = pl.read_csv(paths[0], separator="\t", infer_schema=kind == "inter")
    rows = rows.rename({name: name.split(":")[0] for name in rows.columns})
    if kind == "inter":
        return rows
    words = [
        pl.Series(
            name,
            [[string_id(word) for word in (text or "").split()] for text in rows[name]],
        )
        for name in rows.columns[1:]
    ]
    return rows.with_columns(pl.col(rows.columns[0]).cast(pl.Int64), *words)


def read(folder: Path) -> tuple[Tensor, dict[str, Feature]]:
    """Returns the labels, (ratings,), and the features of all ratings in the order of
    time.
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
    lengths = column.list.len().cast(pl.Int64).to_torch()
    return (
        column.explode(empty_as_null=False).to_torch(),
        lengths.cumsum(0) - lengths,
        lengths.cumsum(0),
    )


def earlier_likes(ratings: pl.DataFrame) -> Feature:
    """Returns the last ``HISTORY`` movies that the user has liked before each rating."""
    by_user = ratings.with_row_index("place").sort("user_id", "place")
    by_user = by_user.with_columns(end=pl.col("liked").cum_sum() - pl.col("liked"))
    by_user = by_user.with_columns(first=pl.col("end").min().over("user_id")).cast(
        {"end": pl.Int64, "first": pl.Int64}
    )
    likes = by_user.filter("liked")["item_id"].list.first().to_torch()
    by_time = by_user.sort("place")
    begins, ends = by_time["first"].to_torch(), by_time["end"].to_torch()
    return likes, torch.maximum(begins, ends - HISTORY), ends


def keyed(
    features: dict[str, Feature], names: list[str], rows: Tensor
) -> KeyedJaggedTensor:
    """Returns some features of some ratings."""
    values, lengths = [], []
    for ids, begins, ends in (features[name] for name in names):
        length = ends[rows] - begins[rows]
        shifts = begins[rows] - (length.cumsum(0) - length)
        values.append(
            ids[torch.arange(int(length.sum())) + shifts.repeat_interleave(length)]
        )
        lengths.append(length)
    return KeyedJaggedTensor(names, torch.cat(values), lengths=torch.cat(lengths))


class Attention(nn.Module):
    """Weighs each movie of a history by an MLP on it and the movie in question, and
    sums them without a softmax.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(4 * DIM, 36), nn.PReLU(), nn.Linear(36, 1))

    def forward(self, item: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        """Returns (B, DIM).

        Args:
            item: (B, DIM). The movies in question.
            history: (total, DIM). The movies of all histories, one history after
                another.
            lengths: (B,) int64. The number of movies of each history.
        """
        sample = torch.arange(len(item)).repeat_interleave(lengths)
        each = item[sample]
        weights = self.weigh(
            torch.cat([history, each, history - each, history * each], dim=1)
        )
        return torch.zeros_like(item).index_add(0, sample, weights * history)


class DIN(nn.Module):
    """An MLP on the profile of user and movie, the movie, and the part of the history
    that matters for the movie.
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
            name="t_item", feature_names=["item_id", "history"], **options
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
        item, history = rows["item_id"].values(), rows["history"]
        interest = self.attention(item, history.values(), history.lengths())
        return self.deep(
            torch.cat([self.profile(profile).values(), item, interest], dim=1)
        ).squeeze(1)


def main(data: Path, epochs: int, seed: int) -> None:
    """Trains, and prints the AUC of the later ratings."""
    tune_threads()
    torch.manual_seed(seed)
    labels, features = read(data)
    places = torch.arange(len(labels))
    train, test = places[: int(0.9 * len(places))], places[int(0.9 * len(places)) :]
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
        losses, began = [], time.perf_counter()
        for rows in train[torch.randperm(len(train))].split(BATCH):
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits(rows), labels[rows]
            )
            optimizer.zero_grad()
            loss.backward()  # also updates the rows of the tables
            optimizer.step()
            losses.append(loss.item())
        seconds += time.perf_counter() - began
        model.eval()
        with torch.no_grad():
            area = binary_auroc(
                torch.cat([logits(rows) for rows in test.split(4096)]),
                labels[test].long(),
            ).item()
        print(
            f"epoch {epoch + 1}: training loss {sum(losses) / len(losses):.4f}, test"
            f" AUC {area:.4f}",
            flush=True,
        )
    print(f"{epochs * len(train) / seconds:,.0f} samples/s in training")
    print(f"test AUC {area:.4f}")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
