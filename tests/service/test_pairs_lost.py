"""Pairs of which both servers are lost: stale directories, --take-over in each state,
and an oracle of updates.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.recstore_server import Proxy, ServerPair
from tests.redis_server import free_port, needs_redis
from torchrec_recstore import SGD, RecStoreClient, ServerRestartedError, ServiceError

pytestmark = [needs_redis, pytest.mark.slow]

IDS = torch.arange(30) * 5 - 11
FREE_S = 3.5
"""The time in seconds after which the lease of a killed server has ended."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[ServerPair]:
    pair = ServerPair(tmp_path)
    yield pair
    pair.close()


def _make(client: RecStoreClient) -> None:
    client.init_data("t", (100, 4), torch.float32, optimizer=SGD(lr=1.0))
    client.push("t", IDS, torch.zeros(len(IDS), 4))


def _count(client: RecStoreClient, updates: int) -> None:
    """Makes updates. Each of them subtracts 1 from all columns."""
    for _ in range(updates):
        client.update("t", IDS, torch.ones(len(IDS), 4))


def _counted(client: RecStoreClient) -> int:
    """Returns the number of updates that the rows have, which is the same for all rows."""
    rows = client.pull("t", IDS)
    assert (rows == rows[0, 0]).all()
    return -int(rows[0, 0])


def _kill(pair: ServerPair) -> None:
    """Kills both servers at once."""
    for server in pair.servers:
        if server.is_alive:
            os.kill(server.pid, signal.SIGKILL)
    for server in pair.servers:
        server.kill()


def _start(pair: ServerPair, server: int, *, take_over: bool = False) -> None:
    flags = [flag for flag in pair.servers[server]._flags if flag != "--take-over"]
    if take_over:
        flags.append("--take-over")
    pair.servers[server]._flags = tuple(flags)
    pair.servers[server].start()


def _assert_refuse(pair: ServerPair, *servers: int) -> None:
    """Checks that servers say why they do not begin, which directories they have, and
    what to do.
    """
    for server in servers:
        pair.wait_for("--take-over", server)
        reason = pair.servers[server].stderr.splitlines()[-1]
        assert str(pair.servers[server].data) in reason
    with (
        pair.client(timeout_s=1.0) as client,
        pytest.raises(Exception, match="not the primary") as refusal,
    ):
        client.pull("t", IDS)
    assert any(
        str(pair.servers[server].data) in str(refusal.value) for server in servers
    )
    assert "--take-over" in str(refusal.value)


def _primaries(pair: ServerPair) -> list[int]:
    """Returns which servers answer clients themselves."""
    answering = []
    for number, server in enumerate(pair.servers):
        if not server.is_alive:
            continue
        with RecStoreClient([server.address], timeout_s=0.5) as client:
            try:
                client.pull("t", IDS)
                answering.append(number)
            except ServiceError as error:
                refusal = str(error)
        assert number in answering or "not the primary" in refusal, refusal
    return answering


def _update_until_it_fails(client: RecStoreClient, errors: list[Exception]) -> None:
    try:
        while True:
            _count(client, 1)
    except Exception as error:
        errors.append(error)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stale", "order", "chosen"),
    [((), (1, 0), 1), ((0,), (0,), 0), ((1,), (0, 1), 0), ((0, 1), (1,), 1)],
    ids=["none", "0", "1", "both"],
)
def test_both_are_killed_and_start_on_stale_directories(
    pair: ServerPair,
    tmp_path: Path,
    stale: tuple[int, ...],
    order: tuple[int, ...],
    chosen: int,
) -> None:
    """No server begins with old rows by itself.

    By hand it begins with the last save of its directory, and no other.

    Args:
        stale: The servers whose directories are replaced by copies from before the last
            save.
        order: The servers that are started, in this order.
        chosen: The server that takes over.
    """
    draw = random.Random(str(stale))
    with pair.client(timeout_s=60.0) as client:
        _make(client)
        _count(client, 1)
        pair.primary()
        client.save("old")
        older = [tmp_path / f"older-{server}" for server in range(2)]
        for server in range(2):
            shutil.copytree(pair.servers[server].data, older[server])
        updates = draw.randrange(1, 4)
        _count(client, updates)
        client.save("new")
        # Both are killed in the middle of an update.
        errors: list[Exception] = []
        updating = threading.Thread(
            target=_update_until_it_fails, args=(client, errors)
        )
        updating.start()
        time.sleep(draw.random() * 0.2)
        _kill(pair)
        for server in stale:
            shutil.rmtree(pair.servers[server].data)
            older[server].rename(pair.servers[server].data)
        for server in order:
            _start(pair, server)
        _assert_refuse(pair, *order)
        assert not _primaries(pair)
        pair.servers[chosen].kill()
        _start(pair, chosen, take_over=True)
        pair.wait_for("is the primary", chosen)
        save = "old" if chosen in stale else "new"
        assert f"begins with its last save '{save}'" in pair.servers[chosen].stderr
        total = 1 if chosen in stale else 1 + updates
        # A client with lost updates is told so.
        updating.join()
        assert isinstance(errors[0], ServerRestartedError), errors
    if len(order) == 1:
        _start(pair, 1 - chosen)
    assert pair.primary() == chosen
    with pair.client(timeout_s=20.0) as client:
        assert _counted(client) == total
        _count(client, 1)
        # The client has begun an epoch, for which the backup has copied the rows.
        assert pair.primary() == chosen
        pair.servers[chosen].kill()
        # The other one has the same rows, and not those of its directory.
        assert _counted(client) == total + 1
        _start(pair, chosen)
        pair.primary()


def test_the_older_directory_of_the_last_server_is_refused(
    pair: ServerPair, tmp_path: Path
) -> None:
    """A server that was stopped goes on with its newest rows only, in whatever order
    the servers start.
    """
    with pair.client(timeout_s=30.0) as client:
        _make(client)
        last = pair.primary()
        _count(client, 2)
        pair.servers[1 - last].stop()
        pair.servers[last].stop()
        older = tmp_path / "older"
        shutil.copytree(pair.servers[last].data, older)
        pair.servers[last].start()
        _count(client, 3)
        pair.servers[last].stop()
        newer = tmp_path / "newer"
        pair.servers[last].data.rename(newer)
        older.rename(pair.servers[last].data)
        _start(pair, 1 - last)
        _start(pair, last)
        _assert_refuse(pair, 0, 1)
        pair.servers[last].kill()
        shutil.rmtree(pair.servers[last].data)
        newer.rename(pair.servers[last].data)
        _start(pair, last)
        assert pair.primary() == last
        assert _counted(client) == 5


@pytest.mark.timeout(120)
def test_taking_over_while_a_server_with_all_rows_lives(pair: ServerPair) -> None:
    """A service manager that gives --take-over at each start loses no update: a living
    backup comes first.
    """
    with pair.client(timeout_s=30.0) as client:
        _make(client)
        pair.primary()
        client.save("first")
        total = 0
        for kill in range(2):
            first = pair.primary()
            _count(client, 2)
            total += 2
            pair.servers[first].kill()
            if kill % 2:
                time.sleep(FREE_S - 0.6)
            _start(pair, first, take_over=True)
            assert _counted(client) == total
            assert pair.primary() == 1 - first
            assert _primaries(pair) == [1 - first]


@pytest.mark.timeout(120)
def test_taking_over_counts_once(pair: ServerPair) -> None:
    """The flag does not let a server begin again with rows that another primary has
    changed since.
    """
    with pair.client(timeout_s=30.0) as client:
        _make(client)
        first = pair.primary()
        client.save("first")
        _kill(pair)
    _start(pair, first, take_over=True)
    _start(pair, 1 - first)
    with pair.client(timeout_s=30.0) as client:
        _count(client, 2)  # begins an epoch, for which the backup copies the rows again
        assert pair.primary() == first
        pair.servers[first].pause()
        _count(client, 3)
        pair.servers[1 - first].kill()
        os.kill(pair.servers[first].pid, signal.SIGCONT)
        time.sleep(1.5 * FREE_S)
        _assert_refuse(pair, first)
        assert not _primaries(pair)


@pytest.mark.timeout(120)
def test_taking_over_does_not_count_with_rows_of_a_primary_that_was_joined(
    pair: ServerPair, request: pytest.FixtureRequest
) -> None:
    """The primary is killed when its rows were copied, but before it has a backup."""
    first = pair.primary()
    second = 1 - first
    pair.servers[second].kill()
    rows_port = str(free_port())
    mapping = Proxy(f"127.0.0.1:{rows_port}")
    request.addfinalizer(mapping.close)
    mapping.held.set()  # the first call of the primary gets no answer
    outside = mapping.address.rpartition(":")[2]
    with pair.client(timeout_s=30.0) as client:
        _make(client)
        _count(client, 1)
        pair.servers[second]._flags += (
            "--rows-port",
            rows_port,
            "--advertise-rows",
            outside,
        )
        _start(pair, second, take_over=True)
        end = time.monotonic() + 30
        while not mapping._open:  # then the server has copied the rows
            assert time.monotonic() < end, pair.servers[second].stderr
            time.sleep(0.02)
        # on the primary only, which does not wait for a server that joins
        _count(client, 2)
        pair.servers[first].kill()
        time.sleep(1.5 * FREE_S)
        assert not _primaries(pair)
        _assert_refuse(pair, second)
        assert "which counts once" in pair.servers[second].stderr
        pair.servers[second].kill()
        _start(pair, second, take_over=True)
        pair.wait_for("is the primary", second)
        with pytest.raises(ServerRestartedError):
            client.pull("t", IDS)


@pytest.mark.timeout(120)
def test_both_are_killed_and_redis_has_forgotten_everything(pair: ServerPair) -> None:
    with pair.client() as client:
        _make(client)
        pair.primary()
        _count(client, 1)
        client.save("first")
        _count(client, 1)
    _kill(pair)
    pair.lease.kill()
    pair.lease.start()
    for server in range(2):
        _start(pair, server)
    _assert_refuse(pair, 0, 1)
    assert not _primaries(pair)
    pair.servers[1].kill()
    _start(pair, 1, take_over=True)
    assert pair.primary() == 1
    with pair.client() as client:
        assert _counted(client) == 1


@pytest.mark.timeout(120)
def test_taking_over_on_both_at_once(pair: ServerPair) -> None:
    """One of both becomes the primary, and the other one copies its rows."""
    with pair.client() as client:
        _make(client)
        pair.primary()
        _count(client, 1)
        client.save("first")
        _count(client, 1)
    for _ in range(2):
        _kill(pair)
        starts = [
            threading.Thread(
                target=_start, args=(pair, server), kwargs={"take_over": True}
            )
            for server in range(2)
        ]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
        first = pair.primary()
        assert _primaries(pair) == [first]
        with pair.client(timeout_s=20.0) as client:
            assert _counted(client) == 1
            _count(client, 3)
            assert pair.primary() == first
            pair.servers[first].kill()
            assert _counted(client) == 4


@pytest.mark.timeout(120)
def test_a_server_that_comes_back_after_a_taking_over(pair: ServerPair) -> None:
    """A server with newer rows, dead or only hung, follows the one that has taken over,
    and never answers clients.
    """
    with pair.client(timeout_s=20.0) as client:
        _make(client)
        first = pair.primary()
        _count(client, 1)
        client.save("first")
        _count(client, 1)
        pair.servers[1 - first].kill()
        _count(client, 2)  # on the primary only
        pair.servers[first].pause()
        _start(pair, 1 - first, take_over=True)
        pair.wait_for("is the primary", 1 - first)
        with pytest.raises(ServerRestartedError):
            client.update("t", IDS, torch.ones(len(IDS), 4))
    with pair.client(timeout_s=20.0) as client:
        assert _counted(client) == 1
        _count(client, 1)
        os.kill(pair.servers[first].pid, signal.SIGCONT)
        assert pair.primary() == 1 - first
        assert _primaries(pair) == [1 - first]
        pair.servers[first].kill()
        # given on the server that lives as a backup from now on
        _start(pair, first, take_over=True)
        assert pair.primary() == 1 - first
        pair.servers[1 - first].kill()
        assert _counted(client) == 2
