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
from torchrec_recstore.optim import SGD, RowOptimizer
from torchrec_recstore.options import (
    MinFrequency,
    RedisStore,
    RocksDBStore,
    ServerStore,
    TableOptions,
)
from torchrec_recstore.store import Table, redis_store
from torchrec_recstore.store.conformance import check_cold_store
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service.commands.server_process import ServerOptions, serve
from torchrec_recstore_service.server.applied import AppliedRequests
from torchrec_recstore_service.server.credentials import watched_token
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.listening import ListenOptions
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.limits import Limits
from torchrec_recstore_service.wire.table_spec import TableSpec

THREE = torch.arange(3)


def tiered(cold_store: object) -> Table:
    return Table(
        4, name="t_user", options=TableOptions(max_rows=2, cold_store=cold_store)
    )


@situation(
    "ColdStoreError",
    "cold store RocksDBStore('.../ssd/cold'): [Errno 20] Not a directory: '...'",
)
def no_folder(tmp_path: Path) -> None:
    """A cold store on disk that cannot be opened.

    Cause: the directory cannot be created or written: a file has the same path, the
    user has no rights, or the disk is full or read-only. Fix: choose a directory that
    this user may write, on a disk with enough space.
    """
    (tmp_path / "ssd").write_text("no folder")
    tiered(RocksDBStore(str(tmp_path / "ssd" / "cold")))


@situation(
    "ColdStoreError",
    "cold store RedisStore('redis://127.0.0.1:...') cannot be reached for 0 s: Error"
    " ... connecting to 127.0.0.1:... Connection refused.",
)
def no_redis() -> None:
    """A Redis server that cannot be reached.

    Cause: no server at that address has answered for `retry_seconds`. Fix: start the
    server, correct the URL, or set `RedisStore.retry_seconds` to more than the duration
    of a failover.
    """
    tiered(RedisStore(f"redis://:secret@127.0.0.1:{free_port()}", retry_seconds=0))


@situation(
    "ColdStoreError",
    "cold store RedisStore('redis://127.0.0.1:...') would lose rows: its"
    " maxmemory-policy is allkeys-lru; it must be noeviction",
)
def an_evicting_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis server that evicts rows.

    Cause: with `maxmemory` and an `allkeys` policy, the server deletes rows when it is
    full. A deleted row looks like a row that never existed. The cold store reads the
    policy when it is opened, every 10 seconds of use, and after each failure. Fix: set
    `maxmemory-policy noeviction` on the server, and repeat the step. If the message
    says that the server has evicted keys already, load the last checkpoint.
    """
    if PROGRAM is None:
        pytest.skip("neither redis-server nor valkey-server is on this machine")
    monkeypatch.setattr(redis_store, "_CHECK_SECONDS", 0.0)
    with redis_server(tmp_path) as server, tiered(RedisStore(server.url)) as table:
        table.lookup(torch.arange(2), train=True)
        with server.client() as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
        table.lookup(torch.arange(2, 4), train=True)


@situation(
    "ColdStoreError",
    "cold store ServerStore(servers='127.0.0.1:...', shared=None, tls_ca=None,"
    " timeout_s=0.4) has failed: table '...' on server 127.0.0.1:... cannot be reached"
    " for 0.4 s: ...",
)
def no_server_store() -> None:
    tiered(ServerStore(f"127.0.0.1:{free_port()}", timeout_s=0.4))


@situation(
    "ServiceError",
    "table 't_user' on server 127.0.0.1:... cannot be reached for 0.4 s: ...",
)
def no_server() -> None:
    """A server that cannot be reached.

    Cause: no server at that address has answered for `timeout_s`. Fix: start `recstore
    serve` there, correct the address, or increase `RecStoreClient(timeout_s=...)`.
    """
    RecStoreClient([f"127.0.0.1:{free_port()}"], timeout_s=0.4).pull("t_user", THREE)


@situation(
    "ServiceError",
    "table 't_user' on server 127.0.0.1:...: the token is missing or wrong"
    " (unauthenticated)",
)
def no_token(guarded_server: RecStoreServer) -> None:
    """A missing or wrong token.

    Cause: the server was started with `--token-file`, and the client does not have the
    server's token. Fix: pass the token, `RecStoreClient(servers, token=...)`, and
    `tls_ca` if the server is on another machine.
    """
    RecStoreClient([guarded_server.address]).pull("t_user", THREE)


@situation(
    "ServerRestartedError",
    "table 't_user' on server 127.0.0.1:...: the server was restarted without rows;"
    " this client's writes since its last save are lost: load a save, or continue with"
    " a new client",
)
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


@situation(
    "ServerRestartedError",
    "table 't_user' on server 127.0.0.1:...: the server is in the epoch .../3/..., the"
    " call is for .../2/...: a save was loaded since; this client's writes since its"
    " last save are lost: load a save, or continue with a new client",
)
def loaded_by_another(tmp_path: Path) -> None:
    server = RecStoreServer(tmp_path / "data")
    try:
        client, other = (
            RecStoreClient([server.address]),
            RecStoreClient([server.address]),
        )
        client.init_data("t_user", (10, 4))
        for epoch in range(2):
            client.push("t_user", THREE, torch.ones(3, 4))
            other.save("monday", overwrite=True)
            (other if epoch else client).load("monday")
        client.push("t_user", THREE, torch.ones(3, 4))
    finally:
        server.kill()


def two_servers(
    tmp_path: Path, restart: Callable[[RecStoreServer], object], save: bool
) -> None:
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


@situation(
    "ServerSetError",
    "the servers are in different states: 127.0.0.1:... is in epoch 1; 127.0.0.1:..."
    " was killed in epoch 1 and started again from the save 'monday'. This command"
    " brings all of them to their newest complete save: recstore servers restore monday"
    " 127.0.0.1:...,127.0.0.1:...",
)
def one_killed(tmp_path: Path) -> None:
    two_servers(tmp_path, lambda server: server.start(), save=True)


@situation(
    "ServerSetError",
    "the servers are in different states: 127.0.0.1:... is in epoch 1; 127.0.0.1:... is"
    " empty. This command lets all of them begin without rows, because there is no"
    " complete save: recstore servers reset 127.0.0.1:...,127.0.0.1:...",
)
def one_empty(tmp_path: Path) -> None:
    """A server that is empty.

    Cause: the server was started with another data directory, or its disk was replaced.
    Fix: start the server with its data directory, or with a copy of it. Without a copy,
    the rows of this server are lost, and the command that the message names deletes
    those of the others too.
    """

    def start(server: RecStoreServer) -> None:
        shutil.rmtree(server.data)
        server.start()

    two_servers(tmp_path, start, save=False)


@situation(
    "ServerSetError",
    "the servers are in different states: 127.0.0.1:... is in epoch 1; 127.0.0.1:..."
    " has older rows of epoch 1 than before: its data directory was rolled back, or is"
    " a copy. This command brings all of them to their newest complete save: recstore"
    " servers restore monday 127.0.0.1:...,127.0.0.1:...",
)
def one_rolled_back(tmp_path: Path) -> None:
    servers = [RecStoreServer(tmp_path / name) for name in ("one", "two")]
    addresses = [server.address for server in servers]
    try:
        client = RecStoreClient(addresses)
        client.init_data("t_user", (10, 4))
        client.save("monday")
        servers[1].stop()
        shutil.copytree(servers[1].data, tmp_path / "snapshot")
        servers[1].start()
        client.push("t_user", THREE, torch.ones(3, 4))
        servers[1].stop()
        shutil.rmtree(servers[1].data)
        (tmp_path / "snapshot").rename(servers[1].data)
        servers[1].start()
        client.pull("t_user", THREE)
    finally:
        for server in servers:
            server.kill()


@situation(
    "ServerSetError",
    "the set of the server 127.0.0.1:... has 2 servers, and 1 are named: 127.0.0.1:...;"
    " name all servers of the set",
)
def some_named(tmp_path: Path) -> None:
    servers = [RecStoreServer(tmp_path / name) for name in ("one", "two")]
    try:
        RecStoreClient([server.address for server in servers]).init_data(
            "t_user", (10, 4)
        )
        RecStoreClient([servers[0].address]).pull("t_user", THREE)
    finally:
        for server in servers:
            server.kill()


@situation(
    "ServerSetError",
    "the servers belong to different sets: 127.0.0.1:... of ..., 127.0.0.1:... of ...;"
    " name the servers of one set",
)
def two_sets(error_server: RecStoreServer, second_error_server: RecStoreServer) -> None:
    addresses = [error_server.address, second_error_server.address]
    for address in addresses:
        RecStoreClient([address]).init_data("t_set", (10, 4))
    RecStoreClient(addresses).pull("t_set", THREE)


@situation("ServerStoppingError", "the server stops")
def stopping() -> None:
    requests = AppliedRequests()
    requests.close()
    requests.once("client", 1, 0, lambda: 0)


@situation(
    "CallRefusedError",
    "10000 clients have written in the last 300 s: use one client for many calls",
)
def too_many_clients() -> None:
    requests = AppliedRequests()
    for client in range(10_001):
        requests.once(str(client), 1, 0, lambda: 0)


@situation(
    "NoInitialRow",
    "table 't_ones' has rows that an init_func or row_func makes, and an id has none"
    " yet: call init_data with that function first",
)
def other_clients_rows(error_server: RecStoreServer) -> None:
    def ones(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    maker, reader = (
        RecStoreClient([error_server.address]),
        RecStoreClient([error_server.address]),
    )
    maker.init_data("t_ones", (10, 4), init_func=ones)
    reader.pull("t_ones", THREE)


@situation(
    "ValueError",
    "...optimizer must not be the RowOptimizer 'own', because servers do not run code"
    " of clients: ...",
)
def code_for_servers() -> None:
    RecStoreClient().init_data(
        "t_user", (10, 4), optimizer=RowOptimizer(name="own", step="w -= lr * g;")
    )


@situation("ValueError", "there is no table 't_user': init_data makes one")
def no_table() -> None:
    RecStoreClient().pull("t_user", THREE)


@situation(
    "ValueError",
    "id 2000 is in the ids of no table: name the table, prefetch(name, ids), or give"
    " each table its own base_offset",
)
def no_range() -> None:
    client = RecStoreClient()
    client.init_data("t_user", (1000, 4))
    client.init_data("t_item", (1000, 4), base_offset=1000)
    client.prefetch(torch.tensor([2000]))


def on_servers() -> RecStoreEmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="t_user", embedding_dim=4, num_embeddings=10, feature_names=["user"]
    )
    return RecStoreEmbeddingBagCollection(
        [config], optimizer=SGD(), client=RecStoreClient()
    )


@situation(
    "ValueError",
    "table 't_user' is on servers, which own its rows: save the rows with"
    " client.save(name), and the other tensors of the model with"
    " torch.save(model.state_dict(), path)",
)
def saved_by_the_model(tmp_path: Path) -> None:
    save_checkpoint(on_servers(), tmp_path / "checkpoint")


@situation(
    "ValueError",
    "RecStoreClient() has tables already ('t_user'): call set_ps_config before"
    " init_data, or make another client, RecStoreClient(['127.0.0.1:7700'])",
)
def configured_late() -> None:
    client = RecStoreClient()
    client.init_data("t_user", (10, 4))
    client.set_ps_config("127.0.0.1", 7700)


@situation(
    "ValueError",
    "table 't_user' exists already with another specification: dim is 4, not 8",
)
def made_twice() -> None:
    """A table that was made with other arguments.

    Cause: two clients, or two calls, pass different arguments for one table. Fix: pass
    the same arguments, or use another name.
    """
    client = RecStoreClient()
    client.init_data("t_user", (10, 4))
    client.init_data("t_user", (10, 8))


@situation(
    "ValueError",
    "--token-file ...: the token must have at least 16 characters, 8 of them different:"
    " openssl rand -hex 32 prints one",
)
def weak_token(tmp_path: Path) -> None:
    watched_token(write_secret(tmp_path / "token", "a" * 20))


@situation(
    "ValueError",
    "--token-file ... can be read by every user of this machine (mode 0644): chmod"
    " 600 ...",
)
def open_token(tmp_path: Path) -> None:
    path = write_secret(tmp_path / "token", "correct-horse-battery")
    path.chmod(0o644)
    watched_token(path)


@situation(
    "ValueError",
    "table 't_item' cannot be made: the server has 1 tables, the most of --max-tables",
)
def too_many_tables() -> None:
    """More tables than a server takes.

    Cause: each table takes 270 KB on a server even without rows. Fix: drop tables that
    are not used, or start `recstore serve` with a higher `--max-tables`.
    """
    tables = HostedTables(Limits(max_tables=1))
    spec = TableSpec(4, torch.float32, SGD(lr=1.0), TableOptions())
    tables.create("t_user", spec)
    tables.create("t_item", spec)


@situation(
    "ValueError",
    "table 't_user' cannot be made: the counters of MinFrequency of all tables would"
    " take 16777216 bytes, and --max-counter-memory is 8388608 bytes",
)
def too_many_counters() -> None:
    """More counters than a server takes.

    Cause: each table with `MinFrequency` has counters in memory on a server. Fix: lower
    `counter_bytes`, or start `recstore serve` with a higher `--max-counter-memory`.
    """
    tables = HostedTables(Limits(max_counter_bytes=2**23))
    options = TableOptions(admission=MinFrequency(2, counter_bytes=2**24))
    tables.create("t_user", TableSpec(4, torch.float32, SGD(lr=1.0), options))


@situation(
    "ValueError",
    "table 't_large' on server 127.0.0.1:...: a write may have at most 1048576 ids and"
    " 134217728 bytes (--max-write): split it",
)
def large_write(error_server: RecStoreServer) -> None:
    with RecStoreClient([error_server.address]) as client:
        client.init_data("t_large", (10, 1))
        client.update("t_large", torch.arange(2**20 + 1), torch.ones(2**20 + 1, 1))


@situation(
    "ValueError",
    "server 127.0.0.1:...: the name of a checkpoint on a server may have at most 200"
    " bytes, got 201: 'sss...' and 101 more characters",
)
def long_name(error_server: RecStoreServer) -> None:
    RecStoreClient([error_server.address]).save(201 * "s")


@situation("ValueError", "RecStoreClient() is closed")
def closed_client() -> None:
    client = RecStoreClient()
    client.close()
    client.pull("t_user", THREE)


@situation(
    "ValueError",
    "RecStoreClient(): the client was made in another process; make one in each",
)
def forked_client() -> None:
    client = RecStoreClient()
    raise_from_a_fork(lambda: client.pull("t_user", THREE))


@situation(
    "ValueError",
    "token would be sent to ps-1.example.org:7700 unencrypted: pass tls_ca as well",
)
def token_in_the_clear() -> None:
    RecStoreClient(["ps-1.example.org:7700"], token="secret")


@situation(
    "ValueError",
    "--listen 0.0.0.0:7700 can be reached from other machines: that needs --tls-cert"
    " and --tls-key and --token-file",
)
def open_to_all() -> None:
    ListenOptions("0.0.0.0:7700")


@situation(
    "TypeError",
    "a RecStoreClient cannot be copied or pickled: make one in each process",
)
def pickled_client() -> None:
    RecStoreClient().__reduce__()


@situation(
    "OSError", "cannot listen on 127.0.0.1:...: the address is in use or invalid"
)
def in_use(error_server: RecStoreServer, tmp_path: Path) -> None:
    """An address that is in use.

    Cause: another process listens on this address, or the host has no such address.
    Fix: choose another port. `--listen 127.0.0.1:0` selects a free port and prints it.
    """
    serve(
        ServerOptions(ListenOptions(error_server.address), tmp_path / "other"),
        lambda address: None,
    )


@situation(
    "BlockingIOError",
    "...: another server has this data directory (process ... on host ... has been"
    " serving it since ...): stop that one, or give this one another",
)
def same_directory(error_server: RecStoreServer) -> None:
    DataDirectory(error_server.data)


@situation(
    "AssertionError",
    "broken promise of a cold store: options can be pickled, and are compared by value",
)
def options_without_equality() -> None:
    check_cold_store(object())
