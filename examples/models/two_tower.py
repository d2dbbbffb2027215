"""A two-tower retrieval model on MovieLens-100k, with raw ids and hashed words.

    python examples/models/two_tower.py --data ml-100k
    python examples/models/two_tower.py --data ml-100k --fused 10000    # TorchRec's tables, ids modulo 10,000
    torchrun --nproc-per-node 2 examples/models/two_tower.py --data ml-100k
    python examples/models/two_tower.py --data ml-100k --live 16    # publishes, and finds movies with FAISS

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

DIM, HIDDEN, TEMPERATURE = 32, 64, 0.1
# pairs over all ranks; row-wise Adagrad for tables, Adam for layers
BATCH, LR, DENSE_LR = 512, 0.05, 0.001


class Features(NamedTuple):
    """The features of all users or of all movies.

    Each feature of each user is a list of ids.
    """

    names: list[str]
    ids: Tensor  # the ids of all lists, int64
    begins: Tensor  # (features, users): where each list begins
    lengths: Tensor  # (features, users)

    def pick(self, rows: Tensor) -> KeyedJaggedTensor:
        """Returns the features of some users or movies."""
        lengths = self.lengths[:, rows].flatten()
        shifts = self.begins[:, rows].flatten() - (lengths.cumsum(0) - lengths)
        ids = self.ids[
            torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
        ]
        return KeyedJaggedTensor(self.names, ids, lengths=lengths)


def word_id(word: str) -> int:
    """Returns a number itself, and for another word a hash of 64 bits that is the same
    on every machine.
    """
    return (
        int(word)
        if word.lstrip("-").isdecimal()
        else xxhash.xxh3_64_intdigest(word.encode()) - 2**63
    )


def read(folder: Path, kind: str) -> pl.DataFrame:
    """Reads one of the files as strings."""
    paths = list(folder.glob(f"ml-100k.{kind}*")) or sys.exit(
        f"error: {folder} has no ml-100k.{kind}"
    )
    rows = pl.read_csv(paths[0], separator="\t", infer_schema=False)
    return rows.rename({name: name.split(":")[0] for name in rows.columns})


def features(rows: pl.DataFrame, modulo: int | None) -> Features:
    """Turns all columns into features."""
    lists = [
        [word_id(word) for word in (text or "").split()]
        for name in rows.columns
        for text in rows[name]
    ]
    lengths = torch.tensor([len(ids) for ids in lists])
    ids = torch.tensor([each for ids in lists for each in ids])
    shape = len(rows.columns), len(rows)
    begins = (lengths.cumsum(0) - lengths).view(shape)
    return Features(
        rows.columns,
        ids if modulo is None else ids % modulo,
        begins,
        lengths.view(shape),
    )


class Tower(nn.Module):
    """Two dense layers on the pooled rows of all features."""

    def __init__(self, names: list[str], num_embeddings: int) -> None:
        super().__init__()
        self.names, init = (
            names,
            {
                "weight_init_min": -(DIM**-0.5),
                "weight_init_max": DIM**-0.5,
            },
        )
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=DIM,
                num_embeddings=num_embeddings,
                feature_names=[name],
                **init,
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
        return nn.functional.normalize(
            self.layers(torch.cat([rows[name] for name in self.names], dim=1))
        )


class TwoTower(nn.Module):
    """A tower for users and a tower for movies."""

    def __init__(self, users: Features, movies: Features, num_embeddings: int) -> None:
        super().__init__()
        self.user, self.movie = (
            Tower(users.names, num_embeddings),
            Tower(movies.names, num_embeddings),
        )

    def forward(
        self, users: KeyedJaggedTensor, movies: KeyedJaggedTensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the vectors of users and of movies, each (B, DIM)."""
        return self.user(users), self.movie(movies)


def in_batch_softmax(
    users: Tensor, movies: Tensor, places: Tensor, log_shares: Tensor
) -> Tensor:
    """Returns the mean cross-entropy of each user's movie among all movies of the
    batch.

    Args:
        users: (B, DIM). The vectors of the users.
        movies: (B, DIM). The vector of the movie of each user.
        places: (B,) int64. The number of each movie. The same movie of another user is
            no wrong answer.
        log_shares: (B,). The logarithm of the share of each movie in all ratings.
            Popular movies are wrong answers more often, which this corrects.
    """
    scores = users @ movies.T / TEMPERATURE - log_shares
    again = (places[:, None] == places) & ~torch.eye(len(users), dtype=torch.bool)
    return nn.functional.cross_entropy(
        scores.masked_fill(again, -torch.inf), torch.arange(len(users))
    )


@torch.no_grad()
def recall(
    model: TwoTower, users: Features, movies: Features, train: Tensor, test: Tensor
) -> float:
    """Returns recall@10. Every rank ranks the movies for all users."""
    scores = (
        model.user(users.pick(test[:, 0]))
        @ model.movie(movies.pick(torch.arange(movies.lengths.shape[1]))).T
    )
    seen = torch.zeros(users.lengths.shape[1], scores.shape[1], dtype=torch.bool)
    seen[train[:, 0], train[:, 1]] = True
    best = scores.masked_fill(seen[test[:, 0]], -torch.inf).topk(10).indices
    return (best == test[:, 1:]).any(dim=1).float().mean().item()


class Live:
    """A publisher of the model, and a follower that finds movies for ``users`` with its
    newest rows.
    """

    def __init__(
        self,
        model: nn.Module,
        place: str,
        users: KeyedJaggedTensor,
        movies: Features,
        clusters: int,
    ) -> None:
        self.users, self.movies = users, movies
        self.movie_ids, self.order = movies.ids[
            movies.begins[movies.names.index("item_id")]
        ].sort()
        self.publisher = DeltaPublisher(model, place, every_s=0)
        # The vector of a movie depends on its year and kinds, too. So the tower is a
        # function of the movie's id.
        self.index = Retrieval("t_item_id", tower=self.vectors, clusters=clusters)
        self.follower = Follower(place, retrieval=self.index)
        self.last = torch.empty(users.stride(), 0, dtype=torch.int64)

    def vectors(self, served: torch.jit.ScriptModule, ids: Tensor) -> Tensor:
        """Returns the vectors of movies with these ids, (N, DIM)."""
        return served.movie(
            self.movies.pick(self.order[torch.searchsorted(self.movie_ids, ids)])
        )

    @torch.no_grad()
    def show(self) -> None:
        """Publishes the model, waits for the follower, and prints what has changed."""
        self.publisher.step()
        while not self.follower.poll():
            time.sleep(0.01)
        with self.index.hold() as served:  # Both towers are of one publication.
            queries, ids = served.user(self.users), served.recstore_ids("t_item_id")
            found = self.index.search(queries, min(100, len(ids)))[1]
            exact = ids[
                (queries @ self.vectors(served, ids).T).topk(found.shape[1]).indices
            ]
        share = (found[:, :, None] == exact[:, None]).any(dim=1).float().mean()
        new = (
            10
            - (found[:, :10, None] == self.last[:, None])
            .any(dim=2)
            .float()
            .sum(dim=1)
            .mean()
        )
        read = f"{self.index.probes} of {self.index.clusters} clusters read"
        number = self.follower.state.number
        print(
            f"publication {number}: {new:.1f} of 10 movies are new, recall@100 of the"
            f" index {share:.4f}, {read}"
        )
        self.last = found[:, :10]


def main(
    data: Path, epochs: int, seed: int, fused: int | None, live: int | None
) -> None:
    """Trains, and prints recall@10."""
    tune_threads()
    alone = (
        {}
        if dist.is_torchelastic_launched()
        else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group("gloo", **alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    user_rows, movie_rows = read(data, "user"), read(data, "item").drop("movie_title")
    users, movies = features(user_rows, fused), features(movie_rows, fused)
    ratings = (
        read(data, "inter")
        .with_columns(pl.col("timestamp").cast(pl.Float64))
        .sort("timestamp", maintain_order=True)
    )
    ratings = ratings.join(
        user_rows.with_row_index("user"), on="user_id", maintain_order="left"
    )
    ratings = ratings.join(
        movie_rows.with_row_index("movie"), on="item_id", maintain_order="left"
    )
    is_last = (
        ratings.select(pl.int_range(pl.len()).reverse().over("user") == 0)
        .to_series()
        .to_torch()
    )
    pairs = ratings.select("user", "movie").to_torch().long()
    train, test = pairs[~is_last], pairs[is_last]
    log_shares = (train[:, 1].bincount(minlength=len(movie_rows)) / len(train)).log()

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
    place = tempfile.TemporaryDirectory()
    shown = (
        Live(model, place.name, users.pick(test[:, 0]), movies, live) if live else None
    )

    began = time.perf_counter()
    for epoch in range(epochs):
        losses = []
        order = torch.randperm(
            len(train), generator=torch.Generator().manual_seed(seed * epochs + epoch)
        )
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            user, movie = train[batch[rank::ranks]].T
            loss = in_batch_softmax(
                *model(users.pick(user), movies.pick(movie)), movie, log_shares[movie]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if rank == 0:
            print(
                f"epoch {epoch + 1}: training loss {sum(losses) / len(losses):.4f}",
                flush=True,
            )
        if shown is not None:
            shown.show()
    seconds = time.perf_counter() - began
    model.eval()
    recalled = recall(model.module, users, movies, train, test)
    rows = (
        fused * 8 if fused else sum(stats.rows for stats in table_stats(model).values())
    )
    if shown is not None:
        shown.publisher.close()
        shown.follower.close()
    place.cleanup()
    if rank == 0:
        print(
            f"{epochs * len(train) / seconds:,.0f} samples/s in training, {rows:,} rows"
        )
        print(f"recall@10 of {len(test):,} users: {recalled:.4f}", flush=True)


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
    given = flags.parse_args()
    if given.live and (given.fused or dist.is_torchelastic_launched()):
        flags.error("--live is for RecStore's tables and for one process")
    main(**vars(given))
    os._exit(0)  # gloo's threads abort in some normal exits (torch 2.13)
