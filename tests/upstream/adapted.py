"""TorchRec's test modules, adapted: importing this module puts
:mod:`tests.upstream.substitutes` in place.

Ranks are processes as :mod:`tests.distributed.workers` starts them. TorchRec's own pool
waits forever for a rank that aborts, and gloo's teardown aborts in some runs after all
work is done. Here each rank waits for the other ranks at the end, and reports before it
exits.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec.test_utils
from torchrec.distributed import comm
from torchrec.test_utils import get_free_port

from tests.distributed.workers import run_in_processes

from .substitutes import SOURCE_PACKAGES, TEST_UTILS, Finder

Call = functools.partial[None]
"""What a rank runs: a function of the rank, the number of ranks, and the environment
variables that are not those of the test.
"""
_collected: list[Call] | None = None


@contextmanager
def one_start(world_size: int) -> Iterator[None]:
    """Runs at the end, one after the other in one start of the ranks, what tests have
    run on ranks in this context. The imports of a rank take longer than a case.

    A case that fails ends the others.
    """
    global _collected
    calls: list[Call] = []
    _collected = calls
    try:
        yield
    finally:
        _collected = None
    with tempfile.TemporaryDirectory() as directory:
        run_in_processes(
            world_size,
            functools.partial(_in_turn, calls=calls, store=f"{directory}/store"),
        )


def _in_turn(rank: int, world_size: int, calls: list[Call], store: str) -> None:
    ports = dist.FileStore(store, world_size)  # type: ignore[attr-defined]
    for number, call in enumerate(calls):
        # The store of the last group may still listen to the last port.
        if rank == 0:
            ports.set(str(number), str(get_free_port()))
        call(rank, world_size, {"MASTER_PORT": ports.get(str(number)).decode()})


def run_on_ranks(
    self: unittest.TestCase,
    *,
    callable: Callable[..., None],
    world_size: int = 2,
    **kwargs: Any,
) -> None:
    """Replaces ``MultiProcessTestBase._run_multi_process_test``."""
    # A test sets environment variables for its ranks.
    call = functools.partial(_rank, dict(os.environ), callable, kwargs)
    if _collected is None:
        run_in_processes(world_size, functools.partial(call, changed={}))
    else:
        _collected.append(call)


def _rank(
    environment: dict[str, str],
    function: Callable[..., None],
    kwargs: dict[str, Any],
    rank: int,
    world_size: int,
    changed: dict[str, str],
) -> None:
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(changed)
    torch.manual_seed(0)
    random.seed(rank)
    try:
        function(rank=rank, world_size=world_size, **kwargs)
    except Exception as error:
        error.add_note(f"The case: {kwargs}")
        raise


def leave_group(
    self: Any, exception_type: type[BaseException] | None, *args: Any
) -> None:
    """Replaces ``MultiProcessContext.__exit__``."""
    if exception_type is None:
        dist.barrier()
        dist.destroy_process_group()
        # torchrec 1.8.0 keeps the node groups of the destroyed group
        comm._INTRA_PG = comm._CROSS_PG = None
    elif self.world_size == 1:
        dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)


def seeded(set_up: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``seed_and_log``, which seeds with the time."""

    @functools.wraps(set_up)
    def with_seed(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return set_up(*args, **kwargs)

    return with_seed


def _install() -> None:
    loaded = [
        name for name in sys.modules if name in TEST_UTILS or name in SOURCE_PACKAGES
    ]
    assert not loaded, f"imported before they could be adapted: {loaded}"
    sys.meta_path.insert(0, Finder())
    torchrec.test_utils.seed_and_log = seeded  # before multi_process applies it
    from torchrec.distributed.test_utils.multi_process import (
        MultiProcessContext,
        MultiProcessTestBase,
    )

    MultiProcessTestBase._run_multi_process_test = run_on_ranks
    MultiProcessContext.__exit__ = leave_group


_install()
