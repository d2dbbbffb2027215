"""Servers that start from an older state than their clients have seen: from copies of a
save, or from a snapshot.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.recstore_server import RecStoreServer
from torchrec_recstore.cli import app
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore_service import (
    RecStoreClient,
    ServerRestartedError,
    ServerSetError,
)
from torchrec_recstore_service.client.connection import Connection
from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.data_directory import DataDirectory, Membership
from torchrec_recstore_service.server.pair import Pair
from torchrec_recstore_service.server.save_names import SaveName
from torchrec_recstore_service.server.set_calls import SetCalls
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.agreement import to_resume

IDS = torch.arange(1000)
ZERO = TableOptions(initializer=ConstantInit(0.0))


@pytest.fixture
def servers(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[RecStoreServer]]:
    servers = [
        RecStoreServer(tmp_path / name)
        for name in "abc"[: getattr(request, "param", 2)]
    ]
    yield servers
    for server in servers:
        server.kill()


def _client(servers: list[RecStoreServer]) -> RecStoreClient:
    client = RecStoreClient([server.address for server in servers], timeout_s=10.0)
    client.init_data("t", (1000, 4), torch.float32, optimizer=SGD(lr=1.0), options=ZERO)
    return client


def _train(client: RecStoreClient, steps: int) -> None:
    for _ in range(steps):
        client.update("t", IDS, -torch.ones(1000, 4))


def _values(client: RecStoreClient) -> list[float]:
    values: list[float] = client.pull("t", IDS).unique().tolist()
    return values


def _command(
    command: str, servers: list[RecStoreServer], *flags: str
) -> tuple[int, str]:
    done = CliRunner().invoke(
        app,
        ["servers", command, *flags, ",".join(server.address for server in servers)],
    )
    return done.exit_code, (done.stdout + done.stderr).strip()


def _copy(server: RecStoreServer, to: Path) -> None:
    shutil.copytree(server.data, to, ignore=shutil.ignore_patterns("lock"))


def _roll_back(server: RecStoreServer, snapshot: Path) -> None:
    """Starts a server on a snapshot of its volume."""
    shutil.rmtree(server.data)
    shutil.copytree(snapshot, server.data)
    server.start()


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2], indirect=True)
def test_an_epoch_of_a_restored_copy_is_another_one(
    servers: list[RecStoreServer], tmp_path: Path
) -> None:
    with _client(servers) as client:
        client.save("monday")
        for server in servers:  # the backup of docs/service.md
            copy = tmp_path / f"copy-{server.data.name}"
            shutil.copytree(server.data / "monday", copy / "monday")
            shutil.copy(server.data / "set.json", copy)
    assert "epoch 2 with the save 'monday'" in _command("restore", servers, "monday")[1]
    client, reader = _client(servers), _client(servers)
    _train(client, 5)
    assert _values(client) == _values(reader) == [5.0]
    for server in servers:
        server.kill()
        _roll_back(server, tmp_path / f"copy-{server.data.name}")
    assert "epoch 2 with the save 'monday'" in _command("restore", servers, "monday")[1]
    for call in (
        _values,
        lambda client: _train(client, 1),
        lambda client: client.save("tuesday"),
    ):
        with pytest.raises(
            ServerRestartedError,
            match="this client's writes since its last save are lost",
        ):
            call(client)
    # it has written nothing, and continues in the new epoch
    assert _values(reader) == [0.0]
    client.load("monday")
    _train(client, 1)
    assert _values(client) == _values(reader) == [1.0]


@pytest.mark.parametrize(
    "servers", [2, pytest.param(3, marks=pytest.mark.slow)], indirect=True
)
def test_a_server_that_was_rolled_back_is_refused(
    servers: list[RecStoreServer], tmp_path: Path
) -> None:
    client = _client(servers)
    client.save("monday")
    _train(client, 3)
    reader = _client(servers)
    rolled_back = servers[1]
    rolled_back.stop()
    _copy(rolled_back, tmp_path / "snapshot")
    rolled_back.start()
    _train(client, 5)
    assert _values(client) == [8.0]
    rolled_back.stop()
    _roll_back(rolled_back, tmp_path / "snapshot")
    new = RecStoreClient([server.address for server in servers], timeout_s=10.0)
    calls: tuple[Callable[[RecStoreClient], object], ...] = (
        _values,
        lambda client: _train(client, 1),
        lambda client: client.save("mixture"),
        lambda client: client.stats("t"),
    )
    for _ in range(2):
        for each in (client, reader, new):
            for call in calls:
                with pytest.raises(
                    ServerSetError,
                    match=rf"{rolled_back.address} .*rolled back.* restore monday",
                ):
                    call(each)
    status, told = _command("status", servers, "--json")
    told = json.loads(told)
    assert (status, [saved["name"] for saved in told["complete_saves"]]) == (
        1,
        ["monday"],
    )
    assert [state["in_epoch"] for state in told["servers"]] == [
        state != rolled_back for state in servers
    ]
    assert "rolled back" in told["summary"]
    rolled_back.stop()  # a further start proves nothing
    rolled_back.start()
    with pytest.raises(ServerSetError, match="rolled back"):
        _client(servers)
    assert _command("restore", servers, "monday")[0] == 0
    assert _values(new) == [0.0]
    with pytest.raises(ServerRestartedError):
        _values(client)
    client.load("monday")
    _train(client, 1)
    assert _values(new) == [1.0]


@pytest.mark.parametrize(
    ("servers", "first"),
    [(1, "new"), pytest.param(2, "old", marks=pytest.mark.slow)],
    indirect=["servers"],
)
def test_a_client_notices_that_all_servers_were_rolled_back(
    servers: list[RecStoreServer], first: str, tmp_path: Path
) -> None:
    """The servers alone cannot notice it."""
    client = _client(servers)
    client.save("monday")
    _train(client, 3)
    reader = _client(servers)
    for server in servers:
        server.stop()
        _copy(server, tmp_path / f"snapshot-{server.data.name}")
        server.start()
    _train(client, 5)
    assert _values(client) == _values(reader) == [8.0]
    for server in servers:
        server.stop()
        _roll_back(server, tmp_path / f"snapshot-{server.data.name}")
    if first == "new":
        assert _values(_client(servers)) == [3.0]
    for each in (client, reader):
        for call in (
            _values,
            lambda each: _train(each, 1),
            lambda each: each.save("tuesday"),
        ):
            with pytest.raises(ServerRestartedError, match=r"rolled back.* new client"):
                call(each)
    client.load("monday")
    _train(client, 1)
    assert _values(client) == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("servers", [3], indirect=True)
def test_clients_go_on_while_servers_are_stopped_and_started(
    servers: list[RecStoreServer],
) -> None:
    """One server, several at once, and all of them, while several clients meet them at
    the same time.
    """
    clients = [_client(servers) for _ in range(3)]
    end, steps, errors = threading.Event(), [0, 0, 0], []

    def train(place: int) -> None:
        try:
            while not end.is_set():
                _train(clients[place], 1)
                steps[place] += 1
                if place == 0:
                    try:
                        clients[place].save("newest", overwrite=True)
                    except ValueError as error:  # the first server was stopped between the phases of the save
                        assert "does not count" in str(error)  # noqa: PT017
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for some in (servers[:1], servers[1:], servers):
        for server in some:
            server.stop()
        for server in some:
            server.start()
        before = min(steps)
        while min(steps) < before + 2 and not errors:
            time.sleep(0.01)
    end.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert _values(clients[1]) == _values(_client(servers)) == [float(sum(steps))]
    states = json.loads(_command("status", servers, "--json")[1])
    assert states["agree"]
    assert len({state["token"] for state in states["servers"]}) == 1


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("PREPARE", marks=pytest.mark.slow),
        pytest.param("NOTE", marks=pytest.mark.slow),
        "COMMIT",
    ],
)
def test_a_server_is_killed_between_the_phases_of_its_resuming(
    servers: list[RecStoreServer], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _client(servers)
    client.save("monday")
    _train(client, 2)
    waits = servers[1]
    waits.stop()
    waits.start()
    status, told = _command("status", servers)
    assert (
        status,
        "and the next client lets those go on that were stopped" in told,
    ) == (0, True)
    assert "was stopped in epoch 1 and started again" in told
    resume, killed = Connection.resume, []

    def killing(self: Connection, request: pb.ResumeRequest) -> pb.ResumeReply:
        reply = resume(self, request)
        if pb.ResumeRequest.Phase.Name(request.phase) == phase and not killed:
            killed.append(phase)
            waits.kill()
            waits.start()
        return reply

    monkeypatch.setattr(Connection, "resume", killing)
    if phase == "COMMIT":  # it was killed in its next run
        with pytest.raises(
            ServerRestartedError,
            match="this client's writes since its last save are lost",
        ):
            _train(client, 1)
        with pytest.raises(
            ServerSetError, match=f"{waits.address} was killed in epoch 1"
        ):
            _client(servers)
    else:
        _train(client, 1)
        assert _values(client) == _values(_client(servers)) == [3.0]
    assert killed == [phase]


def test_a_server_that_is_killed_while_its_run_begins_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two files that it writes."""
    tables, directory = HostedTables(), DataDirectory(tmp_path / "data")
    runs = ("first", "second")
    directory.set_membership(Membership("set", 1, 2, (0, 1), 3, "token", None, runs))
    tables.save(directory.checkpoint(SaveName("stopped-0")))
    directory.set_last(
        SaveName("stopped-0"),
        {"checkpoint": "stopped-0", "epoch": "set/3/token", "applied": {}},
    )

    def started() -> SetCalls:
        calls = SetCalls(tables, directory, AppliedRequests(), Pair())
        calls.begin()
        return calls

    def resume(calls: SetCalls, phase: str, before: str, run: str = "") -> str:
        number = pb.ResumeRequest.Phase.Value(phase)
        request = pb.ResumeRequest(
            phase=number, epoch="set/3/token", member=1, before=before, run=run
        )
        return calls.resume(request).run

    calls = started()
    third = resume(calls, "PREPARE", "second")
    assert resume(started(), "PREPARE", "second") == third
    with monkeypatch.context() as patch:
        patch.setattr(DataDirectory, "set_last", _raise)
        with pytest.raises(OSError, match="killed"):
            resume(calls, "COMMIT", "second", third)
    directory.close()
    directory = DataDirectory(tmp_path / "data")
    calls = started()
    state = calls.describe()
    assert (state.waits, state.live, list(state.runs), list(state.earlier)) == (
        *(True, False, ["first", third]),
        ["second"],
    )
    fourth = resume(calls, "PREPARE", third)
    with pytest.raises(ServerRestartedError, match="another run"):
        resume(calls, "COMMIT", third, "other")
    resume(calls, "COMMIT", third, fourth)
    resume(calls, "COMMIT", third, fourth)  # the answer was lost
    calls.check(f"set/3/token/{fourth}")
    assert directory.stopped is None
    directory.close()
    tables.close()


def test_servers_of_different_releases_have_two_names_of_a_first_run(
    tmp_path: Path,
) -> None:
    """Those of earlier releases name it by the token, and those of this one by the
    server, too.
    """
    tables, directory = HostedTables(), DataDirectory(tmp_path / "data")

    def noted(known: str, before: str) -> str:
        """Lets a server note the next run of the other one.

        Returns the run that it knows then.
        """
        runs = ("own", known)
        directory.set_membership(
            Membership("set", 0, 2, (0, 1), 3, "token", None, runs)
        )
        calls = SetCalls(tables, directory, AppliedRequests(), Pair())
        calls.gate.run = "set/3/token/own"
        phase = pb.ResumeRequest.NOTE
        calls.resume(
            pb.ResumeRequest(
                phase=phase, epoch="set/3/token", member=1, before=before, run="next"
            )
        )
        assert directory.membership is not None
        return directory.membership.runs[1]

    for known in ("token", "token-1"):
        for before in ("token", "token-1"):
            assert noted(known, before) == "next"
    for before in ("token-0", "other"):
        with pytest.raises(ServerRestartedError, match="another run"):
            noted("token-1", before)
    directory.close()
    tables.close()

    def agree(known: str, own: str) -> None:
        about = {
            "set": "set",
            "members": 2,
            "epoch": 3,
            "token": "token",
            "slots": [0, 1],
        }
        live = pb.DescribeReply(member=0, live=True, runs=["token-0", known], **about)
        waits = pb.DescribeReply(member=1, waits=True, runs=["token-0", own], **about)
        assert to_resume(["a:1", "b:1"], [live, waits]).waiting == (1,)

    for known in ("token", "token-1"):
        for own in ("token", "token-1"):
            agree(known, own)
    for own in ("token-0", "other", ""):
        with pytest.raises(
            ServerSetError, match="has older rows of epoch 3 than before"
        ):
            agree("token-1", own)


def _raise(*_: object) -> None:
    raise OSError("killed")


def test_clients_that_begin_at_the_same_time_begin_one_epoch(
    servers: list[RecStoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client begins an epoch on the first server, and dies.

    Two others follow, and a fourth one meets their epoch.
    """
    load, dies = Connection.load, threading.Event()
    dies.set()

    def dying(self: Connection, request: pb.LoadRequest) -> None:
        load(self, request)
        if request.phase == pb.LoadRequest.COMMIT and dies.is_set():
            raise RuntimeError("the client dies")

    monkeypatch.setattr(Connection, "load", dying)
    with pytest.raises(RuntimeError, match="the client dies"):
        _client(servers)
    dies.clear()
    status = json.loads(_command("status", servers, "--json")[1])
    begun = [state["token"] for state in status["servers"] if state["in_epoch"]]
    assert len(begun) == 1
    clients: list[RecStoreClient] = []
    threads = [
        threading.Thread(target=lambda: clients.append(_client(servers)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        _train(client, 1)
    assert _values(_client(servers)) == [2.0]
    status = json.loads(_command("status", servers, "--json")[1])
    assert [state["token"] for state in status["servers"]] == begun * 2


def test_servers_of_two_epochs_of_one_number_do_not_agree() -> None:
    states = [
        pb.DescribeReply(
            set="set",
            member=member,
            members=2,
            epoch=2,
            live=True,
            slots=[0, 1],
            token=token,
            runs=[token] * 2,
        )
        for member, token in enumerate(("one", "two"))
    ]
    with pytest.raises(
        ServerSetError, match=r"a:1 is in epoch 2 \(one\); b:1 is in epoch 2 \(two\)"
    ):
        to_resume(["a:1", "b:1"], states)
    states[1].token = "one"
    assert to_resume(["a:1", "b:1"], states).label == "set/2/one"


@pytest.mark.slow
def test_servers_of_version_1_of_the_protocol_go_on(
    servers: list[RecStoreServer],
) -> None:
    with _client(servers) as client:
        _train(client, 3)
    for number, server in enumerate(servers):
        server.stop()
        for name, change in (
            ("set.json", _member_of_version_1),
            ("server.json", _state_of_version_1),
        ):
            file = server.data / name
            file.write_text(json.dumps(change(json.loads(file.read_text()), number)))
        server.start()
    client = _client(servers)
    _train(client, 1)
    for server in servers:
        server.stop()
        server.start()
    _train(client, 1)
    assert _values(client) == [5.0]
    document = json.loads((servers[0].data / "set.json").read_text())
    servers[0].stop()
    (servers[0].data / "set.json").write_text(json.dumps({**document, "later": 1}))
    with pytest.raises(
        ValueError, match=r"set\.json cannot be used: it has the field 'later'"
    ):
        DataDirectory(servers[0].data)


def _member_of_version_1(document: dict[str, Any], number: int) -> dict[str, Any]:
    """Each load had a token, so that a server that had followed others had another one
    than they.
    """
    known = {
        field: document[field]
        for field in ("set", "member", "members", "slots", "epoch", "save")
    }
    return {**known, "token": f"load{number}"}


def _state_of_version_1(document: dict[str, Any], _: int) -> dict[str, Any]:
    label = document["stopped"]["epoch"].rpartition("/")[0]
    return {**document, "stopped": {**document["stopped"], "epoch": label}}
