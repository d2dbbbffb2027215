"""Tests of reads and updates of several tables by one request to each server."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.recstore_server import Proxy, RecStoreServer
from tests.redis_server import free_port
from tests.service.raw_connection import RawConnection
from torchrec_recstore.optim import Adagrad
from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service.client import streams
from torchrec_recstore_service.client.remote_groups import (
    ClientTable,
    RemotePooledGroup,
)
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire import row_ops, table_rows
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate
from torchrec_recstore_service.wire.table_rows import (
    Piece,
    TableRows,
    pieces,
    places_of_tables,
)

OPTIMIZER = Adagrad(lr=0.1)
TABLES = {  # dim, dtype
    "float": (8, torch.float32),
    "odd_half": (5, torch.float16),
    "odd_brain": (3, torch.bfloat16),
    "eight": (6, torch.int8),
    "odd_float": (1, torch.float32),
}


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[tuple[list[RecStoreServer], list[str]]]:
    """Returns two servers of a set, and the addresses of their metrics."""
    metrics = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    servers = [
        RecStoreServer(tmp_path / str(n), "--metrics", address)
        for n, address in enumerate(metrics)
    ]
    yield servers, metrics
    for server in servers:
        server.kill()


def calls(metrics: str) -> Counter[str]:
    """Returns the number of calls that a server has had, by method."""
    text = urllib.request.urlopen(f"http://{metrics}/metrics").read().decode()
    found = re.findall(
        r'recstore_calls_total\{method="(\w+)",outcome="ok"\} ([\d.]+)', text
    )
    return Counter({method: int(float(number)) for method, number in found})


def make(client: RecStoreClient, prefix: str) -> None:
    for name, (dim, dtype) in TABLES.items():
        client.init_data(
            prefix + name,
            (1000, dim),
            dtype,
            optimizer=OPTIMIZER,
            options=TableOptions(seed=2, missing="zeros"),
        )


def ids_of(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + list(TABLES).index(name))
    n = 0 if (step, name) in ((1, "odd_half"), (2, "odd_float")) else 50 + 7 * step
    return torch.unique(torch.randint(-150, 150, (n,), generator=generator))


def run(client: RecStoreClient, prefix: str) -> list[Tensor]:
    """Reads and updates all tables several times, and returns everything that was read."""
    make(client, prefix)
    found = []
    for step in range(4):
        ids = {name: ids_of(name, step) for name in TABLES}
        found += client.pull_each(
            [RowRead(prefix + name, some) for name, some in ids.items()]
        )
        found += client.pull_each(
            [RowRead(prefix + name, some, "zeros") for name, some in ids.items()]
        )
        updates = []
        for number, (name, some) in enumerate(ids.items()):
            grads = torch.randn(
                len(some),
                TABLES[name][0],
                generator=torch.Generator().manual_seed(step),
            )
            updates.append(
                RowUpdate(
                    prefix + name, some, grads, 0.02 * step if number % 2 else None
                )
            )
        client.update_each(updates)
    return [
        *found,
        *(client.pull(prefix + name, torch.arange(-150, 150)) for name in TABLES),
    ]


@pytest.mark.parametrize("by_memory", [True, False])
@pytest.mark.parametrize("small_parts", [False, True])
def test_results_are_those_of_tables_in_the_process(
    two_servers: list[RecStoreServer],
    monkeypatch: pytest.MonkeyPatch,
    by_memory: bool,
    small_parts: bool,
) -> None:
    prefix = f"{by_memory}{small_parts}_"
    expected = run(RecStoreClient(), prefix)
    if small_parts:  # of requests; replies have the size of the server
        for module in (streams, table_rows):
            monkeypatch.setattr(
                module,
                "pieces",
                lambda *sizes, **most: pieces(*sizes[:2], 200, most_tables=2),
            )
        monkeypatch.setattr(streams, "PART_BYTES", 100)
    with RecStoreClient(
        [each.address for each in two_servers], shared_memory=by_memory
    ) as client:
        assert all(
            torch.equal(*pair)
            for pair in zip(expected, run(client, prefix), strict=True)
        )
        assert client.stats(prefix + "float").steps == 4


def test_one_server_and_large_calls(own_server: RecStoreServer) -> None:
    dims = {"a": 5, "b": 64, "c": 3}
    ids = torch.arange(90_000)
    results: list[list[Tensor]] = []
    address = own_server.address
    for client in (
        RecStoreClient(),
        RecStoreClient([address], shared_memory=False),
        RecStoreClient([address]),
    ):
        for name, dim in dims.items():
            # otherwise, initial rows depend on the name
            options = TableOptions(initializer=ConstantInit(0.5))
            client.init_data(
                f"{name}{len(results)}",
                (9, dim),
                torch.float16 if dim % 2 else torch.float32,
                options=options,
            )
        names = {f"{name}{len(results)}": dim for name, dim in dims.items()}
        grads = {
            name: torch.linspace(-1, 1, len(ids) * dim).view(-1, dim)
            for name, dim in names.items()
        }
        client.update_each([RowUpdate(name, ids, grads[name]) for name in names])
        read = client.pull_each([RowRead(name, ids.flip(0)) for name in names])
        client.update_each(
            [RowUpdate(name, ids[:0], grads[name][:0]) for name in names]
        )
        assert [client.stats(name).steps for name in names] == [2, 2, 2]
        results.append(read)
        assert all(
            torch.equal(rows, client.pull(name, ids.flip(0)))
            for rows, name in zip(read, names, strict=True)
        )
    for read in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], read, strict=True))


def test_a_step_is_one_read_and_one_update_of_each_server(
    counted: tuple[list[RecStoreServer], list[str]],
) -> None:
    servers, metrics = counted
    for by_memory in (True, False):
        client = RecStoreClient(
            [server.address for server in servers], shared_memory=by_memory
        )
        tables = [
            ClientTable(
                client,
                f"{by_memory}{n}",
                (100, 4),
                torch.float32,
                OPTIMIZER,
                TableOptions(),
            )
            for n in range(26)
        ]
        group = RemotePooledGroup(tables, list(range(26)), "sum")
        before = [calls(address) for address in metrics]
        for step in range(3):
            ids = torch.arange(26 * 8) % 31 + step
            group(ids, torch.arange(26 * 8 + 1), train=True).sum().backward()
        assert counted_calls(metrics, before, 3) == [(3, 3), (3, 3)]
        group(ids, torch.arange(26 * 8 + 1), train=False)
        assert counted_calls(metrics, before, 4) == [(4, 3), (4, 3)]
        client.close()


def counted_calls(
    metrics: list[str], before: list[Counter[str]], pulls: int
) -> list[tuple[int, int]]:
    """The reads and updates since ``before``.

    A server counts a call after its reply, so the last one may be late.
    """
    for _ in range(200):
        later = [
            calls(address) - earlier
            for address, earlier in zip(metrics, before, strict=True)
        ]
        if all(each["Pull"] >= pulls and each["Write"] >= 3 for each in later):
            break
        time.sleep(0.05)
    return [(each["Pull"], each["Write"]) for each in later]


@pytest.mark.slow
def test_an_update_is_applied_once_whatever_is_cut(proxy: Proxy) -> None:
    expected = RecStoreClient()
    prefix = f"cut {proxy.address} "  # the tests by gRPC and by TCP share the server
    with RecStoreClient([proxy.address]) as client:
        make(expected, prefix)
        make(client, prefix)
        for step in range(20):
            updates = [
                RowUpdate(
                    prefix + name,
                    ids_of(name, step),
                    torch.ones(len(ids_of(name, step)), TABLES[name][0]),
                )
                for name in TABLES
            ]
            expected.update_each(updates)
            timer = threading.Timer(0.002 * (step % 7), proxy.cut)
            if step % 2:
                proxy.cut_after = 1 + 5 * step
            timer.start()
            client.update_each(updates)
            timer.join()
        proxy.cut_after = None
        for name in TABLES:
            whole = torch.arange(-150, 150)
            assert torch.equal(
                client.pull(prefix + name, whole), expected.pull(prefix + name, whole)
            )
            assert (
                client.stats(prefix + name).steps
                == expected.stats(prefix + name).steps
                == 20
            )


def test_an_update_of_which_a_part_fails_changes_no_row() -> None:
    client = RecStoreClient()
    client.init_data("roomy", (9, 4), optimizer=OPTIMIZER)
    client.init_data(
        "full", (9, 4), optimizer=OPTIMIZER, options=TableOptions(max_rows=2)
    )
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="full"):
        client.update_each(
            [
                RowUpdate("roomy", ids, torch.ones(3, 4)),
                RowUpdate("full", ids, torch.ones(3, 4)),
            ]
        )
    assert (client.stats("roomy").rows, client.stats("roomy").steps) == (0, 0)


def test_invalid_requests_change_nothing(server: RecStoreServer) -> None:
    client = RecStoreClient([server.address])
    for name in ("bad_a", "bad_b"):
        client.init_data(name, (9, 4), optimizer=OPTIMIZER)
    client.init_data(
        "bad_made", (9, 4), row_func=lambda shape, dtype: torch.ones(shape, dtype=dtype)
    )
    raw = RawConnection(server.address)
    a, b, made = (
        pb.TableIds(table=name, ids=1) for name in ("bad_a", "bad_b", "bad_made")
    )
    huge = pb.TableIds(table="bad_b", ids=2**64 - 1)

    def read(*tables: pb.TableIds, **fields: object) -> pb.SegmentRequest:
        return pb.SegmentRequest(
            pull=pb.PullHeader(epoch=raw.epoch, tables=tables, **fields), ids=16
        )  # type: ignore[arg-type]

    def update(
        number: int,
        *tables: pb.TableIds,
        rows: int = 32,
        more: int = 0,
        **fields: object,
    ) -> pb.SegmentRequest:
        header = raw.header(number, ids=2, tables=tables, **{"table": "", **fields})
        return pb.SegmentRequest(
            write=header, ids=16, rows=rows, initial_ids=more, initial_rows=2 * more
        )

    for request in (
        read(a),
        read(a, huge),
        read(a, pb.TableIds(table="none", ids=1)),
        read(a, b, want=1),
        read(a, b, table="bad_a"),
        read(a, made),
        update(1, a),
        update(2, a, huge),
        update(3, a, a),
        update(4, a, made),
        update(5, a, b, rows=31),
        update(6, a, b, kind=1),
        update(7, a, b, kind=3),
        update(8, a, b, table="bad_a"),
        update(9, a, b, more=8),
        update(10, a, pb.TableIds(table="bad_b", ids=1, learning_rate=-1.0)),
        update(11, a, pb.TableIds(table="bad_b", ids=1, learning_rate=float("nan"))),
    ):
        reply = raw.send(request.SerializeToString())
        assert reply is not None
        assert reply.code, request
    assert [client.stats(name).steps for name in ("bad_a", "bad_b", "bad_made")] == [
        0,
        0,
        0,
    ]
    raw.memory[:16].view(torch.int64)[:] = torch.tensor([3, 4])
    raw.memory[64:96].view(torch.float32)[:] = 1.0
    good = raw.send(update(12, a, b).SerializeToString())
    assert good is not None
    assert not good.code
    assert [client.stats(name).rows for name in ("bad_a", "bad_b")] == [1, 1]


def test_distinct_ids_of_each_table() -> None:
    generator = torch.Generator().manual_seed(1)
    for spread in (1, 5, 300, 2**40):
        counts = [0, 3000, 1, 0, 517, 0]
        ids = torch.randint(-spread, spread, (sum(counts),), generator=generator)
        distinct, places, sizes = row_ops.ids_distinct(ids, counts)
        for some, own, at in zip(
            ids.split(counts),
            distinct.split(sizes.tolist()),
            places.split(counts),
            strict=True,
        ):
            assert torch.equal(own[at], some)
            assert own.tolist() == list(dict.fromkeys(some.tolist()))


def test_parts_have_all_rows_in_order() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        n = int(torch.randint(1, 6, (1,), generator=generator))
        row_bytes = [
            2 * each for each in torch.randint(0, 9, (n,), generator=generator).tolist()
        ]
        counts = torch.randint(0, 12, (n,), generator=generator).tolist()
        call = TableRows(
            [f"t{number}" for number in range(n)],
            torch.arange(sum(counts)),
            counts,
            [
                torch.zeros(count, size, dtype=torch.uint8)
                for size, count in zip(row_bytes, counts, strict=True)
            ],
        )
        most = int(torch.randint(1, 60, (1,), generator=generator))
        parts = list(pieces(row_bytes, counts, most, most_ids=9, most_tables=2))
        begins, _ = places_of_tables(row_bytes, counts)
        there = [
            (table, row)
            for part in parts
            for table, begin, end in part
            for row in range(begin, end)
        ]
        assert there == [
            (table, row) for table, count in enumerate(counts) for row in range(count)
        ]
        for part in parts:
            assert len(part) <= 2
            _, place, bytes_of_part = call.part(part)
            assert place % 4 == 0 or not part
            own, size = places_of_tables(
                [row_bytes[p.table] for p in part], [p.end - p.begin for p in part]
            )
            assert bytes_of_part == size
            assert size <= max(most, 2 * max(row_bytes))
            for piece, begin in zip(part, own, strict=True):
                assert (
                    begins[piece.table] + piece.begin * row_bytes[piece.table]
                    == place + begin
                )
    assert list(pieces([4, 4], [0, 0], 8)) == [[]]
    assert list(pieces([4], [3], 8)) == [[Piece(0, 0, 2)], [Piece(0, 2, 3)]]
