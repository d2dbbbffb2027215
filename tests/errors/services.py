"""Errors of cold stores, parameter servers and their clients."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig

from tests.errors.situations import raise_from_a_fork, situation
from tests.recstore_server import RecStoreServer
from tests.redis_server import PROGRAM, free_port, redis_server
from tests.secrets import write_secret
from torchrec_recstore import RecStoreEmbeddingBagCollection, save_checkpoint
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import MinFrequency, RedisStore, RocksDBStore, ServerStore, TableOptions
from torchrec_recstore.store import Table, redis_store
from torchrec_recstore.store.conformance import check_cold_store
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service.client.hosted import HostedTables
from torchrec_recstore_service.client.limits import Limits
from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.credentials import watched_token
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_service.server.serve import ServerOptions, serve
from torchrec_recstore_service.wire.table_spec import TableSpec

THREE = torch.arange(3)


def tiered(cold_store: object) -> Table:
    return Table(4, name="t_user", options=TableOptions(max_rows=2, cold_store=cold_store))


@situation("A cold store on disk that cannot be opened")
def no_folder(tmp_path: Path) -> None:
    (tmp_path / "ssd").write_text("no folder")
    tiered(RocksDBStore(str(tmp_path / "ssd" / "cold")))


@situation("A Redis server that cannot be reached")
def no_redis() -> None:
    tiered(RedisStore(f"redis://:secret@127.0.0.1:{free_port()}", retry_seconds=0))


@situation("A Redis server that evicts rows")
def an_evicting_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if PROGRAM is None:
        pytest.skip("neither redis-server nor valkey-server is on this machine")
    monkeypatch.setattr(redis_store, "_CHECK_SECONDS", 0.0)
    with redis_server(tmp_path) as server, tiered(RedisStore(server.url)) as table:
        table.lookup(torch.arange(2), train=True)
        with server.client() as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
        table.lookup(torch.arange(2, 4), train=True)


@situation("A server as cold store that cannot be reached")
def no_server_store() -> None:
    tiered(ServerStore(f"127.0.0.1:{free_port()}", timeout_s=0.4))


@situation("A server that cannot be reached")
def no_server() -> None:
    RecStoreClient([f"127.0.0.1:{free_port()}"], timeout_s=0.4).pull("t_user", THREE)


@situation("A missing or wrong token")
def no_token(guarded_server: RecStoreServer) -> None:
    RecStoreClient([guarded_server.address]).pull("t_user", THREE)


@situation("A server that was restarted without this client's writes")
def restarted(tmp_path: Path) -> None:
    server = RecStoreServer(tmp_path / "data")
    try:
        client = RecStoreClient([server.address])
        client.init_data("t_user", (10, 4))
        client.push("t_user", THREE, torch.ones(3, 4))
        server.kill()
        server.start()
        client.push("t_user", THREE, torch.ones(3, 4))
    finally:
        server.kill()


@situation("A save that was loaded by another client")
def loaded_by_another(tmp_path: Path) -> None:
    server = RecStoreServer(tmp_path / "data")
    try:
        client, other = RecStoreClient([server.address]), RecStoreClient([server.address])
        client.init_data("t_user", (10, 4))
        for epoch in range(2):
            client.push("t_user", THREE, torch.ones(3, 4))
            other.save("monday", overwrite=True)
            (other if epoch else client).load("monday")
        client.push("t_user", THREE, torch.ones(3, 4))
    finally:
        server.kill()


def two_servers(tmp_path: Path, restart: Callable[[RecStoreServer], object], save: bool) -> None:
    servers = [RecStoreServer(tmp_path / name) for name in ("one", "two")]
    addresses = [server.address for server in servers]
    try:
        with RecStoreClient(addresses) as client:
            client.init_data("t_user", (10, 4))
            if save:
                client.save("monday")
        servers[1].kill()
        restart(servers[1])
        RecStoreClient(addresses).pull("t_user", THREE)
    finally:
        for server in servers:
            server.kill()


@situation("One of several servers was killed")
def one_killed(tmp_path: Path) -> None:
    two_servers(tmp_path, lambda server: server.start(), save=True)


@situation("A server that is empty")
def one_empty(tmp_path: Path) -> None:
    def start(server: RecStoreServer) -> None:
        shutil.rmtree(server.data)
        server.start()

    two_servers(tmp_path, start, save=False)


@situation("Not all servers of a set are named")
def some_named(tmp_path: Path) -> None:
    servers = [RecStoreServer(tmp_path / name) for name in ("one", "two")]
    try:
        RecStoreClient([server.address for server in servers]).init_data("t_user", (10, 4))
        RecStoreClient([servers[0].address]).pull("t_user", THREE)
    finally:
        for server in servers:
            server.kill()


@situation("Servers of different sets")
def two_sets(error_server: RecStoreServer, second_error_server: RecStoreServer) -> None:
    addresses = [error_server.address, second_error_server.address]
    for address in addresses:
        RecStoreClient([address]).init_data("t_set", (10, 4))
    RecStoreClient(addresses).pull("t_set", THREE)


@situation("A server that stops")
def stopping() -> None:
    requests = AppliedRequests()
    requests.close()
    requests.once("client", 1, 0, lambda: 0)


@situation("Rows that another client's init_func makes")
def other_clients_rows(error_server: RecStoreServer) -> None:
    def ones(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    maker, reader = RecStoreClient([error_server.address]), RecStoreClient([error_server.address])
    maker.init_data("t_ones", (10, 4), init_func=ones)
    reader.pull("t_ones", THREE)


@situation("A table that was not made")
def no_table() -> None:
    RecStoreClient().pull("t_user", THREE)


@situation("A prefetch without the name of a table")
def no_range() -> None:
    client = RecStoreClient()
    client.init_data("t_user", (1000, 4))
    client.init_data("t_item", (1000, 4), base_offset=1000)
    client.prefetch(torch.tensor([2000]))


def on_servers() -> RecStoreEmbeddingBagCollection:
    config = EmbeddingBagConfig(name="t_user", embedding_dim=4, num_embeddings=10, feature_names=["user"])
    return RecStoreEmbeddingBagCollection([config], optimizer=SGD(), client=RecStoreClient())


@situation("A checkpoint of a model with a table on servers")
def saved_by_the_model(tmp_path: Path) -> None:
    save_checkpoint(on_servers(), tmp_path / "checkpoint")


@situation("A client that has tables already")
def configured_late() -> None:
    client = RecStoreClient()
    client.init_data("t_user", (10, 4))
    client.set_ps_config("127.0.0.1", 7700)


@situation("A table that was made with other arguments")
def made_twice() -> None:
    client = RecStoreClient()
    client.init_data("t_user", (10, 4))
    client.init_data("t_user", (10, 8))


@situation("A weak token")
def weak_token(tmp_path: Path) -> None:
    watched_token(write_secret(tmp_path / "token", "a" * 20))


@situation("A secret that others can read")
def open_token(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "token", "correct-horse-battery")
    path.chmod(0o644)
    watched_token(path)


@situation("More tables than a server takes")
def too_many_tables() -> None:
    tables = HostedTables(Limits(max_tables=1))
    spec = TableSpec(4, torch.float32, SGD(lr=1.0), TableOptions())
    tables.create("t_user", spec)
    tables.create("t_item", spec)


@situation("More counters than a server takes")
def too_many_counters() -> None:
    tables = HostedTables(Limits(max_counter_bytes=2**23))
    options = TableOptions(admission=MinFrequency(2, counter_bytes=2**24))
    tables.create("t_user", TableSpec(4, torch.float32, SGD(lr=1.0), options))


@situation("A write that is too large")
def large_write(error_server: RecStoreServer) -> None:
    with RecStoreClient([error_server.address]) as client:
        client.init_data("t_large", (10, 1))
        client.update("t_large", torch.arange(2**20 + 1), torch.ones(2**20 + 1, 1))


@situation("A name that is too long")
def long_name(error_server: RecStoreServer) -> None:
    RecStoreClient([error_server.address]).save(201 * "s")


@situation("A closed client")
def closed_client() -> None:
    client = RecStoreClient()
    client.close()
    client.pull("t_user", THREE)


@situation("A client in a forked process")
def forked_client() -> None:
    client = RecStoreClient()
    raise_from_a_fork(lambda: client.pull("t_user", THREE))


@situation("A token without encryption")
def token_in_the_clear() -> None:
    RecStoreClient(["ps-1.example.org:7700"], token="secret")


@situation("A server open to other machines without TLS and a token")
def open_to_all() -> None:
    ListenOptions("0.0.0.0:7700")


@situation("A client in the arguments of another process")
def pickled_client() -> None:
    RecStoreClient().__reduce__()


@situation("An address that is in use")
def in_use(error_server: RecStoreServer, tmp_path: Path) -> None:
    serve(ServerOptions(ListenOptions(error_server.address), tmp_path / "other"), lambda address: None)


@situation("A data directory of another server")
def same_directory(error_server: RecStoreServer) -> None:
    DataDirectory(error_server.data)


@situation("Your own cold store that breaks a promise")
def options_without_equality() -> None:
    check_cold_store(object())
