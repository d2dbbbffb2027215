"""What a served file holds, as ``recstore inspect`` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from torchrec_recstore.inference.delta import load_export
from torchrec_recstore.inference.verification import delta_format, format_of_export, is_delta


def described(path: Path) -> dict[str, Any]:
    """What an exported model or a delta holds, in values that ``json`` writes.

    The file is not verified: see :func:`torchrec_recstore.inference.verify`.

    Args:
        path: the file.

    Returns:
        Of both kinds: ``path``, ``kind`` (``"export"`` or ``"delta"``), ``format``, ``version``, ``tables``, by name,
        ``dense`` (names of the other parameters and buffers) and ``bytes``. Of an exported model also ``dtype``, of
        the rows, and of a delta the version of its ``base``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is neither, or it is damaged.
    """
    return _delta(path) if is_delta(path) else _export(path)


def _export(path: Path) -> dict[str, Any]:
    number = format_of_export(path)
    served = load_export(path)
    modules = {path: module for path, module in served.named_modules() if hasattr(module, "has_ids")}
    of_tables = {f"{path}.{kind}".lstrip(".") for path in modules for kind in ("ids", "rows")}
    tables = {
        table.name: {
            "rows": len(table.raw_ids()) if table.has_ids else len(table.rows),
            "dim": table.dim,
            "bytes": table.ids.nbytes + table.rows.nbytes,
        }
        for table in modules.values()
    }
    return {
        "path": str(path),
        "kind": "export",
        "format": number,
        "version": served.recstore_version(),
        "dtype": served.recstore_row_format(),
        "tables": tables,
        "dense": sorted(served.state_dict().keys() - of_tables),
        "bytes": path.stat().st_size,
    }


def _delta(path: Path) -> dict[str, Any]:
    try:
        number = delta_format(path)
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
        base, version = (bytes(tensors[key].tolist()).decode() for key in ("base", "version"))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is no delta, or it is damaged: {error}") from error
    names = sorted(key.removesuffix("/removed") for key in tensors if key.endswith("/removed"))
    return {
        "path": str(path),
        "kind": "delta",
        "format": number,
        "version": version,
        "base": base,
        "tables": {
            name: {"rows": len(tensors[f"{name}/ids"]), "removed": len(tensors[f"{name}/removed"])} for name in names
        },
        "dense": sorted(key.removeprefix("dense/") for key in tensors if key.startswith("dense/")),
        "bytes": path.stat().st_size,
    }
