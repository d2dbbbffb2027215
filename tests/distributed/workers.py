"""Runs a function on several ranks, in processes with a gloo group that end without
gloo's teardown.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.processes import START_METHOD


def run_on_ranks(world_size: int, function: Callable[[int, int], None]) -> None:
    """Runs ``function(rank, world_size)`` on every rank of a gloo group.

    Fails if the function raises on any rank.

    Args:
        function: at module level, so that it can be sent to other processes.
    """
    with tempfile.TemporaryDirectory() as directory:
        run_in_processes(
            world_size, partial(_in_group, function=function, directory=directory)
        )


def run_in_processes(
    world_size: int,
    function: Callable[[int, int], None],
    start_method: str = START_METHOD,
) -> None:
    """Runs ``function(rank, world_size)`` in one process for each rank.

    Fails if the function raises in any process.

    Args:
        function: at module level, or a partial of such a function, so that it can be
            sent to other processes.
        start_method: ``"spawn"`` for processes that use CUDA, which does not survive a
            fork.
    """
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(
                _worker,
                (world_size, directory, function),
                world_size,
                start_method=start_method,
            )
        except mp.ProcessExitedException as error:
            reports = "\n".join(
                path.read_text() for path in sorted(Path(directory).glob("rank_*"))
            )
            pytest.fail(reports or str(error), pytrace=False)


def _in_group(
    rank: int, world_size: int, function: Callable[[int, int], None], directory: str
) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world_size,
    )
    function(rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


def _worker(
    rank: int, world_size: int, directory: str, function: Callable[[int, int], None]
) -> None:
    torch.set_num_threads(1)
    status = 0
    try:
        function(rank, world_size)
    except BaseException:
        Path(directory, f"rank_{rank}").write_text(
            f"rank {rank}:\n{traceback.format_exc()}"
        )
        status = 1
    # gloo's teardown sometimes aborts after all work is done, also with stock TorchRec.
    os._exit(status)
