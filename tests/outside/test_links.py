"""A link that lies where a server or a store makes its own files is never followed.

Links that a user makes are followed: that of a data directory, of a save, or of a
checkpoint's directory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.outside.sandbox import MARKER, Sandbox
from tests.service.test_set_calls import Server
from torchrec_recstore.checkpoint.files import path_lock, whole_file
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import SSDStore, TableOptions
from torchrec_recstore.run_directories import RunDirectory, run_directories
from torchrec_recstore.store.cold_store import ColdStoreError
from torchrec_recstore.store.ssd_store import SSDColdStore
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.save_names import SaveId
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.table_spec import TableSpec

RUN = "run-0123456789ab"


@pytest.fixture
def server(sandbox: Sandbox) -> Iterator[Server]:
    server = Server(sandbox.data)
    yield server
    server.tables.close()
    server.directory.close()


def _victim(sandbox: Sandbox, kind: str) -> Path:
    names = {"directory": "victim", "file": "victim-file", "nothing": "new"}
    return sandbox.beside / names[kind]


def _saved(server: Server, save_id: str) -> None:
    number = server.save("reserve", save_id)
    server.save("prepare", save_id, number)
    server.save("commit", save_id, number)


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_documents_of_a_server_are_not_written_through_a_link(
    sandbox: Sandbox, server: Server, kind: str
) -> None:
    for name in (".server.json", ".set.json"):
        (sandbox.data / name).symlink_to(_victim(sandbox, kind))
    with sandbox.watched():
        _saved(server, "first")
        server.load("commit", "second", epoch=2)
    assert not any(path.is_symlink() for path in sandbox.data.rglob("*"))
    assert server.directory.at.name == "monday"


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_a_lock_is_not_taken_through_a_link(sandbox: Sandbox, kind: str) -> None:
    for name in ("lock", ".monday.lock"):
        (sandbox.data / name).symlink_to(_victim(sandbox, kind))
    with sandbox.watched():
        with pytest.raises(OSError, match=r"is a link.*data/lock"):
            DataDirectory(sandbox.data)
        with pytest.raises(OSError, match=r"is a link.*\.monday\.lock"):
            path_lock(sandbox.data / "monday")
        with (
            pytest.raises(OSError, match="is a link"),
            whole_file(sandbox.data / "monday"),
        ):
            pass


@pytest.mark.parametrize("kind", ["directory", "nothing"])
@pytest.mark.parametrize(
    "place", [".received-x", ".received-x/0", ".received-x/0/file"]
)
def test_received_files_are_not_written_through_a_link(
    sandbox: Sandbox, server: Server, place: str, kind: str
) -> None:
    link = sandbox.data / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(_victim(sandbox, "file" if place.endswith("file") else kind))
    with sandbox.watched():
        with pytest.raises(OSError, match="link"):
            server.write("x")
        with pytest.raises(OSError, match="link"):
            server.calls.load(_reshard("x"))
        abort = pb.SaveRequest(phase=pb.SaveRequest.ABORT, save=pb.Saved(id="x"))
        server.calls.save(abort, lambda: True)
    assert not (sandbox.data / ".received-x").is_symlink()
    with sandbox.watched():
        server.write("x")
    assert (sandbox.data / ".received-x" / "0" / "file").read_bytes() == b"abc"


def _reshard(save_id: str) -> pb.LoadRequest:
    return pb.LoadRequest(
        phase=pb.LoadRequest.RESHARD,
        token="token",
        save=pb.Saved(name="tuesday", id=save_id),
        set="set",
        members=1,
        epoch=2,
        slots=[0],
        parts=1,
    )


def test_rows_of_a_linked_part_are_not_read(sandbox: Sandbox, server: Server) -> None:
    """The victim is a whole checkpoint, whose rows must not become those of a table."""
    folder = sandbox.data / ".received-x" / "0"
    folder.mkdir(parents=True)
    for file in _victim(sandbox, "directory").iterdir():
        (folder / file.name).symlink_to(file)
    with sandbox.watched(), pytest.raises(OSError, match="link"):
        server.calls.load(_reshard("x"))


@pytest.mark.parametrize("kind", ["directory", "nothing"])
def test_a_prepared_part_is_not_written_through_a_link(
    sandbox: Sandbox, server: Server, kind: str
) -> None:
    (sandbox.data / ".prepared-first").symlink_to(_victim(sandbox, kind))
    with sandbox.watched():
        _saved(server, "first")
    assert (sandbox.data / "monday").is_dir()
    assert not (sandbox.data / "monday").is_symlink()


@pytest.mark.parametrize("kind", ["directory", "nothing"])
def test_a_server_that_stops_does_not_save_through_a_link(
    sandbox: Sandbox, server: Server, kind: str
) -> None:
    for name in ("stopped-0", "stopped-1"):
        (sandbox.data / name).symlink_to(_victim(sandbox, kind))
    with sandbox.watched():
        server.calls.stop()
    assert server.directory.last == "stopped-0"
    assert not (sandbox.data / "stopped-0").is_symlink()


@pytest.mark.parametrize(
    "name", [".received-x", ".prepared-x", "..prepared-x.saving-0123456789ab"]
)
def test_a_server_removes_links_in_place_of_its_own_files(
    sandbox: Sandbox, name: str
) -> None:
    (sandbox.data / name).symlink_to(_victim(sandbox, "directory"))
    with sandbox.watched():
        DataDirectory(sandbox.data).close()
    assert not os.path.lexists(sandbox.data / name)


def test_a_file_of_a_save_is_not_read_through_a_link(
    sandbox: Sandbox, server: Server
) -> None:
    """Clients read the files of saves without a checksum."""
    _saved(server, "first")
    save = sandbox.data / "monday"
    (save / "linked").symlink_to(_victim(sandbox, "file"))
    (save / "folder").mkdir()
    os.mkfifo(save / "pipe")
    with sandbox.watched():
        for name in ("linked", "folder", "pipe"):
            request = pb.ReadFileRequest(save=server.directory.at, file=name)
            with pytest.raises(OSError, match=f"{name}.*is no regular file"):
                server.calls.read_file(request)
    request = pb.ReadFileRequest(save=server.directory.at, file="metadata.json")
    assert MARKER not in server.calls.read_file(request).content


def test_a_forgotten_save_that_is_a_link_leaves_what_it_names(
    sandbox: Sandbox, server: Server
) -> None:
    _saved(server, "first")
    shutil.move(sandbox.data / "monday", sandbox.cwd / "elsewhere")
    (sandbox.data / "monday").symlink_to(sandbox.cwd / "elsewhere")
    files = sorted(os.listdir(sandbox.cwd / "elsewhere"))
    server.directory.set_last(None)
    server.directory.forget(server.directory.saves[0].name)  # type: ignore[arg-type]
    assert sorted(os.listdir(sandbox.cwd / "elsewhere")) == files
    assert not os.path.lexists(sandbox.data / "monday")


@pytest.mark.parametrize("name", ["data", "monday"])
def test_links_that_a_user_makes_are_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "disk").mkdir()
    if name == "data":
        (tmp_path / "data").symlink_to(tmp_path / "disk")
    first = Server(tmp_path / "data")
    _saved(first, "first")
    first.tables.close()
    first.directory.close()
    if name == "monday":
        shutil.move(tmp_path / "data" / "monday", tmp_path / "disk" / "monday")
        (tmp_path / "data" / "monday").symlink_to(tmp_path / "disk" / "monday")
    directory = DataDirectory(tmp_path / "data")
    assert directory.at.id == "first"
    tables = HostedTables()
    tables.create("t", TableSpec(4, torch.float32, SGD(lr=1.0), TableOptions()))
    tables.load(directory.checkpoint(directory.last))  # type: ignore[arg-type]
    assert len(tables.ids("t")) == 100
    tables.close()
    directory.discard(SaveId("first"))
    directory.close()


def _run_directory(sandbox: Sandbox) -> RunDirectory:
    return RunDirectory(str(sandbox.data), "t", "ba9876543210")


def test_a_run_directory_that_is_a_link_is_not_emptied(sandbox: Sandbox) -> None:
    """The directories of killed processes are deleted, and a link looks like one of
    them.
    """
    (sandbox.data / "t").mkdir()
    (sandbox.data / "t" / RUN).symlink_to(_victim(sandbox, "directory"))
    with sandbox.watched():
        _run_directory(sandbox).remove()
    assert (sandbox.data / "t" / RUN).is_symlink()
    assert run_directories(sandbox.data) == []


def test_a_directory_of_a_table_that_is_a_link_is_refused(sandbox: Sandbox) -> None:
    dead = sandbox.cwd / "t" / RUN
    dead.mkdir(parents=True)
    (dead / "rows").write_bytes(MARKER)
    (sandbox.data / "t").symlink_to(sandbox.cwd / "t")
    with pytest.raises(OSError, match=r"is a link.*data/t"):
        _run_directory(sandbox)
    assert (dead / "rows").read_bytes() == MARKER
    assert sorted(os.listdir(sandbox.cwd / "t")) == [RUN]


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_locks_of_run_directories_are_not_links(sandbox: Sandbox, kind: str) -> None:
    (sandbox.data / "lock").symlink_to(_victim(sandbox, kind))
    with sandbox.watched(), pytest.raises(OSError, match=r"is a link.*data/lock"):
        _run_directory(sandbox)
    (sandbox.data / "lock").unlink()
    (sandbox.data / "t" / RUN).mkdir(parents=True)
    (sandbox.data / "t" / RUN / "lock").symlink_to(_victim(sandbox, kind))
    with sandbox.watched():
        _run_directory(sandbox).remove()
    assert not os.path.lexists(sandbox.data / "t" / RUN)


@pytest.mark.parametrize("name", ["rows", "rows.end"])
@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_files_of_shared_rows_are_not_links(
    sandbox: Sandbox, name: str, kind: str
) -> None:
    options = SSDStore(str(sandbox.data), shared="kept")
    folder = sandbox.data / "shared" / "kept" / "t"
    folder.mkdir(parents=True)
    (folder / name).symlink_to(_victim(sandbox, kind))
    with sandbox.watched():
        with pytest.raises(ColdStoreError, match=rf"{name} .*is a link"):
            SSDColdStore(options, name="t", row_bytes=8)
        (folder / name).unlink()
        SSDColdStore(options, name="t", row_bytes=8).close()


@pytest.mark.parametrize("part", ["shared", "shared/kept", "shared/kept/t"])
def test_directories_of_shared_rows_are_not_links(sandbox: Sandbox, part: str) -> None:
    elsewhere = sandbox.data.parent / "elsewhere"
    elsewhere.mkdir()
    link = sandbox.data / part
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(ColdStoreError, match="is a link"):
        SSDColdStore(SSDStore(str(sandbox.data), shared="kept"), name="t", row_bytes=8)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_a_link_in_place_of_an_unfinished_file_is_replaced(
    sandbox: Sandbox, kind: str
) -> None:
    folder = sandbox.data / "shared" / "kept" / "t"
    folder.mkdir(parents=True)
    (folder / "rows.end.new").symlink_to(_victim(sandbox, kind))
    with sandbox.watched():
        SSDColdStore(
            SSDStore(str(sandbox.data), shared="kept"), name="t", row_bytes=8
        ).close()
    assert not os.path.lexists(folder / "rows.end.new")
