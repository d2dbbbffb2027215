"""What bounds a table: which options make sense, and which say so."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from torchrec_recstore.network import host_of
from torchrec_recstore.options import (
    LFU,
    LRU,
    MAX_INIT_ROWS,
    Expiry,
    MinFrequency,
    RedisStore,
    RocksDBStore,
    Scored,
    Servers,
    ServerStore,
    TableOptions,
    UniformInit,
    default_initializer,
    resident_rows,
    shard_options,
)

EVERYTHING = TableOptions(
    max_rows=10,
    eviction=LFU(half_life_steps=100),
    expiry=Expiry(5),
    admission=MinFrequency(3, counter_bytes=2**12),
    cold_store=RocksDBStore("/cold"),
    left_ids=7,
    device_rows=3,
)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: TableOptions(max_rows=0),
            ValueError,
            r"TableOptions\.max_rows must be at least 1, got 0",
        ),
        (
            lambda: TableOptions(max_rows=10.0),
            TypeError,
            r"TableOptions\.max_rows must be an int, got float",
        ),
        (
            lambda: TableOptions(max_rows=True),
            TypeError,
            r"TableOptions\.max_rows must be an int, got bool",
        ),
        (
            lambda: TableOptions(expected_rows=0),
            ValueError,
            r"TableOptions\.expected_rows must be at least 1",
        ),
        (
            lambda: TableOptions(eviction=LRU()),
            ValueError,
            r"TableOptions\.eviction needs max_rows",
        ),
        (
            lambda: TableOptions(cold_store=RocksDBStore("x")),
            ValueError,
            r"TableOptions\.cold_store needs max_rows",
        ),
        (
            lambda: TableOptions(max_rows=1, eviction="lru"),
            TypeError,
            r"TableOptions\.eviction must be LRU or LFU",
        ),
        (
            lambda: TableOptions(max_rows=1, eviction=LRU),
            TypeError,
            r"TableOptions\.eviction must be .*got type",
        ),
        (
            lambda: TableOptions(expiry=5),
            TypeError,
            r"TableOptions\.expiry must be Expiry, got int",
        ),
        (
            lambda: TableOptions(admission=2),
            TypeError,
            r"TableOptions\.admission must be MinFrequency, got int",
        ),
        (
            lambda: TableOptions(max_rows=1, cold_store=[]),
            TypeError,
            r"TableOptions\.cold_store must be hashable",
        ),
        (lambda: LFU(0), ValueError, r"LFU\.half_life_steps must be at least 1, got 0"),
        (
            lambda: LFU(1.5),
            TypeError,
            r"LFU\.half_life_steps must be an int, got float",
        ),
        (lambda: Expiry(0), ValueError, r"Expiry\.steps must be at least 1, got 0"),
        (lambda: Expiry("5"), TypeError, r"Expiry\.steps must be an int, got str"),
        (
            lambda: MinFrequency(0),
            ValueError,
            r"MinFrequency\.count must be at least 1, got 0",
        ),
        (
            lambda: MinFrequency(256),
            ValueError,
            r"MinFrequency\.count must be at most 255, got 256",
        ),
        (
            lambda: MinFrequency(2.0),
            TypeError,
            r"MinFrequency\.count must be an int, got float",
        ),
        (
            lambda: MinFrequency(2, 2**9),
            ValueError,
            r"MinFrequency\.counter_bytes must be at least 1024, got 512",
        ),
        (
            lambda: MinFrequency(2, 5000),
            ValueError,
            r"MinFrequency\.counter_bytes must be a power of two",
        ),
        (
            lambda: MinFrequency(2, 2**35),
            ValueError,
            r"MinFrequency\.counter_bytes must be .*at most 2\*\*34",
        ),
        (lambda: RocksDBStore(""), ValueError, r"RocksDBStore\.path must not be empty"),
        (
            lambda: RocksDBStore(3),
            TypeError,
            r"RocksDBStore\.path must be a str, got int",
        ),
        (
            lambda: RedisStore("http://host"),
            ValueError,
            r"RedisStore\.url must begin with redis://",
        ),
        (lambda: RedisStore(3), TypeError, r"RedisStore\.url must be a str, got int"),
        (
            lambda: RedisStore("redis://host", -1.0),
            ValueError,
            r"RedisStore\.retry_seconds must be at least 0",
        ),
        (
            lambda: RedisStore("redis://host", float("inf")),
            ValueError,
            r"RedisStore\.retry_seconds must be finite",
        ),
        (
            lambda: ServerStore(["host:1"]),
            TypeError,
            r"ServerStore\.servers must be a str, got list",
        ),
        (
            lambda: ServerStore(""),
            ValueError,
            r"ServerStore\.servers must not be empty",
        ),
        (
            lambda: ServerStore("host"),
            ValueError,
            r"ServerStore\.servers must be HOST:PORT, got 'host'",
        ),
        (
            lambda: ServerStore("host:1,"),
            ValueError,
            r"ServerStore\.servers must be HOST:PORT, got ''",
        ),
        (
            lambda: ServerStore("host:0"),
            ValueError,
            r"ServerStore\.servers must be HOST:PORT, got 'host:0'",
        ),
        (
            lambda: ServerStore("host:65536"),
            ValueError,
            r"ServerStore\.servers must be .*'host:65536'",
        ),
        (
            lambda: ServerStore("a\0b:80"),
            ValueError,
            r"ServerStore\.servers must be HOST:PORT, got 'a\\x00b:80'",
        ),
        (
            lambda: ServerStore("h:1, h:1"),
            ValueError,
            r"ServerStore\.servers must differ, got h:1, h:1",
        ),
        (
            lambda: ServerStore("h:1", shared=True),
            TypeError,
            r"ServerStore\.shared must be a str, got bool",
        ),
        (
            lambda: ServerStore("h:1", shared=""),
            ValueError,
            r"ServerStore\.shared must not be empty",
        ),
        (
            lambda: ServerStore("h:1", token=7),
            TypeError,
            r"ServerStore\.token must be a str, got int",
        ),
        (
            lambda: ServerStore("h:1", tls_ca=7),
            TypeError,
            r"ServerStore\.tls_ca must be a str, got int",
        ),
        (
            lambda: ServerStore("h:1", timeout_s=0),
            ValueError,
            r"ServerStore\.timeout_s must be positive, got 0",
        ),
        (
            lambda: ServerStore("h:1", timeout_s=math.nan),
            ValueError,
            r"ServerStore\.timeout_s must be finite, got nan",
        ),
        (
            lambda: ServerStore("h:1", timeout_s="3"),
            TypeError,
            r"ServerStore\.timeout_s must be a number, got str",
        ),
        (
            lambda: TableOptions(
                max_rows=1, expiry=Expiry(5), cold_store=ServerStore("h:1", shared="a")
            ),
            ValueError,
            r"TableOptions\.expiry cannot be used with a shared cold store",
        ),
        (
            lambda: TableOptions(left_ids=0),
            ValueError,
            r"TableOptions\.left_ids must be at least 1, got 0",
        ),
        (
            lambda: TableOptions(left_ids=2**31),
            ValueError,
            r"TableOptions\.left_ids must be at most 1073741824",
        ),
        (
            lambda: TableOptions(left_ids=1.5),
            TypeError,
            r"TableOptions\.left_ids must be an int, got float",
        ),
        (
            lambda: TableOptions(device_rows=-1),
            ValueError,
            r"TableOptions\.device_rows must be at least 0, got -1",
        ),
        (
            lambda: TableOptions(device_rows=2**31),
            ValueError,
            r"TableOptions\.device_rows must be at most 1073741824",
        ),
        (
            lambda: TableOptions(device_rows=0.1),
            TypeError,
            r"TableOptions\.device_rows must be an int, got float",
        ),
        (
            lambda: TableOptions(device_rows=5, servers=Servers(["h:1"])),
            ValueError,
            r"TableOptions\.device_rows cannot be used on servers, .* device_rows=0",
        ),
        (
            lambda: TableOptions(
                max_rows=1, left_ids=5, cold_store=ServerStore("h:1", shared="a")
            ),
            ValueError,
            (
                r"TableOptions\.left_ids cannot be used with a shared cold store: other"
                r" jobs remove its rows, too"
            ),
        ),
        (
            lambda: TableOptions(
                max_rows=1, eviction=Scored(), cold_store=ServerStore("h:1", shared="a")
            ),
            ValueError,
            (
                r"TableOptions\.eviction=Scored\(\) cannot be used with a shared cold"
                r" store: other jobs give"
            ),
        ),
        (
            lambda: TableOptions(left_ids=5, servers=Servers(["h:1"])),
            ValueError,
            r"TableOptions\.left_ids cannot be used on servers, which keep no record",
        ),
        (
            lambda: TableOptions(
                max_rows=1, eviction=Scored(), servers=Servers(["h:1"])
            ),
            ValueError,
            (
                r"TableOptions\.eviction=Scored\(\) cannot be used on servers, which"
                r" have no call that sets scores"
            ),
        ),
        (
            lambda: TableOptions(
                max_rows=1, eviction=LFU(count="occurrences"), servers=Servers(["h:1"])
            ),
            ValueError,
            (
                r'TableOptions\.eviction=LFU\(count="occurrences"\) cannot be used on'
                r" servers, because clients send"
            ),
        ),
    ],
)
def test_what_makes_no_sense_is_named(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_all_of_them_at_once_travel_with_the_plan() -> None:
    assert pickle.loads(pickle.dumps(EVERYTHING)) == EVERYTHING
    assert hash(EVERYTHING) == hash(pickle.loads(pickle.dumps(EVERYTHING)))
    assert TableOptions(max_rows=10, eviction=LFU(half_life_steps=99)) != EVERYTHING


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@host:7000/3",
        "rediss+cluster://:secret@host?password=secret",
    ],
)
def test_secrets_of_a_url_are_not_shown(url: str) -> None:
    store = RedisStore(url)
    assert "secret" not in repr(store)
    assert "secret" not in repr(TableOptions(max_rows=1, cold_store=store))
    assert "host" in repr(store)
    with pytest.raises(ValueError, match=r"RedisStore\.url") as raised:
        RedisStore(url.replace("redis", "http"))
    assert "secret" not in str(raised.value)


def test_a_token_is_not_shown() -> None:
    store = ServerStore("host:1,other:2", token="secret", tls_ca="ca.pem")
    assert store.addresses == ("host:1", "other:2")
    assert pickle.loads(pickle.dumps(store)) == store
    assert hash(store) == hash(
        ServerStore("host:1,other:2", token="secret", tls_ca="ca.pem")
    )
    assert store != ServerStore("host:1,other:2", token="another", tls_ca="ca.pem")
    assert "secret" not in repr(TableOptions(max_rows=1, cold_store=store))
    with pytest.raises(
        ValueError, match=r"ServerStore\.token must be of printable ASCII"
    ) as raised:
        ServerStore("host:1", token="secret\n")
    assert "secret" not in str(raised.value)


def test_a_bound_on_rows_is_a_bound_on_what_is_expected() -> None:
    assert resident_rows(TableOptions(), None) == MAX_INIT_ROWS
    assert resident_rows(TableOptions(max_rows=100), None) == 100
    assert resident_rows(TableOptions(max_rows=100, expected_rows=50), 2**40) == 50
    assert resident_rows(TableOptions(expected_rows=5000), 10) == 5000


def test_shards_divide_rows_on_devices() -> None:
    options = TableOptions(device_rows=7)
    assert shard_options(options, None, "t").device_rows == 7
    parts = [shard_options(options, (3, rank), "t").device_rows for rank in range(3)]
    assert parts == [3, 3, 3]
    unset = shard_options(TableOptions(max_rows=9), (2, 0), "t")
    assert (unset.max_rows, unset.device_rows) == (5, None)
    off = shard_options(TableOptions(device_rows=0, max_rows=9), (2, 0), "t")
    assert (off.max_rows, off.device_rows) == (5, 0)


def test_no_more_rows_are_on_a_device_than_in_memory() -> None:
    options = TableOptions(max_rows=9, device_rows=100)
    assert shard_options(options, None, "t").device_rows == 9
    parts = [shard_options(options, (2, rank), "t").device_rows for rank in range(2)]
    assert parts == [5, 4]


def test_a_bound_does_not_change_what_is_learned() -> None:
    assert default_initializer(TableOptions(max_rows=4)) == default_initializer(
        TableOptions()
    )
    assert default_initializer(TableOptions(max_rows=4), 100) == UniformInit(-0.1, 0.1)


@pytest.mark.parametrize(
    "host", ["h", "my_host-1.example.org", "10.0.0.1", "[::1]", "::1", "[fe80::1%eth0]"]
)
def test_the_host_of_an_address(host: str) -> None:
    assert host_of(f"{host}:80") == host


@pytest.mark.parametrize(
    "address",
    ["unix:/run/x:80", "../x:80", "h:80\n", "h:\u0661", ":80", "h:99999", "a b:80"],
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        host_of(address)
