"""Tests of the calls that programs written for RecStore make: casts, offsets,
asynchronous updates, no-op arguments.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.recstore_server import RecStoreServer
from torchrec_recstore import RecStoreClient, RecStoreWarning
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import ConstantInit, TableOptions
from torchrec_recstore_service import get_kv_client
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.initial_rows import InitFunc
from torchrec_recstore_service.wire.row_requests import InitialRows

DIM = 4
ZEROS = TableOptions(initializer=ConstantInit(0.0))
_names = itertools.count()


@pytest.fixture(params=["here", "servers"])
def client(request: pytest.FixtureRequest) -> Iterator[RecStoreClient]:
    servers: list[RecStoreServer] = []
    if request.param == "servers":
        servers = request.getfixturevalue("two_servers")
    with RecStoreClient([server.address for server in servers] or None) as client:
        yield client


def new_table(client: RecStoreClient, **arguments: object) -> str:
    name = f"seed{next(_names)}"
    client.init_data(
        name, (100, DIM), optimizer=SGD(lr=1.0), options=ZEROS, **arguments
    )  # type: ignore[arg-type]
    return name


def new_random_table(client: RecStoreClient, row_func: InitFunc) -> str:
    """Makes a table whose initial rows are made by a function."""
    name = f"seed{next(_names)}"
    client.init_data(name, (100, DIM), optimizer=SGD(lr=1.0), row_func=row_func)
    return name


def said(record: list[warnings.WarningMessage]) -> list[str]:
    assert all(each.category is RecStoreWarning for each in record)
    return [str(each.message) for each in record]


def test_what_means_nothing_says_so_once() -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        client = RecStoreClient(library_path="/opt/lib_recstore_ops.so")
        for name in ("a", "b"):
            client.init_data(name, (10, DIM), torch.float32, "range", None, False, 0)
            client.set_ps_backend("brpc")
        client.set_ps_backend("local_shm")
    assert said(record) == [
        (
            "RecStoreClient(library_path='/opt/lib_recstore_ops.so') has no effect:"
            " there is no library to load"
        ),
        "part_policy of init_data has no effect: a hash of the id selects its server",
        "is_gdata of init_data has no effect: there is no graph",
        "set_ps_backend('brpc') has no effect: the client selects the transport itself",
        (
            "set_ps_backend('local_shm') has no effect: the client selects the"
            " transport itself"
        ),
    ]
    with pytest.raises(TypeError, match="backend must be a str, got int"):
        client.set_ps_backend(3)  # type: ignore[arg-type]


def test_ids_and_gradients_are_cast(client: RecStoreClient) -> None:
    name = new_table(client)
    for ids in (
        torch.tensor([1, 2], dtype=dtype)
        for dtype in (torch.int32, torch.int16, torch.uint8, torch.uint64)
    ):
        for grads in (
            torch.full((2, DIM), -1.0, dtype=dtype)
            for dtype in (torch.float64, torch.float16, torch.int32)
        ):
            client.push(name, ids, torch.zeros(2, DIM, dtype=grads.dtype))
            client.update(name, ids, grads.T.contiguous().T)
            assert client.pull(name, ids).tolist() == [[1.0] * DIM] * 2
    assert client.exists(name, torch.tensor([1, 2, 3], dtype=torch.int16)).tolist() == [
        True,
        True,
        False,
    ]
    assert client.delete(name, torch.tensor([1, 2], dtype=torch.int32)) == 2


def test_asynchronous_updates_are_carried_out_in_order(client: RecStoreClient) -> None:
    name, ids = new_table(client), torch.tensor([7, -1])
    grads = torch.ones(2, DIM)
    handles = []
    for _ in range(20):
        handles.append(client.update_async(name, ids, grads))
        ids.add_(0), grads.add_(0)
    kept = ids.clone()
    ids.fill_(99), grads.fill_(5)  # the client has copied both
    client.update(name, kept, torch.ones(2, DIM))  # after all earlier ones
    for handle in handles:
        client.wait(handle)
        client.wait(handle)
    assert client.pull(name, kept)[:, 0].tolist() == [-21.0, -21.0]
    assert not bool(client.exists(name, ids).any())
    for unknown in (0, 10**6, None):
        with pytest.raises(ValueError, match=f"no update {unknown}"):
            client.wait(unknown)  # type: ignore[arg-type]


def test_a_row_func_is_called_in_the_callers_thread(client: RecStoreClient) -> None:
    callers = set()

    def counting(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        callers.add(threading.current_thread())
        return torch.ones(shape, dtype=dtype)

    name = f"seed{next(_names)}"
    client.init_data(name, (10, DIM), row_func=counting, optimizer=SGD(lr=1.0))
    ids = torch.tensor([1, 2])
    handle = client.update_async(name, ids, torch.ones(2, DIM))
    client.wait(handle)
    assert client.pull(name, torch.tensor([1, 2, 3]))[:, 0].tolist() == [0.0, 0.0, 1.0]
    assert callers == {threading.current_thread()}


SHAPE = (6, DIM)
WHOLE = torch.arange(24.0).view(SHAPE)


class WholeTable:
    """An ``init_func`` of RecStore: it is called with the whole shape, once, and row 1
    is not row 0.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[object, object]] = []

    def __call__(self, shape: object, dtype: object) -> Tensor:
        self.calls.append((shape, dtype))
        return WHOLE


def seed_order(
    client: RecStoreClient, name: str, *arguments: object, **named: object
) -> Tensor:
    """Calls ``init_data`` by RecStore's order of arguments, and returns the rows of all
    ids of the shape.
    """
    client.init_data(
        name, SHAPE, torch.float32, *arguments, optimizer=SGD(lr=1.0), **named
    )  # type: ignore[arg-type]
    start = named.get("base_offset", 0)
    assert isinstance(start, int)
    return client.pull(name, torch.arange(start, start + SHAPE[0]))


@pytest.mark.filterwarnings("ignore:part_policy")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (lambda func: (None, func), {}),
        (lambda func: (None, func, True), {}),
        (lambda func: ("range", func, True, 0, True), {}),
        (lambda func: (), {"init_func": True}),
        (lambda func: (func,), {}),  # no policy is a function
        (lambda func: (func, "range"), {}),
        (lambda func: (None, func), {"base_offset": 1 << 40}),
    ],
)
def test_init_func_gets_the_whole_shape_once(
    client: RecStoreClient, arguments, named
) -> None:  # type: ignore[no-untyped-def]
    func, name = WholeTable(), f"seed{next(_names)}"
    named = {**named, "init_func": func} if "init_func" in named else named
    rows = seed_order(client, name, *arguments(func), **named)
    assert torch.equal(rows, WHOLE)
    assert func.calls == [(SHAPE, torch.float32)]
    start = named.get("base_offset", 0)
    ids, grads = start + torch.tensor([1, 5, 1]), torch.ones(3, DIM)
    client.update(name, ids, grads)
    assert torch.equal(
        client.pull(name, ids), WHOLE[[1, 5, 1]] - torch.tensor([[2.0], [1.0], [2.0]])
    )
    assert torch.equal(client.pull(name, start + torch.tensor([0])), WHOLE[:1])
    assert func.calls == [(SHAPE, torch.float32)]
    client.push(name, torch.tensor([-7]), WHOLE[:1])  # any id has a row that is written
    client.update(name, torch.tensor([-7, start]), torch.ones(2, DIM))
    assert torch.equal(client.pull(name, torch.tensor([-7, start])), WHOLE[[0, 0]] - 1)
    last = start + SHAPE[0]
    for call in (
        lambda: client.pull(name, torch.tensor([start, last])),
        lambda: client.update(name, torch.tensor([start, last]), grads[:2]),
        lambda: client.wait_for_prefetch(client.prefetch(name, torch.tensor([last]))),
    ):
        with pytest.raises(
            ValueError,
            match=(
                rf"table '{name}': id {last} has no row, and init_func has made rows of"
                rf" the ids {start} to "
                rf"{last - 1} only: push the row of the id, or pass row_func, which"
                r" makes the row of any id"
            ),
        ):
            call()


def test_the_rows_of_init_func_are_the_same_for_every_client(
    client: RecStoreClient,
) -> None:
    """Also rows of torch's generator, and a client of another function is refused."""

    def random(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.rand(shape, dtype=dtype)

    name = f"seed{next(_names)}"
    state = torch.get_rng_state()
    rows = seed_order(client, name, None, random)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(rows.unique()) == rows.numel()
    torch.manual_seed(99)
    assert torch.equal(seed_order(client, name, None, random), rows)
    kept = WHOLE.clone()
    with pytest.raises(
        ValueError,
        match=(
            f"table '{name}' exists already with another specification: initial_rows is"
        ),
    ):
        seed_order(client, name, None, lambda shape, dtype: kept)
    with pytest.raises(ValueError, match="initial_rows is"):
        seed_order(client, name, None, random, base_offset=1)
    other = f"seed{next(_names)}"
    assert torch.equal(
        seed_order(client, other, None, lambda shape, dtype: kept), WHOLE
    )
    kept.zero_()
    # the client has copied the rows
    assert torch.equal(client.pull(other, torch.arange(6)), WHOLE)


def test_an_update_goes_on_where_rows_of_init_func_leave_in_between(
    client: RecStoreClient,
) -> None:
    name = f"seed{next(_names)}"
    seed_order(client, name, None, WholeTable())
    outside, ids = torch.tensor([-7]), torch.tensor([-7, 1])
    client.push(name, outside, WHOLE[:1])
    exists, deleted = client._tables.exists, []

    def deleting(name: str, ids: Tensor) -> Tensor:
        found = exists(name, ids)
        if not deleted:
            deleted.append(client._tables.delete(name, outside))
        return found

    client._tables.exists = deleting  # type: ignore[method-assign, union-attr]
    with pytest.raises(ValueError, match="id -7 has no row, and init_func"):
        client.update(name, ids, torch.ones(2, DIM))
    client.push(name, outside, WHOLE[:1])
    client.update(name, ids, torch.ones(2, DIM))
    assert client.pull(name, outside)[0, 0] == -1.0


def test_what_init_data_cannot_take(client: RecStoreClient) -> None:
    func, name = WholeTable(), f"seed{next(_names)}"
    for kind, error, arguments, named in (
        (
            TypeError,
            (
                "part_policy and init_func are both functions: pass init_func by its"
                " name only"
            ),
            (func, func),
            {},
        ),
        (TypeError, "init_func must be callable, got str", (None, "range"), {}),
        (TypeError, "init_func must be callable, got str", ("range", "range"), {}),
        (
            TypeError,
            "is_gdata must be a bool, got int: pass base_offset by its name",
            (None, None, 5),
            {},
        ),
        (TypeError, "row_func must be callable, got int", (), {"row_func": 3}),
        (
            ValueError,
            "init_func and row_func both define initial rows: give only one",
            (None, func),
            {"row_func": func},
        ),
        (
            ValueError,
            "init_func and options.initializer both define initial rows: give only one",
            (None, func),
            {"options": ZEROS},
        ),
        (
            TypeError,
            r"init_func must return a floating-point tensor of shape \(6, 4\), got int",
            (None, lambda *_: 3),
            {},
        ),
        (
            ValueError,
            (
                r"init_func must return a floating-point tensor of shape \(6, 4\), got"
                r" \(1, 4\)"
            ),
            (None, lambda *_: WHOLE[:1]),
            {},
        ),
    ):
        with pytest.raises(kind, match=f"table '{name}': {error}"):
            seed_order(client, name, *arguments, **named)
    with pytest.raises(
        ValueError,
        match=(
            rf"table '{name}': init_func is called with the whole shape \({2**40}, 4\),"
            r" whose rows take 16384.0 GiB, "
            r"and at most 4 GiB are made: pass row_func, which makes the row of an id,"
            r" or options.initializer"
        ),
    ):
        client.init_data(name, (2**40, DIM), torch.float32, None, func)
    assert not func.calls
    assert name not in client.data_name_list()
    with pytest.raises(ValueError, match=f"there is no table '{name}'"):
        client.pull(name, torch.tensor([1]))


def test_values_that_are_not_initialized(client: RecStoreClient) -> None:
    func, name = WholeTable(), f"seed{next(_names)}"
    with pytest.warns(
        RecStoreWarning,
        match="init_func of init_data has no effect with initialize_values=False",
    ):
        seed_order(client, name, None, func, True, 0, False)
    assert not func.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seed_order(client, f"seed{next(_names)}", None, None, True, 0, False)


def test_names_and_shapes(client: RecStoreClient) -> None:
    name = new_table(client, base_offset=3)
    assert client.data_name_list() == [name]
    assert client.get_data_meta(name) == (torch.float32, (100, DIM))
    with pytest.raises(ValueError, match="there is no table 'no': init_data makes one"):
        client.get_data_meta("no")


def test_one_client_of_a_process() -> None:
    """RecStore's client is a singleton: every part of a program makes it anew, and sees
    the tables of the others.
    """
    client = RecStoreClient()
    name = new_table(client)
    client.push(name, torch.tensor([1]), torch.ones(1, DIM))
    with pytest.warns(RecStoreWarning, match="library_path"):
        assert RecStoreClient(library_path="/opt/lib_recstore_ops.so") is client
    assert (
        RecStoreClient()
        is RecStoreClient(None, timeout_s=30)
        is get_kv_client()
        is client
    )
    assert RecStoreClient().pull(name, torch.tensor([1])).sum() == DIM
    for arguments, error in (
        ({"timeout_s": 5.0}, "timeout_s=30.0, and timeout_s=5.0 is given"),
        (
            {"shared_memory": False},
            "shared_memory=True, and shared_memory=False is given",
        ),
    ):
        with pytest.raises(
            ValueError,
            match=(
                f"the client of this process was made with {error}: pass private=True"
            ),
        ):
            RecStoreClient(**arguments)  # type: ignore[arg-type]
    private = RecStoreClient(private=True)
    with pytest.raises(ValueError, match=f"there is no table '{name}'"):
        private.pull(name, torch.tensor([1]))
    private.close()
    RecStoreClient().close()
    with pytest.raises(ValueError, match="is closed"):
        client.pull(name, torch.tensor([1]))
    assert RecStoreClient() is not client
    with pytest.raises(ValueError, match=f"there is no table '{name}'"):
        RecStoreClient().pull(name, torch.tensor([1]))


def test_the_client_of_a_process_keeps_its_tables_where_nobody_holds_it() -> None:
    name = new_table(RecStoreClient())
    gc.collect()
    assert RecStoreClient().data_name_list() == [name]


def test_threads_make_one_client() -> None:
    gate, made = threading.Barrier(8), []

    def make() -> None:
        gate.wait()
        made.append(RecStoreClient())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(client) for client in made}) == 1


def test_the_client_of_a_process_on_a_server(server: RecStoreServer) -> None:
    """``set_ps_config`` is how a program of RecStore names its server.

    Other parts of it see the server's tables.
    """
    host, port = server.address.split(":")
    RecStoreClient().set_ps_config(host, int(port))
    name = f"seed{next(_names)}"
    get_kv_client().init_data(
        name, SHAPE, torch.float32, None, WholeTable(), optimizer=SGD(lr=1.0)
    )
    get_kv_client().update(name, torch.tensor([1]), torch.ones(1, DIM))
    # a client of its own, of the same tables
    with RecStoreClient([server.address]) as other:
        assert other is not RecStoreClient()
        assert torch.equal(other.pull(name, torch.tensor([1])), WHOLE[1:2] - 1)
    assert torch.equal(
        get_kv_client().pull(name, torch.arange(2)),
        WHOLE[:2] - torch.tensor([[0.0], [1.0]]),
    )


def test_a_forked_process_has_a_client_of_its_own() -> None:
    name = new_table(RecStoreClient())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, repr(RecStoreClient().data_name_list()).encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        assert file.read() == "[]"
    os.waitpid(child, 0)
    assert RecStoreClient().data_name_list() == [name]


def failing_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(
        self: HostedTables,
        name: str,
        ids: Tensor,
        grads: Tensor,
        initial: InitialRows | None = None,
    ) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(HostedTables, "update", fail)


def test_an_update_that_fails_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    client = RecStoreClient()
    name, ids, grads = new_table(client), torch.tensor([1]), torch.ones(1, DIM)
    failing_update(monkeypatch)
    handle = client.update_async(name, ids, grads)
    with pytest.raises(MemoryError, match="no room"):
        client.wait(handle)
    client.update_async(name, ids, grads)
    with pytest.raises(MemoryError, match="no room"):
        client.save(f"{tmp_path}/saved")
    client.update_async(name, ids, grads)
    with pytest.warns(
        RecStoreWarning, match="an update that was not waited for has failed: no room"
    ):
        client.close()


def test_a_prefetch_without_a_name(client: RecStoreClient) -> None:
    with pytest.raises(ValueError, match="needs a table of init_data"):
        client.prefetch(torch.tensor([1]))
    first = new_table(client)
    client.push(first, torch.tensor([5, 10**6]), torch.ones(2, DIM))
    rows = client.wait_and_get(
        client.prefetch(torch.tensor([10**6, 5, 6], dtype=torch.int32)), DIM
    )
    assert rows[:, 0].tolist() == [1.0, 1.0, 0.0]  # the only table takes every id
    second = new_table(client, base_offset=1 << 40)
    fused = torch.tensor([(1 << 40) + 3, 5, (1 << 40) + 99, 5])
    client.push(second, fused[[0]], torch.full((1, DIM), 2.0))
    assert client.wait_and_get(client.prefetch(fused), DIM, torch.device("cpu"))[
        :, 0
    ].tolist() == [2.0, 1.0, 0.0, 1.0]
    assert client.wait_and_get(client.prefetch(fused[:0]), DIM).shape == (0, DIM)
    handle = client.prefetch(second, fused[:1])
    with pytest.raises(
        ValueError,
        match="embedding_dim is 8, but the rows of the prefetch have 4 columns",
    ):
        client.wait_and_get(handle, 8)
    with pytest.raises(
        ValueError,
        match=f"id {(1 << 40) + 100} is in the ids of no table: name the table",
    ):
        client.prefetch(torch.tensor([(1 << 40) + 100]))
    third = new_table(client, base_offset=50)
    with pytest.raises(
        ValueError, match=f"id 60 is in the ids of table '{third}' and of another one"
    ):
        client.prefetch(torch.tensor([1, 60]))
    wide = f"seed{next(_names)}"
    client.init_data(wide, (10, 2 * DIM), base_offset=2**62)
    with pytest.raises(
        ValueError, match=f"tables '{first}', '{wide}' have rows of different dims"
    ):
        client.prefetch(torch.tensor([1, 2**62]))
    by_name = client.wait_for_prefetch(client.prefetch(first, torch.tensor([5])))
    for handle in (
        client.prefetch(torch.tensor([5]), first),  # RecStore's order
        client.prefetch(torch.tensor([5]), name=first),
        client.prefetch(ids=torch.tensor([5]), name=first),
    ):
        assert torch.equal(client.wait_for_prefetch(handle), by_name)
    with pytest.raises(
        TypeError, match="prefetch takes ids, or ids and the name of a table"
    ):
        client.prefetch(torch.tensor([1]), torch.tensor([1]))
    for arguments in ((first, first), (first,)):
        with pytest.raises(
            TypeError, match=f"table '{first}': ids must be an int64 tensor"
        ):
            client.prefetch(*arguments)
    for offset, kind in ((2**63, ValueError), (1.0, TypeError)):
        with pytest.raises(kind, match="base_offset must"):
            client.init_data("no", (10, DIM), base_offset=offset)  # type: ignore[arg-type]


def test_set_ps_config_connects_to_a_server(server: RecStoreServer) -> None:
    host, port = server.address.split(":")
    client = RecStoreClient()
    client.set_ps_config(host, int(port))
    name = new_table(client)
    client.push(name, torch.tensor([1]), torch.ones(1, DIM))
    client.set_ps_config(host, int(port))
    with RecStoreClient([server.address]) as other:
        assert other.pull(name, torch.tensor([1])).sum() == DIM
    with pytest.raises(
        ValueError,
        match=rf"has tables already \('{name}'\): call set_ps_config before init_data",
    ):
        client.set_ps_config(host, int(port) + 1)
    assert client.pull(name, torch.tensor([1])).sum() == DIM
    client.close()


_ENDS = """
import torch
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service import get_kv_client
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.tables.initial_rows import InitFunc
client = RecStoreClient()
client.init_data("t", (10, 4))
made = []
def update(self, name, ids, grads, initial=None):
    made.append(name)
    if len(made) == 2:
        raise MemoryError("no room")
HostedTables.update = update
for _ in range(2):
    client.update_async("t", torch.tensor([1]), torch.ones(1, 4))
"""


@pytest.mark.slow
def test_a_process_that_ends_reports_an_update_that_fails() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _ENDS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0
    assert (
        "RecStoreWarning: an update that was not waited for has failed: no room"
        in run.stderr
    )


def test_functions_of_initial_rows_are_called_in_the_thread_of_the_caller(
    client: RecStoreClient,
) -> None:
    """They seed torch's default generator, from which training draws in the thread of
    the caller.
    """
    callers: list[str] = []

    def row_func(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        callers.append(threading.current_thread().name)
        return torch.rand(shape, dtype=dtype)

    plain, random = new_table(client), new_random_table(client, row_func)
    ids, grads = torch.tensor([1, 2]), torch.ones(2, DIM)
    before = torch.get_rng_state()
    for number in range(3):
        handles = [client.update_async(plain, ids, grads) for _ in range(3)]
        client.update(random, ids + 10 * number, grads)
        client.update_async(random, ids + 10 * number + 5, grads)
        client.wait_for_prefetch(client.prefetch(random, ids + 100))
        for handle in handles:
            client.wait(handle)
    assert set(callers) == {threading.current_thread().name}
    assert torch.equal(torch.get_rng_state(), before)
    assert client.pull(plain, ids).tolist() == [[-9.0] * DIM] * 2


def test_an_update_with_a_function_leaves_the_errors_of_earlier_ones(
    client: RecStoreClient,
) -> None:
    """It waits for the updates before it, and their errors are raised by their own
    ``wait``.
    """
    missing, random = (
        new_table(client),
        new_random_table(client, lambda shape, dtype: torch.zeros(shape, dtype=dtype)),
    )
    ids, grads = torch.tensor([1, 2]), torch.ones(2, DIM)
    release = threading.Event()
    client._updates.start(lambda: release.wait(60) and None)
    handle = client._updates.start(
        lambda: client._open().update(f"no {missing}", ids, grads)
    )
    threading.Timer(0.05, release.set).start()
    client.update(random, ids, grads)
    assert client.pull(random, ids).tolist() == [[-1.0] * DIM] * 2
    with pytest.raises((KeyError, ValueError, RuntimeError)):
        client.wait(handle)
