"""Tests of calls by shared memory: results, processes that die, and clients that send
invalid requests.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.processes import ForkedCommand
from tests.recstore_server import RecStoreServer
from tests.service.raw_connection import RawConnection
from torchrec_recstore.optim import Adagrad
from torchrec_recstore.options import TableOptions
from torchrec_recstore_service import RecStoreClient, ServerRestartedError, ServiceError
from torchrec_recstore_service.client.shared_memory import SharedMemoryConnection
from torchrec_recstore_service.server import native_rows as served
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire import segment

IDS = torch.arange(-200, 200)
DTYPES = {"float": torch.float32, "half": torch.float16, "eight": torch.int8}


def _grads(step: int, n: int = 400) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(step))


def _client(
    *addresses: str, timeout_s: float = 20.0, shared_memory: bool = True
) -> RecStoreClient:
    client = RecStoreClient(addresses, timeout_s=timeout_s, shared_memory=shared_memory)
    client.init_data("t", (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
    return client


def _use(client: RecStoreClient) -> list[Tensor]:
    """Makes every kind of call on rows, and returns all results."""
    results = []
    for name, dtype in DTYPES.items():
        client.init_data(
            name,
            (400, 8),
            dtype,
            optimizer=Adagrad(lr=0.1),
            options=TableOptions(seed=1),
        )
        client.update(name, IDS, _grads(0))
        client.update(name, IDS.flip(0)[::2], _grads(1, 200))
        client.push(name, IDS[:3], _grads(2, 3).to(client.pull(name, IDS[:1]).dtype))
        results += [
            client.pull(name, torch.cat([IDS, IDS[:5], torch.tensor([2**62])])),
            client.pull(name, IDS[:0]),
        ]
        results += [
            client.exists(name, torch.tensor([1, 2**62, -1])),
            client.exists(name, IDS[:0]),
        ]
        results += [
            torch.tensor(client.delete(name, torch.tensor([5, 2**62, 7]))),
            client.exists(name, IDS),
        ]
    client.init_data(
        "made",
        (9, 8),
        torch.float32,
        row_func=lambda shape, dtype: torch.rand(shape, dtype=dtype),
    )
    client.update("made", IDS[:9], _grads(3, 9))
    return [*results, client.pull("made", IDS[:20])]


@pytest.mark.parametrize(
    "name", ["victim", "", "recstore-" + "0" * 31 + "g", "recstore-" + "0" * 33]
)
def test_a_client_connects_to_the_sockets_of_servers_only(name: str) -> None:
    """Otherwise a server could send a message of its choice to any program of the
    client's user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as victim:
        if name:
            victim.bind(f"\0{name}")
            victim.listen()
        with pytest.raises(OSError, match="which is no server's"):
            SharedMemoryConnection(pb.AttachReply(socket=name, secret=b"stop"))
        victim.setblocking(False)
        with pytest.raises(OSError, match=r"unavailable|Invalid"):
            victim.accept()


@pytest.mark.usefixtures("no_streams")
def test_results_are_those_of_tables_in_the_process(
    own_server: RecStoreServer, tmp_path: Path
) -> None:
    here = RecStoreClient()
    expected = _use(here)
    other = RecStoreServer(tmp_path / "other")
    with RecStoreClient([own_server.address]) as one:
        for result, wanted in zip(_use(one), expected, strict=True):
            assert torch.equal(result, wanted)
        with pytest.raises(ValueError, match="no table"):
            one.pull("unknown", IDS)
        # the connection is still in order
        assert torch.equal(one.pull("float", IDS), here.pull("float", IDS))
    with pytest.raises(ValueError, match="closed"):
        one.pull("float", IDS)
    own_server.kill()
    shutil.rmtree(own_server.data)  # the set of one server
    own_server.start()
    with RecStoreClient([own_server.address, other.address]) as two:
        for result, wanted in zip(_use(two), expected, strict=True):
            assert torch.equal(result, wanted)
    other.kill()


def test_large_calls(
    own_server: RecStoreServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids, rows = torch.arange(3000), torch.randn(3000, 8)
    with (
        _in_process(tmp_path, monkeypatch, 1 << 14) as address,
        _client(address) as client,
    ):
        client.push("t", ids, rows)  # does not fit, and goes by gRPC
        client.push("t", ids[:9], rows[:9])
        assert torch.equal(client.pull("t", ids), rows)  # several exchanges
        assert (
            client.exists("t", torch.arange(4000)).tolist()
            == [True] * 3000 + [False] * 1000
        )
        found = client._tables.found_rows("t", torch.arange(2000, 4000))  # type: ignore[attr-defined]
        assert torch.equal(found[1], rows[2000:])


def test_a_killed_client_leaves_nothing_held(server: RecStoreServer) -> None:
    client = _client(server.address)
    client.pull("t", IDS)

    def held() -> int:
        maps = Path(f"/proc/{server.pid}/maps").read_text().count("memfd:recstore")
        return maps + len(os.listdir(f"/proc/{server.pid}/fd"))

    before = held()
    code = f"""
import os, torch
from torchrec_recstore_service import RecStoreClient
client = RecStoreClient([{server.address!r}])
client.pull("t", torch.arange(9))
if os.fork() == 0:  # a forked process does not keep the connection
    print("ready", flush=True)
while True:
    client.update("t", torch.arange(100_000), torch.ones(100_000, 8))
"""
    commands = [ForkedCommand(["-c", code], daemon=False) for _ in range(2)]
    while not all("ready" in command.stdout for command in commands):
        assert all(command.process.is_alive() for command in commands), commands[
            0
        ].stderr
        time.sleep(0.01)
    assert held() > before
    for command in commands:
        command.kill()
    _until(lambda: held() <= before)
    client.pull("t", IDS)


@pytest.mark.slow
def test_a_killed_server_is_noticed_at_once(own_server: RecStoreServer) -> None:
    client = _client(own_server.address, timeout_s=60)
    client.update("t", IDS, _grads(0))
    client.save("saved")
    rows = client.pull("t", IDS)
    own_server.stop()
    own_server.start()
    assert torch.equal(client.pull("t", IDS), rows)
    client.update("t", IDS, _grads(1))
    own_server.pause()
    refused = []

    def update() -> None:
        try:
            client.update("t", IDS, _grads(2))
        except ServerRestartedError as error:
            refused.append(error)

    waiting = threading.Thread(target=update)
    waiting.start()
    time.sleep(0.2)  # the call waits for the stopped server
    own_server.kill()
    own_server.start()
    waiting.join()
    assert refused
    own_server.kill()
    short = RecStoreClient([own_server.address], timeout_s=0.5)
    with pytest.raises(ServiceError, match=r"cannot be reached for 0.5 s"):
        short.pull("t", IDS)


def test_a_stopped_server_is_an_error_in_time(own_server: RecStoreServer) -> None:
    client = _client(own_server.address, timeout_s=0.5)
    client.pull("t", IDS)
    own_server.pause()
    for call in (
        lambda: client.pull("t", IDS),
        lambda: client.update("t", IDS, _grads(0)),
    ):
        with pytest.raises(
            ServiceError, match=r"table 't' on server .* has not answered within 0.5 s"
        ):
            call()
    os.kill(own_server.pid, signal.SIGCONT)
    again = _client(own_server.address)
    again.pull("t", IDS)
    assert again.stats("t").updates in (0, 400)


def test_many_threads(server: RecStoreServer) -> None:
    client = _client(server.address)
    client.push("t", IDS, torch.zeros(400, 8))
    before = client.stats("t").steps
    wrong = []

    def use(number: int) -> None:
        own = torch.arange(10_000 * number, 10_000 * number + 500)
        for step in range(10):
            rows = torch.full((500, 8), float(1000 * number + step))
            client.push("t", own, rows)
            if not torch.equal(client.pull("t", own), rows):
                wrong.append(number)
            client.update("t", IDS, torch.zeros(400, 8))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert client.stats("t").steps == before + 120


def test_a_write_whose_reply_is_lost_is_applied_once(server: RecStoreServer) -> None:
    client = _client(server.address)
    client.delete("t", IDS)  # with the optimizer state of other tests
    client.push("t", IDS, _grads(0))
    before = client.stats("t").steps
    expected = RecStoreClient()
    expected.init_data("t", (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
    expected.push("t", IDS, _grads(0))
    expected.update("t", IDS[:1], torch.ones(1, 8))
    for attempt in range(4):
        raw = RawConnection(server.address)
        raw.memory[:8].view(torch.int64)[:] = IDS[:1]
        raw.memory[64:96].view(torch.float32)[:] = 1.0
        raw.socket.send(
            pb.SegmentRequest(write=raw.header(7), ids=8, rows=32).SerializeToString()
        )
        if attempt % 2:
            raw.receive()
        raw.socket.close()  # without the reply
    _until(lambda: client.stats("t").steps == before + 1)
    assert torch.equal(client.pull("t", IDS), expected.pull("t", IDS))


def test_bad_requests_change_nothing(server: RecStoreServer) -> None:
    client = _client(server.address)
    client.push("t", IDS, _grads(0))
    steps = client.stats("t").steps
    assert not RawConnection(server.address, b"wrong").files
    raw = RawConnection(server.address)
    assert raw.files
    with pytest.raises(PermissionError):
        os.ftruncate(raw.files[0], 0)  # would end the server by a signal
    chosen = random.Random(3)
    huge = 2**64 - 1
    read = pb.PullHeader(table="t", epoch=raw.epoch)
    requests = [
        pb.SegmentRequest(ids=8),
        pb.SegmentRequest(pull=read, ids=7),
        pb.SegmentRequest(pull=read, ids=huge),
        pb.SegmentRequest(pull=read, ids=segment.SEGMENT_BYTES),  # the rows do not fit
        pb.SegmentRequest(
            pull=pb.PullHeader(table="t", epoch=raw.epoch, want=9), ids=8
        ),
        pb.SegmentRequest(
            pull=pb.PullHeader(table="u" * 50_000, epoch=raw.epoch), ids=8
        ),
        pb.SegmentRequest(pull=pb.PullHeader(table="t", epoch="x"), ids=8),
        pb.SegmentRequest(write=raw.header(1), ids=8),
        pb.SegmentRequest(write=raw.header(2), ids=8, rows=31),
        pb.SegmentRequest(write=raw.header(3), ids=8, rows=64),
        pb.SegmentRequest(write=raw.header(4), ids=huge, rows=huge),
        pb.SegmentRequest(write=raw.header(5, ids=2), ids=8, rows=32),
        pb.SegmentRequest(write=raw.header(6, kind=77), ids=8, rows=32),
        pb.SegmentRequest(write=raw.header(7, kind=0), ids=8, rows=32),
        pb.SegmentRequest(write=raw.header(8, epoch=""), ids=8, rows=32),
        pb.SegmentRequest(
            write=raw.header(9), ids=8, rows=32, initial_ids=8, initial_rows=4
        ),
        pb.SegmentRequest(
            write=raw.header(10), ids=8, rows=32, initial_ids=segment.SEGMENT_BYTES
        ),
    ]
    for request in requests:
        reply = raw.send(request.SerializeToString())
        assert reply is not None, request
        assert reply.code, request
        assert reply.last
    for _ in range(500):
        message = chosen.randbytes(chosen.randrange(1, 200))
        if chosen.randrange(2):  # a valid request, damaged in one byte
            damaged = bytearray(
                chosen.choice(requests[2:4] + requests[7:9]).SerializeToString()
            )
            damaged[chosen.randrange(len(damaged))] = chosen.randrange(256)
            message = bytes(damaged)
        reply = raw.send(message)
        while reply is not None and not reply.last:
            reply = raw.receive()
        assert reply is not None
    reply = raw.send(bytes(1 << 17))
    assert reply is not None
    assert reply.code
    for sent in range(100):  # connections that end anywhere
        other = RawConnection(server.address)
        if sent % 2:
            other.socket.send(requests[2].SerializeToString())
        other.socket.close()
    assert torch.equal(client.pull("t", IDS), _grads(0))
    assert client.stats("t").steps == steps


def test_ids_that_change_during_a_call(server: RecStoreServer) -> None:
    client = _client(server.address)
    raw = RawConnection(server.address)
    n = 20_000
    ids = raw.memory[: 8 * n].view(torch.int64)
    ids[:] = torch.arange(n)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            ids.random_(-(2**63), 2**63 - 1)

    changing = threading.Thread(target=change)
    changing.start()
    for number in range(1, 30):
        request = pb.SegmentRequest(
            write=raw.header(number, ids=n, client="changing"), ids=8 * n, rows=32 * n
        )
        reply = raw.send(request.SerializeToString())
        assert reply is not None
        assert reply.code == 0, reply.details
    stop.set()
    changing.join()
    there = client._tables.ids("t")  # type: ignore[attr-defined]
    assert len(there.unique()) == len(there) == client.stats("t").rows
    assert bool(client.exists("t", there).all())
    assert client.delete("t", there) == len(there)
    assert client.stats("t").rows == 0


def test_more_clients_than_connections(server: RecStoreServer) -> None:
    raws = []
    while len(raws) < 66:
        try:
            raws.append(RawConnection(server.address))
        except ConnectionError:
            raws.append(None)  # type: ignore[arg-type]
    client = _client(server.address)
    client.push("t", IDS, _grads(0))  # by gRPC
    assert torch.equal(client.pull("t", IDS), _grads(0))
    for raw in raws:
        if raw is not None:
            raw.socket.close()


def _until(condition: object, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def _in_process(
    data: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> Iterator[str]:
    """Runs a server in this process, with segments of another size, and yields its
    address.
    """
    from torchrec_recstore_service.server.data_directory import DataDirectory
    from torchrec_recstore_service.server.listening import GrpcServer, ListenOptions
    from torchrec_recstore_service.server.native import CallCounts
    from torchrec_recstore_service.server.server import ParameterServer
    from torchrec_recstore_service.tables.hosted import HostedTables
    from torchrec_recstore_service.wire.recstore_pb2_grpc import (
        add_ParameterServerServicer_to_server,
    )

    monkeypatch.setattr(served, "SEGMENT_BYTES", segment_bytes)
    service = ParameterServer(
        HostedTables(), DataDirectory(data / "served"), CallCounts()
    )
    name = pb.DESCRIPTOR.services_by_name["ParameterServer"].full_name
    options = ListenOptions("127.0.0.1:0")
    server = GrpcServer(
        options,
        name,
        lambda server: add_ParameterServerServicer_to_server(service, server),
    )
    service.begin(options, server)
    server.start()
    yield server.address
    server.stop()
    service.close()
