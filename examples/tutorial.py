"""TorchRec's introductory tutorial, step by step, with RecStore tables and raw ids.

    # one process
    python examples/tutorial.py
    # two processes, which share the tables
    torchrun --nproc-per-node 2 examples/tutorial.py

The steps are those of
https://pytorch.org/tutorials/intermediate/torchrec_intro_tutorial.html, with the same
modules and the same calls, on a CPU. Only the tables differ. A table of TorchRec is a
matrix with a fixed number of rows. A RecStore table makes a row for an id when the id
is first trained on, so ids are never hashed into a range.
"""

# Each step imports the modules that it introduces, as in the original tutorial.
# ruff: noqa: E402

from __future__ import annotations

import copy
import os

from common.command import leave, prepare_torch

prepare_torch()

# torchrun starts this file once for every process. All processes compute, and the first
# process prints.
IS_FIRST = os.environ.get("RANK", "0") == "0"


def show(*values: object) -> None:
    """Prints values in the first process."""
    if IS_FIRST:
        print(*values)


def title(text: str) -> None:
    """Prints the name of a step in the first process."""
    show(f"\n=== {text} ===\n")


title("Embeddings in PyTorch")

# An embedding is a vector of numbers that represents an object, for example a user or a
# product. Each row of a table is an embedding, and the rows are trained like all other
# weights. PyTorch has two modules for tables. Embedding returns the rows of the ids.
# EmbeddingBag pools the rows of one sample into one vector, here their mean.

import torch

torch.manual_seed(0)
num_embeddings = 10
embedding_dim = 4
weights = torch.rand(num_embeddings, embedding_dim)
embedding = torch.nn.Embedding(num_embeddings, embedding_dim, _weight=weights)
embedding_bag = torch.nn.EmbeddingBag(num_embeddings, embedding_dim, _weight=weights)

small_ids = torch.tensor([[1, 3]])  # one sample with two ids
show("Input row ids:", small_ids)
show("Embedding:", embedding(small_ids))
show("EmbeddingBag:", embedding_bag(small_ids))
show("Mean of Embedding, the same:", embedding(small_ids).mean(dim=1))

# An id must be smaller than the number of rows. In real systems, ids are hashes or
# database keys:

raw_ids = torch.tensor([8_141_530_964_127_335_102, -6_057_221_937_904_713_335])
try:
    embedding(raw_ids)
except IndexError as error:
    show(
        "Embedding of raw ids:",
        type(error).__name__,
        "-",
        error,
    )

# A RecStore table takes such ids unchanged. An id that was never trained on reads as
# zeros, and reading makes no row. Training makes a row.

from torchrec_recstore import Table

table = Table(embedding_dim)
rows = table.lookup(raw_ids)
show(
    "RecStore table, before:",
    rows,
    "rows:",
    len(table),
)
rows = table.lookup(raw_ids, train=True)
show(
    "RecStore table, trained on:",
    rows,
    "rows:",
    len(table),
)

title("From EmbeddingBag to EmbeddingBagCollection")

# A model has many tables. An EmbeddingBagCollection contains them, and a config
# describes each table: here a table of products and a table of users. On the meta
# device the collection has shapes but no memory, because RecStore will store the rows.
# num_embeddings is a hint of the number of rows. For RecStore a large hint costs no
# memory.

import torchrec

ebc = torchrec.EmbeddingBagCollection(
    device=torch.device("meta"),
    tables=[
        torchrec.EmbeddingBagConfig(
            name="product_table",
            embedding_dim=64,
            num_embeddings=2**40,
            feature_names=["product"],
            pooling=torchrec.PoolingType.SUM,
        ),
        torchrec.EmbeddingBagConfig(
            name="user_table",
            embedding_dim=64,
            num_embeddings=2**40,
            feature_names=["user"],
            pooling=torchrec.PoolingType.SUM,
        ),
    ],
)
show(ebc.embedding_bags)

title("Input and output types")

# Samples may have different numbers of ids. A feature therefore consists of two
# tensors: the ids of all samples, one sample after another, and the number of ids of
# each sample. A JaggedTensor contains both.

from torchrec import JaggedTensor, KeyedJaggedTensor

lengths = torch.tensor([1, 2])  # one id in the first sample, two in the second
values = torch.tensor([5_000_000_000_000_000_005, 7_000_000_000_000_000_007, -1])
jagged = JaggedTensor(values=values, lengths=lengths)
show("Offsets:", jagged.offsets())  # where each sample begins and ends
show("List of values:", jagged.to_dense())
show(jagged)

# A KeyedJaggedTensor contains several features. It is the input of an
# EmbeddingBagCollection.

PRODUCTS = [
    9_000_000_000_000_000_001,
    9_000_000_000_000_000_002,
    9_000_000_000_000_000_001,
    -5,
]
USERS = [
    2_000_000_000_000_000_002,
    2_000_000_000_000_000_003,
    -4,
    2_000_000_000_000_000_001,
]
product_jt = JaggedTensor(values=torch.tensor(PRODUCTS), lengths=torch.tensor([3, 1]))
user_jt = JaggedTensor(values=torch.tensor(USERS), lengths=torch.tensor([2, 2]))
kjt = KeyedJaggedTensor.from_jt_dict({"product": product_jt, "user": user_jt})
show("Keys:", kjt.keys())
show("Lengths:", kjt.lengths())
show("Values:", kjt.values())
lists = {key: feature.to_dense() for key, feature in kjt.to_dict().items()}
show("to_dict:", lists)
show(kjt)

# The result of a lookup is a KeyedTensor, which has a vector for each sample and
# feature. Here, an unsharded collection of TorchRec with tables of 4096 rows returns
# one. The ids are too large for these tables, so they must be hashed first, and two ids
# may share a row. RecStore tables need no hashing, as shown below.

static_ebc = torchrec.EmbeddingBagCollection(
    device=torch.device("cpu"),
    tables=[
        torchrec.EmbeddingBagConfig(
            name=f"static_{feature}",
            embedding_dim=64,
            num_embeddings=4096,
            feature_names=[feature],
        )
        for feature in ("product", "user")
    ],
)
hashed = KeyedJaggedTensor(
    kjt.keys(),
    values=kjt.values() % 4096,
    lengths=kjt.lengths(),
)


def show_keyed(keyed: torchrec.KeyedTensor) -> None:
    """Prints the parts of a KeyedTensor."""
    show(type(keyed).__name__, "of", keyed.keys())
    show("Shape:", tuple(keyed.values().shape))  # two samples, 64 + 64 columns
    for key, pooled in keyed.to_dict().items():
        show(f"  {key}:", tuple(pooled.shape))


show_keyed(static_ebc(hashed))

title("The process group")

# Tables may be larger than the memory of one machine, so they are split over processes
# (model parallel). The dense layers are small and are copied to each process (data
# parallel). Processes communicate through a process group. gloo is the backend for
# CPUs. torchrun sets the members of the group. Without torchrun, the group has only
# this process.

import torch.distributed as dist

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
pg = dist.group.WORLD
assert pg is not None
show(
    "Backend:",
    dist.get_backend(),
    "- world size:",
    dist.get_world_size(),
)

title("Planner")

# A whole table may be on one process (table-wise), or a table may be split by columns
# (column-wise) or by rows (row-wise). The planner estimates the memory and the speed of
# each way and chooses one. It needs the devices (the topology) and the sharder, which
# turns a module into a sharded module. TorchRec's sharder is
# EmbeddingBagCollectionSharder. RecStoreSharder replaces it, and this change puts the
# tables in RecStore.

from torchrec.distributed.planner import Topology

from torchrec_recstore import RecStorePlanner, RecStoreSharder

sharder = RecStoreSharder()
planner = RecStorePlanner(
    topology=Topology(world_size=dist.get_world_size(), compute_device="cpu")
)
plan = planner.collective_plan(ebc, [sharder], pg)
show("Sharding plan generated:")
show(plan)

# The kernel of both tables is "customized_kernel", which is TorchRec's name for a
# kernel of another package. Here it is RecStore's kernel.

title("Sharding")

# The plan is only a description. The sharder uses it to turn the collection into a
# sharded collection, which has the same input and output types.

from torchrec.distributed.types import LazyAwaitable, ShardingEnv

env = ShardingEnv.from_process_group(pg)
cpu = torch.device("cpu")
sharded_ebc = sharder.shard(ebc, plan.plan[""], env, cpu)
show(sharded_ebc)

title("LazyAwaitable")

# A sharded module returns at once. It returns a LazyAwaitable, which is a promise of
# the result. If the program waits for the result as late as possible, communication
# overlaps with other work.


class ExampleAwaitable(LazyAwaitable[torch.Tensor]):
    """A promise of ones."""

    def __init__(self, size: list[int]) -> None:
        super().__init__()
        self._size = size

    def _wait_impl(self) -> torch.Tensor:
        return torch.ones(self._size)


show(ExampleAwaitable([3, 2]).wait())

# The sharded collection takes raw ids without hashing. This is a training forward, so
# each new id gets a row.

output = sharded_ebc(kjt)
show(
    type(output).__name__,
    "- a LazyAwaitable:",
    isinstance(output, LazyAwaitable),
)
show_keyed(output.wait())

title("Anatomy of a sharded module")

# A forward has three parts. The input dist sends each id to the process that has its
# row. The lookup reads and pools the rows there. The output dist sends the results back
# to the processes of the samples. The backward pass runs these parts in the reverse
# order.

show("Input dist:", sharded_ebc._input_dists)
show("Lookup:", sharded_ebc._lookups)  # stock TorchRec has FBGEMM's kernel here
show("Output dist:", sharded_ebc._output_dists)

title("DistributedModelParallel")

# DistributedModelParallel shards a whole model. It makes a plan, shards every module
# for which there is a sharder, and makes the rest data parallel.

from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_recstore import table_stats

model = DistributedModelParallel(ebc, sharders=[sharder], device=cpu)
model(kjt).wait()
show(model)
for name, stats in table_stats(model).items():
    show(
        f"{name}: {stats.rows} rows for the distinct ids of the batch, {stats.bytes:,}"
        " bytes"
    )

title("Fused optimizers")

# The optimizer of a table is fused into the backward pass. A row is updated as soon as
# its gradient is known, so the gradient of a whole table is never stored. There are two
# ways to choose the optimizer. The first way is fused_params of the sharder:

from fbgemm_gpu.split_embedding_configs import EmbOptimType

fused_params = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "learning_rate": 0.02,
    "eps": 0.002,
}
sharder_with_fused_params = RecStoreSharder(fused_params=fused_params)
sharded_ebc_fused_params = sharder_with_fused_params.shard(ebc, plan.plan[""], env, cpu)

# The learning rate shows that the optimizer uses the fused_params.

show("Original fused optimizer:", sharded_ebc.fused_optimizer)
show("Fused optimizer with fused_params:", sharded_ebc_fused_params.fused_optimizer)
show("Its type:", type(sharded_ebc_fused_params.fused_optimizer).__name__)

# The second way marks the parameters of the unsharded module, which is sharded
# afterwards. Each parameter may have a different optimizer.

from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)

ebc_apply_opt = copy.deepcopy(ebc)
for name, parameter in ebc_apply_opt.named_parameters():
    show("Marked:", name)
    apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
sharded_ebc_apply_opt = sharder.shard(ebc_apply_opt, plan.plan[""], env, cpu)
show(
    "Fused optimizer with apply_optimizer_in_backward:",
    sharded_ebc_apply_opt.fused_optimizer,
)

# Parameters without a fused optimizer, for example the layers of an MLP, need another
# optimizer. This model has no such parameters.

from torchrec.optim.optimizers import in_backward_optimizer_filter

dense_parameters = dict(
    in_backward_optimizer_filter(sharded_ebc_fused_params.named_parameters())
)
show("Parameters that are not fused:", list(dense_parameters))

title("Training")

# A step consists of forward, loss and backward. There is no optimizer.step(), but the
# second loss differs, because the backward pass has updated the rows.


def loss_of_batch() -> torch.Tensor:
    """Returns the sum of the differences between one and the embeddings of the batch."""
    pooled = sharded_ebc_fused_params(kjt).wait().values()
    return torch.sum(torch.ones_like(pooled) - pooled)


loss = loss_of_batch()
show("First iteration loss:", loss.item())
loss.backward()
show("Second iteration loss:", loss_of_batch().item())

title("Bounded memory")

# A table that keeps the row of every id grows during the whole training. TableOptions
# limit it, here to four rows in memory over all processes. When a step needs more rows,
# the table evicts the rows that were trained on longest ago. Other options delete old
# rows (expiry), give an id a row only when it occurs again (admission), and keep
# evicted rows on an SSD or in Redis (cold_store). docs/memory.md describes all options.

from torchrec_recstore import LRU, RecStoreConstraints, TableOptions

options = TableOptions(max_rows=4, eviction=LRU())
constraint = RecStoreConstraints(sharding_types=["table_wise"], options=options)
bounded_planner = RecStorePlanner(
    topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
    constraints={"product_table": constraint},
)
bounded_plan = bounded_planner.collective_plan(ebc, [sharder], pg)
bounded_ebc = sharder.shard(ebc, bounded_plan.plan[""], env, cpu)
for day in range(3):  # each day has three new products
    ids_of_day = kjt.values() + 1000 * day
    batch = KeyedJaggedTensor(kjt.keys(), values=ids_of_day, lengths=kjt.lengths())
    bounded_ebc(batch).wait().values().sum().backward()
stats = table_stats(bounded_ebc)["product_table"]
show("Rows in memory:", stats.rows)
show("Rows that have left:", stats.evicted)

title("Inference")

# A model in serving is not trained any more, so its tables can be static, quantised and
# in one process. export_for_inference replaces the collection by TorchRec's quantised
# collection, with a map from the ids of the tables to its rows. An id that was never
# trained on reads as zeros. The sharded model is not changed.

from torchrec_recstore.inference import export_for_inference

sharded_ebc_fused_params.eval()
float_ebc = export_for_inference(sharded_ebc_fused_params, dtype=torch.float32)
quant_ebc = export_for_inference(sharded_ebc_fused_params, dtype=torch.int8)
show(quant_ebc)
with torch.no_grad():
    trained = sharded_ebc_fused_params(kjt).wait()
for key in ("product", "user"):
    show(f"Same float rows, {key}:", torch.equal(float_ebc(kjt)[key], trained[key]))
    error = (quant_ebc(kjt)[key] - trained[key]).abs().max()
    show(f"Largest error of int8, {key}: {error:.7f}")

# TorchRec's tracer turns the model into a graph, and TorchScript turns the graph into a
# program that runs without Python. With a path, export_for_inference writes such a
# program itself. The written program also has a method that takes updated rows. See
# docs/serving.md.

import torchrec.fx

graph = torchrec.fx.symbolic_trace(quant_ebc)
scripted = torch.jit.script(graph)
is_same = torch.equal(scripted(kjt).values(), quant_ebc(kjt).values())
show("Scripted, the same:", is_same)

# All processes end at the same time.

dist.barrier()
dist.destroy_process_group()
leave()
