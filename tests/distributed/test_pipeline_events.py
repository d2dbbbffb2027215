"""Train pipelines that are detached, resharded, interrupted by errors, given new
iterators, and evaluated between.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist

from tests.packages import ROOT
from torchrec_recstore import RecStoreSharder, reshard, table_stats
from torchrec_recstore.sharders import RecStorePrefetchPipeline

from .pipeline_events import (
    BAGS,
    CPU,
    EVENTS,
    EXCEPTIONS,
    NOT_ASKED,
    PIPELINES,
    SECOND_PLAN,
    TABLES,
    UNSUPPORTED,
    Loop,
    Trial,
    TrippedError,
    Tripwire,
    batch_of,
    document,
    expected_outcome,
    outcome,
)
from .workers import run_on_ranks

OTHERS = sorted(PIPELINES.keys() - {"RecStorePrefetchPipeline"})


def test_the_document_has_the_table() -> None:
    assert document() in (ROOT / "docs/sharded.md").read_text()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("event", EVENTS)
def test_the_pipeline_goes_on(event: str) -> None:
    assert outcome(RecStorePrefetchPipeline, EVENTS[event]) == "works"


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pipeline", OTHERS)
def test_pipelines_of_torchrec(pipeline: str) -> None:
    outcomes = {}
    expected = {}
    for key, event in EVENTS.items():
        if (pipeline, key) not in NOT_ASKED:
            outcomes[key] = outcome(PIPELINES[pipeline], event)
            expected[key] = expected_outcome(pipeline, key)
    assert outcomes == expected


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pipeline", OTHERS)
def test_stock_tables_fail_in_the_same_cells(pipeline: str) -> None:
    failing = {
        key: wanted for key, wanted in EXCEPTIONS[pipeline].items() if key != "reshard"
    }
    outcomes = {
        key: outcome(PIPELINES[pipeline], EVENTS[key], "stock") for key in failing
    }
    assert outcomes == failing


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pipeline", UNSUPPORTED)
def test_pipelines_that_train_no_model_on_the_cpu(pipeline: str) -> None:
    for tables in ("recstore", "stock"):
        assert outcome(UNSUPPORTED[pipeline], EVENTS["end"], tables).startswith(
            "raises"
        )


def every_event(rank: int, world_size: int) -> None:
    outcomes = {
        key: outcome(RecStorePrefetchPipeline, event) for key, event in EVENTS.items()
    }
    assert outcomes == dict.fromkeys(EVENTS, "works")


@pytest.mark.slow
def test_two_ranks() -> None:
    run_on_ranks(2, every_event)


def lists(*numbers: int) -> Iterator[KeyedJaggedTensor]:
    for number in numbers:
        yield batch_of(number, dist.get_rank())


@pytest.mark.usefixtures("one_rank")
def test_batches_of_a_stock_pipeline_are_trained_before_a_reshard() -> None:
    """TorchRec's pipeline would look up what it has distributed with the old plan, and
    silently be wrong.
    """
    trial = Trial("recstore")
    pipeline = TrainPipelineSparseDist(trial.model, trial.optimizer, CPU)
    batches = lists(*range(6))
    outputs = [pipeline.progress(batches)]
    pipeline.detach()
    before = trial.weights()
    with pytest.raises(
        ValueError,
        match=(
            r"distributed batches for the tables \['a', 'b'\].*progress\(iter\(\(\)\)\)"
        ),
    ):
        reshard(trial.model, trial.plan(SECOND_PLAN))
    assert all(map(torch.equal, trial.weights(), before))
    none: Iterator[KeyedJaggedTensor] = iter(())
    outputs += [pipeline.progress(none), pipeline.progress(none)]
    with pytest.raises(StopIteration):
        pipeline.progress(none)
    pipeline.detach()
    reshard(trial.model, trial.plan(SECOND_PLAN))
    outputs += [pipeline.progress(batches) for _ in range(3)]
    loop = Loop(Trial("recstore"), range(6))
    for _ in range(6):
        loop.step()
    assert all(map(torch.equal, outputs, loop.outputs))


@pytest.mark.usefixtures("one_rank")
def test_another_iterator_in_another_mode_is_refused() -> None:
    """Else the batches for training would be evaluated, and those for evaluation
    trained.
    """
    trial = Trial("recstore")
    pipeline = RecStorePrefetchPipeline(trial.model, trial.optimizer, CPU)
    training = lists(*range(4))
    outputs = [pipeline.progress(training)]
    trial.model.eval()
    with pytest.raises(
        RuntimeError,
        match=r"2 batch\(es\) of another iterator were loaded for training",
    ):
        pipeline.progress(lists(100))
    trial.model.train()
    outputs += [pipeline.progress(training) for _ in range(3)]
    with pytest.raises(StopIteration):
        pipeline.progress(training)
    trial.model.eval()
    outputs.append(pipeline.progress(lists(100)))
    loop = Loop(Trial("recstore"), range(4))
    for _ in range(4):
        loop.step()
    loop.outputs.append(loop.trial.evaluate())
    assert all(map(torch.equal, outputs, loop.outputs))


@pytest.mark.usefixtures("one_rank")
def test_a_batch_that_fails_is_left_out() -> None:
    """The error of a batch is raised in its own step, again and again, until the batch
    is left out.
    """
    trial = Trial("recstore")
    pipeline = RecStorePrefetchPipeline(trial.model, trial.optimizer, CPU)
    wrong = KeyedJaggedTensor(
        ["f0", "f1", "f2"],
        torch.zeros(1),
        lengths=torch.tensor([1] + [0] * (3 * BAGS - 1)),
    )
    good = [batch_of(number, 0) for number in range(5)]
    batches = iter([good[0], good[1], wrong, good[2], good[3], good[4]])
    outputs = [pipeline.progress(batches), pipeline.progress(batches)]
    for _ in range(2):
        with pytest.raises(TypeError, match="float32"):
            pipeline.progress(batches)
    pipeline.dequeue_batch()
    outputs += [pipeline.progress(batches) for _ in range(3)]
    loop = Loop(Trial("recstore"), range(5))
    for _ in range(5):
        loop.step()
    assert all(map(torch.equal, outputs, loop.outputs))
    assert all(map(torch.equal, trial.weights(), loop.trial.weights()))


@pytest.mark.usefixtures("one_rank")
def test_reset_drops_the_batches_in_flight() -> None:
    trial = Trial("recstore")
    pipeline = RecStorePrefetchPipeline(trial.model, trial.optimizer, CPU)
    outputs = [pipeline.progress(lists(0, 1, 2))]
    pipeline.reset()
    batches = lists(3, 4)
    outputs += [pipeline.progress(batches), pipeline.progress(batches)]
    loop = Loop(Trial("recstore"), (0, 3, 4))
    for _ in range(3):
        loop.step()
    assert all(map(torch.equal, outputs, loop.outputs))


@pytest.mark.usefixtures("one_rank")
def test_a_direct_call_of_a_collection() -> None:
    """It returns the embeddings of its argument, and not those of the next batch."""
    trial = Trial("recstore")
    pipeline = RecStorePrefetchPipeline(trial.model, trial.optimizer, CPU)
    batches = lists(0, 1, 2)
    pipeline.progress(batches)
    trial.model.eval()
    with torch.no_grad():
        values = trial.model.module.ebc(batch_of(100, 0)).wait().values()
        again = trial.model.module.ebc(batch_of(100, 0)).wait().values()
    assert torch.equal(values, again)
    trial.model.train()
    pipeline.progress(batches)
    pipeline.progress(batches)


@pytest.mark.usefixtures("one_rank")
def test_another_model() -> None:
    """TorchRec's pipeline would go on calling the forward of the first model."""
    first = Trial("recstore")
    second = Trial("recstore")
    pipeline = RecStorePrefetchPipeline(first.model, second.optimizer, CPU)
    batches = lists(0, 1, 2)
    pipeline.progress(batches)
    steps = table_stats(first.model)["a"].steps
    pipeline.detach()
    pipeline.attach(second.model)
    outputs = [pipeline.progress(batches), pipeline.progress(batches)]
    loop = Loop(Trial("recstore"), (1, 2))
    for _ in range(2):
        loop.step()
    assert all(map(torch.equal, outputs, loop.outputs))
    assert table_stats(first.model)["a"].steps == steps


@pytest.mark.usefixtures("one_rank")
def test_no_loop_goes_on_after_an_error_in_backward_under_ddp() -> None:
    """So the events are tried without DDP, as docs/sharded.md says."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = EmbeddingBagCollection(
                tables=TABLES, device=torch.device("meta")
            )
            self.over = nn.Linear(20, 1)
            self.tripwire = Tripwire()

        def forward(self, batch: KeyedJaggedTensor) -> Tensor:
            pooled: Tensor = self.tripwire(self.ebc(batch).values())
            out: Tensor = self.over(pooled).sum()
            return out

    model = DistributedModelParallel(Bags(), sharders=[RecStoreSharder()], device=CPU)
    model(batch_of(0, 0)).backward()
    model.module.tripwire.place = "backward"
    loss = model(batch_of(1, 0))
    with pytest.raises(TrippedError):
        loss.backward()
    with pytest.raises(RuntimeError, match="unmarked_param_indices"):
        model(batch_of(2, 0))
