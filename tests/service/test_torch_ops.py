"""Tests of the torch ops of a client, eager and in graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from torchrec_recstore.optim import SGD
from torchrec_recstore_service import RecStoreClient

DIM = 4
IDS = torch.tensor([7, -5, 7])
GRADS = torch.arange(12.0).view(3, DIM)
ops = torch.ops.recstore_ops


@pytest.fixture
def client() -> RecStoreClient:
    client = RecStoreClient(private=True)
    client.init_data("t", (10, DIM), optimizer=SGD(lr=0.5))
    return client


def step(client: int, ids: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
    """Reads before and after writes.

    The first result is not used. Arithmetic would need a compiler.
    """
    ops.emb_read(client, "t", ids)
    before = ops.emb_read(client, "t", ids)
    ops.emb_update(client, "t", ids, grads)
    updated = ops.emb_read(client, "t", ids)
    ops.emb_write(client, "t", ids, grads)
    written = ops.emb_read(client, "t", ids)
    ops.emb_update(client, "t", ids, grads)
    return before, updated, written


def expected(client: RecStoreClient, ids: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
    before = client.pull("t", ids)
    client.update("t", ids, grads)
    updated = client.pull("t", ids)
    client.push("t", ids, grads)
    written = client.pull("t", ids)
    client.update("t", ids, grads)
    return before, updated, written


def assert_steps(
    run: Callable[[Tensor, Tensor], tuple[Tensor, ...]], client: RecStoreClient
) -> None:
    """Checks that two calls of ``run`` have the effects of the client's methods."""
    other = RecStoreClient(private=True)
    other.init_data("t", (10, DIM), optimizer=SGD(lr=0.5))
    steps = client.stats("t").steps
    assert steps == 0
    for ids, grads in ((IDS, GRADS), (IDS - 1, GRADS.flip(0))):
        for one, two in zip(run(ids, grads), expected(other, ids, grads), strict=True):
            assert torch.equal(one, two)
    every = torch.arange(-10, 10)
    assert torch.equal(client.pull("t", every), other.pull("t", every))
    assert client.stats("t") == other.stats("t")


def test_eager(client: RecStoreClient) -> None:
    assert_steps(lambda ids, grads: step(client.handle, ids, grads), client)
    handle = ops.emb_prefetch(client.handle, "t", IDS)
    assert type(handle) is int
    assert torch.equal(
        ops.emb_prefetch_result(client.handle, handle), client.pull("t", IDS)
    )
    with pytest.raises(ValueError, match="no prefetch"):
        ops.emb_prefetch_result(client.handle, handle)


@pytest.fixture
def anew() -> Iterator[None]:
    """Disables the caches of compiled graphs, because torch's caches do not know the
    effects of ops.
    """
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(client: RecStoreClient, backend: str) -> None:
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    assert_steps(lambda ids, grads: compiled(client.handle, ids, grads), client)


@pytest.mark.usefixtures("anew")
def test_compile_with_other_lengths(client: RecStoreClient) -> None:
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (1, 3, 8):
        ids = torch.arange(n)
        before, _, written = compiled(client.handle, ids, torch.ones(n, DIM))
        assert before.shape == written.shape == (n, DIM)
        assert torch.equal(client.pull("t", ids), written - 0.5)


@pytest.mark.usefixtures("anew")
def test_compile_a_prefetch(client: RecStoreClient) -> None:
    """A graph computes between prefetch and wait. Each run has a different handle."""

    def ahead(client: int, ids: Tensor, grads: Tensor) -> Tensor:
        handle = ops.emb_prefetch(client, "t", ids)
        doubled = grads * 2
        rows = ops.emb_prefetch_result(client, handle)
        ops.emb_update(client, "t", ids, doubled)
        return rows * 3

    compiled = torch.compile(ahead, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        rows = client.pull("t", IDS)
        assert torch.equal(compiled(client.handle, IDS, GRADS), rows * 3)
        assert not torch.equal(client.pull("t", IDS), rows)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(client: RecStoreClient, mode: str) -> None:
    traced_with = RecStoreClient(private=True)
    traced_with.init_data("t", (10, DIM), optimizer=SGD(lr=0.5))
    graph = make_fx(
        lambda ids, grads: step(traced_with.handle, ids, grads), tracing_mode=mode
    )(IDS, GRADS)
    called = [
        node.target.name().split("::")[1]
        for node in graph.graph.nodes
        if "recstore" in str(node.target)
    ]
    assert called == [
        "emb_read",
        "emb_read",
        "emb_update",
        "emb_read",
        "emb_write",
        "emb_read",
        "emb_update",
    ]
    if mode != "real":
        assert len(traced_with.pull("t", IDS)) == 3
        assert traced_with.stats("t").rows == 0  # tracing writes nothing
        assert_steps(lambda ids, grads: graph(ids, grads), traced_with)


def test_fakes_know_dim_and_dtype(client: RecStoreClient) -> None:
    client.init_data("half", (10, 3), torch.bfloat16)
    shapes: list[tuple[torch.Size, torch.dtype]] = []

    def read(ids: Tensor) -> Tensor:
        rows: Tensor = ops.emb_read(client.handle, "half", ids)
        shapes.append((rows.shape, rows.dtype))
        return rows

    make_fx(read, tracing_mode="fake")(IDS)
    assert shapes == [((3, 3), torch.bfloat16)]
    with pytest.raises(ValueError, match="no table 'u'"):
        make_fx(lambda ids: ops.emb_read(client.handle, "u", ids), tracing_mode="fake")(
            IDS
        )

    def ahead(ids: Tensor) -> Any:
        return ops.emb_prefetch_result(
            client.handle, ops.emb_prefetch(client.handle, "half", ids)
        )

    with pytest.raises(ValueError, match="tables of several dtypes"):
        make_fx(ahead, tracing_mode="fake")(IDS)
    client.close()
    alone = RecStoreClient(private=True)
    alone.init_data("half", (10, 3), torch.bfloat16)
    client = alone
    graph = make_fx(ahead, tracing_mode="fake")(IDS)
    assert graph(IDS).dtype is torch.bfloat16


CASES: dict[str, Callable[[RecStoreClient], tuple[Any, ...]]] = {
    "emb_read": lambda client: (client.handle, "t", IDS),
    "emb_update": lambda client: (client.handle, "t", IDS, GRADS),
    "emb_write": lambda client: (client.handle, "t", IDS, GRADS),
    "emb_prefetch": lambda client: (client.handle, "t", IDS),
    "emb_prefetch_result": lambda client: (client.handle, client.prefetch("t", IDS)),
}


def test_every_op_has_a_case() -> None:
    names = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if "recstore_ops::emb_" in name
    }
    assert names == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_opcheck(client: RecStoreClient, name: str) -> None:
    checks = [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    ]
    if name == "emb_prefetch":
        checks.remove("test_aot_dispatch_dynamic")  # it compares handles, which differ
    if name == "emb_prefetch_result":
        checks = checks[:1]  # the other checks use one handle several times
    opcheck(getattr(ops, name).default, CASES[name](client), test_utils=checks)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_client_that_is_gone(name: str) -> None:
    client = RecStoreClient(private=True)
    client.init_data("t", (10, DIM))
    arguments = CASES[name](client)
    op = getattr(ops, name)
    for bad in (10**9, -1):
        with pytest.raises(
            ValueError, match=f"no RecStoreClient with the handle {bad}"
        ):
            op(bad, *arguments[1:])
    client.close()
    with pytest.raises(ValueError, match="is closed"):
        op(*arguments)
    del client
    gc.collect()
    with pytest.raises(ValueError, match="no RecStoreClient with the handle"):
        op(*arguments)


def test_errors_are_the_clients(client: RecStoreClient) -> None:
    for call, kind, error in (
        (
            lambda: ops.emb_read(client.handle, "t", IDS.float()),
            TypeError,
            "'t': ids must be an int64 tensor",
        ),
        (
            lambda: ops.emb_update(client.handle, "t", IDS, GRADS[:2]),
            ValueError,
            "'t': grads must have the shape",
        ),
        (
            lambda: ops.emb_write(client.handle, "t", IDS, GRADS[:2]),
            ValueError,
            "'t': values must have the shape",
        ),
        (lambda: ops.emb_read(client.handle, "u", IDS), ValueError, "no table 'u'"),
    ):
        with pytest.raises(kind, match=error):
            call()


def test_gradients_do_not_go_through(client: RecStoreClient) -> None:
    grads = GRADS.clone().requires_grad_()
    ops.emb_update(client.handle, "t", IDS, grads * 2)
    assert not ops.emb_read(client.handle, "t", IDS).requires_grad
    assert client.stats("t").updates == 2
