"""HSTU, a generative sequential recommender, on MovieLens-100k, with raw ids in an
EmbeddingCollection.

    python examples/models/hstu.py --data ml-100k               # RecStore tables
    python examples/models/hstu.py --data ml-100k --static      # the same model on torch.nn.Embedding
    torchrun --nproc-per-node 2 examples/models/hstu.py --data ml-100k

The folder contains ml-100k.inter of RecBole, plain or .gz. The model reads the movies
that a user has rated, in the order of time, and predicts the next one. All users have
the same split in time, as in MLPerf's benchmark of HSTU: the model is trained on the
first 90 % of all ratings, and tested on each later one. It ends with HR@10 of about
0.15.

Source: Zhai et al., Actions Speak Louder than Words, arXiv 2402.17152.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import polars as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import (
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore import (
    RecStoreEmbeddingCollectionSharder,
    Table,
    table_stats,
    tune_threads,
)
from torchrec_recstore.options import TableOptions, UniformInit

LENGTH = 100  # the number of movies that the model reads
DIM, HEADS, LAYERS, DROPOUT = 64, 2, 2, 0.2
INIT = 0.035  # new rows are uniform in +-INIT
# users of a batch, over all ranks; negatives for each user, which the whole batch
# shares
BATCH, NEGATIVES = 32, 16
# the rate of Adam, for rows and layers; the temperature of the softmax
LR, TEMPERATURE = 1e-3, 0.05


class Ratings(NamedTuple):
    """The ratings of one user after another, and of each user in the order of time.

    Each tensor is (ratings,) int64.
    """

    item: Tensor
    time: Tensor  # in seconds
    begin: Tensor  # the place of the user's first rating
    order: Tensor  # the place in the order of time of all ratings


def read(folder: Path) -> Ratings:
    """Reads the file of ratings."""
    paths = list(folder.glob("ml-100k.inter*")) or sys.exit(
        f"error: {folder} has no ml-100k.inter"
    )
    table = pl.read_csv(
        paths[0], separator="\t", new_columns=["user", "item", "rating", "time"]
    )
    table = table.sort("time", maintain_order=True).with_row_index("order")
    table = table.sort("user", maintain_order=True).with_row_index("place")
    table = table.with_columns(begin=pl.col("place").min().over("user"))
    return Ratings(*(table[name].cast(pl.Int64).to_torch() for name in Ratings._fields))


def windows(ratings: Ratings, in_train: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts the training ratings of each user into windows of up to ``LENGTH + 1``.

    Returns their begins and ends.
    """
    counts = torch.zeros_like(ratings.begin).index_add_(
        0, ratings.begin, in_train.long()
    )
    # the place of the user's last training rating
    last = ratings.begin + counts[ratings.begin] - 1
    places = torch.arange(len(last))
    begins = places[((places - ratings.begin) % LENGTH == 0) & (places < last)]
    return begins, torch.minimum(begins + LENGTH, last[begins]) + 1


def ragged(values: Tensor, begins: Tensor, ends: Tensor) -> JaggedTensor:
    """Returns ``values[begin:end]`` for each begin and end."""
    lengths = ends - begins
    shifts = begins - (lengths.cumsum(0) - lengths)
    return JaggedTensor(
        values[torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)],
        lengths=lengths,
    )


def features(items: JaggedTensor, negatives: Tensor) -> KeyedJaggedTensor:
    """Returns the ids of a batch as two features. ``negatives`` is (B, n)."""
    lengths = torch.cat(
        [items.lengths(), torch.full((len(negatives),), negatives.shape[1])]
    )
    return KeyedJaggedTensor(
        ["item", "negative"],
        torch.cat([items.values(), negatives.flatten()]),
        lengths=lengths,
    )


class Bias(nn.Module):
    """The relative attention bias: a learned number for each distance in places, and
    for each distance in time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.empty(LENGTH).normal_(std=0.02))
        self.time = nn.Parameter(torch.empty(64).normal_(std=0.02))

    def forward(self, now: Tensor, times: Tensor) -> Tensor:
        """Returns the bias, (B, N, N), of the prediction at ``now[b, i]`` for the
        rating at ``times[b, j]``.
        """
        places = torch.arange(times.shape[1])
        buckets = (
            ((now[:, :, None] - times[:, None, :]).clamp(min=1).log() / 0.301)
            .long()
            .clamp(max=63)
        )
        return self.place[(places[:, None] - places).clamp(min=0)] + self.time[buckets]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Returns pointwise aggregated attention, which has SiLU where other models have
    softmax.

    The weights of the values do not sum to one, so that the strength of an interest is
    kept. ``q``, ``k`` and ``v`` are (B, N, heads, d), and ``bias`` is (B, N, N), the
    same for each head.
    """
    weights = F.silu(torch.einsum("bihd,bjhd->bhij", q, k) + bias[:, None]) / LENGTH
    # no place sees a later one, so none sees padding
    return torch.einsum("bhij,bjhd->bihd", weights.tril(), v)


class Layer(nn.Module):
    """x + f2(norm(attention(q, k) v) * u), where u, v, q, k = SiLU(f1(norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.f1, self.f2 = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)
        self.bias = Bias()

    def forward(self, x: Tensor, now: Tensor, times: Tensor) -> Tensor:
        """Returns (B, N, DIM)."""
        u, v, q, k = F.silu(self.f1(self.norm_in(x))).chunk(4, dim=-1)
        q, k, v = (each.unflatten(-1, (HEADS, DIM // HEADS)) for each in (q, k, v))
        attended = attend(q, k, v, self.bias(now, times)).flatten(-2)
        return x + self.f2(
            F.dropout(self.norm_out(attended) * u, DROPOUT, self.training)
        )


class HSTU(nn.Module):
    """Predicts the movie after each movie of a sequence."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.places = nn.Parameter(torch.empty(LENGTH, DIM).normal_(std=0.02))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(
        self, ids: KeyedJaggedTensor, times: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns unit vectors: predictions and the movies that came next, each (B, N,
        DIM), and negatives (n, DIM).

        ``ids`` has up to N + 1 movies of each user as ``item``. ``times``, (B, N + 1),
        is padded at the end.
        """
        rows = self.table(ids)
        movies = rows["item"].to_padded_dense(times.shape[1])
        x = F.dropout(
            movies[:, :-1] * DIM**0.5 + self.places[: times.shape[1] - 1],
            DROPOUT,
            self.training,
        )
        for layer in self.layers:
            x = layer(x, times[:, 1:], times[:, :-1])
        return tuple(
            F.normalize(each, dim=-1, eps=1e-6)
            for each in (x, movies[:, 1:], rows["negative"].values())
        )


def sampled_softmax(
    predicted: Tensor, targets: Tensor, negatives: Tensor, ids: KeyedJaggedTensor
) -> Tensor:
    """Returns the mean cross-entropy of the next movie among it and the negatives, over
    all places but padding.
    """
    places = ids["item"].to_padded_dense(predicted.shape[1] + 1)[:, 1:]
    real = torch.arange(places.shape[1]) < (ids["item"].lengths() - 1)[:, None]
    predicted, right = (
        predicted[real],
        (predicted[real] * targets[real]).sum(-1, keepdim=True),
    )
    same = places[real][:, None] == ids["negative"].values()
    logits = (
        torch.cat(
            [right, (predicted @ negatives.T).masked_fill(same, -torch.inf)], dim=1
        )
        / TEMPERATURE
    )
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


@torch.no_grad()
def hit_rate(model: HSTU, ratings: Ratings, test: Tensor) -> tuple[float, float]:
    """Returns HR@10 of the test ratings, and its standard error.

    Collective: each rank tests a part.

    The movie of a rating is ranked among all movies that the user had not rated before.
    The model reads all ratings of the user before it, also those after the end of the
    training.
    """
    movies, none = ratings.item.unique(), torch.empty(256, 0, dtype=torch.int64)
    rows = model.table(
        features(JaggedTensor(movies, lengths=torch.tensor([len(movies)])), none[:1])
    )["item"].values()
    vectors = F.normalize(rows, dim=-1, eps=1e-6)
    hits = torch.zeros((), dtype=torch.int64)
    for part in test.split(256 * dist.get_world_size()):
        places = part[dist.get_rank() :: dist.get_world_size()]
        begins, users = (
            torch.maximum(ratings.begin[places], places - LENGTH),
            torch.arange(len(places)),
        )
        ids = ragged(ratings.item, begins, places + 1)
        times = ragged(ratings.time, begins, places + 1).to_padded_dense(LENGTH + 1)
        scores = (
            model(features(ids, none[: len(places)]), times)[0][
                users, ids.lengths() - 2
            ]
            @ vectors.T
        )
        rated = ragged(ratings.item, ratings.begin[places], places)
        scores[
            users.repeat_interleave(rated.lengths()),
            torch.searchsorted(movies, rated.values()),
        ] = -torch.inf
        hits += (movies[scores.topk(10).indices] == ratings.item[places, None]).sum()
    dist.all_reduce(hits)
    share = hits.item() / len(test)
    return share, (share * (1 - share) / len(test)) ** 0.5


class StaticTable(nn.Module):
    """The table to compare with, with the same first rows.

    It numbers its rows, so it needs all ids beforehand.
    """

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids.unique())
        begin = Table(
            DIM,
            options=TableOptions(initializer=UniformInit(-INIT, INIT)),
            name="t_item",
        )
        self.rows = nn.Embedding.from_pretrained(
            begin.lookup(self.ids, train=True), freeze=False, sparse=True
        )

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the rows of the ids, by key."""
        rows = {
            key: self.rows(torch.searchsorted(self.ids, ids[key].values()))
            for key in ("item", "negative")
        }
        return {
            key: JaggedTensor(rows[key], lengths=ids[key].lengths()) for key in rows
        }


def main(data: Path, epochs: int, seed: int, static: bool) -> None:
    """Trains, and prints HR@10 of the test ratings."""
    tune_threads()
    alone = (
        {}
        if dist.is_torchelastic_launched()
        else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group("gloo", **alone)
    rank, ranks, ratings = dist.get_rank(), dist.get_world_size(), read(data)
    in_train = ratings.order < int(0.9 * len(ratings.order))
    test = torch.nonzero(
        ~in_train & (torch.arange(len(in_train)) > ratings.begin)
    ).flatten()
    movies, (begins, ends) = ratings.item[in_train].unique(), windows(ratings, in_train)

    torch.manual_seed(seed)
    options = {
        "name": "t_item",
        "embedding_dim": DIM,
        "weight_init_min": -INIT,
        "weight_init_max": INIT,
    }
    config = EmbeddingConfig(
        **options, num_embeddings=2**40, feature_names=["item", "negative"]
    )
    table = (
        StaticTable(ratings.item)
        if static
        else EmbeddingCollection([config], device=torch.device("meta"))
    )
    sharder = RecStoreEmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.ADAM, "learning_rate": LR}
    )
    model = DistributedModelParallel(
        HSTU(table), sharders=[sharder], device=torch.device("cpu")
    )
    # RecStore's rows are updated in backward
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    rows = [dense.pop(name) for name in list(dense) if "table.rows" in name]
    optimizers = [
        torch.optim.Adam(dense.values(), lr=LR),
        *(torch.optim.SparseAdam([each], lr=LR) for each in rows),
    ]

    began = time.perf_counter()
    for epoch in range(epochs):
        model.train()
        losses, order = (
            [],
            torch.randperm(
                len(begins),
                generator=torch.Generator().manual_seed(seed * epochs + epoch),
            ),
        )
        for batch in order[: len(order) // ranks * ranks].split(BATCH):
            part = batch[rank::ranks]
            times = ragged(ratings.time, begins[part], ends[part]).to_padded_dense(
                LENGTH + 1
            )
            negatives = movies[torch.randint(len(movies), (len(part), NEGATIVES))]
            ids = features(ragged(ratings.item, begins[part], ends[part]), negatives)
            loss = sampled_softmax(*model(ids, times), ids)
            model.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        if rank == 0:
            print(
                f"epoch {epoch + 1}: training loss {sum(losses) / len(losses):.4f}",
                flush=True,
            )
    speed = epochs * (ends - begins - 1).sum().item() / (time.perf_counter() - began)
    model.eval()
    share, error = hit_rate(model.module, ratings, test)
    held = len(movies) if static else table_stats(model)["t_item"].rows
    if rank == 0:
        print(f"{speed:,.0f} predictions/s in training, {held:,} rows")
        print(
            f"HR@10 of {len(test):,} later ratings: {share:.4f} +- {error:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--data", type=Path, required=True, help="folder with ml-100k.inter"
    )
    flags.add_argument("--epochs", type=int, default=20)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--static",
        action="store_true",
        help="torch.nn.Embedding instead of a RecStore table",
    )
    main(**vars(flags.parse_args()))
    os._exit(0)  # gloo's threads abort in some normal exits (torch 2.13)
