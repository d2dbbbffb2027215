"""The shortest training of TorchRec's DLRM with RecStore tables.

The ids are raw 64-bit ids. There are no table sizes, and no id is hashed.

    python examples/dlrm/minimal.py                  # generated rows
    python examples/dlrm/minimal.py train.txt        # a Criteo click log, also .gz
    torchrun --nproc-per-node 2 examples/dlrm/minimal.py train.txt

Only the sharder, the options and the planner in build() differ from a TorchRec program.
The log is split by time: the model is trained once on the first 80 % of the rows, and
tested on the last 10 %. The test AUC is 0.752 on 137,139 rows of the Kaggle log.
examples/dlrm/train.py trains the same model with flags, checkpoints, curves and a
report.
"""

import sys

import polars as pl
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore import (
    LRU,
    RecStoreConstraints,
    RecStorePlanner,
    RecStoreSharder,
    TableOptions,
    quiet,
    table_stats,
)

DENSE = [f"I{i}" for i in range(1, 14)]
SPARSE = [f"C{i}" for i in range(1, 27)]
DIM = 16
BATCH_SIZE = 512  # samples of a step, over all ranks

# counts (n, 13) float32, ids (n, 26) int64, labels (n,) float32
Rows = tuple[Tensor, Tensor, Tensor]


def read(path: str) -> Rows:
    """Reads a Criteo log. An empty field counts as 0."""
    schema = {"label": pl.Float32}
    schema |= dict.fromkeys(DENSE, pl.Float32)
    schema |= dict.fromkeys(SPARSE, pl.String)
    rows = pl.read_csv(path, separator="\t", has_header=False, schema=schema)
    counts = pl.col(DENSE).fill_null(0).clip(-2)
    ids = pl.col(SPARSE).str.to_integer(base=16).fill_null(0)
    return (
        rows.select((counts + 3).log()).to_torch(),
        rows.select(ids).to_torch().long(),
        rows["label"].to_torch(),
    )


def generate(num_rows: int = 100_000) -> Rows:
    """Makes rows whose ids are 64-bit hashes, of which few are frequent.

    Each id has a hidden effect on the label.
    """
    torch.manual_seed(0)
    # member 1 of a feature is the most frequent
    members = (torch.rand(num_rows, len(SPARSE)) ** -1.5).long()
    numbers = members * len(SPARSE) + torch.arange(len(SPARSE))
    ids = numbers * -0x61C8864680B583EB  # overflows, which mixes the bits
    effects = (ids * (ids >> 32)).float() / 2**63  # between -1 and 1
    counts = torch.randn(num_rows, len(DENSE))
    logits = effects.sum(dim=1) + 0.3 * counts.sum(dim=1) - 2
    labels = torch.bernoulli(torch.sigmoid(logits))
    return counts, ids, labels


def batches(rows: Rows, batch_size: int) -> list[Batch]:
    """Returns this rank's part of each batch.

    The parts of all ranks have the same size.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    even_rows = len(rows[0]) // world_size * world_size
    rank_rows = [tensor[rank:even_rows:world_size] for tensor in rows]
    parts = [tensor.split(batch_size // world_size) for tensor in rank_rows]
    return [
        Batch(counts, features(ids), labels)
        for counts, ids, labels in zip(*parts, strict=True)
    ]


def features(ids: Tensor) -> KeyedJaggedTensor:
    """Makes TorchRec's input of (B, 26) ids: one id for each sample and feature."""
    lengths = torch.ones(ids.numel(), dtype=torch.int32)
    return KeyedJaggedTensor(SPARSE, ids.T.flatten(), lengths=lengths)


def build() -> DistributedModelParallel:
    """Builds TorchRec's DLRM, and places its tables in RecStore."""
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=DIM,
            # a hint that allocates nothing: a table makes a row for each new id
            num_embeddings=2**40,
            feature_names=[name],
        )
        for name in SPARSE
    ]
    ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
    dlrm = DLRM(
        ebc,
        len(DENSE),
        dense_arch_layer_sizes=[256, DIM],
        over_arch_layer_sizes=[256, 1],
    )
    model = DLRMTrain(dlrm)
    fused_params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.01,
    }
    # the rows are updated in the backward pass
    sharders = [RecStoreSharder(fused_params=fused_params)]
    # by default, a table keeps all of its rows
    options = TableOptions(max_rows=1_000_000, eviction=LRU())
    constraints = {table.name: RecStoreConstraints(options=options) for table in tables}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    plan = RecStorePlanner(topology, constraints=constraints).collective_plan(
        model, sharders, dist.group.WORLD
    )
    return DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=torch.device("cpu")
    )


def main() -> None:
    """Trains for one epoch, and prints the AUC of the test rows."""
    quiet()  # hides TorchRec's warnings of its own internals
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = read(sys.argv[1]) if len(sys.argv) > 1 else generate()
    num_rows = len(rows[0])
    train_rows = tuple(tensor[: num_rows * 8 // 10] for tensor in rows)
    test_rows = tuple(tensor[num_rows * 9 // 10 :] for tensor in rows)
    torch.manual_seed(0)
    model = build()
    # all parameters but those of the tables
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.001)

    for step, batch in enumerate(batches(train_rows, BATCH_SIZE), start=1):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: training loss {loss.item():.4f}", flush=True)

    auc = BinaryAUROC()  # over all ranks
    model.eval()
    with torch.no_grad():
        for batch in batches(test_rows, 4096):
            _, (_, logits, labels) = model(batch)
            auc.update(logits.double().sigmoid(), labels.long())
    table_rows = sum(stats.rows for stats in table_stats(model).values())
    test_auc = auc.compute().item()
    if dist.get_rank() == 0:
        print(f"{table_rows:,} rows in {len(SPARSE)} tables, test AUC {test_auc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
