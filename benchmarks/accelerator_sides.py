"""The sides of ``cuda.py``.

A side makes its tables and returns a function that runs training step ``i``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
from kernel import zipf
from torch import Tensor, nn

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.kernels.device_copies import CopyTarget
from torchrec_recstore.modules import RecStoreEmbeddingBag
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.store import Table

DENSE_FEATURES = 13
LEARNING_RATE = 0.01
Step = Callable[[int], None]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model and of a batch.

    Each bag has one id, and each table ``rows`` rows. Ids are uniform, or have Zipf's
    distribution.
    """

    tables: int
    dim: int
    batch_size: int
    rows: int
    device: torch.device
    has_zipf_ids: bool = False

    @property
    def batches(self) -> int:
        """The number of batches, which come again and again.

        There are many batches with Zipf's distribution, whose rare ids would otherwise
        be on the device when they come again.
        """
        return 64 if self.has_zipf_ids else 8


@dataclass(frozen=True)
class HostBatch:
    """A batch in host memory, which is pinned if the device is CUDA.

    Args:
        dense: (B, 13) float32.
        ids: (tables * B,) int64, feature by feature.
        labels: (B,) float32.
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor


class DensePart(nn.Module):
    """The dense layers of DLRM above embeddings of shape (B, tables, dim)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = _layers([DENSE_FEATURES, 512, 256, shape.dim])
        vectors = shape.tables + 1
        products = vectors * (vectors - 1) // 2
        # the logits have no activation
        self.top = _layers([shape.dim + products, 512, 512, 256, 1])[:-1]
        pairs = torch.triu_indices(vectors, vectors, 1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.to(shape.device)

    def forward(
        self,
        dense: Tensor,
        embeddings: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """Returns the loss, ()."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None], embeddings], 1)
        all_products = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = self.pairs
        products = all_products[:, first, second]
        top_inputs = torch.cat([bottom, products], 1)
        logits = self.top(top_inputs).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def _layers(sizes: list[int]) -> nn.Sequential:
    layers = nn.Sequential()
    for inputs, outputs in pairwise(sizes):
        layers.append(nn.Linear(inputs, outputs))
        layers.append(nn.ReLU())
    return layers


def batches(shape: Shape) -> list[HostBatch]:
    """Returns the batches, which are the same for each side."""
    generator = torch.Generator().manual_seed(1)
    num_ids = shape.tables * shape.batch_size
    host_batches = []
    for _ in range(shape.batches):
        dense = torch.rand(shape.batch_size, DENSE_FEATURES, generator=generator)
        if shape.has_zipf_ids:
            ranks = zipf(num_ids, generator, population=shape.rows)
            ids = ranks - 1
        else:
            ids = torch.randint(0, shape.rows, (num_ids,), generator=generator)
        clicks = torch.randint(0, 2, (shape.batch_size,), generator=generator)
        labels = clicks.float()
        if shape.device.type != "cpu":
            dense = dense.pin_memory()
            ids = ids.pin_memory()
            labels = labels.pin_memory()
        host_batches.append(HostBatch(dense, ids, labels))
    return host_batches


def _trained(shape: Shape, embeddings: Callable[[HostBatch], Tensor]) -> Step:
    """Returns the step of a model whose embeddings come from a function.

    The function returns (B, tables, dim) on the device.
    """
    part = DensePart(shape)
    host_batches = batches(shape)
    optimizer = torch.optim.SGD(part.parameters(), lr=LEARNING_RATE)

    def step(i: int) -> None:
        batch = host_batches[i % len(host_batches)]
        optimizer.zero_grad(set_to_none=True)
        dense = batch.dense.to(shape.device, non_blocking=True)
        labels = batch.labels.to(shape.device, non_blocking=True)
        loss = part(dense, embeddings(batch), labels)
        loss.backward()
        optimizer.step()

    return step


def dense_alone(shape: Shape) -> Step:
    """The dense part, above embeddings that are on the device.

    They get gradients and no update.
    """
    size = (shape.batch_size, shape.tables, shape.dim)
    rows = torch.randn(size, device=shape.device) * 0.01
    return _trained(shape, lambda batch: rows.detach().requires_grad_())


def _fill(table: Table, shape: Shape) -> None:
    ids = torch.randperm(shape.rows)
    for part in ids.split(1 << 20):
        table.lookup(part, train=True)


def kernel(shape: Shape) -> Step:
    """RecStore's group of tables with the ids of the host batch.

    The pooled rows are copied to the device.
    """
    return _trained_by_group(shape, device_rows=0)


def with_device_rows(percent: int) -> Callable[[Shape], Step]:
    """The same with a part of the rows on the device, where they are pooled and
    updated.
    """
    return lambda shape: _trained_by_group(shape, shape.rows * percent // 100)


def _trained_by_group(shape: Shape, device_rows: int) -> Step:
    tables = [
        Table(
            shape.dim,
            optimizer=RowWiseAdagrad(LEARNING_RATE),
            name=f"t{i}",
        )
        for i in range(shape.tables)
    ]
    for table in tables:
        _fill(table, shape)
    pooled = PooledGroup(tables, range(shape.tables), "sum")
    if device_rows:
        pooled.put_on_device(shape.device, [device_rows] * shape.tables)
    offsets = torch.arange(shape.tables * shape.batch_size + 1)
    to = None
    if shape.device.type != "cpu":
        to = CopyTarget(shape.device, torch.float32)

    def embeddings(batch: HostBatch) -> Tensor:
        out = pooled(
            batch.ids,
            offsets,
            None,
            train=True,
            to=to,
        )
        return out.view(shape.batch_size, shape.tables, shape.dim)

    return _trained(shape, embeddings)


def eager(shape: Shape) -> Step:
    """One ``RecStoreEmbeddingBag`` for each table, with ids on the device.

    A model that was moved to the device is like this.
    """
    bags = [
        RecStoreEmbeddingBag(
            shape.rows,
            shape.dim,
            mode="sum",
            optimizer=RowWiseAdagrad(LEARNING_RATE),
            name=f"t{i}",
        )
        for i in range(shape.tables)
    ]
    for bag in bags:
        _fill(bag.table, shape)

    def embeddings(batch: HostBatch) -> Tensor:
        ids = batch.ids.to(shape.device, non_blocking=True)
        ids_of_bags = ids.view(shape.tables, shape.batch_size, 1)
        pooled = []
        for bag, bag_ids in zip(bags, ids_of_bags, strict=True):
            pooled.append(bag(bag_ids))
        return torch.stack(pooled, 1)

    return _trained(shape, embeddings)


class _Model(nn.Module):
    """TorchRec's collection below the dense part.

    Takes a ``torchrec.datasets.utils.Batch``.
    """

    def __init__(self, shape: Shape, collection: nn.Module) -> None:
        super().__init__()
        self.ebc = collection
        self.part = DensePart(shape)
        self._shape = (shape.tables, shape.dim)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(batch.sparse_features).values()
        embeddings = pooled.view(-1, *self._shape)
        loss = self.part(batch.dense_features, embeddings, batch.labels)
        return loss, loss.detach()


def _torchrec(
    shape: Shape,
    compute_kernel: str | None,
) -> tuple[Any, torch.optim.Optimizer, list[Any]]:
    """Returns a sharded model, the optimizer of its dense part, and TorchRec's batches,
    on the host.

    Args:
        shape: The sizes.
        compute_kernel: TorchRec's compute kernel, or None for RecStore.
    """
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    model = _sharded_model(shape, compute_kernel)
    if compute_kernel is None:
        for table in model.module.ebc.recstore_tables():
            _fill(table, shape)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.SGD(dense.values(), lr=LEARNING_RATE)
    return model, optimizer, _torchrec_batches(shape)


def _torchrec_batches(shape: Shape) -> list[Any]:
    """Returns the batches as TorchRec's, on the host."""
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    names = [f"f{i}" for i in range(shape.tables)]
    lengths = torch.ones(shape.tables * shape.batch_size, dtype=torch.int32)
    torchrec_batches = []
    for host_batch in batches(shape):
        features = KeyedJaggedTensor(names, host_batch.ids, lengths=lengths)
        batch = Batch(host_batch.dense, features, host_batch.labels)
        if shape.device.type != "cpu":
            batch = batch.pin_memory()
        torchrec_batches.append(batch)
    return torchrec_batches


def _sharded_model(shape: Shape, compute_kernel: str | None) -> Any:
    """Returns the model with sharded tables; see :func:`_torchrec`."""
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.sharding_plan import (
        construct_module_sharding_plan,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan

    from torchrec_recstore import RecStorePlanner, RecStoreSharder

    tables = []
    for i in range(shape.tables):
        config = EmbeddingBagConfig(
            name=f"t_f{i}",
            embedding_dim=shape.dim,
            num_embeddings=shape.rows,
            feature_names=[f"f{i}"],
        )
        tables.append(config)
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    module = _Model(shape, collection)
    params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": LEARNING_RATE,
    }
    if compute_kernel is None:
        sharder: Any = RecStoreSharder(fused_params=params)
        topology = Topology(world_size=1, compute_device="cpu")
        planner = RecStorePlanner(topology=topology)
        plan = planner.collective_plan(module, [sharder], dist.group.WORLD)
    else:
        sharder = EmbeddingBagCollectionSharder(fused_params=params)
        placed = {}
        for table in tables:
            placed[table.name] = table_wise(rank=0, compute_kernel=compute_kernel)
        of_module = construct_module_sharding_plan(
            module.ebc,
            placed,
            sharder,
            local_size=1,
            world_size=1,
            device_type=shape.device.type,
        )
        plan = ShardingPlan({"ebc": of_module})
    return DistributedModelParallel(
        module,
        plan=plan,
        sharders=[sharder],
        device=shape.device,
    )


def sharded(compute_kernel: str | None) -> Callable[[Shape], Step]:
    """A model that TorchRec has sharded.

    It has RecStore tables, or a compute kernel of TorchRec.
    """

    def side(shape: Shape) -> Step:
        model, optimizer, host_batches = _torchrec(shape, compute_kernel)

        def step(i: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            host_batch = host_batches[i % len(host_batches)]
            batch = host_batch.to(shape.device, non_blocking=True)
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()

        return step

    return side


def pipeline(shape: Shape) -> Step:
    """RecStore tables in ``RecStorePrefetchPipeline``.

    It copies the batches to the device.
    """
    from torchrec_recstore import RecStorePrefetchPipeline

    model, optimizer, host_batches = _torchrec(shape, None)
    train_pipeline = RecStorePrefetchPipeline(model, optimizer, shape.device)
    endless = cycle(host_batches)
    return lambda i: train_pipeline.progress(endless)


SIDES: dict[str, Callable[[Shape], Step]] = {
    "kernel": kernel,
    "device_1": with_device_rows(1),
    "device_10": with_device_rows(10),
    "device_100": with_device_rows(100),
    "eager": eager,
    "recstore": sharded(None),
    "pipeline": pipeline,
    "fused": sharded("fused"),
    "fused_uvm": sharded("fused_uvm"),
    "fused_uvm_caching": sharded("fused_uvm_caching"),
}
