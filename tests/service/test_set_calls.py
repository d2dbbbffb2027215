"""Tests of saves and loads in phases whose clients stop, die or are too many, in the
process.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import TableOptions
from torchrec_recstore_service.server import received, reservations
from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.native import CallRefusedError
from torchrec_recstore_service.server.pair import Pair
from torchrec_recstore_service.server.save_names import SaveId
from torchrec_recstore_service.server.set_calls import SetCalls
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.table_spec import TableSpec

EPOCH = "set/1/first/first"  # the first run of the epoch that the fixture begins
IDS = torch.arange(100)


class Server:
    """A server of a set of one, without gRPC."""

    def __init__(self, path: Path) -> None:
        self.tables = HostedTables()
        self.directory = DataDirectory(path)
        self.calls = SetCalls(self.tables, self.directory, AppliedRequests(), Pair())
        self.load("commit", "first", "")
        self.tables.create(
            "t", TableSpec(4, torch.float32, SGD(lr=1.0), TableOptions())
        )
        self.tables.push("t", IDS, torch.ones(100, 4))

    def load(
        self, phase: str, token: str, name: str = "monday", epoch: int = 1
    ) -> None:
        request = pb.LoadRequest(
            phase=pb.LoadRequest.Phase.Value(phase.upper()),
            token=token,
            save=next(
                (saved for saved in self.directory.saves if saved.name == name),
                pb.Saved(name=name),
            ),
            exact=True,
            set="set",
            members=1,
            epoch=epoch,
            slots=[0],
        )
        self.calls.load(request)

    def save(
        self,
        phase: str,
        save_id: str,
        number: int = 0,
        active: bool = True,
        name: str = "monday",
    ) -> int:
        saved = pb.Saved(name=name, id=save_id, number=number)
        request = pb.SaveRequest(
            phase=pb.SaveRequest.Phase.Value(phase.upper()),
            epoch=EPOCH,
            save=saved,
            overwrite=True,
        )
        return self.calls.save(request, lambda: active).number

    def write(
        self, save_id: str, file: str = "file", offset: int = 0, content: bytes = b"abc"
    ) -> None:
        self.calls.write_file(
            pb.WriteFileRequest(id=save_id, file=file, offset=offset, content=content)
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "data")
    yield server
    server.tables.close()
    server.directory.close()


@pytest.mark.parametrize("name", ["monday", "tuesday"])
def test_a_server_that_is_killed_starts_from_the_save_that_counts(
    server: Server, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks: list[Path] = []

    def around(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*args: Any) -> None:
            for step in (lambda: None, lambda: change(*args)):
                step()
                disks.append(tmp_path / f"disk-{len(disks)}")
                shutil.copytree(
                    server.directory.path,
                    disks[-1],
                    ignore=shutil.ignore_patterns("lock"),
                )

        return changed

    for save_id, of_save in (("first", "monday"), ("second", name)):
        number = server.save("reserve", save_id, name=of_save)
        server.save("prepare", save_id, number, name=of_save)
        if save_id == "second":
            monkeypatch.setattr(DataDirectory, "_write", around(DataDirectory._write))
            monkeypatch.setattr(
                Destination, "publish_prepared", around(Destination.publish_prepared)
            )
        server.save("commit", save_id, number, name=of_save)
    monkeypatch.undo()
    newest = []
    for disk in disks:
        for _ in range(2):  # the second start is that after another kill
            directory = DataDirectory(disk)
            directory.discard(SaveId("second"))  # if it does not count
            assert directory.at == directory.saves[-1], disk
            directory.close()
        newest.append(directory.at.id)
    assert sorted(set(newest)) == ["first", "second"]
    assert newest == sorted(newest)


def test_tables_of_another_server_are_known_as_such_when_the_disk_is_full(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = server.save("reserve", "first")
    server.save("prepare", "first", number)
    server.save("commit", "first", number)
    server.load("commit", "again", "monday", epoch=2)
    primary = Server(tmp_path / "primary")
    primary.tables.push("t", IDS, torch.full((100, 4), 2.0))
    copy = pb.Saved(name="copy", id="copy1")
    state = primary.calls.copy(SaveId(copy.id), lambda: None)

    def read(file: str, offset: int) -> pb.ReadFileReply:
        return primary.calls.read_file(
            pb.ReadFileRequest(save=copy, file=file, offset=offset)
        )

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(DataDirectory, "set_last", full)
    with pytest.raises(OSError, match="No space left"):
        server.calls.follow(copy, state, read)
    monkeypatch.undo()
    assert torch.equal(server.tables.pull("t", IDS), torch.full((100, 4), 2.0))
    assert server.calls.follows
    server.load("commit", "again", "monday", epoch=3)  # reads the save again
    assert torch.equal(server.tables.pull("t", IDS), torch.ones(100, 4))
    primary.tables.close()
    primary.directory.close()


def test_a_save_whose_client_has_stopped_gives_way(server: Server) -> None:
    stopped = [server.save("reserve", "stopped")]
    assert server.save("reserve", "next") == stopped[0] + 1  # after a second
    with pytest.raises(CallRefusedError, match="another save was begun meanwhile"):
        server.save("prepare", "stopped", *stopped)
    with pytest.raises(CallRefusedError, match="another save was begun meanwhile"):
        # not the number that the server has given
        server.save("prepare", "next", 2**62)
    server.save("prepare", "next", stopped[0] + 1)
    server.save("commit", "next", stopped[0] + 1)
    assert [saved.id for saved in server.directory.saves] == ["next"]
    with pytest.raises(ValueError, match="less than 2"):
        server.save("reserve", "far", 2**63)
    # A save that has waited for another one gets the next number.
    server.save("reserve", "slow")
    waits: list[int] = []
    thread = threading.Thread(
        target=lambda: waits.append(server.save("reserve", "waits"))
    )
    thread.start()
    time.sleep(0.1)
    server.save("prepare", "slow", 3)
    server.save("commit", "slow", 3)
    thread.join()
    assert waits == [4]


def test_few_saves_wait_for_their_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "UNPREPARED_S", 60.0)
    server.save("reserve", "first")
    refused, end = [], threading.Event()

    def reserve(number: int) -> None:
        saved = pb.Saved(name="monday", id=f"waits{number}")
        request = pb.SaveRequest(phase=pb.SaveRequest.RESERVE, epoch=EPOCH, save=saved)
        try:
            server.calls.save(request, lambda: not end.is_set())
        except CallRefusedError as error:
            refused.append((error.code.name, str(error)))

    waiting = [
        threading.Thread(target=reserve, args=(number,))
        for number in range(reservations.WAITING + 3)
    ]
    for thread in waiting:
        thread.start()
    while len(refused) < 3:
        time.sleep(0.01)
    assert refused == [("UNAVAILABLE", "8 saves wait already: repeat the call")] * 3
    end.set()  # the clients that wait have gone
    server.save("abort", "first")
    for thread in waiting:
        thread.join(60)
    assert len(refused) == len(waiting)
    monkeypatch.setattr(reservations, "UNPREPARED_S", 0.0)
    server.save("reserve", "another")


def test_rows_of_a_load_whose_client_has_died_are_freed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.save("reserve", "id")
    server.save("prepare", "id", 1)
    server.save("commit", "id", 1)
    server.tables.push("t", IDS, torch.zeros(100, 4))
    monkeypatch.setattr(server.calls._next_deadline, "_seconds", 0.2)
    server.load("prepare", "dies", epoch=2)
    while server.calls.loading:
        time.sleep(0.01)
    # a client that is only slow loads them again
    server.load("commit", "dies", epoch=2)
    assert server.tables.pull("t", IDS).unique().tolist() == [1.0]
    assert not server.calls.loading


def test_the_rows_of_a_load_are_those_of_its_save(server: Server) -> None:
    server.save("reserve", "id")
    server.save("prepare", "id", 1)
    server.save("commit", "id", 1)
    server.load("prepare", "token", "monday", epoch=2)
    with pytest.raises(FileNotFoundError, match="tuesday"):
        server.load("commit", "token", "tuesday", epoch=2)
    server.load("commit", "token", "", epoch=2)
    assert not server.tables.specs()
    assert server.directory.last is None


def test_what_a_server_receives_is_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.write("one")
    server.write("one", offset=0)  # a piece that is sent again
    server.write("one", offset=3)
    assert server.calls.received_bytes == 6
    assert (
        server.directory.received(SaveId("one")) / "0" / "file"
    ).read_bytes() == b"abcabc"
    with pytest.raises(ValueError, match="has 6 bytes, got the offset 1000"):
        server.write("one", offset=1000)
    with pytest.raises(CallRefusedError, match="receives the files of another save"):
        server.write("two")
    with monkeypatch.context() as patch:
        patch.setattr(received, "FILES", 1)
        with pytest.raises(ValueError, match="at most 1 files"):
            server.write("one", "another")
        patch.setattr(received, "GIVES_WAY_S", 0.0)
        server.write("two")
    assert not server.directory.received(SaveId("one")).exists()
    used = server.tables.used_bytes()
    assert used > 0
    with monkeypatch.context() as patch:
        patch.setattr(received, "GIVES_WAY_S", 0.0)
        for free, fits in ((used + 2, False), (used + 3, True)):
            patch.setattr(
                shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
            )
            if fits:
                server.write("four")
            else:
                with pytest.raises(OSError, match="needs the other free space"):
                    server.write("three")
        monkeypatch.setattr(server.calls._received._deadline, "_seconds", 0.1)
        server.write("five")
    while server.calls.received_bytes:
        time.sleep(0.01)
    assert not list(server.directory.path.glob(".received-*"))
