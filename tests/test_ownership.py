"""Another user plants files, links and folders at names that can be guessed, and changes nothing of this user."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torchrec_recstore import SSDStore, ownership
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import path_lock, whole_file
from torchrec_recstore.ownership import open_own, refuse_foreign
from torchrec_recstore.store import ColdStoreError, open_cold_store
from torchrec_recstore_service.server.data_directory import DataDirectory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

OTHER = 12_345


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may write, as /tmp is."""
    outer = Path(tempfile.mkdtemp(prefix="recstore-ownership-"))
    outer.chmod(0o711)
    folder = outer / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(outer)


def _as_other_user(work: Callable[[], object]) -> None:
    """Runs a function in a process of another user."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.umask(0)
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _open_store(path: Path, shared: str | None = None) -> object:
    return open_cold_store(SSDStore(str(path), shared=shared), name="t", row_bytes=64)


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "fifo", "folder"])
def test_a_planted_lock_of_a_checkpoint(shared: Path, kind: str) -> None:
    victim = shared.parent / "victim"
    victim.write_text("of this user")
    lock = shared / ".next.lock"
    made = shared.parent / "made"
    plant: dict[str, Callable[[], object]] = {
        "link": lambda: lock.symlink_to(victim),
        "dangling link": lambda: lock.symlink_to(made),
        "file": lambda: lock.touch(0o666),
        "fifo": lambda: os.mkfifo(lock, 0o666),
        "folder": lambda: lock.mkdir(0o777),
    }
    _as_other_user(plant[kind])
    for write in (lambda: path_lock(shared / "next"), lambda: Destination(shared / "next")):
        with pytest.raises(PermissionError, match=r"belongs to user 12345.*use a path.*\.next\.lock"):
            write()
    with pytest.raises(PermissionError, match=r"belongs to user 12345"), whole_file(shared / "next") as beside:
        beside.write_text("new")
    assert victim.read_text() == "of this user"
    assert not made.exists()
    assert os.listdir(shared) == [".next.lock"]


def test_a_file_that_is_planted_after_the_check(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = ownership.refuse_foreign
    lock = shared / "lock"

    def check_and_plant(path: Path) -> None:
        check(path)
        _as_other_user(lambda: lock.touch(0o666))

    monkeypatch.setattr(ownership, "refuse_foreign", check_and_plant)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        open_own(lock, os.O_RDWR | os.O_CREAT, 0o600)


def test_a_hard_link_and_a_link_of_the_same_user(shared: Path) -> None:
    """A folder of one user may have links that another program has made. A lock is not written through them."""
    victim = shared.parent / "victim"
    victim.write_text("of this user")
    lock = shared / ".next.lock"
    lock.hardlink_to(victim)
    with pytest.raises(PermissionError, match="has another name, too"):
        path_lock(shared / "next")
    lock.unlink()
    lock.symlink_to(victim)
    with pytest.raises(OSError, match="is a link"):
        path_lock(shared / "next")
    assert victim.read_text() == "of this user"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_planted_folder_for_checkpoints_data_and_cold_stores(shared: Path, depth: int) -> None:
    planted = shared / "run"
    _as_other_user(lambda: planted.mkdir(0o777))
    path = planted if depth == 1 else planted / "below"
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        Destination(path / "1000")
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        DataDirectory(path)
    for name in (None, "rows"):
        with pytest.raises(ColdStoreError, match="belongs to user 12345"):
            _open_store(path, shared=name)
    assert not list(planted.rglob("rows"))
    assert not list(planted.rglob("*.lock"))


def test_a_planted_link_to_a_folder(shared: Path) -> None:
    """A link in the place of a folder would have this process write into any other folder of its user."""
    victim = shared.parent / "victim"
    victim.mkdir()
    _as_other_user(lambda: (shared / "run").symlink_to(victim))
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        Destination(shared / "run" / "1000")
    with pytest.raises(ColdStoreError, match="belongs to user 12345"):
        _open_store(shared / "run")
    assert not list(victim.iterdir())


def test_planted_parts_of_a_cold_store(shared: Path) -> None:
    """A store in the shared folder itself, where another user has made its lock, or the folder of its table."""
    _as_other_user(lambda: (shared / "lock").touch(0o666))
    with pytest.raises(ColdStoreError, match=r"belongs to user 12345.*lock"):
        _open_store(shared)
    (shared / "lock").unlink()
    _as_other_user(lambda: (shared / "t").mkdir(0o777))
    with pytest.raises(ColdStoreError, match=r"belongs to user 12345.*/t"):
        _open_store(shared)


def test_own_folders_mount_points_and_those_of_root_can_be_used(shared: Path) -> None:
    own = shared / "own"
    own.mkdir()
    store = _open_store(own)
    (run,) = own.glob("t/run-*")
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert stat.S_IMODE((run / "rows").stat().st_mode) == 0o600
    store.close()  # type: ignore[attr-defined]
    with Destination(own / "1000"):
        pass
    mounted = shared / "mounted"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size=1m,uid={OTHER}", "tmpfs", str(mounted)]
    if subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            refuse_foreign(mounted / "run")
        finally:
            subprocess.run(["umount", str(mounted)], check=True)
    other_folder = shared.parent / "other"  # in no folder that all users may write
    other_folder.mkdir()
    os.chown(other_folder, OTHER, OTHER)
    os.close(open_own(other_folder / "lock", os.O_RDWR | os.O_CREAT, 0o600))


_OPTIMIZER = """if True:
    from torchrec_recstore import RowOptimizer, Table
    import torch
    optimizer = RowOptimizer(name="planted", step="m += g; w -= lr * m;", states={"m": "element"})
    table = Table(4, optimizer=optimizer)
    table.lookup(torch.arange(3), train=True)
    print("made")
"""


def test_a_planted_library_of_an_optimizer_does_not_run(shared: Path) -> None:
    """The library of a RowOptimizer is code. Another user knows its name, and may have made the folder before."""

    def run(cache: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        command = [sys.executable, "-c", _OPTIMIZER]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    own = shared / "own"
    made = run(own)
    assert made.returncode == 0, made.stderr
    libraries = own / "torchrec_recstore"
    assert stat.S_IMODE(libraries.stat().st_mode) == 0o700
    (library,) = libraries.glob("*.so")

    planted = shared / "cache"
    shutil.copytree(own, planted)
    (planted / "torchrec_recstore" / library.name).write_bytes(b"code of another user")
    for entry in (planted, *planted.rglob("*")):
        os.chown(entry, OTHER, OTHER)
    refused = run(planted)
    assert refused.returncode != 0
    assert f"{planted}" in refused.stderr
    assert "can be changed by another user" in refused.stderr
    assert "set XDG_CACHE_HOME" in refused.stderr

    # A library of another user in a folder of this one, which was open to all for some time, is replaced.
    library.write_bytes(b"code of another user")
    os.chown(library, OTHER, OTHER)
    made = run(own)
    assert made.returncode == 0, made.stderr
    assert library.stat().st_uid == os.geteuid()
    assert torch.version.__version__
