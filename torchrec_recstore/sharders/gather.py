"""What the ranks of a sharded module tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

_T = TypeVar("_T")


def all_gathered(value: _T, env: ShardingEnv) -> list[_T]:
    """``value`` of every rank of the module's group, in their order. Collective."""
    group = env.process_group
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    values: list[_T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def refused_together(env: ShardingEnv) -> Iterator[None]:
    """An error in the block on any rank becomes one on every rank, so that none waits for it. Collective.

    Raises:
        Exception: the first failing rank's.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as refused:
        error = refused
    for first in all_gathered(error, env):
        if first is not None:
            raise first from error


def whole_environment() -> ShardingEnv:
    """All ranks of the job; this process alone where ``torch.distributed`` is not initialised."""
    if not dist.is_initialized():
        return ShardingEnv.from_local(world_size=1, rank=0)
    group = dist.group.WORLD
    assert group is not None
    return ShardingEnv.from_process_group(group)
