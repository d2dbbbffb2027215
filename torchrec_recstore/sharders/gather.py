"""The exchange of objects and errors between the ranks of a sharded module.

Tests: tests/distributed/test_reshard_failures.py, tests/checkpoint/test_crashes.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

_T = TypeVar("_T")


def all_gathered(value: _T, env: ShardingEnv) -> list[_T]:
    """Returns ``value`` of every rank, in order.

    Collective. Raises RuntimeError if a rank has died (not with NCCL).
    """
    # The group's methods also work after dist.destroy_process_group, which may be
    # called while a checkpoint is written; the functions of torch.distributed look the
    # group up and fail (torch 2.13).
    group = env.process_group
    if group is None or group.size() == 1:
        return [value]
    values: list[_T] = [value] * group.size()
    try:
        # The group has the NCCL backend only.
        if torch.device("cpu") not in group._device_types:
            dist.all_gather_object(values, value, group=group)
            return values
        return _through_first_rank(values, value, group)
    except RuntimeError as error:
        reason = str(error).strip()
        raise RuntimeError(f"a rank of the job has died: {reason}") from error


def _through_first_rank(
    values: list[_T],
    value: _T,
    group: dist.ProcessGroup,
) -> list[_T]:
    # gloo's own all_gather is a ring: a rank that is not next to the dead rank waits
    # for 30 minutes (torch 2.13).
    if group.rank() != 0:
        _send(value, group, 0)
        received = _received(group, 0)
        # It is sent instead of the list of values if a rank has died.
        if isinstance(received, RuntimeError):
            raise received
        return cast(list[_T], received)

    living: list[int] = []
    died: RuntimeError | None = None
    for rank in range(1, len(values)):
        try:
            values[rank] = _received(group, rank)
            living.append(rank)
        except RuntimeError as error:
            died = RuntimeError(f"rank {rank}: {error}")

    for rank in living:
        answer: object = values if died is None else died
        try:
            _send(answer, group, rank)
        except RuntimeError as error:
            # The remaining ranks get the error now or in the next call.
            died = RuntimeError(f"rank {rank}: {error}")
    if died is not None:
        raise died
    return values


def _send(
    value: object,
    group: dist.ProcessGroup,
    rank: int,
) -> None:
    content = bytearray(pickle.dumps(value))
    data = torch.frombuffer(content, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    for tensor in (size, data):
        group.send([tensor], rank, 0).wait()


def _received(group: dist.ProcessGroup, rank: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    group.recv([size], rank, 0).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    group.recv([data], rank, 0).wait()
    return pickle.loads(data.numpy().tobytes())


@contextmanager
def refused_together(env: ShardingEnv) -> Iterator[None]:
    """Raises the error of the first rank that fails in the block on every rank.

    So no rank waits for one that has failed.

    Collective.
    """
    local_error: Exception | None = None
    try:
        yield
    except Exception as error:
        local_error = error
    for first_error in all_gathered(picklable(local_error), env):
        if first_error is None:
            continue
        if local_error is not None and str(first_error) == str(local_error):
            raise local_error  # It has the traceback of this rank.
        raise first_error from local_error


def picklable(error: Exception | None) -> Exception | None:
    """Returns the error, or a ``RuntimeError`` if the error cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def whole_environment() -> ShardingEnv:
    """Returns the environment of all ranks of the job.

    It has one rank if ``torch.distributed`` is not initialized.
    """
    if not dist.is_initialized():
        return ShardingEnv.from_local(world_size=1, rank=0)
    group = dist.group.WORLD
    assert group is not None
    return ShardingEnv.from_process_group(group)
