"""Backward of evaluation lookups: no row is updated, a warning says so once, and
per-sample weights get gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchrec_recstore import RecStoreClient
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import LRU, NormalInit, RocksDBStore, TableOptions
from torchrec_recstore.store import Table
from torchrec_recstore.utils import RecStoreWarning
from torchrec_recstore_service.client.remote_groups import (
    ClientTable,
    RemotePooledGroup,
    RemoteSequenceGroup,
)

IDS = torch.tensor([5, -7, 2**62, 5, 1, 3, 3, 9])
OFFSETS = torch.tensor([0, 2, 2, 5, 6, 8, 8])  # two features with three bags
WARNING = (
    r"tables a, b: backward of a lookup in evaluation mode updates no row, .*call"
    r" train\(\)"
)
OPTIONS = TableOptions(NormalInit(), missing="init")


def tables(
    options: TableOptions = OPTIONS, dtype: torch.dtype = torch.float32
) -> list[Table]:
    return [
        Table(dim, dtype, SGD(0.5), options, name=name)
        for name, dim in (("a", 4), ("b", 8))
    ]


def remote_tables(client: RecStoreClient) -> list[ClientTable]:
    return [
        ClientTable(client, name, (10, dim), torch.float32, SGD(0.5), OPTIONS)
        for name, dim in (("a", 4), ("b", 8))
    ]


def pooled(weights: Tensor | None = None) -> Callable[[], Tensor]:
    group = PooledGroup(tables(), [0, 1], "sum")
    return lambda: group(IDS, OFFSETS, weights, train=False)


def sequence(weights: Tensor | None = None) -> Callable[[], Tensor]:
    group = SequenceGroup(tables())
    return lambda: group(IDS, [5, 3], train=False)


def remote_pooled(weights: Tensor | None = None) -> Callable[[], Tensor]:
    group = RemotePooledGroup(remote_tables(RecStoreClient()), [0, 1], "sum")
    return lambda: group(IDS, OFFSETS, weights, train=False)


def remote_sequence(weights: Tensor | None = None) -> Callable[[], Tensor]:
    group = RemoteSequenceGroup(remote_tables(RecStoreClient()))
    return lambda: group(IDS, [5, 3], train=False)


KERNELS = [pooled, sequence, remote_pooled, remote_sequence]


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecStoreWarning)
        yield


@pytest.mark.parametrize("make", KERNELS)
def test_a_backward_warns_once_for_each_group_and_updates_no_row(
    make: Callable[[], Callable[[], Tensor]],
) -> None:
    for _ in range(2):
        look_up = make()
        with no_warning():  # a lookup without a backward is no mistake
            before = look_up()
        with pytest.warns(RecStoreWarning, match=WARNING) as caught:
            look_up().square().sum().backward()
        # the warning points to the line of the caller
        assert [each.filename for each in caught] == [__file__]
        with no_warning():
            before.sum().backward()
        assert torch.equal(look_up(), before)


@pytest.mark.parametrize("make", KERNELS)
def test_without_grad_there_is_no_graph(
    make: Callable[[], Callable[[], Tensor]],
) -> None:
    look_up = make()
    with torch.no_grad():
        assert look_up().grad_fn is None
    with torch.inference_mode():
        assert look_up().grad_fn is None


def gradients(group: PooledGroup | RemotePooledGroup, train: bool) -> Tensor:
    weights = torch.linspace(-1.0, 2.0, len(IDS)).requires_grad_()
    group(IDS, OFFSETS, weights, train=train).square().sum().backward()
    assert weights.grad is not None
    return weights.grad


@pytest.mark.filterwarnings("ignore:.*evaluation mode:UserWarning")
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("feature_tables", [[0, 1], [1, 1], [1, 0]], ids=str)
def test_weights_have_the_gradients_of_training(
    dtype: torch.dtype, pooling: Literal["sum", "mean"], feature_tables: list[int]
) -> None:
    group = PooledGroup(tables(dtype=dtype), feature_tables, pooling)
    group.learning_rate = lambda: 0.0
    expected = gradients(group, train=True)
    torch.testing.assert_close(gradients(group, train=False), expected)
    assert expected.abs().min() > 0
    group.untrained = True
    with no_warning():
        torch.testing.assert_close(gradients(group, train=False), expected)
        assert group(IDS, OFFSETS, train=False).grad_fn is None


@pytest.mark.filterwarnings("ignore:.*evaluation mode:UserWarning")
def test_weights_of_cold_rows_and_of_ids_without_a_row(tmp_path: Path) -> None:
    cold = TableOptions(
        NormalInit(), max_rows=5, eviction=LRU(), cold_store=RocksDBStore(str(tmp_path))
    )
    group = PooledGroup(tables(cold), [0, 1], "mean")
    assert gradients(group, train=False).tolist() == [0.0] * len(IDS)
    group.learning_rate = lambda: 0.0
    expected = gradients(group, train=True)
    for table in group.tables:
        table.lookup(torch.arange(100, 105), train=True)
    assert all(table.stats().cold_rows >= 2 for table in group.tables)
    torch.testing.assert_close(gradients(group, train=False), expected)
    for table in group.tables:
        table.close()


@pytest.mark.filterwarnings("ignore:.*evaluation mode:UserWarning")
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_weights_of_a_remote_group(pooling: Literal["sum", "mean"]) -> None:
    with RecStoreClient() as client:
        remote = RemotePooledGroup(remote_tables(client), [0, 1], pooling)
        expected = gradients(PooledGroup(tables(), [0, 1], pooling), train=False)
        torch.testing.assert_close(gradients(remote, train=False), expected)


@pytest.mark.filterwarnings("ignore:.*evaluation mode:UserWarning")
def test_batches_without_ids() -> None:
    group = PooledGroup(tables(), [0, 1], "mean")
    for bags in (0, 3):
        weights = torch.empty(0, requires_grad=True)
        group(
            IDS[:0], torch.zeros(2 * bags + 1, dtype=torch.int32), weights, train=False
        ).sum().backward()
        assert weights.grad is not None
        assert weights.grad.shape == (0,)


def test_the_graph_of_a_trace_does_the_same() -> None:
    group = PooledGroup(tables(), [0, 1], "mean")
    weights = torch.linspace(-1.0, 2.0, len(IDS)).requires_grad_()
    with pytest.warns(RecStoreWarning, match=WARNING):
        expected = gradients(group, train=False)
    group._warned = False

    def gradient(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        out = group(ids, OFFSETS, weights, train=False)
        return out, torch.autograd.grad(out.square().sum(), weights)[0]

    with pytest.warns(RecStoreWarning, match=WARNING):  # the trace looks up the batch
        graph = make_fx(gradient)(IDS, weights)
    out, found = graph(IDS, weights)
    assert torch.equal(found, expected)
    assert torch.equal(out, group(IDS, OFFSETS, weights, train=False))
    assert sum(len(table) for table in group.tables) == 0


@pytest.mark.slow
def test_a_compiled_lookup_warns_and_has_gradients_of_weights() -> None:
    group = PooledGroup(tables(), [0, 1], "mean")
    compiled = torch.compile(group, backend="aot_eager", fullgraph=True)
    weights = torch.linspace(-1.0, 2.0, len(IDS)).requires_grad_()
    out = compiled(IDS, OFFSETS, weights, train=False)
    with pytest.warns(RecStoreWarning, match=WARNING):
        out.square().sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, gradients(group, train=False))
    with torch.no_grad():
        assert torch.equal(compiled(IDS, OFFSETS, weights, train=False), out)
