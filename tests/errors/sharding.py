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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
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
    get_recstore_sharders,
    load_dense_weights,
    reshard,
    save_checkpoint,
)
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.options import shard_options
from torchrec_recstore.sharders import layout
from torchrec_recstore.store import Table

SGD_BY_PARAMS = {"optimizer": EmbOptimType.EXACT_SGD}


@situation(
    "ValueError",
    "RecStore table(s) 't_user': optimizer shampoo is not supported; supported are ...",
)
def unknown_optimizer(one_rank: None) -> None:
    sharded(collection(bag("t_user")), fused_params={"optimizer": EmbOptimType.SHAMPOO})


@situation(
    "ValueError",
    "RecStore table(s) 't_user': unknown key 'learning_rat' in fused_params",
)
def unknown_key(one_rank: None) -> None:
    """An unknown key in fused_params.

    Cause: the key is misspelled, or it is a setting of FBGEMM's GPU kernels. Fix:
    correct or remove the key.
    """
    sharded(
        collection(bag("t_user")), fused_params={**SGD_BY_PARAMS, "learning_rat": 0.1}
    )


@situation(
    "ValueError",
    "the sharder: optimizer=Adam(lr=0.1, betas=(0.9, 0.999), eps=1e-08,"
    " weight_decay=0.0) of the sharder disagrees with optimizer exact_sgd that"
    " fused_params or apply_optimizer_in_backward ask for",
)
def two_optimizers(one_rank: None) -> None:
    """Two optimizers for one table.

    Cause: the optimizer is set in two places, with different values. Fix: set it in one
    place.
    """
    sharded(
        collection(bag("t_user")), fused_params=SGD_BY_PARAMS, optimizer=Adam(lr=0.1)
    )


@situation(
    "ValueError",
    "RecStore table 't_user': data_type UINT8 is not supported, only FP32, FP16, BF16,"
    " INT8 are",
)
def unknown_rows(one_rank: None) -> None:
    sharded(collection(bag("t_user", data_type=DataType.UINT8)))


@situation(
    "ValueError",
    "RecStore table(s) 't_user': fused_params['stochastic_rounding'] = False is not"
    " supported for data_type INT8, because small updates would be lost: leave it out",
)
def rounded_to_nearest(one_rank: None) -> None:
    params = {**SGD_BY_PARAMS, "stochastic_rounding": False}
    sharded(collection(bag("t_user", data_type=DataType.INT8)), fused_params=params)


@situation(
    "ValueError",
    "RecStore table(s) 't_user': fused_params['state_dtype'] = torch.bfloat16 is not"
    " supported: only float32 and float16 are",
)
def bfloat16_state(one_rank: None) -> None:
    sharded(
        collection(bag("t_user")),
        fused_params={**SGD_BY_PARAMS, "state_dtype": torch.bfloat16},
    )


@situation(
    "ValueError",
    "table 't_user' is on TorchRec's kernel 'fused', which does not take state_dtype:"
    " leave it out of fused_params, or place the table in RecStore",
)
def stock_state(one_rank: None) -> None:
    stock = {
        "t_user": ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        )
    }
    sharded(
        collection(bag("t_user")),
        {**SGD_BY_PARAMS, "state_dtype": torch.float16},
        constraints=stock,
    )


@situation(
    "ValueError",
    "RecStore table(s) 't_user': fused_params['optimizer_state_dtypes'] = {'momentum1':"
    " <SparseType.FP16: 'fp16'>} is not supported, because all states of a table have"
    " one data type: name each of momentum1, momentum2 with the same",
)
def one_narrow_state(one_rank: None) -> None:
    params = {
        "optimizer": EmbOptimType.ADAM,
        "optimizer_state_dtypes": {"momentum1": SparseType.FP16},
    }
    sharded(collection(bag("t_user")), fused_params=params)


@situation(
    "ValueError",
    "RecStore table 't_user': init_fn initializes whole tables, but rows are created"
    " one at a time: set TableOptions.initializer, or the config's weight_init_min and"
    " weight_init_max",
)
def whole_tables(one_rank: None) -> None:
    sharded(collection(bag("t_user", init_fn=nn.init.zeros_)))


@situation(
    "ValueError",
    "RecStore table 't_user': use_virtual_table asks for TorchRec's own kernels: leave"
    " it out",
)
def virtual(one_rank: None) -> None:
    sharded(collection(bag("t_user", use_virtual_table=True)))


@situation(
    "ValueError",
    "RecStore table 't_user' with routing='hash' shares feature(s) ['user'] with table"
    " 't_history', whose ids are routed in another way: use routing='hash' and a"
    " row-wise sharding type for both tables or for neither",
)
def half_hashed(one_rank: None) -> None:
    options = {"t_user": TableOptions(routing="hash"), "t_history": TableOptions()}
    tables = collection(
        bag("t_user", features=["user"]), bag("t_history", features=["user"])
    )
    sharded(tables, options=options, sharding_type="row_wise")


@situation(
    "ValueError",
    "RecStore table 't_user': max_rows=1 is less than the 2 shards that its rows are"
    " split into: set max_rows to 2 or more",
)
def one_row_for_two_ranks() -> None:
    shard_options(TableOptions(max_rows=1), (2, 0), "t_user")


@situation(
    "ValueError",
    "RecStore table 't_user': embedding_dim must be at least 1, got 0",
)
def rows_without_columns(one_rank: None) -> None:
    model = collection(bag("t_user", dim=0))
    DistributedModelParallel(model, sharders=[RecStoreSharder()])


@situation(
    "AttributeError",
    "RecStoreSharder is a class, and sharders must be objects: pass"
    " sharders=[RecStoreSharder(...)], or sharders=get_recstore_sharders(...)",
)
def class_for_a_sharder(one_rank: None) -> None:
    DistributedModelParallel(collection(bag("t_user")), sharders=[RecStoreSharder])


@situation(
    "TypeError",
    "sharders must be a list of sharders, got the class RecStoreSharder in it: pass"
    " sharders=[RecStoreSharder(...)], or sharders=get_recstore_sharders(...)",
)
def class_for_a_sharder_of_the_planner(one_rank: None) -> None:
    planner = RecStorePlanner(Topology(world_size=1, compute_device="cpu"))
    planner.plan(collection(bag("t_user")), [RecStoreSharder])


@situation(
    "PlannerError",
    "table 't_user' is planned for RecStore, and the sharder of its"
    " EmbeddingBagCollection is TorchRec's EmbeddingBagCollectionSharder: pass"
    " sharders=[RecStoreSharder(...)], or sharders=get_recstore_sharders(...), to the"
    " planner and to DistributedModelParallel",
)
def planner_without_sharders(one_rank: None) -> None:
    RecStorePlanner(Topology(world_size=1, compute_device="cpu")).collective_plan(
        collection(bag("t_user", rows=2**40))
    )


@situation(
    "ValueError",
    "the plan places tables in RecStore, and TorchRec's own sharder got it: pass the"
    " sharders of the planner to DistributedModelParallel, too:"
    " DistributedModelParallel(model, plan=plan, sharders=sharders)",
)
def plan_without_sharders(one_rank: None) -> None:
    model = collection(bag("t_user"))
    planner = RecStorePlanner(Topology(world_size=1, compute_device="cpu"))
    plan = planner.plan(model, [RecStoreSharder()])
    DistributedModelParallel(model, plan=plan)


@situation("ValueError", "the model has no RecStore table 't_usr'; it has 't_user'")
def unknown_table(one_rank: None) -> None:
    load_dense_weights(sharded(collection(bag("t_user"))), {"t_usr": torch.ones(3, 4)})


@situation(
    "ValueError", "weights of table 't_user' must have the shape (rows, 4), got (3, 8)"
)
def other_dim(one_rank: None) -> None:
    load_dense_weights(sharded(collection(bag("t_user"))), {"t_user": torch.ones(3, 8)})


@situation(
    "RuntimeError",
    "table 't_user': a tensor of state_dict() has been written to, which changes no"
    " row, because it is a copy: load the written state with load_state_dict(...), or"
    " the weights of a sharded model with load_dense_weights; to keep the model"
    " unchanged, write to a clone",
)
def a_written_state(one_rank: None) -> None:
    model = sharded(collection(bag("t_user", ["user"])))
    load_dense_weights(model, {"t_user": torch.ones(3, 4)})
    model.state_dict()["embedding_bags.t_user.weight"].local_shards()[0].tensor.zero_()
    model(batch(user=[[1, 2]]))


@situation(
    "RuntimeError",
    "table 't_user': uniform_ would change no row, because its weight is an empty"
    " parameter and its rows are in RecStore: set initial rows with"
    " TableOptions(initializer=...), and write rows with load_state_dict or, if the"
    " model is sharded, with load_dense_weights; a loop over parameters, such as an"
    " average of weights, leaves tables out with `if parameter.numel()`",
)
def a_written_parameter(one_rank: None) -> None:
    sharded(collection(bag("t_user"))).apply(
        lambda module: [p.data.uniform_(-1, 1) for p in module.parameters()]
    )


@situation(
    "ValueError",
    "RecStore table 't_user' has 1 ids outside [0, 3), and row i of the gathered tensor"
    " is the row of id i: stock_state_dict(model, num_rows, leave_out=True) leaves"
    " these rows out; local_shards() and weight_id have all rows",
)
def gathered_into_few_rows(one_rank: None) -> None:
    model = sharded(collection(bag("t_user")))
    load_dense_weights(model, {"t_user": torch.ones(4, 4)})
    model.state_dict()["embedding_bags.t_user.weight"].gather(out=torch.zeros(3, 4))


@situation(
    "ValueError",
    "the model has 2 RecStore tables 't_id': name one of 'user.t_id', 'item.t_id'",
)
def same_name(one_rank: None) -> None:
    towers = {name: sharded(collection(bag("t_id"))) for name in ("user", "item")}
    export_dense_weights(nn.ModuleDict(towers), "t_id", 3)


@situation("TypeError", "ids must be integers, got torch.float32 for features ['user']")
def float_features(one_rank: None) -> None:
    sharded(collection(bag("t_user", features=["user"])))(
        batch(torch.float32, user=[[1, 2]])
    )


@situation(
    "PlannerError",
    "constraints for unknown table(s) 't_usr'; the model's tables are 't_user'",
)
def unknown_constraints(one_rank: None) -> None:
    constraints: dict[str, ParameterConstraints] = {"t_usr": RecStoreConstraints()}
    sharded(collection(bag("t_user")), constraints=constraints)


def _two_kinds() -> nn.ModuleDict:
    item = sequence("t_item", dim=8, rows=2**50)
    return nn.ModuleDict({"bags": collection(bag("t_user")), "clicks": sequences(item)})


@situation(
    "PlannerError",
    "no sharder takes module 'clicks' (EmbeddingCollection) with table(s) 't_item', so"
    " that each rank would allocate 't_item' as a dense parameter of 33,554,432.0 GiB:"
    " pass get_recstore_sharders(...), which has a RecStoreEmbeddingCollectionSharder,"
    " as the sharders of the planner and of DistributedModelParallel",
)
def collection_without_sharder(one_rank: None) -> None:
    RecStorePlanner(Topology(world_size=1, compute_device="cpu")).plan(
        _two_kinds(), [RecStoreSharder()]
    )


@situation(
    "RuntimeError",
    "... DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 36028797018963968 ...",
)
def collection_without_sharder_in_a_plan(one_rank: None) -> None:
    """`DistributedModelParallel` cannot allocate the bytes of `num_embeddings` rows.

    Cause: neither the plan nor the sharders have a collection of the model, such as an
    `EmbeddingCollection` with `sharders=[RecStoreSharder()]`, so that TorchRec
    allocates its tables as dense parameters. A table that fits into memory is trained
    as a dense parameter, without an error. Fix: pass `get_recstore_sharders(...)` to
    the planner and to `DistributedModelParallel`.
    """
    model = _two_kinds()
    plan = RecStorePlanner(Topology(world_size=1, compute_device="cpu")).plan(
        model["bags"], [RecStoreSharder()]
    )
    DistributedModelParallel(
        model, sharders=[RecStoreSharder()], plan=ShardingPlan({"bags": plan.plan[""]})
    )


@situation(
    "KeyError", "<class 'torchrec.modules.embedding_modules.EmbeddingCollection'>"
)
def sharder_of_a_plan_is_missing(one_rank: None) -> None:
    """The class of a collection, as a `KeyError` of `DistributedModelParallel`.

    Cause: the plan has a collection of this class, because the planner got other
    sharders than `DistributedModelParallel`. Fix: pass the same sharders to both, such
    as those of `get_recstore_sharders(...)`.
    """
    model = _two_kinds()
    plan = RecStorePlanner(Topology(world_size=1, compute_device="cpu")).plan(
        model, get_recstore_sharders()
    )
    DistributedModelParallel(model, sharders=[RecStoreSharder()], plan=plan)


@situation(
    "RuntimeError",
    "No available sharding type and compute kernel combination after applying user"
    " provided constraints for t_user. ...",
)
def stock_tables_of_the_stock_planner(one_rank: None) -> None:
    """The constraints of a table name no kernel of RecStore, in TorchRec's planner.

    Cause: with `EmbeddingShardingPlanner`, a `RecStoreSharder` offers RecStore's kernel
    only, which has no `data_parallel` sharding. Fix: use `RecStorePlanner`, which places
    a table with `data_parallel`, or with kernels of TorchRec, outside of RecStore. Or
    leave `compute_kernels` out and set `sharding_types` to those of RecStore, which
    places the table in RecStore.
    """
    constraints = {"t_user": ParameterConstraints(sharding_types=["data_parallel"])}
    topology = Topology(world_size=1, compute_device="cpu")
    EmbeddingShardingPlanner(topology, constraints=constraints).plan(
        collection(bag("t_user")), [RecStoreSharder()]
    )


@situation(
    "PlannerError",
    "table 't_user' needs at least 13.411 GiB of host memory (DDR) on a rank, and a"
    " rank has 4.000 GiB ...",
)
def too_large_tables(one_rank: None) -> None:
    """Tables that do not fit into the memory of the ranks.

    Cause: the planner found no plan, because of the table and the memory in the first
    lines of the message. TorchRec's own message follows. The memory is that of the
    topology, `ddr_cap` and `hbm_cap`, without TorchRec's reservation for the dense
    part. Fix: use more ranks, allow `row_wise` sharding, or limit the table with
    `TableOptions(max_rows=..., eviction=...)`. Correct `expected_rows` or the topology
    if the bytes are not those of your table or machine.
    """
    constraints = {
        "t_user": RecStoreConstraints(options=TableOptions(expected_rows=300_000_000))
    }
    topology = Topology(world_size=1, compute_device="cpu", ddr_cap=4 * 2**30)
    RecStorePlanner(topology, constraints=constraints).plan(
        collection(bag("t_user")), [RecStoreSharder()]
    )


@situation(
    "ValueError",
    "reshard: table 't_city' is on TorchRec's kernel 'fused', whose rows cannot move in"
    " place: place it in a collection of its own, whose plan does not change, or load a"
    " checkpoint into a model with the new plan",
)
def resharding(one_rank: None) -> None:
    tables = collection(bag("t_user"), bag("t_city", features=["city"]))
    stock = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused"]
    )
    model, other = (
        sharded(
            tables,
            constraints={
                "t_user": RecStoreConstraints(sharding_types=[kind]),
                "t_city": stock,
            },
        )
        for kind in ("table_wise", "row_wise")
    )
    reshard(model, other.plan)


@situation(
    "ValueError",
    "reshard: a train pipeline of TorchRec has distributed batches for the tables"
    " ['t_user'] with the old plan, and keeps them when it is detached: train these"
    " batches first, by pipeline.progress(iter(())) until it raises StopIteration, and"
    " detach it again; or use RecStorePrefetchPipeline, which distributes them again",
)
def resharding_in_a_pipeline(one_rank: None) -> None:
    model, other = (
        sharded(collection(bag("t_user")), sharding_type=kind)
        for kind in ("table_wise", "row_wise")
    )
    module = model.module
    context = module.create_context()
    begun = module.input_dist(context, batch(f=[[1, 2]]))
    assert begun is not None
    reshard(model, other.plan)


@situation(
    "NotImplementedError",
    "the tables ['t_item'] are on TorchRec's own kernels, and TorchRec cannot reshard"
    " an EmbeddingCollection in place: load a checkpoint into a model with the new"
    " plan",
)
def resharding_of_stock_tables(one_rank: None) -> None:
    stock = {
        "t_item": ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused"]
        )
    }
    module = sharded(sequences(sequence("t_item")), constraints=stock).module
    module.update_shards({}, module.ranks_env, torch.device("cpu"))


@situation(
    "NotImplementedError",
    "RecStore tables ['t_item']: an EmbeddingCollection cannot train on batches of"
    " varying size: TorchRec has no gradient for it on CPU; give all features the same"
    " batch size",
)
def varying(one_rank: None) -> None:
    features = KeyedJaggedTensor(
        ["user", "item"],
        torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2]],
    )
    sharded(sequences(sequence("t_item", features=["user", "item"])))(features)


@situation(
    "NotImplementedError",
    "RecStore table 't_user': the weights of feature(s) 'user' require a gradient,"
    " which TorchRec's input distribution does not carry (row_wise on 1 rank(s)): shard"
    " all tables of the collection table_wise, use a"
    " FeatureProcessedEmbeddingBagCollection, which makes weights after it, or detach"
    " the weights",
)
def learned_weights(one_rank: None) -> None:
    features = batch(user=[[1, 2]])
    weights = torch.ones(2, requires_grad=True)
    sharded(
        collection(bag("t_user", features=["user"]), is_weighted=True),
        sharding_type="row_wise",
    )(
        KeyedJaggedTensor(
            ["user"], features.values(), lengths=features.lengths(), weights=weights
        )
    )


@situation(
    "NotImplementedError",
    "RecStore table(s) 't_user': DMPCollection would not average their replicas, which"
    " would drift apart: use DistributedModelParallel, which shards tables over all"
    " ranks and replicates the other layers, or TorchRec's own kernels",
)
def replicas(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    model, sharders = collection(bag("t_user")), [RecStoreSharder()]
    plan = RecStorePlanner(topology=Topology(world_size=1, compute_device="cuda")).plan(
        model, sharders
    )
    DMPCollection(
        model, torch.device("cuda"), plan, 1, 1, dist.group.WORLD, sharders=sharders
    )


@situation(
    "ValueError",
    "RecStore table(s) 't_user': the tracking mode MOMENTUM_LAST needs an optimizer"
    " with a state, such as RowWiseAdagrad, and SGD(...) has none: track by ID_ONLY"
    " instead",
)
def tracked_without_a_state(one_rank: None) -> None:
    model = nn.Sequential(
        sharded(collection(bag("t_user")), optimizer=SGD(lr=0.1)).module,
        nn.Linear(4, 1),
    )
    wrapped = DistributedModelParallel(model, sharders=[])
    wrapped.init_torchrec_delta_tracker(
        DeltaTrackerConfig(tracking_mode=TrackingMode.MOMENTUM_LAST)
    )


@situation(
    "NotImplementedError",
    "RecStoreEmbeddingBagCollection cannot be quantized in place:"
    " torchrec_recstore.inference.export_for_inference returns a copy of the model with"
    " static, quantized tables; to quantize only other layers, pass the model and their"
    " types, or set the table module's qconfig to None",
)
def quantized_in_place() -> None:
    tables = RecStoreEmbeddingBagCollection([bag("t_user", features=["user"])])
    quantize_dynamic(nn.Sequential(tables), {RecStoreEmbeddingBagCollection})


@situation(
    "RuntimeError",
    "table 't_item' is on the meta device and has no rows: to_empty(device='cpu') makes"
    " it an empty table",
)
def on_meta() -> None:
    RecStoreEmbedding(10, 4, name="t_item", device="meta")(torch.arange(3))


@situation(
    "RuntimeError",
    "table(s) 't_item': DistributedDataParallel cannot keep the rows of eager modules"
    " equal on all ranks: shard the model with RecStoreSharder and"
    " DistributedModelParallel",
)
def data_parallel(one_rank: None) -> None:
    model = nn.Sequential(RecStoreEmbedding(10, 4, name="t_item"), nn.Linear(4, 1))
    nn.parallel.DistributedDataParallel(model)(torch.arange(3))


@situation(
    "ValueError",
    "device must be cpu or meta, got cuda: rows are in host memory; input on another"
    " device is copied to the CPU, and the output is copied back",
)
def on_a_gpu() -> None:
    RecStoreEmbedding(10, 4, name="t_item", device="cuda")


@situation(
    "ValueError",
    "max_norm=1.0 is not supported, since lookups do not change rows:"
    " optimizer=RowWiseAdagrad(max_norm=...) bounds them in their updates",
)
def max_norm() -> None:
    RecStoreEmbedding(10, 4, name="t_item", max_norm=1.0)


@situation(
    "ValueError",
    "RecStoreEmbedding(10, 4) updates its rows in backward: make it with fused=False"
    " for a sparse optimizer",
)
def fused_already() -> None:
    SparseSGD([RecStoreEmbedding(10, 4, name="t_item", optimizer=SGD(lr=0.1))], lr=0.1)


@situation(
    "ValueError",
    "table 't_item': weight.grad has been changed in place, as"
    " zero_grad(set_to_none=False), clip_grad_norm_ and GradScaler do: weight.grad does"
    " not hold the collected gradients. Zero them with zero_grad()",
)
def zeroed_in_place() -> None:
    """Gradients changed in place.

    Cause: the gradients of rows are not in `weight.grad`, which only marks that there
    are gradients. Fix: exclude these modules from clipping and scaling. The optimizers
    have `max_gradient` and `max_gradient_norm`.
    """
    module = RecStoreEmbedding(10, 4, name="t_item", fused=False)
    optimizer = SparseSGD([module], lr=0.1)
    module(torch.arange(3)).sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


@situation(
    "NotImplementedError",
    "per_sample_weights require mode='sum', as in torch, got mode='mean'",
)
def weighted_mean() -> None:
    bags = RecStoreEmbeddingBag(10, 4, name="t_item", mode="mean")
    bags(torch.arange(4).view(2, 2), per_sample_weights=torch.ones(2, 2))


@situation("RuntimeError", "a rank of the job has died: rank 1: ...")
def a_rank_has_died(tmp_path: Path) -> None:
    """A rank has died.

    Cause: another process of the job was killed or has failed. Its own log contains the
    reason. Fix: start the job again from its last checkpoint, as `torchrun
    --max-restarts` does.
    """
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


@situation(
    "RuntimeError",
    "Error(s) in loading state_dict for RecStoreEmbedding: While loading the rows of"
    " weight: ...",
)
def another_state_dict() -> None:
    """A state dict that does not fit.

    Cause: the state belongs to a table with another dim or optimizer. Torch collects
    such errors in one message. Fix: load the state into a module with the same dim and
    optimizer.
    """
    state = RecStoreEmbedding(10, 8, name="t_item").state_dict()
    RecStoreEmbedding(10, 4, name="t_item").load_state_dict(state)


@situation(
    "RuntimeError",
    "tables t_user: a reentrant checkpoint runs its first forward without grad, so that"
    " ids without a row do not get one: use torch.utils.checkpoint.checkpoint(...,"
    " use_reentrant=False); another autograd function has to get the rows as an"
    " argument",
)
def reentrant_checkpoint(one_rank: None) -> None:
    model = sharded(collection(bag("t_user")))
    scale = torch.ones(1, requires_grad=True)
    checkpoint(
        lambda given: model(batch(f=[[1]])).values() * given, scale, use_reentrant=True
    )


@situation(
    "ValueError",
    "tables t_user: no open pass has the handle ...: the graph of the lookup was freed,"
    " or a saved-tensor hook replaced what a compiled lookup saved by a copy",
)
def copied_by_hooks(one_rank: None) -> None:
    """Copies of the saved tensors of a compiled lookup.

    Cause: a compiled lookup ran in `torch.autograd.graph.saved_tensors_hooks` with
    hooks that copy tensors, such as `save_on_cpu()`. No row has changed. Fix: put the
    hooks around the dense part only, or run the lookup in eager mode.
    """
    with Table(4, name="t_user") as table:
        group = PooledGroup([table], [0], "sum")
        ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
        look_up = torch.compile(
            lambda: group(ids, offsets, train=True), backend="aot_eager"
        )
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            pooled = look_up()
        pooled.sum().backward()


@situation(
    "ValueError",
    "no group of this process has the handle ...: a graph with RecStore tables runs"
    " only in the process that made it, and only as long as its model lives; use"
    " export_for_inference for other processes",
)
def graph_of_another_process() -> None:
    torch.ops.recstore_ops.graph_read(
        2**40, None, torch.tensor([1]), torch.tensor([0, 1]), [], None
    )


@situation(
    "NotImplementedError",
    "tables t_user: torch.export cannot hold the rows of RecStore tables in its"
    " program: export the model that torchrec_recstore.inference.export_for_inference"
    " returns",
)
def torch_export(one_rank: None) -> None:
    with Table(4, name="t_user") as table:
        group = PooledGroup([table], [0], "sum")

        class Model(nn.Module):
            def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
                pooled: Tensor = group(ids, offsets, train=False)
                return pooled

        torch.export.export(
            Model(), (torch.tensor([1, 2]), torch.tensor([0, 2])), strict=False
        )


@situation(
    "NotImplementedError",
    "table(s) 'user': modules with fused=False collect gradients in Python, which a"
    " traced graph does not contain: make the modules with fused=True, or trace the"
    " model without them",
)
def traced_collection() -> None:
    rows = RecStoreEmbedding(10, 4, fused=False, name="user")
    make_fx(rows, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.tensor([1]))


@situation(
    "ValueError",
    "RecStore table 't_user': full_state_dict=True gathers no table without rows, nor"
    " rows in several shards: save model.state_dict() with"
    " torch.distributed.checkpoint.save, and load it with"
    " torchrec_recstore.load_distributed_checkpoint(model, checkpoint_id)",
)
def full_state_of_several_shards(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "PIECE_ROWS", 1)
    model = sharded(collection(bag("t_user")))
    model(batch(f=[[1, 2]])).values().sum().backward()
    get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True))


@situation("ZeroDivisionError", "integer division or modulo by zero")
def full_state_without_rows(one_rank: None) -> None:
    """`full_state_dict=True` gathers a table that has no rows.

    Cause: torch divides by the number of rows. Fix: save `model.state_dict()` with
    `torch.distributed.checkpoint.save`, and load it with
    `load_distributed_checkpoint(model, checkpoint_id)`.
    """
    get_model_state_dict(
        sharded(collection(bag("t_user"))).module,
        options=StateDictOptions(full_state_dict=True),
    )


@situation(
    "RuntimeError",
    "table 't_user': __getitem__ would read no row, because its weight is an empty"
    " parameter and its rows are in RecStore: read rows in state_dict() or, if the"
    " model is sharded, with export_dense_weights; a loop over parameters, such as a"
    " norm of weights, leaves tables out with `if parameter.numel()`",
)
def row_of_a_parameter(one_rank: None) -> None:
    sharded(collection(bag("t_user"))).module.embedding_bags["t_user"].weight[3]
