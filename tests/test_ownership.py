"""Another user plants files, links and folders at names that can be guessed, and
changes nothing of this user.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_forked_command
from torchrec_recstore import SSDStore, ownership
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import path_lock, whole_file
from torchrec_recstore.ownership import open_own, refuse_foreign
from torchrec_recstore.store import ColdStoreError, open_cold_store
from torchrec_recstore_service.server.data_directory import DataDirectory

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can act as another user"
)

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


def _open_to_all(shared: Path) -> Path:
    """Makes a folder without the sticky bit that all users may write, as an emptyDir of
    Kubernetes is.
    """
    folder = shared / "open"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


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
    for write in (
        lambda: path_lock(shared / "next"),
        lambda: Destination(shared / "next"),
    ):
        with pytest.raises(
            PermissionError, match=r"belongs to user 12345.*use a path.*\.next\.lock"
        ):
            write()
    with (
        pytest.raises(PermissionError, match=r"belongs to user 12345"),
        whole_file(shared / "next") as beside,
    ):
        beside.write_text("new")
    assert victim.read_text() == "of this user"
    assert not made.exists()
    assert os.listdir(shared) == [".next.lock"]


def test_a_file_that_is_planted_after_the_check(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = ownership.refuse_foreign
    lock = shared / "lock"

    def check_and_plant(path: Path) -> None:
        check(path)
        _as_other_user(lambda: lock.touch(0o666))

    monkeypatch.setattr(ownership, "refuse_foreign", check_and_plant)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        open_own(lock, os.O_RDWR | os.O_CREAT, 0o600)


def test_a_hard_link_and_a_link_of_the_same_user(shared: Path) -> None:
    """A folder of one user may have links that another program has made.

    A lock is not written through them.
    """
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


def test_a_file_with_several_names_and_one_of_another_user_can_be_read(
    shared: Path,
) -> None:
    """A save that was backed up by hard links, or that a colleague has made, is read as
    any file.
    """
    saved = shared / "saved"
    _as_other_user(lambda: saved.write_text("rows"))
    (shared / "backup").hardlink_to(saved)
    descriptor = open_own(saved, os.O_RDONLY)
    assert os.read(descriptor, 10) == b"rows"
    os.close(descriptor)


def test_users_that_are_trusted(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team = shared / "team"
    _as_other_user(lambda: team.mkdir(0o777))
    with pytest.raises(
        PermissionError,
        match=f"set RECSTORE_TRUSTED_USERS={OTHER} if you trust that user",
    ):
        refuse_foreign(team / "1000")
    monkeypatch.setenv("RECSTORE_TRUSTED_USERS", f"7, {OTHER}")
    refuse_foreign(team / "1000")
    Destination(team / "1000").close()


def test_a_filesystem_that_gives_files_to_another_user(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with root squash does; here, each new file is given away."""
    mine = shared / "mine"
    mine.mkdir()
    os.chown(mine, OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
        refuse_foreign(mine)
    temporary = tempfile.TemporaryFile

    def given_away(dir: Path) -> Any:
        file = temporary(dir=dir)
        os.fchown(file.fileno(), OTHER, OTHER)
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", given_away)
    refuse_foreign(mine)
    lock = mine.parent / "lock"
    lock.touch()
    os.chown(lock, OTHER, OTHER)
    os.close(open_own(lock, os.O_RDWR))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_planted_folder_for_checkpoints_data_and_cold_stores(
    shared: Path, depth: int
) -> None:
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
    """A link in the place of a folder would have this process write into any other
    folder of its user.
    """
    victim = shared.parent / "victim"
    victim.mkdir()
    _as_other_user(lambda: (shared / "run").symlink_to(victim))
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        Destination(shared / "run" / "1000")
    with pytest.raises(ColdStoreError, match="belongs to user 12345"):
        _open_store(shared / "run")
    assert not list(victim.iterdir())


def test_planted_parts_of_a_cold_store(shared: Path) -> None:
    """A store in the shared folder itself, where another user has made its lock, or the
    folder of its table.
    """
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
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size=1m,uid={OTHER}",
        "tmpfs",
        str(mounted),
    ]
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
    import os
    os.umask(int(os.environ.get("UMASK", "22"), 8))
    from torchrec_recstore import RowOptimizer, Table
    import torch
    optimizer = RowOptimizer(name="planted", step="m += g; w -= lr * m;", states={"m": "element"})
    table = Table(4, optimizer=optimizer)
    table.lookup(torch.arange(3), train=True)
    print("made")
"""


def test_a_planted_library_of_an_optimizer_does_not_run(shared: Path) -> None:
    """The library of a RowOptimizer is code.

    Another user knows its name, and may have made the folder before.
    """

    def run(cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
        return run_forked_command(["-c", _OPTIMIZER], environment)

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

    trusting = run(_open_to_all(shared), RECSTORE_TRUST_CACHE="1", UMASK="2")
    assert trusting.returncode == 0, trusting.stderr
    (compiled,) = (shared / "open" / "torchrec_recstore").glob("*.so")
    assert stat.S_IMODE(compiled.stat().st_mode) == 0o700, (
        "otherwise it would be compiled anew in every process"
    )

    # A library of another user in a folder of this one, which was open to all for some
    # time, is replaced.
    library.write_bytes(b"code of another user")
    os.chown(library, OTHER, OTHER)
    made = run(own)
    assert made.returncode == 0, made.stderr
    assert library.stat().st_uid == os.geteuid()
    assert torch.version.__version__
