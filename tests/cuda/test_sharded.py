"""Sharded RecStore tables below a CUDA device, with TorchRec and FBGEMM's CUDA build."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec", reason="TorchRec is not installed", exc_type=ImportError)

from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineBase
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.device import Timeline, traced
from tests.cuda import CPU, CUDA, WITH_FBGEMM
from tests.device import scenarios
from tests.device.test_device import same
from tests.distributed.workers import run_in_processes
from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStorePrefetchPipeline, RecStoreSharder

BOTH = "cpu:gloo,cuda:nccl"
ON_CUDA = [pytest.param(CUDA, id="cuda", marks=WITH_FBGEMM)]
DEVICES = [pytest.param(CPU, id="cpu"), *ON_CUDA]
TO_THE_BIT: tuple[str, ...] = ("sum", "mean", "weighted", "sequences", "half_outputs", "eager_bags", "eager_sequences")
TO_THE_BIT += ("variable_batches", "checkpoints", "bounds")
PIPELINES = (TrainPipelineBase, TrainPipelineSparseDist, RecStorePrefetchPipeline)


@pytest.fixture
def group(device: torch.device, tmp_path: Path) -> Iterator[None]:
    """A process group of one rank: gloo for tensors on the host, and NCCL for those on the device."""
    from torchrec.distributed import comm

    backends = BOTH if device.type == "cuda" else "gloo"
    dist.init_process_group(backends, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    comm._INTRA_PG = comm._CROSS_PG = None


def test_the_scenarios_are_there() -> None:
    assert {*TO_THE_BIT, "feature_processors"} <= set(scenarios.SCENARIOS)


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("name", TO_THE_BIT)
def test_results_are_those_of_the_cpu(name: str, device: torch.device, group: None) -> None:
    scenario = scenarios.SCENARIOS[name]
    assert same(scenario(CPU), scenario(device))


@pytest.mark.parametrize("device", ON_CUDA)
def test_feature_processors(device: torch.device, group: None) -> None:
    """CUDA adds the gradients of the position weights in another order."""
    scenario = scenarios.SCENARIOS["feature_processors"]
    found, wanted = scenario(device), scenario(CPU)
    assert same(found["out"], wanted["out"])
    torch.testing.assert_close(found["grads"], wanted["grads"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [DataType.FP16, DataType.BF16])
def test_outputs_of_16_bits(dtype: DataType, device: torch.device, group: None) -> None:
    def trained(on: torch.device) -> list[Tensor]:
        ebc = EmbeddingBagCollection(scenarios.bag_tables(), device=scenarios.META)
        return scenarios.trained(scenarios.sharded(ebc, on, output_dtype=dtype), scenarios.batches(5, on))

    found = trained(device)
    assert {each.dtype for each in found} == {torch.float16 if dtype is DataType.FP16 else torch.bfloat16}
    assert same(found, trained(CPU))


class Scaled(nn.Module):
    """A collection and a dense part that multiplies its columns. Takes a batch and returns (loss, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(scenarios.bag_tables(), device=scenarios.META)
        self.scale = nn.Parameter(torch.ones(3 * scenarios.DIM))

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss = ((self.ebc(batch).values() * self.scale - 1) ** 2).mean()
        return loss, loss.detach()


def scaled(device: torch.device, sharding_type: str = "table_wise") -> tuple[Any, torch.optim.Optimizer]:
    sharders = [RecStoreSharder(fused_params={"learning_rate": 0.1})]
    constraints = {name: RecStoreConstraints(sharding_types=[sharding_type]) for name in ("t_user", "t_item")}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    module = Scaled()
    plan = RecStorePlanner(topology=topology, constraints=constraints).collective_plan(
        module, sharders, dist.group.WORLD
    )
    model = DistributedModelParallel(module, plan=plan, sharders=sharders, device=device)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert list(dense) == ["scale"]
    return model, torch.optim.SGD(dense.values(), lr=0.1)


def losses_of(device: torch.device, pipeline: Any = None, sharding_type: str = "table_wise") -> Tensor:
    """The losses of six steps, on the host, in a plain loop or in a pipeline that copies the batches to the device."""
    model, optimizer = scaled(device, sharding_type)
    batches = scenarios.batches(6, CPU)
    if pipeline is not None:
        trains = pipeline(model, optimizer, device)
        return torch.stack([trains.progress(batches).cpu() for _ in range(6)])
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, shown = model(batch.to(device))
        loss.backward()
        optimizer.step()
        losses.append(shown.cpu())
    return torch.stack(losses)


@pytest.mark.parametrize("device", DEVICES)
def test_pipelines_train_as_a_loop(device: torch.device, group: None) -> None:
    loop = losses_of(device)
    assert loop[-1] < loop[0]
    # TorchRec's own pipeline with prefetch needs streams.
    for kind in (*PIPELINES, *([PrefetchTrainPipelineSparseDist] if device.type == "cuda" else [])):
        assert torch.equal(losses_of(device, kind), loop), kind
    torch.testing.assert_close(loop, losses_of(CPU))


def on_two_ranks(rank: int, world_size: int, device: str, folder: str) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    own = torch.device(device, rank) if device == "cuda" else CPU
    if device == "cuda":
        torch.cuda.set_device(own)
    backends = BOTH if device == "cuda" else "gloo"
    dist.init_process_group(backends, init_method=f"file://{folder}/{device}", rank=rank, world_size=world_size)
    for sharding_type in ("table_wise", "row_wise"):
        found = [losses_of(own, kind, sharding_type) for kind in (None, TrainPipelineSparseDist)]
        assert torch.equal(*found)
        torch.testing.assert_close(found[0], losses_of(CPU, None, sharding_type))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, and the test needs two")
    run_in_processes(2, partial(on_two_ranks, device=device.type, folder=str(tmp_path)))


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.FP16])
def test_copies_and_waits_of_a_step(dtype: DataType, device: torch.device, group: None) -> None:
    """The ids go down once, the rows up once, and their gradients down once, from and to pinned memory."""
    ebc = EmbeddingBagCollection(scenarios.bag_tables(), device=scenarios.META)
    model = scenarios.sharded(ebc, device, output_dtype=dtype)
    (kernel,) = [each for lookup in model.module.lookups for each in lookup.kernels()]
    first, second, third = scenarios.batches(3, device)
    scenarios.trained(model, iter([first]))

    def step(features: KeyedJaggedTensor) -> Timeline:
        def run() -> None:
            out = model(features).wait().values()
            (out.float() * out.float()).sum().backward()

        return traced(run, device)

    def large(sizes: list[int]) -> list[int]:
        return sorted(size for size in sizes if size > scenarios.SMALL)

    rows = 5 * 3 * scenarios.DIM * (4 if dtype is DataType.FP32 else 2)
    seen = step(second)
    assert large(seen.down.sizes) == sorted([second.values().numel() * 8 + (15 + 1) * 8, rows])
    assert large(seen.up.sizes) == [rows]
    assert not {"cudaDeviceSynchronize", "cuCtxSynchronize"} & set(seen.waits)
    kernel.prefetch(third)
    seen = step(third)  # the prefetch has copied the ids
    assert large(seen.down.sizes) == [rows]
    assert large(seen.up.sizes) == [rows]


@pytest.mark.parametrize("device", ON_CUDA)
def test_recstore_waits_for_events_alone(device: torch.device, group: None) -> None:
    """TorchRec's own distribution of the ids is left out: it waits for streams."""
    model = scenarios.sharded(EmbeddingBagCollection(scenarios.bag_tables(), device=scenarios.META), device)
    (kernel,) = [each for lookup in model.module.lookups for each in lookup.kernels()]
    batches = list(scenarios.batches(3, device))
    for batch in batches:
        batch.offsets(), batch.length_per_key()  # TorchRec's own copies and waits

    def run() -> None:
        for features in batches:
            out = kernel(features)
            (out * out).sum().backward()

    run()
    seen = traced(run, device)
    assert set(seen.waits) == {"cudaEventSynchronize"}
    assert seen.up.pageable == seen.down.pageable == 0
