"""Tests of tables on real servers, which give the same numbers as tables in the
process.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from torch import Tensor

from tests.recstore_server import RecStoreServer
from torchrec_recstore.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from torchrec_recstore.options import LRU, ConstantInit, TableOptions
from torchrec_recstore_service import RecStoreClient, ServerSetError

_numbers = itertools.count()


def _name() -> str:
    return f"table {next(_numbers)}: \N{SNOWMAN}/"


def _batch(step: int, n: int = 3000, dim: int = 16) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(-(2**63), 2**63 - 1, (n,), generator=random)
    # many ids occur more than once
    ids[: n // 2] = torch.randint(0, 500, (n // 2,), generator=random)
    return ids, torch.randn(n, dim, generator=random)


def _normal(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def _ones(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.fixture(params=["one", "two"])
def servers(request: pytest.FixtureRequest, server: RecStoreServer) -> list[str]:
    servers = (
        [server] if request.param == "one" else request.getfixturevalue("two_servers")
    )
    return [server.address for server in servers]


@pytest.fixture
def client(servers: list[str]):
    with RecStoreClient(servers) as client:
        yield client


@pytest.mark.parametrize(
    "optimizer", [RowWiseAdagrad(lr=0.1), Adam(lr=0.01), SGD(lr=0.1)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_rows_are_those_of_a_table_in_the_process(
    client: RecStoreClient, optimizer, dtype
) -> None:
    name = _name()
    local = RecStoreClient()
    for each in (client, local):
        each.init_data(name, (1000, 16), dtype, optimizer=optimizer)
    for step in range(3):
        ids, grads = _batch(step)
        for each in (client, local):
            each.update(name, ids, grads)
        asked = torch.cat([ids, torch.arange(600)])
        assert torch.equal(client.pull(name, asked), local.pull(name, asked))
        assert torch.equal(client.exists(name, asked), local.exists(name, asked))
        values = torch.randn(3000, 16)
        for each in (client, local):
            each.push(name, ids[:40], values[:40])
        assert client.delete(name, ids[20:60]) == local.delete(name, ids[20:60])
        assert torch.equal(client.pull(name, asked), local.pull(name, asked))
    here, there = local.stats(name), client.stats(name)
    assert (there.rows, there.inserts, there.updates) == (
        here.rows,
        here.inserts,
        here.updates,
    )
    local.close()


def test_large_requests_are_split(client: RecStoreClient) -> None:
    name, n = _name(), 200_000
    client.init_data(name, (n, 32), torch.float32)
    ids, rows = torch.randperm(n), torch.randn(n, 32)
    client.push(name, ids, rows)
    asked = torch.randint(0, n, (300_000,))
    assert torch.equal(client.pull(name, asked), rows[ids.argsort()][asked])
    assert bool(client.exists(name, asked).all())
    assert client.delete(name, torch.arange(0, n, 2)) == n // 2
    assert torch.equal(client.exists(name, torch.arange(n)), torch.arange(n) % 2 == 1)


def test_rows_longer_than_a_part(client: RecStoreClient) -> None:
    name, dim = _name(), 400_000
    client.init_data(name, (10, dim), torch.float32)
    rows = torch.randn(5, dim)
    client.push(name, torch.arange(5), rows)
    assert torch.equal(client.pull(name, torch.arange(5)), rows)


def test_no_ids(client: RecStoreClient) -> None:
    name, none = _name(), torch.empty(0, dtype=torch.int64)
    client.init_data(name, (10, 4), torch.float32)
    assert client.pull(name, none).shape == (0, 4)
    assert client.exists(name, none).shape == (0,)
    client.push(name, none, torch.empty(0, 4))
    client.update(name, none, torch.empty(0, 4))
    assert client.delete(name, none) == 0


def test_a_row_func_makes_the_same_rows_for_every_client(
    client: RecStoreClient, servers: list[str]
) -> None:
    name = _name()
    local = RecStoreClient()
    for each in (client, local):
        each.init_data(
            name, (10, 16), torch.float32, row_func=_normal, optimizer=Adagrad(lr=0.1)
        )
    ids, grads = _batch(7, 300)
    assert torch.equal(client.pull(name, ids), local.pull(name, ids))
    assert not client.exists(name, ids).any()
    for each in (client, local):
        each.update(name, ids[:200], grads[:200])
    assert torch.equal(client.pull(name, ids), local.pull(name, ids))
    with pytest.raises(ValueError, match="row_func"):
        RecStoreClient(servers).pull(name, ids)
    assert torch.equal(
        RecStoreClient(servers).pull(name, ids[:200]), local.pull(name, ids[:200])
    )


def test_rows_of_a_row_func_that_another_client_deletes(
    client: RecStoreClient, servers: list[str]
) -> None:
    name, ids = _name(), torch.arange(-100, 100)
    other = RecStoreClient(servers)
    for each in (client, other):
        each.init_data(
            name, (10, 8), torch.float32, row_func=_normal, optimizer=SGD(lr=1.0)
        )
    errors: list[BaseException] = []
    done = threading.Event()

    def delete() -> None:
        try:
            while not done.is_set():
                other.delete(name, ids[::7])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=delete)
    thread.start()
    for _ in range(30):
        client.update(name, ids, torch.ones(200, 8))
    done.set()
    thread.join()
    assert not errors
    kept = torch.ones(200, dtype=torch.bool)
    kept[::7] = False
    after = client.pull(name, ids)
    client.delete(name, ids)
    torch.testing.assert_close(
        after[kept], client.pull(name, ids)[kept] - 30, atol=1e-4, rtol=0
    )


def test_many_clients_at_once(client: RecStoreClient, servers: list[str]) -> None:
    """The sums of gradients of one are exact in any order, because SGD computes with
    integers here.
    """
    name = _name()
    options = TableOptions(initializer=ConstantInit(0.0))
    client.init_data(
        name, (10, 8), torch.float32, optimizer=SGD(lr=1.0), options=options
    )
    ids = torch.arange(1000)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            with RecStoreClient(servers) as mine:
                for _ in range(10):
                    mine.update(name, ids, torch.full((1000, 8), -1.0))
                    mine.pull(name, ids)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(client.pull(name, ids), torch.full((1000, 8), 60.0))


def test_prefetch(client: RecStoreClient) -> None:
    name = _name()
    client.init_data(name, (10, 8), torch.float32)
    ids, rows = torch.arange(100), torch.randn(100, 8)
    client.push(name, ids, rows)
    handles = [client.prefetch(name, part) for part in ids.split(10)]
    assert torch.equal(
        torch.cat([client.wait_for_prefetch(handle) for handle in handles]), rows
    )


def test_init_data_again(client: RecStoreClient, servers: list[str]) -> None:
    name = _name()
    client.init_data(name, (10, 8), torch.float32)
    client.push(name, torch.arange(3), torch.ones(3, 8))
    client.init_data(name, (10, 8), torch.float32)
    RecStoreClient(servers).init_data(name, (10, 8), torch.float32)
    assert torch.equal(client.pull(name, torch.arange(3)), torch.ones(3, 8))
    for change in (
        {"shape": (10, 9)},
        {"dtype": torch.float16},
        {"optimizer": SGD(lr=1.0)},
        {"row_func": _ones},
    ):
        arguments = {"shape": (10, 8), "dtype": torch.float32, **change}
        with pytest.raises(
            ValueError, match="exists already with another specification"
        ):
            client.init_data(name, **arguments)


def test_tables_and_servers_are_named(
    client: RecStoreClient, server: RecStoreServer
) -> None:
    with pytest.raises(ValueError, match="no table 'missing'"):
        client.pull("missing", torch.arange(3))
    with pytest.raises(ValueError, match="plain name"):
        client.save("../up")
    with pytest.raises(FileNotFoundError, match=r"server 127\.0\.0\.1:\d+.*nowhere"):
        client.load("nowhere")


def test_other_servers_or_another_order(
    two_servers: list[RecStoreServer], server: RecStoreServer
) -> None:
    name, ids = _name(), torch.arange(100)
    addresses = [each.address for each in two_servers]
    with RecStoreClient(addresses) as client:
        client.init_data(name, (10, 8), torch.float32)
        client.push(name, ids, torch.rand(100, 8))
        rows = client.pull(name, ids)
    with RecStoreClient(addresses[::-1]) as client:  # servers know their places
        assert torch.equal(client.pull(name, ids), rows)
    with RecStoreClient([server.address]) as client:
        client.init_data(name, (10, 8), torch.float32)
    for servers, error in (
        (
            addresses[:1],
            (
                f"the set of the server {addresses[0]} has 2 servers, and 1 are named:"
                f" {addresses[0]}"
            ),
        ),
        ([*addresses, server.address], "the servers belong to different sets"),
        (
            [addresses[0], addresses[0].replace("127.0.0.1", "localhost")],
            "two of the addresses are of the same server",
        ),
    ):
        with (
            RecStoreClient(servers) as client,
            pytest.raises(ServerSetError, match=error),
        ):
            client.pull(name, ids)


def test_bounds_are_over_all_servers(client: RecStoreClient) -> None:
    name = _name()
    client.init_data(
        name, (10, 8), torch.float32, options=TableOptions(max_rows=100, eviction=LRU())
    )
    for step in range(10):
        client.update(name, torch.arange(40 * step, 40 * step + 40), torch.ones(40, 8))
    stats = client.stats(name)
    assert 50 < stats.rows <= 100
    assert stats.evicted == 400 - stats.rows


@pytest.mark.slow
def test_saved_tables_load(client: RecStoreClient) -> None:
    name, other, save = _name(), _name(), f"save-{next(_numbers)}"
    client.init_data(name, (10, 16), torch.float32, optimizer=Adam(lr=0.1))
    client.update(name, *_batch(1))
    client.save(save)
    saved = client.pull(name, _batch(1)[0])
    client.update(name, *_batch(2))
    after = client.pull(name, _batch(1)[0])
    with pytest.raises(FileExistsError, match=save):
        client.save(save)
    client.load(save)
    assert torch.equal(client.pull(name, _batch(1)[0]), saved)
    client.update(name, *_batch(2))
    # also equal if optimizer state and steps are equal
    assert torch.equal(client.pull(name, _batch(1)[0]), after)
    client.init_data(other, (10, 16), torch.float32)
    with pytest.raises(ValueError, match=f"{other}"):
        client.load(save)
    client.save(save, overwrite=True)
    client.load(save)


def test_health_and_reflection(server: RecStoreServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for name in ("", "torchrec_recstore.ParameterServer"):
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name)
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"torchrec_recstore.ParameterServer", "grpc.health.v1.Health"} <= services


@pytest.mark.parametrize(
    ("folder", "protocol"),
    [
        ("service", "torchrec_recstore_service/wire/recstore"),
        ("serving", "torchrec_recstore_serving/predict/predictor"),
    ],
)
def test_generated_code_is_that_of_the_protocol(
    tmp_path: Path, folder: str, protocol: str
) -> None:
    from grpc_tools import protoc

    root = Path(__file__).parents[2] / folder
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["", f"-I{root}", *out, str(root / f"{protocol}.proto")]) == 0
    made = sorted((tmp_path / protocol).parent.iterdir())
    assert len(made) == 3
    for file in made:
        assert file.read_text() == (root / protocol).with_name(file.name).read_text(), (
            f"{file.name}: run make proto"
        )


def test_a_server_names_saved_rows_that_are_not_finite_on_stderr(
    own_server: RecStoreServer,
) -> None:
    with RecStoreClient([own_server.address]) as client:
        client.init_data("t", (100, 4), torch.float32)
        rows = torch.ones(3, 4)
        rows[1, 2] = torch.inf
        client.push("t", torch.arange(3), rows)
        client.save("monday")
        client.save("tuesday")
    text = "table 't': 1 of the saved rows have NaN or infinity"
    assert own_server.stderr.count(text) == 1
