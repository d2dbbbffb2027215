"""Programs that read or replace the rows of tables on the host between training steps,
while some of the rows are newer on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode
from torchrec.distributed.planner import Topology

from tests.device.scenarios import META, Found, bag_tables, batches, host, sharded
from tests.device.steps import build
from torchrec_recstore import (
    RecStoreConstraints,
    RecStorePlanner,
    TableOptions,
    apply_delta,
    async_save,
    export_dense_weights,
    load_checkpoint,
    load_dense_weights,
    reset_rows,
    reshard,
    save_checkpoint,
    stock_state_dict,
    table_stats,
)
from torchrec_recstore.inference import export_for_inference
from torchrec_recstore.store import Table

STEPS = 5
DENSE_ROWS = 50
TABLES = ("t_user", "t_item")
Model = Any


def new_model(device: torch.device) -> Model:
    ebc = EmbeddingBagCollection(bag_tables(), device=META)
    return sharded(ebc, device, optimizer=EmbOptimType.ADAM)


def small_batches(steps: int, device: torch.device) -> list[KeyedJaggedTensor]:
    """Returns batches with ids below DENSE_ROWS."""
    small = []
    for features in batches(steps, torch.device("cpu")):
        ids = features.values() % DENSE_ROWS
        lengths = features.lengths()
        small.append(
            KeyedJaggedTensor(features.keys(), ids, lengths=lengths).to(device)
        )
    return small


def train(model: Model, device: torch.device, first: int = 0) -> list[Tensor]:
    """Trains on a few batches from the number ``first`` on, and returns the outputs."""
    outputs = []
    for features in small_batches(first + STEPS, device)[first:]:
        out = model(features).wait().values()
        (out * out).sum().backward()
        outputs.append(host(out))
    return outputs


@contextmanager
def unsettled() -> Iterator[None]:
    """Calls of tables do not bring rows of the host up to date."""
    settled = Table._settled
    Table._settled = lambda table, ids: nullcontext()  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Table._settled = settled  # type: ignore[method-assign]


def rows_of(model: Model) -> dict[str, Any]:
    """Everything of the tables of a model."""
    found: dict[str, Any] = {}
    for table in model.module.recstore_tables():
        ids = table.ids()
        stats = table_stats(model)[table.name]
        found[table.name] = [ids, table.read_rows(ids), table.state().tensors(), stats]
    return found


def loaded(load: Callable[[Model], object]) -> dict[str, Any]:
    """The rows of a model of the CPU that has loaded something."""
    fresh = new_model(torch.device("cpu"))
    load(fresh)
    return rows_of(fresh)


def local(value: Any) -> Any:
    """A copy of a state, with the local tensor in the place of each sharded tensor."""
    if hasattr(value, "local_shards"):
        return [host(shard.tensor).clone() for shard in value.local_shards()]
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return host(value).clone() if isinstance(value, Tensor) else value


def state_dicts(model: Model, device: torch.device) -> Found:
    optimizer = model.fused_optimizer.state_dict()["state"]
    return {"model": local(model.state_dict()), "optimizer": local(optimizer)}


def full_checkpoint(model: Model, device: torch.device) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, f"{folder}/full")
        return loaded(lambda fresh: load_checkpoint(fresh, f"{folder}/full"))


def delta_checkpoint(model: Model, device: torch.device) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, f"{folder}/full")
        train(model, device, STEPS)
        save_checkpoint(model, f"{folder}/delta", delta_of=f"{folder}/full")
        found = loaded(lambda fresh: load_checkpoint(fresh, f"{folder}/delta"))
        other = new_model(device)
        train(other, device)
        apply_delta(other, f"{folder}/delta", strict=False)
        return {**found, "applied": rows_of(other)}


def save_beside_training(model: Model, device: torch.device) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        save = async_save(model, f"{folder}/full")
        train(model, device, STEPS)
        save.wait()
        return loaded(lambda fresh: load_checkpoint(fresh, f"{folder}/full"))


def dense_weights(model: Model, device: torch.device) -> Found:
    dense = {
        name: export_dense_weights(model, name, DENSE_ROWS).clone() for name in TABLES
    }
    stock = stock_state_dict(model, dict.fromkeys(TABLES, DENSE_ROWS))
    return {"dense": dense, "stock": local(stock)}


def exported_model(model: Model, device: torch.device) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, f"{folder}/full")
        exported = export_for_inference(model, dtype=torch.float32)
    (features,) = small_batches(1, torch.device("cpu"))
    out = exported(features)
    return {"out": out.values() if hasattr(out, "values") else out}


def calls_of_a_table(model: Model, device: torch.device) -> Found:
    """Each call of a table that reads or changes rows."""
    found: Found = {}
    ids = torch.arange(20)
    for table in model.module.recstore_tables():
        table.update(ids, torch.full((20, table.dim), 0.5))
        found[table.name] = [
            table.lookup(ids),
            table.lookup(ids, train=True),
            [part.rows for part in table.parts()],
        ]
    return found


def changed_plan(model: Model, device: torch.device, **constraint: Any) -> Found:
    """Rows move to tables of another plan, and are trained there."""
    options = replace(TableOptions(), **constraint.pop("options", {}))
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={
            name: RecStoreConstraints(options=options, **constraint) for name in TABLES
        },
    )
    module = EmbeddingBagCollection(bag_tables(), device=META)
    sharder = model._sharder_map[EmbeddingBagCollection]
    plan = planner.collective_plan(module, [sharder], dist.group.WORLD)
    reshard(model, plan)
    return {"out": train(model, device, STEPS), **rows_of(model)}


def replaced_rows(model: Model, device: torch.device) -> Found:
    """Rows that a load replaces are not those that are trained then."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, f"{folder}/full")
        state = model.state_dict()
        optimizer = model.fused_optimizer.state_dict()
        ways: dict[str, Callable[[], object]] = {
            "checkpoint": lambda: load_checkpoint(model, f"{folder}/full"),
            "state_dict": lambda: model.load_state_dict(state),
            "optimizer": lambda: model.fused_optimizer.load_state_dict(optimizer),
            "dense": lambda: load_dense_weights(
                model, dict.fromkeys(TABLES, torch.ones(30, 8))
            ),
            "step": lambda: model.fused_optimizer.set_optimizer_step(9),
            "reset": lambda: reset_rows(model),
        }
        for name, way in ways.items():
            found[name] = train(model, device, STEPS)
            way()
            found[f"{name}, then"] = train(model, device)
    return {**found, **rows_of(model)}


def evaluated(model: Model, device: torch.device) -> Found:
    model.eval()
    seen = []
    for features in small_batches(2, device):
        with torch.no_grad():
            seen.append(host(model(features).wait().values()))
    model.train()
    return {"seen": seen, "out": train(model, device, STEPS)}


def delta_tracker(model: Model, device: torch.device) -> Found:
    """TorchRec's tracker of ids reads the optimizer's states of the rows."""
    tracked, _ = build(device, optimizer=EmbOptimType.ADAM)
    # DistributedModelParallel makes it only for a module in DistributedDataParallel.
    tracker = ModelDeltaTrackerTrec(tracked, mode=TrackingMode.MOMENTUM_LAST)
    for features in small_batches(STEPS, device):
        tracked(features)[0].backward()
    # TorchRec makes the ids distinct with an operator that the device does not have.
    return {
        name: [[host(lookup.ids), host(lookup.states)] for lookup in lookups]
        for name, lookups in tracker.store.per_fqn_lookups.items()
    }


ROADS: dict[str, Callable[[Model, torch.device], Found]] = {
    "state_dicts": state_dicts,
    "full_checkpoint": full_checkpoint,
    "delta_checkpoint": delta_checkpoint,
    "save_beside_training": save_beside_training,
    "dense_weights": dense_weights,
    "exported_model": exported_model,
    "calls_of_a_table": calls_of_a_table,
    "fewer_device_rows": partial(changed_plan, options={"device_rows": 5}),
    "no_device_rows": partial(changed_plan, options={"device_rows": 0}),
    "row_wise": partial(
        changed_plan, sharding_types=["row_wise"], options={"device_rows": 14}
    ),
    "column_wise": partial(
        changed_plan,
        sharding_types=["column_wise"],
        min_partition=4,
        options={"device_rows": 14},
    ),
    "replaced_rows": replaced_rows,
    "evaluated": evaluated,
    "delta_tracker": delta_tracker,
}
"""What is done with a model that has been trained."""


def program(name: str, device: torch.device, *, settles: bool = True) -> Found:
    """Trains a model, and takes a road."""
    model = new_model(device)
    found = {"before": train(model, device)}
    with nullcontext() if settles else unsettled():
        found.update(ROADS[name](model, device))
    return found
