"""DCN-v2, a click model that learns products of features, with raw ids of Criteo.

    python examples/models/dcn_v2.py --data train.txt
    torchrun --nproc-per-node 2 examples/models/dcn_v2.py --data train.txt

The file is train.txt of the Kaggle challenge, or a part of it, plain or .gz. The split
is by time: the model is trained on the first 80 % of the rows, for one epoch, and
tested on the last 10 %. On 137,139 rows, every 300th or so in the order of time, it
ends with a test AUC of about 0.75.

Source: Wang et al., DCN V2, arXiv 2008.13535. The cross network is TorchRec's.
"""

import argparse
import os
import time
from pathlib import Path

import polars as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import MLP
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore import RecStoreSharder, table_stats, tune_threads

DENSE = [f"I{i}" for i in range(1, 14)]
SPARSE = [f"C{i}" for i in range(1, 27)]
DIM = 16
CROSS_LAYERS = 3
RANK = 64
HIDDEN = [256, 128]
LR = 0.01  # of the tables: row-wise Adagrad
DENSE_LR = 0.001  # of the layers: Adam
TEST_BATCH = 4096


def read(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Reads a Criteo log.

    Returns:
        The labels, (n,) float32, the logarithms of the counts, (n, 13) float32, and the
        raw ids, (n, 26) int64. A missing id is 0.
    """
    schema = {"label": pl.Float32}
    schema |= dict.fromkeys(DENSE, pl.Float32)
    schema |= dict.fromkeys(SPARSE, pl.String)
    rows = pl.read_csv(
        path,
        separator="\t",
        has_header=False,
        schema=schema,
    )
    filled_counts = pl.col(DENSE).fill_null(0).clip(-2)
    counts = rows.select((filled_counts + 3).log())
    numbers = pl.col(SPARSE).str.to_integer(base=16)
    ids = rows.select(numbers.fill_null(0))
    labels = rows["label"].to_torch()
    return labels, counts.to_torch(), ids.to_torch().long()


class DCN(nn.Module):
    """A cross network and an MLP side by side, on the counts and the rows of the ids."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=DIM,
                num_embeddings=2**40,
                feature_names=[name],
            )
            for name in SPARSE
        ]
        # RecStore makes the rows
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        width = len(DENSE) + len(SPARSE) * DIM
        self.cross = LowRankCrossNet(width, CROSS_LAYERS, RANK)
        self.deep = MLP(width, HIDDEN)
        self.out = nn.Linear(width + HIDDEN[-1], 1)

    def forward(self, counts: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Returns the logits of a click, (B,)."""
        # by key, because a sharded collection has another order
        rows = self.tables(ids).to_dict()
        rows_in_order = [rows[name] for name in SPARSE]
        x = torch.cat([counts, *rows_in_order], dim=1)
        hidden = torch.cat([self.cross(x), self.deep(x)], dim=1)
        return self.out(hidden).squeeze(1)


def keyed(ids: Tensor) -> KeyedJaggedTensor:
    """Returns (B, 26) ids as features with one id in each sample."""
    lengths = torch.ones(ids.numel(), dtype=torch.int64)
    return KeyedJaggedTensor(SPARSE, ids.T.flatten(), lengths=lengths)


@torch.no_grad()
def auc(
    model: nn.Module,
    labels: Tensor,
    counts: Tensor,
    ids: Tensor,
) -> float:
    """Returns the area under the ROC curve. Every rank computes it for all rows."""
    model.eval()
    logits = []
    all_rows = torch.arange(len(labels))
    for rows in all_rows.split(TEST_BATCH):
        logits.append(model(counts[rows], keyed(ids[rows])))
    area = binary_auroc(torch.cat(logits), labels.long())
    return area.item()


def main(data: Path, batch_size: int, epochs: int, seed: int) -> None:
    """Trains, and prints the AUC of the test rows."""
    tune_threads()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    torch.manual_seed(seed)
    labels, counts, ids = read(data)
    train_rows = int(0.8 * len(labels))
    test = slice(int(0.9 * len(labels)), None)

    fused_params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": LR,
    }
    # updates the rows in the backward pass
    sharder = RecStoreSharder(fused_params=fused_params)
    cpu = torch.device("cpu")
    model = DistributedModelParallel(DCN(), sharders=[sharder], device=cpu)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=DENSE_LR)

    losses = []
    begin = time.perf_counter()
    for epoch in range(epochs):
        random = torch.Generator().manual_seed(seed * epochs + epoch)
        order = torch.randperm(train_rows, generator=random)
        even_rows = train_rows // ranks * ranks
        for batch in order[:even_rows].split(batch_size):
            rows = batch[rank::ranks]
            logits = model(counts[rows], keyed(ids[rows]))
            loss = F.binary_cross_entropy_with_logits(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if rank == 0 and len(losses) % 50 == 0:
                mean_loss = sum(losses[-50:]) / 50
                print(f"step {len(losses)}: training loss {mean_loss:.4f}", flush=True)
    rate = epochs * train_rows / (time.perf_counter() - begin)
    test_auc = auc(model, labels[test], counts[test], ids[test])
    table_rows = sum(stats.rows for stats in table_stats(model).values())
    if rank == 0:
        print(f"{rate:,.0f} samples/s in training, {table_rows:,} rows")
        print(f"test AUC {test_auc:.4f}", flush=True)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "--data",
        type=Path,
        required=True,
        help="train.txt of Criteo's Kaggle challenge, plain or .gz",
    )
    flags.add_argument(
        "--batch-size",
        type=int,
        default=512,
        help="rows of a step, over all ranks",
    )
    flags.add_argument(
        "--epochs",
        type=int,
        default=1,
        help="a second epoch makes the AUC worse",
    )
    flags.add_argument("--seed", type=int, default=0)
    main(**vars(flags.parse_args()))
    os._exit(0)  # gloo's threads abort in some normal exits (torch 2.13)
