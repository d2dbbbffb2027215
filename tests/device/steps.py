"""Programs that train a model with dense layers on a device, and what happens there in
which order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineSparseDistLite,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.device import scenarios, streams
from tests.device.scenarios import DIM, META, Found, batches, host, sharded
from torchrec_recstore import (
    LRU,
    RecStorePrefetchPipeline,
    RocksDBStore,
    TableOptions,
    table_stats,
)

STEPS = 6
PIPELINES = (
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
    RecStorePrefetchPipeline,
)


class Model(nn.Module):
    """Two groups of tables, because their pooling differs, below a dense layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name="t_user",
                embedding_dim=DIM,
                num_embeddings=2**40,
                feature_names=["u"],
            ),
            EmbeddingBagConfig(
                name="t_item",
                embedding_dim=DIM,
                num_embeddings=2**40,
                feature_names=["i", "j"],
                pooling=PoolingType.MEAN,
            ),
        ]
        self.ebc = EmbeddingBagCollection(tables, device=META)
        weight = torch.rand(3 * DIM, 1, generator=torch.Generator().manual_seed(3))
        self.weight = nn.Parameter(weight.to(device))

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss = ((self.ebc(batch).values() @ self.weight - 1) ** 2).mean()
        return loss, loss.detach()


class MarkedSGD(torch.optim.SGD):
    """The optimizer of the dense layer. It marks when it runs."""

    def step(self, closure: Any = None) -> None:
        streams.order.append(("mark", "dense optimizer"))
        super().step(closure)


def build(
    device: torch.device, options: TableOptions | None = None, **fused: Any
) -> tuple[Any, CombinedOptimizer]:
    model = sharded(Model(device), device, options, **fused)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert list(dense) == ["weight"]
    wrapped = KeyedOptimizerWrapper(dense, partial(MarkedSGD, lr=0.1, foreach=False))

    def mark(module: nn.Module, args: Any, out: Any) -> None:
        streams.order.append(("mark", "forward"))
        if out[0].requires_grad:
            out[0].register_hook(
                lambda grad: streams.order.append(("mark", "backward"))
            )

    model.register_forward_hook(mark)
    return model, CombinedOptimizer([model.fused_optimizer, ("dense", wrapped)])


def found_in(model: Any) -> Found:
    """The dense weights, the rows and the statistics of a model."""
    tables = {table.name: table for table in model.module.ebc.recstore_tables()}
    return {
        "weight": host(model.module.weight),
        "ids": {name: table.ids() for name, table in tables.items()},
        "rows": {name: table.lookup(table.ids()) for name, table in tables.items()},
        "stats": dict(table_stats(model)),
    }


def pipelines(device: torch.device) -> Found:
    """Losses and models of each pipeline."""
    found: Found = {}
    for kind in PIPELINES:
        model, optimizer = build(device)
        pipeline = kind(model, optimizer, device)
        data = iter([batch.to("cpu") for batch in batches(STEPS, torch.device("cpu"))])
        losses = [host(pipeline.progress(data)) for _ in range(STEPS)]
        found[kind.__name__] = {"losses": losses, **found_in(model)}
    return found


def schedules(device: torch.device) -> Found:
    """A loop that changes the learning rate and reads the table after backward, with
    and without accumulation.
    """
    found: Found = {}
    for accumulation in (1, 2):
        model, optimizer = build(device, recstore_accumulation_steps=accumulation)
        reads, losses = [], []
        for step, features in enumerate(batches(STEPS, device)):
            optimizer.zero_grad()
            loss, _ = model(features)
            loss.backward()
            if step == 2:  # the table is read between backward and the next forward
                table = next(iter(model.module.ebc.recstore_tables()))
                reads = [table.lookup(table.ids()), dict(table_stats(model))]
            optimizer.step()
            for group in model.fused_optimizer.param_groups:
                group["lr"] *= 0.5
            losses.append(host(loss))
        state = model.state_dict()
        rows = {
            name: state[name].local_shards()[0].tensor
            for name in state
            if name.endswith((".weight", "_id"))
        }
        model.eval()
        with torch.no_grad():
            losses += [host(model(features)[0]) for features in batches(2, device)]
        found[str(accumulation)] = {
            "reads": reads,
            "losses": losses,
            "state": host(rows),
            **found_in(model),
        }
    return found


def order_of_a_step(device: torch.device) -> Found:
    """What happens in two steps under the pipeline that prefetches, after the first
    steps.
    """
    model, optimizer = build(device)
    pipeline = RecStorePrefetchPipeline(model, optimizer, device)
    data = iter(list(batches(STEPS, device)))
    for _ in range(2):
        pipeline.progress(data)
    streams.order.clear()
    for _ in range(2):
        pipeline.progress(data)
        streams.order.append(("mark", "end of step"))
    return {"order": list(streams.order)}


def rows_before_backward(device: torch.device) -> Found:
    """Which ids of the next batch have a row when backward begins, and when cold rows
    are read, under the pipeline.
    """
    data = list(batches(STEPS, torch.device("cpu"), distinct=3000))
    model, optimizer = build(device)
    item = {table.name: table for table in model.module.ebc.recstore_tables()}["t_item"]
    ready: list[bool] = []

    def look(module: nn.Module, args: Any, out: Any) -> None:
        def next_rows(grad: Tensor) -> None:
            following = data[min(len(ready) + 1, STEPS - 1)]
            ready.append(
                bool(
                    item.contains(
                        torch.cat([following[name].values() for name in ("i", "j")])
                    ).all()
                )
            )

        out[0].register_hook(next_rows)

    model.register_forward_hook(look)
    pipeline = RecStorePrefetchPipeline(model, optimizer, device)
    of_data = iter(data)
    for _ in range(STEPS):
        pipeline.progress(of_data)

    with tempfile.TemporaryDirectory() as folder:
        bounded = TableOptions(
            max_rows=40, eviction=LRU(), cold_store=RocksDBStore(f"{folder}/cold")
        )
        model, optimizer = build(device, bounded)
        tables = list(model.module.ebc.recstore_tables())
        for table in tables:
            table.tier.store.get = partial(_marked, table.tier.store.get)
        pipeline = RecStorePrefetchPipeline(model, optimizer, device)
        of_data = iter(list(batches(40, torch.device("cpu"), distinct=90)))
        for step in range(40):
            if step == 10:
                streams.order.clear()
            pipeline.progress(of_data)
            streams.order.append(("mark", "end of step"))
        for table in tables:
            table.close()
    return {
        "ready": ready,
        "order": [entry[1] for entry in streams.order if entry[0] == "mark"],
    }


def prefetched_rows(device: torch.device) -> tuple[Found, dict[str, list[int]]]:
    """Losses and the model of the pipeline that prefetches, and the rows that each of
    its prefetches and lookups has copied to the device.
    """
    model, optimizer = build(device)
    arrivals: dict[str, list[int]] = {"prefetch": [], "training_lookup": []}
    of_ebc = model.module.ebc.sharding_kernels
    for kernel in [kernel for group in of_ebc for kernel in group.kernels()]:
        for name, counts in arrivals.items():
            _count_arrivals(kernel, name, counts)
    pipeline = RecStorePrefetchPipeline(model, optimizer, device)
    data = iter(list(batches(20, torch.device("cpu"), distinct=90)))
    losses = [host(pipeline.progress(data)) for _ in range(20)]
    return {"losses": losses, **found_in(model)}, arrivals


def _count_arrivals(kernel: Any, method: str, counts: list[int]) -> None:
    """Notes how many rows each call of a method of a kernel's rows on the device copies
    there.
    """
    rows = kernel._group.device_rows
    if rows is None:
        return
    call = getattr(rows, method)

    def counted(*args: Any) -> Any:
        with rows.lock:
            before = sum(table.stats().device_arrivals for table in kernel.tables)
            result = call(*args)
            after = sum(table.stats().device_arrivals for table in kernel.tables)
        counts.append(after - before)
        return result

    setattr(rows, method, counted)


def _marked(get: Callable[[Tensor], Any], ids: Tensor) -> Any:
    streams.order.append(("mark", "cold read"))
    return get(ids)


SCENARIOS: dict[str, Callable[[torch.device], Found]] = {
    **scenarios.SCENARIOS,
    "pipelines": pipelines,
    "schedules": schedules,
    "order_of_a_step": order_of_a_step,
    "rows_before_backward": rows_before_backward,
}
