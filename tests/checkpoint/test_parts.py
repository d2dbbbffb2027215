"""Files of parts."""

from __future__ import annotations

from pathlib import Path

import torch

from torchrec_recstore.checkpoint.parts import PartWriter
from torchrec_recstore.store import Table


def test_no_two_parts_have_one_name(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, rank=0)
    names = []
    for name in ("t", "t-left", "t/left", "t%2Fleft", "t" * 101, "t" * 102):
        with Table(2, name=name) as table:
            table.lookup(torch.tensor([1, 2]), train=True)
            with table.snapshot() as snapshot:
                names += [part.file for part in writer.rows(table, snapshot)]
            names += [part.file for part in writer.ids(table, "left", torch.tensor([3]))]
    assert sorted(writer.close()) == sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert len(set(names)) == 12
