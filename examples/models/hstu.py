"""HSTU, a generative sequential recommender, on MovieLens-100k.

    python examples/models/hstu.py --data ml-100k
    # the same model on torch.nn.Embedding
    python examples/models/hstu.py --data ml-100k --static
    torchrun --nproc-per-node 2 examples/models/hstu.py --data ml-100k

The ids are raw ids, of an EmbeddingCollection in RecStore. The folder contains
ml-100k.inter of RecBole, plain or .gz. The model reads the movies that a user has
rated, in the order of time, and predicts the next one. All users have the same split in
time, as in MLPerf's benchmark of HSTU: the model is trained on the first 90 % of all
ratings, and tested on each later one. It ends with HR@10 of about 0.15.

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
DIM = 64
HEADS = 2
LAYERS = 2
DROPOUT = 0.2
INIT = 0.035  # new rows are uniform in +-INIT
BATCH = 32  # users of a batch, over all ranks
NEGATIVES = 16  # for each user; the whole batch shares them
TEST_BATCH = 256
LR = 1e-3  # of Adam, for rows and layers
TEMPERATURE = 0.05  # of the softmax


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
    paths = list(folder.glob("ml-100k.inter*"))
    if not paths:
        sys.exit(f"error: {folder} has no ml-100k.inter")
    table = pl.read_csv(
        paths[0],
        separator="\t",
        new_columns=["user", "item", "rating", "time"],
    )
    table = table.sort("time", maintain_order=True).with_row_index("order")
    table = table.sort("user", maintain_order=True).with_row_index("place")
    table = table.with_columns(begin=pl.col("place").min().over("user"))
    table = table.cast(dict.fromkeys(Ratings._fields, pl.Int64))
    return Ratings(
        item=table["item"].to_torch(),
        time=table["time"].to_torch(),
        begin=table["begin"].to_torch(),
        order=table["order"].to_torch(),
    )


def windows(ratings: Ratings, in_train: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts the training ratings of each user into windows of up to ``LENGTH + 1``.

    Returns their begins and ends.
    """
    counts = torch.zeros_like(ratings.begin)
    counts.index_add_(0, ratings.begin, in_train.long())
    # the place of the user's last training rating
    last = ratings.begin + counts[ratings.begin] - 1
    places = torch.arange(len(last))
    places_of_user = places - ratings.begin
    is_begin = (places_of_user % LENGTH == 0) & (places < last)
    begins = places[is_begin]
    last_places = torch.minimum(begins + LENGTH, last[begins])
    return begins, last_places + 1


def ragged(values: Tensor, begins: Tensor, ends: Tensor) -> JaggedTensor:
    """Returns ``values[begin:end]`` for each begin and end."""
    lengths = ends - begins
    result_begins = lengths.cumsum(0) - lengths
    # the distance of each part in the values from its place in the result
    shifts = begins - result_begins
    result_places = torch.arange(int(lengths.sum()))
    places = result_places + shifts.repeat_interleave(lengths)
    return JaggedTensor(values[places], lengths=lengths)


def features(items: JaggedTensor, negatives: Tensor) -> KeyedJaggedTensor:
    """Returns the ids of a batch as two features. ``negatives`` is (B, n)."""
    users, negatives_of_user = negatives.shape
    values = torch.cat([items.values(), negatives.flatten()])
    negative_lengths = torch.full((users,), negatives_of_user)
    lengths = torch.cat([items.lengths(), negative_lengths])
    return KeyedJaggedTensor(
        ["item", "negative"],
        values,
        lengths=lengths,
    )


class Bias(nn.Module):
    """The relative attention bias.

    It is a learned number for each distance in places, and for each distance in time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.empty(LENGTH).normal_(std=0.02))
        self.time = nn.Parameter(torch.empty(64).normal_(std=0.02))

    def forward(self, now: Tensor, times: Tensor) -> Tensor:
        """Returns the bias, (B, N, N).

        ``bias[b, i, j]`` is that of the prediction at ``now[b, i]`` for the rating at
        ``times[b, j]``.
        """
        places = torch.arange(times.shape[1])
        distances = (places[:, None] - places).clamp(min=0)
        seconds = now[:, :, None] - times[:, None, :]
        # the authors' buckets: the base of the logarithm is about 1.35
        logarithms = seconds.clamp(min=1).log() / 0.301
        buckets = logarithms.long().clamp(max=63)
        return self.place[distances] + self.time[buckets]


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Returns pointwise aggregated attention, which has SiLU where other models have
    softmax.

    The weights of the values do not sum to one, so that the strength of an interest is
    kept. ``q``, ``k`` and ``v`` are (B, N, heads, d), and ``bias`` is (B, N, N), the
    same for each head.
    """
    scores = torch.einsum("bihd,bjhd->bhij", q, k) + bias[:, None]
    weights = F.silu(scores) / LENGTH
    # no place sees a later one, so none sees padding
    return torch.einsum("bhij,bjhd->bihd", weights.tril(), v)


class Layer(nn.Module):
    """x + f2(norm(attention(q, k) v) * u), where u, v, q, k = SiLU(f1(norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(DIM)
        self.norm_out = nn.LayerNorm(DIM)
        self.f1 = nn.Linear(DIM, 4 * DIM)
        self.f2 = nn.Linear(DIM, DIM)
        self.bias = Bias()

    def forward(self, x: Tensor, now: Tensor, times: Tensor) -> Tensor:
        """Returns (B, N, DIM)."""
        projected = F.silu(self.f1(self.norm_in(x)))
        u, v, q, k = projected.chunk(4, dim=-1)
        heads = (HEADS, DIM // HEADS)
        attended = attend(
            q.unflatten(-1, heads),
            k.unflatten(-1, heads),
            v.unflatten(-1, heads),
            self.bias(now, times),
        )
        gated = self.norm_out(attended.flatten(-2)) * u
        dropped = F.dropout(gated, DROPOUT, self.training)
        return x + self.f2(dropped)


class HSTU(nn.Module):
    """Predicts the movie after each movie of a sequence."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.places = nn.Parameter(torch.empty(LENGTH, DIM).normal_(std=0.02))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(
        self,
        ids: KeyedJaggedTensor,
        times: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Predicts the movie after each movie.

        Args:
            ids: Up to N + 1 movies of each user as ``item``, and the ids of n negatives
                as ``negative``.
            times: (B, N + 1) int64. The times of the ratings, padded at the end.

        Returns:
            Unit vectors: the predictions and the movies that came next, each (B, N,
            DIM), and the negatives, (n, DIM).
        """
        rows = self.table(ids)
        movies = rows["item"].to_padded_dense(times.shape[1])
        read_movies = movies[:, :-1]
        next_movies = movies[:, 1:]
        read_times = times[:, :-1]
        next_times = times[:, 1:]

        positions = self.places[: read_movies.shape[1]]
        x = read_movies * DIM**0.5 + positions
        x = F.dropout(x, DROPOUT, self.training)
        for layer in self.layers:
            x = layer(x, now=next_times, times=read_times)
        negatives = rows["negative"].values()
        return unit(x), unit(next_movies), unit(negatives)


def unit(vectors: Tensor) -> Tensor:
    """Returns the vectors scaled to the length 1."""
    return F.normalize(vectors, dim=-1, eps=1e-6)


def sampled_softmax(
    predicted: Tensor,
    targets: Tensor,
    negatives: Tensor,
    ids: KeyedJaggedTensor,
) -> Tensor:
    """Returns the mean cross-entropy of the next movie among it and the negatives.

    The mean is that of all places but padding.
    """
    item_ids = ids["item"].to_padded_dense(predicted.shape[1] + 1)
    target_ids = item_ids[:, 1:]
    target_counts = ids["item"].lengths() - 1
    places = torch.arange(target_ids.shape[1])
    is_real = places < target_counts[:, None]

    predicted = predicted[is_real]
    targets = targets[is_real]
    target_scores = (predicted * targets).sum(dim=-1, keepdim=True)
    # A negative that is the next movie is no wrong answer.
    real_target_ids = target_ids[is_real]
    is_target = real_target_ids[:, None] == ids["negative"].values()
    negative_scores = predicted @ negatives.T
    negative_scores = negative_scores.masked_fill(is_target, -torch.inf)

    logits = torch.cat([target_scores, negative_scores], dim=1) / TEMPERATURE
    # the next movie is the first class
    first_class = torch.zeros(len(logits), dtype=torch.int64)
    return F.cross_entropy(logits, first_class)


@torch.no_grad()
def hit_rate(model: HSTU, ratings: Ratings, test: Tensor) -> tuple[float, float]:
    """Returns HR@10 of the test ratings, and its standard error.

    Collective: each rank tests a part.

    The movie of a rating is ranked among all movies that the user had not rated before.
    The model reads all ratings of the user before it, also those after the end of the
    training.
    """
    movies = ratings.item.unique()
    no_negatives = torch.empty(TEST_BATCH, 0, dtype=torch.int64)
    all_movies = JaggedTensor(movies, lengths=torch.tensor([len(movies)]))
    rows = model.table(features(all_movies, no_negatives[:1]))
    vectors = unit(rows["item"].values())
    hits = torch.zeros((), dtype=torch.int64)
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    for part in test.split(TEST_BATCH * ranks):
        places = part[rank::ranks]
        users = torch.arange(len(places))
        begins = torch.maximum(ratings.begin[places], places - LENGTH)
        ids = ragged(ratings.item, begins, places + 1)
        times = ragged(ratings.time, begins, places + 1)
        predicted, _, _ = model(
            features(ids, no_negatives[: len(places)]),
            times.to_padded_dense(LENGTH + 1),
        )
        last_predicted = predicted[users, ids.lengths() - 2]
        scores = last_predicted @ vectors.T
        # a movie that the user has rated before is no answer
        rated = ragged(ratings.item, ratings.begin[places], places)
        rated_users = users.repeat_interleave(rated.lengths())
        rated_movies = torch.searchsorted(movies, rated.values())
        scores[rated_users, rated_movies] = -torch.inf
        best = movies[scores.topk(10).indices]
        next_movies = ratings.item[places, None]
        hits += (best == next_movies).sum()
    dist.all_reduce(hits)
    share = hits.item() / len(test)
    variance = share * (1 - share) / len(test)
    return share, variance**0.5


class StaticTable(nn.Module):
    """The table to compare with, with the same first rows.

    It numbers its rows, so it needs all ids beforehand.
    """

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids.unique())
        options = TableOptions(initializer=UniformInit(-INIT, INIT))
        table = Table(DIM, options=options, name="t_item")
        first_rows = table.lookup(self.ids, train=True)
        self.rows = nn.Embedding.from_pretrained(first_rows, freeze=False, sparse=True)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the rows of the ids, by key."""
        rows = {}
        for key in ("item", "negative"):
            feature = ids[key]
            numbers = torch.searchsorted(self.ids, feature.values())
            rows[key] = JaggedTensor(self.rows(numbers), lengths=feature.lengths())
        return rows


def build(
    ratings: Ratings,
    static: bool,
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Returns the sharded model, and the optimizers of what is not in RecStore."""
    config = EmbeddingConfig(
        name="t_item",
        embedding_dim=DIM,
        num_embeddings=2**40,
        feature_names=["item", "negative"],
        weight_init_min=-INIT,
        weight_init_max=INIT,
    )
    table = EmbeddingCollection([config], device=torch.device("meta"))
    if static:
        table = StaticTable(ratings.item)
    sharder = RecStoreEmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.ADAM, "learning_rate": LR}
    )
    model = DistributedModelParallel(
        HSTU(table),
        sharders=[sharder],
        device=torch.device("cpu"),
    )
    # RecStore's rows are updated in backward
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    static_rows = [dense.pop(name) for name in list(dense) if "table.rows" in name]
    optimizers = [torch.optim.Adam(dense.values(), lr=LR)]
    if static:
        optimizers.append(torch.optim.SparseAdam(static_rows, lr=LR))
    return model, optimizers


def train_epoch(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    ratings: Ratings,
    movies: Tensor,
    begins: Tensor,
    ends: Tensor,
) -> list[float]:
    """Trains with this rank's part of each batch of windows, and returns the losses.

    ``movies`` are the ids from which the negatives are drawn.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    even_windows = len(begins) // ranks * ranks
    losses = []
    for batch in torch.arange(even_windows).split(BATCH):
        part = batch[rank::ranks]
        items = ragged(ratings.item, begins[part], ends[part])
        times = ragged(ratings.time, begins[part], ends[part])
        numbers = torch.randint(len(movies), (len(part), NEGATIVES))
        ids = features(items, movies[numbers])
        predicted, targets, negatives = model(ids, times.to_padded_dense(LENGTH + 1))
        loss = sampled_softmax(predicted, targets, negatives, ids)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def main(data: Path, epochs: int, seed: int, static: bool) -> None:
    """Trains, and prints HR@10 of the test ratings."""
    tune_threads()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    ratings = read(data)
    in_train = ratings.order < int(0.9 * len(ratings.order))
    has_history = torch.arange(len(in_train)) > ratings.begin
    test = torch.nonzero(~in_train & has_history).flatten()
    movies = ratings.item[in_train].unique()
    begins, ends = windows(ratings, in_train)

    torch.manual_seed(seed)
    model, optimizers = build(ratings, static)

    begin = time.perf_counter()
    for epoch in range(epochs):
        model.train()
        random = torch.Generator().manual_seed(seed * epochs + epoch)
        order = torch.randperm(len(begins), generator=random)
        losses = train_epoch(
            model,
            optimizers,
            ratings,
            movies,
            begins[order],
            ends[order],
        )
        if rank == 0:
            mean_loss = sum(losses) / len(losses)
            print(f"epoch {epoch + 1}: training loss {mean_loss:.4f}", flush=True)
    seconds = time.perf_counter() - begin
    predictions = epochs * (ends - begins - 1).sum().item()
    rate = predictions / seconds
    model.eval()
    share, error = hit_rate(model.module, ratings, test)
    num_rows = len(movies)
    if not static:
        num_rows = table_stats(model)["t_item"].rows
    if rank == 0:
        print(f"{rate:,.0f} predictions/s in training, {num_rows:,} rows")
        print(
            f"HR@10 of {len(test):,} later ratings: {share:.4f} +- {error:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with ml-100k.inter",
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
