"""Looks at all rows of a table on servers: the results of several servers together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.row_search import By, Metric, TopRows, descending
from torchrec_recstore_service.client.server_set import ServerSet
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import to_bytes

_DTYPES = {"frequency": torch.int64, "last_step": torch.int64}


def top_rows_of_servers(
    servers: ServerSet,
    table: str,
    by: By,
    count: int,
) -> TopRows:
    """Returns the rows of all servers with the largest values, without quantiles.

    See :func:`top_rows`.

    Raises:
        ServiceError: A server cannot be reached, or there is no such table.
    """
    replies = servers.look(table, by, count)
    ids = _ids(replies)
    columns = _columns(replies)
    order = descending(columns[by].double(), ids)[:count]
    return TopRows(
        rows=sum(reply.rows for reply in replies),
        steps=max(reply.steps for reply in replies),
        added=None,
        gone=None,
        ids=ids[order],
        columns={name: values[order] for name, values in columns.items()},
        quantiles={},
    )


def neighbours_on_servers(
    servers: ServerSet,
    id: int,
    table: str,
    metric: Metric,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Returns the rows of all servers that are nearest to the row of an id.

    See :func:`neighbours`.

    Raises:
        ValueError: The id has no row.
        ServiceError: A server cannot be reached, or there is no such table.
    """
    has_row, rows = servers.found_rows(table, torch.tensor([id]))
    if not has_row.any():
        raise ValueError(f"id {id} has no row in table {table!r}")
    row = to_bytes(rows.float().contiguous())
    replies = servers.look(table, metric, count, row, id)
    ids = _ids(replies)
    values = _columns(replies)[metric]
    # the nearest row has the smallest distance, but the largest similarity
    nearness = -values.double() if metric == "l2" else values.double()
    order = descending(nearness, ids)[:count]
    return ids[order], values[order]


def _ids(replies: Sequence[pb.LookReply]) -> Tensor:
    """Returns the ids that all servers have found, (n,) int64."""
    return torch.cat([_numbers(reply.ids, torch.int64) for reply in replies])


def _columns(replies: Sequence[pb.LookReply]) -> dict[str, Tensor]:
    """Returns the numbers of these ids, (n,) each, by their names."""
    columns = {}
    for name in replies[0].columns:
        dtype = _DTYPES.get(name, torch.float32)
        parts = [_numbers(reply.columns[name], dtype) for reply in replies]
        columns[name] = torch.cat(parts)
    return columns


def _numbers(content: bytes, dtype: torch.dtype) -> Tensor:
    if not content:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype)
