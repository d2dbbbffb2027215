"""What the ranks of a sharded module tell each other."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

_T = TypeVar("_T")


def all_gathered(value: _T, env: ShardingEnv) -> list[_T]:
    """``value`` of every rank of the module's group, in their order. Collective.

    Raises:
        RuntimeError: a rank has died; on every rank that lives, unless the group is of NCCL.
    """
    group = env.process_group
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    values: list[_T] = [value] * dist.get_world_size(group)
    try:
        if dist.get_backend(group) == "nccl":  # a group made without a name for its backend has gloo, too
            dist.all_gather_object(values, value, group=group)
            return values
        return _through_first_rank(values, value, group)
    except RuntimeError as error:
        raise RuntimeError(f"a rank of the job has died: {str(error).strip()}") from error


def _through_first_rank(values: list[_T], value: _T, group: dist.ProcessGroup) -> list[_T]:
    # gloo's own all_gather goes round in a ring: who is not next to the rank that died waits for half an hour (2.13).
    received: list[Any] = [None]
    if dist.get_rank(group) != 0:
        dist.send_object_list([value], group=group, group_dst=0)
        dist.recv_object_list(received, group=group, group_src=0)
        if isinstance(received[0], _Died):
            raise RuntimeError(received[0].why)
        return cast(list[_T], received[0])
    living, died = [], None
    for rank in range(1, len(values)):
        try:
            dist.recv_object_list(received, group=group, group_src=rank)
            values[rank] = received[0]
            living.append(rank)
        except RuntimeError as error:
            died = _Died(f"rank {rank}: {error}")
    for rank in living:
        try:
            dist.send_object_list([values if died is None else died], group=group, group_dst=rank)
        except RuntimeError as error:  # the others are to know, now or in the next call
            died = _Died(f"rank {rank}: {error}")
    if died is not None:
        raise RuntimeError(died.why)
    return values


@dataclass(frozen=True)
class _Died:
    """In the place of values: a rank is not there any more."""

    why: str


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
    for first in all_gathered(_picklable(error), env):
        if first is not None and error is not None and (first is error or str(first) == str(error)):
            raise error
        if first is not None:
            raise first from error


def _picklable(error: Exception | None) -> Exception | None:
    """The error, or one that says the same where it would not arrive."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def whole_environment() -> ShardingEnv:
    """All ranks of the job; this process alone where ``torch.distributed`` is not initialised."""
    if not dist.is_initialized():
        return ShardingEnv.from_local(world_size=1, rank=0)
    group = dist.group.WORLD
    assert group is not None
    return ShardingEnv.from_process_group(group)
