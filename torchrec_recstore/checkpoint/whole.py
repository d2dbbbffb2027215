"""Between tensors of stock TorchRec models, sharded or not, and plain ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.sharders.gather import all_gathered

_Key = TypeVar("_Key", bound=Hashable)


def is_sharded(value: object) -> bool:
    """Whether a value of a ``state_dict`` is spread over ranks."""
    return isinstance(value, ShardedTensor | DTensor)


def local_parts(value: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """What this rank holds of a tensor: where each part begins, and the part, which shares its memory."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    elif isinstance(value, DTensor):
        local = value.to_local()
        if not isinstance(local, LocalShardsWrapper):
            raise ValueError("a DTensor without TorchRec's LocalShardsWrapper is no table of TorchRec's")
        for offsets, part in zip(local.local_offsets(), local.local_shards(), strict=True):
            yield tuple(offsets), part.detach()
    else:
        yield (0,) * value.dim(), value.detach()


def whole(what: str, value: Any) -> Tensor:
    """A plain tensor of which this process holds every part; without a copy where it is plain already.

    Args:
        what: names the tensor in the error.
        value: a tensor, ``ShardedTensor`` or ``DTensor`` of a TorchRec table.

    Raises:
        ValueError: this process holds only a part of it.
    """
    if not is_sharded(value):
        return value.detach()  # type: ignore[no-any-return]
    out, held = _filled(value)
    if held != out.numel():
        raise ValueError(f"{what} is spread over several processes: convert it where one process has all of its shards")
    return out


def gathered(values: Mapping[_Key, Any], env: ShardingEnv) -> dict[_Key, Tensor]:
    """Plain tensors from the parts of all ranks. Collective; the same on every rank.

    Args:
        values: sharded tensors by their keys; ranks without a part of one may lack it, as they do TorchRec's states.
        env: of the model.
    """
    sizes = {key: (tuple(value.size()), value.dtype) for key, value in values.items()}
    everywhere = {key: size for of_rank in all_gathered(sizes, env) for key, size in of_rank.items()}
    out: dict[_Key, Tensor] = {}
    for key, (size, dtype) in everywhere.items():
        out[key] = _filled(values[key])[0] if key in values else torch.zeros(size, dtype=dtype)
        summed(out[key], env)  # every cell has one owner: a sum with zeros
    return out


def summed(value: Tensor, env: ShardingEnv) -> None:
    """Makes ``value`` its sum over all ranks. Collective."""
    if env.process_group is not None and dist.get_world_size(env.process_group) > 1:
        dist.all_reduce(value, group=env.process_group)


def fill(value: Any, plain: Tensor) -> None:
    """Copies what this rank holds of ``value`` out of a whole tensor.

    Args:
        value: as for :func:`whole`.
        plain: of its shape; or (R,) for a row-wise state of C column shards, (C * R,), each of which gets a copy.
    """
    for offsets, part in local_parts(value):
        if part.dim() == 1:
            offsets = (offsets[0] % max(1, plain.shape[0]),)  # TorchRec 1.8.0 puts such states one behind the other
        part.copy_(plain[_cut(offsets, part)])


def column_starts(value: Any) -> list[int]:
    """Where the column shards begin of a (R, D) tensor of which this process holds every part."""
    return sorted({offsets[1] for offsets, _ in local_parts(value)})


def _filled(value: Any) -> tuple[Tensor, int]:
    out = torch.zeros(value.size(), dtype=value.dtype)
    held = 0
    for offsets, part in local_parts(value):
        out[_cut(offsets, part)] = part.cpu()
        held += part.numel()
    return out, held


def _cut(offsets: tuple[int, ...], part: Tensor) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape, strict=True))
