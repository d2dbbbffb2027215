"""What happens to a train pipeline between and within its steps, beside a plain loop
over the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TorchCompileConfig,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelinePT2,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_recstore import RecStoreConstraints, RecStorePlanner, reshard
from torchrec_recstore.sharders import (
    RecStoreEmbeddingCollectionSharder,
    RecStorePrefetchPipeline,
    RecStoreSharder,
)

CPU = torch.device("cpu")
IDS = 50
BAGS = 6
TABLES = [
    EmbeddingBagConfig(
        name="a", num_embeddings=IDS, embedding_dim=8, feature_names=["f0", "f1"]
    ),
    EmbeddingBagConfig(
        name="b", num_embeddings=IDS, embedding_dim=4, feature_names=["f2"]
    ),
]
ROWS = [
    EmbeddingConfig(name="c", num_embeddings=IDS, embedding_dim=4, feature_names=["f1"])
]
FIRST_PLAN = {"a": "table_wise", "b": "row_wise", "c": "row_wise"}
"""The types of the second plan differ for each rank and each number of shardings."""
SECOND_PLAN = {"a": "row_wise", "b": "row_wise", "c": "row_wise"}

PIPELINES: dict[str, Callable[..., Any]] = {
    "RecStorePrefetchPipeline": RecStorePrefetchPipeline,
    "TrainPipelineSparseDist": TrainPipelineSparseDist,
    "TrainPipelineSparseDistLite": TrainPipelineSparseDistLite,
    "TrainPipelineBase": TrainPipelineBase,
    "TrainPipelinePT2": partial(
        TrainPipelinePT2,
        compile_configs=TorchCompileConfig(backend="eager", compile_on_iter=1),
    ),
    "EvalPipelineSparseDist": EvalPipelineSparseDist,
}
UNSUPPORTED: dict[str, Callable[..., Any]] = {
    "PrefetchTrainPipelineSparseDist": PrefetchTrainPipelineSparseDist,
    "TrainPipelineFusedSparseDist": TrainPipelineFusedSparseDist,
    "TrainPipelineSemiSync": TrainPipelineSemiSync,
}
"""The pipelines that do not train such a model on the CPU, with any tables."""


class TrippedError(Exception):
    """The error of a step."""


class Tripwire(nn.Module):
    """Raises an error in the next forward or backward of a model, once.

    It is a module because pipelines do not trace modules without tables.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place: str | None = None

    def forward(self, pooled: Tensor) -> Tensor:
        """Returns its argument, and raises TrippedError in the place that is set."""
        place = self.place
        self.place = None
        if place == "forward":
            raise TrippedError
        if place == "backward":
            pooled.register_hook(_trip)
        return pooled


def _trip(gradient: Tensor) -> Tensor:
    raise TrippedError


class Model(nn.Module):
    """Bags and sequences with a dense layer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=TABLES, device=torch.device(device))
        self.ec = EmbeddingCollection(tables=ROWS, device=torch.device(device))
        self.over = nn.Linear(24, 1)
        self.tripwire = Tripwire()

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(batch)
        sequences = self.ec(batch)["f1"].to_padded_dense(4).sum(1)
        inputs = torch.cat([pooled["f0"], pooled["f1"], pooled["f2"], sequences], dim=1)
        out = self.over(self.tripwire(inputs))
        loss = ((out - 1) ** 2).mean()
        return loss, out.detach()


def batch_of(number: int, rank: int) -> KeyedJaggedTensor:
    """Returns the batch of a rank with this number."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    lengths = torch.randint(0, 4, (3 * BAGS,), generator=generator)
    ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=lengths)


class Trial:
    """A sharded model with its optimizers.

    Args:
        tables: ``"recstore"`` or ``"stock"``.
    """

    def __init__(self, tables: str) -> None:
        torch.manual_seed(0)
        self.tables = tables
        fused_params = {"learning_rate": 0.05}
        self.sharders: list[ModuleSharder[nn.Module]] = (
            [
                RecStoreSharder(fused_params),
                RecStoreEmbeddingCollectionSharder(fused_params),
            ]
            if tables == "recstore"
            else [
                EmbeddingBagCollectionSharder(fused_params),
                EmbeddingCollectionSharder(fused_params),
            ]
        )
        module = Model(self.device)
        # Without DDP: it refuses every forward after an error in backward, in a plain
        # loop too.
        self.model = DistributedModelParallel(
            module,
            sharders=self.sharders,
            plan=self.plan(FIRST_PLAN),
            device=CPU,
            init_data_parallel=False,
        )
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        wrapped = KeyedOptimizerWrapper(dense, partial(torch.optim.SGD, lr=0.1))
        self.optimizer = CombinedOptimizer(
            [self.model.fused_optimizer, ("dense", wrapped)]
        )
        for number in (100, 101):
            self.train(batch_of(number, dist.get_rank()))

    @property
    def device(self) -> str:
        return "meta" if self.tables == "recstore" else "cpu"

    def plan(self, types: dict[str, str]) -> ShardingPlan:
        """Returns the plan with these sharding types."""
        constraints: dict[str, ParameterConstraints] = {}
        for name, sharding_type in types.items():
            if self.tables == "recstore":
                constraints[name] = RecStoreConstraints(sharding_types=[sharding_type])
            else:  # TorchRec offers no other type for this kernel on the CPU.
                constraints[name] = ParameterConstraints(
                    sharding_types=["table_wise"], compute_kernels=["fused"]
                )
        ranks = dist.get_world_size()
        topology = Topology(
            world_size=ranks, local_world_size=ranks, compute_device="cpu"
        )
        planner = RecStorePlanner(
            topology=topology, constraints=constraints, debug=False
        )
        return planner.collective_plan(
            Model(self.device), self.sharders, dist.group.WORLD
        )

    def train(self, batch: KeyedJaggedTensor) -> Tensor:
        """Trains one batch, or evaluates it in evaluation mode, as a plain loop does."""
        if self.model.training:
            self.optimizer.zero_grad()
        loss, out = self.model(batch)
        if self.model.training:
            loss.backward()
            self.optimizer.step()
        return out

    def evaluate(self) -> Tensor:
        """Evaluates a batch whose ids have rows."""
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            out: Tensor = self.model(batch_of(100, dist.get_rank()))[1]
        self.model.train(was_training)
        return out

    def weights(self) -> list[Tensor]:
        """Returns the rows and the dense weights."""
        tensors = [self.model.module.over.weight.detach()]
        if self.tables == "recstore":
            for collection in (self.model.module.ebc, self.model.module.ec):
                for table in collection.recstore_tables():
                    ids = table.ids()
                    tensors.append(ids)
                    tensors.append(table.lookup(ids))
        else:
            tensors += [parameter.detach() for parameter in self.model.parameters()]
        return tensors


class Loop:
    """A plain loop."""

    def __init__(self, trial: Trial, batches: Sequence[int]) -> None:
        self.trial = trial
        self.batches = list(batches)
        self.outputs: list[Tensor] = []

    def step(self) -> None:
        """Trains the next batch, or raises StopIteration."""
        if not self.batches:
            raise StopIteration
        self.outputs.append(
            self.trial.train(batch_of(self.batches[0], dist.get_rank()))
        )
        del self.batches[0]

    def detach(self) -> None:
        """Does nothing."""

    def attach(self) -> None:
        """Does nothing."""


class Piped:
    """A pipeline.

    ``taken`` are the numbers of the batches that it takes from its iterators.
    """

    def __init__(
        self, trial: Trial, kind: Callable[..., Any], sources: Sequence[Iterator[int]]
    ) -> None:
        self.trial = trial
        self.pipeline = kind(trial.model, trial.optimizer, CPU)
        self.taken: list[int] = []
        self.outputs: list[Tensor] = []
        self._sources = [self._batches(source) for source in sources]

    def _batches(self, numbers: Iterator[int]) -> Iterator[KeyedJaggedTensor]:
        for number in numbers:
            self.taken.append(number)
            yield batch_of(number, dist.get_rank())

    def step(self) -> None:
        """Trains one batch, or raises StopIteration."""
        self.outputs.append(self.pipeline.progress(self._sources[0]))

    def next_source(self) -> bool:
        """Goes on with the next iterator, if there is one."""
        del self._sources[0]
        return bool(self._sources)

    def detach(self) -> None:
        """Detaches the pipeline."""
        self.pipeline.detach()

    def attach(self) -> None:
        """Attaches the pipeline."""
        self.pipeline.attach(self.trial.model)


Runner = Loop | Piped


@dataclass(frozen=True)
class Event:
    """What happens to a pipeline after some steps.

    Args:
        text: The description for the documentation.
        happen: What happens.
        sources: The numbers of the batches of each iterator.
        swap: Whether the pipeline gets the second iterator after the event, instead of
            after the end of the first.
        at_end: Whether the event happens at the end of the first iterator.
        steps: The number of steps before the event.
    """

    text: str
    happen: Callable[[Runner], None]
    sources: Sequence[Sequence[int]] = (range(6),)
    swap: bool = False
    at_end: bool = False
    steps: int = 2


def _nothing(runner: Runner) -> None:
    pass


def _detach(runner: Runner) -> None:
    runner.detach()


def _detach_twice_and_attach(runner: Runner) -> None:
    runner.detach()
    runner.detach()
    runner.attach()
    runner.attach()


def _detach_and_train(runner: Runner) -> None:
    runner.detach()
    runner.outputs.append(runner.trial.train(batch_of(200, dist.get_rank())))


def _reshard(runner: Runner) -> None:
    runner.detach()
    if runner.trial.tables == "recstore":
        reshard(runner.trial.model, runner.trial.plan(SECOND_PLAN))


def _evaluate_detached(runner: Runner) -> None:
    runner.detach()
    runner.outputs.append(runner.trial.evaluate())


def _evaluate(runner: Runner) -> None:
    runner.outputs.append(runner.trial.evaluate())


def _fail(runner: Runner, place: str) -> None:
    runner.trial.model.module.tripwire.place = place
    try:
        runner.step()
    except TrippedError:
        return
    raise AssertionError("the step has not raised an error")


def _broken_iterator(runner: Runner) -> None:
    if isinstance(runner, Loop):
        return
    while True:
        try:
            runner.step()
        except TrippedError:
            return


def _until_broken(numbers: Sequence[int]) -> Iterator[int]:
    yield from numbers
    raise TrippedError


TWO = (range(4), range(4, 8))
EVENTS: dict[str, Event] = {
    "detach": Event("`detach()`, then `progress`", _detach),
    "attach": Event("`detach()` and `attach()`, each twice", _detach_twice_and_attach),
    "train": Event(
        "`detach()`, and a step of a plain loop with another batch", _detach_and_train
    ),
    "reshard": Event("`detach()` and `reshard`", _reshard),
    "end": Event("a new iterator after the end of the data", _nothing, sources=TWO),
    "end detached": Event(
        "`detach()` after the end of the data, and a new iterator",
        _detach,
        TWO,
        at_end=True,
    ),
    "swap": Event(
        "a new iterator while two batches of the old one are in flight",
        _nothing,
        TWO,
        swap=True,
    ),
    "swap at the last": Event(
        "a new iterator while one batch of the old one is left",
        _nothing,
        TWO,
        True,
        steps=3,
    ),
    "iterator": Event(
        "an error of the data iterator, and a new iterator",
        _broken_iterator,
        sources=TWO,
        swap=True,
    ),
    "forward": Event(
        "an error in the model's forward", partial(_fail, place="forward")
    ),
    "backward": Event("an error in the backward", partial(_fail, place="backward")),
    "evaluate detached": Event(
        "`detach()`, and an evaluation by a call of the model", _evaluate_detached
    ),
    "evaluate": Event(
        "an evaluation by a call of the model, without `detach()`", _evaluate
    ),
}


def run(event: Event, runner: Runner) -> None:
    """Runs a pipeline or a loop to the end of its batches, with an event in between."""
    for _ in range(event.steps):
        runner.step()
    if not event.at_end:
        event.happen(runner)
    swaps = event.swap
    while True:
        if swaps and isinstance(runner, Piped):
            runner.next_source()
            swaps = False
        try:
            runner.step()
        except StopIteration:
            if event.at_end and isinstance(runner, Piped) and len(runner._sources) > 1:
                event.happen(runner)
            if isinstance(runner, Loop) or not runner.next_source():
                return


def outcome(
    pipeline: Callable[..., Any], event: Event, tables: str = "recstore"
) -> str:
    """Returns "works" if a pipeline gives the outputs and weights of a plain loop, and
    what happens otherwise.

    The other outcomes are "raises" and the error's type, "no detach" (it does not have
    the method), "ignores the iterator", "loses a batch" and "differs".
    """
    evaluates = pipeline is EvalPipelineSparseDist
    trial = Trial(tables)
    trial.model.train(not evaluates)
    sources: list[Iterator[int]] = [iter(numbers) for numbers in event.sources]
    if event.happen is _broken_iterator:
        sources[0] = _until_broken(event.sources[0])
    piped = Piped(trial, pipeline, sources)
    try:
        run(event, piped)
    except AttributeError as error:
        return (
            "no detach"
            if error.name in ("detach", "attach")
            else f"raises {type(error).__name__}"
        )
    except Exception as error:
        return f"raises {type(error).__name__}"
    if len(event.sources) > 1 and event.sources[1][-1] not in piped.taken:
        return "ignores the iterator"
    expected = Trial(tables)
    expected.model.train(not evaluates)
    loop = Loop(expected, piped.taken)
    run(event, loop)
    pairs = [(piped.outputs, loop.outputs), (trial.weights(), expected.weights())]
    for values, expected_values in pairs:
        if len(values) < len(expected_values):
            return "loses a batch"
        if not all(
            torch.equal(value, wanted)
            for value, wanted in zip(values, expected_values, strict=True)
        ):
            return "differs"
    return "works"


NO_DETACH = dict.fromkeys(
    ("detach", "attach", "train", "reshard", "end detached", "evaluate detached"),
    "no detach",
)
IGNORES = dict.fromkeys(
    ("end", "end detached", "swap", "swap at the last", "iterator"),
    "ignores the iterator",
)
EXCEPTIONS: dict[str, dict[str, str]] = {
    "RecStorePrefetchPipeline": {},
    "TrainPipelineSparseDist": {
        "reshard": "raises ValueError",
        **dict.fromkeys(
            ("swap at the last", "forward", "backward", "evaluate"),
            "raises AssertionError",
        ),
    },
    "TrainPipelineSparseDistLite": {
        "iterator": "differs",
        "evaluate": "raises AssertionError",
    },
    "TrainPipelineBase": {
        **NO_DETACH,
        "end": "ignores the iterator",
        "forward": "loses a batch",
        "backward": "loses a batch",
    },
    "TrainPipelinePT2": {
        **NO_DETACH,
        "forward": "loses a batch",
        "backward": "loses a batch",
    },
    "EvalPipelineSparseDist": {
        **IGNORES,
        "reshard": "raises ValueError",
        **dict.fromkeys(
            ("detach", "train", "forward", "evaluate detached", "evaluate"),
            "raises AssertionError",
        ),
    },
}
"""The outcomes of each pipeline that are not "works".

Those but of "reshard" are the same with TorchRec's tables.
"""
NOT_ASKED = {("EvalPipelineSparseDist", "backward")}

_CELLS = {
    "works": "works",
    "raises AssertionError": "raises (1)",
    "raises ValueError": "refused (2)",
    "ignores the iterator": "ignored (3)",
    "loses a batch": "loses a batch (4)",
    "differs": "trains a batch twice (5)",
    "no detach": "",
}


def expected_outcome(pipeline: str, event: str) -> str:
    """Returns the outcome of an event in a pipeline."""
    return EXCEPTIONS[pipeline].get(event, "works")


def document() -> str:
    """Returns the table of docs/sharded.md."""
    lines = [
        "| between or within two steps | "
        + " | ".join(f"`{name}`" for name in PIPELINES)
        + " |",
        "| --- " * (1 + len(PIPELINES)) + "|",
    ]
    for key, event in EVENTS.items():
        cells = []
        for name in PIPELINES:
            asked = (name, key) not in NOT_ASKED
            cells.append(_CELLS[expected_outcome(name, key)] if asked else "")
        lines.append(f"| {event.text} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
