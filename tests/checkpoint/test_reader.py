"""Rows of one data type are loaded into tables of another data type."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import write_tensors
from torchrec_recstore.checkpoint.fold import compact_chain
from torchrec_recstore.checkpoint.info import (
    CheckpointInfo,
    DeltaOf,
    PartInfo,
    TableInfo,
)
from torchrec_recstore.checkpoint.reader import load_rows
from torchrec_recstore.row_types import as_stored
from torchrec_recstore.store import Table

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


def saved(
    path: Path, table: Table, ids: torch.Tensor, delta_of: CheckpointInfo | None = None
) -> CheckpointInfo:
    """Saves a checkpoint of a table with some rows."""
    path.mkdir()
    file = write_tensors(path / "part", {"ids": ids, **table.read_rows(ids)})
    info = TableInfo(
        dim=4,
        dtype=str(table.dtype).removeprefix("torch."),
        optimizer=table.optimizer,
        options=table.options,
        rows=len(table),
        steps=table.steps,
        optimizer_steps=table.optimizer_steps,
        columns=((0, 4),),
        parts=(PartInfo("part", 0, (0, 4), len(ids), int(ids[0]), int(ids[-1])),),
        removal="left",
        removed=(),
        sightings=(),
        times=None,
    )
    base = (
        None if delta_of is None else DeltaOf(f"../{delta_of.path}", delta_of.checksum)
    )
    return CheckpointInfo(path, 1, 1, {"t": info}, {"part": file}, (), base)


@pytest.mark.parametrize(("before", "now"), product(TYPES, TYPES))
def test_weights_are_converted(
    before: torch.dtype, now: torch.dtype, tmp_path: Path
) -> None:
    ids = torch.arange(100)
    with (
        Table(4, before) as source,
        Table(4, now) as target,
        Table(4, now) as from_compacted,
    ):
        source.lookup(ids, train=True)
        source.update(ids, torch.randn(100, 4))
        rows = source.read_rows(ids)
        full = saved(tmp_path / "full", source, ids)
        load_rows(target, "t", [full])
        held = target.read_rows(ids)
        assert torch.equal(held["weight"], as_stored(rows["weight"], now))
        assert torch.equal(held["sum"], rows["sum"])
        target.update(ids[:50], torch.randn(50, 4))
        delta = saved(tmp_path / "delta", target, ids[:50], full)
        with Destination(tmp_path / "compacted") as destination:
            load_rows(from_compacted, "t", [compact_chain([full, delta], destination)])
        held = target.read_rows(ids)
        assert all(
            torch.equal(held[key], value)
            for key, value in from_compacted.read_rows(ids).items()
        )
