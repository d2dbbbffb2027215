"""Which rows and weights a served model has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchrec_recstore.inference.checksum import checksum_of, hexadecimal, scripted_function
from torchrec_recstore.inference.served_tables import ServedTable

_KINDS = ("ids", "rows")


def served_tables(model: nn.Module, *, every_path: bool = False) -> Iterator[tuple[str, ServedTable]]:
    """The path and the table of each one in a model.

    Args:
        model: that has them.
        every_path: also the further paths of a table that a model has at several.
    """
    for path, module in model.named_modules(remove_duplicate=not every_path):
        if isinstance(module, ServedTable):
            yield path, module


def dense_tensors(model: nn.Module, *, every_path: bool = False) -> dict[str, Tensor]:
    """A served model's tensors beside its tables, by name: parameters, buffers and plain attributes.

    Args:
        model: that has them.
        every_path: also the further names of a tensor that has several.
    """
    tensors: dict[str, Tensor] = {}
    known: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=not every_path):
        if isinstance(module, ServedTable):
            continue
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, Tensor) and (every_path or id(value) not in known):
                known.add(id(value))
                tensors[f"{path}.{name}" if path else name] = value.detach()
    return tensors


def tensor_at(script: torch.jit.ScriptModule, name: str) -> Tensor | None:
    """A served model's tensor of that name, None where it has none."""
    found: object = script
    for part in name.split("."):
        found = getattr(found, part, None)
    return found.detach() if isinstance(found, Tensor) else None


def version_of(served: nn.Module, script: torch.jit.ScriptModule) -> str:
    """What says which rows and weights a served model has: a checksum of all of them, 16 hexadecimal digits.

    Args:
        served: the model.
        script: that as TorchScript, or an earlier export of the same model: tensors that it does not have do not count.
    """
    tensors = {f"{table.name}/{kind}": getattr(table, kind) for _, table in served_tables(served) for kind in _KINDS}
    for name, tensor in dense_tensors(served, every_path=True).items():
        if tensor_at(script, name) is not None:
            tensors[f"dense/{name}"] = tensor
    return str(scripted_function(hexadecimal)(scripted_function(checksum_of)(tensors)))
