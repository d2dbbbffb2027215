"""Tests of the client with tables in its own process."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrec_recstore import RecStoreClient
from torchrec_recstore.optim import SGD, RowWiseAdagrad
from torchrec_recstore.options import (
    LRU,
    ConstantInit,
    MinFrequency,
    RocksDBStore,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.store import Table
from torchrec_recstore_service.client.plain_client import _THREADS
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire.row_requests import InitialRows

DIM = 4
IDS = torch.tensor([5, -(2**63), 2**63 - 1, 0, -1])


def normal(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype) + torch.randn(shape, dtype=dtype)


def zeros(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def client_with(**arguments: object) -> RecStoreClient:
    client = RecStoreClient(private=True)
    client.init_data("t", (100, DIM), **arguments)  # type: ignore[arg-type]
    return client


def test_the_seven_calls() -> None:
    with RecStoreClient() as client:
        client.init_data("user", (1_000_000, DIM), optimizer=SGD(lr=0.5))
        ids = torch.tensor([7, -1, 7])
        rows = client.pull("user", ids)
        assert rows.shape == (3, DIM)
        assert not client.exists("user", ids).any()
        client.update("user", ids, torch.ones(3, DIM))
        assert torch.equal(
            client.pull("user", ids[:2]), rows[:2] - torch.tensor([[1.0], [0.5]])
        )
        client.push("user", ids, torch.arange(3.0)[:, None].expand(3, DIM))
        assert client.pull("user", ids)[:, 0].tolist() == [2.0, 1.0, 2.0]
        assert client.delete("user", ids) == 2
        assert torch.equal(client.pull("user", ids), rows)
        assert (client.stats("user").rows, client.stats("user").updates) == (0, 2)


def test_the_defaults_are_a_tables() -> None:
    client, table = (
        client_with(),
        Table(DIM, options=TableOptions(missing="init", expected_rows=100), name="t"),
    )
    assert client.spec("t").optimizer == table.optimizer == RowWiseAdagrad(lr=0.01)
    for _ in range(3):
        grads = torch.randn(len(IDS), DIM)
        client.update("t", IDS, grads)
        table.update(IDS, grads)
        assert torch.equal(client.pull("t", IDS), table.lookup(IDS))
    assert client.pull("t", torch.arange(50)).abs().max() <= 100**-0.5
    client.init_data("u", (100, DIM), options=TableOptions(expected_rows=10_000))
    assert client.pull("u", torch.arange(50)).abs().max() <= 10_000**-0.5


@pytest.mark.parametrize("row_func", [None, normal])
def test_init_data_again(
    row_func: Callable[[tuple[int, int], torch.dtype], Tensor] | None,
) -> None:
    def client_with_it() -> RecStoreClient:
        return client_with(row_func=row_func, optimizer=SGD(lr=1.0))

    client = client_with_it()
    client.push("t", IDS, torch.ones(5, DIM))
    client.init_data(
        "t", (100, DIM), torch.float32, row_func=row_func, optimizer=SGD(lr=1.0)
    )
    client.init_data(
        "t",
        [100, DIM],
        row_func=row_func,
        optimizer=SGD(lr=1.0),
        options=TableOptions(),
    )
    assert client.exists("t", IDS).all()
    for arguments, error in [
        ({"shape": (100, DIM + 1)}, "dim is 4, not 5"),
        ({"shape": (101, DIM)}, r"options.expected_rows is 100, not 101$"),
        ({"dtype": torch.bfloat16}, "dtype is torch.float32, not torch.bfloat16"),
        ({"optimizer": SGD(lr=2.0)}, r"optimizer.lr is 1.0, not 2.0$"),
        (
            {"optimizer": RowWiseAdagrad(lr=1.0)},
            r"optimizer is SGD\(.*, not RowWiseAdagrad\(",
        ),
        ({"options": TableOptions(seed=1)}, r"options.seed is 0, not 1"),
        ({"row_func": zeros}, "initial_rows is"),
    ]:
        given = {
            "shape": (100, DIM),
            "row_func": row_func,
            "optimizer": SGD(lr=1.0),
            **arguments,
        }
        with pytest.raises(
            ValueError,
            match=rf"table 't' exists already with another specification: .*{error}",
        ):
            client.init_data("t", **given)  # type: ignore[arg-type]
    assert client.pull("t", IDS).unique().tolist() == [1.0]
    assert client.pull("t", torch.tensor([77])).equal(
        client_with_it().pull("t", torch.tensor([77]))
    )


def test_rows_of_a_row_func_depend_on_the_id_alone() -> None:
    ids = torch.arange(-30, 30)
    once = client_with(row_func=normal).pull("t", ids)
    assert len(once.unique()) == once.numel()
    for order in (ids, ids.flip(0), ids[torch.randperm(60)]):
        torch.manual_seed(int(order[0]) + 100)
        client = client_with(row_func=normal, optimizer=SGD(lr=1.0))
        before = torch.get_rng_state()
        for part in order.split(7):
            client.update("t", part.repeat(2), torch.ones(2 * len(part), DIM))
            assert client.exists("t", part).all()
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(client.pull("t", ids), once - 2)
        client.delete("t", ids)
        assert torch.equal(client.pull("t", ids), once)
        assert torch.equal(client.pull("t", ids[[3, 3, 0]]), once[[3, 3, 0]])
    other = client_with(row_func=normal, options=TableOptions(seed=1))
    other.init_data("u", (100, DIM), row_func=normal)
    assert not torch.equal(other.pull("t", ids), once)
    assert not torch.equal(other.pull("u", ids), once)


def test_the_default_device_is_the_callers() -> None:
    def on_cpu(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.rand(shape, dtype=dtype, device="cpu")

    rows = client_with(row_func=on_cpu).pull("t", IDS)
    with torch.device("meta"):
        client = client_with(row_func=on_cpu)
        assert torch.equal(client.pull("t", IDS), rows)


def test_a_row_func_of_another_dtype_is_rounded_once() -> None:
    client = client_with(
        dtype=torch.bfloat16,
        row_func=lambda shape, dtype: torch.rand(shape[1], dtype=torch.float64),
    )
    rows = client.pull("t", IDS)
    assert rows.dtype is torch.bfloat16
    client.update("t", IDS, torch.zeros(5, DIM))
    assert client.exists("t", IDS).all()
    assert torch.equal(client.pull("t", IDS), rows)


def test_some_ids_have_a_row_and_others_an_initial_one() -> None:
    client = client_with(row_func=normal)
    rows = client.pull("t", IDS)
    client.push("t", IDS[[0, 3]], torch.zeros(2, DIM))
    expected = rows.clone()
    expected[[0, 3]] = 0
    assert torch.equal(client.pull("t", IDS), expected)
    assert torch.equal(client.wait_for_prefetch(client.prefetch("t", IDS)), expected)
    assert client.stats("t").rows == 2


@pytest.mark.parametrize(
    ("row_func", "kind", "error"),
    [
        (
            lambda shape, dtype: 1.0,
            TypeError,
            "floating-point tensor of shape .1, 4., got float",
        ),
        (lambda shape, dtype: torch.ones(shape).long(), TypeError, "got torch.int64"),
        (lambda shape, dtype: torch.ones(2, 3), ValueError, r"got \(2, 3\)"),
        (3, TypeError, "row_func must be callable, got int"),
    ],
)
def test_a_row_func_that_makes_no_row(
    row_func: object, kind: type[Exception], error: str
) -> None:
    client = RecStoreClient()
    with pytest.raises(kind, match=f"table 't': .*{error}"):
        client.init_data("t", (10, DIM), row_func=row_func)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no table 't'"):
        client.stats("t")


def test_a_row_func_with_a_memory() -> None:
    calls: list[object] = []

    def counting(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        calls.append(shape)
        return torch.full(shape, float(len(calls)))

    with pytest.raises(
        ValueError, match="table 't': row_func returns another row in each call"
    ):
        client_with(row_func=counting)


def test_an_update_goes_on_where_rows_leave_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another client deletes rows between the client's calls of exists and update."""
    client = client_with(row_func=normal, optimizer=SGD(lr=1.0))
    rows = client.pull("t", IDS)
    client.push("t", IDS, torch.zeros(5, DIM))
    update, given = HostedTables.update, []

    def meddled(
        self: HostedTables,
        name: str,
        ids: Tensor,
        grads: Tensor,
        initial: InitialRows | None = None,
    ) -> None:
        if not given:
            self.delete(name, IDS[:2])
        given.append(initial)
        update(self, name, ids, grads, initial)

    monkeypatch.setattr(HostedTables, "update", meddled)
    client.update("t", IDS, torch.ones(5, DIM))
    assert len(given) == 2
    assert torch.equal(
        client.pull("t", IDS), torch.cat([rows[:2], torch.zeros(3, DIM)]) - 1
    )


def test_an_update_that_was_refused_is_not_refused_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are deleted before every attempt, after exists has found them.

    The client sends initial rows of all ids.
    """
    client = client_with(row_func=normal, optimizer=SGD(lr=1.0))
    rows = client.pull("t", IDS)
    client.push("t", IDS, torch.zeros(5, DIM))
    update, given = HostedTables.update, []

    def meddled(
        self: HostedTables,
        name: str,
        ids: Tensor,
        grads: Tensor,
        initial: InitialRows | None = None,
    ) -> None:
        given.append(initial)
        self.delete(name, IDS)
        try:
            update(self, name, ids, grads, initial)
        except ValueError:
            self.push(name, IDS, torch.zeros(5, DIM))
            raise

    monkeypatch.setattr(HostedTables, "update", meddled)
    client.update("t", IDS, torch.ones(5, DIM))
    assert len(given) == 2
    assert given[0] is None
    assert torch.equal(given[1][0], IDS.sort().values)
    assert torch.equal(client.pull("t", IDS), rows - 1)


def test_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_with()
    ids = IDS.clone()
    rows = client.pull("t", ids)
    handle = client.prefetch("t", ids)
    ids.zero_()
    other = client.prefetch("t", ids)
    assert handle != other
    assert torch.equal(client.wait_for_prefetch(other), rows[[3] * 5])
    assert torch.equal(client.wait_for_prefetch(handle), rows)
    for used in (handle, other, 10**6, -1):
        with pytest.raises(
            ValueError, match=f"no prefetch {used}, or it has been waited for"
        ):
            client.wait_for_prefetch(used)
    with pytest.raises(ValueError, match="no table 'u'"):
        client.prefetch("u", ids)

    def fails(self: HostedTables, name: str, ids: Tensor) -> Tensor:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(HostedTables, "pull", fails)
        handle = client.prefetch("t", ids)
        with pytest.raises(MemoryError, match="no room"):
            client.wait_for_prefetch(handle)
    with pytest.raises(ValueError, match="no prefetch"):
        client.wait_for_prefetch(handle)


def test_prefetches_run_beside_the_caller_in_few_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = client_with(options=TableOptions(initializer=ConstantInit(1.0)))
    go, running = threading.Event(), []
    pull = HostedTables.pull

    def slow(self: HostedTables, name: str, ids: Tensor) -> Tensor:
        running.append(threading.get_ident())
        assert go.wait(60)
        return pull(self, name, ids)

    monkeypatch.setattr(HostedTables, "pull", slow)
    handles = [client.prefetch("t", torch.tensor([number])) for number in range(40)]
    go.set()
    for handle in handles:
        assert client.wait_for_prefetch(handle).tolist() == [[1.0] * DIM]
    assert len(running) == 40
    assert threading.get_ident() not in running
    assert len(set(running)) <= _THREADS


def test_torchs_generator_stays_the_callers() -> None:
    """A prefetch makes no initial rows in its thread, because that would change the
    caller's random generator.
    """
    client = client_with(row_func=normal)
    rows = client.pull("t", torch.arange(400))
    torch.manual_seed(1)
    expected = torch.rand(1000)
    torch.manual_seed(1)
    handles = [client.prefetch("t", torch.arange(400)) for _ in range(8)]
    drawn = torch.cat([torch.rand(1) for _ in range(1000)])
    assert torch.equal(drawn, expected)
    for handle in handles:
        assert torch.equal(client.wait_for_prefetch(handle), rows)


def test_save_and_load(tmp_path: Path) -> None:
    client = client_with(row_func=normal, optimizer=SGD(lr=1.0))
    client.update("t", IDS, torch.ones(5, DIM))
    rows = client.pull("t", IDS)
    client.save(tmp_path / "saved")
    with pytest.raises(FileExistsError):
        client.save(str(tmp_path / "saved"))
    client.update("t", IDS, torch.ones(5, DIM))
    client.save(tmp_path / "saved", overwrite=True)
    assert torch.equal(client.pull("t", IDS), rows - 1)

    fresh = RecStoreClient()
    fresh.load(tmp_path / "saved")
    assert torch.equal(fresh.pull("t", IDS), rows - 1)
    fresh.update("t", IDS, torch.ones(5, DIM))
    unknown = torch.tensor([1, 5])
    for call in (
        lambda: fresh.pull("t", unknown),
        lambda: fresh.update("t", unknown, torch.ones(2, DIM)),
        lambda: fresh.wait_for_prefetch(fresh.prefetch("t", unknown)),
    ):
        with pytest.raises(
            ValueError,
            match=(
                r"table 't' has rows that an init_func or row_func makes.* call"
                r" init_data with"
            ),
        ):
            call()
    assert fresh.stats("t").rows == 5
    with pytest.raises(ValueError, match="initial_rows is"):
        fresh.init_data("t", (100, DIM), row_func=zeros, optimizer=SGD(lr=1.0))
    fresh.init_data("t", (100, DIM), row_func=normal, optimizer=SGD(lr=1.0))
    assert torch.equal(fresh.pull("t", unknown)[:1], client.pull("t", unknown)[:1])
    client.load(tmp_path / "saved")
    assert torch.equal(client.pull("t", IDS), rows - 1)


def bad_calls(
    client: RecStoreClient,
) -> list[tuple[Callable[[], object], type[Exception], str]]:
    ids, rows = torch.tensor([1, 2]), torch.ones(2, DIM)
    calls: list[tuple[Callable[[], object], type[Exception], str]] = []
    for read in (client.pull, client.prefetch, client.delete, client.exists):
        calls += [
            (
                lambda read=read: read("t", [1, 2]),
                TypeError,
                "'t': ids must be an int64 tensor, got list",
            ),
            (
                lambda read=read: read("t", ids.float()),
                TypeError,
                "'t': ids must be an int64 tensor, got torch.float32",
            ),
            (
                lambda read=read: read("t", ids[None]),
                ValueError,
                r"'t': ids must have the shape \(N,\), got \(1, 2\)",
            ),
            (
                lambda read=read: read("t", ids.to("meta")),
                ValueError,
                "'t': ids must be on the CPU, got meta",
            ),
            (lambda read=read: read("u", ids), ValueError, "no table 'u'"),
            (lambda read=read: read(3, ids), TypeError, "name must be a str, got int"),
        ]
    for write, what in ((client.push, "values"), (client.update, "grads")):
        calls += [
            (
                lambda write=write: write("t", ids.float(), rows),
                TypeError,
                "'t': ids must be",
            ),
            (
                lambda write=write: write("t", ids, 3),
                TypeError,
                f"'t': {what} must be a bfloat16 or float32 tensor",
            ),
            (
                lambda write=write: write("t", ids, rows.cfloat()),
                TypeError,
                f"'t': {what} .* got torch.complex64",
            ),
            (
                lambda write=write: write("t", ids, rows > 0),
                TypeError,
                f"'t': {what} .* got torch.bool",
            ),
            (
                lambda write=write: write("t", ids, rows[:1]),
                ValueError,
                rf"'t': {what} .* \(2, 4\), got \(1, 4\)",
            ),
            (
                lambda write=write: write("t", ids, rows[:, :3]),
                ValueError,
                rf"'t': {what} .* got \(2, 3\)",
            ),
            (
                lambda write=write: write("t", ids, rows.to("meta")),
                ValueError,
                f"'t': {what} must be on the CPU",
            ),
            (lambda write=write: write("u", ids, rows), ValueError, "no table 'u'"),
        ]
    init = client.init_data
    return [
        *calls,
        (lambda: init(5, (1, 2)), TypeError, "name must be a str"),  # type: ignore[arg-type]
        (lambda: init("", (1, 2)), ValueError, "name must not be empty"),
        (lambda: init("n", 5), TypeError, "'n': shape must be two ints"),  # type: ignore[arg-type]
        (lambda: init("n", (1, 2.0)), TypeError, "'n': shape must be two ints"),  # type: ignore[arg-type]
        (lambda: init("n", (1, 2, 3)), ValueError, r"'n': shape .* got \(1, 2, 3\)"),
        (lambda: init("n", (10, 0)), ValueError, r"'n': shape .* got \(10, 0\)"),
        (lambda: init("n", (10, 4), torch.int64), ValueError, "dtype must be one of"),
        (lambda: init("n", (10, 4), optimizer="sgd"), TypeError, "optimizer must be"),  # type: ignore[arg-type]
        (
            lambda: init("n", (10, 4), options=None),
            TypeError,
            "options must be TableOptions",
        ),  # type: ignore[arg-type]
        (
            lambda: init(
                "n",
                (10, 4),
                options=TableOptions(max_rows=3, cold_store=RocksDBStore("x")),
            ),
            ValueError,
            "cold_store",
        ),
        (
            lambda: init(
                "n",
                (10, 4),
                row_func=normal,
                options=TableOptions(initializer=UniformInit(0, 1)),
            ),
            ValueError,
            "'n': row_func and options.initializer",
        ),
        (lambda: client.stats("u"), ValueError, "no table 'u'"),
        (lambda: client.spec("n"), ValueError, "no table 'n'"),
    ]


def test_bad_arguments_change_nothing() -> None:
    client = client_with(dtype=torch.bfloat16)
    client.push("t", IDS, torch.ones(5, DIM))
    before = client.stats("t")
    for number, (call, kind, error) in enumerate(bad_calls(client)):
        with pytest.raises(kind, match=error) as raised:
            call()
        assert type(raised.value) is kind, number
    assert client.stats("t") == before
    assert client.pull("t", IDS).unique().tolist() == [1.0]


def test_tensors_that_are_allowed() -> None:
    client, plain = (
        client_with(optimizer=SGD(lr=1.0)),
        client_with(optimizer=SGD(lr=1.0)),
    )
    ids, grads = torch.randint(0, 50, (40,)), torch.randn(DIM, 20)
    client.update("t", ids[::2], grads.t().requires_grad_())
    plain.update("t", ids[::2].clone(), grads.t().contiguous())
    assert torch.equal(client.pull("t", ids), plain.pull("t", ids))
    client.push("t", ids[:1], torch.full((1, DIM), torch.nan))
    assert client.pull("t", ids[:1]).isnan().all()
    none = torch.empty(0, dtype=torch.int64)
    for one in (client, client_with(row_func=normal)):
        assert one.pull("t", none).shape == (0, DIM)
        one.update("t", none, torch.empty(0, DIM))
        one.push("t", none, torch.empty(0, DIM))
        assert one.delete("t", none) == 0
        assert one.exists("t", none).shape == (0,)


def test_after_close(tmp_path: Path) -> None:
    client = client_with()
    handle = client.prefetch("t", IDS)
    client.close()
    client.close()
    for call in (
        lambda: client.init_data("t", (100, DIM)),
        lambda: client.pull("t", IDS),
        lambda: client.push("t", IDS, torch.ones(5, DIM)),
        lambda: client.update("t", IDS, torch.ones(5, DIM)),
        lambda: client.prefetch("t", IDS),
        lambda: client.wait_for_prefetch(handle),
        lambda: client.delete("t", IDS),
        lambda: client.exists("t", IDS),
        lambda: client.stats("t"),
        lambda: client.spec("t"),
        lambda: client.save(tmp_path / "saved"),
        lambda: client.load(tmp_path / "saved"),
    ):
        with pytest.raises(ValueError, match=r"RecStoreClient\(\) is closed"):
            call()


def test_arguments_of_the_client() -> None:
    for arguments in (
        {"token": "x"},
        {"tls_ca": "x"},
        {"tls_cert": "x"},
        {"tls_key": "x"},
    ):
        with pytest.raises(
            ValueError, match="token, tls_ca, tls_cert and tls_key are for servers"
        ):
            RecStoreClient(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(RecStoreClient())


def test_bounds_by_updates() -> None:
    options = TableOptions(max_rows=3, eviction=LRU(), admission=MinFrequency(2))
    client = client_with(options=options, row_func=normal, optimizer=SGD(lr=1.0))
    rows = client.pull("t", torch.arange(5))
    for number in (0, 1, 2, 3):
        for _ in range(2):
            client.update("t", torch.tensor([number]), torch.ones(1, DIM))
    assert client.exists("t", torch.arange(4)).tolist() == [False, True, True, True]
    assert torch.equal(
        client.pull("t", torch.arange(5)),
        rows - torch.tensor([0.0, 1, 1, 1, 0])[:, None],
    )


def test_many_threads_of_one_client() -> None:
    client = client_with(row_func=normal, optimizer=SGD(lr=1.0))
    ids = torch.arange(120)
    rows = client.pull("t", ids)

    def work(number: int) -> None:
        for _ in range(10):
            client.update("t", ids, torch.ones(120, DIM))
            client.wait_for_prefetch(client.prefetch("t", ids + 60))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    expected = rows
    for _ in range(40):
        expected = expected - 1
    assert torch.equal(client.pull("t", ids), expected)


@pytest.mark.slow
def test_it_does_without_torchrec_and_grpc(tmp_path: Path) -> None:
    code = f"""
import sys, torch
from torchrec_recstore_service import RecStoreClient
client = RecStoreClient()
client.init_data("t", (10, 4), row_func=lambda shape, dtype: torch.rand(shape, dtype=dtype))
client.update("t", torch.tensor([1]), torch.ones(1, 4))
client.save({str(tmp_path / "saved")!r})
client.load({str(tmp_path / "saved")!r})
print(client.pull("t", torch.tensor([1, 2])).tolist())
print([name for name in ("torchrec", "fbgemm_gpu", "grpc", "google.protobuf") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows, modules = done.stdout.splitlines()
    assert modules == "[]"

    # This process gets the same rows, because initial rows do not depend on the
    # process.
    client = RecStoreClient()
    client.init_data(
        "t", (10, 4), row_func=lambda shape, dtype: torch.rand(shape, dtype=dtype)
    )
    client.load(tmp_path / "saved")
    assert str(client.pull("t", torch.tensor([1, 2])).tolist()) == rows
