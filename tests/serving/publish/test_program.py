"""A publisher compiles a model in the thread that calls it, once for each structure; no
thread of ours compiles.
"""

from __future__ import annotations

import locale
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchrec_recstore.inference import (
    DeltaPublisher,
    Follower,
    export_for_inference,
    follow,
)
from torchrec_recstore.utils import RecStoreWarning
from torchrec_recstore_serving.export import verification
from torchrec_recstore_serving.export.opening import is_hashed
from torchrec_recstore_serving.export.scriptable_modules import scriptable
from torchrec_recstore_serving.export.structure import structure_of

from ..background_models import (
    SCRIPTED,
    TRACED,
    Gated,
    Pooled,
    Refused,
    WithConstant,
    WithSettings,
    batch,
)

SLOW = pytest.mark.slow

# What changes the state of the whole process. A thread of ours calls none of these
# functions.
OF_THE_PROCESS: list[tuple[Any, str]] = [
    (torch.jit, "script"),
    (torch.jit, "trace"),
    (torch.fx.Tracer, "trace"),
    (torch, "manual_seed"),
    (torch.random, "fork_rng"),
    (torch, "set_rng_state"),
    (torch, "set_default_dtype"),
    (torch, "set_default_device"),
    (torch, "set_num_threads"),
    (torch, "set_num_interop_threads"),
    (torch, "set_flush_denormal"),
    (torch, "use_deterministic_algorithms"),
    (torch.ops, "load_library"),
    (warnings.catch_warnings, "__enter__"),
    (warnings, "simplefilter"),
    (warnings, "filterwarnings"),
    (signal, "signal"),
    (locale, "setlocale"),
    (os, "chdir"),
    (os, "umask"),
    (os, "putenv"),
    (sys, "setswitchinterval"),
]


def train(model: nn.Module, seed: int = 0) -> None:
    model.train()
    dense, features = batch(torch.Generator().manual_seed(seed))
    model(dense, features).sum().backward()


def publish(publisher: DeltaPublisher) -> None:
    """Publishes the model as it is, and waits until the publication is complete."""
    publisher.step()
    writer = publisher._writer
    assert writer is not None
    writer.wait()
    writer.raise_error()


def assert_follows(follower: Follower, model: nn.Module, folder: Path) -> None:
    """The follower's model is equal to a full export of the model."""
    export_for_inference(
        model,
        folder / "export.pt",
        index="hash" if is_hashed(follower.model) else "sorted",
    )
    exported = torch.jit.load(folder / "export.pt")
    assert follower.version == exported.recstore_version()
    dense, features = batch(torch.Generator().manual_seed(9))
    assert torch.equal(follower.model(dense, features), exported(dense, features))


@contextmanager
def calls(
    monkeypatch: pytest.MonkeyPatch, functions: list[tuple[Any, str]]
) -> Iterator[list[tuple[str, str]]]:
    """Yields the names of the functions that are called, and of the threads that call
    them.
    """
    called: list[tuple[str, str]] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.append((name, threading.current_thread().name))
            return function(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for owner, name in functions:
            patch.setattr(owner, name, noted(name, getattr(owner, name)))
        yield called


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("dlrm_dcn", "memory"),
        pytest.param("single", "mapped", marks=SLOW),
    ],
)
def test_no_thread_changes_the_process(
    name: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publisher and follower, with a change of the structure and a publication that
    fails.
    """
    model = {**SCRIPTED, **TRACED}[name]()
    place = tmp_path / "published"
    verification._scripted_function.cache_clear()
    train(model)
    with calls(monkeypatch, OF_THE_PROCESS) as called:
        publisher = DeltaPublisher(model, place, every_s=0, full_every_s=0, rows=rows)
        publish(publisher)
        with follow(place, every_s=0.01):
            for step in range(2):
                train(model, step)
                publish(publisher)
            train(model, 2)
            (place / "000000000004.delta").mkdir()
            with pytest.raises(OSError, match=r"000000000004\.delta is a directory"):
                publish(publisher)
            (place / "000000000004.delta").rmdir()
            publish(publisher)
            model.structure = 1  # type: ignore[assignment]
            publish(publisher)
            publisher.close()
        of_threads = {
            call for call in called if call[1] != threading.main_thread().name
        }
    assert of_threads == set()
    assert ("script", threading.main_thread().name) in called
    with Follower(place) as late:
        assert late.poll()
        assert_follows(late, model, tmp_path)


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        (Pooled, "hash"),
        pytest.param(WithSettings, "sorted", marks=SLOW),
    ],
)
def test_a_structure_is_compiled_once(
    kind: type[nn.Module], index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a full export that is due nor one after an error compiles again.

    Another structure does.
    """
    model = kind()
    place = tmp_path / "published"
    train(model)
    with (
        DeltaPublisher(
            model, place, every_s=0, full_every_s=0, index=index
        ) as publisher,
        Follower(place) as follower,
    ):
        publish(publisher)
        compiled: list[nn.Module] = []
        script = torch.jit.script

        def noted(obj: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(obj, nn.Module):
                compiled.append(obj)
            return script(obj, *arguments, **named)

        monkeypatch.setattr(torch.jit, "script", noted)
        for step in range(3):
            train(model, step)
            with torch.no_grad():
                model.over.weight += 1
            publish(publisher)
        (place / "000000000005.delta").mkdir()
        train(model, 5)
        with pytest.raises(OSError, match=r"000000000005\.delta is a directory"):
            publish(publisher)
        (place / "000000000005.delta").rmdir()
        train(model, 6)
        publish(publisher)
        assert compiled == []
        assert follower.poll()
        assert_follows(follower, model, tmp_path)
        compiled.clear()
        model.dropout.p = 0.5
        with pytest.warns(
            RecStoreWarning,
            match=r"a full export is published without a delta: dropout\.p is 0\.5",
        ):
            publish(publisher)
        publish(publisher)
        assert compiled != []
        with pytest.warns(RecStoreWarning, match="because the publisher began anew"):
            follower.poll()
        assert_follows(follower, model, tmp_path)


@pytest.mark.slow
def test_an_object_that_the_model_reads_is_part_of_its_structure(
    tmp_path: Path,
) -> None:
    """The tracer has written its value into the program.

    The next publication is compiled again.
    """
    model = WithSettings()
    train(model)
    place = tmp_path / "published"
    with DeltaPublisher(
        model, place, every_s=0, full_every_s=1e6, index="hash"
    ) as publisher:
        publish(publisher)
        model.settings.scale = 4.0
        with pytest.warns(
            RecStoreWarning,
            match="without a delta: the modules of the model have changed",
        ):
            publish(publisher)
        with Follower(place) as follower:
            assert follower.poll()
            assert_follows(follower, model, tmp_path)


@pytest.mark.slow
def test_attributes_that_the_program_does_not_have(tmp_path: Path) -> None:
    """A model that counts its steps is compiled again, to the same program: deltas go
    on.
    """
    model = WithSettings()
    place = tmp_path / "published"
    with (
        DeltaPublisher(
            model, place, every_s=0, full_every_s=1e6, index="sorted"
        ) as publisher,
        Follower(place) as follower,
    ):
        for step in range(2):
            train(model, step)
            model.counted = step  # type: ignore[assignment]
            publish(publisher)
            assert follower.poll()
        assert_follows(follower, model, tmp_path)
        assert (follower.state.fulls_loaded, follower.state.deltas_applied) == (1, 1)
        with torch.no_grad():
            model.over = nn.Linear(model.over.in_features, 1, bias=False)
        with pytest.warns(
            RecStoreWarning,
            match="without a delta: the modules of the model have changed",
        ):
            publish(publisher)


def test_a_delta_of_a_recurrent_layer(tmp_path: Path) -> None:
    """Its list of weights is no attribute that a delta cannot change: the weights are
    dense tensors.
    """
    model = SCRIPTED["single"]()
    train(model)
    place = tmp_path / "published"
    with (
        DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher,
        Follower(place) as follower,
    ):
        for step in range(2):
            train(model, step)
            with torch.no_grad():
                for weight in model.recurrent.parameters():
                    weight += 0.1
            publish(publisher)
            assert follower.poll()
        assert_follows(follower, model, tmp_path)
        assert (follower.state.fulls_loaded, follower.state.deltas_applied) == (1, 1)


@pytest.mark.slow
def test_a_constant_that_a_helper_has_is_part_of_the_program(tmp_path: Path) -> None:
    """TorchScript writes a constant into the method that reads it, which is not
    ``forward``.
    """
    model = WithConstant()
    train(model)
    place = tmp_path / "published"
    with DeltaPublisher(model, place, every_s=0, full_every_s=1e6) as publisher:
        publish(publisher)
        model.scale = 4.0  # type: ignore[misc]
        with pytest.warns(
            RecStoreWarning, match="a full export is published without a delta"
        ):
            publish(publisher)
        with Follower(place) as follower:
            assert follower.poll()
            assert_follows(follower, model, tmp_path)


def test_an_error_of_the_compiler_is_raised_by_its_step(tmp_path: Path) -> None:
    """The step that reads the model raises the error, nothing is lost, and the
    publisher goes on.
    """
    model = Refused()
    model.refused = True
    train(model)
    place = tmp_path / "published"
    publisher = DeltaPublisher(model, place, every_s=0, full_every_s=1e6)
    for _ in range(2):
        with pytest.raises(ValueError, match="TorchScript cannot compile Refused"):
            publisher.step()
    assert not (place / "latest.json").exists()
    model.refused = False
    publish(publisher)
    train(model, 1)
    model.refused = True
    with pytest.raises(ValueError, match="TorchScript cannot compile Refused"):
        publisher.step()
    train(model, 2)
    model.refused = False
    publish(publisher)
    publisher.close()
    # The model that was published before the error is the base of a delta.
    assert not (place / "000000000002.pt").exists()
    with Follower(place) as follower:
        assert follower.poll()
        assert_follows(follower, model, tmp_path)


def test_other_threads_call_modules_during_a_trace(tmp_path: Path) -> None:
    """A trace replaces ``nn.Module.__call__`` for all threads.

    Another thread's calls are as without the trace.
    """
    tracing, called = threading.Event(), threading.Event()
    model = Gated(tracing, called)
    train(model)
    other = Pooled().eval()
    dense, features = batch(torch.Generator().manual_seed(1))
    expected = other(dense, features)

    def call() -> Tensor:
        try:
            assert tracing.wait(60)
            assert nn.Module.__call__ is not original, "the trace is not running"
            out: Tensor = other(dense, features)
            return out
        finally:
            called.set()

    original = nn.Module.__call__
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(call)
        with DeltaPublisher(model, tmp_path / "published", every_s=0) as publisher:
            publish(publisher)
        assert torch.equal(answer.result(), expected)
    assert nn.Module.__call__ is original
    with Follower(tmp_path / "published") as follower:
        assert follower.poll()
        assert follower.model(dense, features).shape == (len(dense), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm_dcn", "dlrm"])
def test_two_publishers(name: str, tmp_path: Path) -> None:
    """Two publishers in one process, each in a thread of the user.

    Two in one thread are a part of the trainings beside threads.
    """
    models = [{**SCRIPTED, **TRACED}[name]() for _ in range(2)]
    original = nn.Module.__call__
    publishers = [
        DeltaPublisher(
            model, tmp_path / f"published-{number}", every_s=0, full_every_s=0
        )
        for number, model in enumerate(models)
    ]

    def loop(number: int) -> None:
        for step in range(10):
            train(models[number], step)
            publishers[number].step()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that a mistake shows
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(loop, number) for number in range(2)]:
                done.result()
        for publisher in publishers:
            publisher.close()
    finally:
        sys.setswitchinterval(interval)
    assert nn.Module.__call__ is original
    for number, model in enumerate(models):
        with Follower(tmp_path / f"published-{number}") as follower:
            assert follower.poll()
            assert_follows(follower, model, tmp_path)


@pytest.mark.parametrize("name", [*SCRIPTED, *TRACED])
def test_structures_of_equal_models_are_equal(name: str) -> None:
    """The structure does not depend on rows and values, and is that of each copy."""
    make = {**SCRIPTED, **TRACED}[name]
    torch.manual_seed(0)
    model = make()
    train(model)
    before = structure_of(scriptable(export_for_inference(model)))
    train(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel():
                parameter.add_(1)
    assert structure_of(scriptable(export_for_inference(model))) == before
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.7
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.7
    assert structure_of(scriptable(export_for_inference(model))) != before
