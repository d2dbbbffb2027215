"""Whether the tables of a group have rows in the memory of the device that their model
is on.

Tests: tests/device/test_placement.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrec_recstore.kernels.pooled_group import PooledGroup
from torchrec_recstore.kernels.sequence_group import SequenceGroup
from torchrec_recstore.options import device_rows_of
from torchrec_recstore.store import Table

_ON_HOST = ("cpu", "meta")


def put_asked_rows_on_device(
    group: PooledGroup | SequenceGroup,
    tables: Sequence[Table],
    device: torch.device | None,
) -> None:
    """Gives the tables of a group the ``device_rows`` of their options on a device,
    before the first lookup.

    Nothing happens if the device is a CPU, or None, or if no table has
    ``device_rows``.

    Raises:
        ValueError: A table has ``device_rows`` and cannot have rows on a device. The
            message names the table and the option.
    """
    if device is None or device.type in _ON_HOST:
        return
    rows = [device_rows_of(table.options) for table in tables]
    asked = [table.name for table in tables if table.options.device_rows]
    if not asked:
        return
    for table in tables:
        if not table.options.device_rows:
            raise ValueError(
                f"table {asked[0]!r} has device_rows, and table {table.name!r} of the"
                " same group has none: set device_rows of both tables, or of neither"
            )
        if table.options.frozen:
            raise ValueError(
                f"table {table.name!r}: rows cannot be in the memory of a device: the"
                " table is frozen, and rows come to a device in training lookups; use"
                " device_rows=0"
            )
    group.put_on_device(_with_index(device), rows)


def _with_index(device: torch.device) -> torch.device:
    """Returns a device with its index, as the tensors on it have it."""
    return torch.empty(0, device=device).device
