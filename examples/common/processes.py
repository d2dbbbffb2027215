"""The process group of an example, and the progress bar that only its first process shows."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from common.command import DataError
from tqdm import tqdm

T = TypeVar("T")


def _join_torchrun() -> None:
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        dist.init_process_group("gloo")
        return
    # After a restart torchrun hands out the same store, with the addresses of dead processes in it, and a rank that
    # reads one before it is replaced fails (torch 2.13, pytorch issue 135712). Nodes may count restarts differently, so
    # on several of them TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d are torch's own way.
    store, rank, world_size = next(dist.rendezvous("env://"))
    attempt = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world_size)


@contextmanager
def process_group() -> Iterator[None]:
    """Joins torchrun's gloo group, or makes one of this process alone.

    An exception leaves it on the first rank that fails, which says for all what is wrong. The others, which meet the
    same, or that one is gone, end without a word.
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
    """Whether no other rank has asked this before."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store().add("failed", 1) == 1


def rank_and_world_size() -> tuple[int, int]:
    """This process's place in the group; (0, 1) where there is none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_rank_0(work: Callable[[], T]) -> T:
    """Works on rank 0 alone and hands its result to all; collective.

    Raises:
        DataError: the one that the work raised, on every rank.
    """
    found: list[tuple[T | None, str | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            found[0] = work(), None
        except DataError as error:
            found[0] = None, str(error)
    dist.broadcast_object_list(found)
    result, error_line = found[0]
    if error_line is not None:
        raise DataError(error_line)
    return result  # type: ignore[return-value]


def progress_bar(**options: Any) -> tqdm[Any]:
    """A tqdm bar on rank 0, where stderr is a terminal."""
    # tqdm shows nothing on a terminal that states no size; shutil takes 80 by 24 then.
    width, height = shutil.get_terminal_size()
    hidden = rank_and_world_size()[0] != 0 or not sys.stderr.isatty()
    return tqdm(unit_scale=True, ncols=width, nrows=height, disable=hidden, **options)
