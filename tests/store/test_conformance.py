from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.redis_server import needs_redis, redis_server
from torchrec_recstore.options import RedisStore, RocksDBStore, SSDStore
from torchrec_recstore.store import (
    ColdStore,
    ColdStoreError,
    conformance,
    open_cold_store,
)
from torchrec_recstore.store.conformance import check_cold_store


def test_rocksdb(tmp_path: Path) -> None:
    check_cold_store(RocksDBStore(str(tmp_path / "cold")))


@pytest.mark.parametrize("shared", [None, "rows of several runs"])
def test_ssd(tmp_path: Path, shared: str | None) -> None:
    check_cold_store(SSDStore(str(tmp_path / "cold"), shared))


@needs_redis
def test_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, server.client() as client:
        client.set("of another", "program")
        check_cold_store(RedisStore(server.url, retry_seconds=0))
        assert client.keys() == [b"of another"]


@dataclass(frozen=True)
class DictStore:
    """The options of a third party's cold store.

    ``fault`` is the promise that the store breaks.
    """

    fault: str = ""


class _Dict:
    ascending_snapshots = True

    def __init__(self, fault: str, row_bytes: int) -> None:
        self.fault = fault
        self.row_bytes = row_bytes
        self.ids: dict[int, bytes] | None = {}

    def _rows(self) -> dict[int, bytes]:
        if self.ids is None:
            if self.fault == "open after close":
                return {}
            raise ColdStoreError("closed")
        return self.ids

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._rows()
        wanted = ids.tolist()
        if self.fault == "unsigned ids":
            wanted = [id % 2**63 for id in wanted]
        there = [
            rows[id]
            for id in (sorted(wanted) if self.fault == "order" else wanted)
            if id in rows
        ]
        if self.fault == "lost row" and len(there) > 5000:
            there[17] = bytes(self.row_bytes)
        data = _tensor(b"".join(there), self.row_bytes)
        found = torch.tensor([id in rows for id in wanted], dtype=torch.bool)
        return (found.int() if self.fault == "found dtype" else found), data

    def put(self, ids: Tensor, rows: Tensor) -> None:
        for id, tensor in zip(ids.tolist(), rows, strict=True):
            row = tensor.numpy().tobytes()
            if self.fault == "unsigned ids":
                id %= 2**63
            if self.fault == "text":
                row = row.split(b"\0")[0].ljust(self.row_bytes, b"\0")
            if self.fault != "first put stays" or id not in self._rows():
                self._rows()[id] = row

    def delete(self, ids: Tensor) -> None:
        rows = self._rows()
        for id in ids.tolist()[: -1 if self.fault == "lost delete" else None]:
            if self.fault == "strict delete":
                del rows[id]
            rows.pop(id, None)

    def scan(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self._rows()
        now = dict(rows) if self.fault != "live scan" else rows
        ids = sorted(now, reverse=self.fault == "descending scan")
        if self.fault == "repeating scan":
            ids += ids[:1]
        if self.fault == "short scan":
            ids = ids[:-1]
        if self.fault == "lazy scan":
            return self._lazy()
        batches = [ids[begin : begin + 1000] for begin in range(0, len(ids), 1000)]
        return (self._batch(batch, now) for batch in batches)

    def _lazy(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = dict(self._rows())
        if rows:
            yield self._batch(sorted(rows), rows)

    def _batch(self, ids: list[int], rows: dict[int, bytes]) -> tuple[Tensor, Tensor]:
        data = b"".join(rows.get(id, bytes(self.row_bytes)) for id in ids)
        return torch.tensor(ids, dtype=torch.int64), _tensor(data, self.row_bytes)

    def close(self) -> None:
        if self.ids is None and self.fault == "closes once":
            raise ColdStoreError("closed")
        if self.ids:
            self.ids.clear()
        self.ids = None


def _tensor(data: bytes, row_bytes: int) -> Tensor:
    return torch.tensor(bytearray(data), dtype=torch.uint8).view(-1, row_bytes)


_SHARED: dict[str, dict[int, bytes]] = {}


@open_cold_store.register
def _open_dict(options: DictStore, *, name: str, row_bytes: int) -> ColdStore:
    store = _Dict(options.fault, row_bytes)
    if options.fault == "one store a name":
        store.ids = _SHARED.setdefault(name, {})
    if options.fault == "short names":
        store.ids = _SHARED.setdefault(name[:13], {})
    return store


@pytest.mark.slow
def test_a_store_of_a_third_party() -> None:
    check_cold_store(DictStore())


@pytest.mark.parametrize(
    ("fault", "check", "promise"),
    [
        ("order", conformance._keeps_rows, "in the order of the ids"),
        ("unsigned ids", conformance._keeps_rows, "byte for byte"),
        ("text", conformance._keeps_rows, "byte for byte"),
        ("found dtype", conformance._keeps_rows, "all have rows|bool"),
        ("first put stays", conformance._overwrites, "a second put replaces"),
        ("lost delete", conformance._serves_several_threads, "deleted"),
        ("repeating scan", conformance._overwrites, "each once"),
        ("short scan", conformance._overwrites, "each once"),
        pytest.param(
            "lazy scan",
            conformance._snapshots_ascend,
            "at the time of its call",
            marks=pytest.mark.slow,
        ),
        ("live scan", conformance._snapshots_ascend, "at the time of its call"),
        pytest.param(
            "descending scan",
            conformance._snapshots_ascend,
            "ascending",
            marks=pytest.mark.slow,
        ),
        (
            "one store a name",
            conformance._keeps_stores_apart,
            "stores named 'conformance/0' and 'conformance/0' do not share rows",
        ),
        ("short names", conformance._keeps_stores_apart, "do not share rows"),
        (
            "open after close",
            conformance._closes,
            "get after close raises ColdStoreError",
        ),
    ],
)
def test_broken_stores_do_not_pass(
    fault: str, check: Callable[[object], None], promise: str
) -> None:
    """Runs only the check that finds the fault: all checks take half a second."""
    _SHARED.clear()
    assert check in conformance.CHECKS
    with pytest.raises(
        AssertionError, match=f"broken promise of a cold store: .*({promise})"
    ):
        check(DictStore(fault))


def test_all_checks_run() -> None:
    with pytest.raises(
        AssertionError,
        match="broken promise of a cold store: get returns a batch of 20,000 rows",
    ):
        check_cold_store(DictStore("lost row"))
    # this fault is found by the last check
    assert conformance.CHECKS[-1] is conformance._takes_big_batches


@pytest.mark.parametrize(
    ("fault", "check", "error"),
    [
        ("strict delete", conformance._deletes, KeyError),
        ("closes once", conformance._closes, ColdStoreError),
    ],
)
def test_errors_of_broken_stores_come_out(
    fault: str, check: Callable[[object], None], error: type[Exception]
) -> None:
    with pytest.raises(error):
        check(DictStore(fault))


def test_options_of_no_registered_type() -> None:
    with pytest.raises(TypeError, match="no cold store is registered for str"):
        open_cold_store("redis://", name="t", row_bytes=4)


_LAZY = """
import sys
from torchrec_recstore.options import RedisStore, RocksDBStore, ServerStore
from torchrec_recstore.store import open_cold_store
assert not {"rocksdict", "redis", "hiredis", "grpc", "google.protobuf"} & set(sys.modules)
sys.modules["rocksdict"] = sys.modules["redis"] = sys.modules["grpc"] = None  # so that their import fails
for options, package in (
    (RocksDBStore("/nowhere"), "rocksdict"),
    (RedisStore("redis://u:secret@h"), "redis hiredis"),
    (ServerStore("h:1", token="secret"), "grpcio protobuf"),
):
    try:
        open_cold_store(options, name="t", row_bytes=4)
    except ImportError as error:
        assert f"pip install {package} (" in str(error), error
        assert "secret" not in str(error)
    else:
        raise AssertionError(package)
"""


@pytest.mark.slow
def test_libraries_are_imported_when_a_store_is_opened() -> None:
    subprocess.run([sys.executable, "-c", _LAZY], check=True, timeout=60)
