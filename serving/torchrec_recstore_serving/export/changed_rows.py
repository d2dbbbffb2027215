"""Finds the rows of a table that have changed since an export.

It does not read the other rows.

Tests: tests/serving/publish/test_publisher.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingEnv

from torchrec_recstore.sharders.gather import all_gathered, refused_together
from torchrec_recstore.store import Table
from torchrec_recstore_serving.export.row_formats import packed

_MAX_VERSIONS = 127  # The number of marks that a table remembers.

_MARKS: WeakKeyDictionary[Table, dict[str, int]] = WeakKeyDictionary()
"""The change marks of the shards, by the versions of the exports that were made at
these marks.
"""


@dataclass(frozen=True)
class ChangedRows:
    """The rows of a table that may have changed since an export.

    Args:
        ids: (N,) int64. The ids in ascending order.
        rows: The rows in the row format of the export, or (N, dim) float32: see
            :func:`torchrec_recstore_serving.export.row_formats.packed`.
        left_ids: (M,) int64. Ids that have no row now.
    """

    ids: Tensor
    rows: Tensor
    left_ids: Tensor


def remember(marks: Mapping[Table, int], version: str) -> None:
    """Keeps the marks of an export.

    A delta of the export can then be made from the changed rows.

    Args:
        marks: The change mark of each shard at the time of the export.
        version: The version of the export.
    """
    for shard, mark in marks.items():
        shard.locate_rows()  # The deltas that follow read the changed rows only.
        mark_of_version = _MARKS.setdefault(shard, {})
        mark_of_version.pop(version, None)
        mark_of_version[version] = mark
        while len(mark_of_version) > _MAX_VERSIONS:
            oldest = next(iter(mark_of_version))
            del mark_of_version[oldest]


def changed_since(
    name: str,
    shards: Sequence[Table],
    version: str,
    row_format: str,
    env: ShardingEnv | None,
    marks: dict[Table, int],
) -> ChangedRows | None:
    """Reads the rows that have changed since an export.

    The call is collective if the table is sharded.

    Args:
        name: The table's name.
        shards: The shards of this rank.
        version: The version of the export.
        row_format: A name in :data:`torchrec_recstore_serving.export.row_formats.FORMATS`.
        env: The environment of the ranks that hold the other shards. None if this
            process holds all shards.
        marks: The change mark of each shard is added to it.

    Returns:
        The rows. None if it is not known which rows have changed, on every rank: the
        export was made in another process, before the rows were loaded, or too many
        exports ago; or the table is sharded by column, or its rows have left a cold
        store.
    """
    if env is None:
        return _concatenated(_of_shards(shards, version, marks))
    with refused_together(env):
        parts = _of_shards(shards, version, marks)
        # Packed rows are smaller than float32 rows, and each rank packs its own.
        if parts is not None:
            parts = [
                replace(part, rows=packed(name, part.rows, row_format))
                for part in parts
            ]
    parts_of_all_ranks: list[ChangedRows] = []
    for parts_of_rank in all_gathered(parts, env):
        if parts_of_rank is None:
            return None
        parts_of_all_ranks.extend(parts_of_rank)
    return _concatenated(parts_of_all_ranks)


def _of_shards(
    shards: Iterable[Table],
    version: str,
    marks: dict[Table, int],
) -> list[ChangedRows] | None:
    """Reads the changed rows of each shard.

    None: it is not known which rows of a shard have changed.
    """
    parts: list[ChangedRows] = []
    for shard in shards:
        mark = _MARKS.get(shard, {}).get(version)
        if mark is None or len(shard.columns) != shard.dim:
            return None
        try:
            snapshot = shard.snapshot(since=mark)
        except ValueError:  # The mark has been forgotten.
            return None
        with snapshot:
            if snapshot.left is None:
                return None
            changed = snapshot.read(len(snapshot))
            parts.append(ChangedRows(changed.ids, changed.weights, snapshot.left))
            marks[shard] = snapshot.mark
    return parts


def _concatenated(parts: list[ChangedRows] | None) -> ChangedRows | None:
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    ids, order = torch.cat([part.ids for part in parts]).sort()
    rows = torch.cat([part.rows for part in parts])
    left_ids = torch.cat([part.left_ids for part in parts])
    return ChangedRows(ids, rows[order], left_ids)
