"""Looks at all rows of a served table."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from torchrec_recstore.checkpoint.row_search import By, Metric, nearest, top_rows
from torchrec_recstore.store import Table
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.protocol import to_bytes

_LARGEST_COUNT = 100_000


def look(request: Any, table: Table) -> pb.LookReply:
    """Returns the reply to a ``LookRequest``.

    Raises:
        ValueError: A field of the request is invalid.
    """
    if request.count > _LARGEST_COUNT:
        raise ValueError(f"count must be at most {_LARGEST_COUNT}, not {request.count}")
    if not request.row:
        rows = top_rows(table, by=cast(By, request.by), count=request.count)
        return _reply(
            rows.ids,
            dict(rows.columns),
            rows.rows,
            rows.steps,
        )
    row_bytes = 4 * len(table.columns)
    if len(request.row) != row_bytes:
        raise ValueError(f"row must have {row_bytes} bytes, not {len(request.row)}")
    row = torch.frombuffer(bytearray(request.row), dtype=torch.float32)
    ids, nearness = nearest(
        table,
        row,
        but=request.but,
        metric=cast(Metric, request.by),
        count=request.count,
    )
    return _reply(
        ids,
        {request.by: nearness},
        len(table),
        table.steps,
    )


def _reply(
    ids: Tensor,
    columns: dict[str, Tensor],
    rows: int,
    steps: int,
) -> pb.LookReply:
    contents = {name: to_bytes(values.contiguous()) for name, values in columns.items()}
    return pb.LookReply(
        rows=rows,
        steps=steps,
        ids=to_bytes(ids),
        columns=contents,
    )
