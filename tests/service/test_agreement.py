"""Tests that several servers are of one state: saves and loads count on all servers or
on none.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.recstore_server import Proxy, RecStoreServer
from tests.redis_server import free_port
from torchrec_recstore.cli import app
from torchrec_recstore.optim import SGD, Adam
from torchrec_recstore.options import ConstantInit, MinFrequency, TableOptions
from torchrec_recstore_service import (
    RecStoreClient,
    ServerRestartedError,
    ServerSetError,
    ServiceError,
)
from torchrec_recstore_service.client.client_epoch import (
    MOST_ANSWERS,
    ClientEpoch,
    Runs,
)
from torchrec_recstore_service.client.connection import Connection
from torchrec_recstore_service.wire import recstore_pb2 as pb

IDS = torch.arange(1000)
ZERO = TableOptions(initializer=ConstantInit(0.0))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[RecStoreServer]]:
    servers = [RecStoreServer(tmp_path / name) for name in ("a", "b")]
    yield servers
    for server in servers:
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGCONT)
        server.kill()


def test_a_server_that_lost_its_directory_is_empty_to_its_client(
    tmp_path: Path,
) -> None:
    """The client has no update that is not saved, so it goes on with an empty table."""
    server = RecStoreServer(tmp_path / "rows")
    client = _client([server])
    client.exists("t", IDS)
    server.kill()
    shutil.rmtree(tmp_path / "rows")
    server.start()
    with pytest.raises(ValueError, match="there is no table 't'"):
        client.exists("t", IDS)
    server.kill()


def _client(servers: list[RecStoreServer], timeout_s: float = 20.0) -> RecStoreClient:
    client = RecStoreClient([server.address for server in servers], timeout_s=timeout_s)
    client.init_data("t", (1000, 4), torch.float32, optimizer=SGD(lr=1.0), options=ZERO)
    return client


def _servers(
    command: str, servers: list[RecStoreServer], *flags: str
) -> tuple[int, str]:
    addresses = ",".join(server.address for server in servers)
    done = CliRunner().invoke(app, ["servers", command, *flags, addresses])
    return done.exit_code, (done.stdout + done.stderr).strip()


def _restart(servers: list[RecStoreServer]) -> None:
    for server in servers:
        server.kill()
    for server in servers:
        server.start()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_server_is_killed_in_the_middle_of_a_save(
    pair: list[RecStoreServer], stopped: int
) -> None:
    client = _client(pair)
    client.push("t", IDS, torch.full((1000, 4), 1.0))
    client.save("monday")
    client.push("t", IDS, torch.full((1000, 4), 2.0))
    # it is in the middle of the save for as long as the test wants
    pair[stopped].pause()
    errors: list[BaseException] = []

    def save() -> None:
        try:
            client.save("tuesday")
        except BaseException as error:
            errors.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    time.sleep(2)  # the other server does all that it does without this one
    _restart(pair[::-1] if stopped else pair)
    saving.join()
    assert len(errors) == 1
    with _client(pair) as after:
        assert after.pull("t", IDS).unique().tolist() == [1.0]


@pytest.mark.slow
def test_a_server_is_killed_before_any_save(pair: list[RecStoreServer]) -> None:
    with _client(pair) as client:
        client.push("t", IDS, torch.full((1000, 4), 1.0))
    _restart(pair[1:])
    with pytest.raises(
        ServerSetError,
        match=rf"{pair[1].address} was killed in epoch 1 .*recstore servers reset",
    ):
        _client(pair)  # the script runs again
    assert _servers("status", pair)[0] == 1
    assert _servers("reset", pair)[1] == "2 servers begin epoch 2 without rows"
    with _client(pair) as client:
        assert client.pull("t", IDS).unique().tolist() == [0.0]


@pytest.mark.slow
def test_a_load_whose_answer_is_lost_is_not_made_again(
    own_server: RecStoreServer,
) -> None:
    proxy = Proxy(own_server.address)
    far, near = RecStoreClient([proxy.address]), _client([own_server])
    near.push("t", IDS, torch.full((1000, 4), 7.0))
    near.save("monday")
    near.push("t", IDS, torch.zeros(1000, 4))
    near.save("tuesday")
    far.pull("t", IDS)
    proxy.delay_s = 1.0
    loading = threading.Thread(target=far.load, args=("monday",))
    loading.start()
    while near.pull("t", IDS[:1])[0, 0] != 7.0:
        time.sleep(0.01)
    proxy.cut()
    proxy.delay_s = 0.0
    for _ in range(5):
        near.update("t", IDS, torch.ones(1000, 4))
    loading.join()
    assert near.pull("t", IDS).unique().tolist() == [2.0]
    far.close()
    proxy.close()


@pytest.mark.slow
def test_a_save_whose_answer_is_lost_is_not_made_again(
    own_server: RecStoreServer,
) -> None:
    proxy = Proxy(own_server.address)
    far, near = RecStoreClient([proxy.address]), _client([own_server])
    near.push("t", IDS, torch.full((1000, 4), 7.0))
    far.pull("t", IDS)
    proxy.delay_s = 1.0
    saving = threading.Thread(target=far.save, args=("monday",))
    saving.start()
    while not (own_server.data / "monday").exists():
        time.sleep(0.01)
    near.push("t", IDS, torch.zeros(1000, 4))
    proxy.cut()
    proxy.delay_s = 0.0
    saving.join()
    near.load("monday")
    assert near.pull("t", IDS).unique().tolist() == [7.0]
    near.save("monday", overwrite=True)  # nothing of the other save is in the way
    far.close()
    proxy.close()


@pytest.mark.slow
def test_one_of_two_servers_is_killed_after_a_save(pair: list[RecStoreServer]) -> None:
    client, idle = _client(pair), _client(pair)
    client.push("t", IDS, torch.full((1000, 4), 1.0))
    client.save("monday")
    client.push("t", IDS, torch.full((1000, 4), 2.0))
    pair[0].stop()
    pair[0].start()  # goes on as if nothing had been
    assert client.pull("t", IDS).unique().tolist() == [2.0]
    assert json.loads(_servers("status", pair, "--json")[1])["agree"]
    # and now it is at the save of all, not at what it has saved alone when it stopped
    _restart(pair[:1])
    with pytest.raises(
        ServerRestartedError, match="this client's writes since its last save are lost"
    ):
        client.pull("t", IDS)
    with pytest.raises(ServerSetError, match="recstore servers restore monday"):
        idle.pull("t", IDS)
    status, told = _servers("status", pair, "--json")
    states = json.loads(told)["servers"]
    assert (status, [state["in_epoch"] for state in states], states[0]["save"]) == (
        1,
        [False, True],
        "monday",
    )
    assert "was killed in epoch 1" in _servers("status", pair)[1]
    assert _servers("restore", pair, "tuesday")[0] == 2
    assert _servers("restore", pair, "monday") == (
        0,
        "2 servers begin epoch 2 with the save 'monday'",
    )
    assert idle.pull("t", IDS).unique().tolist() == [1.0]
    with pytest.raises(ServerRestartedError):
        client.pull("t", IDS)
    client.load("monday")
    client.push("t", IDS, torch.full((1000, 4), 3.0))
    client.save("monday", overwrite=True)
    _restart(pair)
    for each in (client, idle):  # the first of them begins an epoch
        assert each.pull("t", IDS).unique().tolist() == [3.0]
    pair[1].kill()
    shutil.rmtree(pair[1].data)
    pair[1].start()
    with pytest.raises(ServerSetError, match=rf"{pair[1].address} is empty"):
        RecStoreClient([server.address for server in pair]).pull("t", IDS)
    assert _servers("restore", pair, "monday") == (
        2,
        (
            f"error: server {pair[1].address} has no save 'monday'; the complete saves"
            " are: none"
        ),
    )


def test_a_load_that_one_server_cannot_make_changes_nothing(
    pair: list[RecStoreServer],
) -> None:
    client = _client(pair)
    client.push("t", IDS, torch.full((1000, 4), 1.0))
    client.save("monday")
    client.push("t", IDS, torch.full((1000, 4), 2.0))
    part = max(
        (pair[1].data / "monday").glob("*.safetensors"),
        key=lambda file: file.stat().st_size,
    )
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=part.name):
        client.load("monday")
    assert client.pull("t", IDS).unique().tolist() == [2.0]
    (pair[1].data / "tuesday").mkdir()
    (pair[1].data / "tuesday" / "file").touch()
    with pytest.raises(FileExistsError, match="tuesday"):
        client.save("tuesday", overwrite=True)
    assert not (pair[0].data / "tuesday").exists()
    assert not list(pair[0].data.glob(".prepared-*"))
    client.save("wednesday")


@pytest.mark.slow
def test_a_save_of_two_servers_is_restored_to_three_and_to_one(
    pair: list[RecStoreServer], tmp_path: Path
) -> None:
    ids = torch.randint(
        -(2**63), 2**63 - 1, (3000,), generator=torch.Generator().manual_seed(0)
    )
    grads = torch.randn(3000, 8, generator=torch.Generator().manual_seed(1))
    here, there = RecStoreClient(), RecStoreClient([server.address for server in pair])
    for client in (here, there):
        client.init_data("adam", (1000, 8), torch.float32, optimizer=Adam(lr=0.1))
        client.init_data(
            "seen",
            (1000, 8),
            torch.int8,
            options=TableOptions(admission=MinFrequency(2)),
        )
        for name in ("adam", "seen"):
            client.update(name, ids, grads)
            client.update(name, ids[:2000], grads[:2000])
    there.save("monday")
    there.update("adam", ids, grads)
    others = [RecStoreServer(tmp_path / name) for name in ("c", "d", "e")]
    try:
        for servers in ([pair[0], *others[:2]], others[2:]):
            sources = pair if len(servers) == 3 else [pair[0], *others[:2]]
            to = ",".join(server.address for server in servers)
            assert _servers("restore", sources, "monday", "--to", to)[0] == 0
            with RecStoreClient([server.address for server in servers[::-1]]) as client:
                for name in ("adam", "seen"):
                    assert torch.equal(client.pull(name, ids), here.pull(name, ids))
                    assert torch.equal(client.exists(name, ids), here.exists(name, ids))
                    assert client.stats(name).rows == here.stats(name).rows
                    client.update(name, ids, grads)
            _restart(servers)
        here.update("adam", ids, grads)
        here.update("seen", ids, grads)
        client = RecStoreClient([others[2].address])
        for name in ("adam", "seen"):
            client.update(name, ids, grads)
            assert torch.equal(client.pull(name, ids), here.pull(name, ids))
        # the first of the pair has gone over to the three
        with pytest.raises(ServerSetError):
            RecStoreClient([server.address for server in pair]).pull("adam", ids)
        assert (
            "belongs to another set"
            in _servers("restore", others[2:], "monday", "--to", others[0].address)[1]
        )
    finally:
        for server in others:
            server.kill()


def test_the_rest_of_saves_is_deleted_after_a_kill(own_server: RecStoreServer) -> None:
    """A save changes places with another of its name, which is then deleted; the next
    one was being written.
    """
    with _client([own_server]) as client:
        client.push("t", IDS, torch.full((1000, 4), 1.0))
        client.save("even")
        shutil.copytree(own_server.data / "even", own_server.data / "old")
        client.push("t", IDS, torch.full((1000, 4), 2.0))
        client.save("even", overwrite=True)
    own_server.kill()
    state = json.loads((own_server.data / "server.json").read_text())
    (own_server.data / "old").rename(
        own_server.data / f".prepared-{state['unless_prepared']['id']}"
    )
    (own_server.data / "..prepared-0a.saving-0123456789ab").mkdir()
    (own_server.data / "..prepared-0a.lock").touch()
    own_server.start()
    assert not list(own_server.data.glob("*.prepared-*"))
    with _client([own_server]) as client:
        assert client.pull("t", IDS).unique().tolist() == [2.0]


@pytest.mark.slow
def test_servers_are_killed_at_any_moment_of_saves(pair: list[RecStoreServer]) -> None:
    chosen = random.Random(0)
    value = acknowledged = 0
    for _ in range(4):
        with _client(pair, timeout_s=3.0) as client:
            (there,) = client.pull("t", IDS).unique().tolist()  # rows of one save
            # and not of an earlier one than was acknowledged
            assert acknowledged <= there <= value
            acknowledged = int(there)
            killer = threading.Timer(
                chosen.uniform(0.05, 0.6), lambda: [server.kill() for server in pair]
            )
            killer.start()
            with pytest.raises(ServiceError):  # noqa: PT012
                while True:
                    value += 1
                    client.push("t", IDS, torch.full((1000, 4), float(value)))
                    client.save(
                        "even" if value % 2 else f"save-{value % 5}", overwrite=True
                    )
                    acknowledged = value
            killer.join()
        for server in chosen.sample(pair, 2):
            server.start()
    with _client(pair) as client:
        client.save("last")
    assert not any(list(server.data.glob("*.prepared-*")) for server in pair)
    assert value > 4


@pytest.mark.slow
def test_a_checkpoint_without_a_manifest(own_server: RecStoreServer) -> None:
    """One server loads any checkpoint in its data directory, as that of a model, and
    starts from it after a kill.
    """
    with _client([own_server]) as client:
        client.push("t", IDS, torch.full((1000, 4), 3.0))
        own_server.stop()
        shutil.copytree(own_server.data / "stopped-0", own_server.data / "monday")
        own_server.start()
        client.push("t", IDS, torch.full((1000, 4), 4.0))
        client.load("monday")
        assert client.pull("t", IDS).unique().tolist() == [3.0]
    _restart([own_server])
    with _client([own_server]) as client:
        assert client.pull("t", IDS).unique().tolist() == [3.0]


@pytest.mark.slow
def test_copies_of_a_save_and_parts_of_other_servers(
    pair: list[RecStoreServer], tmp_path: Path
) -> None:
    client = _client(pair)
    client.push("t", IDS, torch.full((1000, 4), 4.0))
    client.save("monday")
    for server in pair:
        server.kill()
    servers: list[RecStoreServer] = []
    parts = sorted(
        (server.data for server in pair),
        key=lambda data: json.loads((data / "set.json").read_text())["member"],
    )
    try:
        for swapped in (False, True):
            copies = []
            # New servers get their numbers in the order of their addresses.
            for number, address in enumerate(
                sorted(f"127.0.0.1:{free_port()}" for _ in range(2))
            ):
                part = parts[1 - number if swapped else number]
                data = tmp_path / f"copy-{swapped}-{number}"
                shutil.copytree(part / "monday", data / "monday")
                if not swapped:
                    shutil.copy(part / "set.json", data)
                copies.append(RecStoreServer(data, listen=address))
            servers += copies
            status, told = _servers("restore", copies, "monday")
            if swapped:
                assert status == 2
                assert (
                    "table 't' of the save 'monday' is part 2 of 2 here, and this is"
                    " server 1 of 2" in told
                ), told
            else:
                assert status == 0, told
                with _client(copies) as client:
                    assert client.pull("t", IDS).unique().tolist() == [4.0]
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
def test_saves_on_a_schedule(tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    flags = ("--save-every", "0.2", "--keep", "2", "--servers", ",".join(addresses))
    servers = [
        RecStoreServer(tmp_path / a.rpartition(":")[2], *flags, listen=a)
        for a in addresses
    ]
    try:
        client = _client(servers)
        client.push("t", IDS, torch.full((1000, 4), 5.0))
        client.save("monday")

        def scheduled() -> list[str]:
            saves = json.loads(_servers("status", servers, "--json")[1])[
                "complete_saves"
            ]
            return [
                saved["name"]
                for saved in saves
                if saved["name"].startswith("scheduled-")
            ]

        first = []
        while not first:
            first = scheduled()
        while set(first) & set(scheduled()):
            time.sleep(0.1)
        _restart(servers)
        with _client(servers) as client:
            assert client.pull("t", IDS).unique().tolist() == [5.0]
        for server in servers:  # in the middle of saves
            assert server.stop() == ""
        for server in servers:
            kept = {
                path.name
                for path in server.data.iterdir()
                if path.name.startswith("scheduled-")
            }
            # a save may have been stopped between its commit and the deletion of
            # another
            assert 1 <= len(kept) <= 3
            assert (server.data / "monday").is_dir()
    finally:
        for server in servers:
            server.kill()


def test_flags_of_the_schedule() -> None:
    def refused(*flags: str) -> str:
        listen = ("serve", "--listen", "127.0.0.1:0", "--data", "none")
        return CliRunner().invoke(app, [*listen, *flags]).stderr

    assert "--save-every must be a positive number" in refused("--save-every", "0")
    assert "--keep must be at least 1" in refused("--save-every", "1", "--keep", "0")
    assert "--servers must be HOST:PORT" in refused(
        "--save-every", "1", "--servers", "a,b"
    )
    assert "--servers needs --save-every" in refused("--servers", "a:1")


@pytest.mark.slow
def test_a_save_that_has_lost_its_turn_begins_again(
    own_server: RecStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is stopped between the first two calls of a save, while another
    client saves.
    """
    client, other = _client([own_server]), _client([own_server])
    save = Connection.save
    saves: list[pb.SaveReply] = []

    def stopped(self: Connection, request: pb.SaveRequest, label: str) -> pb.SaveReply:
        if request.phase == pb.SaveRequest.PREPARE and not saves:
            saves.append(pb.SaveReply())
            other.save("other")
        return save(self, request, label)

    monkeypatch.setattr(Connection, "save", stopped)
    client.save("mine")
    assert [
        saved["name"]
        for saved in json.loads(_servers("status", [own_server], "--json")[1])[
            "complete_saves"
        ]
    ] == [
        "other",
        "mine",
    ]


@pytest.mark.parametrize(
    "read", ["pull", pytest.param("existing_rows", marks=pytest.mark.slow)]
)
def test_a_read_is_of_one_epoch(
    pair: list[RecStoreServer], read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client loads a save after the first server has answered, and before the
    second one is asked.
    """
    loader = _client(pair)
    for name, value in (("ones", 1.0), ("twos", 2.0)):
        loader.push("t", IDS, torch.full((1000, 4), value))
        loader.save(name)
    reader = _client(pair)
    assert reader.pull("t", IDS).unique().tolist() == [2.0]
    first_has_answered, method = threading.Event(), getattr(Connection, read)

    def slow(self: Connection, *arguments: object) -> object:
        if first_has_answered.is_set() or self.address != pair[1].address:
            answer = method(self, *arguments)
            first_has_answered.set()
            return answer
        assert first_has_answered.wait(60)
        loader.load("ones")
        return method(self, *arguments)

    monkeypatch.setattr(Connection, read, slow)
    backend = reader._open()
    rows = reader.pull("t", IDS) if read == "pull" else backend.found_rows("t", IDS)[1]
    assert rows.unique().tolist() == [1.0]


def test_writes_wait_for_one_that_is_far_behind() -> None:
    """A server keeps the answers of 1024 writes from the oldest one on that a client
    may repeat, and refuses others.
    """
    epoch, numbers = ClientEpoch(lambda table: Runs("", {})), []

    def write_many() -> None:
        for _ in range(3 * MOST_ANSWERS):
            with epoch.write() as number:
                numbers.append(number)

    with epoch.write() as oldest:
        thread = threading.Thread(target=write_many)
        thread.start()
        while len(numbers) < MOST_ANSWERS - 1:
            time.sleep(0.001)
        time.sleep(0.05)
        assert numbers == list(range(oldest + 1, oldest + MOST_ANSWERS))
    thread.join()
    assert numbers == list(range(oldest + 1, oldest + 1 + 3 * MOST_ANSWERS))
