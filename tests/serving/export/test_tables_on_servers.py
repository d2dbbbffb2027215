"""Served models whose rows stay on parameter servers: the same answers, by shared
memory and TCP, and what fails.
"""

# Not with annotations from __future__: fx, and with it TorchRec's tracer, copies them
# into code as they are.

import copy
import gc
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.modules.embedding_configs import DataType

from torchrec_recstore import RecStoreClient, RecStoreWarning, Servers, TableOptions
from torchrec_recstore.inference import (
    DeltaPublisher,
    Follower,
    export_checkpoint,
    export_delta,
    export_for_inference,
    load_library,
    read_delta,
    scriptable,
    verify,
)
from torchrec_recstore.modules import (
    RecStoreEmbedding,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
)
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_serving.export.description import described
from torchrec_recstore_serving.export.sorted_tables import ServedTables
from torchrec_recstore_serving.export.tables_on_servers import (
    ServerTable,
    TableOnServers,
    served_on_servers,
)
from torchrec_recstore_serving.export.torchscript import scripted

from ...certificates import make_certificates, needs_openssl
from ...distributed.workers import run_on_ranks
from ...recstore_server import Proxy, RecStoreServer, ServerPair
from ...redis_server import free_port, needs_redis
from ...secrets import write_secret
from ...service.test_remote_sharded import batch as sharded_batch
from ...service.test_remote_sharded import sharded
from ...service.test_remote_sharded import train as train_sharded
from .. import models
from ..models import BAGS, SEQUENCES, batch, train

try:
    load_library()
except ImportError as error:
    pytest.skip(
        f"this torch has no library of served models: {error}", allow_module_level=True
    )

NUMBERS = itertools.count()
TOKEN = "correct-horse-battery-staple-0123456789"


class Model(models.Model):
    """Both eager collections, of a client, and a dense layer."""

    def __init__(
        self, client: RecStoreClient, weighted: bool = False, **options: Any
    ) -> None:
        nn.Module.__init__(self)
        more = {"lr": 0.3, "client": client, "options": TableOptions(**options)}
        self.bags = RecStoreEmbeddingBagCollection(BAGS, is_weighted=weighted, **more)
        self.rows = RecStoreEmbeddingCollection(SEQUENCES, need_indices=True, **more)
        self.over = nn.Sequential(nn.Linear(40, 3), nn.ReLU(), nn.Linear(3, 1))


class Bags(nn.Module):
    """A table of bags, which no other model has."""

    def __init__(
        self, client: RecStoreClient, data_type: DataType, **options: Any
    ) -> None:
        super().__init__()
        self.name = f"b{next(NUMBERS)}"
        config = EmbeddingBagConfig(
            name=self.name, embedding_dim=6, num_embeddings=100, feature_names=["f"]
        )
        config.data_type, config.pooling = data_type, PoolingType.MEAN
        self.bags = RecStoreEmbeddingBagCollection(
            [config], lr=0.3, client=client, options=TableOptions(**options)
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, 6)."""
        pooled: KeyedTensor = self.bags(features)
        return pooled.values()


class Both(nn.Module):
    """A table on servers, and one of this process."""

    def __init__(self, client: RecStoreClient) -> None:
        super().__init__()
        self.there = Bags(client, DataType.FP32)
        self.here = RecStoreEmbedding(10, 6, name="mine", lr=0.3)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, 6)."""
        rows: Tensor = self.here(features.values())
        out: Tensor = self.there(features)
        return out + rows.sum(0)


@pytest.fixture(params=["memory", pytest.param("TCP", marks=pytest.mark.slow)])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the rows travel."""
    monkeypatch.setenv(
        "RECSTORE_SHARED_MEMORY", "1" if request.param == "memory" else "0"
    )
    transport: str = request.param
    return transport


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RecStoreServer]:
    started = RecStoreServer(tmp_path / "data", "--rows-port", str(free_port()))
    yield started
    started.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RecStoreServer]]:
    """A set of two servers that the tests share which stop none of them."""
    started = [RecStoreServer(tmp_path_factory.mktemp("server")) for _ in range(2)]
    yield started
    for each in started:
        each.kill()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[RecStoreServer]]:
    started = [RecStoreServer(tmp_path / name) for name in ("one", "other")]
    yield started
    for each in started:
        each.kill()


def client_of(*servers: RecStoreServer, **arguments: Any) -> RecStoreClient:
    """Returns a client whose own rows do not travel by shared memory."""
    return RecStoreClient(
        [each.address for each in servers], shared_memory=False, **arguments
    )


def exported(model: nn.Module, path: Path, **arguments: Any) -> torch.jit.ScriptModule:
    given = {"dtype": torch.float32, "index": "hash", "rows": "servers", **arguments}
    export_for_inference(model, path, **given)
    served: torch.jit.ScriptModule = torch.jit.load(path)
    return served


def native_of(served: torch.jit.ScriptModule) -> Any:
    """Returns the native object of the first table of bags."""
    return getattr(served.bags.tables, "0").native


def segments() -> int:
    """Returns the number of segments that this process shares with servers."""
    return Path("/proc/self/maps").read_text().count("/memfd:recstore")


@pytest.mark.parametrize(
    ("transport", "weighted"),
    [
        pytest.param("memory", False, id="memory-plain"),
        pytest.param("TCP", True, id="TCP-weighted"),
        pytest.param("memory", True, id="memory-weighted", marks=pytest.mark.slow),
        pytest.param("TCP", False, id="TCP-plain", marks=pytest.mark.slow),
    ],
    indirect=["transport"],
)
def test_answers_are_those_of_the_trained_model(
    shared: list[RecStoreServer], transport: str, weighted: bool, tmp_path: Path
) -> None:
    """Rows and sums are equal to the bit, of one version, and follow the training."""
    gc.collect()
    before = segments()
    with client_of(*shared) as client:
        model = train(Model(client, weighted), weighted=weighted)
        given: dict[str, Any] = {
            "dtype": torch.float32,
            "index": "hash",
            "rows": "servers",
        }
        static = export_for_inference(model, tmp_path / "model.pt", **given)
        verify(tmp_path / "model.pt")
        served = torch.jit.load(tmp_path / "model.pt")
        assert served.recstore_tables() == ["t", "m", "u", "s"]
        for _ in range(2):
            features = batch(50, weighted=weighted)
            for each in (served, static, copy.deepcopy(served)):
                assert torch.equal(each(features), model(features))
            train(model, 1, weighted=weighted)
        served.verify()
        assert (segments() > before) == (transport == "memory")
        ids = torch.arange(-60, 60)
        assert torch.equal(native_of(served).contains(ids), client.exists("t", ids))


def test_torch_export(shared: list[RecStoreServer]) -> None:
    with client_of(*shared) as client:
        model = train(Bags(client, DataType.FP32))
        static = export_for_inference(
            model, dtype=torch.float32, index="hash", rows="servers"
        )
        some = batch(50)
        given = KeyedJaggedTensor(some.keys(), some.values(), lengths=some.lengths())
        shapes = ShapesCollection()
        shapes[given.values()] = {0: Dim.DYNAMIC}
        served = scriptable(static, index="hash")
        program = torch.export.export(
            served, (given,), dynamic_shapes=shapes, strict=False
        ).module()
        train(model, 1)
        for features in (some, batch(50)):
            assert torch.equal(program(features), model(features))


def test_many_ids(shared: list[RecStoreServer], transport: str, tmp_path: Path) -> None:
    """A call of several requests and parts."""
    with client_of(*shared) as client:
        model = Bags(client, DataType.FP32)
        client.push(
            model.name, torch.arange(300_000), torch.arange(1_800_000.0).view(-1, 6)
        )
        table = native_of(exported(model, tmp_path / "model.pt"))
        ids = torch.randint(0, 300_000, (1_100_000,))
        assert torch.equal(
            table.lookup(ids), torch.arange(1_800_000.0).view(-1, 6)[ids]
        )
        assert table.contains(torch.cat([ids, -ids - 1])).sum() == len(ids)
        assert table.lookup(ids[:0]).shape == (0, 6)


@pytest.mark.parametrize(
    ("data_type", "dtypes"),
    [
        (DataType.FP16, [torch.float16, torch.float32]),
        (DataType.BF16, [torch.float32]),
        (DataType.INT8, [torch.float32]),
    ],
)
def test_narrow_rows(
    shared: list[RecStoreServer],
    data_type: DataType,
    dtypes: list[torch.dtype],
    tmp_path: Path,
) -> None:
    with client_of(*shared) as client:
        model = train(Bags(client, data_type))
        features = batch(50)
        for dtype in dtypes:
            served = exported(model, tmp_path / "model.pt", dtype=dtype)
            rows = client.pull(model.name, features["f"].values()).float()
            rows[~client.exists(model.name, features["f"].values())] = 0
            assert torch.equal(native_of(served).lookup(features["f"].values()), rows)
            assert torch.allclose(served(features), model(features).float(), atol=1e-2)
        with pytest.raises(
            ValueError,
            match=(
                rf"table '{model.name}' is on servers.*to torch\.int8: pass"
                r" dtype=torch\.float"
            ),
        ):
            exported(model, tmp_path / "model.pt", dtype=torch.int8)


def test_a_table_with_initial_rows(
    shared: list[RecStoreServer], transport: str
) -> None:
    """Ids without a row read as zeros, although their initial rows are a client's."""
    with client_of(*shared) as client:
        client.init_data(
            "initial",
            (10, 3),
            torch.float16,
            init_func=lambda shape, dtype: torch.ones(shape, dtype=dtype),
        )
        client.push(
            "initial", torch.arange(5), torch.full((5, 3), 2.0, dtype=torch.float16)
        )
        place = TableOnServers(
            "initial", 3, torch.float16, ",".join(client.rows_addresses()), False, True
        )
        table = ServerTable("initial", "float32", place)
        wanted = torch.tensor([2.0] * 5 + [0.0] * 5).unsqueeze(1).expand(10, 3)
        assert torch.equal(table.lookup(torch.arange(10)), wanted)


def test_a_call_holds_its_version(shared: list[RecStoreServer], tmp_path: Path) -> None:
    """All tables of the model are on servers."""
    with client_of(*shared) as client:
        served = exported(train(Model(client)), tmp_path / "model.pt")
    assert described(tmp_path / "model.pt")["index"] == "hash"
    held = served.recstore_hold()
    held.release()
    assert "recstore_hold" in str(served.forward.graph)


def test_a_delta_changes_the_dense_part(
    shared: list[RecStoreServer], tmp_path: Path
) -> None:
    with client_of(*shared) as client:
        model = train(Model(client))
        served = exported(model, tmp_path / "model.pt")
        train(model, 1)
        with torch.no_grad():
            model.over[0].weight.add_(1)
        info = export_delta(model, tmp_path / "delta", base=tmp_path / "model.pt")
        assert (info.dense, info.tables) == (("over.0.weight",), {})
        features = batch()
        assert not torch.equal(served(features), model(features))
        assert served.apply_delta(read_delta(tmp_path / "delta"))
        assert torch.equal(served(features), model(features))
        assert served.recstore_version() == info.version
        served.verify()
        rows = {
            "t/ids": torch.tensor([1]),
            "t/rows": torch.zeros(1, 8),
            "t/removed": torch.empty(0, dtype=torch.int64),
        }
        wrong = read_delta(tmp_path / "delta") | rows
        wrong["base"] = torch.tensor(list(info.version.encode()), dtype=torch.uint8)
        wrong["version"] = torch.tensor(list(b"0" * 16), dtype=torch.uint8)
        wrong["checksum"] = torch.ops.recstore.checksum_of(wrong)
        with pytest.raises(torch.jit.Error, match="one of another model: it has t/"):
            served.apply_delta(wrong)


def test_a_delta_of_a_table_that_is_not_on_servers(
    shared: list[RecStoreServer], tmp_path: Path
) -> None:
    with client_of(*shared) as client:
        model = train(Both(client))
        served = exported(model, tmp_path / "model.pt")
        for number in range(2):  # the second delta is of the rows that have changed
            train(model, 1)
            info = export_delta(model, tmp_path / f"{number}.delta", base=served)
            assert info.tables.keys() == {"mine"}
            assert info.tables["mine"].rows
            assert served.apply_delta(read_delta(info.path))
            assert served.recstore_version() == info.version
            features = batch()
            assert torch.equal(served(features), model(features))
        assert len(served.recstore_ids("mine")) > 20


def test_a_follower_gets_the_dense_part(
    shared: list[RecStoreServer], tmp_path: Path
) -> None:
    with client_of(*shared) as client:
        model = train(Model(client))
        arguments: dict[str, Any] = {
            "every_s": 0,
            "dtype": torch.float32,
            "rows": "servers",
        }
        with DeltaPublisher(model, tmp_path / "published", **arguments) as publisher:
            publisher.step()
            publisher._writer.wait()  # type: ignore[union-attr]
            with Follower(tmp_path / "published") as follower:
                follower.poll()
                train(model, 1)
                with torch.no_grad():
                    model.over[0].weight.add_(1)
                publisher.step()
                publisher._writer.wait()  # type: ignore[union-attr]
                follower.poll()
                features = batch()
                assert torch.equal(follower.model(features), model(features))


@pytest.mark.slow
def test_a_server_that_is_stopped_and_started(
    server: RecStoreServer, transport: str, tmp_path: Path
) -> None:
    """A reader describes the server again and goes on; threads that call meanwhile get
    the rows, too.
    """
    with client_of(server) as client:
        model = train(Bags(client, DataType.FP32))
        served, features = exported(model, tmp_path / "model.pt"), batch(50)
        wanted = model(features)
        ends, failed = threading.Event(), []

        def call() -> None:
            while not ends.is_set():
                try:
                    if not torch.equal(served(features), wanted):
                        failed.append("other rows")
                except RuntimeError as error:
                    failed.append(str(error))

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                server.stop()
                server.start()
                time.sleep(0.1)
        finally:
            ends.set()
            for thread in threads:
                thread.join()
        assert not failed
        assert torch.equal(served(features), wanted)


@pytest.mark.slow
def test_a_server_that_is_killed(
    two: list[RecStoreServer], transport: str, tmp_path: Path
) -> None:
    """An error names what is wrong, after five seconds; a client that brings the
    servers to one save ends it.
    """
    with client_of(*two) as client:
        model = train(Bags(client, DataType.FP32))
        served, features = exported(model, tmp_path / "model.pt"), batch(50)
        wanted = model(features)
        client.save("a")
        assert torch.equal(served(features), wanted)
        two[1].kill()
        begin = time.monotonic()
        with pytest.raises(
            RuntimeError,
            match=(
                rf"table '{model.name}' on server 127.*refused\. Start the .*repeated"
                r" for 5 s"
            ),
        ):
            served(features)
        assert time.monotonic() - begin > 3
        for each in two:
            each.kill()


@pytest.mark.slow
def test_a_server_that_hangs(
    server: RecStoreServer, transport: str, tmp_path: Path
) -> None:
    """An error says so after five seconds, and the next call goes on when the server
    does.
    """
    with client_of(server) as client:
        model = train(Bags(client, DataType.FP32))
        served, features = exported(model, tmp_path / "model.pt"), batch(50)
        wanted = model(features)
        assert torch.equal(served(features), wanted)
        server.pause()
        try:
            begin = time.monotonic()
            with pytest.raises(
                RuntimeError,
                match=rf"table '{model.name}' on server 127.*does not answer",
            ):
                served(features)
            assert time.monotonic() - begin > 3
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert torch.equal(served(features), wanted)


def test_a_server_that_was_killed_and_waits(
    server: RecStoreServer, tmp_path: Path
) -> None:
    with client_of(server) as client:
        model = train(Bags(client, DataType.FP32))
        served, features = exported(model, tmp_path / "model.pt"), batch(50)
        wanted = model(features)
        client.save("a")
    server.kill()
    server.start()
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(served(features)))
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    with client_of(server) as client:  # a client begins an epoch with the save
        client.load("a")
        thread.join(10)
    assert torch.equal(found[0], wanted)


def test_a_table_that_was_made_anew(server: RecStoreServer, tmp_path: Path) -> None:
    with client_of(server) as client:
        model = train(Bags(client, DataType.FP32))
        name, served = model.name, exported(model, tmp_path / "model.pt")
        connection = client._tables._connections[0]  # type: ignore[union-attr]
        served(batch())
        run = connection._epoch.runs.by_address[server.address]
        connection.drop(
            name,
            f"{client._tables.epoch()}/{run}",
        )  # type: ignore[union-attr]
        RecStoreClient([server.address]).init_data(name, (100, 8))
        with pytest.raises(
            RuntimeError,
            match=(
                rf"table '{name}' on server .*another dim or data type.*export the"
                r" model anew"
            ),
        ):
            torch.jit.load(tmp_path / "model.pt")(batch())


def test_a_server_of_an_earlier_version() -> None:
    """The server refuses the connection, whose beginning is of another version."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener.accept()[0] as client:
            client.recv(1000)
            details = (
                "the client speaks version 3 of the protocol, the server version 2"
            )
            reply = pb.SegmentReply(code=9, details=details, last=True)
            client.sendall(
                reply.ByteSize().to_bytes(4, "little") + reply.SerializeToString()
            )
            client.recv(1000)

    thread = threading.Thread(target=answer)
    thread.start()
    place = TableOnServers(
        "t", 3, torch.float32, f"127.0.0.1:{listener.getsockname()[1]}", False, True
    )
    with pytest.raises(
        RuntimeError,
        match=r"table 't' on server .* the server version 2: .* of the same release",
    ):
        ServerTable("t", "float32", place).lookup(torch.arange(3))
    thread.join()
    listener.close()


def test_a_connection_that_reaches_another_server_of_the_set(
    two: list[RecStoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that is mapped to another server gives no rows of that server."""
    monkeypatch.setenv("RECSTORE_SHARED_MEMORY", "0")
    ids = torch.arange(100)
    with client_of(*two) as client:
        client.init_data("t", (100, 3), torch.float32)
        client.push("t", ids, torch.ones(100, 3))
        addresses = client.rows_addresses()
    proxies = [Proxy(address) for address in addresses]
    try:
        places = ",".join(proxy.address for proxy in proxies)
        place = TableOnServers("t", 3, torch.float32, places, False, True)
        table = ServerTable("t", "float32", place)
        assert torch.equal(table.lookup(ids), torch.ones(100, 3))
        port = int(addresses[0].rpartition(":")[2])
        proxies[0].lead(port, addresses[1])
        proxies[0].cut()
        with pytest.raises(
            RuntimeError, match="not all servers of one set: export the model anew"
        ):
            table.lookup(ids)
        proxies[0].lead(port, addresses[0])
        proxies[0].cut()
        assert torch.equal(table.lookup(ids), torch.ones(100, 3))
    finally:
        for proxy in proxies:
            proxy.close()


def test_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = write_secret(tmp_path / "token", f"{TOKEN}\n")
    server = RecStoreServer(tmp_path / "data", "--token-file", str(token))
    try:
        with client_of(server, token=TOKEN) as client:
            model = train(Bags(client, DataType.FP32))
            served, features = exported(model, tmp_path / "model.pt"), batch()
            assert TOKEN.encode() not in (tmp_path / "model.pt").read_bytes()
            for value in (None, str(write_secret(tmp_path / "other", "wrong" * 10))):
                if value is not None:
                    monkeypatch.setenv("RECSTORE_TOKEN_FILE", value)
                with pytest.raises(
                    RuntimeError,
                    match=(
                        rf"table '{model.name}' on .*token is missing or wrong:"
                        r" RECSTORE_TOKEN"
                    ),
                ) as refusal:
                    served(features)
                assert "repeated" not in str(refusal.value)
            monkeypatch.setenv("RECSTORE_TOKEN_FILE", str(tmp_path / "nothing"))
            with pytest.raises(
                RuntimeError, match="nothing of RECSTORE_TOKEN_FILE cannot be read"
            ):
                served(features)
            monkeypatch.setenv("RECSTORE_TOKEN_FILE", str(token))
            assert torch.equal(served(features), model(features))
    finally:
        server.kill()


@needs_openssl
def test_tls(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_certificates(tmp_path)
    for name in ("server.key", "client.key"):
        (path / name).chmod(0o600)
    flags = {"tls-cert": "server.pem", "tls-key": "server.key", "client-ca": "ca.pem"}
    server = RecStoreServer(
        tmp_path / "data",
        *(part for k, v in flags.items() for part in (f"--{k}", str(path / v))),
    )
    own = {
        "tls_ca": path / "ca.pem",
        "tls_cert": path / "client.pem",
        "tls_key": path / "client.key",
    }
    try:
        with client_of(server, **own) as client:
            model = train(Bags(client, DataType.FP32))
            served, features = exported(model, tmp_path / "model.pt"), batch(500)
            with pytest.raises(
                RuntimeError, match="RECSTORE_TLS_CA must name the PEM file"
            ):
                served(features)
            for name, file in own.items():
                monkeypatch.setenv(f"RECSTORE_{name.upper()}", str(file))
            assert torch.equal(served(features), model(features))
    finally:
        server.kill()


def test_threads(shared: list[RecStoreServer], transport: str, tmp_path: Path) -> None:
    """More threads than connections by shared memory call one model, while rows of
    other ids are trained.
    """
    with client_of(*shared) as client:
        model = Bags(client, DataType.FP32)
        client.push(
            model.name, torch.arange(10_000), torch.arange(60_000.0).view(-1, 6)
        )
        table = native_of(exported(model, tmp_path / "model.pt"))
        wrong: list[object] = []

        def call(number: int) -> None:
            try:
                for _ in range(30):
                    ids = torch.randint(0, 10_000, (100 * (number + 1),))
                    if not torch.equal(
                        table.lookup(ids), torch.arange(60_000.0).view(-1, 6)[ids]
                    ):
                        wrong.append(number)
            except RuntimeError as error:
                wrong.append(error)

        threads = [
            threading.Thread(target=call, args=(number,)) for number in range(12)
        ]
        for thread in threads:
            thread.start()
        for _ in range(20):
            client.update(model.name, torch.arange(-100, 0), torch.ones(100, 6))
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_forked_process(
    shared: list[RecStoreServer], transport: str, tmp_path: Path
) -> None:
    """A child makes its own connections, and those of its parent go on."""
    with client_of(*shared) as client:
        model = Bags(client, DataType.FP32)
        client.push(model.name, torch.arange(100), torch.arange(600.0).view(-1, 6))
        table, ids = (
            native_of(exported(model, tmp_path / "model.pt")),
            torch.arange(100),
        )
        wanted = table.lookup(ids)
        for _ in range(2):
            child = os.fork()
            if child == 0:
                right = all(torch.equal(table.lookup(ids), wanted) for _ in range(50))
                os._exit(0 if right else 1)
            for _ in range(50):
                assert torch.equal(table.lookup(ids), wanted)
            assert os.waitpid(child, 0)[1] == 0


def test_what_is_refused(shared: list[RecStoreServer], tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with client_of(*shared) as client:
        model = train(Bags(client, DataType.FP32))
        for match, arguments in [
            (
                rf"table '{model.name}' is on servers.*rows=\"servers\"\)",
                {"rows": "memory"},
            ),
            (
                rf"table '{model.name}' is on servers.*rows=\"servers\"\)",
                {"rows": "mapped"},
            ),
            ('rows="servers" needs index="hash"', {"index": "sorted"}),
            (
                (
                    rf"table '{model.name}' is on servers.*to torch.int8: pass"
                    r" dtype=torch.float32"
                ),
                {"dtype": torch.int8},
            ),
            ("min_frequency and top_rows", {"min_frequency": 1}),
            ("min_frequency and top_rows", {"top_rows": 10}),
            ('rows must be "memory", "mapped" or "servers"', {"rows": "server"}),
        ]:
            with pytest.raises(ValueError, match=match):
                exported(model, path, **arguments)
            assert not path.exists()
        served = exported(model, path)
        for call in (
            lambda: served.recstore_ids(model.name),
            lambda: served.recstore_rows(model.name),
        ):
            with pytest.raises(
                torch.jit.Error, match=f"the rows of table {model.name} are on servers"
            ):
                call()
        features = batch()
        with pytest.raises(RuntimeError, match="values must be integers"):
            served(
                KeyedJaggedTensor(
                    features.keys(),
                    features.values().float(),
                    lengths=features.lengths(),
                )
            )
        both = nn.ModuleDict(
            {"one": model, "two": RecStoreEmbedding(10, 6, name="mine")}
        ).eval()
        addresses = ",".join(client.rows_addresses())
        there = TableOnServers(model.name, 6, torch.float32, addresses, False, True)
        base = scripted(
            ServedTables(
                [ServerTable(name, "float32", there) for name in (model.name, "mine")]
            )
        )
        with pytest.raises(ValueError, match="'mine' is on servers only in base"):
            export_delta(both, tmp_path / "delta", base=base)
    with pytest.raises(
        ValueError, match='rows="servers" is for a model whose tables are on servers'
    ):
        export_checkpoint(tmp_path / "no", path, index="hash", rows="servers")
    with pytest.raises(
        ValueError, match='rows="servers": no table of the model is on servers'
    ):
        exported(RecStoreEmbedding(10, 4, name="mine"), path)
    with (
        RecStoreClient(private=True) as client,
        pytest.raises(ValueError, match=r"table 'b\d+': the tables .* in this proc"),
    ):
        exported(Bags(client, DataType.FP32), path)


def test_initial_rows_are_warned_of(
    shared: list[RecStoreServer], tmp_path: Path
) -> None:
    with client_of(*shared) as client:
        model = train(Bags(client, DataType.FP32, missing="init"))
        with pytest.warns(RecStoreWarning, match=f"'{model.name}'"):
            served = exported(model, tmp_path / "model.pt")
        assert not native_of(served).lookup(torch.tensor([12345])).any()


def _sharded(rank: int, world_size: int, addresses: list[str], prefix: str) -> None:
    servers = Servers(addresses)
    model = sharded(prefix, servers, RowWiseAdagrad(lr=0.05), on_servers="bc")
    train_sharded(model, rank, 2)
    model.eval()
    exported = export_for_inference(
        model, dtype=torch.float32, index="hash", rows="servers"
    )
    wanted = model(sharded_batch(7))[0]
    assert torch.equal(exported(sharded_batch(7))[0], wanted)
    assert served_on_servers(exported).keys() == {f"{prefix}b", f"{prefix}c"}
    dist.barrier()


@pytest.mark.slow
def test_a_sharded_model(shared: list[RecStoreServer]) -> None:
    """Every rank returns a model that reads the tables on servers there, and has the
    others in memory.
    """
    run_on_ranks(
        2,
        partial(
            _sharded, addresses=[each.address for each in shared], prefix="sharded"
        ),
    )


@pytest.mark.slow
@needs_redis
def test_a_pair(transport: str, tmp_path: Path) -> None:
    """The backup of a pair answers when the primary is killed."""
    pair = ServerPair(tmp_path / "pair")
    try:
        with pair.client(shared_memory=False) as client:
            model = train(Bags(client, DataType.FP32))
            first = pair.primary()
            served, features = exported(model, tmp_path / "model.pt"), batch(50)
            wanted = model(features)
            assert torch.equal(served(features), wanted)
            pair.servers[first].kill()
            assert torch.equal(served(features), wanted)
    finally:
        pair.close()
