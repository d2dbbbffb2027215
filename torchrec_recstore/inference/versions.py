"""Which rows and weights a served model has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor, nn

from torchrec_recstore.inference.served_tables import ServedTable

_KINDS = ("ids", "rows")


def served_tables(model: nn.Module) -> Iterator[tuple[str, ServedTable]]:
    """The path and the table of each one in a model."""
    for path, module in model.named_modules():
        if isinstance(module, ServedTable):
            yield path, module


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A served model's tensors beside its tables, by name."""
    inside = tuple(f"{path}." for path, _ in served_tables(model))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items() if not name.startswith(inside or ("\0",))}


def version_of(served: nn.Module) -> str:
    """What says which rows and weights a served model has: a checksum of all of them, 32 hexadecimal digits."""
    tensors = [(f"{table.name}/{kind}", getattr(table, kind)) for _, table in served_tables(served) for kind in _KINDS]
    digest = xxhash.xxh3_128()
    for name, tensor in sorted([*tensors, *dense_tensors(served).items()], key=lambda each: each[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
