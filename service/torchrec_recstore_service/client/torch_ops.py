"""Registers the methods of a client as ``torch.ops.recstore_ops.emb_*``, for
``torch.compile``, ``make_fx`` and export.

``client`` is :attr:`RecStoreClient.handle`. The comment behind each op in the list
names the method that it calls. The ops are registered as ordered effects: a compiler
neither removes nor reorders them. The ops do not support autograd.

    emb_read(int client, str name, Tensor ids) -> Tensor                        # pull
    emb_update(int client, str name, Tensor ids, Tensor grads) -> ()            # update
    emb_write(int client, str name, Tensor ids, Tensor values) -> ()            # push
    emb_prefetch(int client, str name, Tensor ids) -> SymInt                    # prefetch
    emb_prefetch_result(int client, SymInt handle) -> Tensor                    # wait_for_prefetch

A handle of ``emb_prefetch`` is an int. In a graph the handle is symbolic, because each
run of the graph gets a new handle. ``make_fx`` therefore needs ``tracing_mode="fake"``
or ``"symbolic"``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_recstore.fake_ops import register_python_op
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore_service.client.plain_client import client_of


def _read(client: int, name: str, ids: Tensor) -> Tensor:
    return client_of(client).pull(name, ids)


def _update(
    client: int,
    name: str,
    ids: Tensor,
    grads: Tensor,
) -> None:
    client_of(client).update(name, ids, grads)


def _write(
    client: int,
    name: str,
    ids: Tensor,
    values: Tensor,
) -> None:
    client_of(client).push(name, ids, values)


def _prefetch(client: int, name: str, ids: Tensor) -> int:
    return client_of(client).prefetch(name, ids)


def _prefetch_result(client: int, handle: int) -> Tensor:
    return client_of(client).wait_for_prefetch(handle)


# The fake versions, which return the shapes of results for graphs.


def _fake_read(client: int, name: str, ids: Tensor) -> Tensor:
    spec = client_of(client).spec(name)
    return ids.new_empty((ids.shape[0], spec.dim), dtype=value_dtype(spec.dtype))


def _fake_write(
    client: int,
    name: str,
    ids: Tensor,
    rows: Tensor,
) -> None:
    return None


def _fake_prefetch(client: int, name: str, ids: Tensor) -> torch.SymInt:
    client_of(client).spec(name)  # raises an error for an unknown table
    return torch.library.get_ctx().new_dynamic_size()


def _fake_prefetch_result(client: int, handle: torch.SymInt) -> Tensor:
    # The handle identifies neither the table nor the number of ids while a graph is
    # traced.
    dtypes = client_of(client).dtypes()
    if len(dtypes) != 1:
        raise ValueError(
            "emb_prefetch_result in a graph: the client has tables of several dtypes,"
            " and the dtype of the handle's table is not known: use a separate client"
            " for each dtype"
        )
    context = torch.library.get_ctx()
    return torch.empty(
        context.new_dynamic_size(),
        context.new_dynamic_size(),
        dtype=dtypes.pop(),
    )


for _schema, _op, _fake in (
    ("emb_read(int client, str name, Tensor ids) -> Tensor", _read, _fake_read),
    (
        "emb_update(int client, str name, Tensor ids, Tensor grads) -> ()",
        _update,
        _fake_write,
    ),
    (
        "emb_write(int client, str name, Tensor ids, Tensor values) -> ()",
        _write,
        _fake_write,
    ),
    (
        "emb_prefetch(int client, str name, Tensor ids) -> SymInt",
        _prefetch,
        _fake_prefetch,
    ),
    (
        "emb_prefetch_result(int client, SymInt handle) -> Tensor",
        _prefetch_result,
        _fake_prefetch_result,
    ),
):
    register_python_op(_schema, _op, _fake, "CompositeExplicitAutograd")
