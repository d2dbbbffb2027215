"""Tests of servers that die, stall or lose their connection, and of clients that send
invalid requests.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from concurrent import futures
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import torch
from torch import Tensor

from tests.recstore_server import Proxy, RecStoreServer
from tests.secrets import write_secret
from torchrec_recstore.optim import Adagrad
from torchrec_recstore.options import TableOptions
from torchrec_recstore_service import RecStoreClient, ServerRestartedError, ServiceError
from torchrec_recstore_service.commands.server_process import ServerOptions, serve
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.agreement import label_of, run_label, run_of
from torchrec_recstore_service.wire.protocol import VERSION, VERSION_KEY
from torchrec_recstore_service.wire.table_spec import TableSpec

IDS = torch.arange(-200, 200)
TOKEN = "correct-horse-battery"


def _grads(step: int) -> Tensor:
    return torch.randn(400, 8, generator=torch.Generator().manual_seed(step))


def _client(address: str, timeout_s: float = 20.0) -> RecStoreClient:
    client = RecStoreClient([address], timeout_s=timeout_s)
    client.init_data("t", (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
    return client


class _Oracle:
    """Returns the rows after the given number of training steps."""

    def __init__(self) -> None:
        self._client = RecStoreClient(private=True)
        self._client.init_data("t", (400, 8), torch.float32, optimizer=Adagrad(lr=0.1))
        self._rows = [self._client.pull("t", IDS)]

    def after(self, steps: int) -> Tensor:
        while len(self._rows) <= steps:
            self._client.update("t", IDS, _grads(len(self._rows) - 1))
            self._rows.append(self._client.pull("t", IDS))
        return self._rows[steps]


@pytest.mark.slow
def test_no_acknowledged_save_is_lost_when_the_server_is_killed(
    own_server: RecStoreServer,
) -> None:
    oracle = _Oracle()
    client = _client(own_server.address)
    chosen = random.Random(0)
    step = saved = kills = 0
    client.save("save-0")

    def kill_and_start() -> None:
        own_server.kill()
        own_server.start()

    while kills < 3:
        killer = threading.Timer(chosen.uniform(0.02, 0.3), kill_and_start)
        killer.start()
        try:
            started = False
            while not started:
                started = not killer.is_alive()
                client.update("t", IDS, _grads(step))
                step += 1
                if step % 3 == 0:
                    client.save(f"save-{step}", overwrite=True)
                    saved = step
            # The kill was between the decision that a save counts and the next update:
            # nothing is lost.
            assert torch.equal(client.pull("t", IDS), oracle.after(step))
            kills += 1
            continue
        except ServerRestartedError as error:
            assert own_server.address in str(error)  # noqa: PT017
            assert "lost" in str(error)  # noqa: PT017
        killer.join()
        kills += 1
        with _client(own_server.address) as reader:  # the server starts from a save
            there = reader.pull("t", IDS)
        # A save that was not acknowledged may exist too.
        saves = [saved, *range(saved + 1, step + 1)]
        assert any(torch.equal(there, oracle.after(each)) for each in saves), (
            saved,
            step,
        )
        with pytest.raises(ServerRestartedError, match=r"table 't' on server"):
            client.pull("t", IDS)
        client.load(f"save-{saved}")
        step = saved
        assert torch.equal(client.pull("t", IDS), oracle.after(step))


@pytest.mark.slow
def test_a_server_that_stops_saves_and_the_next_goes_on(
    own_server: RecStoreServer,
) -> None:
    oracle = _Oracle()
    client = _client(own_server.address)
    for step in range(4):
        if step == 2:
            own_server.stop()
            own_server.start()
        client.update("t", IDS, _grads(step))
    assert torch.equal(client.pull("t", IDS), oracle.after(4))
    own_server.kill()
    own_server.start()
    with pytest.raises(ServerRestartedError):
        client.update("t", IDS, _grads(4))
    assert torch.equal(_client(own_server.address).pull("t", IDS), oracle.after(2))


@pytest.mark.slow
def test_what_was_loaded_is_what_a_server_starts_from(
    own_server: RecStoreServer,
) -> None:
    client = _client(own_server.address)
    for number, name in enumerate(("monday", "tuesday")):
        client.push("t", IDS, _grads(number))
        client.save(name)
    client.load("monday")
    own_server.kill()
    # Starts that fail change nothing, here and below.
    with (
        pytest.raises(OSError, match="cannot listen"),
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        _serve(own_server.data, f"127.0.0.1:{taken.getsockname()[1]}")
    own_server.start()
    assert torch.equal(client.pull("t", IDS), _grads(0))
    client.update("t", IDS, _grads(2))
    after = client.pull("t", IDS)
    with pytest.raises(ValueError, match="choose another name"):
        client.save("stopped-0")
    own_server.stop()
    with (
        pytest.raises(OSError, match="cannot listen"),
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        _serve(own_server.data, f"127.0.0.1:{taken.getsockname()[1]}")
    own_server.start()
    assert torch.equal(client.pull("t", IDS), after)
    own_server.stop()
    state = own_server.data / "server.json"
    left = json.loads(state.read_text())
    # edited by hand, as after a damaged checkpoint
    state.write_text(json.dumps({**left, "last": "tuesday"}))
    own_server.start()
    with pytest.raises(ServerRestartedError):
        client.pull("t", IDS)


def test_calls_without_a_token_take_no_place(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", TOKEN)
    server = RecStoreServer(tmp_path / "data", "--token-file", str(tmp_path / "token"))
    end = threading.Event()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/torchrec_recstore.ParameterServer/Pull")
        waiting = [call(iter(end.wait, True)) for _ in range(100)]
        check = channel.stream_unary("/grpc.health.v1.Health/Check")
        checks = [check.future(iter(end.wait, True)) for _ in range(40)]
        with RecStoreClient([server.address], token=TOKEN, timeout_s=10) as client:
            client.init_data("t", (400, 8), torch.float32)
        for each in waiting:
            assert each.code() is grpc.StatusCode.UNAUTHENTICATED
        for each in checks:
            each.cancel()
        end.set()
    server.kill()


def test_a_forked_process_needs_a_client_of_its_own(server: RecStoreServer) -> None:
    client = _client(server.address)
    before = client.stats("t").steps
    client.update("t", IDS, _grads(0))
    client.wait_for_prefetch(client.prefetch("t", IDS))
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: client.update("t", IDS, _grads(1)),
            lambda: client.prefetch("t", IDS),
        ):
            try:
                call()
            except ValueError as error:
                refused += "made in another process" in str(error)
        os._exit(0 if refused == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    client.update("t", IDS, _grads(2))
    assert client.stats("t").steps == before + 2


@pytest.mark.slow
def test_updates_are_applied_once_whatever_is_cut(
    proxy: Proxy, server: RecStoreServer
) -> None:
    oracle = RecStoreClient()
    client = RecStoreClient([proxy.address])
    ids = torch.arange(4000)
    name = f"cut {proxy.address}"  # the tests by gRPC and by TCP share the server
    for each in (client, oracle):
        each.init_data(name, (10, 64), torch.float32, optimizer=Adagrad(lr=0.1))
    chosen = random.Random(1)
    cuts = 0
    for step in range(30):
        grads = torch.randn(4000, 64)
        if step % 2:
            # Replies are short, so the connection is often cut after the request has
            # been read.
            timer = threading.Timer(chosen.uniform(0, 0.02), proxy.cut)
            timer.start()
        else:
            proxy.cut_after = chosen.choice([1, 9, 30, 60])
        client.update(name, ids, grads)
        oracle.update(name, ids, grads)
        if step % 2:
            timer.join()
        else:
            cuts += proxy.cut_after is None
            proxy.cut_after = None
    assert cuts > 5
    assert torch.equal(client.pull(name, ids), oracle.pull(name, ids))
    assert client.stats(name).steps == 30
    proxy.cut_after = 300_000  # in the middle of a pull
    assert torch.equal(client.pull(name, ids), oracle.pull(name, ids))
    assert proxy.cut_after is None


@pytest.mark.slow
def test_a_slow_server_is_an_error_in_time(
    proxy: Proxy, server: RecStoreServer
) -> None:
    _client(server.address)
    client = RecStoreClient([proxy.address], timeout_s=0.5)
    with suppress(ServiceError):
        client.stats("t")
    proxy.held.set()
    for call in (
        lambda: client.pull("t", IDS),
        lambda: client.update("t", IDS, _grads(0)),
        lambda: client.stats("t"),
        lambda: client.wait_for_prefetch(client.prefetch("t", IDS)),
    ):
        # Without a connection, the server cannot be reached.
        late = (
            rf"table 't' on server {proxy.address} (has not answered within|cannot be"
            r" reached for) 0.5 s"
        )
        with pytest.raises(ServiceError, match=late):
            call()
    proxy.held.clear()
    RecStoreClient([proxy.address]).pull("t", IDS)


def test_a_server_that_is_gone_is_an_error_in_time() -> None:
    with pytest.raises(
        ServiceError,
        match=r"table 't' on server 127.0.0.1:1 cannot be reached for 0.5 s",
    ):
        RecStoreClient(["127.0.0.1:1"], timeout_s=0.5).pull("t", IDS)


class _Unreachable(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A server whose first answer is that it is not available, and that never answers
    after this.
    """

    def __init__(self) -> None:
        self.end = threading.Event()
        self._called = False

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if not self._called:
            self._called = True
            context.abort(grpc.StatusCode.UNAVAILABLE, "no way to it")
        self.end.wait()
        return b""


def test_an_attempt_without_time_does_not_hide_why_the_attempts_before_failed() -> None:
    server, handler = grpc.server(futures.ThreadPoolExecutor(4)), _Unreachable()
    server.add_generic_rpc_handlers([handler])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    message = f"table 't' on server {address} cannot be reached for 3 s: no way to it"
    try:
        with pytest.raises(ServiceError, match=message):
            RecStoreClient([address], timeout_s=3.0).stats("t")
    finally:
        handler.end.set()
        server.stop(None).wait()


@pytest.mark.slow
def test_one_of_two_servers_is_gone(own_server: RecStoreServer, tmp_path: Path) -> None:
    other = RecStoreServer(tmp_path / "other")
    client = RecStoreClient([other.address, own_server.address], timeout_s=3.0)
    client.init_data("halves", (10, 8), torch.float32)
    client.pull("halves", IDS)
    own_server.kill()
    with pytest.raises(
        ServiceError,
        match=rf"table 'halves' on server {own_server.address} cannot be reached",
    ):
        client.pull("halves", IDS)
    other.kill()


def test_bad_requests_change_nothing(server: RecStoreServer) -> None:
    client = _client(server.address)
    client.push("t", IDS, _grads(0))
    version = [(VERSION_KEY, VERSION)]
    chosen = random.Random(2)
    refused = 0
    own = pb.DESCRIPTOR.services_by_name["ParameterServer"]
    with grpc.insecure_channel(server.address) as channel:

        def send(method: str, *messages: bytes) -> None:
            nonlocal refused
            call = channel.stream_stream(f"/{own.full_name}/{method}")
            try:
                list(call(iter(messages), metadata=version, timeout=20))
            except grpc.RpcError as error:
                refused += 1
                assert error.code() in (  # noqa: PT017
                    grpc.StatusCode.INVALID_ARGUMENT,
                    # grpc's own status for a message that it cannot parse
                    grpc.StatusCode.INTERNAL,
                    grpc.StatusCode.UNKNOWN,
                    grpc.StatusCode.NOT_FOUND,
                    grpc.StatusCode.FAILED_PRECONDITION,
                    grpc.StatusCode.ABORTED,  # a phase of a save that does not count
                    grpc.StatusCode.UNIMPLEMENTED,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                ), error

        for method in own.methods_by_name:
            send(method)
            for _ in range(20):
                send(
                    method,
                    *(
                        chosen.randbytes(chosen.randrange(200))
                        for _ in range(chosen.randrange(3))
                    ),
                )
        epoch = _epoch(channel)
        header = {
            "table": "t",
            "epoch": epoch,
            "client": "fuzz",
            "kind": pb.WriteHeader.PUSH,
            "float32": True,
        }
        number = 0

        def write(header: dict[str, object], *parts: pb.WriteRequest) -> None:
            nonlocal number
            number += 1
            first = pb.WriteRequest(
                header=pb.WriteHeader(**{"request": number, **header})
            )
            before = refused
            send(
                "Write",
                first.SerializeToString(),
                *(part.SerializeToString() for part in parts),
            )
            assert refused == before + 1, (header, parts)

        row, one = bytes(32), bytes(8)
        write({**header, "ids": 1}, pb.WriteRequest(ids=one, rows=row[:-1]))
        write({**header, "ids": 1}, pb.WriteRequest(ids=one[:-1], rows=row))
        write({**header, "ids": 1}, pb.WriteRequest(ids=one))
        write({**header, "ids": 1}, pb.WriteRequest(rows=row))
        write({**header, "ids": 2**63}, pb.WriteRequest(ids=one, rows=row))
        write({**header, "ids": 1, "kind": 77}, pb.WriteRequest(ids=one, rows=row))
        write({**header, "ids": 1, "kind": 0}, pb.WriteRequest(ids=one, rows=row))
        write({**header, "ids": 1, "epoch": ""}, pb.WriteRequest(ids=one, rows=row))
        write({**header, "ids": 1, "epoch": "x"}, pb.WriteRequest(ids=one, rows=row))
        write(
            {**header, "ids": 1, "table": "u" * 10_000},
            pb.WriteRequest(ids=one, rows=row),
        )
        write(
            {**header, "ids": 1, "kind": pb.WriteHeader.UPDATE},
            pb.WriteRequest(ids=one, rows=row, initial_ids=one, initial_rows=row[1:]),
        )
        send("Write", pb.WriteRequest(ids=one).SerializeToString())
        send("Pull", pb.PullRequest(ids=one).SerializeToString())
        send(
            "Pull",
            pb.PullRequest(
                header=pb.PullHeader(table="t", epoch=epoch, want=9), ids=one
            ).SerializeToString(),
        )
        send(
            "Pull",
            pb.PullRequest(
                header=pb.PullHeader(table="t", epoch=epoch), ids=one[1:]
            ).SerializeToString(),
        )
        send(
            "Pull",
            pb.PullRequest(
                header=pb.PullHeader(table="t", epoch=epoch), ids=bytes(70 * 2**20)
            ).SerializeToString(),
        )
        for dim in (0, -1, 2**31, 2**62, 2**100):
            spec = TableSpec(
                8, torch.float32, Adagrad(lr=0.1), TableOptions()
            ).to_json()
            spec = spec.replace('"dim": 8', f'"dim": {dim}')
            before = refused
            send(
                "Create",
                pb.CreateRequest(
                    table=f"dim {dim}", spec=spec, epoch=epoch
                ).SerializeToString(),
            )
            assert refused == before + 1, dim
        for spec in (
            "",
            "{}",
            "[]",
            "1",
            '{"dim": 1e99}',
            "[" * 100_000,
            '{"dim": 4, "dtype": "nn"}',
        ):
            send(
                "Create",
                pb.CreateRequest(
                    table="bad", spec=spec, epoch=epoch
                ).SerializeToString(),
            )
        state, number, token, run = epoch.split("/")
        for name in (
            *("", ".", "..", "a/b", "/etc", "lock", "server.json", "set.json", "\0"),
            *("stopped-0", "good"),
        ):
            save = {"name": name, "id": "../x" if name == "good" else "1"}
            before = refused
            for phase in (pb.SaveRequest.PREPARE, pb.SaveRequest.COMMIT, 0, 9):
                send(
                    "Save",
                    pb.SaveRequest(
                        phase=phase, epoch=epoch, save=save
                    ).SerializeToString(),
                )
            assert refused == before + 4, name
        load = {
            "set": state,
            "members": 1,
            "epoch": int(number) + 1,
            "slots": [0],
            "save": {"name": "lock"},
            "token": "a",
        }
        good = {**load, "save": {}}
        for change in (
            *(
                {},
                {"save": {"name": "../x"}},
                {"save": {"name": "none"}},
                {"save": {"name": "x", "id": "1"}},
            ),
            *(
                {**good, "epoch": int(number)},
                {**good, "set": "x"},
                {**good, "set": ""},
                {**good, "member": 1},
            ),
            *(
                {**good, "slots": []},
                {**good, "slots": [1]},
                {**good, "members": 0},
                {**good, "members": 2},
            ),
            *(
                {**good, "token": ""},
                {**good, "token": "a/b"},
                {**good, "token": "a" * 65},
            ),
        ):
            before = refused
            for phase in (pb.LoadRequest.PREPARE, pb.LoadRequest.COMMIT, 0, 9):
                send(
                    "Load",
                    pb.LoadRequest(
                        phase=phase, **{**load, **change}
                    ).SerializeToString(),
                )
            assert refused == before + 4, change
        resume = {
            "epoch": f"{state}/{number}/{token}",
            "member": 0,
            "before": run,
            "run": "a",
        }
        for change in (
            {},
            {"before": "x"},
            {"run": ""},
            {"epoch": f"{state}/{number}"},
            {"epoch": ""},
            {"member": 1},
        ):
            before = refused
            for phase in (
                pb.ResumeRequest.PREPARE,
                pb.ResumeRequest.NOTE,
                pb.ResumeRequest.COMMIT,
                0,
                9,
            ):
                send(
                    "Resume",
                    pb.ResumeRequest(
                        phase=phase, **{**resume, **change}
                    ).SerializeToString(),
                )
            assert refused == before + 5, change
    assert refused > 100
    assert torch.equal(client.pull("t", IDS), _grads(0))
    assert torch.equal(_client(server.address).pull("t", IDS), _grads(0))


def _epoch(channel: grpc.Channel) -> str:
    describe = channel.unary_unary(
        "/torchrec_recstore.ParameterServer/Describe",
        response_deserializer=pb.DescribeReply.FromString,
    )
    state = describe(b"", metadata=[(VERSION_KEY, VERSION)])
    return run_label(label_of(state), run_of(state))


@pytest.mark.parametrize("version", ["0", "1", "", "x"])
def test_another_version_of_the_protocol(server: RecStoreServer, version: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/torchrec_recstore.ParameterServer/Describe")
        with pytest.raises(
            grpc.RpcError,
            match=f"version {version} of the protocol, the server version 2",
        ) as caught:
            call(b"", metadata=[(VERSION_KEY, version)])
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def _serve(data: Path, listen: str = "127.0.0.1:0") -> None:
    """Serves in this process, for errors that are raised before the server takes calls."""
    serve(ServerOptions(ListenOptions(listen), data), pytest.fail)


def test_a_data_directory_and_a_port_belong_to_one_server(
    server: RecStoreServer, tmp_path: Path
) -> None:
    with pytest.raises(
        OSError, match=f"{server.data}: another server has this data directory"
    ):
        _serve(server.data)
    with pytest.raises(OSError, match=f"cannot listen on {server.address}"):
        _serve(tmp_path, server.address)


def test_a_damaged_checkpoint_is_not_passed_over(own_server: RecStoreServer) -> None:
    client, data = _client(own_server.address), own_server.data
    for number, name in enumerate(("first", "second")):
        client.push("t", IDS, _grads(number))
        client.save(name)
    own_server.kill()
    part = max(
        (data / "second").glob("*.safetensors"), key=lambda file: file.stat().st_size
    )
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(ValueError, match=part.name):
        _serve(data)
    (data / "server.json").write_text("{")
    with pytest.raises(ValueError, match=r"server\.json cannot be used"):
        _serve(data)
