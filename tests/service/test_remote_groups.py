"""Groups whose rows a client reads and updates, compared with groups of tables in the
process, to the bit.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.kernels.optimizer_cases import OPTIMIZERS
from tests.recstore_server import RecStoreServer
from torchrec_recstore import NoInitialRow, RecStoreClient
from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD, Adagrad, Adam, Optimizer, RowOptimizer
from torchrec_recstore.options import (
    LRU,
    Expiry,
    MinFrequency,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.store import Table
from torchrec_recstore_service.client.plain_client import PlainClient
from torchrec_recstore_service.client.remote_groups import (
    ClientTable,
    RemotePooledGroup,
    RemoteSequenceGroup,
    shared_tables,
)
from torchrec_recstore_service.wire.row_requests import RowRead, RowUpdate

DIMS = (8, 5, 5, 16)  # adjacent tables of the same dim share workspace tables
FEATURE_TABLES = [0, 0, 1, 2, 3]
BAGS = 7
OPTIONS = TableOptions(seed=3, initializer=UniformInit(-1.0, 1.0))
Batch = tuple[Tensor, Tensor, list[int]]
IDS = torch.arange(-10, 10)


def batches(count: int, empty: Sequence[int] = ()) -> list[Batch]:
    """Returns the ids, the offsets and the counts of each feature.

    The last feature has no ids in the batches ``empty``.
    """
    generator = torch.Generator().manual_seed(count)
    found = []
    for step in range(count):
        lengths = torch.randint(0, 6, (len(FEATURE_TABLES), BAGS), generator=generator)
        if step in empty:
            lengths[-1] = 0
        offsets = torch.cat(
            [torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]
        )
        ids = torch.randint(-10, 10, (int(offsets[-1]),), generator=generator)
        found.append((ids, offsets, lengths.sum(1).tolist()))
    return found


class Both:
    """The same tables in the process and of a client."""

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: torch.dtype = torch.float32,
        options: TableOptions = OPTIONS,
        staleness: int = 0,
        servers: Sequence[str] | None = None,
        prefix: str = "t",
    ) -> None:
        self.client = RecStoreClient(servers, private=True)
        names = [f"{prefix}{number}" for number in range(len(DIMS))]
        self.here = [
            Table(dim, dtype, optimizer, options, name=name)
            for dim, name in zip(DIMS, names, strict=True)
        ]
        self.remote = [
            ClientTable(
                self.client, name, (100, dim), dtype, optimizer, options, staleness
            )
            for dim, name in zip(DIMS, names, strict=True)
        ]

    def pooled(
        self, pooling: Literal["sum", "mean"] = "sum"
    ) -> tuple[PooledGroup, RemotePooledGroup]:
        return (
            PooledGroup(self.here, FEATURE_TABLES, pooling),
            RemotePooledGroup(self.remote, FEATURE_TABLES, pooling),
        )

    def assert_equal_rows(self, steps: bool = True) -> None:
        for here, remote in zip(self.here, self.remote, strict=True):
            there = here.contains(IDS)
            assert torch.equal(there, self.client.exists(remote.name, IDS))
            assert torch.equal(
                here.lookup(IDS[there]), self.client.pull(remote.name, IDS[there])
            )
            assert not steps or (here.stats().steps, here.stats().updates) == (
                self.client.stats(remote.name).steps,
                self.client.stats(remote.name).updates,
            )


def step(
    groups: Sequence[PooledGroup | RemotePooledGroup],
    batch: Batch,
    weighted: bool = False,
) -> list[tuple[Tensor, Tensor | None]]:
    """Runs a training step of each group and returns the outputs and the gradients of
    the weights.
    """
    ids, offsets, _ = batch
    weights = torch.linspace(-1, 1, len(ids)) if weighted else None
    results, grad = [], None
    for group in groups:
        own = None if weights is None else weights.clone().requires_grad_()
        out = group(ids, offsets, own, train=True)
        grad = torch.randn(out.shape) if grad is None else grad
        out.backward(grad)
        results.append((out.detach(), None if own is None else own.grad))
    return results


def assert_equal(results: list[tuple[Tensor, Tensor | None]]) -> None:
    (first, its_grad), (second, other_grad) = results
    assert torch.equal(first, second)
    assert (its_grad is None) == (other_grad is None)
    assert its_grad is None or other_grad is None or torch.equal(its_grad, other_grad)


@pytest.mark.parametrize(
    "optimizer",
    [each for each in OPTIMIZERS if not isinstance(each, RowOptimizer)],
    ids=repr,
)
def test_every_optimizer(optimizer: Optimizer) -> None:
    both = Both(optimizer)
    groups = both.pooled()
    for batch in batches(4, empty=[1]):
        assert_equal(step(groups, batch, weighted=True))
    both.assert_equal_rows()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8]
)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_every_data_type_and_pooling(
    dtype: torch.dtype, pooling: Literal["sum", "mean"]
) -> None:
    for missing in ("zeros", "init"):
        both = Both(
            Adagrad(lr=0.1),
            dtype,
            TableOptions(seed=3, initializer=UniformInit(-1.0, 1.0), missing=missing),
        )
        groups = both.pooled(pooling)
        for batch in batches(3):
            assert_equal(step(groups, batch))
            read = [group(batch[0] + 5, batch[1], train=False) for group in groups]
            assert torch.equal(*read)
            assert read[1].requires_grad
        both.assert_equal_rows()


@pytest.mark.parametrize("optimizer", [Adagrad(lr=0.1), Adam(lr=0.1)], ids=repr)
def test_a_schedule_of_the_learning_rate(
    optimizer: Optimizer, two_servers: list[RecStoreServer]
) -> None:
    for servers in (None, [server.address for server in two_servers]):
        both = Both(
            optimizer,
            staleness=1,
            servers=servers,
            prefix=f"scheduled_{type(optimizer).__name__}",
        )
        groups = both.pooled()
        for number, batch in enumerate(batches(5)):
            for group in groups:
                group.learning_rate = partial(pow, 0.5, number)
            step(groups, batch)
            groups[1].wait_for_updates()
        both.assert_equal_rows(steps=servers is None)


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, max_rows=19, eviction=LRU()),
        replace(OPTIONS, admission=MinFrequency(2)),
        replace(OPTIONS, expiry=Expiry(4)),
    ],
)
def test_bounds_count_the_same_steps(options: TableOptions) -> None:
    both = Both(Adam(lr=0.1), options=options)
    groups = both.pooled()
    for batch in batches(6, empty=[2, 3]):
        assert_equal(step(groups, batch))
    both.assert_equal_rows()


def test_tables_of_other_dims_and_clipping_have_workspaces_of_their_own() -> None:
    """Gradients are clipped where they are summed: in the workspace."""
    client = RecStoreClient()
    zeros = TableOptions(initializer=UniformInit(0.0, 0.0))
    tables = []
    for number, (dim, bound) in enumerate([(4, 1.0), (4, 1.0), (4, 2.0), (8, 2.0)]):
        optimizer = SGD(lr=1.0, max_gradient=bound)
        shape = (100, dim)
        tables.append(
            ClientTable(client, f"t{number}", shape, torch.float32, optimizer, zeros)
        )
    assert shared_tables(tables) == [[0, 1], [2], [3]]
    group = RemoteSequenceGroup(tables[1:3])
    ids = torch.tensor([7, 7])
    group(ids, [1, 1], train=True).backward(torch.full((8,), 3.0))
    assert tables[1].lookup(ids)[0, 0] == -1.0
    assert tables[2].lookup(ids)[0, 0] == -2.0


def test_rows_without_pooling() -> None:
    both = Both(Adagrad(lr=0.1, max_gradient=0.5))
    groups = SequenceGroup(both.here), RemoteSequenceGroup(both.remote)
    for ids, _, features in batches(4, empty=[1]):
        counts = [features[0] + features[1], *features[2:]]
        groups[1].prefetch(ids, counts)
        outs = [group(ids, counts, train=True) for group in groups]
        assert torch.equal(*outs)
        grad = torch.randn(outs[0].shape)
        for out in outs:
            out.backward(grad)
        assert torch.equal(*(group(ids, counts, train=False) for group in groups))
    both.assert_equal_rows()
    with pytest.raises(
        ValueError,
        match="counts must have a number for each of 4 tables, and the sum 2",
    ):
        groups[1](IDS[:2], [1, 1], train=True)


class Counted:
    """The reads of a client: the ids of each call, by table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[list[Tensor]] = []
        original = PlainClient.pull_each

        def counting(client: PlainClient, reads: Sequence[RowRead]) -> list[Tensor]:
            self.reads.append([read.ids for read in reads])
            return original(client, reads)

        monkeypatch.setattr(PlainClient, "pull_each", counting)


@pytest.mark.parametrize("ahead", [1, 3, 6])
def test_prefetched_rows_include_later_updates(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    both = Both(Adagrad(lr=0.1))
    groups = both.pooled()
    given = batches(8)
    reads = Counted(monkeypatch)
    for number, batch in enumerate(given):
        for coming in (
            given[number : number + ahead]
            if number == 0
            else given[number + ahead - 1 : number + ahead]
        ):
            groups[1].prefetch(coming[0], coming[2])
        assert_equal(step(groups, batch))
    both.assert_equal_rows()
    # Rows are read again only where an update came in between; the four newest
    # prefetches are kept.
    again = [sum(map(len, some)) for some in reads.reads]
    assert len(again) == {1: 0, 3: 7, 6: 8}[ahead]
    assert ahead > 4 or all(0 < count < 58 for count in again)


def test_a_prefetched_batch_may_change_or_never_come() -> None:
    both = Both(Adagrad(lr=0.1))
    groups = both.pooled()
    given = batches(3)
    for ids, _, counts in given[1:]:
        own = ids.clone()
        groups[1].prefetch(own, counts)
        own.zero_()
    for batch in given:
        assert_equal(step(groups, batch))
    both.assert_equal_rows()


class Held:
    """A client whose updates are carried out when the test says so."""

    def __init__(self, client: RecStoreClient) -> None:
        self.client = client
        self.held: dict[int, Sequence[RowUpdate]] = {}
        self.waited: list[int] = []
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> object:
        return getattr(self.client, name)

    def update_each_async(self, updates: Sequence[RowUpdate]) -> int:
        number = next(self._numbers)
        self.held[number] = updates
        return number

    def has_finished(self, handle: int) -> bool:
        return handle not in self.held

    def wait(self, handle: int) -> None:
        self.waited.append(handle)
        self.client.update_each(self.held.pop(handle))


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("prefetching", [False, True])
def test_rows_lack_the_last_updates_only(staleness: int, prefetching: bool) -> None:
    """With SGD of rate 1 from rows of zeros, a row is minus the sum of the gradients
    that it includes.
    """
    client = Held(RecStoreClient())
    options = TableOptions(initializer=UniformInit(0.0, 0.0))
    table = ClientTable(
        client, "t", (100, 1), torch.float32, SGD(lr=1.0), options, staleness
    )  # type: ignore[arg-type]
    group = RemotePooledGroup([table], [0], "sum")
    ids, offsets = torch.tensor([7]), torch.tensor([0, 1])
    for number in range(6):
        out = group(ids, offsets, train=True)
        assert out.item() == -max(0, number - staleness)
        if prefetching:
            group.prefetch(ids, [1])
        out.backward(torch.ones(1, 1))
        assert len(client.held) <= staleness
    assert client.waited == list(range(1, 7 - staleness))
    # an evaluation waits for all updates
    assert group(ids, offsets, train=False).item() == -6
    assert not client.held


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_prefetch_beside_an_update(staleness: int) -> None:
    """The rows of the next batch are read while the update of a batch is under way, as
    a pipeline's thread may do.
    """
    client = RecStoreClient()
    options = TableOptions(initializer=UniformInit(0.0, 0.0))
    table = ClientTable(
        client, "t", (100, 1), torch.float32, SGD(lr=1.0), options, staleness
    )
    group = RemotePooledGroup([table], [0], "sum")
    ids, offsets = torch.tensor([7]), torch.tensor([0, 1])
    apply = client.update_each if staleness == 0 else client.update_each_async

    def prefetch_first(updates: Sequence[RowUpdate]) -> object:
        group.prefetch(ids, [1])
        # by now the rows have been read
        client.wait_for_each(client.prefetch_each([RowRead("t", ids)]))
        return apply(updates)

    setattr(client, apply.__name__, prefetch_first)
    for number in range(5):
        out = group(ids, offsets, train=True)
        assert -number <= out.item() <= -max(0, number - staleness)
        out.backward(torch.ones(1, 1))


def test_updates_that_have_ended_are_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefetch that begins when all updates have been carried out has rows that the
    lookup takes as they are.
    """
    group = Both(Adagrad(lr=0.1), staleness=1).pooled()[1]
    given = batches(5)
    step([group], given[0])
    group.prefetch(given[1][0], given[1][2])
    reads = Counted(monkeypatch)
    for batch, coming in itertools.pairwise(given[1:]):
        out = group(batch[0], batch[1], train=True)
        group._client._updates.wait_for_earlier()
        group.prefetch(coming[0], coming[2])
        out.sum().backward()
    assert len(reads.reads) == 0


def test_a_failed_update_is_raised_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Both(SGD(lr=1.0), staleness=1)
    group = both.pooled()[1]
    given = batches(2)
    step([group], given[0])
    group(given[0][0], given[0][1], train=False)

    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(
        "torchrec_recstore_service.tables.hosted.HostedTables.update_each", fail
    )
    step([group], given[0])
    with pytest.raises(MemoryError, match="no room"):
        step([group], given[1])


def test_several_lookups_may_be_pending() -> None:
    both = Both(Adagrad(lr=0.1))
    groups = both.pooled()
    given = batches(3)
    for order in ((0, 1, 2), (2, 0, 1)):
        outs = [
            [group(ids, offsets, train=True) for ids, offsets, _ in given]
            for group in groups
        ]
        grads = [torch.randn(out.shape) for out in outs[0]]
        for number in order:
            assert torch.equal(outs[0][number], outs[1][number])
            for of_kernel in outs:
                of_kernel[number].backward(grads[number], retain_graph=True)
        for of_kernel in outs:
            of_kernel[0].backward(grads[0])
        del outs
    gc.collect()
    # graphs that were freed have given their tables back
    assert len(groups[1]._free) == 3
    # a client's step is an update, and not a lookup
    both.assert_equal_rows(steps=False)


def test_weights_of_a_graph_that_is_kept() -> None:
    both = Both(Adagrad(lr=0.1))
    group = both.pooled()[1]
    ids, offsets, _ = batches(1)[0]
    weights = torch.rand(len(ids), requires_grad=True)
    out = group(ids, offsets, weights, train=True)
    found = [
        torch.autograd.grad(out.sum(), weights, retain_graph=True)[0] for _ in range(2)
    ]
    assert torch.equal(*found)  # the gradient of the rows that the forward has read


def test_a_forward_without_backward_makes_no_row() -> None:
    both = Both(Adagrad(lr=0.1))
    group = both.pooled()[1]
    ids, offsets, _ = batches(1)[0]
    for _ in range(3):
        group(ids, offsets, train=True)
    gc.collect()
    assert len(group._free) == 1
    assert both.client.stats("t0").rows == 0


def test_what_is_refused() -> None:
    client = RecStoreClient()
    arguments = (client, "t", (10, 4), torch.float32, SGD(lr=1.0), OPTIONS)
    for staleness, kind in ((-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="staleness must"):
            ClientTable(*arguments, staleness)  # type: ignore[arg-type]
    table = ClientTable(*arguments)
    group = RemotePooledGroup([table, table], [0, 1], "sum")
    with pytest.raises(ValueError, match="feature_tables must ascend"):
        RemotePooledGroup([table, table], [1, 0], "sum")
    with pytest.raises(TypeError, match="ids must be int64"):
        group(IDS.int(), torch.tensor([0, 10, 20]), train=True)
    for offsets in ([0, 10, 19], [1, 10, 20], [0, 20, 10], [0, 20]):
        with pytest.raises(
            ValueError,
            match="offsets must ascend from 0 to 20, with equal bags for 2 features",
        ):
            group(IDS, torch.tensor(offsets), train=True)
    client.init_data(
        "u", (10, 4), row_func=lambda shape, dtype: torch.ones(shape, dtype=dtype)
    )
    with pytest.raises(
        NoInitialRow, match="table 'u' has rows that an init_func or row_func makes"
    ):
        client.pull_each([RowRead("u", IDS)])
