"""The C++ header for parameter servers: programs built with it get the results and the
errors of the Python client.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchrec_recstore
from tests.certificates import make_certificates, needs_openssl
from tests.packages import PYTHON_PATH
from tests.recstore_server import Proxy, RecStoreServer, ServerPair
from tests.redis_server import needs_redis
from tests.secrets import write_secret
from torchrec_recstore import Adagrad
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.agreement import SLOTS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "service_cpp"
DRIVER = Path(__file__).with_name("service_cpp_driver.cpp")
needs_grpc = pytest.mark.skipif(
    not all(map(shutil.which, ("g++", "pkg-config", "protoc", "grpc_cpp_plugin"))),
    reason=(
        "gRPC for C++, which examples/service_cpp/build.sh needs, is not on this"
        " machine"
    ),
)
IDS = torch.tensor([7, -1, 0, 2**63 - 1, -(2**63), 7])
# several parts of a stream, and ids twice
MANY = torch.cat([IDS, torch.arange(-70_000, 70_000)])
DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "brain": torch.bfloat16,
    "eight": torch.int8,
}


def test_the_slots_of_ids_are_those_of_the_header() -> None:
    """The header asserts the same slots when it is compiled."""
    vectors = {0: 0, 7: 4830, -1: 4522, 2**63 - 1: 964, -(2**63): 4894}
    text = (Path(torchrec_recstore.get_include()) / "recstore" / "slots.h").read_text()
    for id_, slot in vectors.items():
        owners = torch.zeros(SLOTS, dtype=torch.int64)
        owners[slot] = 1
        assert row_ops.ids_split(torch.tensor([id_]), [1], owners, 2)[
            2
        ].flatten().tolist() == [0, 1]
        assert f"== {slot}" in text


def _build(output: Path, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": PYTHON_PATH}
    made = subprocess.run(
        [EXAMPLE / "build.sh", output, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


class _Driver:
    """A C++ program that makes calls with one client."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        *addresses: str,
        timeout_s: float = 30,
        shared_memory: bool = True,
        access: tuple[str, ...] = (),
    ) -> None:
        self._folder = folder
        command = [
            program,
            ",".join(addresses),
            str(timeout_s),
            "1" if shared_memory else "0",
            *access,
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(
        self, kind: str, table: str, ids: Tensor = IDS, values: Tensor | None = None
    ) -> str:
        """Makes a call. Returns the answer of the program."""
        ids.numpy().tofile(self._folder / "ids")
        (self._folder / "values").write_bytes(
            b"" if values is None else values.numpy().tobytes()
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            f"{kind} {table} {self._folder / 'ids'} {self._folder / 'values'}\n"
        )
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def done(
        self, kind: str, table: str, ids: Tensor = IDS, values: Tensor | None = None
    ) -> Tensor:
        """Makes a call that succeeds. Returns the bytes of its result."""
        assert self.call(kind, table, ids, values) == "ok"
        content = (self._folder / "values").read_bytes()
        return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)

    def rows(self, table: str, ids: Tensor, dim: int = 8) -> Tensor:
        return self.done("pull", table, ids).view(torch.float32).view(-1, dim)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, which contains the example.

    Without optimisation, because optimised code takes a compiler fifteen seconds.
    """
    program = tmp_path_factory.mktemp("driver") / "driver"
    warnings = ("-Wall", "-Wextra", "-Werror")
    _build(program, str(DRIVER), "-O0", *warnings, "-I", str(EXAMPLE))
    return program


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RecStoreServer]]:
    servers = [RecStoreServer(tmp_path / name) for name in ("first", "second")]
    yield servers
    for server in servers:
        server.kill()


def _table(
    client: RecStoreClient, name: str, dtype: torch.dtype = torch.float32
) -> None:
    client.init_data(name, (400, 8), dtype, optimizer=Adagrad(lr=0.1))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(
        one.contiguous().view(torch.int32), other.contiguous().view(torch.int32)
    )


def _segments(server: RecStoreServer) -> int:
    """Returns the number of clients that share memory with a server."""
    return Path(f"/proc/{server.pid}/maps").read_text().count("memfd:recstore")


@needs_grpc
@pytest.mark.slow
def test_the_example_compiles_without_a_warning_and_runs(
    program: Path, tmp_path: Path, servers: list[RecStoreServer]
) -> None:
    # build.sh OUTPUT compiles the example alone by the command that made the program
    command = _build(tmp_path / "example", CXX="echo").split()
    assert str(EXAMPLE / "main.cpp") in command
    assert command[command.index("-o") + 1] == str(tmp_path / "example")
    addresses = [server.address for server in servers]
    with RecStoreClient(addresses) as client:
        _table(client, "user")
        client.push("user", torch.tensor([7, -1]), torch.full((2, 8), 2.0))
        made = subprocess.run(
            [program, "example", ",".join(reversed(addresses)), "user", "7", "-1"],
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        lines = made.stdout.splitlines()
        assert lines[:2] == ["table user: 8 columns, float32", "7: 2 2 2 2 2 2 2 2"]
        assert lines[4] == "7: 1.9 1.9 1.9 1.9 1.9 1.9 1.9 1.9"
        assert lines[-1] == "7: 0 0 0 0 0 0 0 0"
        assert torch.equal(client.pull("user", torch.tensor([7]))[0], torch.zeros(8))
    wrong = subprocess.run(
        [program, "example", addresses[0], "user", "7"],
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 1
    assert "name all servers of the set" in wrong.stderr


@needs_grpc
@pytest.mark.slow
@pytest.mark.parametrize(("n_servers", "shared_memory"), [(1, False), (2, True)])
def test_results_are_those_of_the_python_client(
    program: Path,
    servers: list[RecStoreServer],
    tmp_path: Path,
    n_servers: int,
    shared_memory: bool,
) -> None:
    addresses = [server.address for server in servers[:n_servers]]
    here = RecStoreClient()
    there = RecStoreClient(addresses, shared_memory=False)
    driver = _Driver(
        program, tmp_path, *reversed(addresses), shared_memory=shared_memory
    )
    grads = torch.randn(len(MANY), 8)
    for name, dtype in DTYPES.items():
        for client in (here, there):
            _table(client, name, dtype)
        assert driver.done("describe", name).view(torch.int64).tolist() == [8]
        # initial rows
        assert _same_bits(driver.rows(name, MANY), here.pull(name, MANY).float())
        here.update(name, MANY, grads)
        driver.done("update", name, MANY, grads)
        here.push(name, IDS[:3], grads[:3])
        driver.done("push", name, IDS[:3], grads[:3])
        expected = here.pull(name, MANY)
        assert torch.equal(there.pull(name, MANY), expected)
        assert _same_bits(driver.rows(name, MANY), expected.float())
        ids = torch.tensor([5, 2**62, -9, 2**61])
        assert (
            driver.done("exists", name, ids).tolist()
            == here.exists(name, ids).int().tolist()
            == [1, 0, 1, 0]
        )
        assert (
            driver.done("erase", name, ids).view(torch.int64).tolist()
            == [here.delete(name, ids)]
            == [2]
        )
        assert here.stats(name).rows == there.stats(name).rows
        empty = torch.empty(0, dtype=torch.int64)
        driver.done("pull", name, empty)
        driver.done("update", name, empty, torch.empty(0, 8))
    odd = torch.tensor([[float("nan")] * 8, [float("-inf")] * 8, [-0.0] * 8])
    for call, client_call in (("push", here.push), ("update", here.update)):
        driver.done(call, "float", IDS[:3], odd)
        client_call("float", IDS[:3], odd)
        assert _same_bits(there.pull("float", IDS[:3]), here.pull("float", IDS[:3]))
        assert _same_bits(driver.rows("float", IDS[:3]), here.pull("float", IDS[:3]))
    assert [_segments(server) for server in servers[:n_servers]] == [
        int(shared_memory)
    ] * n_servers
    zeros = torch.zeros(3, 8)
    before = there.stats("float").steps
    driver.done("together", "float", torch.arange(3), zeros)
    assert there.stats("float").steps == before + 80
    assert driver.call("pull", "unknown").startswith(
        "ValueError||unknown|there is no table 'unknown' on the servers"
    )
    assert "must have 6 x 8 values, got 3" in driver.call(
        "push", "float", IDS, torch.zeros(3)
    )
    large = torch.arange(1_100_000)  # two calls
    wide = torch.randn(len(large), 8)
    driver.done("push", "float", large, wide)
    assert torch.equal(there.pull("float", large), wide)
    assert driver.done("erase", "float", large).view(torch.int64).item() == len(large)
    for client in (here, there):
        # parts of rows that end within four bytes
        client.init_data("seven", (400, 7), torch.float16)
    assert _same_bits(driver.rows("seven", large, 7), here.pull("seven", large).float())
    there.init_data(
        "made",
        (9, 8),
        torch.float32,
        row_func=lambda shape, dtype: torch.rand(shape, dtype=dtype),
    )
    assert driver.call("pull", "made").startswith("NoInitialRow|")
    driver.close()  # by a signal
    end = time.monotonic() + 60
    while any(map(_segments, servers)):
        assert time.monotonic() < end, "the memory of a killed client is still held"
        time.sleep(0.01)
    there.close()


@needs_grpc
@pytest.mark.slow
def test_faults(program: Path, servers: list[RecStoreServer], tmp_path: Path) -> None:
    addresses = [server.address for server in servers]
    new = _Driver(program, tmp_path, *addresses)
    assert new.call("pull", "t").startswith(
        f"ServerSetError|{addresses[0]}|t|the servers are in no common epoch: "
    )
    client = RecStoreClient(addresses)
    _table(client, "t")
    client.push("t", IDS, torch.ones(6, 8))
    client.save("monday")
    reader = _Driver(program, tmp_path, *addresses, timeout_s=20)
    writer = _Driver(program, tmp_path, *addresses, timeout_s=20)
    assert torch.equal(reader.rows("t", IDS), torch.ones(6, 8))
    writer.done("update", "t", IDS, torch.ones(6, 8))
    # A server that is stopped and started again continues: calls are repeated.
    servers[0].stop()
    servers[0].start()
    trained = reader.rows("t", IDS)
    assert torch.equal(trained, client.pull("t", IDS))
    for server in servers:
        server.stop()
    for server in servers:
        server.start()
    steps = client.stats("t").steps
    for server in servers:
        server.stop()
        server.start()
    writer.done("update", "t", IDS, torch.ones(6, 8))
    assert client.stats("t").steps == steps + 1
    assert torch.equal(reader.rows("t", IDS), client.pull("t", IDS))
    # One that is killed has lost rows: each client refuses, and names it.
    servers[1].kill()
    servers[1].start()
    answer = writer.call("update", "t", IDS, torch.ones(6, 8)).split("|")
    assert answer[:3] == ["ServerRestartedError", addresses[1], "t"]
    assert answer[3].endswith(
        "this client's writes are lost: continue with a new client"
    )
    answer = reader.call("pull", "t").split("|")
    assert answer[:3] == ["ServerSetError", addresses[1], "t"]
    assert (
        f"{addresses[1]} was killed in epoch 1 and started again from the save 'monday'"
        in answer[3]
    )
    # A client that has not written continues in the epoch that begins with a save. One
    # that has written does not.
    again = RecStoreClient(addresses)
    again.load("monday")
    assert torch.equal(reader.rows("t", IDS), torch.ones(6, 8))
    assert writer.call("pull", "t").startswith("ServerRestartedError|")
    servers[1].kill()
    short = _Driver(program, tmp_path, *addresses, timeout_s=0.5)
    answer = short.call("pull", "t").split("|")
    assert answer[:2] == ["ServiceError", addresses[1]]
    assert (
        f"table 't' on server {addresses[1]} cannot be reached for 0.5 s" in answer[3]
    )
    for driver in (new, reader, writer, short):
        driver.close()


@needs_grpc
@pytest.mark.slow
def test_servers_that_were_rolled_back(
    program: Path, servers: list[RecStoreServer], tmp_path: Path
) -> None:
    addresses = [server.address for server in servers]
    client = RecStoreClient(addresses)
    _table(client, "t")
    client.save("monday")
    reader, writer, late, first = (
        _Driver(program, tmp_path, *addresses, timeout_s=20) for _ in range(4)
    )
    reader.rows("t", IDS)
    late.rows("t", IDS)

    def roll_back(some: list[RecStoreServer]) -> None:
        for server in some:
            server.stop()
            shutil.copytree(server.data, tmp_path / f"snapshot-{server.data.name}")
            server.start()
        writer.done("update", "t", IDS, torch.ones(6, 8))
        reader.rows("t", IDS)
        for server in some:
            server.stop()
            shutil.rmtree(server.data)
            (tmp_path / f"snapshot-{server.data.name}").rename(server.data)
            server.start()

    roll_back(servers[:1])
    new = _Driver(program, tmp_path, *addresses, timeout_s=20)
    for driver in (first, writer, reader, new, late):
        calls = ("pull", "update") if driver in (first, writer) else ("pull",)
        for kind in calls:
            answer = driver.call(
                kind, "t", IDS, torch.ones(6, 8) if kind == "update" else None
            ).split("|")
            assert answer[:3] == ["ServerSetError", addresses[0], "t"]
            assert f"{addresses[0]} has older rows of epoch 1 than before" in answer[3]
            assert "recstore servers restore" in answer[3]
    client.load("monday")
    # All servers: only clients that have seen the later rows can notice it.
    writer = _Driver(program, tmp_path, *addresses, timeout_s=20)
    roll_back(servers)
    new.rows("t", IDS)
    for driver in (writer, reader):
        answer = driver.call("pull", "t").split("|")
        assert answer[0] == "ServerRestartedError"
        assert answer[1] in addresses
        assert "has older rows than this client has seen" in answer[3]
    late.rows("t", IDS)
    for driver in (reader, writer, late, first, new):
        driver.close()


@needs_grpc
@pytest.mark.slow
def test_a_lost_reply_does_not_apply_an_update_twice(
    program: Path, servers: list[RecStoreServer], tmp_path: Path
) -> None:
    client = RecStoreClient([servers[0].address])
    _table(client, "t")
    client.push("t", IDS[:5], torch.ones(5, 8))
    steps = client.stats("t").steps
    proxy = Proxy(servers[0].address)
    driver = _Driver(program, tmp_path, proxy.address, shared_memory=False)
    for cut in range(1, 8):
        driver.done("pull", "t")
        proxy.cut_after = 10 * cut  # somewhere in the reply to the update
        driver.done("update", "t", IDS[:5], torch.ones(5, 8))
        assert client.stats("t").steps == steps + cut
    proxy.close()
    driver.close()


@needs_grpc
@needs_openssl
@pytest.mark.slow
def test_access(program: Path, tmp_path: Path) -> None:
    token, certificates = "correct-horse-battery", make_certificates(tmp_path)
    (tmp_path / "server.key").chmod(0o600)
    flags = ("--token-file", str(write_secret(tmp_path / "token", token)))
    tls = (
        "--tls-cert",
        str(certificates / "server.pem"),
        "--tls-key",
        str(certificates / "server.key"),
    )
    server = RecStoreServer(tmp_path / "data", *flags, *tls)
    with RecStoreClient(
        [server.address], token=token, tls_ca=certificates / "ca.pem"
    ) as client:
        _table(client, "t")
        client.push("t", IDS, torch.ones(6, 8))
        right = _Driver(
            program,
            tmp_path,
            server.address,
            access=(token, str(certificates / "ca.pem")),
        )
        assert torch.equal(right.rows("t", IDS), torch.ones(6, 8))
        wrong = _Driver(
            program,
            tmp_path,
            server.address,
            access=("wrong", str(certificates / "ca.pem")),
        )
        answer = wrong.call("update", "t", IDS, torch.ones(6, 8)).split("|")
        assert answer[:2] == ["ServiceError", server.address]
        assert (
            answer[3]
            == f"table 't' on server {server.address}: the token is missing or wrong"
            " (unauthenticated)"
        )
        plain = _Driver(program, tmp_path, server.address, timeout_s=1, access=(token,))
        assert plain.call("pull", "t").startswith(f"ServiceError|{server.address}|t|")
        open_ = _Driver(program, tmp_path, "192.0.2.1:7700", access=(token,))
        assert "token would be sent to 192.0.2.1:7700 unencrypted" in open_.call(
            "pull", "t"
        )
        assert client.stats("t").updates == 0
    for driver in (right, wrong, plain, open_):
        driver.close()
    server.kill()


@needs_grpc
@needs_redis
@pytest.mark.slow
def test_a_pair_goes_on(tmp_path: Path, program: Path) -> None:
    """Updates go on, once each, when the primary of a pair is killed, and when it
    hangs, with shared memory and without.
    """
    pair = ServerPair(tmp_path / "pair")
    drivers: list[_Driver] = []
    try:
        with pair.client() as client, RecStoreClient(private=True) as alone:
            _table(client, "t")
            _table(alone, "t")
            first = pair.primary()
            drivers += [
                _driver_of_pair(program, tmp_path / name, pair, name == "shared")
                for name in ("shared", "streams")
            ]
            for what in (None, "kill", "hang"):
                if what == "kill":
                    pair.servers[first].kill()
                elif what == "hang":
                    pair.servers[1 - first].pause()
                # the same gradients, since it is not known who comes first
                grads = torch.randn(len(IDS), 8)
                _update_at_once(drivers, grads)
                for _ in drivers:
                    alone.update("t", IDS, grads)
                for driver in drivers:
                    assert _same_bits(driver.rows("t", IDS), alone.pull("t", IDS))
                if what == "kill":
                    pair.servers[first].start()
                    assert pair.primary() == 1 - first
            os.kill(pair.servers[1 - first].pid, signal.SIGCONT)
            for driver in drivers:
                assert driver.call("pull", "t") == "ok"
    finally:
        for driver in drivers:
            driver.close()
        pair.close()


def _driver_of_pair(
    program: Path, folder: Path, pair: ServerPair, shared_memory: bool
) -> _Driver:
    folder.mkdir()
    return _Driver(
        program, folder, pair.address, timeout_s=60, shared_memory=shared_memory
    )


def _update_at_once(drivers: list[_Driver], grads: Tensor) -> None:
    def update(driver: _Driver) -> None:
        driver.done("update", "t", IDS, grads)

    with ThreadPoolExecutor() as pool:
        list(pool.map(update, drivers))
