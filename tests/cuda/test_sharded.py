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
from torch import Tensor

pytest.importorskip(
    "torchrec", reason="TorchRec is not installed", exc_type=ImportError
)

from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.device import Timeline, traced
from tests.cuda.marks import CPU, CUDA, WITH_FBGEMM
from tests.device import scenarios, steps
from tests.device.scenarios import Found
from tests.device.streams import same
from tests.distributed.workers import run_in_processes
from tests.processes import START_METHOD
from torchrec_recstore import RecStoreConstraints, RecStorePlanner, RecStoreSharder

BOTH = "cpu:gloo,cuda:nccl"
ON_CUDA = [pytest.param(CUDA, id="cuda", marks=WITH_FBGEMM)]
DEVICES = [pytest.param(CPU, id="cpu"), *ON_CUDA]
TO_THE_BIT: tuple[str, ...] = (
    "sum",
    "mean",
    "weighted",
    "sequences",
    "half_outputs",
    "eager_bags",
    "eager_sequences",
)
TO_THE_BIT += ("variable_batches", "checkpoints", "bounds")


@pytest.fixture
def group(device: torch.device, tmp_path: Path) -> Iterator[None]:
    """A process group of one rank: gloo for tensors on the host, and NCCL for those on
    the device.
    """
    from torchrec.distributed import comm

    backends = BOTH if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backends, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
    comm._INTRA_PG = comm._CROSS_PG = None


def test_the_scenarios_are_there() -> None:
    assert {*TO_THE_BIT, "feature_processors"} <= set(scenarios.SCENARIOS)


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("name", TO_THE_BIT)
def test_results_are_those_of_the_cpu(
    name: str, device: torch.device, group: None
) -> None:
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
        return scenarios.trained(
            scenarios.sharded(ebc, on, output_dtype=dtype), scenarios.batches(5, on)
        )

    found = trained(device)
    assert {each.dtype for each in found} == {
        torch.float16 if dtype is DataType.FP16 else torch.bfloat16
    }
    assert same(found, trained(CPU))


@pytest.mark.parametrize("device", ON_CUDA)
def test_pipelines(
    device: torch.device, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense layer may differ from that of the CPU in the last bits.

    The pipelines of a device agree to the bit.
    """
    wanted = steps.pipelines(CPU)
    # TorchRec's own pipeline with prefetch needs the streams of CUDA.
    monkeypatch.setattr(
        steps, "PIPELINES", (*steps.PIPELINES, PrefetchTrainPipelineSparseDist)
    )
    found = steps.pipelines(device)
    plain = found["TrainPipelineBase"]
    for kind, each in found.items():
        assert same(each, plain), kind
        assert len(each["losses"]) == steps.STEPS
    _assert_close(plain, wanted["TrainPipelineBase"])


@pytest.mark.parametrize("device", ON_CUDA)
def test_learning_rates_and_reads_between_steps(
    device: torch.device, group: None
) -> None:
    found, wanted = steps.schedules(device), steps.schedules(CPU)
    assert found.keys() == wanted.keys()
    for accumulation, each in found.items():
        _assert_close(each, wanted[accumulation])


def _assert_close(found: Found, wanted: Found) -> None:
    """Ids and statistics are equal.

    Losses, weights and rows may differ in the last bits.
    """
    for key in ("ids", "stats"):
        assert same(found[key], wanted[key])
    for key in ("losses", "weight", "rows"):
        torch.testing.assert_close(found[key], wanted[key])


def losses_of(device: torch.device, sharding_type: str, pipeline: Any) -> Tensor:
    """The losses of a model that is sharded over all ranks, on the host."""
    sharders = [RecStoreSharder(fused_params={"learning_rate": 0.1})]
    constraints = {
        name: RecStoreConstraints(sharding_types=[sharding_type])
        for name in ("t_user", "t_item")
    }
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    module = steps.Model(device)
    plan = RecStorePlanner(topology=topology, constraints=constraints).collective_plan(
        module, sharders, dist.group.WORLD
    )
    model = DistributedModelParallel(
        module, plan=plan, sharders=sharders, device=device
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    trains = pipeline(model, torch.optim.SGD(dense.values(), lr=0.1), device)
    data = scenarios.batches(steps.STEPS, CPU)
    return torch.stack([trains.progress(data).cpu() for _ in range(steps.STEPS)])


def on_two_ranks(rank: int, world_size: int, device: str, folder: str) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    own = torch.device(device, rank) if device == "cuda" else CPU
    if device == "cuda":
        torch.cuda.set_device(own)
    backends = BOTH if device == "cuda" else "gloo"
    dist.init_process_group(
        backends,
        init_method=f"file://{folder}/{device}",
        rank=rank,
        world_size=world_size,
    )
    for sharding_type in ("table_wise", "row_wise"):
        found = [losses_of(own, sharding_type, kind) for kind in steps.PIPELINES]
        assert all(torch.equal(each, found[0]) for each in found)
        assert found[0][-1] < found[0][0]
        torch.testing.assert_close(
            found[0], losses_of(CPU, sharding_type, TrainPipelineBase)
        )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, and the test needs two")
    run = partial(on_two_ranks, device=device.type, folder=str(tmp_path))
    run_in_processes(
        2, run, start_method="spawn" if device.type == "cuda" else START_METHOD
    )


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.FP16])
def test_copies_and_waits_of_a_step(
    dtype: DataType, device: torch.device, group: None
) -> None:
    """The ids go down once, the rows up once, and their gradients down once, from and
    to pinned memory.
    """
    ebc = EmbeddingBagCollection(scenarios.bag_tables(), device=scenarios.META)
    model = scenarios.sharded(ebc, device, output_dtype=dtype)
    (kernel,) = scenarios.kernels(model)
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
    assert large(seen.down.sizes) == sorted(
        [second.values().numel() * 8 + (15 + 1) * 8, rows]
    )
    assert large(seen.up.sizes) == [rows]
    assert not {"cudaDeviceSynchronize", "cuCtxSynchronize"} & set(seen.waits)
    kernel.prefetch(third)
    seen = step(third)  # the prefetch has copied the ids
    assert large(seen.down.sizes) == [rows]
    assert large(seen.up.sizes) == [rows]


@pytest.mark.parametrize("device", ON_CUDA)
def test_recstore_waits_for_events_alone(device: torch.device, group: None) -> None:
    """TorchRec's own distribution of the ids is left out: it waits for streams."""
    model = scenarios.sharded(
        EmbeddingBagCollection(scenarios.bag_tables(), device=scenarios.META), device
    )
    (kernel,) = scenarios.kernels(model)
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
