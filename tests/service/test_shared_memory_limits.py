"""Tests of what clients by shared memory can take from a server: access, memory, and
requests of attackers.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.processes import ForkedCommand
from tests.recstore_server import RecStoreServer
from tests.redis_server import free_port
from tests.secrets import write_secret
from tests.service.raw_connection import KEPT, OWN, RawConnection
from torchrec_recstore.optim import Adagrad
from torchrec_recstore_service import RecStoreClient, ServiceError
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.segment import SEGMENT_BYTES

IDS = torch.arange(-200, 200)
REQUESTS = 5000
"""The number of requests of each attacker."""
OLD, NEW = "correct-horse-battery", "another-staple-of-16"


def _numbers(metrics: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://{metrics}/metrics").read().decode()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[0] != "#"
    }


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def _client(address: str, **options: object) -> Iterator[RecStoreClient]:
    with RecStoreClient([address], **options) as client:  # type: ignore[arg-type]
        for name in (KEPT, OWN):
            client.init_data(name, (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
        yield client


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Returns a stack of contexts that end after the test."""
    with ExitStack() as stack:
        yield stack


def test_a_connection_ends_with_its_token(tmp_path: Path, stack: ExitStack) -> None:
    file, metrics = write_secret(tmp_path / "token", OLD), f"127.0.0.1:{free_port()}"
    server = RecStoreServer(
        tmp_path / "data", "--token-file", str(file), "--metrics", metrics
    )
    old = stack.enter_context(_client(server.address, token=OLD))
    other = RawConnection(server.address, token=OLD)
    ask = pb.SegmentRequest(
        pull=pb.PullHeader(table=KEPT, epoch=other.epoch)
    ).SerializeToString()
    old.push(KEPT, IDS, torch.ones(400, 8))
    reply = other.send(ask)
    assert reply is not None
    assert reply.code == 0
    assert _numbers(metrics)["recstore_shared_memory_connections"] == 2
    with pytest.raises(ServiceError, match="token is missing or wrong"):
        stack.enter_context(_client(server.address, token=NEW))
    write_secret(file, NEW)
    # unauthenticated
    _until(lambda: (reply := other.send(ask)) is None or reply.code == 16)
    assert other.receive() is None  # the server has closed the connection
    for call in (
        lambda: old.update(KEPT, IDS, torch.ones(400, 8)),
        lambda: old.pull(KEPT, IDS),
    ):
        with pytest.raises(
            ServiceError,
            match=r"table 'kept' on server .* the token is missing or wrong",
        ):
            call()
    new = stack.enter_context(_client(server.address, token=NEW))
    assert torch.equal(new.pull(KEPT, IDS), torch.ones(400, 8))
    assert _numbers(metrics)["recstore_shared_memory_connections"] == 1
    with suppress(ConnectionError):  # a secret that the old token has given
        assert not RawConnection(server.address, secret=other.secret, token=NEW).files
    server.kill()


def test_memory_is_bounded_and_counted(tmp_path: Path, stack: ExitStack) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    server = RecStoreServer(
        tmp_path / "data", "--metrics", metrics, "--max-request-memory", "0.5"
    )
    client = stack.enter_context(_client(server.address))
    client.update(OWN, IDS, torch.ones(400, 8))
    client.update(OWN, IDS, torch.ones(400, 8))
    client.pull(OWN, IDS)
    counts = {
        'recstore_calls_total{method="Pull",outcome="ok"}': 1,
        'recstore_calls_total{method="Write",outcome="ok"}': 2,
        'recstore_call_seconds_count{method="Pull"}': 1,
        'recstore_ids_total{operation="pull",table="own"}': 400,
        'recstore_ids_total{operation="update",table="own"}': 800,
        "recstore_shared_memory_connections": 1,
    }
    # a call is counted after its reply was sent
    _until(lambda: counts.items() <= _numbers(metrics).items())
    assert 0 < _numbers(metrics)["recstore_shared_memory_bytes"] < 1 << 20
    raws = []
    for _ in range(6):  # 0.5 GiB are four segments, and the client has one
        with suppress(ConnectionError):
            raws.append(RawConnection(server.address))
    raws = [raw for raw in raws if raw.files]
    assert len(raws) == 3
    raws[0].memory.fill_(1)
    assert (
        SEGMENT_BYTES
        <= _numbers(metrics)["recstore_shared_memory_bytes"]
        < 2 * SEGMENT_BYTES
    )
    # Rows that would not fit into the segment are not read.
    n = SEGMENT_BYTES // 8
    for want in (pb.PullHeader.ROWS, pb.PullHeader.FOUND_ROWS):
        header = pb.PullHeader(table=OWN, epoch=raws[0].epoch, want=want)
        reply = raws[0].send(
            pb.SegmentRequest(pull=header, ids=8 * n).SerializeToString()
        )
        assert reply is not None
        assert "do not fit" in reply.details
    nothing = {"recstore_request_bytes": 0, "recstore_shared_memory_calls_running": 0}
    _until(lambda: nothing.items() <= _numbers(metrics).items())
    for raw in raws:
        raw.socket.close()
    _until(lambda: _numbers(metrics)["recstore_shared_memory_connections"] == 1)
    assert _numbers(metrics)["recstore_shared_memory_bytes"] < 1 << 20
    server.kill()


def _held(server: RecStoreServer) -> int:
    maps = Path(f"/proc/{server.pid}/maps").read_text().count("memfd:recstore")
    return maps + len(os.listdir(f"/proc/{server.pid}/fd"))


@pytest.mark.slow
def test_attackers_change_no_row(own_server: RecStoreServer, stack: ExitStack) -> None:
    """Two processes send random requests.

    They change the arrays of each request while the server reads them.
    """
    client = stack.enter_context(_client(own_server.address))
    client.push(KEPT, IDS, torch.randn(400, 8))
    client.update(KEPT, IDS, torch.randn(400, 8))
    rows, steps = client.pull(KEPT, IDS), client.stats(KEPT).steps
    before = _held(own_server)
    commands = [
        ForkedCommand(
            [
                "-m",
                "tests.service.raw_connection",
                own_server.address,
                str(seed),
                str(REQUESTS),
            ]
        )
        for seed in range(2)
    ]
    answered = 0
    while any(command.process.is_alive() for command in commands):
        assert torch.equal(client.pull(KEPT, IDS), rows)
        answered += 1
        time.sleep(0.01)
    assert [command.wait(timeout_s=10) for command in commands] == [0, 0], [
        command.stderr for command in commands
    ]
    assert answered
    _until(lambda: _held(own_server) <= before)
    assert client.stats(KEPT).steps == steps
    assert client.stats(KEPT).rows == 400
    there = client._tables.ids(OWN)  # type: ignore[attr-defined]
    assert 0 < len(there.unique()) == len(there) == client.stats(OWN).rows
    assert client.delete(OWN, there) == len(there)
    assert client.stats(OWN).rows == 0
    assert "Traceback" not in own_server.stderr
