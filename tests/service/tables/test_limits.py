"""Tests of what a server bears: clients that stop, are slow or mean harm must not delay
or harm the others.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.recstore_server import Proxy, RecStoreServer
from tests.redis_server import free_port
from torchrec_recstore.optim import Adagrad
from torchrec_recstore.options import MinFrequency, TableOptions
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.agreement import label_of, run_label, run_of
from torchrec_recstore_service.wire.protocol import VERSION, VERSION_KEY
from torchrec_recstore_service.wire.table_spec import TableSpec

IDS = torch.arange(100)
METADATA = [(VERSION_KEY, VERSION)]
SERVICE = "/torchrec_recstore.ParameterServer/"


def _client(server: RecStoreServer) -> RecStoreClient:
    client = RecStoreClient([server.address], timeout_s=20.0, shared_memory=False)
    client.init_data("t", (100, 8), torch.float32)
    return client


def _channels(
    server: RecStoreServer, number: int, stack: ExitStack
) -> list[grpc.Channel]:
    """Returns channels that share no connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return [
        stack.enter_context(grpc.insecure_channel(server.address, options))
        for _ in range(number)
    ]


def resident_mb(server: RecStoreServer) -> float:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def numbers(metrics: str) -> dict[str, float]:
    """Returns the numbers of a server's metrics."""
    text = urllib.request.urlopen(f"http://{metrics}/metrics").read().decode()
    lines = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
    )
    return {name: float(number) for name, number in lines.items()}


def waits_during(call: Callable[[], Any], wait_s: float) -> int:
    """Calls a function, and counts how often this process could wait meanwhile: less
    often on a busy machine, which ends the call later.

    Args:
        call: The function.
        wait_s: The shortest time of a wait, in seconds.
    """
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        waits = 0
        while not calling.done():
            time.sleep(wait_s)
            waits += 1
        calling.result()
    return waits


class _Stalled:
    """Requests of a client that has stopped after the first request."""

    def __init__(self, first: bytes | None, end: threading.Event) -> None:
        self._first, self._end = first, end

    def __iter__(self) -> Iterator[bytes]:
        if self._first is not None:
            yield self._first
        self._end.wait()


@pytest.mark.slow
def test_clients_that_stop_take_no_threads_from_others(
    own_server: RecStoreServer,
) -> None:
    client = _client(own_server)
    client.push("t", IDS, torch.ones(100, 8))
    epoch = _epoch(own_server)
    write = pb.WriteRequest(
        header=pb.WriteHeader(table="t", epoch=epoch, client="stopped", ids=5)
    )
    pull = pb.PullRequest(header=pb.PullHeader(table="t"), ids=bytes(8 * 60_000))
    end = threading.Event()
    with ExitStack() as stack:
        calls: list[Any] = []
        for channel in _channels(own_server, 3, stack):
            for first in (write.SerializeToString(), None):
                method = channel.stream_unary(SERVICE + "Write")
                calls += [
                    method.future(iter(_Stalled(first, end)), metadata=METADATA)
                    for _ in range(40)
                ]
            # these clients read no reply
            method = channel.stream_stream(SERVICE + "Pull")
            calls += [
                method(iter(_Stalled(pull.SerializeToString(), end)), metadata=METADATA)
                for _ in range(4)
            ]
            # this call has one request, which never comes
            method = channel.stream_unary(SERVICE + "Describe")
            calls += [
                method.future(iter(_Stalled(None, end)), metadata=METADATA)
                for _ in range(40)
            ]
            check = channel.stream_unary("/grpc.health.v1.Health/Check")
            calls += [check.future(iter(_Stalled(None, end))) for _ in range(40)]
        time.sleep(0.5)
        for _ in range(5):
            client.update("t", IDS, torch.ones(100, 8))
            client.pull("t", IDS)
            with RecStoreClient(
                [own_server.address], timeout_s=20.0, shared_memory=False
            ) as another:
                another.stats("t")
        with grpc.insecure_channel(own_server.address) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=20
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        # A process that is stopped answers nothing, not even gRPC's own messages.
        proxy = Proxy(own_server.address)
        stack.callback(proxy.close)
        channel = stack.enter_context(grpc.insecure_channel(proxy.address))
        grpc.channel_ready_future(channel).result(60)
        method = channel.stream_unary(SERVICE + "Write")
        calls += [
            method.future(
                iter(_Stalled(write.SerializeToString(), end)), metadata=METADATA
            )
            for _ in range(4)
        ]
        time.sleep(0.5)
        proxy.held.set()
        assert waits_during(own_server.stop, 0.1) < 150  # gRPC waits for 20 to 30 s
        end.set()
    own_server.start()
    assert client.stats("t").steps == 5


def _epoch(server: RecStoreServer) -> str:
    with grpc.insecure_channel(server.address) as channel:
        describe = channel.unary_unary(
            SERVICE + "Describe", response_deserializer=pb.DescribeReply.FromString
        )
        state = describe(b"", metadata=METADATA)
        return run_label(label_of(state), run_of(state))


def test_calls_without_a_readable_request_are_refused(
    own_server: RecStoreServer,
) -> None:
    requests = {
        b"\xff": "the request is not a message of the protocol",
        None: "the call has no request",
    }
    with grpc.insecure_channel(own_server.address) as channel:
        call = channel.stream_unary(SERVICE + "Stats")
        for request, message in requests.items():
            with pytest.raises(grpc.RpcError, match=message) as refused:
                call(
                    iter([] if request is None else [request]),
                    metadata=METADATA,
                    timeout=60,
                )
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
def test_messages_that_cannot_be_read_take_no_memory(
    own_server: RecStoreServer,
) -> None:
    with grpc.insecure_channel(own_server.address) as channel:
        call = channel.unary_unary(SERVICE + "Stats")

        def send(number: int) -> None:
            for _ in range(number):
                with pytest.raises(
                    grpc.RpcError, match="not a message of the protocol"
                ) as refused:
                    call(b"\xff", metadata=METADATA)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        send(200)
        before = resident_mb(own_server)
        send(2000)
        # grpcio's own handlers keep 19 KB a message
        assert resident_mb(own_server) - before < 10


def test_compressed_messages_are_refused(server: RecStoreServer) -> None:
    with grpc.insecure_channel(
        server.address, compression=grpc.Compression.Gzip
    ) as channel:
        call = channel.stream_unary(SERVICE + "Write")
        with pytest.raises(grpc.RpcError, match="gzip") as refused:
            call(iter([bytes(60_000_000)]), metadata=METADATA)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_clients_that_watch_the_health_are_few(own_server: RecStoreServer) -> None:
    serving = health_pb2.HealthCheckResponse(
        status=health_pb2.HealthCheckResponse.SERVING
    )
    request = health_pb2.HealthCheckRequest()

    def read(watch: Any) -> None:
        with suppress(grpc.RpcError):
            list(watch)

    with ExitStack() as stack:
        readers = []
        for channel in _channels(own_server, 4, stack):
            watches = [
                health_pb2_grpc.HealthStub(channel).Watch(request) for _ in range(30)
            ]
            readers += [
                threading.Thread(target=read, args=(watch,), daemon=True)
                for watch in watches
            ]
        for reader in readers:
            reader.start()
        with grpc.insecure_channel(own_server.address) as channel:
            assert (
                health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
                == serving
            )
        # all 120 with grpcio-health-checking's service
        while sum(reader.is_alive() for reader in readers) > 16:
            time.sleep(0.05)
    with grpc.insecure_channel(own_server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert next(watch) == serving
        own_server.stop()
        left = []
        with pytest.raises(grpc.RpcError):
            left.extend(watch)
        assert not left or left[0].status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.slow
def test_what_clients_without_a_token_hold_is_bounded(tmp_path: Path) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    server = RecStoreServer(tmp_path / "data", "--metrics", metrics)
    with _client(server) as client, ExitStack() as stack:
        client.push("t", IDS, torch.ones(100, 8))
        watches = []
        channels = _channels(server, 40, stack)
        for channel in channels:
            grpc.channel_ready_future(channel).result(60)
        before = resident_mb(server)
        for channel in channels:
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            watches += [watch(b"") for _ in range(125)]
        for watch in watches:
            # waits until the watch has had its turn or is refused
            watch.initial_metadata()
        client.update("t", IDS, torch.ones(100, 8))
        codes = {watch.code() for watch in watches if not watch.is_active()}
        now = numbers(metrics)
        assert now["recstore_health_watches"] <= 16
        # On a busy machine gRPC refuses some calls itself, before the server knows of
        # them, and they are not counted.
        assert codes <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert now["recstore_calls_refused"] > 500
        assert now["recstore_connections"] >= 41
        # 21 KB a watch, if each is kept until its turn
        assert resident_mb(server) - before < 40
    server.kill()


@pytest.mark.slow
def test_the_memory_of_requests_is_bounded(tmp_path: Path) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    server = RecStoreServer(
        tmp_path / "data", "--max-request-memory", "0.065", "--metrics", metrics
    )
    client = _client(server)
    epoch = _epoch(server)
    header = pb.WriteRequest(
        header=pb.WriteHeader(table="t", epoch=epoch, client="stopped", ids=5)
    )
    part = pb.WriteRequest(rows=bytes(60_000_000)).SerializeToString()
    end = threading.Event()

    def requests() -> Iterator[bytes]:
        yield header.SerializeToString()
        yield part
        end.wait()

    with grpc.insecure_channel(server.address) as channel:
        stalled = channel.stream_unary(SERVICE + "Write").future(
            requests(), metadata=METADATA
        )
        while numbers(metrics)["recstore_request_bytes"] < 60_000_000:
            time.sleep(0.05)
        values = torch.arange(4_000_000.0).view(-1, 8)
        # is refused until the server has ended the other call
        client.push("t", torch.arange(500_000), values)
        end.set()
        assert stalled.code() is grpc.StatusCode.CANCELLED
        assert numbers(metrics)["recstore_calls_ended"] == 1
        assert torch.equal(client.pull("t", torch.arange(500_000)), values)
        client.init_data("wide", (1, 64), torch.float32)
        with pytest.raises(
            ValueError, match="a request may have at most 69793218 bytes"
        ):
            client.update("wide", torch.arange(300_000), torch.zeros(300_000, 64))
    server.kill()


@pytest.mark.parametrize("near", [False, True])
def test_writes_are_short_because_others_wait_for_them(
    tmp_path: Path, near: bool
) -> None:
    server = RecStoreServer(tmp_path / "data", "--max-write", "1")
    with RecStoreClient([server.address], shared_memory=near) as client:
        for dim, ids in ((1, torch.arange(2**13 + 1)), (64, torch.arange(4000))):
            client.init_data(f"t{dim}", (10, dim), torch.float32)
            for write in (client.push, client.update):
                with pytest.raises(
                    ValueError,
                    match=(
                        r"at most 8192 ids and 1048576 bytes \(--max-write\): split it"
                    ),
                ):
                    write(f"t{dim}", ids, torch.ones(len(ids), dim))
            client.update(f"t{dim}", ids[:3900], torch.ones(3900, dim))
            assert client.stats(f"t{dim}").rows == 3900
            assert client.stats(f"t{dim}").steps == 1
    server.kill()


def test_large_pushes_and_deletions_are_several_writes(
    own_server: RecStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torchrec_recstore_service.client.server_set.WRITE_BYTES", 2**14
    )
    metrics = []
    with RecStoreClient([own_server.address]) as client:
        write = client._tables._write
        monkeypatch.setattr(
            client._tables,
            "_write",
            lambda *each: metrics.append(len(each[2])) or write(*each),
        )
        client.init_data("t", (10, 8), torch.float32)
        ids, rows = torch.arange(1000) % 990, torch.randn(1000, 8)
        client.push("t", ids, rows)
        assert metrics == [128] * 7 + [104]
        # of duplicates, the last one counts
        assert torch.equal(client.pull("t", ids[10:]), rows[10:])
        assert client.delete("t", ids) == 990
        client.push("t", ids[:0], rows[:0])
        assert client.delete("t", ids[:0]) == 0


@pytest.mark.slow
def test_names_numbers_and_tables_are_bounded(tmp_path: Path) -> None:
    server = RecStoreServer(
        tmp_path / "data", "--max-tables", "3", "--max-counter-memory", "0.01"
    )
    client = _client(server)
    epoch = _epoch(server)
    with grpc.insecure_channel(server.address) as channel:

        def refused(method: str, request: Any) -> str:
            call = channel.stream_stream(SERVICE + method)
            with pytest.raises(grpc.RpcError) as error:
                list(
                    call(
                        iter([request.SerializeToString()]),
                        metadata=METADATA,
                        timeout=60,
                    )
                )
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (
                method,
                error.value,
            )
            details = error.value.details()
            assert len(details) < 5000
            return details

        spec = TableSpec(
            8, torch.float32, Adagrad(lr=0.1), TableOptions(max_rows=10)
        ).to_json()
        for name in ("n" * 1025, "\N{SNOWMAN}" * 400, "n" * 20_000_000):
            assert "at most 1024 bytes" in refused(
                "Create", pb.CreateRequest(table=name, spec=spec, epoch=epoch)
            )
            for request in (
                pb.StatsRequest(table=name, epoch=epoch),
                pb.IdsRequest(table=name, epoch=epoch),
            ):
                method = type(request).__name__.removesuffix("Request")
                assert (
                    "there is no table 'n" in refused(method, request) or name[0] != "n"
                )
            for header in (
                pb.PullHeader(table=name, epoch=epoch, want=pb.PullHeader.FOUND),
                pb.PullHeader(table=name, epoch=epoch),
            ):
                refused("Pull", pb.PullRequest(header=header))
        for field, value, least in (
            ("dim", 8, 2**24 + 1),
            ("max_rows", 10, 2**63),
            ("seed", 0, 2**63),
        ):
            for wrong in (least, 2**64, 10**400):
                text = spec.replace(f'"{field}": {value}', f'"{field}": {wrong}')
                assert text != spec
                details = refused("Create", pb.CreateRequest(table="wrong", spec=text))
                assert field in details
                assert "not the specification" in details
        assert "at most 65536 characters" in refused(
            "Create", pb.CreateRequest(table="wrong", spec=" " * 70_000 + spec)
        )
        for name in ("s" * 201, "s" * 1_000_000):
            reserve = pb.SaveRequest(
                phase=pb.SaveRequest.RESERVE,
                epoch=epoch,
                save={"name": name, "id": "1"},
            )
            assert "at most 200 bytes" in refused("Save", reserve)
            load = pb.LoadRequest(phase=pb.LoadRequest.PREPARE, save={"name": name})
            assert "at most 200 bytes" in refused("Load", load)
        for name in ("c" * 65, "c" * 4_000_000, ""):
            header = pb.WriteHeader(
                table="t",
                client=name,
                kind=pb.WriteHeader.DELETE,
                epoch=epoch,
                request=1,
            )
            assert "from 1 to 64 bytes" in refused(
                "Write", pb.WriteRequest(header=header)
            )
        for options in (MinFrequency(2, 2**34), MinFrequency(2, 2**24)):
            with pytest.raises(
                ValueError, match="--max-counter-memory is 10737418 bytes"
            ):
                client.init_data(
                    "counted",
                    (1, 4),
                    torch.float32,
                    options=TableOptions(admission=options),
                )
        for name in ("u", "v"):
            client.init_data(name, (1, 4), torch.float32)
        client.init_data("u", (1, 4), torch.float32)
        with pytest.raises(ValueError, match=r"has 3 tables.*--max-tables"):
            client.init_data("w", (1, 4), torch.float32)
        assert _tables(server) == ["t", "u", "v"]
    server.kill()


def _tables(server: RecStoreServer) -> list[str]:
    with grpc.insecure_channel(server.address) as channel:
        describe = channel.unary_unary(
            SERVICE + "Describe", response_deserializer=pb.DescribeReply.FromString
        )
        return sorted(describe(b"", metadata=METADATA).tables)


def test_a_server_that_cannot_save_does_not_stop(own_server: RecStoreServer) -> None:
    """A limit on the size of files stands for a full disk: both are errors of a write."""
    client = RecStoreClient([own_server.address], timeout_s=60.0, shared_memory=False)
    client.init_data("t", (100, 8), torch.float32)
    ids, rows = torch.arange(10_000), torch.randn(10_000, 8)
    client.push("t", ids[:5000], rows[:5000])
    before = resource.prlimit(own_server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(own_server.pid, resource.RLIMIT_FSIZE, (20_000, before[1]))
    for attempt in (1, 2):
        os.kill(own_server.pid, signal.SIGTERM)
        while own_server.stderr.count("does not stop") < attempt:
            assert own_server.is_alive
            time.sleep(0.05)
    assert "free" in own_server.stderr
    assert str(own_server.data) in own_server.stderr
    client.push("t", ids[5000:], rows[5000:])
    client.init_data("u", (1, 4), torch.float32)
    client.delete("t", ids[:10])
    with RecStoreClient([own_server.address]) as near:  # by shared memory
        assert torch.equal(near.pull("t", ids[10:]), rows[10:])
        near.push("t", ids[:10], rows[:10])
    assert not list(own_server.data.glob("stopped-*"))
    resource.prlimit(own_server.pid, resource.RLIMIT_FSIZE, before)
    own_server.stop()
    own_server.start()
    assert torch.equal(client.pull("t", ids), rows)
    assert _tables(own_server) == ["t", "u"]
