"""Tests of the calls that programs written for RecStore make: casts, offsets, asynchronous updates, no-op arguments."""

from __future__ import annotations

import itertools
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
from torchrec_recstore_service.client.hosted import HostedTables
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
    client.init_data(name, (100, DIM), optimizer=SGD(lr=1.0), options=ZEROS, **arguments)  # type: ignore[arg-type]
    return name


def said(record: list[warnings.WarningMessage]) -> list[str]:
    assert all(each.category is RecStoreWarning for each in record)
    return [str(each.message) for each in record]


def test_what_means_nothing_says_so_once() -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        client = RecStoreClient(library_path="/opt/lib_recstore_ops.so")
        for name in ("a", "b"):
            client.init_data(name, (10, DIM), torch.float32, None, "range", 0)
            client.set_ps_backend("brpc")
        client.set_ps_backend("local_shm")
    assert said(record) == [
        "RecStoreClient(library_path='/opt/lib_recstore_ops.so') has no effect: there is no library to load",
        "part_policy of init_data has no effect: a hash of the id selects its server",
        "set_ps_backend('brpc') has no effect: the client selects the transport itself",
        "set_ps_backend('local_shm') has no effect: the client selects the transport itself",
    ]
    with pytest.raises(TypeError, match="backend must be a str, got int"):
        client.set_ps_backend(3)  # type: ignore[arg-type]


def test_ids_and_gradients_are_cast(client: RecStoreClient) -> None:
    name = new_table(client)
    for ids in (torch.tensor([1, 2], dtype=dtype) for dtype in (torch.int32, torch.int16, torch.uint8, torch.uint64)):
        for grads in (torch.full((2, DIM), -1.0, dtype=dtype) for dtype in (torch.float64, torch.float16, torch.int32)):
            client.push(name, ids, torch.zeros(2, DIM, dtype=grads.dtype))
            client.update(name, ids, grads.T.contiguous().T)
            assert client.pull(name, ids).tolist() == [[1.0] * DIM] * 2
    assert client.exists(name, torch.tensor([1, 2, 3], dtype=torch.int16)).tolist() == [True, True, False]
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


def test_an_init_func_is_called_in_the_callers_thread(client: RecStoreClient) -> None:
    callers = set()

    def counting(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        callers.add(threading.current_thread())
        return torch.ones(shape, dtype=dtype)

    name = f"seed{next(_names)}"
    client.init_data(name, (10, DIM), init_func=counting, optimizer=SGD(lr=1.0))
    ids = torch.tensor([1, 2])
    handle = client.update_async(name, ids, torch.ones(2, DIM))
    client.wait(handle)
    assert client.pull(name, torch.tensor([1, 2, 3]))[:, 0].tolist() == [0.0, 0.0, 1.0]
    assert callers == {threading.current_thread()}


def failing_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HostedTables, name: str, ids: Tensor, grads: Tensor, initial: InitialRows | None = None) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(HostedTables, "update", fail)


def test_an_update_that_fails_is_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
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
    with pytest.warns(RecStoreWarning, match="an update that was not waited for has failed: no room"):
        client.close()


def test_a_prefetch_without_a_name(client: RecStoreClient) -> None:
    with pytest.raises(ValueError, match="needs a table of init_data"):
        client.prefetch(torch.tensor([1]))
    first = new_table(client)
    client.push(first, torch.tensor([5, 10**6]), torch.ones(2, DIM))
    rows = client.wait_and_get(client.prefetch(torch.tensor([10**6, 5, 6], dtype=torch.int32)), DIM)
    assert rows[:, 0].tolist() == [1.0, 1.0, 0.0]  # the only table takes every id
    second = new_table(client, base_offset=1 << 40)
    fused = torch.tensor([(1 << 40) + 3, 5, (1 << 40) + 99, 5])
    client.push(second, fused[[0]], torch.full((1, DIM), 2.0))
    assert client.wait_and_get(client.prefetch(fused), DIM, torch.device("cpu"))[:, 0].tolist() == [2.0, 1.0, 0.0, 1.0]
    assert client.wait_and_get(client.prefetch(fused[:0]), DIM).shape == (0, DIM)
    handle = client.prefetch(second, fused[:1])
    with pytest.raises(ValueError, match="embedding_dim is 8, but the rows of the prefetch have 4 columns"):
        client.wait_and_get(handle, 8)
    with pytest.raises(ValueError, match=f"id {(1 << 40) + 100} is in the ids of no table: name the table"):
        client.prefetch(torch.tensor([(1 << 40) + 100]))
    third = new_table(client, base_offset=50)
    with pytest.raises(ValueError, match=f"id 60 is in the ids of table '{third}' and of another one"):
        client.prefetch(torch.tensor([1, 60]))
    wide = f"seed{next(_names)}"
    client.init_data(wide, (10, 2 * DIM), base_offset=2**62)
    with pytest.raises(ValueError, match=f"tables '{first}', '{wide}' have rows of different dims"):
        client.prefetch(torch.tensor([1, 2**62]))
    with pytest.raises(TypeError, match="prefetch takes ids, or the name of a table and ids"):
        client.prefetch(torch.tensor([1]), torch.tensor([1]))
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
    with pytest.raises(ValueError, match=rf"has tables already \('{name}'\): call set_ps_config before init_data"):
        client.set_ps_config(host, int(port) + 1)
    assert client.pull(name, torch.tensor([1])).sum() == DIM
    client.close()


_ENDS = """
import torch
from torchrec_recstore_service import RecStoreClient
from torchrec_recstore_service.client.hosted import HostedTables
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
    run = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0
    assert "RecStoreWarning: an update that was not waited for has failed: no room" in run.stderr
