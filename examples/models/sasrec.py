"""SASRec, self-attention over the items of a user, on Amazon "Games", with raw ids in
an EmbeddingCollection.

    python examples/models/sasrec.py --data Video.txt               # RecStore table
    python examples/models/sasrec.py --data Video.txt --static      # the same model on torch.nn.Embedding
    torchrun --nproc-per-node 2 examples/models/sasrec.py --data Video.txt

The file is data/Video.txt of github.com/kang205/SASRec: a user and an item in each
line, in the order of time. The names of the items are hashed to 64-bit ids. The last
item of each user is for the test, the item before it for validation. Both are ranked
among 100 random items that the user does not have. Hit@10 is about 0.735 at the end.

RecStore's Adam moves the rows of a batch only. In the authors' code, and with --static,
Adam also moves all other rows by their momentum, so that rows move further for each
batch with them. The larger ROW_LR of RecStore makes up for this.

Source: Kang and McAuley, Self-Attentive Sequential Recommendation, arXiv 1808.09781,
and the authors' code.
"""

import argparse
import os
import time
from pathlib import Path

import polars as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
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
    table_stats,
    tune_threads,
)

# the features, all of one table, so that a step updates each row once
KEYS = ["history", "positive", "negative"]
# LENGTH: the number of items that the model reads
LENGTH, DIM, BLOCKS, DROPOUT = 50, 50, 2, 0.5
# new rows are uniform in +-INIT, as in the authors' code: Glorot's bound for 23,716
# rows
INIT = 0.0159
# users of a batch, over all ranks; users whose attention is computed together
BATCH, GROUP = 256, 32
# Adam, with LR of the authors for each 128 users
LR, ROW_LR, BETAS = 2e-3, 8e-3, (0.9, 0.98)
# epochs between validations; epochs without a better validation until the training ends
EVERY, PATIENCE = 10, 20


class Interactions:
    """The interactions of one user after another, and those of each user in the order
    of time.

    All are int64.
    """

    def __init__(self, path: Path) -> None:
        table = pl.read_csv(
            path,
            separator=" ",
            has_header=False,
            new_columns=["user", "item"],
            infer_schema=False,
        )
        ids = {
            name: xxhash.xxh3_64_intdigest(name.encode()) - 2**63
            for name in table["item"].unique()
        }
        numbers = pl.col("user").rank("dense").cast(pl.Int64) - 1
        table = table.with_columns(numbers, pl.col("item").replace_strict(ids)).sort(
            "user", maintain_order=True
        )
        self.user, self.item = table["user"].to_torch(), table["item"].to_torch()
        # the place of the user's first interaction
        self.first = torch.searchsorted(self.user, self.user)
        # the ids of all items
        self.items, number = self.item.unique(return_inverse=True)
        self.owned = self.user * len(self.items) + number

    def random_items(self, users: Tensor, owned: Tensor) -> Tensor:
        """Returns a random item for each of ``users``, which the user does not have in
        ``owned``.
        """
        drawn = torch.randint(len(self.items), users.shape)
        while (again := torch.isin(users * len(self.items) + drawn, owned)).any():
            drawn[again] = torch.randint(len(self.items), (int(again.sum()),))
        return self.items[drawn]

    def history(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of up to ``LENGTH`` interactions before each of ``ends``,
        and their numbers, (users,).
        """
        lengths = (ends - self.first[ends]).clamp(max=LENGTH)
        return (
            torch.arange(int(lengths.sum()))
            + (ends - lengths.cumsum(0)).repeat_interleave(lengths),
            lengths,
        )


def attend(qkv: Tensor, lengths: Tensor, dropout: float) -> Tensor:
    """Returns causal attention, (total, DIM), of users with queries, keys and values
    side by side, (total, 3 * DIM).
    """
    padded = JaggedTensor(qkv, lengths=lengths).to_padded_dense(
        longest := int(lengths.max())
    )
    # No place sees a later one, so none sees padding.
    q, k, v = padded[:, None].chunk(3, dim=-1)
    attended = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True
    )
    return attended[:, 0][torch.arange(longest) < lengths[:, None]]


class Block(nn.Module):
    """Attention, then two dense layers.

    Their normalized input is added to the output of each, as in the code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_layers = (
            nn.LayerNorm(DIM, eps=1e-8),
            nn.LayerNorm(DIM, eps=1e-8),
        )
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        drop = nn.Dropout(DROPOUT)
        self.layers = nn.Sequential(
            nn.Linear(DIM, DIM), nn.ReLU(), drop, nn.Linear(DIM, DIM), drop
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Returns (total, DIM) for the items of one user after another, (total, DIM)."""
        normal, groups = self.norm_attention(x), lengths.split(GROUP)
        qkv = torch.cat([self.query(normal), self.key(x), self.value(x)], dim=1)
        parts = zip(
            qkv.split([int(group.sum()) for group in groups]), groups, strict=True
        )
        x = self.norm_layers(
            normal
            + torch.cat([attend(*part, DROPOUT * self.training) for part in parts])
        )
        return x + self.layers(x)


class SASRec(nn.Module):
    """Predicts the item after each item of a history."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.positions = table, nn.Parameter(torch.empty(LENGTH, DIM))
        self.blocks, self.norm = (
            nn.ModuleList(Block() for _ in range(BLOCKS)),
            nn.LayerNorm(DIM, eps=1e-8),
        )
        for matrix in (
            each
            for each in (self.positions, *self.blocks.parameters())
            if each.ndim == 2
        ):
            nn.init.xavier_uniform_(matrix)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the predictions after each item of the histories, and the rows of
        positives and of negatives.
        """
        rows, lengths = self.table(ids), ids["history"].lengths()
        ends = lengths.cumsum(0).repeat_interleave(lengths)
        # The last item has the last position.
        positions = self.positions[LENGTH - ends + torch.arange(len(ends))]
        x = F.dropout(
            rows["history"].values() * DIM**0.5 + positions, DROPOUT, self.training
        )
        for block in self.blocks:
            x = block(x, lengths)
        return self.norm(x), rows["positive"].values(), rows["negative"].values()


@torch.no_grad()
def rank_metrics(
    model: nn.Module, data: Interactions, ends: Tensor, items: Tensor
) -> list[float]:
    """Returns NDCG@10 and Hit@10 of the first of ``items``, (users, 101), after the
    histories.

    Collective.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for part in torch.arange(len(ends)).tensor_split(len(ends) // 512 + 1):
        users = part[dist.get_rank() :: dist.get_world_size()]
        (place, lengths), one = data.history(ends[users]), torch.ones_like(users)
        ids = torch.cat([data.item[place], items[users].flatten()])
        x, rows, _ = model(
            KeyedJaggedTensor(
                KEYS, ids, lengths=torch.cat([lengths, 101 * one, 0 * one])
            )
        )
        scores = torch.einsum(
            "bd,bnd->bn", x[lengths.cumsum(0) - 1], rows.view(-1, 101, DIM)
        )
        # An equal score is a wrong answer.
        rank = (~(scores[:, 1:] < scores[:, :1])).sum(1)
        sums += torch.stack([(rank < 10) / (rank + 2).log2(), rank < 10]).sum(1)
    dist.all_reduce(sums)
    return (sums / len(ends)).tolist()


def main(data: Path, epochs: int, seed: int, static: bool) -> None:
    """Trains, and prints NDCG@10 and Hit@10 of the test at the epoch with the best
    validation.
    """
    tune_threads()
    alone = (
        {}
        if dist.is_torchelastic_launched()
        else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group("gloo", **alone)
    rank, ranks, seen = dist.get_rank(), dist.get_world_size(), Interactions(data)
    # nn.Embedding needs numbers in the place of raw ids, and so all items beforehand.
    if static:
        seen.item, seen.items = (
            torch.searchsorted(seen.items, seen.item),
            torch.arange(len(seen.items)),
        )
    torch.manual_seed(seed)
    counts = seen.user.bincount()
    last = counts.cumsum(0) - 1  # the place of the user's last interaction
    # sorted by length, so that there is little padding
    tested = counts.argsort(stable=True)[int((counts < 3).sum()) :]
    ends = [last[tested] - 1, last[tested]]  # of validation and test
    others = [
        seen.random_items(tested[:, None].expand(-1, 100), seen.owned) for _ in ends
    ]
    items = [
        torch.cat([seen.item[end, None], other], dim=1)
        for end, other in zip(ends, others, strict=True)
    ]
    trained = seen.owned[~torch.isin(torch.arange(len(seen.owned)), torch.cat(ends))]
    last[tested] -= 2  # the place of the last interaction of the training
    last = last[last > seen.first[last]]
    options = {
        "name": "t_item",
        "embedding_dim": DIM,
        "weight_init_min": -INIT,
        "weight_init_max": INIT,
    }
    config = EmbeddingConfig(
        **options,
        num_embeddings=len(seen.items) if static else 2**40,
        feature_names=KEYS,
    )
    table = EmbeddingCollection(
        [config], device=torch.device("cpu" if static else "meta")
    )
    adam = {
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": ROW_LR,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
    }
    sharders = [] if static else [RecStoreEmbeddingCollectionSharder(fused_params=adam)]
    model = DistributedModelParallel(
        SASRec(table), sharders=sharders, device=torch.device("cpu")
    )
    # RecStore's rows are updated in backward
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=LR, betas=BETAS, fused=True)

    steps, seconds, best, best_epoch = (
        torch.Generator().manual_seed(seed),
        0.0,
        [0.0],
        0,
    )
    for epoch in range(1, epochs + 1):
        model.train()
        began, losses, negative = (
            time.perf_counter(),
            [],
            seen.random_items(seen.user, trained),
        )
        for batch in last[
            torch.randperm(len(last), generator=steps)[: len(last) // ranks * ranks]
        ].split(BATCH):
            place, lengths = seen.history(
                batch[(batch - seen.first[batch]).argsort()][rank::ranks]
            )
            ids = torch.cat([seen.item[place], seen.item[place + 1], negative[place]])
            x, right, wrong = model(
                KeyedJaggedTensor(KEYS, ids, lengths=lengths.repeat(3))
            )
            loss = (
                F.softplus(-(x * right).sum(1)) + F.softplus((x * wrong).sum(1))
            ).mean()
            model.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds += time.perf_counter() - began
        if epoch % EVERY and epoch < epochs:
            continue
        model.eval()
        valid = rank_metrics(model, seen, ends[0], items[0])
        if valid > best:
            best, best_epoch, (gain, hits) = (
                valid,
                epoch,
                rank_metrics(model, seen, ends[1], items[1]),
            )
        if rank == 0:
            shown = "NDCG@10 {:.4f}, Hit@10 {:.4f}".format(*valid)
            print(
                f"epoch {epoch}: training loss {sum(losses) / len(losses):.4f},"
                f" validation {shown}",
                flush=True,
            )
        if epoch - best_epoch >= PATIENCE:
            break
    held = len(seen.items) if static else table_stats(model)["t_item"].rows
    if rank == 0:
        speed, error = (
            epoch * len(seen.history(last)[0]) / seconds,
            (hits * (1 - hits) / len(tested)) ** 0.5,
        )
        print(
            f"{speed:,.0f} predictions/s in training, {held:,} rows; test at epoch"
            f" {best_epoch}:"
        )
        print(
            f"NDCG@10 {gain:.4f}, Hit@10 of {len(tested):,} users: {hits:.4f} +-"
            f" {error:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--data", type=Path, required=True, help="Video.txt, the file of interactions"
    )
    flags.add_argument(
        "--epochs", type=int, default=100, help="the largest number of epochs"
    )
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--static",
        action="store_true",
        help="torch.nn.Embedding instead of a RecStore table",
    )
    main(**vars(flags.parse_args()))
    os._exit(0)  # gloo's threads abort in some normal exits (torch 2.13)
