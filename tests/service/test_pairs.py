"""Tests of pairs of servers, with real servers, a real Redis, and SIGKILL."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.certificates import make_certificates, needs_openssl
from tests.recstore_server import ServerPair
from tests.redis_server import RedisServer, needs_redis
from tests.secrets import write_secret
from torchrec_recstore import (
    LFU,
    SGD,
    Adagrad,
    Expiry,
    MinFrequency,
    RecStoreClient,
    TableOptions,
)
from torchrec_recstore_service.server.lease import Lease, Record

pytestmark = needs_redis

IDS = torch.arange(40) * 7 - 3
KILLS = int(os.environ.get("RECSTORE_TEST_KILLS", "7"))
"""The number of servers that are killed.

A change of pairs is tested with 50, for which CI has no time.
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[ServerPair]:
    pair = ServerPair(tmp_path)
    yield pair
    pair.close()


def _table(client: RecStoreClient, name: str = "t", **options: object) -> None:
    client.init_data(
        name,
        (100, 4),
        torch.float32,
        optimizer=Adagrad(lr=0.1),
        options=TableOptions(seed=3, **options),  # type: ignore[arg-type]
    )


def _grads(step: int) -> Tensor:
    return torch.randn(len(IDS), 4, generator=torch.Generator().manual_seed(step))


def _expected(steps: int) -> Tensor:
    with RecStoreClient(private=True) as client:
        _table(client)
        for step in range(steps):
            client.update("t", IDS, _grads(step))
        return client.pull("t", IDS)


@pytest.mark.parametrize(
    "shared_memory", [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_the_backup_goes_on_when_the_primary_is_killed(
    pair: ServerPair, shared_memory: bool
) -> None:
    with pair.client(shared_memory=shared_memory) as client:
        _table(client)
        first = pair.primary()
        for step in range(5):
            client.update("t", IDS, _grads(step))
        pair.servers[first].kill()
        client.update("t", IDS, _grads(5))
        assert torch.equal(client.pull("t", IDS), _expected(6))
        assert client.stats("t").steps == 6
        # The one that was killed comes back as the backup, with what it has lost, and
        # goes on in its turn.
        pair.servers[first].start()
        assert pair.primary() == 1 - first
        client.update("t", IDS, _grads(6))
        pair.servers[1 - first].kill()
        client.update("t", IDS, _grads(7))
        assert torch.equal(client.pull("t", IDS), _expected(8))


@pytest.mark.slow
def test_the_state_of_rows_goes_with_them(pair: ServerPair) -> None:
    """What a table counts and remembers is the same on the backup: steps, frequencies,
    and ids that wait for a row.
    """

    def run(client: RecStoreClient, kill: bool) -> tuple[Tensor, Tensor]:
        client.init_data(
            "s", (100, 4), torch.float32, optimizer=SGD(lr=1.0), options=options
        )
        if kill:
            first = pair.primary()
        for step in range(30):
            some = torch.randint(
                60, (20,), generator=torch.Generator().manual_seed(step)
            ).unique()
            client.update("s", some, torch.ones(len(some), 4))
            if kill and step == 15:
                pair.servers[first].kill()
        return client.exists("s", torch.arange(60)), client.pull("s", torch.arange(60))

    options = TableOptions(
        seed=1,
        max_rows=25,
        eviction=LFU(),
        admission=MinFrequency(3),
        expiry=Expiry(steps=12),
    )
    with pair.client() as client, RecStoreClient(private=True) as alone:
        for one, other in zip(run(client, True), run(alone, False), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_a_seed_function_and_several_tables(pair: ServerPair) -> None:
    """Updates that Python carries out, because they have initial rows, are replicated
    too.
    """
    with pair.client() as client:
        client.init_data(
            "f",
            (40, 4),
            torch.float32,
            row_func=lambda shape, dtype: torch.full(shape, 2.0, dtype=dtype),
        )
        first = pair.primary()
        client.update("f", IDS, torch.ones(len(IDS), 4))
        client.push("f", IDS[:3], torch.zeros(3, 4))
        assert client.delete("f", IDS[3:5]) == 2
        before = client.pull("f", IDS)
        pair.servers[first].kill()
        assert torch.equal(client.pull("f", IDS), before)
        assert client.stats("f").rows == len(IDS) - 2


@pytest.mark.slow
def test_stops_hand_over_and_lose_nothing(pair: ServerPair) -> None:
    with pair.client() as client:
        _table(client)
        first = pair.primary()
        client.update("t", IDS, _grads(0))
        lease = Lease(pair.lease.url, "first", "reader")
        before, _ = lease.read()
        pair.servers[first].stop()
        after, _ = lease.read()
        lease.close()
        assert after not in ("", before), (
            "the lease was handed over, and did not have to end"
        )
        client.update("t", IDS, _grads(1))
        pair.servers[1 - first].stop()  # the last one saves its rows
        pair.servers[first].start()  # this one has old rows
        pair.wait_for("waits for one", first)
        pair.servers[1 - first].start()
        client.update("t", IDS, _grads(2))
        assert pair.primary() == 1 - first
        assert torch.equal(client.pull("t", IDS), _expected(3))


@pytest.mark.slow
def test_both_are_stopped_at_once(pair: ServerPair) -> None:
    with pair.client() as client:
        _table(client)
        pair.primary()
        client.update("t", IDS, _grads(0))
        stops = [threading.Thread(target=server.stop) for server in pair.servers]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        for server in pair.servers:
            server.start()
        client.update("t", IDS, _grads(1))
        assert torch.equal(client.pull("t", IDS), _expected(2))


@pytest.mark.slow
def test_rows_of_a_lost_pair_come_back_by_hand_only(pair: ServerPair) -> None:
    with pair.client() as client:
        _table(client)
        first = pair.primary()
        client.update("t", IDS, _grads(0))
        client.save("monday")
        client.update("t", IDS, _grads(1))
    for server in pair.servers:
        server.kill()
    pair.servers[1 - first].start()
    pair.wait_for("--take-over", 1 - first)
    pair.servers[1 - first].kill()
    pair.servers[1 - first]._flags = (*pair.servers[1 - first]._flags, "--take-over")
    pair.servers[1 - first].start()
    with pair.client() as client:  # the backup has the save, too
        assert torch.equal(client.pull("t", IDS), _expected(1))


@pytest.mark.slow
def test_saves_and_loads_reach_the_backup(pair: ServerPair) -> None:
    with pair.client() as client:
        _table(client)
        first = pair.primary()
        client.update("t", IDS, _grads(0))
        client.save("monday")
        client.update("t", IDS, _grads(1))
        client.load("monday")
        assert pair.primary() == first  # the backup has copied the rows again
        client.update("t", IDS, _grads(1))
        pair.servers[first].kill()
        assert torch.equal(client.pull("t", IDS), _expected(2))
        client.load("monday")
        assert torch.equal(client.pull("t", IDS), _expected(1))


@needs_openssl
@pytest.mark.slow
@pytest.mark.parametrize("with_clients", [False, True])
def test_a_pair_with_tls_and_a_token(tmp_path: Path, with_clients: bool) -> None:
    """The writes and the calls between the servers are encrypted, and have the token
    and the certificate of each.
    """
    folder = make_certificates(tmp_path)
    token = "0123456789abcdef"
    files = {"tls-cert": "server.pem", "tls-key": "server.key", "tls-ca": "ca.pem"}
    if with_clients:
        files["client-ca"] = "ca.pem"
    (folder / "server.key").chmod(0o600)
    flags = [
        part
        for name, file in files.items()
        for part in (f"--{name}", str(folder / file))
    ]
    flags += ["--token-file", str(write_secret(folder / "token", token))]
    pair = ServerPair(tmp_path, flags=tuple(flags))
    own = (
        {"tls_cert": folder / "client.pem", "tls_key": folder / "client.key"}
        if with_clients
        else {}
    )
    try:
        with pair.client(
            token=token, tls_ca=folder / "ca.pem", shared_memory=False, **own
        ) as client:
            _table(client)
            first = pair.primary()
            client.update("t", IDS, _grads(0))
            client.save("monday")
            pair.servers[first].kill()
            client.update("t", IDS, _grads(1))
            pair.servers[first].start()
            assert pair.primary() == 1 - first
            pair.servers[1 - first].kill()
            assert torch.equal(client.pull("t", IDS), _expected(2))
    finally:
        pair.close()


@pytest.mark.slow
def test_sets_of_pairs(tmp_path: Path) -> None:
    first = ServerPair(tmp_path, "first")
    second = ServerPair(tmp_path, "second", first.lease)
    try:
        with RecStoreClient([first.address, second.address]) as client:
            _table(client)
            of_first, of_second = first.primary(), second.primary()
            client.update("t", IDS, _grads(0))
            first.servers[of_first].kill()
            client.update("t", IDS, _grads(1))
            second.servers[of_second].kill()
            client.update("t", IDS, _grads(2))
            assert torch.equal(client.pull("t", IDS), _expected(3))
    finally:
        second.close()
        first.close()


@pytest.mark.slow
def test_a_primary_without_its_lease_does_not_answer(pair: ServerPair) -> None:
    with pair.client() as client, pair.client(timeout_s=2.0) as short:
        _table(client)
        first = pair.primary()
        client.update("t", IDS, _grads(0))
        assert short.stats("t").steps == 1
        pair.lease.kill()
        time.sleep(3.0)
        with pytest.raises(Exception, match="not the primary"):
            short.pull("t", IDS)
        pair.lease.start()  # it has lost the lease and the record
        client.update("t", IDS, _grads(1))
        assert torch.equal(client.pull("t", IDS), _expected(2))
        assert pair.servers[first].is_alive


@pytest.mark.slow
def test_a_primary_that_hangs_is_left(pair: ServerPair) -> None:
    with pair.client() as client:
        _table(client)
        first = pair.primary()
        client.update("t", IDS, _grads(0))
        pair.servers[first].pause()
        client.update("t", IDS, _grads(1))
        os.kill(pair.servers[first].pid, signal.SIGCONT)
        # It answers a moment before it says so.
        pair.wait_for("this server is the primary", 1 - first)
        assert pair.primary() == 1 - first
        client.update("t", IDS, _grads(2))
        assert torch.equal(client.pull("t", IDS), _expected(3))


def test_a_backup_without_a_decision_is_not_left_out_in_silence(tmp_path: Path) -> None:
    """The record lists who has all rows, and one that is not in it never takes the
    lease.
    """
    server = RedisServer(tmp_path / "redis")
    one, other = (Lease(server.url, "p", name) for name in ("one", "other"))
    alone, both = Record("a:1", ("one",)), Record("a:1", ("one", "other"))
    try:
        assert one.take(None, alone)
        assert not other.take(alone, Record("b:1", ("other",)))  # the lease is held
        assert one.take(alone, both)
        assert not one.take(alone, alone)  # the record is another one
        assert other.take(both, Record("b:1", ("other",)), holder="one")
        assert not one.take(both, both)
        assert not one.take(both, alone, renews=True)
        assert other.read() == ("other", Record("b:1", ("other",)))
        one.release()
        assert other.read()[0] == "other"
        other.release()
        assert other.read() == ("", Record("b:1", ("other",)))
    finally:
        for lease in (one, other):
            lease.close()
        server.kill()


def _all_have_gone_on(done: list[int], before: list[int]) -> bool:
    """Whether each client has ended an update that it has begun since ``before``."""
    return all(now >= then + 2 for now, then in zip(done, before, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_kills_lose_nothing(pair: ServerPair) -> None:
    """Three clients train while servers are killed at random moments.

    Each acknowledged update is there, once.
    """
    draw = random.Random(11)
    done = [0, 0, 0]
    failures: list[BaseException] = []
    ended = threading.Event()

    def train(which: int) -> None:
        try:
            with pair.client(timeout_s=60.0, shared_memory=which == 0) as client:
                ids = torch.arange(20) + 1000 * which
                while not ended.is_set():
                    client.update("k", ids, torch.ones(20, 4))
                    done[which] += 1
        except BaseException as error:
            failures.append(error)

    with pair.client(timeout_s=60.0) as client:
        client.init_data("k", (100, 4), torch.float32, optimizer=SGD(lr=1.0))
        client.push(
            "k",
            torch.cat([torch.arange(20) + 1000 * i for i in range(3)]),
            torch.zeros(60, 4),
        )
        threads = [threading.Thread(target=train, args=(which,)) for which in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(KILLS):
            first = pair.primary()
            time.sleep(draw.random() * 0.3)
            victim = first if draw.random() < 0.8 else 1 - first
            pair.servers[victim].kill()
            before = list(done)
            again_s = 4 * draw.random()
            # The other one takes over meanwhile, or the victim comes back before that.
            while again_s > 2 and not failures and not _all_have_gone_on(done, before):
                time.sleep(0.005)
            time.sleep(max(0, again_s - 1))
            pair.servers[victim].start()
            assert not failures, failures
        pair.primary()
        ended.set()
        for thread in threads:
            thread.join()
        assert not failures, failures
        for which in range(3):
            rows = client.pull("k", torch.arange(20) + 1000 * which)
            assert torch.equal(rows, torch.full((20, 4), -float(done[which]))), (
                which,
                done,
                rows[0],
            )
        assert min(done) > KILLS
