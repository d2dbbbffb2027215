"""Looks at all rows of a served table, and the results of several servers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.row_search import (
    By,
    Metric,
    TopRows,
    descending,
    nearest,
    top_rows,
)
from torchrec_recstore.store import Table
from torchrec_recstore_service.client.server_set import ServerSet
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import to_bytes

_LARGEST_COUNT = 100_000
_DTYPES = {"frequency": torch.int64, "last_step": torch.int64}


def look(request: Any, table: Table) -> pb.LookReply:
    """Returns the reply to a ``LookRequest``.

    Raises:
        ValueError: A field of the request is invalid.
    """
    if request.count > _LARGEST_COUNT:
        raise ValueError(f"count must be at most {_LARGEST_COUNT}, not {request.count}")
    if not request.row:
        found = top_rows(table, by=cast(By, request.by), count=request.count)
        return _reply(found.ids, dict(found.columns), found.rows, found.steps)
    if len(request.row) != 4 * len(table.columns):
        raise ValueError(
            f"row must have {4 * len(table.columns)} bytes, not {len(request.row)}"
        )
    row = torch.frombuffer(bytearray(request.row), dtype=torch.float32)
    ids, near = nearest(
        table,
        row,
        but=request.but,
        metric=cast(Metric, request.by),
        count=request.count,
    )
    return _reply(ids, {request.by: near}, len(table), table.steps)


def _reply(
    ids: Tensor, columns: dict[str, Tensor], rows: int, steps: int
) -> pb.LookReply:
    values = {name: to_bytes(each.contiguous()) for name, each in columns.items()}
    return pb.LookReply(rows=rows, steps=steps, ids=to_bytes(ids), columns=values)


def top_rows_of_servers(servers: ServerSet, table: str, by: By, count: int) -> TopRows:
    """Returns the rows with the largest values among those of all servers, without
    quantiles.

    See :func:`top_rows`.

    Raises:
        ServiceError: A server cannot be reached, or there is no such table.
    """
    ids, columns, replies = _of_all_servers(servers.look(table, by, count))
    order = descending(columns[by].double(), ids)[:count]
    return TopRows(
        rows=sum(reply.rows for reply in replies),
        steps=max(reply.steps for reply in replies),
        added=None,
        gone=None,
        ids=ids[order],
        columns={name: each[order] for name, each in columns.items()},
        quantiles={},
    )


def neighbours_on_servers(
    servers: ServerSet, id: int, table: str, metric: Metric, count: int
) -> tuple[Tensor, Tensor]:
    """Returns the rows of all servers that are nearest to the row of an id.

    See :func:`neighbours`.

    Raises:
        ValueError: The id has no row.
        ServiceError: A server cannot be reached, or there is no such table.
    """
    found, rows = servers.found_rows(table, torch.tensor([id]))
    if not found.any():
        raise ValueError(f"id {id} has no row in table {table!r}")
    row = rows.float().contiguous()
    ids, columns, _ = _of_all_servers(
        servers.look(table, metric, count, to_bytes(row), id)
    )
    near = columns[metric]
    order = descending(near.double() if metric != "l2" else -near.double(), ids)[:count]
    return ids[order], near[order]


def _of_all_servers(
    replies: Sequence[pb.LookReply],
) -> tuple[Tensor, dict[str, Tensor], Sequence[pb.LookReply]]:
    ids = torch.cat([_numbers(reply.ids, torch.int64) for reply in replies])
    columns = {
        name: torch.cat(
            [
                _numbers(reply.columns[name], _DTYPES.get(name, torch.float32))
                for reply in replies
            ]
        )
        for name in replies[0].columns
    }
    return ids, columns, replies


def _numbers(data: bytes, dtype: torch.dtype) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=dtype)
        if data
        else torch.empty(0, dtype=dtype)
    )
