"""TorchRec's introductory tutorial, step by step, with RecStore tables and raw 64-bit ids.

    python examples/tutorial.py                                # one process
    torchrun --nproc-per-node 2 examples/tutorial.py           # two, which share the tables

The steps are those of https://pytorch.org/tutorials/intermediate/torchrec_intro_tutorial.html: the same modules and the
same calls, on a CPU. What differs is what a table is. TorchRec's is a matrix with a fixed number of
rows; RecStore's makes a row for an id when it is first trained on, so ids are never hashed into a range.
"""

# Each step imports what it introduces, as the tutorial does.
# ruff: noqa: E402

from __future__ import annotations

import copy
import os

from common.command import leave, prepare_torch

prepare_torch()

# torchrun starts this file once for every process. All of them compute, the first one prints.
IS_FIRST = os.environ.get("RANK", "0") == "0"


def show(*values: object) -> None:
    """Prints in the first process."""
    if IS_FIRST:
        print(*values)


def title(text: str) -> None:
    """Prints a step's name in the first process."""
    show(f"\n=== {text} ===\n")


title("Embeddings in PyTorch")

# An embedding is a vector of numbers that stands for something: a user, a product. A table holds one a row, and the
# rows are trained like all other weights. PyTorch has two modules for that: Embedding returns the rows of the ids as
# they are, EmbeddingBag pools the rows of one sample into one vector, here their mean.

import torch

torch.manual_seed(0)
num_embeddings, embedding_dim = 10, 4
weights = torch.rand(num_embeddings, embedding_dim)
embedding = torch.nn.Embedding(num_embeddings, embedding_dim, _weight=weights)
embedding_bag = torch.nn.EmbeddingBag(num_embeddings, embedding_dim, _weight=weights)

small_ids = torch.tensor([[1, 3]])  # one sample with two ids
show("Input row ids:", small_ids)
show("Embedding:", embedding(small_ids))
show("EmbeddingBag:", embedding_bag(small_ids))
show("Mean of Embedding, the same:", embedding(small_ids).mean(dim=1))

# An id has to be smaller than the table. The ids that systems really have are hashes and database keys:

raw_ids = torch.tensor([8_141_530_964_127_335_102, -6_057_221_937_904_713_335])
try:
    embedding(raw_ids)
except IndexError as error:
    show("Embedding of raw ids:", type(error).__name__, "-", error)

# A RecStore table takes them as they are. Reading an id that was never trained on gives zeros and makes no row;
# training makes one.

from torchrec_recstore import Table

table = Table(embedding_dim)
show("RecStore table, before:", table.lookup(raw_ids), "rows:", len(table))
show("RecStore table, trained on:", table.lookup(raw_ids, train=True), "rows:", len(table))

title("From EmbeddingBag to EmbeddingBagCollection")

# A model has many tables. EmbeddingBagCollection holds them, each described by a config: here one for products and one
# for users. On the meta device it holds shapes and no memory, which is what we want: RecStore will hold the rows.
# num_embeddings is a hint of how many rows there might be; for RecStore it costs nothing.

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

# How many ids a sample has differs from sample to sample. Such a feature is two tensors: the ids of all samples one
# after the other, and how many belong to each sample. A JaggedTensor holds both.

from torchrec import JaggedTensor, KeyedJaggedTensor

lengths = torch.tensor([1, 2])  # one id in the first sample, two in the second
values = torch.tensor([5_000_000_000_000_000_005, 7_000_000_000_000_000_007, -1])
jagged = JaggedTensor(values=values, lengths=lengths)
show("Offsets:", jagged.offsets())  # where each sample begins and ends
show("List of values:", jagged.to_dense())
show(jagged)

# A KeyedJaggedTensor holds several features: the input of an EmbeddingBagCollection.

PRODUCTS = [9_000_000_000_000_000_001, 9_000_000_000_000_000_002, 9_000_000_000_000_000_001, -5]
USERS = [2_000_000_000_000_000_002, 2_000_000_000_000_000_003, -4, 2_000_000_000_000_000_001]
product_jt = JaggedTensor(values=torch.tensor(PRODUCTS), lengths=torch.tensor([3, 1]))
user_jt = JaggedTensor(values=torch.tensor(USERS), lengths=torch.tensor([2, 2]))
kjt = KeyedJaggedTensor.from_jt_dict({"product": product_jt, "user": user_jt})
show("Keys:", kjt.keys())
show("Lengths:", kjt.lengths())
show("Values:", kjt.values())
show("to_dict:", {key: feature.to_dense() for key, feature in kjt.to_dict().items()})
show(kjt)

# The result of a lookup is a KeyedTensor: a vector for each sample and feature. TorchRec's own unsharded collection
# shows it, with tables of 4096 rows. These ids do not fit in there, so they have to be hashed first, and two ids may
# end on one row. That is what RecStore does away with below.

static_ebc = torchrec.EmbeddingBagCollection(
    device=torch.device("cpu"),
    tables=[
        torchrec.EmbeddingBagConfig(
            name=f"static_{feature}", embedding_dim=64, num_embeddings=4096, feature_names=[feature]
        )
        for feature in ("product", "user")
    ],
)
hashed = KeyedJaggedTensor(kjt.keys(), values=kjt.values() % 4096, lengths=kjt.lengths())


def show_keyed(keyed: torchrec.KeyedTensor) -> None:
    """Prints what a KeyedTensor is made of."""
    show(type(keyed).__name__, "of", keyed.keys())
    show("Shape:", tuple(keyed.values().shape))  # two samples, 64 + 64 columns
    for key, pooled in keyed.to_dict().items():
        show(f"  {key}:", tuple(pooled.shape))


show_keyed(static_ebc(hashed))

title("The process group")

# Tables grow larger than one machine's memory, so they are split over processes (model parallel), while the dense
# layers are small and copied to each (data parallel). Processes find each other through a process group; gloo is the
# backend for CPUs. torchrun says who takes part; without it this process is a group of its own.

import torch.distributed as dist

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
pg = dist.group.WORLD
assert pg is not None
show("Backend:", dist.get_backend(), "- world size:", dist.get_world_size())

title("Planner")

# A table may lie on one process whole (table-wise), or be split by columns (column-wise) or rows (row-wise). The
# planner weighs memory and speed of each and decides. It needs to know the devices (the topology) and the sharder,
# which says what a module can be turned into. TorchRec's sharder is EmbeddingBagCollectionSharder. RecStoreSharder
# stands in its place, and that is the change that puts the tables in RecStore.

from torchrec.distributed.planner import Topology

from torchrec_recstore import RecStorePlanner, RecStoreSharder

sharder = RecStoreSharder()
planner = RecStorePlanner(topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"))
plan = planner.collective_plan(ebc, [sharder], pg)
show("Sharding plan generated:")
show(plan)

# The kernel of both tables is "customized_kernel": TorchRec's name for a kernel from outside, here RecStore's.

title("Sharding")

# The plan is only a description. The sharder turns the collection into a sharded one with it; input and output types
# stay the same.

from torchrec.distributed.types import LazyAwaitable, ShardingEnv

env = ShardingEnv.from_process_group(pg)
cpu = torch.device("cpu")
sharded_ebc = sharder.shard(ebc, plan.plan[""], env, cpu)
show(sharded_ebc)

title("LazyAwaitable")

# A sharded module returns at once, with a promise of the result: a LazyAwaitable. Waiting as late as possible lets
# communication go on behind other work.


class ExampleAwaitable(LazyAwaitable[torch.Tensor]):
    """A promise of ones."""

    def __init__(self, size: list[int]) -> None:
        super().__init__()
        self._size = size

    def _wait_impl(self) -> torch.Tensor:
        return torch.ones(self._size)


show(ExampleAwaitable([3, 2]).wait())

# Raw ids, no hashing; this is a training forward, so each new id gets its row.

output = sharded_ebc(kjt)
show(type(output).__name__, "- a LazyAwaitable:", isinstance(output, LazyAwaitable))
show_keyed(output.wait())

title("Anatomy of a sharded module")

# A forward has three parts. The input dist sends each id to the process that holds its row, the lookup reads and pools
# the rows there, and the output dist sends the results back to where the samples are. Backward goes the other way.

show("Input dist:", sharded_ebc._input_dists)
show("Lookup:", sharded_ebc._lookups)  # TorchRec would have FBGEMM's kernel here
show("Output dist:", sharded_ebc._output_dists)

title("DistributedModelParallel")

# A whole model is sharded by wrapping it: DistributedModelParallel plans, shards every module that one of the sharders
# knows, and makes the rest data parallel.

from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_recstore import table_stats

model = DistributedModelParallel(ebc, sharders=[sharder], device=cpu)
model(kjt).wait()
show(model)
for name, stats in table_stats(model).items():
    show(f"{name}: {stats.rows} rows for the distinct ids of the batch, {stats.bytes:,} bytes")

title("Fused optimizers")

# The optimizer of a table is fused into backward: a row is updated as soon as its gradient is known, and no gradient
# of a whole table is ever held. There are two ways to choose it. The first is fused_params of the sharder:

from fbgemm_gpu.split_embedding_configs import EmbOptimType

fused_params = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "learning_rate": 0.02,
    "eps": 0.002,
}
sharder_with_fused_params = RecStoreSharder(fused_params=fused_params)
sharded_ebc_fused_params = sharder_with_fused_params.shard(ebc, plan.plan[""], env, cpu)

# The learning rate shows that it has been taken.

show("Original fused optimizer:", sharded_ebc.fused_optimizer)
show("Fused optimizer with fused_params:", sharded_ebc_fused_params.fused_optimizer)
show("Its type:", type(sharded_ebc_fused_params.fused_optimizer).__name__)

# The second marks the parameters of the unsharded module, which is sharded afterwards. Each parameter may be given an
# optimizer of its own.

from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

ebc_apply_opt = copy.deepcopy(ebc)
for name, parameter in ebc_apply_opt.named_parameters():
    show("Marked:", name)
    apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
sharded_ebc_apply_opt = sharder.shard(ebc_apply_opt, plan.plan[""], env, cpu)
show("Fused optimizer with apply_optimizer_in_backward:", sharded_ebc_apply_opt.fused_optimizer)

# Parameters without a fused optimizer, such as the layers of an MLP, need one of their own. This model has none.

from torchrec.optim.optimizers import in_backward_optimizer_filter

dense_parameters = dict(in_backward_optimizer_filter(sharded_ebc_fused_params.named_parameters()))
show("Parameters that are not fused:", list(dense_parameters))

title("Training")

# One step: forward, loss, backward. There is no optimizer.step(), and yet the second loss differs: backward has updated
# the rows.


def loss_of_batch() -> torch.Tensor:
    """The loss of the batch: how far its embeddings are below one, summed."""
    pooled = sharded_ebc_fused_params(kjt).wait().values()
    return torch.sum(torch.ones_like(pooled) - pooled)


loss = loss_of_batch()
show("First iteration loss:", loss.item())
loss.backward()
show("Second iteration loss:", loss_of_batch().item())

title("Bounded memory")

# A table that keeps the row of every id grows as long as it is trained. TableOptions bound it: here to four rows in
# memory, over all processes. When more are needed, the rows that were trained on longest ago leave. There are also rows
# that leave for their age (expiry), ids that get a row only when they come again (admission), and a store on SSD or
# Redis for rows that must not be lost (cold_store). docs/memory.md has them all.

from torchrec_recstore import LRU, RecStoreConstraints, TableOptions

constraints = {
    "product_table": RecStoreConstraints(
        sharding_types=["table_wise"], options=TableOptions(max_rows=4, eviction=LRU())
    )
}
bounded_planner = RecStorePlanner(
    topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"), constraints=constraints
)
bounded_plan = bounded_planner.collective_plan(ebc, [sharder], pg)
bounded_ebc = sharder.shard(ebc, bounded_plan.plan[""], env, cpu)
for day in range(3):  # every day three other products
    of_day = KeyedJaggedTensor(kjt.keys(), values=kjt.values() + 1000 * day, lengths=kjt.lengths())
    bounded_ebc(of_day).wait().values().sum().backward()
stats = table_stats(bounded_ebc)["product_table"]
show("Rows in memory:", stats.rows)
show("Rows that have left:", stats.evicted)

title("Inference")

# A model that serves is not trained any more: its tables can be static, in one process, and quantised. TorchRec swaps
# EmbeddingBagCollection for a quantised one, here with the ids that the tables have by now in front of it. An id that
# was never trained on reads as zeros. The sharded model stays as it is.

from torchrec_recstore.inference import export_for_inference

sharded_ebc_fused_params.eval()
float_ebc = export_for_inference(sharded_ebc_fused_params, dtype=torch.float32)
quant_ebc = export_for_inference(sharded_ebc_fused_params, dtype=torch.int8)
show(quant_ebc)
with torch.no_grad():
    trained = sharded_ebc_fused_params(kjt).wait()
for key in ("product", "user"):
    show(f"Same float rows, {key}:", torch.equal(float_ebc(kjt)[key], trained[key]))
    show(f"Largest error of int8, {key}:", (quant_ebc(kjt)[key] - trained[key]).abs().max().item())

# TorchRec's tracer makes a graph of the model, and TorchScript a program of that, which runs without Python. Given a
# path, export_for_inference writes such a program itself, with a method that takes fresh rows: docs/serving.md.

import torchrec.fx

graph = torchrec.fx.symbolic_trace(quant_ebc)
scripted = torch.jit.script(graph)
show("Scripted, the same:", torch.equal(scripted(kjt).values(), quant_ebc(kjt).values()))

# The processes leave together.

dist.barrier()
dist.destroy_process_group()
leave()
