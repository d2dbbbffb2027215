"""One process at a time writes to a path, and files of others and needed checkpoints
are not deleted.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torchrec_recstore import (
    CheckpointError,
    RecStoreClient,
    compact_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from torchrec_recstore.checkpoint import files
from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import FileLock, lock_file, make_directory
from torchrec_recstore.checkpoint.info import read_chain

from . import models

Fork = Callable[[Callable[[], object]], int]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Forks a process that does some work, reports that and waits; kills the process at
    the end.
    """
    children: list[int] = []

    def begin(work: Callable[[], object]) -> int:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            held = work()
            os.write(told, b"!")
            signal.pause()
            del held
            os._exit(0)
        children.append(child)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        return child

    yield begin
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def locked(path: Path, shared: bool = False) -> FileLock:
    return FileLock(
        path, "testing it", lambda holder: f"{path}: {holder}", shared=shared
    )


def test_the_holder_is_named_and_its_death_frees_the_path(
    tmp_path: Path, fork: Fork
) -> None:
    path = tmp_path / "saved"
    holder = fork(lambda: Destination(path))
    since = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    expected = (
        f"{path} cannot be written: process {holder} on host {socket.gethostname()} has"
        f" been writing it since {since}:"
    )
    with pytest.raises(BlockingIOError, match=expected):
        Destination(path)
    with pytest.raises(BlockingIOError, match=expected):
        RecStoreClient().save(path)
    os.kill(holder, signal.SIGKILL)
    # The lock ends with the process, and not when its file is deleted.
    while lock_file(path).exists():
        try:
            Destination(path).close()
        except BlockingIOError:
            continue
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_forked_meanwhile_does_not_have_the_lock(
    tmp_path: Path, fork: Fork
) -> None:
    with locked(tmp_path / "lock") as held:
        child = fork(held.close)
        assert (tmp_path / "lock").exists()
        with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on host"):
            locked(tmp_path / "lock")
    os.kill(child, 0)
    locked(tmp_path / "lock").close()
    assert list(tmp_path.iterdir()) == []


def test_shared_locks(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    first, second = locked(file, shared=True), locked(file, shared=True)
    for held in (first, second):
        with pytest.raises(BlockingIOError, match="has been testing it"):
            locked(file)
        held.close()
    forgotten = locked(file)
    with pytest.raises(BlockingIOError, match="has been testing it"):
        locked(file, shared=True)
    del forgotten
    locked(file, shared=True).close()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_UNKNOWN_HOLDER_S", 0.05)
    file = tmp_path / "lock"
    with locked(file):
        record = json.loads(file.read_bytes())
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        for text, message in [
            ("", "another process has been using it"),
            (json.dumps(record | {"pid": child}), "another process has been using it"),
            (
                json.dumps(record | {"pid": child, "host": "far"}),
                f"process {child} on host far has been testing it since",
            ),
        ]:
            file.write_text(text)
            with pytest.raises(BlockingIOError, match=message):
                locked(file)


def test_a_filesystem_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        OSError, match=r"its filesystem has no file locks: '.*\.saved\.lock'"
    ):
        Destination(tmp_path / "saved")


def test_only_what_dead_savers_have_left_is_removed(tmp_path: Path) -> None:
    dead, others = (
        tmp_path / ".saved.saving-0123456789ab",
        [".saved.saving", ".other.saving-0123456789ab", ".saved.txt"],
    )
    dead.mkdir()
    (dead / "half").touch()
    for name in others:
        (tmp_path / name).mkdir()
    with Destination(tmp_path / "saved") as destination:
        mine = destination.stage()
        assert {path.name for path in tmp_path.iterdir()} == {
            mine.name,
            ".saved.lock",
            *others,
        }
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_new_directories_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every directory is synced after an entry was created in it."""
    synced: list[str] = []
    fsync, mkdir = os.fsync, Path.mkdir

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def make(path: Path, *arguments: object, **more: object) -> None:
        mkdir(path, *arguments, **more)  # type: ignore[arg-type]
        synced.append(f"made {path}")

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "mkdir", make)
    a, b = tmp_path / "a", tmp_path / "a" / "b"
    with RecStoreClient() as client:
        client.save(b / "saved")
    (staging,) = (
        name for name in synced if name.startswith("made ") and ".saving-" in name
    )
    assert [name for name in synced if name.startswith("made ")] == [
        f"made {a}",
        f"made {b}",
        staging,
    ]
    for parent, made in [(tmp_path, f"made {a}"), (a, f"made {b}"), (b, staging)]:
        assert str(parent) in synced[synced.index(made) :]
    assert staging.removeprefix("made ") in synced
    with pytest.raises(NotADirectoryError, match=r"metadata\.json"):
        make_directory(b / "saved" / "metadata.json" / "c")


def test_what_a_delta_beside_it_needs_is_not_replaced(
    one_rank: None, tmp_path: Path
) -> None:
    model = models.recstore()
    models.train(model)
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save_checkpoint(model, folder / "1")
    save_checkpoint(model, elsewhere / "2", delta_of=folder / "1")
    save_checkpoint(model, folder / "3", delta_of=elsewhere / "2")
    (tmp_path / "link").symlink_to(folder)
    for path in (folder / "1", tmp_path / "link" / "1"):
        with pytest.raises(
            FileExistsError,
            match=rf"run/1 is needed to load {folder / '3'}, which is a delta of it",
        ):
            save_checkpoint(model, path, overwrite=True)
    with pytest.raises(FileExistsError, match=r"run/1 is needed to load"):
        RecStoreClient().save(folder / "1", overwrite=True)
    load_checkpoint(model, folder / "3")
    save_checkpoint(model, folder / "3", overwrite=True)  # No delta needs it.
    save_checkpoint(model, folder / "1", overwrite=True)
    # A delta that cannot be loaded needs no base.
    (folder / "3" / "metadata.json").write_text("{")
    save_checkpoint(model, folder / "1", overwrite=True)


def test_a_base_stays_while_a_delta_of_it_is_saved(
    one_rank: None, tmp_path: Path
) -> None:
    model = models.recstore()
    save_checkpoint(model, tmp_path / "1")
    chain = read_chain(tmp_path / "1")
    with Destination(tmp_path / "2", bases=chain) as destination:
        # Several processes can lock a base at the same time.
        with Destination(tmp_path / "3", bases=chain):
            pass
        with pytest.raises(
            BlockingIOError,
            match=(
                r"1 cannot be written: .* has been writing .*2, which needs it, since"
            ),
        ):
            save_checkpoint(model, tmp_path / "1", overwrite=True)
        destination.stage()
        # A process deletes the base without taking the lock.
        shutil.rmtree(tmp_path / "1")
        with pytest.raises(
            CheckpointError, match=r"1 has been replaced or deleted since it was read"
        ):
            destination.publish()
    assert not (tmp_path / "2").exists()
    models.train(model)
    save_checkpoint(model, tmp_path / "1")
    with (
        Destination(tmp_path / "1", overwrite=True),
        pytest.raises(BlockingIOError, match=r"1, which .*2 needs, cannot"),
    ):
        compact_checkpoint(tmp_path / "1", tmp_path / "2")
    with pytest.raises(CheckpointError, match="has been replaced"):
        Destination(tmp_path / "2", bases=chain)


def test_what_is_not_the_checkpoints_is_not_deleted(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.recstore()
    path = tmp_path / "saved"
    save_checkpoint(model, path, training_state={"x": torch.ones(1)})
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    (path / "notes").mkdir()
    with pytest.raises(
        FileExistsError,
        match=r"saved contains files that do not belong .*: notes; move them away",
    ):
        save_checkpoint(model, path, overwrite=True)
    (path / "notes").rmdir()
    # A file that is added at the last moment is also found.
    with Destination(path, overwrite=True) as destination:
        destination.stage()
        monkeypatch.setattr(Destination, "_check", lambda self: None)
        for number in range(5):
            (path / f"notes.{number}").touch()
        with pytest.raises(
            FileExistsError, match=r"notes\.0, notes\.1, notes\.2 and 2 more;"
        ):
            destination.publish()
        monkeypatch.undo()
    for number in range(5):
        (path / f"notes.{number}").unlink()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    (path / "metadata.json").write_text("{")
    with pytest.raises(FileExistsError, match="saved has damaged metadata"):
        save_checkpoint(model, path, overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} - {"rendezvous"} == {"saved"}
