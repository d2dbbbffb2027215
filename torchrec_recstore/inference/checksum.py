"""A checksum of a delta's tensors that TorchScript computes too: safetensors files have none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def checksum_of(tensors: dict[str, Tensor]) -> Tensor:
    """What changes with any bit of a delta's tensors, their names or their shapes.

    Always run as TorchScript, where the characters of a name are its bytes.

    Args:
        tensors: by name; one called ``checksum`` is left out.

    Returns:
        (1,) int64: a sum of all words of eight bytes, each times an odd number that goes by its place.
    """
    total = torch.zeros(1, dtype=torch.int64)
    factors = torch.arange(1 << 17) * -7046029254386353131 | 1  # 2**64 over the golden ratio
    for name in sorted(tensors.keys()):
        if name == "checksum":
            continue
        tensor = tensors[name]
        described: list[int] = []
        for char in name:
            described.append(ord(char))
        described.append(0)
        for size in tensor.shape:
            described.append(size)
        for data in (torch.tensor(described), tensor.reshape(-1)):
            for first in range(0, data.shape[0], 1 << 16):
                # TorchScript takes view(dtype) for view(size).
                part = torch.view_copy(data[first : first + (1 << 16)], dtype=torch.uint8)
                words = torch.view_copy(F.pad(part, [0, -part.shape[0] % 8]), dtype=torch.int64)
                total = total * 6364136223846793005 + (words * factors[: words.shape[0]]).sum()
    return total
