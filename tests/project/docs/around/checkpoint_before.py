"""The model and the loop of a user, whose table is split by columns on its one rank."""

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology

from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder

dist.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:29500", rank=0, world_size=1
)
user = EmbeddingBagConfig(
    name="user", embedding_dim=8, num_embeddings=100, feature_names=["u"]
)
sharder = RecStoreSharder()
constraint = RecStoreConstraints(sharding_types=["column_wise"], min_partition=4)
planner = RecStorePlanner(
    topology=Topology(world_size=1, compute_device="cpu"),
    constraints={"user": constraint},
)
collection = EmbeddingBagCollection([user], device=torch.device("meta"))
plan = planner.collective_plan(collection, [sharder], dist.group.WORLD)
model = DistributedModelParallel(
    collection, plan=plan, sharders=[sharder], device=torch.device("cpu")
)
batch = KeyedJaggedTensor(
    ["u"], values=torch.tensor([7, -1, 2**62]), lengths=torch.tensor([2, 1])
)
model(batch).wait().values().sum().backward()

tables = [
    EmbeddingBagConfig(
        name=name, embedding_dim=dim, num_embeddings=100, feature_names=[name]
    )
    for name, dim in (("user", 8), ("member", 8), ("small", 4))
]
new_model = DistributedModelParallel(
    EmbeddingBagCollection(tables, device=torch.device("meta")),
    sharders=[sharder],
    device=torch.device("cpu"),
)

dense_optimizer = torch.optim.Adam(nn.Linear(8, 1).parameters())
schedule = torch.optim.lr_scheduler.ConstantLR(dense_optimizer)
batches_done = 1000
state = {"batches": batches_done}
