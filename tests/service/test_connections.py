"""Tests of the limits of connections, against real servers."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.certificates import make_certificates, needs_openssl
from tests.recstore_server import Proxy, RecStoreServer
from tests.redis_server import free_port
from tests.service.tables.test_limits import (
    METADATA,
    SERVICE,
    numbers,
    resident_mb,
)
from torchrec_recstore_service import RecStoreClient, ServiceError
from torchrec_recstore_service.wire.access import Access, channel_of


def _channel(server: RecStoreServer, stack: ExitStack) -> grpc.Channel:
    """Returns a channel that shares no connection, and has one."""
    channel = stack.enter_context(
        grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
    )
    grpc.channel_ready_future(channel).result(60)
    return channel


@pytest.mark.slow
def test_connections_and_calls_of_a_connection(tmp_path: Path) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    server = RecStoreServer(
        tmp_path / "data",
        "--max-connections",
        "3",
        "--max-calls",
        "2",
        "--metrics",
        metrics,
    )
    end = threading.Event()
    with ExitStack() as stack:
        channels = [_channel(server, stack) for _ in range(3)]
        assert numbers(metrics)["recstore_connections"] == 3
        # The channel of a client that is left open connects again by itself, and takes
        # the connection that becomes free.
        with (
            RecStoreClient([server.address], timeout_s=1.0) as fourth,
            pytest.raises(ServiceError, match="cannot be reached"),
        ):
            fourth.stats("t")
        channels.pop().close()
        with RecStoreClient(
            [server.address], timeout_s=60.0, shared_memory=False
        ) as client:
            client.init_data("t", (10, 4), torch.float32)
            method = channels[0].stream_unary(SERVICE + "Write")
            calls = [
                method.future(iter(end.wait, True), metadata=METADATA)
                for _ in range(300)
            ]
            most = 0.0
            while most < 100:
                now = numbers(metrics)
                most = max(
                    most, now["recstore_calls_running"] + now["recstore_calls_queued"]
                )
            assert most <= 128 + 1
            client.update("t", torch.arange(10), torch.ones(10, 4))
            for call in calls:
                call.cancel()
        end.set()
    server.kill()


@pytest.mark.slow
def test_an_empty_table_takes_little_memory(tmp_path: Path) -> None:
    server = RecStoreServer(tmp_path / "data", "--max-tables", "300")
    with RecStoreClient([server.address]) as client:
        client.init_data("t", (10, 4), torch.float32)
        before = resident_mb(server)
        for number in range(299):
            client.init_data(f"t{number}", (10, 4), torch.float32)
        assert resident_mb(server) - before < 299 * 0.27
    server.kill()


@needs_openssl
@pytest.mark.slow
def test_connections_whose_clients_are_silent_are_closed(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    metrics = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    plain = RecStoreServer(tmp_path / "plain", "--metrics", metrics[0])
    files = (
        "--tls-cert",
        str(folder / "server.pem"),
        "--tls-key",
        str(folder / "server.key"),
    )
    tls = RecStoreServer(tmp_path / "tls", *files, "--metrics", metrics[1])
    proxy = Proxy(plain.address)
    with ExitStack() as stack:

        def closed(connection: Any) -> None:
            connection.settimeout(200)
            while connection.recv(1000):
                pass

        begin = time.monotonic()
        silent = []  # connections of clients that send nothing
        for server in (plain, tls):
            host, _, port = server.address.rpartition(":")
            connection = socket.create_connection((host, int(port)))
            silent.append(stack.enter_context(connection))
        for connection in silent:
            closed(connection)
            assert time.monotonic() - begin > 5
        channel = stack.enter_context(grpc.insecure_channel(proxy.address))
        grpc.channel_ready_future(channel).result(60)
        assert numbers(metrics[0])["recstore_connections"] == 1
        proxy.held.set()
        waits = 0
        while numbers(metrics[0])["recstore_connections"] > 0:
            time.sleep(0.5)
            waits += 1
        assert waits < 140  # 30 s, and 80 s with gRPC's own timeout
        proxy.close()
    for server in (plain, tls):
        server.kill()


def test_an_address_never_names_a_socket_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For gRPC alone, "unix:80" is the socket "80" in the working directory."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("80")
        listener.listen()
        listener.settimeout(0)
        channel = channel_of("unix:80", Access(timeout_s=1.0))
        with pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=2)
        channel.close()
        with pytest.raises(BlockingIOError):
            listener.accept()
