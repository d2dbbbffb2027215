"""Errors of sharded models and of eager modules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType

from tests.errors.situations import situation
from tests.sharders.models import bag, batch, collection, sequence, sequences, sharded
from torchrec_recstore import (
    SGD,
    Adam,
    RecStoreConstraints,
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStorePlanner,
    RecStoreSharder,
    SparseSGD,
    TableOptions,
    export_dense_weights,
    load_dense_weights,
    reshard,
    save_checkpoint,
)
from torchrec_recstore.kernels import PooledKernel
from torchrec_recstore.options import shard_options
from torchrec_recstore.store import Table

SGD_BY_PARAMS = {"optimizer": EmbOptimType.EXACT_SGD}


@situation("An unsupported optimizer")
def unknown_optimizer(one_rank: None) -> None:
    sharded(collection(bag("t_user")), fused_params={"optimizer": EmbOptimType.SHAMPOO})


@situation("An unknown key in fused_params")
def unknown_key(one_rank: None) -> None:
    sharded(collection(bag("t_user")), fused_params={**SGD_BY_PARAMS, "learning_rat": 0.1})


@situation("Two optimizers for one table")
def two_optimizers(one_rank: None) -> None:
    sharded(collection(bag("t_user")), fused_params=SGD_BY_PARAMS, optimizer=Adam(lr=0.1))


@situation("An unsupported data type of rows")
def unknown_rows(one_rank: None) -> None:
    sharded(collection(bag("t_user", data_type=DataType.UINT8)))


@situation("8-bit rows without stochastic rounding")
def rounded_to_nearest(one_rank: None) -> None:
    params = {**SGD_BY_PARAMS, "stochastic_rounding": False}
    sharded(collection(bag("t_user", data_type=DataType.INT8)), fused_params=params)


@situation("An unsupported data type of optimizer state")
def bfloat16_state(one_rank: None) -> None:
    sharded(collection(bag("t_user")), fused_params={**SGD_BY_PARAMS, "state_dtype": torch.bfloat16})


@situation("Optimizer state in float16 on TorchRec's kernels")
def stock_state(one_rank: None) -> None:
    stock = {"t_user": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])}
    sharded(collection(bag("t_user")), {**SGD_BY_PARAMS, "state_dtype": torch.float16}, constraints=stock)


@situation("Optimizer states of different data types")
def one_narrow_state(one_rank: None) -> None:
    params = {"optimizer": EmbOptimType.ADAM, "optimizer_state_dtypes": {"momentum1": SparseType.FP16}}
    sharded(collection(bag("t_user")), fused_params=params)


@situation("init_fn in a table's config")
def whole_tables(one_rank: None) -> None:
    sharded(collection(bag("t_user", init_fn=nn.init.zeros_)))


@situation("A virtual table in RecStore")
def virtual(one_rank: None) -> None:
    sharded(collection(bag("t_user", use_virtual_table=True)))


@situation("A feature of tables with different routing")
def half_hashed(one_rank: None) -> None:
    options = {"t_user": TableOptions(routing="hash"), "t_history": TableOptions()}
    tables = collection(bag("t_user", features=["user"]), bag("t_history", features=["user"]))
    sharded(tables, options=options, sharding_type="row_wise")


@situation("Fewer rows than shards")
def one_row_for_two_ranks() -> None:
    shard_options(TableOptions(max_rows=1), (2, 0), "t_user")


@situation("An unknown name of a table")
def unknown_table(one_rank: None) -> None:
    load_dense_weights(sharded(collection(bag("t_user"))), {"t_usr": torch.ones(3, 4)})


@situation("Weights with another dim")
def other_dim(one_rank: None) -> None:
    load_dense_weights(sharded(collection(bag("t_user"))), {"t_user": torch.ones(3, 8)})


@situation("A write to a tensor of a state dict")
def a_written_state(one_rank: None) -> None:
    model = sharded(collection(bag("t_user", ["user"])))
    load_dense_weights(model, {"t_user": torch.ones(3, 4)})
    model.state_dict()["embedding_bags.t_user.weight"].local_shards()[0].tensor.zero_()
    model(batch(user=[[1, 2]]))


@situation("A write to the parameter of a table")
def a_written_parameter(one_rank: None) -> None:
    sharded(collection(bag("t_user"))).apply(lambda module: [p.data.uniform_(-1, 1) for p in module.parameters()])


@situation("Ids outside the tensor of state_dict_gather")
def gathered_into_few_rows(one_rank: None) -> None:
    model = sharded(collection(bag("t_user")))
    load_dense_weights(model, {"t_user": torch.ones(4, 4)})
    model.state_dict()["embedding_bags.t_user.weight"].gather(out=torch.zeros(3, 4))


@situation("An ambiguous name of a table")
def same_name(one_rank: None) -> None:
    towers = {name: sharded(collection(bag("t_id"))) for name in ("user", "item")}
    export_dense_weights(nn.ModuleDict(towers), "t_id", 3)


@situation("Ids of a feature that are not integers")
def float_features(one_rank: None) -> None:
    sharded(collection(bag("t_user", features=["user"])))(batch(torch.float32, user=[[1, 2]]))


@situation("Constraints for a table that the model does not have")
def unknown_constraints(one_rank: None) -> None:
    constraints: dict[str, ParameterConstraints] = {"t_usr": RecStoreConstraints()}
    sharded(collection(bag("t_user")), constraints=constraints)


@situation("Tables that do not fit into the memory of the ranks")
def too_large_tables(one_rank: None) -> None:
    constraints = {"t_user": RecStoreConstraints(options=TableOptions(expected_rows=300_000_000))}
    topology = Topology(world_size=1, compute_device="cpu", ddr_cap=4 * 2**30)
    RecStorePlanner(topology, constraints=constraints).plan(collection(bag("t_user")), [RecStoreSharder()])


@situation("A reshard of a table on TorchRec's kernel")
def resharding(one_rank: None) -> None:
    tables = collection(bag("t_user"), bag("t_city", features=["city"]))
    stock = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    model, other = (
        sharded(tables, constraints={"t_user": RecStoreConstraints(sharding_types=[kind]), "t_city": stock})
        for kind in ("table_wise", "row_wise")
    )
    reshard(model, other.plan)


@situation("A reshard of an EmbeddingCollection on TorchRec's kernels")
def resharding_of_stock_tables(one_rank: None) -> None:
    stock = {"t_item": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])}
    module = sharded(sequences(sequence("t_item")), constraints=stock).module
    module.update_shards({}, module.ranks_env, torch.device("cpu"))


@situation("Batches of varying size in an EmbeddingCollection")
def varying(one_rank: None) -> None:
    features = KeyedJaggedTensor(
        ["user", "item"],
        torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2]],
    )
    sharded(sequences(sequence("t_item", features=["user", "item"])))(features)


@situation("Weights of samples that require a gradient")
def learned_weights(one_rank: None) -> None:
    features = batch(user=[[1, 2]])
    weights = torch.ones(2, requires_grad=True)
    sharded(collection(bag("t_user", features=["user"]), is_weighted=True), sharding_type="row_wise")(
        KeyedJaggedTensor(["user"], features.values(), lengths=features.lengths(), weights=weights)
    )


@situation("Tables in a DMPCollection")
def replicas(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    model, sharders = collection(bag("t_user")), [RecStoreSharder()]
    plan = RecStorePlanner(topology=Topology(world_size=1, compute_device="cuda")).plan(model, sharders)
    DMPCollection(model, torch.device("cuda"), plan, 1, 1, dist.group.WORLD, sharders=sharders)


@situation("A tracking mode that needs optimizer state")
def tracked_without_a_state(one_rank: None) -> None:
    model = nn.Sequential(sharded(collection(bag("t_user")), optimizer=SGD(lr=0.1)).module, nn.Linear(4, 1))
    wrapped = DistributedModelParallel(model, sharders=[])
    wrapped.init_torchrec_delta_tracker(DeltaTrackerConfig(tracking_mode=TrackingMode.MOMENTUM_LAST))


@situation("Quantizing tables in place")
def quantized_in_place() -> None:
    quantize_dynamic(RecStoreEmbeddingBagCollection([bag("t_user", features=["user"])]))


@situation("A module that has no rows yet")
def on_meta() -> None:
    RecStoreEmbedding(10, 4, name="t_item", device="meta")(torch.arange(3))


@situation("DistributedDataParallel around eager tables")
def data_parallel(one_rank: None) -> None:
    model = nn.Sequential(RecStoreEmbedding(10, 4, name="t_item"), nn.Linear(4, 1))
    nn.parallel.DistributedDataParallel(model)(torch.arange(3))


@situation("Rows on another device")
def on_a_gpu() -> None:
    RecStoreEmbedding(10, 4, name="t_item", device="cuda")


@situation("max_norm of torch's modules")
def max_norm() -> None:
    RecStoreEmbedding(10, 4, name="t_item", max_norm=1.0)


@situation("A sparse optimizer over fused modules")
def fused_already() -> None:
    SparseSGD([RecStoreEmbedding(10, 4, name="t_item", optimizer=SGD(lr=0.1))], lr=0.1)


@situation("Gradients changed in place")
def zeroed_in_place() -> None:
    module = RecStoreEmbedding(10, 4, name="t_item", fused=False)
    optimizer = SparseSGD([module], lr=0.1)
    module(torch.arange(3)).sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


@situation("Weights of samples without mode='sum'")
def weighted_mean() -> None:
    bags = RecStoreEmbeddingBag(10, 4, name="t_item", mode="mean")
    bags(torch.arange(4).view(2, 2), per_sample_weights=torch.ones(2, 2))


@situation("A rank has died")
def a_rank_has_died(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/rendezvous"
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", init_method=method, rank=1, world_size=2)
        os._exit(1)
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=2)
    try:
        os.waitpid(child, 0)
        save_checkpoint(nn.Linear(1, 1), tmp_path / "checkpoint")
    finally:
        dist.destroy_process_group()


@situation("A state dict that does not fit")
def another_state_dict() -> None:
    state = RecStoreEmbedding(10, 8, name="t_item").state_dict()
    RecStoreEmbedding(10, 4, name="t_item").load_state_dict(state)


@situation("A reentrant checkpoint around a lookup")
def reentrant_checkpoint(one_rank: None) -> None:
    model = sharded(collection(bag("t_user")))
    scale = torch.ones(1, requires_grad=True)
    checkpoint(lambda given: model(batch(f=[[1]])).values() * given, scale, use_reentrant=True)


@situation("Copies of the saved tensors of a compiled lookup")
def copied_by_hooks(one_rank: None) -> None:
    with Table(4, name="t_user") as table:
        kernel = PooledKernel([table], [0], "sum")
        ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
        look_up = torch.compile(lambda: kernel(ids, offsets, train=True), backend="aot_eager")
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            pooled = look_up()
        pooled.sum().backward()


@situation("A graph in another process")
def graph_of_another_process() -> None:
    torch.ops.recstore_ops.kernel_read(2**40, None, torch.tensor([1]), torch.tensor([0, 1]), [], None)


@situation("`torch.export` of a model with RecStore tables")
def torch_export(one_rank: None) -> None:
    with Table(4, name="t_user") as table:
        kernel = PooledKernel([table], [0], "sum")

        class Model(nn.Module):
            def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
                pooled: Tensor = kernel(ids, offsets, train=False)
                return pooled

        torch.export.export(Model(), (torch.tensor([1, 2]), torch.tensor([0, 2])), strict=False)


@situation("A traced module that collects its gradients")
def traced_collection() -> None:
    rows = RecStoreEmbedding(10, 4, fused=False, name="user")
    make_fx(rows, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.tensor([1]))
