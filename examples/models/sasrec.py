"""SASRec, self-attention over the items of a user, on Amazon "Games".

    python examples/models/sasrec.py --data Video.txt
    # the same model on torch.nn.Embedding
    python examples/models/sasrec.py --data Video.txt --static
    torchrun --nproc-per-node 2 examples/models/sasrec.py --data Video.txt

The file is data/Video.txt of github.com/kang205/SASRec: a user and an item in each
line, in the order of time. The names of the items are hashed to 64-bit ids, of an
EmbeddingCollection in RecStore. The last item of each user is for the test, the item
before it for validation. Both are ranked among 100 random items that the user does not
have. Hit@10 is about 0.735 at the end.

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
from typing import NamedTuple

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
LENGTH = 50  # the number of items that the model reads
DIM = 50
BLOCKS = 2
DROPOUT = 0.5
# New rows are uniform in +-INIT, as in the authors' code: Glorot's bound for 23,716
# rows.
INIT = 0.0159
BATCH = 256  # users of a batch, over all ranks
GROUP = 32  # users whose attention is computed together
TEST_BATCH = 512
TEST_ITEMS = 101  # the item of the test, and 100 random items
LR = 2e-3  # of Adam, that of the authors for each 128 users
ROW_LR = 8e-3
BETAS = (0.9, 0.98)
VALIDATION_EPOCHS = 10  # between two validations
PATIENCE = 20  # epochs without a better validation until the training ends


class Interactions:
    """The interactions of one user after another, each in the order of time.

    All tensors are int64.
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
        user_numbers = pl.col("user").rank("dense").cast(pl.Int64) - 1
        item_ids = pl.col("item").replace_strict(ids)
        table = table.with_columns(user_numbers, item_ids)
        table = table.sort("user", maintain_order=True)
        self.user = table["user"].to_torch()
        self.item = table["item"].to_torch()
        # the place of the user's first interaction
        self.first = torch.searchsorted(self.user, self.user)
        # the ids of all items
        self.items, number = self.item.unique(return_inverse=True)
        # a number for each pair of a user and an item of the user
        self.owned = self.user * len(self.items) + number

    def random_items(self, users: Tensor, owned: Tensor) -> Tensor:
        """Returns a random item for each of ``users``.

        The user does not have the item in ``owned``.
        """
        num_items = len(self.items)
        numbers = torch.randint(num_items, users.shape)
        is_owned = torch.isin(users * num_items + numbers, owned)
        while is_owned.any():
            count = int(is_owned.sum())
            numbers[is_owned] = torch.randint(num_items, (count,))
            is_owned = torch.isin(users * num_items + numbers, owned)
        return self.items[numbers]

    def items_to_rank(self, users: Tensor, ends: Tensor) -> Tensor:
        """Returns the items at ``ends``, each with random items that its user lacks.

        They are (users, TEST_ITEMS) int64, the item at the end first.
        """
        repeated_users = users[:, None].expand(-1, TEST_ITEMS - 1)
        random_items = self.random_items(repeated_users, self.owned)
        return torch.cat([self.item[ends, None], random_items], dim=1)

    def history(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of up to ``LENGTH`` interactions before each of ``ends``.

        The second tensor, (users,), has their numbers.
        """
        lengths = (ends - self.first[ends]).clamp(max=LENGTH)
        # the distance of each history in the interactions from its place in the result
        shifts = ends - lengths.cumsum(0)
        result_places = torch.arange(int(lengths.sum()))
        places = result_places + shifts.repeat_interleave(lengths)
        return places, lengths


class Split(NamedTuple):
    """The parts of the interactions. Places are numbers of interactions."""

    train_ends: Tensor  # the place of each user's last interaction of the training
    train_owned: Tensor  # the pairs of a user and an item of the training
    test_users: Tensor  # the users with at least three interactions
    validation_ends: Tensor  # (users,): the place of the item to predict
    validation_items: Tensor  # (users, TEST_ITEMS)
    test_ends: Tensor
    test_items: Tensor


def split(data: Interactions) -> Split:
    """Takes each user's last interaction for the test, and the one before it for the
    validation.
    """
    counts = data.user.bincount()
    last = counts.cumsum(0) - 1  # the place of the user's last interaction
    # sorted by length, so that there is little padding
    by_length = counts.argsort(stable=True)
    too_short = int((counts < 3).sum())
    test_users = by_length[too_short:]
    test_ends = last[test_users]
    validation_ends = test_ends - 1
    validation_items = data.items_to_rank(test_users, validation_ends)
    test_items = data.items_to_rank(test_users, test_ends)

    places = torch.arange(len(data.owned))
    is_tested = torch.isin(places, torch.cat([validation_ends, test_ends]))
    last[test_users] -= 2
    has_history = last > data.first[last]
    return Split(
        train_ends=last[has_history],
        train_owned=data.owned[~is_tested],
        test_users=test_users,
        validation_ends=validation_ends,
        validation_items=validation_items,
        test_ends=test_ends,
        test_items=test_items,
    )


def attend(qkv: Tensor, lengths: Tensor, dropout: float) -> Tensor:
    """Returns causal attention within each user, (total, DIM).

    Args:
        qkv: (total, 3 * DIM). Queries, keys and values side by side, of one user after
            another.
        lengths: (users,) int64. The number of places of each user.
        dropout: The probability of dropout.
    """
    max_length = int(lengths.max())
    padded = JaggedTensor(qkv, lengths=lengths).to_padded_dense(max_length)
    # No place sees a later one, so none sees padding.
    q, k, v = padded[:, None].chunk(3, dim=-1)
    attended = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True
    )
    is_real = torch.arange(max_length) < lengths[:, None]
    return attended[:, 0][is_real]


class Block(nn.Module):
    """Attention, then two dense layers.

    Their normalized input is added to the output of each, as in the code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(DIM, eps=1e-8)
        self.norm_layers = nn.LayerNorm(DIM, eps=1e-8)
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM)
        self.value = nn.Linear(DIM, DIM)
        self.layers = nn.Sequential(
            nn.Linear(DIM, DIM),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(DIM, DIM),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Returns (total, DIM) for the items of one user after another, (total, DIM)."""
        normal = self.norm_attention(x)
        qkv = torch.cat(
            [
                self.query(normal),
                self.key(x),
                self.value(x),
            ],
            dim=1,
        )
        groups = lengths.split(GROUP)
        group_qkvs = qkv.split([int(group.sum()) for group in groups])
        dropout = DROPOUT if self.training else 0.0
        attended = [
            attend(group_qkv, group, dropout)
            for group_qkv, group in zip(group_qkvs, groups, strict=True)
        ]
        x = self.norm_layers(normal + torch.cat(attended))
        return x + self.layers(x)


class SASRec(nn.Module):
    """Predicts the item after each item of a history."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.positions = nn.Parameter(torch.empty(LENGTH, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM, eps=1e-8)
        for parameter in (self.positions, *self.blocks.parameters()):
            if parameter.ndim == 2:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
        """Predicts the item after each item of the histories.

        Returns:
            The predictions, the rows of the positives, and the rows of the negatives.
        """
        rows = self.table(ids)
        lengths = ids["history"].lengths()
        ends = lengths.cumsum(0).repeat_interleave(lengths)
        # The last item has the last position.
        items_to_end = ends - torch.arange(len(ends))
        positions = self.positions[LENGTH - items_to_end]
        x = rows["history"].values() * DIM**0.5 + positions
        x = F.dropout(x, DROPOUT, self.training)
        for block in self.blocks:
            x = block(x, lengths)
        return (
            self.norm(x),
            rows["positive"].values(),
            rows["negative"].values(),
        )


@torch.no_grad()
def rank_metrics(
    model: nn.Module,
    data: Interactions,
    ends: Tensor,
    items: Tensor,
) -> list[float]:
    """Returns NDCG@10 and Hit@10 of the first of ``items`` after each history.

    Collective.

    Args:
        model: The sharded model.
        data: The interactions.
        ends: (users,) int64. The place after the history of each user.
        items: (users, TEST_ITEMS) int64. The items to rank.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    all_users = torch.arange(len(ends))
    for part in all_users.tensor_split(len(ends) // TEST_BATCH + 1):
        users = part[dist.get_rank() :: dist.get_world_size()]
        place, history_lengths = data.history(ends[users])
        ids = torch.cat([data.item[place], items[users].flatten()])
        lengths = [
            history_lengths,
            torch.full_like(users, TEST_ITEMS),  # positives
            torch.zeros_like(users),  # negatives
        ]
        features = KeyedJaggedTensor(KEYS, ids, lengths=torch.cat(lengths))
        x, rows, _ = model(features)
        last_places = history_lengths.cumsum(0) - 1
        predicted = x[last_places]
        item_rows = rows.view(-1, TEST_ITEMS, DIM)
        scores = torch.einsum("bd,bnd->bn", predicted, item_rows)
        # An equal score is a wrong answer.
        is_lower = scores[:, 1:] < scores[:, :1]
        rank = (~is_lower).sum(dim=1)
        is_hit = rank < 10
        gain = is_hit / (rank + 2).log2()
        sums += torch.stack([gain, is_hit]).sum(1)
    dist.all_reduce(sums)
    return (sums / len(ends)).tolist()


def build(static: bool, num_items: int) -> nn.Module:
    """Shards a new model, or makes one with a table of TorchRec."""
    config = EmbeddingConfig(
        name="t_item",
        embedding_dim=DIM,
        num_embeddings=num_items if static else 2**40,
        feature_names=KEYS,
        weight_init_min=-INIT,
        weight_init_max=INIT,
    )
    device = torch.device("cpu" if static else "meta")
    table = EmbeddingCollection([config], device=device)
    adam = {
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": ROW_LR,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
    }
    sharders = []
    if not static:
        sharders.append(RecStoreEmbeddingCollectionSharder(fused_params=adam))
    return DistributedModelParallel(
        SASRec(table),
        sharders=sharders,
        device=torch.device("cpu"),
    )


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Interactions,
    parts: Split,
    random: torch.Generator,
) -> list[float]:
    """Trains with this rank's part of each batch, and returns the losses."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    negatives = data.random_items(data.user, parts.train_owned)
    order = torch.randperm(len(parts.train_ends), generator=random)
    even_users = len(order) // ranks * ranks
    ends = parts.train_ends[order[:even_users]]
    losses = []
    for batch in ends.split(BATCH):
        # neighbours by length, so that there is little padding
        by_length = (batch - data.first[batch]).argsort()
        place, lengths = data.history(batch[by_length][rank::ranks])
        ids = [
            data.item[place],
            data.item[place + 1],
            negatives[place],
        ]
        x, positive_rows, negative_rows = model(
            KeyedJaggedTensor(
                KEYS,
                torch.cat(ids),
                lengths=lengths.repeat(3),
            )
        )
        positive_scores = (x * positive_rows).sum(1)
        negative_scores = (x * negative_rows).sum(1)
        losses_of_pairs = F.softplus(-positive_scores) + F.softplus(negative_scores)
        loss = losses_of_pairs.mean()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(data: Path, epochs: int, seed: int, static: bool) -> None:
    """Trains, and prints NDCG@10 and Hit@10 of the test.

    They are those of the epoch with the best validation.
    """
    tune_threads()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    interactions = Interactions(data)
    # nn.Embedding needs numbers in the place of raw ids, and so all items beforehand.
    if static:
        interactions.item = torch.searchsorted(interactions.items, interactions.item)
        interactions.items = torch.arange(len(interactions.items))
    torch.manual_seed(seed)
    parts = split(interactions)

    model = build(static, len(interactions.items))
    # RecStore's rows are updated in backward
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=LR, betas=BETAS, fused=True)

    random = torch.Generator().manual_seed(seed)
    seconds = 0.0
    best = [0.0]
    best_epoch = 0
    for epoch in range(1, epochs + 1):
        model.train()
        begin = time.perf_counter()
        losses = train_epoch(model, optimizer, interactions, parts, random)
        seconds += time.perf_counter() - begin
        if epoch % VALIDATION_EPOCHS != 0 and epoch < epochs:
            continue
        model.eval()
        metrics = rank_metrics(
            model,
            interactions,
            parts.validation_ends,
            parts.validation_items,
        )
        if metrics > best:
            best = metrics
            best_epoch = epoch
            gain, hits = rank_metrics(
                model,
                interactions,
                parts.test_ends,
                parts.test_items,
            )
        if rank == 0:
            mean_loss = sum(losses) / len(losses)
            print(
                f"epoch {epoch}: training loss {mean_loss:.4f}, validation NDCG@10"
                f" {metrics[0]:.4f}, Hit@10 {metrics[1]:.4f}",
                flush=True,
            )
        if epoch - best_epoch >= PATIENCE:
            break
    num_rows = len(interactions.items) if static else table_stats(model)["t_item"].rows
    if rank == 0:
        train_places, _ = interactions.history(parts.train_ends)
        rate = epoch * len(train_places) / seconds
        num_users = len(parts.test_users)
        error = (hits * (1 - hits) / num_users) ** 0.5
        print(
            f"{rate:,.0f} predictions/s in training, {num_rows:,} rows; test at epoch"
            f" {best_epoch}:"
        )
        print(
            f"NDCG@10 {gain:.4f}, Hit@10 of {num_users:,} users: {hits:.4f} +-"
            f" {error:.4f}",
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
        help="Video.txt, the file of interactions",
    )
    flags.add_argument(
        "--epochs",
        type=int,
        default=100,
        help="the largest number of epochs",
    )
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--static",
        action="store_true",
        help="torch.nn.Embedding instead of a RecStore table",
    )
    main(**vars(flags.parse_args()))
    os._exit(0)  # gloo's threads abort in some normal exits (torch 2.13)
