from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.redis_server import (
    RedisServer,
    free_port,
    needs_cluster,
    needs_redis,
    redis_cluster,
    redis_server,
    wait_for_cluster,
)
from torchrec_recstore.options import RedisStore
from torchrec_recstore.store import (
    ColdStore,
    ColdStoreError,
    open_cold_store,
    redis_store,
)
from torchrec_recstore.store.conformance import check_cold_store

ROW_BYTES = 140
IDS = torch.arange(-1500, 1500) * 7919
pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that loses all keys when it restarts."""
    with redis_server(tmp_path / "server") as started:
        yield started


def _open(url: str, retry_seconds: float = 0.3) -> ColdStore:
    return open_cold_store(
        RedisStore(url, retry_seconds=retry_seconds),
        name="table/0",
        row_bytes=ROW_BYTES,
    )


def _rows(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, 256, (len(IDS), ROW_BYTES), dtype=torch.uint8, generator=generator
    )


def _check(store: ColdStore, rows: Tensor) -> None:
    found, got = store.get(IDS)
    assert found.all()
    assert torch.equal(got, rows)
    batches = list(store.scan())
    assert torch.equal(torch.cat([ids for ids, _ in batches]), IDS)
    assert torch.equal(torch.cat([some for _, some in batches]), rows)


def _expect_lost(store: ColdStore, message: str) -> None:
    missing = torch.tensor([10**12])
    for ids in (IDS, missing):
        with pytest.raises(ColdStoreError, match=message):
            store.get(ids)
    for _ in range(2):  # the first put must not hide that rows have been lost
        with pytest.raises(ColdStoreError, match=message):
            store.put(missing, _rows()[:1])
    with pytest.raises(ColdStoreError, match=message):
        store.delete(missing)
    with pytest.raises(ColdStoreError, match=message):
        list(store.scan())


def test_a_server_that_stops_is_named_and_used_again(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--appendonly", "yes") as server:
        store = _open(server.url)
        rows = _rows()
        store.put(IDS, rows)
        server.stop()
        for call in (
            lambda: store.get(IDS),
            lambda: store.put(IDS, rows),
            lambda: store.scan(),
        ):
            begin = time.monotonic()
            with pytest.raises(
                ColdStoreError,
                match=f"{server.url}.*cannot be reached for 0.3 s: .*refused",
            ):
                call()
            assert time.monotonic() - begin >= 0.3
        server.start()
        _check(store, rows)
        store.put(IDS, _rows(1))
        _check(store, _rows(1))
        store.close()


@pytest.mark.slow
def test_a_call_outlasts_a_restart(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--appendonly", "yes") as server:
        store = _open(server.url, retry_seconds=20)
        rows = _rows()
        store.put(IDS, rows)
        for call in (
            lambda: store.put(IDS, rows),
            lambda: store.delete(IDS[:0]),
            lambda: _check(store, rows),
        ):
            server.stop()
            restart = threading.Timer(0.2, server.start)
            restart.start()
            call()
            restart.join()
        _check(store, rows)
        store.close()


def test_a_server_that_hangs(server: RedisServer) -> None:
    store = _open(server.url + "?socket_timeout=0.2")
    rows = _rows()
    store.put(IDS, rows)
    server.pause()
    with pytest.raises(
        ColdStoreError, match=f"{server.url}.*cannot be reached.*Timeout"
    ):
        store.put(IDS, rows)
    server.resume()
    _check(store, rows)
    store.put(IDS, _rows(1))
    _check(store, _rows(1))
    store.close()


def test_no_server_at_all() -> None:
    url = f"redis://someone:secret@127.0.0.1:{free_port()}"
    with pytest.raises(ColdStoreError, match="cannot be reached") as error:
        _open(url, retry_seconds=0)
    assert "secret" not in str(error.value)


def test_a_server_that_restarts_empty_has_lost_the_rows(server: RedisServer) -> None:
    store = _open(server.url)
    store.put(IDS, _rows())
    server.stop()
    server.start()
    _expect_lost(store, f"{server.url}.*has lost its rows")
    store.close()
    again = _open(server.url)
    again.put(IDS, _rows())
    _check(again, _rows())
    again.close()


def test_flushed_keys_are_lost_rows(server: RedisServer) -> None:
    store = _open(server.url)
    store.put(IDS, _rows())
    with server.client() as client:
        client.flushall()
    _expect_lost(store, "has lost its rows.*flushed")
    store.close()


@pytest.mark.parametrize("change", ["put", "delete"])
def test_a_server_that_comes_back_with_older_rows_has_lost_writes(
    server: RedisServer, change: str
) -> None:
    store = _open(server.url)
    store.put(IDS, _rows())
    with server.client() as client:
        client.save()
    _check(store, _rows())
    if change == "put":
        store.put(IDS[:1], _rows(1)[:1])
    else:
        store.delete(IDS[:1])
    server.kill()
    server.start()
    _expect_lost(store, "has lost its last writes")
    store.close()


def test_a_full_server_loses_nothing_and_is_no_end(tmp_path: Path) -> None:
    with redis_server(
        tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "noeviction"
    ) as server:
        store = _open(server.url)
        rows = _rows()
        store.put(IDS, rows)
        begin = 10**9

        def fill() -> None:
            nonlocal begin
            for begin in range(10**9, 10**9 + 10**6, len(IDS)):
                store.put(torch.arange(begin, begin + len(IDS)), rows)

        with pytest.raises(
            ColdStoreError, match=f"{server.url}.*used memory > 'maxmemory'"
        ):
            fill()
        assert torch.equal(store.get(IDS)[1], rows)
        with server.client() as client:
            client.config_set("maxmemory", "50mb")
        last = torch.arange(begin, begin + len(IDS))
        store.put(last, rows)
        assert torch.equal(store.get(last)[1], rows)
        store.close()


@pytest.mark.parametrize(
    ("policy", "maxmemory", "refused"),
    [
        ("allkeys-lru", "100mb", True),
        ("allkeys-random", "100mb", True),
        ("allkeys-lru", "0", False),
        ("volatile-lru", "100mb", False),
        ("noeviction", "100mb", False),
    ],
)
def test_a_server_that_evicts_is_refused(
    server: RedisServer, policy: str, maxmemory: str, refused: bool
) -> None:
    with server.client() as client:
        client.config_set("maxmemory", maxmemory)
        client.config_set("maxmemory-policy", policy)
        if refused:
            with pytest.raises(
                ColdStoreError,
                match=f"{server.url}.*maxmemory-policy is {policy}.*noeviction",
            ):
                _open(server.url)
            assert client.dbsize() == 0
        else:
            _open(server.url).close()


def _every_call_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "_CHECK_SECONDS", 0.0)


def test_a_server_that_is_set_to_evict_while_it_is_used_is_refused(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _every_call_checks(monkeypatch)
    store = _open(server.url)
    rows = _rows()
    store.put(IDS, rows)
    with server.client() as client:
        client.config_set("maxmemory", "100mb")
        _check(store, rows)
        for policy in ("allkeys-lru", "allkeys-random"):
            client.config_set("maxmemory-policy", policy)
            for call in (
                lambda: store.get(IDS),
                lambda: store.put(IDS, _rows(1)),
                lambda: store.delete(IDS),
                lambda: list(store.scan()),
            ):
                with pytest.raises(
                    ColdStoreError,
                    match=f"{server.url}.*maxmemory-policy is {policy}.*noeviction",
                ):
                    call()
        # no key has been evicted, so the store works again
        for policy in ("noeviction", "volatile-lru"):
            client.config_set("maxmemory-policy", policy)
            _check(store, rows)
    store.put(IDS, _rows(1))
    _check(store, _rows(1))
    store.close()


@pytest.mark.parametrize("then", ["allkeys-lru", "noeviction"])
def test_a_server_that_has_evicted_rows_is_of_no_use(
    server: RedisServer, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _every_call_checks(monkeypatch)
    store = _open(server.url)
    store.put(IDS, _rows())
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 200_000)
        client.set("another's", b"1")
        assert client.info("stats")["evicted_keys"] > 0
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", then)
    for _ in range(2):
        for call in (
            lambda: store.get(IDS[:1]),
            lambda: store.put(IDS[:1], _rows()[:1]),
        ):
            with pytest.raises(
                ColdStoreError,
                match=(
                    rf"{server.url}.*has lost its rows: it evicted \d+ keys.*checkpoint"
                ),
            ):
                call()
    store.close()
    again = _open(server.url) if then == "noeviction" else None
    if again is not None:
        again.put(IDS, _rows())
        _check(again, _rows())
        again.close()


def test_keys_of_others_may_be_evicted(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _every_call_checks(monkeypatch)
    with server.client() as client:
        client.config_set("maxmemory-policy", "volatile-ttl")
        store = _open(server.url)
        store.put(IDS, _rows())
        for number in range(2000):
            client.set(f"another's {number}", b"x" * 100, ex=3600)
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 100_000)
        client.set("one more", b"1")
        assert client.info("stats")["evicted_keys"] > 0
        client.config_set("maxmemory", "100mb")
        _check(store, _rows())
        store.put(IDS, _rows(1))
        client.config_set("maxmemory-policy", "noeviction")
        _check(store, _rows(1))
    store.close()


def test_the_policy_is_asked_for_now_and_then_and_after_a_failure(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path, "--appendonly", "yes") as server:
        store = _open(server.url, retry_seconds=60)
        store.put(IDS, _rows())
        for _ in range(20):
            store.get(IDS)
        with server.client() as client:
            times = client.info("commandstats")["cmdstat_info"]["calls"]
        assert times < 10  # the policy is not checked in every call
        server.stop()
        restart = threading.Timer(
            0.5,
            lambda: server.start(
                "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"
            ),
        )
        restart.start()
        with pytest.raises(ColdStoreError, match="maxmemory-policy is allkeys-lru"):
            store.get(IDS)
        restart.join()
        store.close()


def test_a_user_with_the_rights_that_are_documented(server: RedisServer) -> None:
    with server.client() as client:
        rights = "on >secret ~recstore:* -@all +get +set +mget +mset +unlink +scan"
        client.execute_command("ACL", "SETUSER", "trainer", *rights.split())
    store = _open(server.url.replace("//", "//trainer:secret@"))
    store.put(IDS, _rows())
    _check(store, _rows())
    store.delete(IDS[:10])
    store.close()
    with server.client() as client:
        assert client.dbsize() == 0


def test_passwords_are_taken_and_not_told(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://:sec%2Fret@127.0.0.1:{port}"
    with redis_server(
        tmp_path, "--requirepass", "sec/ret", port=port, ping=url
    ) as server:  # type: ignore[arg-type]
        store = _open(url + "/3")
        store.put(IDS, _rows())
        _check(store, _rows())
        with server.client() as client:
            assert client.info("keyspace")["db3"]["keys"] == len(IDS) + 1
        server.stop()
        with pytest.raises(ColdStoreError, match=f"127.0.0.1:{port}/3") as error:
            store.get(IDS)
        assert "sec" not in str(error.value).replace(" seconds", "")
        server.start()
        for wrong in ("wrong", "wro:ng", "wrong@"):
            with pytest.raises(ColdStoreError, match=f"127.0.0.1:{port}") as error:
                # A wrong password is not tried again: pytest would not wait for it.
                _open(f"redis://:{wrong}@127.0.0.1:{port}", retry_seconds=3600)
            assert "wro" not in str(error.value)
        with pytest.raises(ColdStoreError, match="refuses access"):
            _open(f"redis://127.0.0.1:{port}", retry_seconds=30)


def test_a_url_that_cannot_be_read_tells_no_password() -> None:
    for url in (
        "redis://user:secret@127.0.0.1:secret",
        "redis://127.0.0.1:6379/0?socket_timeout=secret",
    ):
        with pytest.raises(ColdStoreError, match="the url cannot be parsed") as error:
            _open(url, retry_seconds=0)
        assert "user:" not in str(error.value)
        assert error.value.__cause__ is None


def test_answers_that_are_decoded_are_refused(server: RedisServer) -> None:
    with pytest.raises(ColdStoreError, match="decode_responses"):
        _open(server.url + "?decode_responses=True")


def test_unix_socket(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    socket = tmp_path_factory.mktemp("s") / "redis.sock"
    with redis_server(tmp_path, "--unixsocket", str(socket)):
        store = _open(f"unix://{socket}?db=1")
        store.put(IDS, _rows())
        _check(store, _rows())
        store.close()


@pytest.mark.skipif(
    shutil.which("openssl") is None,
    reason="openssl, which makes the certificate, is not here",
)
def test_tls(tmp_path: Path) -> None:
    key, certificate, port = tmp_path / "key.pem", tmp_path / "cert.pem", free_port()
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    make += [
        "-keyout",
        str(key),
        "-out",
        str(certificate),
        "-subj",
        "/CN=redis",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run(make, check=True, capture_output=True)
    tls = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    tls += [
        "--tls-key-file",
        str(key),
        "--tls-cert-file",
        str(certificate),
        "--tls-ca-cert-file",
        str(certificate),
    ]
    url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}"
    with redis_server(tmp_path / "server", *tls, ping=url):
        store = _open(url)
        store.put(IDS, _rows())
        _check(store, _rows())
        store.close()
        with pytest.raises(
            ColdStoreError, match=f"rediss://127.0.0.1:{port}'.*certificate"
        ):
            _open(f"rediss://127.0.0.1:{port}", retry_seconds=0)


def test_closing_removes_the_rows_of_one_store_alone(server: RedisServer) -> None:
    one, two = _open(server.url), _open(server.url)
    one.put(IDS, _rows())
    two.put(IDS, _rows(1))
    one.close()
    _check(two, _rows(1))
    with server.client() as client:
        assert client.dbsize() == len(IDS) + 1
    server.stop()
    two.close()


def test_a_scan_gives_each_id_once_though_the_server_repeats(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _open(server.url)
    store.put(IDS, _rows())
    with server.client() as client:
        scan = client.scan_iter
        keys = [key for key in scan() if len(key) > 30]
        # Redis repeats keys while its hash table shrinks, but a test cannot make this
        # happen.
        monkeypatch.setattr(
            type(client), "scan_iter", lambda self, **how: iter(keys + keys[::3])
        )
        _check(store, _rows())
    monkeypatch.undo()
    store.close()


# of what a cluster does, the tests of one server have all but the moves of slots
@pytest.mark.slow
@needs_cluster
def test_a_cluster_conforms_and_its_nodes_stop_and_its_slots_move(
    tmp_path: Path,
) -> None:
    with redis_cluster(tmp_path) as nodes:
        check_cold_store(RedisStore(f"redis+cluster://127.0.0.1:{nodes[1].port}"))
        assert [node.client().dbsize() for node in nodes] == [0, 0, 0]

        store = _open(f"redis+cluster://127.0.0.1:{nodes[0].port}", retry_seconds=0.5)
        rows = _rows()
        store.put(IDS, rows)
        per_node = [node.client().dbsize() for node in nodes]
        assert sum(per_node) == len(IDS) + 128
        assert min(per_node) > len(IDS) / 10

        nodes[2].stop()
        with pytest.raises(
            ColdStoreError, match=f"cluster://127.0.0.1:{nodes[0].port}"
        ):
            store.get(IDS)
        nodes[2].start()
        for node in nodes:
            wait_for_cluster(node)
        _check(store, rows)

        _move_slots(nodes[0], nodes[1], 10)
        store.put(IDS, _rows(1))
        _check(store, _rows(1))

        nodes[1].kill()
        shutil.rmtree(nodes[1].directory / "appendonlydir")
        nodes[1].start()
        for node in nodes:
            wait_for_cluster(node)
        with pytest.raises(ColdStoreError, match="has lost its rows"):
            store.get(IDS)
        store.close()


def _move_slots(source: RedisServer, target: RedisServer, n: int) -> None:
    """Moves the first ``n`` slots with keys to another node, while clients still expect
    them on the old node.
    """
    with source.client() as from_client, target.client() as to_client:
        from_id, to_id = (
            client.execute_command("CLUSTER MYID").decode()
            for client in (from_client, to_client)
        )
        # keys are bytes
        from_client.set_response_callback(
            "CLUSTER GETKEYSINSLOT", lambda keys, **_: keys
        )
        moved = 0
        for slot in range(5461):
            if moved == n or not from_client.execute_command(
                "CLUSTER COUNTKEYSINSLOT", slot
            ):
                continue
            to_client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", from_id)
            from_client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", to_id)
            while keys := from_client.execute_command(
                "CLUSTER GETKEYSINSLOT", slot, 1000
            ):
                from_client.execute_command(
                    "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys
                )
            for client in (to_client, from_client):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", to_id)
            moved += 1
        assert moved
