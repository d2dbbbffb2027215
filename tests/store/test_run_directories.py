"""The directories of cold stores in RocksDB: those of killed processes are removed,
whenever the kill came.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from torchrec_recstore.options import RocksDBStore, SSDStore
from torchrec_recstore.run_directories import RunDirectory, run_directories
from torchrec_recstore.store import ColdStore, open_cold_store
from torchrec_recstore.utils import RecStoreWarning

from ..processes import ForkedCommand
from .dying_store import MOMENTS


def opened(root: Path, name: str = "mine") -> ColdStore:
    return open_cold_store(RocksDBStore(str(root)), name=name, row_bytes=8)


def files(root: Path) -> list[str]:
    """Returns the paths of all files and directories below a root, except its lock."""
    return sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path != root / "lock"
    )


def kill_one(root: Path, moment: str) -> ForkedCommand:
    command = ForkedCommand(["-m", "tests.store.dying_store", moment, str(root)])
    assert command.wait(60) == -signal.SIGKILL, command.stderr
    return command


@contextmanager
def living(root: Path) -> Iterator[ForkedCommand]:
    command = ForkedCommand(["-m", "tests.store.dying_store", "living", str(root)])
    try:
        while command.stdout != "open\n":
            assert command.process.is_alive(), command.stderr
            time.sleep(0.01)
        yield command
    finally:
        command.kill()


@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_of_three_killed_processes_is_left(moment: str, tmp_path: Path) -> None:
    with living(tmp_path) as alive, ExitStack() as orphans:
        for _ in range(3):
            dead = kill_one(tmp_path, moment)
            if dead.stdout:
                orphans.callback(os.kill, int(dead.stdout), signal.SIGKILL)
        found = {run.shard: run.pid for run in run_directories(tmp_path)}
        assert found == {"living/0": alive.pid, f"{moment}/0": None}
        opened(tmp_path).close()
        assert {path.split("/")[0] for path in files(tmp_path)} == {"living%2F0"}
        assert [run.pid for run in run_directories(tmp_path)] == [alive.pid]


def test_directories_of_processes_that_are_killed_at_once(tmp_path: Path) -> None:
    with (
        living(tmp_path / "cold"),
        living(tmp_path / "cold"),
        living(tmp_path / "another"),
    ):
        assert all(run.bytes > 0 for run in run_directories(tmp_path))
    mine = opened(tmp_path / "cold", "mine/0")
    assert [(run.shard, run.alive) for run in run_directories(tmp_path)] == [
        ("living/0", False),
        ("mine/0", True),
    ]
    mine.close()
    opened(tmp_path / "another").close()
    assert files(tmp_path / "cold") == files(tmp_path / "another") == []


def test_what_is_not_a_run_directory_stays(tmp_path: Path) -> None:
    mine = opened(tmp_path / "cold")
    strangers = [
        tmp_path / "cold/mine/run-of-a-stranger",
        tmp_path / "logs/mine/run-0123456789ab",
    ]
    for stranger in strangers:
        stranger.mkdir(parents=True)
        (stranger / "lock").touch()
    assert [run.path.parent.parent for run in run_directories(tmp_path)] == [
        tmp_path / "cold"
    ]
    mine.close()
    opened(tmp_path / "cold").close()
    assert all(stranger.is_dir() for stranger in strangers)
    assert run_directories(tmp_path) == run_directories(tmp_path / "missing") == []


def test_the_owner_of_an_older_version_is_not_known(tmp_path: Path) -> None:
    """Older versions lock an empty file."""
    mine = opened(tmp_path)
    (run,) = run_directories(tmp_path)
    assert (run.alive, run.pid, run.owner) == (
        True,
        os.getpid(),
        f"process {os.getpid()} on host {run.host}",
    )
    os.truncate(run.path / "lock", 0)
    (run,) = run_directories(tmp_path)
    assert (run.alive, run.pid, run.owner) == (True, None, "a process")
    mine.close()


def test_a_forked_process_does_not_remove_the_directory(tmp_path: Path) -> None:
    mine = RunDirectory(str(tmp_path), "t", "0" * 12)
    child = os.fork()
    if child == 0:
        mine.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [run.pid for run in run_directories(tmp_path)] == [os.getpid()]
    mine.remove()
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_one(tmp_path, "written")
    (run,) = run_directories(tmp_path)

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuse)
        with pytest.warns(
            RecStoreWarning, match=f"{run.path} .* has ended.*Permission denied"
        ):
            mine = opened(tmp_path)
    mine.close()
    opened(tmp_path).close()
    assert files(tmp_path) == []


def test_directories_are_listed_without_torch(tmp_path: Path) -> None:
    mine = opened(tmp_path)
    code = (
        "import sys; from torchrec_recstore.run_directories import run_directories\n"
        "print(len(run_directories(sys.argv[1])), 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["1", "False"]
    mine.close()


@pytest.mark.parametrize("name", ["lock", "shared", "%6Cock", "lock "])
def test_a_table_with_the_name_of_a_file_of_the_store(
    tmp_path: Path, name: str
) -> None:
    """The path of a store also has its lock, and the rows of SSDStore that are shared."""
    shared = SSDStore(str(tmp_path), shared="run-0123456789ab")
    with closing(open_cold_store(shared, name="t", row_bytes=8)) as rows:
        rows.put(torch.tensor([7]), torch.full((1, 8), 3, dtype=torch.uint8))
    options = SSDStore(str(tmp_path))
    with closing(open_cold_store(options, name=name, row_bytes=8)):
        (run,) = run_directories(tmp_path)
        assert run.shard == name
        with closing(open_cold_store(options, name="other", row_bytes=8)):
            pass
    with closing(open_cold_store(shared, name="t", row_bytes=8)) as rows:
        assert rows.get(torch.tensor([7]))[0].all()
