"""Exported files are written by one process at a time, completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrec_recstore.checkpoint.files import (
    CheckpointError,
    FileInfo,
    check_file,
    whole_file,
)


def test_one_process_at_a_time_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    left, foreign = (
        tmp_path / ".model.pt.saving-0123456789ab",
        tmp_path / ".model.pt.notes",
    )
    for file in (left, foreign):
        file.write_text("x")
    path.write_text("old")
    with whole_file(path) as beside:
        assert not left.exists()
        beside.write_text("new")
        expected = (
            rf"{path} cannot be written: process {os.getpid()} on host .* has been"
            r" writing it since"
        )
        with pytest.raises(BlockingIOError, match=expected), whole_file(path):
            pytest.fail("the path is locked")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(UnicodeEncodeError), whole_file(path) as beside:
        beside.write_text("\ud800", "ascii")
    with (
        pytest.raises(OSError, match=f"No space left on device: '{path}'"),
        whole_file(path) as beside,
    ):
        raise OSError(28, "No space left on device", str(beside))
    assert path.read_text() == "new"
    assert set(tmp_path.iterdir()) == {path, foreign}


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A pipe would never be opened, and a device never end."""
    path = tmp_path / "rows.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=r"rows\.safetensors is no regular file"):
        check_file(path, FileInfo(3, "0" * 32))
