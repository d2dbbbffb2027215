"""Programs that train on a device and return what they have computed, on the host.

The same program runs on the CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.device import simulated
from torchrec_recstore import (
    LFU,
    Adagrad,
    Expiry,
    RecStoreConstraints,
    RecStoreEmbedding,
    RecStoreEmbeddingBag,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    RecStoreEmbeddingCollectionSharder,
    RecStoreFeatureProcessedEmbeddingBagCollectionSharder,
    RecStorePlanner,
    RecStoreSharder,
    RocksDBStore,
    TableOptions,
    load_checkpoint,
    save_checkpoint,
    table_stats,
)

DIM = 8
# bytes of the lengths of each key, which TorchRec's input distribution copies in each
# step
SMALL = 60
META = torch.device("meta")
Found = dict[str, Any]

_device_rows: list[int] = []
"""The ``device_rows`` of the tables of sharded models, if it is not empty."""


@contextmanager
def device_rows(rows: int) -> Iterator[None]:
    """The tables of sharded models have this number of rows on the device."""
    _device_rows.append(rows)
    try:
        yield
    finally:
        _device_rows.clear()


def bag_tables(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=DIM,
            num_embeddings=2**40,
            feature_names=features,
            pooling=pooling,
        )
        for name, features in (("user", ["u"]), ("item", ["i", "j"]))
    ]


def sequence_tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=f"t_{name}",
            embedding_dim=DIM,
            num_embeddings=2**40,
            feature_names=features,
        )
        for name, features in (("user", ["u"]), ("item", ["i", "j"]))
    ]


def batches(
    steps: int, device: torch.device, weighted: bool = False, distinct: int = 60
) -> Iterator[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(-(2**62), 2**62, (distinct,), generator=generator)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (3 * 5,), generator=generator)
        count = int(lengths.sum())
        yield KeyedJaggedTensor(
            ["u", "i", "j"],
            values=ids[torch.randint(0, distinct, (count,), generator=generator)],
            lengths=lengths,
            weights=torch.rand(count, generator=generator) if weighted else None,
        ).to(device)


def sharded(
    module: nn.Module,
    device: torch.device,
    options: TableOptions | None = None,
    **fused: Any,
) -> Any:
    params = {"learning_rate": 0.1, **fused}
    sharders: list[Any] = [
        RecStoreSharder(fused_params=params),
        RecStoreEmbeddingCollectionSharder(fused_params=params),
        RecStoreFeatureProcessedEmbeddingBagCollectionSharder(
            RecStoreSharder(fused_params=params)
        ),
    ]
    options = options or TableOptions()
    if _device_rows:
        options = replace(options, device_rows=_device_rows[0])
    constraints = {
        name: RecStoreConstraints(options=options) for name in ("t_user", "t_item")
    }
    planner = RecStorePlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    # gloo has no backend for the device, so that the dense part is not in
    # DistributedDataParallel.
    return DistributedModelParallel(
        module,
        plan=plan,
        sharders=sharders,
        device=device,
        init_data_parallel=False,
        init_parameters=False,
    )


def kernels(model: Any) -> list[Any]:
    return [
        kernel
        for kernels in model.module.sharding_kernels
        for kernel in kernels.kernels()
    ]


def host(value: Any) -> Any:
    """The value with all tensors on the host."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return (
        {key: host(each) for key, each in value.items()}
        if isinstance(value, dict)
        else value
    )


def outputs(out: Any) -> list[Tensor]:
    """The tensors of a KeyedTensor or of the JaggedTensors of a sequence collection."""
    return (
        [jagged.values() for jagged in out.values()]
        if isinstance(out, dict)
        else [out.values()]
    )


def trained(
    model: Any, steps: Iterator[KeyedJaggedTensor], eager: bool = False
) -> list[Tensor]:
    """Trains and returns the outputs of all steps."""
    seen = []
    for features in steps:
        out = outputs(model(features) if eager else model(features).wait())
        sum((each.float() * each.float()).sum() for each in out).backward()  # type: ignore[union-attr]
        seen += [host(each) for each in out]
    return seen


def pooled(device: torch.device, pooling: PoolingType, weighted: bool) -> Found:
    ebc = EmbeddingBagCollection(bag_tables(pooling), device=META, is_weighted=weighted)
    model = sharded(ebc, device)
    seen = trained(model, batches(5, device, weighted))
    return {"out": seen, "stats": dict(table_stats(model))}


def sequences(device: torch.device) -> Found:
    model = sharded(EmbeddingCollection(sequence_tables(), device=META), device)
    return {
        "out": trained(model, batches(5, device)),
        "stats": dict(table_stats(model)),
    }


def half_outputs(device: torch.device) -> Found:
    model = sharded(
        EmbeddingBagCollection(bag_tables(), device=META),
        device,
        output_dtype=DataType.FP16,
    )
    return {"out": trained(model, batches(5, device))}


def feature_processors(device: torch.device) -> Found:
    torch.manual_seed(0)
    processor = PositionWeightedModuleCollection(
        {"u": 4, "i": 4, "j": 4}, device=torch.device("cpu")
    )
    ebc = EmbeddingBagCollection(bag_tables(), device=META, is_weighted=True)
    model = sharded(FeatureProcessedEmbeddingBagCollection(ebc, processor), device)
    seen = trained(model, batches(5, device))
    gradients = {
        name: host(each.grad)
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    return {"out": seen, "grads": gradients, "stats": dict(table_stats(model))}


def variable_batches(device: torch.device) -> Found:
    model = sharded(EmbeddingBagCollection(bag_tables(), device=META), device)
    bags = [3, 5, 2]
    lengths = torch.tensor([2, 0, 1, 3, 1, 0, 2, 1, 1, 2])
    features = KeyedJaggedTensor(
        ["u", "i", "j"],
        values=torch.arange(int(lengths.sum())) * 31 - 5,
        lengths=lengths,
        stride_per_key_per_rank=[[n] for n in bags],
        inverse_indices=(
            ["u", "i", "j"],
            torch.stack([torch.arange(6) % n for n in bags]),
        ),
    ).to(device)
    seen = []
    for _ in range(4):
        out = model(features).wait().values()
        (out * out).sum().backward()
        seen.append(host(out))
    return {"out": seen, "stats": dict(table_stats(model))}


def copies_of_a_step(device: torch.device) -> Found:
    """The copies of a training step, and of one whose rows were prefetched: and bytes."""
    found = {}
    for name, fused in (("fp32", {}), ("fp16", {"output_dtype": DataType.FP16})):
        model = sharded(
            EmbeddingBagCollection(bag_tables(), device=META), device, **fused
        )
        (kernel,) = kernels(model)
        first, second, third = batches(3, device)
        trained(model, iter([first]))
        for step, features in (("step", second), ("prefetched", third)):
            if step == "prefetched":
                kernel.prefetch(features)
            simulated.copies.clear()
            out = model(features).wait().values()
            (out.float() * out.float()).sum().backward()
            bytes_of = {
                "ids": features.values().numel() * 8 + (15 + 1) * 8,
                "rows": out.numel() * out.element_size(),
            }
            found[f"{name} {step}"] = (
                [each for each in simulated.copies if each.bytes > SMALL],
                bytes_of,
            )
    model = sharded(
        EmbeddingBagCollection(bag_tables(), device=META, is_weighted=True), device
    )
    (features,) = batches(1, device, weighted=True)
    simulated.copies.clear()
    trained(model, iter([features]))
    found["weighted step"] = (
        # the last one is of the test
        [each for each in simulated.copies[:-1] if each.bytes > SMALL],
        {"ids": features.values().numel() * 12 + (15 + 1) * 8},
    )
    for name, eager, rows in (
        ("eager bags", RecStoreEmbeddingBagCollection(bag_tables()), 15),
        (
            "eager sequences",
            RecStoreEmbeddingCollection(sequence_tables()),
            features.values().numel(),
        ),
    ):
        simulated.copies.clear()
        sum(each.sum() for each in outputs(eager(features))).backward()  # type: ignore[union-attr]
        found[f"{name} step"] = (
            [each for each in simulated.copies if each.bytes > SMALL],
            {"ids": features.values().numel() * 8 + 15 * 8, "rows": rows * DIM * 4},
        )
    return found


def eager_bags(device: torch.device) -> Found:
    model = RecStoreEmbeddingBagCollection(bag_tables(), optimizer=Adagrad(lr=0.1))
    return {"out": trained(model, batches(5, device), eager=True)}


def eager_sequences(device: torch.device) -> Found:
    model = RecStoreEmbeddingCollection(sequence_tables(), optimizer=Adagrad(lr=0.1))
    return {"out": trained(model, batches(5, device), eager=True)}


def drop_ins(device: torch.device) -> Found:
    """The replacements of torch's modules, with what they do besides lookups."""
    found: Found = {}
    ids = torch.tensor([3, -1, 2**60, 3, 8, -1]).to(device)
    offsets = torch.tensor([0, 2, 3]).to(device)
    weights = torch.linspace(0.5, 2.0, 6).to(device).requires_grad_()
    modules: dict[str, Callable[[], Tensor]] = {
        "sum": partial(
            RecStoreEmbeddingBag(9, DIM, mode="sum", name="a"), ids, offsets
        ),
        "weighted": partial(
            RecStoreEmbeddingBag(9, DIM, mode="sum", name="b"), ids, offsets, weights
        ),
        "max": partial(
            RecStoreEmbeddingBag(9, DIM, mode="max", name="c"), ids, offsets
        ),
        "padded": partial(
            RecStoreEmbeddingBag(9, DIM, padding_idx=3, name="d", dtype=torch.float16),
            ids,
            offsets,
        ),
        "rows": partial(
            RecStoreEmbedding(9, DIM, padding_idx=8, name="e"), ids.view(2, 3)
        ),
    }
    for name, module in modules.items():
        found[name] = []
        for _ in range(3):
            out = module()
            (out.float() * out.float()).sum().backward()
            found[name].append(host(out))
    return {**found, "grad": host(weights.grad)}


def checkpoints(device: torch.device) -> Found:
    model = sharded(EmbeddingBagCollection(bag_tables(), device=META), device)
    trained(model, batches(5, device))
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, f"{folder}/one")
        fresh = sharded(EmbeddingBagCollection(bag_tables(), device=META), device)
        load_checkpoint(fresh, f"{folder}/one")
    fresh.eval()
    read = [host(fresh(features).wait().values()) for features in batches(2, device)]
    state = {
        name: each.local_shards()[0].tensor if each.local_shards() else None
        for name, each in fresh.state_dict().items()
        if not name.endswith(".weight_rows")
    }
    return {
        "read": read,
        "state": host(state),
        "stats": {k: v.rows for k, v in table_stats(fresh).items()},
    }


def bounds(device: torch.device, steps: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        options = TableOptions(
            max_rows=40,
            eviction=LFU(half_life_steps=20),
            cold_store=RocksDBStore(f"{folder}/cold"),
        )
        model = sharded(
            EmbeddingBagCollection(bag_tables(), device=META), device, options
        )
        cold = trained(model, batches(steps, device, distinct=300))[-3:]
        stats = dict(table_stats(model))
        for shard in (
            shard
            for shards in model.module.recstore_state.shards.values()
            for shard in shards
        ):
            shard.table.close()
    model = sharded(
        EmbeddingBagCollection(bag_tables(), device=META),
        device,
        TableOptions(expiry=Expiry(steps=7)),
    )
    expired = trained(model, batches(steps, device, distinct=300))[-3:]
    return {
        "cold": cold,
        "cold_stats": stats,
        "expired": expired,
        "stats": dict(table_stats(model)),
    }


SCENARIOS: dict[str, Callable[[torch.device], Found]] = {
    "sum": lambda device: pooled(device, PoolingType.SUM, False),
    "mean": lambda device: pooled(device, PoolingType.MEAN, False),
    "weighted": lambda device: pooled(device, PoolingType.SUM, True),
    "sequences": sequences,
    "half_outputs": half_outputs,
    "feature_processors": feature_processors,
    "variable_batches": variable_batches,
    "eager_bags": eager_bags,
    "eager_sequences": eager_sequences,
    "drop_ins": drop_ins,
    "checkpoints": checkpoints,
    "bounds": lambda device: bounds(device, 60),
    "long_bounds": lambda device: bounds(device, 1000),
    "copies_of_a_step": copies_of_a_step,
}
