"""Describes publications of a directory, in values that ``json`` can write.

Tests: tests/serving/publish/test_inspection.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchrec_recstore_serving.export.description import described
from torchrec_recstore_serving.export.opening import load_export
from torchrec_recstore_serving.export.signing import key_at
from torchrec_recstore_serving.export.tables_on_servers import served_on_servers
from torchrec_recstore_serving.export.verification import verify
from torchrec_recstore_serving.publish.publications import (
    DirectoryPublications,
    Kind,
    Publication,
)


def is_published(directory: Path) -> bool:
    """Returns whether a ``DeltaPublisher`` has published to a directory."""
    return (directory / "latest.json").is_file()


def described_publications(
    directory: Path,
    *,
    verified: bool = True,
    key: Path | None = None,
) -> dict[str, Any]:
    """Describes the newest publication of a directory and those before it, for JSON.

    Args:
        directory: The directory to which a ``DeltaPublisher`` has published.
        verified: Whether each file is compared with its checksum. Default: True.
        key: The file of the key with which all of it must have been signed. Default:
            None, signatures are not checked.

    Returns:
        ``path``, ``kind`` (``"publications"``), ``number``, ``version``, ``time`` (in
        seconds since 1970) and ``run`` of the newest publication, ``index`` and
        ``dtype`` of its model, ``tables`` by name with ``rows``, ``dim`` and ``bytes``
        (those of the newest full export), ``dense`` (the names of the other parameters
        and buffers), ``publications`` (those that the directory has, ascending) and
        ``bytes``. Of each publication ``number``, ``version``, ``time``, ``full``,
        ``bytes``, and ``changed`` and ``removed``, the numbers of rows of its delta,
        or None.

    Raises:
        OSError: A file cannot be read, or a publisher has deleted it in the meantime.
        ValueError: A file is damaged, or has no signature or the one of another key.
    """
    place = DirectoryPublications(directory, key_at(key))
    latest = place.latest()
    if latest is None:
        raise FileNotFoundError(f"{directory} has no publication")
    newest_full = latest.fulls[-1]
    publications: list[dict[str, Any]] = []
    for number in range(latest.fulls[0], latest.number + 1):
        publication = place.publication(number)
        files = _files_of(place, publication, latest.fulls[0])
        if verified:
            for path in files.values():
                verify(path, key=key)
        publications.append(_facts(publication, files))
    program = place.path_of(newest_full, "program")
    full = place.path_of(newest_full, "full")
    contents = described_full(program, full)
    later_numbers = range(newest_full + 1, latest.number + 1)
    if later_numbers:
        deltas = [place.path_of(number, "delta") for number in later_numbers]
        _count_rows(contents["tables"], program, full, deltas)
    return {
        "path": str(directory),
        "kind": "publications",
        "number": latest.number,
        "version": latest.version,
        "time": latest.time,
        "run": latest.run,
        "index": contents["index"],
        "dtype": contents["dtype"],
        "tables": contents["tables"],
        "dense": contents["dense"],
        "publications": publications,
        "bytes": sum(publication["bytes"] for publication in publications),
    }


def _files_of(
    place: DirectoryPublications,
    publication: Publication,
    oldest_full: int,
) -> dict[Kind, Path]:
    """Returns the files of a publication that followers may need, by kind."""
    kinds: list[Kind] = []
    if publication.full:
        kinds += ["program", "full"]
    if publication.base is not None and publication.number > oldest_full:
        kinds.append("delta")
    return {kind: place.path_of(publication.number, kind) for kind in kinds}


def _facts(publication: Publication, files: dict[Kind, Path]) -> dict[str, Any]:
    """Describes a publication by its record and its files."""
    facts: dict[str, Any] = {
        "number": publication.number,
        "version": publication.version,
        "time": publication.time,
        "full": publication.full,
        "changed": None,
        "removed": None,
        "bytes": sum(path.stat().st_size for path in files.values()),
    }
    if "delta" in files:
        tables = described(files["delta"])["tables"].values()
        facts["changed"] = sum(table["rows"] for table in tables)
        facts["removed"] = sum(table["removed"] for table in tables)
    return facts


def is_program(path: Path) -> bool:
    """Returns whether a file is the program of a publication, beside its rows."""
    has_name = path.suffix == ".pt" and path.stem.isdecimal()
    return has_name and path.with_suffix(".safetensors").is_file()


def described_full(program: Path, full: Path) -> dict[str, Any]:
    """Describes a published full export by its two files.

    Args:
        program: The file of the program, a served model without rows.
        full: The file of the rows and the dense tensors.

    Returns:
        See :func:`torchrec_recstore_serving.export.description.described`. ``bytes`` is
        the size of both files, and ``version`` that of the model with its rows.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or the two do not belong together.
    """
    contents = described(program)
    try:
        with safe_open(full, framework="pt") as tensors:
            base = _text(tensors.get_tensor("base"))
            contents["rows_in"] = str(full)
            if base != contents["version"]:
                raise ValueError(f"{full} does not belong to {program}")
            contents["version"] = _text(tensors.get_tensor("version"))
            keys = set(tensors.keys())
            for name, table in contents["tables"].items():
                if f"{name}/ids" in keys:  # Otherwise the program has the rows.
                    ids = tensors.get_slice(f"{name}/ids")
                    rows = tensors.get_slice(f"{name}/rows")
                    table["rows"] = ids.get_shape()[0]
                    table["bytes"] = _bytes_of(ids) + _bytes_of(rows)
    except SafetensorError as error:
        raise ValueError(f"{full} is damaged: {error}") from error
    contents["bytes"] += full.stat().st_size
    return contents


def _text(codes: Tensor) -> str:
    """Returns the text that a file of safetensors has as a tensor of bytes."""
    return bytes(codes.tolist()).decode()


def _bytes_of(part: Any) -> int:
    """Returns the size in bytes of a tensor in a file, which is not read."""
    no_rows: Tensor = part[:0]
    count: int = math.prod(part.get_shape())
    return count * no_rows.element_size()


def _count_rows(
    tables: dict[str, dict[str, int]],
    program: Path,
    full: Path,
    deltas: Sequence[Path],
) -> None:
    """Changes the numbers of rows of a full export to those after its deltas."""
    served = load_export(program)
    on_servers = served_on_servers(served)
    for name, table in tables.items():
        if name in on_servers:
            continue
        ids = _ids_of(served, full, name)
        for path in deltas:
            ids = _ids_after(ids, path, name)
        table["rows"] = len(ids)


def _ids_after(ids: Tensor, path: Path, name: str) -> Tensor:
    """Returns the ids of a table after a delta, (R,) int64."""
    with safe_open(path, framework="pt") as delta:
        removed = delta.get_tensor(f"{name}/removed")
        changed = delta.get_tensor(f"{name}/ids")
    remaining = ids[~torch.isin(ids, removed)]
    after: Tensor = torch.unique(torch.cat([remaining, changed]))
    return after


def _ids_of(served: torch.jit.ScriptModule, full: Path, name: str) -> Tensor:
    """Returns the ids of a table of a full export, (R,) int64."""
    with safe_open(full, framework="pt") as tensors:
        if f"{name}/ids" in tensors.keys():  # noqa: SIM118
            ids: Tensor = tensors.get_tensor(f"{name}/ids")
            return ids
    mapped_ids: Tensor = served.recstore_ids(name)
    return mapped_ids
