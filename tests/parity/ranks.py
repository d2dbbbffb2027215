"""Runs many trials on one group of ranks.

A failure ends only its trial; a hang or a crash ends only its group.
"""

from __future__ import annotations

import gc
import json
import os
import re
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed import comm
from torchrec.distributed.planner.types import PlannerError

import torchrec_recstore
from tests.processes import START_METHOD

from .cells import Cell
from .run_cell import ranks_of_a_node, run_cell
from .uses.use import Use

COLLECTIVE_TIMEOUT = timedelta(seconds=20)
# a rank waits this long for the others to end their trial
AGREEMENT_TIMEOUT = timedelta(seconds=45)
STALL_S = 120.0  # longer than any trial, and than starting four ranks on two busy cores
ATTEMPTS = 2  # gloo's teardown aborts in some runs, with stock TorchRec too
PACKAGE = Path(torchrec_recstore.__file__).parent
LONGEST = 300  # characters of an error
TRACEBACKS = "PARITY_TRACEBACKS"  # set it to see where trials failed


@dataclass(frozen=True)
class Trial:
    """A cell or a use on RecStore's kernel ("recstore") or on TorchRec's FUSED one
    ("stock").
    """

    cell: Cell | Use
    kernel: str


@dataclass(frozen=True)
class Report:
    """The result of a trial on a rank.

    Args:
        error: The error. Empty if the trial succeeded.
        refused: Whether RecStore or the planner raised the error because something is
            not supported.
        result: What a use has returned.
    """

    error: str = ""
    refused: bool = False
    result: Any = None


def run_trials(trials: Sequence[Trial]) -> dict[Trial, list[Report]]:
    """Returns the reports of each rank for each trial.

    Args:
        trials: Trials of one world size. They run in turn on one group of ranks, which
            is replaced if it is lost.
    """
    reports: dict[Trial, list[Report]] = {}
    attempts = dict.fromkeys(trials, 0)
    while pending := [trial for trial in trials if trial not in reports]:
        attempts[pending[0]] += 1
        found, end = _run_group(pending)
        reports.update(found)
        if pending[0] not in reports and attempts[pending[0]] == ATTEMPTS:
            reports[pending[0]] = [Report(end)]
    return reports


def _run_group(trials: Sequence[Trial]) -> tuple[dict[Trial, list[Report]], str]:
    world_size = trials[0].cell.world_size
    context = mp.get_context(START_METHOD)
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(
                target=_rank, args=(rank, world_size, directory, list(trials))
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        seen, since, end = 0, time.monotonic(), ""
        while any(process.is_alive() for process in ranks):
            time.sleep(0.05)
            files = len(os.listdir(directory))
            if files != seen:
                seen, since = files, time.monotonic()
            if time.monotonic() - since > STALL_S:
                end = f"the ranks hang (nothing for {STALL_S:.0f} s)"
                for process in ranks:
                    process.kill()
        codes = sorted(
            {process.exitcode for process in ranks for _ in (process.join(),)}
        )
        end = end or f"the ranks ended with exit codes {codes}"
        found = {}
        for index, trial in enumerate(trials):
            paths = [Path(directory, f"{index}_{rank}") for rank in range(world_size)]
            if all(path.exists() for path in paths):
                found[trial] = [
                    Report(**json.loads(path.read_text())) for path in paths
                ]
    return found, end


def _rank(rank: int, world_size: int, directory: str, trials: Sequence[Trial]) -> None:
    torch.set_num_threads(1)
    local = ranks_of_a_node(world_size)
    os.environ.update(
        LOCAL_WORLD_SIZE=str(local),
        LOCAL_RANK=str(rank % local),
        GROUP_RANK=str(rank // local),
    )
    store = dist.FileStore(f"{directory}/store", world_size)
    _join_group(store, "first", rank, world_size)
    status = 0
    try:
        for index, trial in enumerate(trials):
            report = _report(trial, rank, Path(directory, f"files_{index}"))
            if report.error:
                # at once, for ranks that wait for this one: else they do so until the
                # time limit
                _leave_group()
            unfinished = Path(directory, f"unfinished_{rank}")
            unfinished.write_text(json.dumps(asdict(report)))
            unfinished.rename(Path(directory, f"{index}_{rank}"))
            store.set(f"{index}/{rank}", "failed" if report.error else "done")
            everyone = [f"{index}/{r}" for r in range(world_size)]
            store.wait(everyone, AGREEMENT_TIMEOUT)
            if any(store.get(key) == b"failed" for key in everyone):
                # Collectives may be left half done: a group of its own for what
                # follows.
                if not report.error:
                    _leave_group()
                _join_group(store, f"after {index}", rank, world_size)
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)  # gloo's own teardown aborts in some runs after all work is done


def _leave_group() -> None:
    gc.collect()  # a trial's modules hold the group, and with it the connections
    dist.destroy_process_group()


def _join_group(store: dist.Store, name: str, rank: int, world_size: int) -> None:
    comm._INTRA_PG = comm._CROSS_PG = None  # torchrec 1.8.0 keeps the last group's
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _report(trial: Trial, rank: int, files: Path) -> Report:
    try:
        if isinstance(trial.cell, Use):
            files.mkdir(exist_ok=True)
            return Report(result=trial.cell.run(trial.kernel, files))
        run_cell(trial.cell, trial.kernel, rank)
        return Report()
    except (
        CheckpointException
    ) as error:  # of torch.distributed.checkpoint, around the errors of the ranks
        cause, trace = next(iter(error.failures.values()))
        return _failed(trial, rank, cause, trace)
    except Exception as error:
        return _failed(trial, rank, error, traceback.extract_tb(error.__traceback__))


def _failed(
    trial: Trial, rank: int, error: BaseException, trace: traceback.StackSummary
) -> Report:
    if os.environ.get(TRACEBACKS):
        print(f"{trial} on rank {rank}:\n{''.join(trace.format())}{error}", flush=True)
    refused = isinstance(error, PlannerError) or str(PACKAGE) in trace[-1].filename
    return Report(f"{type(error).__name__}: {_one_line(str(error))}", refused)


def _one_line(message: str) -> str:
    """The message without the parts that differ between runs and cells."""
    line = " ".join(re.sub(r"\x1b\[\d+m", "", message).split()) or "no message"
    line = re.sub(r"\[[^\]]*?([a-z_]+\.cc):\d+\]", r"[\1]", line)
    line = re.sub(r"\[[0-9a-f.:]+\]:\d+", "a peer", line)
    line = re.sub(r"\(?\b\d+\)?(,? (?:vs\.?|got) )\(?\d+\)?", r"N\1M", line)
    line = re.sub(r", with args: .*", "", line)
    line = re.sub(r"(index) \d+", r"\1 I", line)
    line = line.replace("|", "/")
    return line if len(line) <= LONGEST else line[:LONGEST].rsplit(" ", 1)[0] + " ..."
