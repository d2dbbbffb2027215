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
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec.test_utils
from torchrec.distributed import comm

from tests.distributed.workers import run_in_processes

from .substitutes import SOURCE_PACKAGES, TEST_UTILS, Finder


def run_on_ranks(
    self: unittest.TestCase,
    *,
    callable: Callable[..., None],
    world_size: int = 2,
    **kwargs: Any,
) -> None:
    """Replaces ``MultiProcessTestBase._run_multi_process_test``."""
    environment = dict(os.environ)  # a test sets environment variables for its ranks
    run_in_processes(
        world_size,
        functools.partial(
            _rank, environment=environment, function=callable, kwargs=kwargs
        ),
    )


def _rank(
    rank: int,
    world_size: int,
    environment: dict[str, str],
    function: Callable[..., None],
    kwargs: dict[str, Any],
) -> None:
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.manual_seed(0)
    random.seed(rank)
    function(rank=rank, world_size=world_size, **kwargs)


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
