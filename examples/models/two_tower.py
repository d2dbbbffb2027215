"""A two-tower retrieval model on MovieLens-100k, with raw ids and hashed words.

    python examples/models/two_tower.py --data ml-100k
    # TorchRec's tables, ids modulo 10,000
    python examples/models/two_tower.py --data ml-100k --fused 10000
    torchrun --nproc-per-node 2 examples/models/two_tower.py --data ml-100k
    # publishes, and finds movies with FAISS
    python examples/models/two_tower.py --data ml-100k --live 16

The folder contains ml-100k.inter, ml-100k.user and ml-100k.item of RecBole, plain or
.gz. One tower turns the features of a user into a vector, the other one those of a
movie. The inner product ranks movies for the user. The last rating of each user is for
the test: recall@10 is the share of users whose last movie is among the ten best of all
movies that the user was not trained on. It ends with about 0.14.

With --live, the model is published after each epoch. A follower, which could be another
process, keeps an index of the movies' vectors up to date, with the given number of
clusters. It finds the movies for each user of the test, and prints how many of the ten
best have changed since the last epoch, and recall@100 against a search in all vectors.

Source of the loss: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus
Item Recommendations, 2019.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import polars as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.mlp import MLP
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore import RecStoreSharder, table_stats, tune_threads
from torchrec_recstore.inference import DeltaPublisher, Follower, Retrieval

DIM = 32
HIDDEN = 64
TEMPERATURE = 0.1
BATCH = 512  # pairs of a batch, over all ranks
LR = 0.05  # of the tables: row-wise Adagrad
DENSE_LR = 0.001  # of the layers: Adam


class Features(NamedTuple):
    """The features of all users or of all movies.

    Each feature of each user is a list of ids.
    """

    names: list[str]
    ids: Tensor  # the ids of all lists, int64
    begins: Tensor  # (features, users): where each list begins
    lengths: Tensor  # (features, users)

    def pick(self, rows: Tensor) -> KeyedJaggedTensor:
        """Returns the features of the users or movies ``rows``."""
        lengths = self.lengths[:, rows].flatten()
        begins = self.begins[:, rows].flatten()
        result_begins = lengths.cumsum(0) - lengths
        # the distance of each list in the ids from its place in the result
        shifts = begins - result_begins
        result_places = torch.arange(int(lengths.sum()))
        places = result_places + shifts.repeat_interleave(lengths)
        return KeyedJaggedTensor(self.names, self.ids[places], lengths=lengths)


def word_id(word: str) -> int:
    """Returns the 64-bit id of a word, which is the same on every machine.

    The id of a number is the number.
    """
    if word.lstrip("-").isdecimal():
        return int(word)
    return xxhash.xxh3_64_intdigest(word.encode()) - 2**63


def read(folder: Path, kind: str) -> pl.DataFrame:
    """Reads one of the files as strings."""
    paths = list(folder.glob(f"ml-100k.{kind}*"))
    if not paths:
        sys.exit(f"error: {folder} has no ml-100k.{kind}")
    rows = pl.read_csv(
        paths[0],
        separator="\t",
        infer_schema=False,
    )
    return rows.rename({name: name.split(":")[0] for name in rows.columns})


def features(rows: pl.DataFrame, modulo: int | None) -> Features:
    """Turns all columns into features."""
    ids = []
    lengths = []
    for name in rows.columns:
        for text in rows[name]:
            words = (text or "").split()
            ids += [word_id(word) for word in words]
            lengths.append(len(words))
    ids = torch.tensor(ids)
    if modulo is not None:
        ids %= modulo
    lengths = torch.tensor(lengths)
    begins = lengths.cumsum(0) - lengths
    shape = len(rows.columns), len(rows)
    return Features(
        names=rows.columns,
        ids=ids,
        begins=begins.view(shape),
        lengths=lengths.view(shape),
    )


class Tower(nn.Module):
    """Two dense layers on the pooled rows of all features."""

    def __init__(self, names: list[str], num_embeddings: int) -> None:
        super().__init__()
        self.names = names
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=DIM,
                num_embeddings=num_embeddings,
                feature_names=[name],
                weight_init_min=-(DIM**-0.5),
                weight_init_max=DIM**-0.5,
            )
            for name in names
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.layers = nn.Sequential(
            MLP(DIM * len(tables), [HIDDEN]), nn.Linear(HIDDEN, DIM)
        )

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Returns a unit vector for each sample, (B, DIM)."""
        # by key, because a sharded collection has another order
        rows = self.tables(ids).to_dict()
        x = torch.cat([rows[name] for name in self.names], dim=1)
        return F.normalize(self.layers(x))


class TwoTower(nn.Module):
    """A tower for users and a tower for movies."""

    def __init__(
        self,
        users: Features,
        movies: Features,
        num_embeddings: int,
    ) -> None:
        super().__init__()
        self.user = Tower(users.names, num_embeddings)
        self.movie = Tower(movies.names, num_embeddings)

    def forward(
        self,
        users: KeyedJaggedTensor,
        movies: KeyedJaggedTensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns the vectors of users and of movies, each (B, DIM)."""
        return self.user(users), self.movie(movies)


def in_batch_softmax(
    users: Tensor,
    movies: Tensor,
    places: Tensor,
    log_shares: Tensor,
) -> Tensor:
    """Returns the mean cross-entropy of each user's movie among those of the batch.

    Args:
        users: (B, DIM). The vectors of the users.
        movies: (B, DIM). The vector of the movie of each user.
        places: (B,) int64. The number of each movie. The same movie of another user is
            no wrong answer.
        log_shares: (B,). The logarithm of the share of each movie in all ratings.
            Popular movies are wrong answers more often, which this corrects.
    """
    scores = users @ movies.T / TEMPERATURE - log_shares
    is_same_movie = places[:, None] == places
    is_same_user = torch.eye(len(users), dtype=torch.bool)
    scores = scores.masked_fill(is_same_movie & ~is_same_user, -torch.inf)
    return F.cross_entropy(scores, torch.arange(len(users)))


@torch.no_grad()
def recall(
    model: TwoTower,
    users: Features,
    movies: Features,
    train: Tensor,
    test: Tensor,
) -> float:
    """Returns recall@10. Every rank ranks the movies for all users."""
    num_users = users.lengths.shape[1]
    num_movies = movies.lengths.shape[1]
    all_movies = torch.arange(num_movies)
    test_users = test[:, 0]
    test_movies = test[:, 1:]
    user_vectors = model.user(users.pick(test_users))
    movie_vectors = model.movie(movies.pick(all_movies))
    scores = user_vectors @ movie_vectors.T

    train_users, train_movies = train.T
    is_trained = torch.zeros(num_users, num_movies, dtype=torch.bool)
    is_trained[train_users, train_movies] = True
    scores = scores.masked_fill(is_trained[test_users], -torch.inf)
    best = scores.topk(10).indices
    is_hit = (best == test_movies).any(dim=1)
    return is_hit.float().mean().item()


def _is_among(ids: Tensor, other_ids: Tensor) -> Tensor:
    """Tells which of the ids, (N, k), are among the other ids, (N, m), of their row."""
    return (ids[:, :, None] == other_ids[:, None]).any(dim=2)


class Live:
    """A publisher of the model, and a follower that finds movies for ``users``.

    The follower has the newest rows that were published.
    """

    def __init__(
        self,
        model: nn.Module,
        place: str,
        users: KeyedJaggedTensor,
        movies: Features,
        clusters: int,
    ) -> None:
        self.users = users
        self.movies = movies
        begins = movies.begins[movies.names.index("item_id")]
        self.movie_ids, self.order = movies.ids[begins].sort()
        self.publisher = DeltaPublisher(model, place, every_s=0)
        # The vector of a movie depends on its year and kinds, too. So the tower is a
        # function of the movie's id.
        self.index = Retrieval(
            "t_item_id",
            tower=self.vectors,
            clusters=clusters,
        )
        self.follower = Follower(place, retrieval=self.index)
        self.last_best = torch.empty(users.stride(), 0, dtype=torch.int64)

    def vectors(self, served: torch.jit.ScriptModule, ids: Tensor) -> Tensor:
        """Returns the vectors of movies with these ids, (N, DIM)."""
        movies = self.order[torch.searchsorted(self.movie_ids, ids)]
        return served.movie(self.movies.pick(movies))

    @torch.no_grad()
    def show(self) -> None:
        """Publishes the model, waits for the follower, and prints what has changed."""
        self.publisher.step()
        while not self.follower.poll():
            time.sleep(0.01)
        with self.index.hold() as served:  # Both towers are of one publication.
            queries = served.user(self.users)
            ids = served.recstore_ids("t_item_id")
            count = min(100, len(ids))
            _, approximate = self.index.search(queries, count)
            scores = queries @ self.vectors(served, ids).T
            exact = ids[scores.topk(count).indices]
        recall_100 = _is_among(exact, approximate).float().mean()
        best = approximate[:, :10]
        is_old = _is_among(best, self.last_best)
        new = 10 - is_old.float().sum(dim=1).mean()
        self.last_best = best
        print(
            f"publication {self.follower.state.number}: {new:.1f} of 10 movies are new,"
            f" recall@100 of the index {recall_100:.4f},"
            f" {self.index.probes} of {self.index.clusters} clusters read"
        )


class Data(NamedTuple):
    """The data of a training.

    Attributes:
        users: The features of all users.
        movies: The features of all movies.
        train: (pairs, 2) int64. User and movie of each rating of the training.
        test: (users, 2) int64. User and movie of the last rating of each user.
    """

    users: Features
    movies: Features
    train: Tensor
    test: Tensor


def read_data(folder: Path, modulo: int | None) -> Data:
    """Reads all files. ``modulo`` is what ids are taken modulo of; None: raw ids."""
    users = read(folder, "user")
    movies = read(folder, "item").drop("movie_title")
    ratings = read(folder, "inter")
    ratings = ratings.with_columns(pl.col("timestamp").cast(pl.Float64))
    ratings = ratings.sort("timestamp", maintain_order=True)
    ratings = ratings.join(
        users.with_row_index("user"),
        on="user_id",
        maintain_order="left",
    )
    ratings = ratings.join(
        movies.with_row_index("movie"),
        on="item_id",
        maintain_order="left",
    )
    place_from_end = pl.int_range(pl.len()).reverse().over("user")
    is_last = ratings.select(place_from_end == 0).to_series().to_torch()
    pairs = ratings.select("user", "movie").to_torch().long()
    return Data(
        users=features(users, modulo),
        movies=features(movies, modulo),
        train=pairs[~is_last],
        test=pairs[is_last],
    )


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    users: Features,
    movies: Features,
    log_shares: Tensor,
    train: Tensor,
) -> list[float]:
    """Trains on the pairs of a user and a movie in their order.

    Returns:
        The loss of each step.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    whole_batches = len(train) // BATCH * BATCH
    losses = []
    for batch in train[:whole_batches].split(BATCH):
        user, movie = batch[rank::ranks].T
        user_vectors, movie_vectors = model(users.pick(user), movies.pick(movie))
        shares = log_shares[movie]
        loss = in_batch_softmax(user_vectors, movie_vectors, movie, shares)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(
    data: Path,
    epochs: int,
    seed: int,
    fused: int | None,
    live: int | None,
) -> None:
    """Trains, and prints recall@10."""
    tune_threads()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    torch.manual_seed(seed)
    users, movies, train, test = read_data(data, modulo=fused)
    counts = train[:, 1].bincount(minlength=movies.lengths.shape[1])
    log_shares = (counts / len(train)).log()

    sharder = EmbeddingBagCollectionSharder if fused else RecStoreSharder
    # updates rows in backward
    fused_params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": LR,
    }
    towers = TwoTower(users, movies, fused or 2**40)
    model = DistributedModelParallel(
        towers,
        sharders=[sharder(fused_params=fused_params)],
        device=torch.device("cpu"),
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=DENSE_LR)
    folder = tempfile.TemporaryDirectory()
    served = None
    if live:
        test_users = users.pick(test[:, 0])
        served = Live(model, folder.name, test_users, movies, clusters=live)

    begin = time.perf_counter()
    for epoch in range(epochs):
        random = torch.Generator().manual_seed(seed * epochs + epoch)
        order = torch.randperm(len(train), generator=random)
        losses = train_epoch(
            model,
            optimizer,
            users,
            movies,
            log_shares,
            train[order],
        )
        if rank == 0:
            mean_loss = sum(losses) / len(losses)
            print(f"epoch {epoch + 1}: training loss {mean_loss:.4f}", flush=True)
        if served is not None:
            served.show()
    rate = epochs * len(train) / (time.perf_counter() - begin)
    model.eval()
    recall_10 = recall(model.module, users, movies, train, test)
    if fused:
        num_rows = fused * (len(users.names) + len(movies.names))
    else:
        num_rows = sum(stats.rows for stats in table_stats(model).values())
    if served is not None:
        served.publisher.close()
        served.follower.close()
    folder.cleanup()
    if rank == 0:
        print(f"{rate:,.0f} samples/s in training, {num_rows:,} rows")
        print(f"recall@10 of {len(test):,} users: {recall_10:.4f}", flush=True)


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
    flags.add_argument("--epochs", type=int, default=10)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--fused",
        type=int,
        metavar="ROWS",
        help="TorchRec's tables, with ids modulo their rows",
    )
    flags.add_argument(
        "--live",
        type=int,
        metavar="CLUSTERS",
        help="publish, and find movies with FAISS; one process",
    )
    arguments = flags.parse_args()
    if arguments.live and (arguments.fused or dist.is_torchelastic_launched()):
        flags.error("--live is for RecStore's tables and for one process")
    main(**vars(arguments))
    os._exit(0)  # gloo's threads abort in some normal exits (torch 2.13)
