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
    """A ``ValueError`` in the block on any rank becomes one on every rank, so that none waits for it. Collective.

    Raises:
        ValueError: the first rank's.
    """
    error = None
    try:
        yield
    except ValueError as refused:
        error = str(refused)
    for text in all_gathered(error, env):
        if text is not None:
            raise ValueError(text)
