"""The kernels of a device that is simulated on the host: they run the row loops of this
package's core on tensors of the host.

They have the results of the kernels of a CUDA device
(:mod:`torchrec_recstore.kernels.device_kernels`), which are compared with them.

Tests: tests/kernels/test_reference_kernels.py, tests/kernels/test_device_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels.device_interface import (
    INTEGERS,
    NUMBERS,
    ArenaLayout,
    UpdateKind,
)

_LABEL = "rows of a device"


def _fields(layout: ArenaLayout) -> tuple[Sequence[str], Sequence[int]]:
    """Returns the names and the values of a layout, as csrc/rows/arena_row.h takes
    them.
    """
    fields = {name: int(value) for name, value in asdict(layout).items()}
    return list(fields), list(fields.values())


def _wide(offsets: Tensor | None) -> Tensor | None:
    return None if offsets is None else offsets.long()


def _flat(grad: Tensor) -> Tensor:
    return grad.reshape(-1).float()


class ReferenceKernels:
    """See ``DeviceKernels``. All tensors are on the host, or on a device whose ops are
    those of the host.
    """

    def gather(self, arena: Tensor, slots: Tensor, out: Tensor) -> None:
        """See ``DeviceKernels.gather``."""
        out.copy_(arena.index_select(0, slots.long()))

    def scatter(
        self, arena: Tensor, slots: Tensor, rows: Tensor, *, compile_only: bool = False
    ) -> None:
        """See ``DeviceKernels.scatter``."""
        if compile_only:
            return
        arena.index_copy_(0, slots.long(), rows)

    def pool(
        self,
        layout: ArenaLayout,
        arena: Tensor,
        base: int,
        staging: Tensor | None,
        slots: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        segments: Tensor,
        most_bags: int,
        mean: bool,
        out: Tensor,
    ) -> None:
        """See ``DeviceKernels.pool``."""
        names, values = _fields(layout)
        flat = out.view(-1)
        floats = flat if flat.dtype is torch.float32 else flat.float()
        with ops.native_errors(_LABEL):
            ops.device_pool(
                names,
                values,
                arena,
                base,
                staging,
                slots,
                _wide(offsets),
                weights,
                segments,
                mean,
                floats,
            )
        if floats is not flat:
            flat.copy_(floats)

    def locate(
        self,
        offsets: Tensor | None,
        weights: Tensor | None,
        segments: Tensor,
        most_bags: int,
        mean: bool,
        sources: Tensor,
        scales: Tensor,
        tables: Tensor,
    ) -> None:
        """See ``DeviceKernels.locate``."""
        with ops.native_errors(_LABEL):
            ops.device_locate(
                _wide(offsets), weights, segments, mean, sources, scales, tables
            )

    def sort(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DeviceKernels.sort``."""
        keys, order = torch.sort(slots, stable=True)
        return keys, order

    def weight_gradients(
        self,
        kind: UpdateKind,
        arena: Tensor,
        base: int,
        staging: Tensor | None,
        slots: Tensor,
        offsets: Tensor | None,
        segments: Tensor,
        most_bags: int,
        mean: bool,
        grad: Tensor,
        numbers: Tensor,
        out: Tensor,
    ) -> None:
        """See ``DeviceKernels.weight_gradients``."""
        names, values = _fields(kind.layout)
        with ops.native_errors(_LABEL):
            ops.device_weight_gradients(
                names,
                values,
                arena,
                base,
                staging,
                slots,
                _wide(offsets),
                segments,
                mean,
                _flat(grad),
                NUMBERS,
                numbers,
                out,
            )

    def check_finite(
        self,
        grad: Tensor,
        segments: Tensor,
        most_bags: int,
        columns: int,
        integers: Tensor,
        failed: Tensor,
    ) -> None:
        """See ``DeviceKernels.check_finite``."""
        with ops.native_errors(_LABEL):
            ops.device_check_finite(
                _flat(grad), segments, columns, INTEGERS, integers, failed
            )

    def new_sums(
        self, kind: UpdateKind, positions: int, device: torch.device
    ) -> Tensor:
        """See ``DeviceKernels.new_sums``."""
        return torch.empty(0, device=device)

    def update(
        self,
        kind: UpdateKind,
        arena: Tensor,
        base: int,
        keys: Tensor,
        order: Tensor,
        begin: int,
        end: int,
        sources: Tensor,
        scales: Tensor,
        tables: Tensor,
        grad: Tensor,
        numbers: Tensor,
        integers: Tensor,
        ids: Tensor | None,
        failed: Tensor | None,
        skipped: Tensor | None,
        sums: Tensor,
        *,
        compile_only: bool = False,
    ) -> None:
        """See ``DeviceKernels.update``."""
        if compile_only:
            return
        names, values = _fields(kind.layout)
        with ops.native_errors(_LABEL):
            ops.device_update(
                names,
                values,
                arena,
                base,
                keys,
                order,
                begin,
                end,
                sources,
                scales,
                tables,
                _flat(grad),
                NUMBERS,
                numbers,
                INTEGERS,
                integers,
                ids,
                failed,
                skipped,
            )
