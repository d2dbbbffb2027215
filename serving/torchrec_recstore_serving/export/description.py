"""Describes files of exports, in values that ``json`` can write.

Tests: tests/serving/export/test_hashed_tables.py and test_delta.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from torchrec_recstore_serving.export.opening import is_hashed, load_export
from torchrec_recstore_serving.export.verification import FORMAT, kind_of


def described(path: Path) -> dict[str, Any]:
    """Describes an exported model, a package or a delta, for JSON.

    The file is not verified: see :func:`torchrec_recstore.inference.verify`.

    Args:
        path: The file.

    Returns:
        For both kinds: ``path``, ``kind`` (``"export"`` or ``"delta"``), ``format``,
        ``version``, ``tables`` by name, ``dense`` (the names of the other parameters
        and buffers) and ``bytes``. For an exported model also ``index`` (``"sorted"``
        or ``"hash"``) and ``dtype``, the data type of the rows. For a delta also
        ``base``, the version to which it can be applied. For a package with a checksum
        only ``path``, ``kind`` (``"package"``), ``format`` and ``bytes``.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is neither an exported model nor a delta, or it is damaged.
    """
    kind = kind_of(path)
    if kind == "package":
        return {
            "path": str(path),
            "kind": kind,
            "format": FORMAT,
            "bytes": path.stat().st_size,
        }
    return _delta(path) if kind == "delta" else _export(path)


def _export(path: Path) -> dict[str, Any]:
    """Describes an exported model."""
    served = load_export(path)
    tables: dict[str, dict[str, int]] = {}
    tensors_of_tables: set[str] = set()
    for module_path, module in served.named_modules():
        if not hasattr(module, "has_ids"):
            continue
        prefix = f"{module_path}." if module_path else ""
        tensors_of_tables |= {f"{prefix}ids", f"{prefix}rows"}
        tables[module.name] = {
            "rows": module.row_count(),
            "dim": module.dim,
            "bytes": module.size_bytes(),
        }
    return {
        "path": str(path),
        "kind": "export",
        "format": FORMAT,
        "version": served.recstore_version(),
        "index": "hash" if is_hashed(served) else "sorted",
        "dtype": served.recstore_row_format(),
        "tables": tables,
        "dense": sorted(served.state_dict().keys() - tensors_of_tables),
        "bytes": path.stat().st_size,
    }


def _delta(path: Path) -> dict[str, Any]:
    """Describes a delta."""
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
        base = bytes(tensors["base"].tolist()).decode()
        version = bytes(tensors["version"].tolist()).decode()
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a delta, or it is damaged: {error}") from error
    names = [
        key.removesuffix("/removed") for key in tensors if key.endswith("/removed")
    ]
    tables: dict[str, dict[str, int]] = {}
    for name in sorted(names):
        tables[name] = {
            "rows": len(tensors[f"{name}/ids"]),
            "removed": len(tensors[f"{name}/removed"]),
        }
    dense = [key.removeprefix("dense/") for key in tensors if key.startswith("dense/")]
    return {
        "path": str(path),
        "kind": "delta",
        "format": FORMAT,
        "version": version,
        "base": base,
        "tables": tables,
        "dense": sorted(dense),
        "bytes": path.stat().st_size,
    }
