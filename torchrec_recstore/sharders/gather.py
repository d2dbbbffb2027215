"""What the ranks of a sharded module tell each other."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

_T = TypeVar("_T")


def all_gathered(value: _T, env: ShardingEnv) -> list[_T]:
    """``value`` of every rank of the module's group, in their order. Collective.

    Raises:
        RuntimeError: a rank has died; on every rank that lives, unless the group is of NCCL.
    """
    # The group's own methods, which work after dist.destroy_process_group, too: a checkpoint may be written meanwhile.
    # The functions of dist look the group up, and gloo's groups live as long as someone has them (torch 2.13).
    group = env.process_group
    if group is None or group.size() == 1:
        return [value]
    values: list[_T] = [value] * group.size()
    try:
        if torch.device("cpu") not in group._device_types:  # of nccl alone
            dist.all_gather_object(values, value, group=group)
            return values
        return _through_first_rank(values, value, group)
    except RuntimeError as error:
        raise RuntimeError(f"a rank of the job has died: {str(error).strip()}") from error


def _through_first_rank(values: list[_T], value: _T, group: dist.ProcessGroup) -> list[_T]:
    # gloo's own all_gather goes round in a ring: who is not next to the rank that died waits for half an hour (2.13).
    if group.rank() != 0:
        _send(value, group, 0)
        received = _received(group, 0)
        if isinstance(received, _Died):
            raise RuntimeError(received.why)
        return cast(list[_T], received)
    living, died = [], None
    for rank in range(1, len(values)):
        try:
            values[rank] = _received(group, rank)
            living.append(rank)
        except RuntimeError as error:
            died = _Died(f"rank {rank}: {error}")
    for rank in living:
        try:
            _send(values if died is None else died, group, rank)
        except RuntimeError as error:  # the others are to know, now or in the next call
            died = _Died(f"rank {rank}: {error}")
    if died is not None:
        raise RuntimeError(died.why)
    return values


def _send(value: object, group: dist.ProcessGroup, rank: int) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    for tensor in (torch.tensor([len(data)]), data):
        group.send([tensor], rank, 0).wait()


def _received(group: dist.ProcessGroup, rank: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    group.recv([size], rank, 0).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    group.recv([data], rank, 0).wait()
    return pickle.loads(data.numpy().tobytes())


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
