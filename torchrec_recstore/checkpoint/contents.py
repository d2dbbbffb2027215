"""Whether what a checkpoint says of itself holds together, and whether its files hold what it says of them.

Checksums find what has changed since the files were written. These checks find what was written wrong, or put together
by hand: a part that is left out, a part of another checkpoint, an id in two parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.files import CheckpointError

if TYPE_CHECKING:  # which imports this module
    from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, TableInfo

DTYPES = ("float32", "float16", "bfloat16")
"""Data types of weights."""


def check_info(info: CheckpointInfo, own_files: Mapping[str, bool]) -> None:
    """Compares what metadata says of the files, of the tables and of their parts.

    Args:
        info: as it was read.
        own_files: names of the files that belong to no table, and whether the checkpoint must have them.

    Raises:
        CheckpointError: two of these do not fit; the message names the table or the file.
    """
    named = Counter(name for name, needed in own_files.items() if needed)
    for table in info.tables.values():
        named.update(part.file for part in (*table.parts, *table.removed))
        named.update(counted.file for counted in table.sightings)
    for file, count in named.items():
        if file not in info.files:
            raise CheckpointError(f"{info.path} has no checksum of {file}, which belongs to it")
        if count > 1:
            raise CheckpointError(f"{info.path} lists the file {file} {count} times")
    for file in info.files:
        if file not in named:
            raise CheckpointError(f"{info.path} has the file {file}, which belongs to no table: a part is not listed")
    for name, table in info.tables.items():
        _check_table(f"{info.path}: table {name!r}", info, table)


def _check_table(table_name: str, info: CheckpointInfo, table: TableInfo) -> None:
    if table.dtype not in DTYPES:
        raise CheckpointError(f"{table_name} has weights of an unknown data type {table.dtype!r}")
    edges = [0, *(end for _, end in table.columns)]
    if [begin for begin, _ in table.columns] != edges[:-1] or edges[-1] != table.dim or edges != sorted(set(edges)):
        raise CheckpointError(f"{table_name} has dim {table.dim}, and column shards {list(table.columns)}")
    first = table.columns[0]
    for part in (*table.parts, *table.removed):
        known = table.columns if part in table.parts else (first,)
        if part.columns not in known or not 0 <= part.rank < info.world_size:
            raise CheckpointError(
                f"{table_name} has no shard of rank {part.rank} and columns {part.columns}: {part.file}"
            )
        if part.rows < 1 or part.rows - 1 > part.last_id - part.first_id:
            raise CheckpointError(f"{table_name}: {part.file} cannot have {part.rows} ids in its range")
    for parts in (table.parts, table.removed):
        _check_ranges(table_name, parts)
    blocks = {columns: Counter(map(_block, _of(table.parts, columns))) for columns in table.columns}
    for columns in table.columns:
        for part in table.parts:
            if blocks[columns][_block(part)] != blocks[first][_block(part)]:
                raise CheckpointError(f"{table_name} has no part of the columns {columns} for the rows of {part.file}")
    rows = sum(part.rows for part in _of(table.parts, first))
    if rows > table.rows or (info.delta_of is None and rows != table.rows):
        raise CheckpointError(f"{table_name} has {table.rows} rows, and its parts have {rows}")
    listed = sum(part.rows for part in table.removed)
    if info.delta_of is None and listed:
        raise CheckpointError(f"{table_name} lists ids that left, and the checkpoint is no delta")
    if info.delta_of is not None and table.removal == "stay" and listed != table.rows:
        raise CheckpointError(f"{table_name} has {table.rows} rows, and its files list {listed} ids that stay")


def _of(parts: Iterable[PartInfo], columns: tuple[int, int]) -> list[PartInfo]:
    return [part for part in parts if part.columns == columns]


def _block(part: PartInfo) -> tuple[int, int, int]:
    """What the parts of the column shards have in common that hold the same rows."""
    return part.first_id, part.last_id, part.rows


def _check_ranges(table_name: str, parts: Sequence[PartInfo]) -> None:
    """Parts of one shard are cut out of its ascending ids."""
    for shard in sorted({(part.rank, part.columns) for part in parts}):
        of_shard = [part for part in parts if (part.rank, part.columns) == shard]
        for one, other in pairwise(sorted(of_shard, key=_block)):
            if other.first_id <= one.last_id:
                raise CheckpointError(f"{table_name}: {one.file} and {other.file} have ids in the same range")


def check_ids(path: Path, part: PartInfo, ids: Tensor) -> None:
    """Compares a file's ids with what metadata says of them.

    Raises:
        CheckpointError: their number, the first or the last one is another, or they do not ascend.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) != part.rows:
        raise CheckpointError(f"{path} has ids of shape {tuple(ids.shape)}, and metadata.json says {part.rows}")
    if (int(ids[0]), int(ids[-1])) != (part.first_id, part.last_id) or bool((ids[1:] <= ids[:-1]).any()):
        raise CheckpointError(f"{path} does not have the ids from {part.first_id} to {part.last_id}, each once")


def check_shapes(path: Path, part: PartInfo, states: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> None:
    """Compares the shapes of a file's rows with what metadata says of them.

    Args:
        path: the file.
        part: what metadata says.
        states: of the optimizer, see :func:`torchrec_recstore.optim.state_names`.
        shapes: of the file's tensors but ``ids``.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    begin, end = part.columns
    whole = {"weight", *(name for name, kind in states.items() if kind == "element")}
    names = ("weight", *states, "last_step", "frequency")
    wanted = {name: [part.rows, end - begin] if name in whole else [part.rows] for name in names}
    found = {name: list(shape) for name, shape in shapes.items()}
    if found != wanted:
        raise CheckpointError(f"{path} has tensors of the shapes {found}, and the table's rows are {wanted}")
