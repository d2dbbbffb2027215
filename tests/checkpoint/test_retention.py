"""The newest checkpoint of a folder, and the checkpoints that are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchrec.distributed import DistributedModelParallel

from torchrec_recstore import (
    CheckpointError,
    load_checkpoint,
    read_info,
    save_checkpoint,
    table_stats,
)
from torchrec_recstore.checkpoint import keep_newest, newest
from torchrec_recstore.checkpoint.files import path_lock, staging_name

from . import models

pytestmark = pytest.mark.usefixtures("one_rank")


def saved(folder: Path, *names: str, deltas: tuple[str, ...] = ()) -> None:
    """Saves a checkpoint after each of some steps, each delta of the one before it."""
    model = models.recstore()
    before: Path | None = None
    for name in names:
        models.train(model, steps=1)
        path = folder / name
        save_checkpoint(model, path, delta_of=before if name in deltas else None)
        before = path


def table_steps(model: DistributedModelParallel) -> int:
    return max(stats.steps for stats in table_stats(model).values())


def names_in(folder: Path) -> list[str]:
    # The fixture one_rank has its file beside the checkpoints.
    return sorted(set(os.listdir(folder)) - {"rendezvous"})


def test_the_newest_is_that_of_the_last_step(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None
    # The names are not in the order of the steps.
    saved(tmp_path, "9", "10", "8")
    (tmp_path / "notes").mkdir()
    (tmp_path / "log.txt").write_text("text")
    info = newest(tmp_path)
    assert info is not None
    assert (info.path.name, info.step) == ("8", 3)
    assert newest(str(tmp_path)) == info
    loaded = models.recstore()
    load_checkpoint(loaded, info.path)
    assert table_steps(loaded) == 3


def test_of_the_same_step_the_one_that_was_saved_last_is_the_newest(
    tmp_path: Path,
) -> None:
    """Models whose tables are on servers, or frozen, have the step 0 for ever."""
    model = models.recstore()
    for name in ("9", "10", "11"):
        save_checkpoint(model, tmp_path / name)
        saved_at = 1_000_000_000 + int(name)
        os.utime(tmp_path / name / "metadata.json", (saved_at, saved_at))
    info = newest(tmp_path)
    assert info is not None
    assert info.path.name == "11"
    assert [path.name for path in keep_newest(tmp_path, 2)] == ["9"]


def test_a_later_checkpoint_of_fewer_steps_is_not_deleted(tmp_path: Path) -> None:
    """Steps begin anew if rows are reset, and a copy may lose the times of files."""
    saved(tmp_path, "a", "b")
    saved(tmp_path, "c")
    message = r"b has more steps than .*c, which was saved later: pass the one"
    with pytest.raises(CheckpointError, match=message):
        newest(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        keep_newest(tmp_path, 1)
    assert names_in(tmp_path) == ["a", "b", "c"]


def test_what_is_being_written_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b")
    (tmp_path / "b").rename(tmp_path / staging_name(tmp_path / "b"))
    info = newest(tmp_path)
    assert info is not None
    assert info.path.name == "a"


def test_the_newest_are_kept_with_the_bases_of_deltas(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c", "d", "e", deltas=("d", "e"))
    (tmp_path / "log.txt").write_text("text")
    deleted = keep_newest(tmp_path, 1)
    assert [path.name for path in deleted] == ["b", "a"]
    assert names_in(tmp_path) == ["c", "d", "e", "log.txt"]
    loaded = models.recstore()
    load_checkpoint(loaded, tmp_path / "e")
    assert table_steps(loaded) == 5
    assert keep_newest(tmp_path, 3) == []


def test_a_chain_that_nothing_needs_is_deleted(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c", "d", deltas=("b", "c"))
    deleted = keep_newest(str(tmp_path), 1)
    assert [path.name for path in deleted] == ["c", "b", "a"]
    assert names_in(tmp_path) == ["d"]


def test_a_base_that_another_process_needs_is_left(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b")
    with path_lock(tmp_path / "a", needed_by=tmp_path / "delta"):
        assert keep_newest(tmp_path, 1) == []
    assert [path.name for path in keep_newest(tmp_path, 1)] == ["a"]
    assert names_in(tmp_path) == ["b"]


def test_a_link_is_deleted_and_not_its_checkpoint(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "folder"
    folder.mkdir()
    elsewhere.mkdir()
    saved(elsewhere, "old")
    (folder / "old").symlink_to(elsewhere / "old")
    saved(folder, "a", "b")
    keep_newest(folder, 1)
    assert names_in(folder) == ["b"]
    assert read_info(elsewhere / "old").step == 1


def test_refusals_delete_nothing(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c")
    with pytest.raises(ValueError, match="count must be at least 1, got 0: the newest"):
        keep_newest(tmp_path, 0)
    with pytest.raises(TypeError, match="count must be an int, got bool"):
        keep_newest(tmp_path, True)
    for function in (newest, lambda path: keep_newest(path, 1)):
        with pytest.raises(ValueError, match=r"a is a checkpoint: pass the folder"):
            function(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing"):
        keep_newest(tmp_path / "missing", 1)
    metadata = tmp_path / "b" / "metadata.json"
    metadata.write_text(metadata.read_text()[:-20])
    with pytest.raises(CheckpointError, match=r"b/metadata.json is damaged"):
        keep_newest(tmp_path, 1)
    assert names_in(tmp_path) == ["a", "b", "c"]


CRASH = """
import os, shutil, sys
from torchrec_recstore.checkpoint import keep_newest
removed = []
def rmtree(path):
    first = sorted(os.listdir(path))[0]
    os.unlink(os.path.join(path, first))
    os._exit(9)
shutil.rmtree = rmtree
keep_newest(sys.argv[1], 1)
"""


def test_a_process_that_dies_leaves_only_complete_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c", deltas=("b",))
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path)],
        check=False,
    )
    assert done.returncode == 9
    visible = [name for name in names_in(tmp_path) if not name.startswith(".")]
    assert visible == ["a", "c"]  # the delta went first
    for name in visible:
        loaded = models.recstore()
        load_checkpoint(loaded, tmp_path / name)
    assert [path.name for path in keep_newest(tmp_path, 1)] == ["a"]
    assert names_in(tmp_path) == ["c"]
