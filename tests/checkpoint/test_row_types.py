"""Rows of one data type, loaded into tables of another."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from torchrec_recstore.checkpoint.files import file_info, write_tensors
from torchrec_recstore.checkpoint.info import CheckpointInfo, PartInfo, TableInfo
from torchrec_recstore.checkpoint.load import load_rows
from torchrec_recstore.store import Table

TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("saved", "loaded"), product(TYPES, TYPES))
def test_weights_are_converted(saved: torch.dtype, loaded: torch.dtype, tmp_path: Path) -> None:
    ids = torch.arange(100)
    with Table(4, saved) as source, Table(4, loaded) as target:
        source.lookup(ids, train=True)
        source.update(ids, torch.randn(100, 4))
        rows = source.read_rows(ids)
        write_tensors(tmp_path / "part", {"ids": ids, **rows})
        table = TableInfo(
            dim=4,
            dtype=str(saved).removeprefix("torch."),
            optimizer=source.optimizer,
            options=source.options,
            rows=100,
            steps=source.steps,
            optimizer_steps=source.optimizer_steps,
            columns=((0, 4),),
            parts=(PartInfo("part", 0, (0, 4), 100, 0, 99),),
        )
        files = {"part": file_info(tmp_path / "part")}
        load_rows(target, "t", [CheckpointInfo(tmp_path, 1, 1, {"t": table}, files, ())])
        held = target.read_rows(ids)
        assert torch.equal(held["weight"], rows["weight"].to(loaded))
        assert torch.equal(held["sum"], rows["sum"])
