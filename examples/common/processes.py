"""The process group of an example, and a progress bar that only rank 0 shows."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm import tqdm

from common.command import DataError

T = TypeVar("T")


def _join_torchrun() -> None:
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        dist.init_process_group("gloo")
        return
    # After a restart, torchrun reuses the store, which still contains the addresses of
    # dead processes. A rank that reads such an address before it is replaced fails
    # (torch 2.13, pytorch issue 135712). A prefix of the number of restarts separates
    # the attempts. Nodes may count restarts differently, so for several nodes torch
    # itself offers TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d.
    store, rank, world_size = next(dist.rendezvous("env://"))
    attempt = dist.PrefixStore(
        f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store
    )
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world_size)


@contextmanager
def process_group() -> Iterator[None]:
    """Joins the gloo group of torchrun, or creates a group of this process alone.

    If ranks raise an exception, only the first rank that fails passes it on and reports
    it. The other ranks exit without a message, because they failed for the same reason
    or because the first rank has exited.
    """
    if dist.is_torchelastic_launched():
        _join_torchrun()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
        dist.barrier()
    except Exception:
        if not _fails_first():
            raise SystemExit(1) from None
        raise
    finally:
        dist.destroy_process_group()


def _fails_first() -> bool:
    """Returns whether this is the first rank that calls this function."""
    assert dist.group.WORLD is not None
    try:
        return dist.group.WORLD.get_group_store().add("failed", 1) == 1
    except dist.DistError:  # the host of the store has ended before
        return False


def rank_and_world_size() -> tuple[int, int]:
    """Returns the rank and the world size, or (0, 1) if there is no process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def on_each_rank(work: Callable[[], T]) -> list[T]:
    """Calls ``work`` on every rank, and returns the results of all ranks. Collective.

    Raises:
        DataError: ``work`` raised it on a rank. It is raised on every rank.
    """
    result: T | None = None
    message: str | None = None
    try:
        result = work()
    except DataError as error:
        message = str(error)
    outcomes = [(result, message)] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, message))
    for _, message in outcomes:
        if message is not None:
            raise DataError(message)
    return [result for result, _ in outcomes]  # type: ignore[misc]


def on_rank_0(work: Callable[[], T]) -> T:
    """Calls ``work`` on rank 0 and returns its result on every rank.

    See :func:`on_each_rank`.
    """
    results = on_each_rank(lambda: work() if dist.get_rank() == 0 else None)
    return results[0]  # type: ignore[return-value]


def progress_bar(**options: Any) -> tqdm[Any]:
    """Returns a tqdm bar, which is shown on rank 0 if stderr is a terminal."""
    # tqdm shows nothing on a terminal of unknown size. shutil assumes 80 by 24 in that
    # case.
    width, height = shutil.get_terminal_size()
    hidden = rank_and_world_size()[0] != 0 or not sys.stderr.isatty()
    return tqdm(
        unit_scale=True,
        ncols=width,
        nrows=height,
        disable=hidden,
        **options,
    )
