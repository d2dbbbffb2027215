"""The writer of parts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from torchrec_recstore.checkpoint.writer import PartWriter
from torchrec_recstore.store import Table


def test_files_are_written_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 starts no thread once the process is ending."""

    def cannot_start(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    writer = PartWriter(tmp_path, rank=0)
    for name in ("a", "b"):
        writer.tensors(name, {"x": torch.arange(3)})
    assert (
        writer.close().keys()
        == {"a", "b"}
        == {path.name for path in tmp_path.iterdir()}
    )


def test_no_two_parts_have_one_name(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, rank=0)
    names = []
    for name in ("t", "t-left", "t/left", "t%2Fleft", "t" * 101, "t" * 102):
        with Table(2, name=name) as table:
            table.lookup(torch.tensor([1, 2]), train=True)
            with table.snapshot() as snapshot:
                names += [part.file for part in writer.rows(name, table, snapshot)]
            names += [
                part.file for part in writer.ids(name, table, "left", torch.tensor([3]))
            ]
    assert (
        sorted(writer.close())
        == sorted(names)
        == sorted(path.name for path in tmp_path.iterdir())
    )
    assert len(set(names)) == 12


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tensors = {
        "whole": whole,
        "tied": whole,
        "view": whole[1:4],
        "rows": whole.view(2, 3).t(),
        "empty": whole[:0],
    }
    writer = PartWriter(tmp_path, rank=0)
    writer.tensors("dense.safetensors", tensors)
    writer.close()
    written = safetensors.torch.load_file(tmp_path / "dense.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
