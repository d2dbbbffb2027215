"""Looks at all rows of a table on servers: the results of several servers together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.row_search import (
    By,
    Metric,
    TopRows,
    descending,
)
from torchrec_recstore_service.client.server_set import ServerSet
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import to_bytes

_DTYPES = {"frequency": torch.int64, "last_step": torch.int64}


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
