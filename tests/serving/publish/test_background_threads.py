"""Training beside each thread of the package is equal to training alone, to the bit,
and so is the process's state.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import (
    RecStoreClient,
    RecStorePrefetchPipeline,
    RecStoreSharder,
    async_save,
)
from torchrec_recstore.checkpoint.background import is_saving
from torchrec_recstore.inference import DeltaPublisher, Follower
from torchrec_recstore_service.commands.scheduled_saves import Schedule
from torchrec_recstore_service.commands.server_process import ServerOptions, _serve
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_serving.predict.batching import Batcher
from torchrec_recstore_serving.predict.requests import JaggedArgument, request_of

from ...distributed.workers import run_on_ranks
from ..background_models import FEATURES, SCRIPTED, TRACED, OnServers, Sharded, batch
from .process_state import process_state

LEAST_STEPS = 20
MOST_S = 600


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    """Lets threads take turns a hundred times as often, so that a mistake shows.

    Training gets one thread of torch, so that the threads of low priority have a core
    for themselves.
    """
    interval = sys.getswitchinterval()
    threads = torch.get_num_threads()
    sys.setswitchinterval(interval / 100)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


@dataclass
class Outcome:
    """What a training leaves behind: its losses, dense parameters and rows, and torch's
    generator.
    """

    losses: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    generator: Tensor = field(default_factory=lambda: torch.empty(0))

    def assert_equals(self, other: Outcome) -> None:
        for place, (one, two) in enumerate(zip(self.losses, other.losses, strict=True)):
            assert torch.equal(one, two), f"the losses differ in step {place}"
        assert self.tensors.keys() == other.tensors.keys()
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name
        assert torch.equal(self.generator, other.generator), (
            "something has drawn from torch's default generator"
        )


class Beside:
    """What runs beside a training.

    Args:
        step: A function that the training calls after each step.
        done: A function that returns whether the threads have done enough.
    """

    def __init__(self, step: Callable[[], object], done: Callable[[], bool]) -> None:
        self.step = step
        self.done = done


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the dense parameters and the rows of a model."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach().clone()
    return tensors


def trained(
    make: Callable[[], nn.Module],
    beside: Callable[[nn.Module], AbstractContextManager[Beside]] | None = None,
    steps: int | None = None,
) -> Outcome:
    """Trains a model for a number of steps, or until what runs beside the training has
    done enough.
    """
    torch.manual_seed(0)
    model = make().train()
    outcome = Outcome()
    generator = torch.Generator().manual_seed(1)
    before = process_state()
    end = time.monotonic() + MOST_S
    with ExitStack() as stack:
        threads = None if beside is None else stack.enter_context(beside(model))
        while True:
            dense, features = batch(generator)
            loss = ((model(dense, features) - 1) ** 2).mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.numel() and parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
                        parameter.grad = None
            outcome.losses.append(loss.detach())
            if threads is not None:
                threads.step()
            assert process_state() == before
            if len(outcome.losses) == steps:
                break
            if (
                steps is None
                and len(outcome.losses) >= LEAST_STEPS
                and threads is not None
                and threads.done()
            ):
                break
            assert time.monotonic() < end, "the threads beside the training do nothing"
        outcome.tensors = state_of(model)
        outcome.generator = torch.get_rng_state()
    assert process_state() == before
    return outcome


@contextmanager
def publishing(
    model: nn.Module, place: Path, full_every_s: float = 0
) -> Iterator[Beside]:
    """Publishes after each step, if the publication before is complete."""
    with DeltaPublisher(
        model, place, every_s=0, full_every_s=full_every_s
    ) as publisher:
        writer = publisher._writer
        assert writer is not None
        yield Beside(publisher.step, lambda: writer._number >= 2)


@contextmanager
def two_publishers(model: nn.Module, place: Path) -> Iterator[Beside]:
    """Publishes to two places, with full exports at one of them."""
    with (
        publishing(model, place / "one") as one,
        publishing(model, place / "two", 1e6) as two,
    ):

        def step() -> None:
            one.step()
            two.step()

        yield Beside(step, lambda: one.done() and two.done())


@contextmanager
def following(model: nn.Module, place: Path) -> Iterator[Beside]:
    """Publishes, and follows in this process."""
    with publishing(model, place) as publisher, Follower(place) as follower:
        follower.start(0.005)

        def done() -> bool:
            return (
                publisher.done()
                and follower.state.fulls_loaded >= 1
                and follower.state.deltas_applied >= 1
            )

        yield Beside(publisher.step, done)


@contextmanager
def predicting(model: nn.Module, place: Path) -> Iterator[Beside]:
    """Publishes and follows, and two threads answer a request of each step."""
    with following(model, place) as followed, Follower(place) as follower:
        follower.start(0.005)
        batcher = Batcher(follower, {}, max_examples=64, threads=2)
        answers: list[Future[Any]] = []
        dense, features = batch(torch.Generator().manual_seed(5))
        bags = JaggedArgument(
            tuple(FEATURES),
            features.values(),
            features.lengths().view(len(FEATURES), -1),
        )

        def step() -> None:
            followed.step()
            if follower.version is not None:
                answers.append(
                    batcher.submit(request_of({"dense": dense, "features": bags}, {}))
                )

        def done() -> bool:
            return followed.done() and sum(answer.done() for answer in answers) >= 5

        try:
            yield Beside(step, done)
        finally:
            batcher.close()
        for answer in answers:
            assert answer.result().outputs["output"].shape == (len(dense), 1)


THREADS: dict[str, Callable[[nn.Module, Path], AbstractContextManager[Beside]]] = {
    "two_publishers": two_publishers,
    "follower": following,
    "predictor": predicting,
}
CASES = [
    ("single", "two_publishers"),
]
"""Trainings that are not slow tests."""
# The other models have no more than these: dlrm_projection has dlrm and the layers of
# towers, by_methods pooled, attention sequences, and many_ways the other traced ones.
SLOW_CASES = [
    ("deepfm", "predictor"),
    ("many_ways", "predictor"),
    ("dlrm_projection", "predictor"),
    ("by_methods", "predictor"),
    ("attention", "predictor"),
    # The requests of a predictor are merged, and this model has a fixed number of ids
    # in each bag.
    ("single", "follower"),
    ("two_of_one", "two_publishers"),
    ("dlrm_dcn", "predictor"),
    ("many_ways", "two_publishers"),
]


@pytest.mark.parametrize(
    ("name", "threads"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_training_beside_threads(name: str, threads: str, tmp_path: Path) -> None:
    make = {**SCRIPTED, **TRACED}[name]
    beside = trained(make, partial(THREADS[threads], place=tmp_path))
    trained(make, steps=len(beside.losses)).assert_equals(beside)


# Scheduled saves, in a server in the process that trains.


@contextmanager
def server_in_this_process(data: Path, every_s: float) -> Iterator[str]:
    """Runs a parameter server in a thread, which saves its tables on a schedule.

    Yields the address.
    """
    addresses: list[str] = []
    listens = threading.Event()
    stop = threading.Event()

    def ready(address: str) -> None:
        addresses.append(address)
        listens.set()

    directory = DataDirectory(data)
    options = ServerOptions(
        ListenOptions("127.0.0.1:0"), data, schedule=Schedule(every_s)
    )
    thread = threading.Thread(
        target=_serve, args=(options, directory, ready, stop), name="server"
    )
    thread.start()
    try:
        assert listens.wait(60)
        yield addresses[0]
    finally:
        stop.set()
        thread.join()
        directory.close()


def test_training_beside_scheduled_saves(tmp_path: Path) -> None:
    """A server in the process that trains saves its tables every few milliseconds."""
    saved = tmp_path / "saved"

    @contextmanager
    def saving(model: nn.Module) -> Iterator[Beside]:
        yield Beside(lambda: None, lambda: len([*saved.glob("scheduled-*")]) >= 1)

    with (
        server_in_this_process(saved, 0.02) as address,
        RecStoreClient([address]) as client,
    ):
        beside = trained(partial(OnServers, client), saving)
    with (
        server_in_this_process(tmp_path / "alone", 1e6) as address,
        RecStoreClient([address]) as client,
    ):
        trained(partial(OnServers, client), steps=len(beside.losses)).assert_equals(
            beside
        )


# Sharded models: the thread of the pipeline that prefetches, async_save, and a
# publisher.


def sharded_batches(rank: int) -> Iterator[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield batch(generator)[1]


def trained_sharded(rank: int, folder: Path | None, steps: int | None) -> Outcome:
    """Trains with a pipeline that prefetches; beside a publisher and async_save if
    there is a folder.
    """
    torch.manual_seed(0)
    sharders: Any = [RecStoreSharder(fused_params={"learning_rate": 0.1})]
    model = DistributedModelParallel(Sharded(), sharders=sharders)
    torch.manual_seed(rank)
    dense = {
        name: value
        for name, value in model.named_parameters()
        if "embedding" not in name
    }
    optimizer = torch.optim.SGD(dense.values(), lr=0.01)
    pipeline = RecStorePrefetchPipeline(model, optimizer, torch.device("cpu"))
    outcome = Outcome()
    batches = sharded_batches(rank)
    before = process_state()
    saves = 0
    with ExitStack() as stack:
        publisher = None
        if folder is not None:
            publisher = stack.enter_context(
                DeltaPublisher(model, folder / "published", every_s=0, full_every_s=0)
            )
        while len(outcome.losses) != steps:
            outcome.losses.append(pipeline.progress(batches))
            if folder is not None and publisher is not None:
                publisher.step()
                if len(outcome.losses) % 5 == 0 and all_agree(not is_saving()):
                    async_save(model, folder / f"checkpoint-{saves}")
                    saves += 1
                number = 0 if publisher._writer is None else publisher._writer._number
                if len(outcome.losses) >= LEAST_STEPS and all_agree(
                    saves >= 2 and (rank > 0 or number >= 2)
                ):
                    break
            assert process_state() == before
        outcome.generator = torch.get_rng_state()
        outcome.tensors = {
            name: value.detach().clone() for name, value in dense.items()
        }
        for module in model.modules():
            if hasattr(module, "recstore_state"):
                for name, table in module.recstore_state.tables.items():
                    for number, shard in enumerate(table.shards):
                        ids = shard.table.ids()
                        outcome.tensors[f"{name}-{number}-ids"] = ids
                        outcome.tensors[f"{name}-{number}-rows"] = shard.table.lookup(
                            ids, train=False
                        )
    assert process_state() == before
    return outcome


def all_agree(value: bool) -> bool:
    """Returns whether the value is true on every rank."""
    votes = torch.tensor([int(value)])
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes)


def sharded_beside_threads(rank: int, world_size: int, folder: Path) -> None:
    beside = trained_sharded(rank, folder, None)
    trained_sharded(rank, None, len(beside.losses)).assert_equals(beside)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_training_beside_threads(ranks: int, tmp_path: Path) -> None:
    """With the thread of the pipeline that prefetches, async_save and a publisher of a
    model that is traced.
    """
    run_on_ranks(ranks, partial(sharded_beside_threads, folder=tmp_path))
