"""Names that clients and other servers send never lead a server out of its data
directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.outside.files import with_checksum
from tests.service.test_set_calls import EPOCH, Server
from torchrec_recstore.checkpoint import CheckpointError
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import TableOptions
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.save_names import SavedFileName, SaveId, SaveName
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.table_spec import TableSpec

NO_IDS = [
    "",
    ".",
    "..",
    "x/../../victim",
    "../victim",
    "/victim",
    "a\0b",
    "a b",
    "ä",
    "a\n",
    "a" * 65,
    "x" * 4096,
]
NO_NAMES = [
    "",
    ".",
    "..",
    ".hidden",
    "x/../../victim",
    "a/b",
    "a\0b",
    "\udc80",
    "lock",
    "set.json",
    "x" * 201,
]
NO_FILES = ["", ".", "..", "../../victim/file", "a/b", "a\0b", "\udc80", "x" * 256]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "data")
    yield server
    server.tables.close()
    server.directory.close()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory beside the data directory, which no call may change."""
    path = tmp_path / "victim"
    path.mkdir()
    (path / "file").write_text("precious")
    return path


def _abort_save(server: Server, save_id: str) -> None:
    request = pb.SaveRequest(
        phase=pb.SaveRequest.ABORT, epoch=EPOCH, save=pb.Saved(id=save_id)
    )
    server.calls.save(request, lambda: True)


def _abort_load(server: Server, save_id: str) -> None:
    server.calls.load(
        pb.LoadRequest(phase=pb.LoadRequest.ABORT, save=pb.Saved(id=save_id), parts=1)
    )


def _commit_save(server: Server, save_id: str) -> None:
    server.save("commit", save_id)


def _prepare_save(server: Server, save_id: str) -> None:
    server.save("prepare", save_id)


def _reserve_save(server: Server, save_id: str) -> None:
    server.save("reserve", save_id)


def _write_file(server: Server, save_id: str) -> None:
    server.write(save_id)


def _read_file(server: Server, save_id: str) -> None:
    server.calls.read_file(pb.ReadFileRequest(save=pb.Saved(name="monday", id=save_id)))


def test_abort_deletes_nothing_outside_the_data_directory(
    server: Server, victim: Path
) -> None:
    server.write("x")  # makes the directory from which the path of the abort goes up
    with pytest.raises(ValueError, match="a save needs an id"):
        _abort_save(server, "x/../../victim")
    assert (victim / "file").read_text() == "precious"


@pytest.mark.parametrize(
    "call",
    [
        _abort_save,
        _abort_load,
        _commit_save,
        _prepare_save,
        _reserve_save,
        _write_file,
        _read_file,
    ],
)
@pytest.mark.parametrize("save_id", [name for name in NO_IDS if name])
def test_every_call_refuses_an_id_that_is_none(
    server: Server, victim: Path, call: Callable[[Server, str], None], save_id: str
) -> None:
    server.write("x")
    files = _files_below(victim.parent)
    with pytest.raises(ValueError, match="a save needs an id"):
        call(server, save_id)
    assert _files_below(victim.parent) == files


# protobuf refuses that one
@pytest.mark.parametrize("name", [name for name in NO_NAMES if "\udc80" not in name])
def test_every_call_refuses_a_name_that_is_none(
    server: Server, victim: Path, name: str
) -> None:
    number = server.save("reserve", "first")
    files = _files_below(victim.parent)
    with pytest.raises(ValueError, match="name"):
        server.save("prepare", "first", number, name=name)
    with pytest.raises(ValueError, match="name"):
        server.save("reserve", "first", name=name)
    if name:  # a load without a name begins an epoch without tables
        with pytest.raises(ValueError, match="name"):
            server.load("prepare", "second", name, epoch=2)
        with pytest.raises(ValueError, match="name"):
            server.calls.read_file(pb.ReadFileRequest(save=pb.Saved(name=name)))
    assert _files_below(victim.parent) == files


@pytest.mark.parametrize("file", [name for name in NO_FILES if "\udc80" not in name])
def test_a_file_of_a_save_has_a_plain_name(
    server: Server, victim: Path, file: str
) -> None:
    files = _files_below(victim.parent)
    with pytest.raises(ValueError, match="the name of a file of a save"):
        server.write("x", file=file)
    assert _files_below(victim.parent) == files


@pytest.mark.parametrize("table", [".t", "..", "../victim", "a/b", "\n", "t" * 1000])
def test_the_rows_of_a_table_of_any_name_go_to_other_servers(
    server: Server, table: str
) -> None:
    server.tables.create(
        table, TableSpec(4, torch.float32, SGD(lr=1.0), TableOptions())
    )
    server.tables.push(table, torch.arange(3), torch.ones(3, 4))
    number = server.save("reserve", "first")
    server.save("prepare", "first", number)
    server.save("commit", "first", number)
    saved = server.directory.at
    files = server.calls.read_file(pb.ReadFileRequest(save=saved)).files
    assert len(files) == 3
    for file in files:
        reply = server.calls.read_file(pb.ReadFileRequest(save=saved, file=file))
        server.write("copy", file=file, content=reply.content)


@pytest.mark.parametrize("base", ["../victim", "../../victim", "/victim", "monday"])
def test_what_another_server_sends_is_no_delta_of_a_checkpoint_here(
    server: Server, tmp_path: Path, base: str
) -> None:
    """The path of a base would lead to rows that the other server does not have."""
    other = Server(tmp_path / "other")
    copy = pb.Saved(name="copy", id="copy1")
    state = other.calls.copy(SaveId(copy.id), lambda: None)

    def read(file: str, offset: int) -> pb.ReadFileReply:
        reply = other.calls.read_file(
            pb.ReadFileRequest(save=copy, file=file, offset=offset)
        )
        if file == "metadata.json":
            document = json.loads(reply.content)
            document["delta_of"] = {"path": base, "checksum": "0" * 32}
            return pb.ReadFileReply(content=with_checksum(document).encode(), last=True)
        return reply

    with pytest.raises(
        CheckpointError, match=r"is a delta of .*, and servers send whole saves only"
    ):
        server.calls.follow(copy, state, read)
    for file in read("", 0).files:
        server.write("x", file=file, content=read(file, 0).content)
    with pytest.raises(
        CheckpointError, match=r"is a delta of .*, and servers send whole saves only"
    ):
        server.calls.load(
            pb.LoadRequest(
                phase=pb.LoadRequest.RESHARD,
                token="token",
                save=pb.Saved(name="tuesday", id="x"),
                set="set",
                members=1,
                epoch=2,
                slots=[0],
                parts=1,
            )
        )
    other.tables.close()
    other.directory.close()


@pytest.mark.parametrize(
    ("kind", "bad"), [(SaveId, NO_IDS), (SaveName, NO_NAMES), (SavedFileName, NO_FILES)]
)
def test_the_types_refuse_bad_names_and_take_others(
    kind: Callable[[object], str], bad: list[str]
) -> None:
    for name in bad:
        with pytest.raises(ValueError, match=r"name|id"):
            kind(name)
    for value in (None, 7, b"name", Path("name")):
        with pytest.raises(TypeError, match="must be a string"):
            kind(value)
    name = kind("monday7")
    assert name == "monday7"
    assert kind(name) is name


@pytest.mark.parametrize("name", ["../victim", "/", "a/b", "."])
@pytest.mark.parametrize("field", ["last", "id"])
def test_names_in_the_files_of_a_server_are_checked(
    tmp_path: Path, victim: Path, name: str, field: str
) -> None:
    data = tmp_path / "data"
    DataDirectory(data).close()
    document = {
        "last": None,
        "stopped": None,
        "unless_prepared": {"id": "x", "last": None},
    }
    if field == "last":
        document["last"] = name
    else:
        document["unless_prepared"] = {"id": name, "last": None}
    (data / "server.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"server\.json cannot be used"):
        DataDirectory(data)
    assert (victim / "file").read_text() == "precious"


@pytest.mark.parametrize("name", ["x" * 201, "x" * 255, os.fsdecode(b"not-utf-8-\xff")])
def test_a_directory_with_the_name_of_no_save_is_left_alone(
    server: Server, tmp_path: Path, name: str
) -> None:
    """A user can copy or rename the directory of a save."""
    number = server.save("reserve", "first")
    server.save("prepare", "first", number)
    server.save("commit", "first", number)
    data = tmp_path / "copy"
    shutil.copytree(server.directory.path, data, ignore=shutil.ignore_patterns("lock"))
    shutil.copytree(data / "monday", data / name)
    files = _files_below(data / name)
    directory = DataDirectory(data)
    assert [saved.name for saved in directory.saves] == ["monday"]
    assert directory.at.name == "monday"
    directory.close()
    assert _files_below(data / name) == files


def _files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }
