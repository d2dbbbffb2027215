"""Kills saves at chosen points.

It runs in a separate process, which forks a process for each kill.

python -m tests.checkpoint.crashing one DIRECTORY      # 30 points of a save in one process
python -m tests.checkpoint.crashing ranks DIRECTORY    # one of two ranks dies
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import load_checkpoint, save_checkpoint

from . import models

POINTS = 30
FILE_CALLS = (
    "fsync",
    "rename",
    "mkdir",
    "rmdir",
    "unlink",
    "open",
    "save_file",
    "serialize_file",
    "write",
    "close",
)
KILLED, RAISED, SAVED = -signal.SIGKILL, 3, 4
# the exit status for each state that a killed save has left
OUTCOMES = {"none": 5, "old": 6, "new": 7}


class Calls:
    """Counts every call of Python code in all threads, and kills the process at one
    call.

    Args:
        die_at: The number of the call. None: the process is not killed.
    """

    def __init__(self, die_at: int | None = None) -> None:
        self.names: list[str] = []
        self._die_at = die_at

    def __enter__(self) -> Calls:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_call", "c_return"):
            return
        if len(self.names) == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(argument.__name__ if event == "c_call" else event)


def in_a_fork(work: Callable[[], int]) -> int:
    """Runs ``work`` in a forked process; returns its status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def weights(model: DistributedModelParallel) -> list[Any]:
    return [
        [name, ids.tolist(), rows["weight"].tolist(), rows["sum"].tolist()]
        for name, _, ids, rows in models.shards(model)
    ]


def loaded(path: Path) -> list[Any]:
    model = models.recstore()
    load_checkpoint(model, path)
    return weights(model)


def points_of(names: list[str]) -> list[int]:
    """Half of the points are spread over all calls.

    The others are calls that touch files, among them the last ones.
    """
    calls = [i for i, name in enumerate(names) if name in FILE_CALLS]
    half = POINTS // 2
    spread = [len(names) * k // half for k in range(half)]
    files = [calls[len(calls) * k // half] for k in range(half - 4)] + calls[-4:]
    return sorted(spread + files)


def in_one(work: Callable[[], int]) -> int:
    """Runs ``work`` in a forked process that is the only rank.

    Each process makes its own model: a forked process cannot use the tables of its
    parent.
    """

    def alone() -> int:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return work()

    return in_a_fork(alone)


def one(directory: Path) -> None:
    target, trained = directory / "second", directory / "trained"

    def begin() -> int:
        model = models.recstore()
        models.train(model)
        (directory / "old").write_text(json.dumps(weights(model)))
        save_checkpoint(model, directory / "first")
        models.train(model, steps=2, distinct=60)
        (directory / "new").write_text(json.dumps(weights(model)))
        save_checkpoint(model, trained)
        return 0

    def save(die_at: int | None = None) -> int:
        model = models.recstore()
        load_checkpoint(model, trained)
        with Calls(die_at) as calls:
            save_checkpoint(model, target, overwrite=True)
        (directory / "calls").write_text("\n".join(calls.names))
        return SAVED

    def check(overwrite: bool) -> int:
        old, new = (
            json.loads((directory / name).read_text()) for name in ("old", "new")
        )
        assert loaded(directory / "first") == old
        outcome = "none"
        if target.exists():
            found = loaded(target)
            assert found in (old, new)
            outcome = "old" if found == old else "new"
        assert outcome in ("new", "old" if overwrite else "none")
        # The save is repeated, although files of the killed save are still there.
        assert save() == SAVED
        assert loaded(target) == new
        left = {path.name for path in directory.iterdir()} - {
            "calls",
            "old",
            "new",
            "trained",
        }
        assert left == {"first", "second"}, left
        return OUTCOMES[outcome]

    assert in_one(begin) == 0
    names = {status: name for name, status in OUTCOMES.items()}
    outcomes, killed = dict.fromkeys(OUTCOMES, 0), 0
    for overwrite in (False, True):
        shutil.rmtree(target, ignore_errors=True)
        if overwrite:
            shutil.copytree(directory / "first", target)
        assert in_one(save) == SAVED
        points = points_of((directory / "calls").read_text().split("\n"))
        for point in points[overwrite::2]:
            shutil.rmtree(target, ignore_errors=True)
            if overwrite:
                shutil.copytree(directory / "first", target)
            # The number of calls varies a little between runs, so the last points may
            # lie after the end of a run.
            status = in_one(partial(save, point))
            assert status in (KILLED, SAVED), (point, status)
            killed += status == KILLED
            outcome = in_one(partial(check, overwrite))
            assert outcome in names, point
            outcomes[names[outcome]] += 1
    print(f"killed at {killed} points: {outcomes}")
    assert killed >= POINTS - 4
    assert sum(outcomes.values()) == POINTS
    assert min(outcomes.values()) > 0


def on_rank(
    rank: int, directory: Path, work: Callable[[DistributedModelParallel], int]
) -> int:
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2
    )
    model = models.recstore("row_wise")
    models.train(model)
    return work(model)


def ranks(directory: Path) -> None:
    def first(rank: int) -> int:
        def work(model: DistributedModelParallel) -> int:
            with Calls() as calls:
                save_checkpoint(model, directory / "first")
            (directory / f"calls_{rank}").write_text(str(len(calls.names)))
            models.write_down(model, directory)
            dist.barrier()
            return 0

        return on_rank(rank, directory, work)

    def second(rank: int, victim: int, share: float) -> int:
        def work(model: DistributedModelParallel) -> int:
            calls = int((directory / f"calls_{rank}").read_text())
            try:
                with Calls(int(calls * share) if rank == victim else None):
                    save_checkpoint(model, directory / "second")
            except Exception as error:
                (directory / f"error_{rank}").write_text(repr(error))
                return RAISED
            return SAVED

        return on_rank(rank, directory, work)

    def both(work: Callable[[int], int]) -> list[int]:
        (directory / "rendezvous").unlink(missing_ok=True)
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                try:
                    os._exit(work(rank))
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        return [
            os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children
        ]

    def check(path: Path) -> int:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        expected = models.whole_tables(directory)
        for name, ids, rows, _ in loaded(path):
            assert set(ids) == expected[name].keys()
            assert all(
                row == expected[name][i]["weight"].tolist()
                for i, row in zip(ids, rows, strict=True)
            )
        return 0

    assert both(first) == [0, 0]
    for victim, share in [(0, 0.3), (1, 0.3), (1, 0.6), (0, 0.75), (0, 0.93)]:
        status = both(
            lambda rank, victim=victim, share=share: second(rank, victim, share)
        )  # type: ignore[misc]
        assert status[victim] == KILLED, (victim, share, status)
        # The surviving rank raises, unless the checkpoint was complete.
        whole = (directory / "second").exists()
        assert status[1 - victim] in ((RAISED, SAVED) if whole else (RAISED,)), (
            victim,
            share,
            status,
        )
        assert in_a_fork(lambda: check(directory / "first")) == 0
        if whole:
            assert in_a_fork(lambda: check(directory / "second")) == 0
            shutil.rmtree(directory / "second")
    assert both(lambda rank: second(rank, -1, 0)) == [SAVED, SAVED]
    assert in_a_fork(lambda: check(directory / "second")) == 0
    print(
        "survivors raised:",
        *sorted(path.read_text() for path in directory.glob("error_*")),
        sep="\n",
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # libgomp's threads do not survive a fork
    {"one": one, "ranks": ranks}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
