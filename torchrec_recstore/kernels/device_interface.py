"""The interface of the kernels that pool and update rows in the memory of a device.

An *arena* is a tensor on a device with the rows of one layout, (rows, stride) float32.
A row of an arena has these parts:

- the row as the host has it: its weights, and then its element-wise optimizer states
- the row-wise optimizer state, one float32, if the optimizer has such a state
- padding to a multiple of 16 bytes

csrc/rows/arena_row.h is the same layout in C++. The last step and the frequency of a
row stay on the host.

In all methods of :class:`DeviceKernels`:

- ``slots``, (N,) int32, says for each position of a batch where its row is. A number
  from 0 on is a device slot: row ``slot - base`` of an arena whose slots begin at
  ``base``. -1 is a position without a row, which reads as zeros and adds nothing. A
  number below -1 is the row ``-2 - slot`` of ``staging``, which is read only.
- ``offsets``, (bags + 1,) int32 or int64, are the positions at which the bags of the
  batch begin, None if each position is a bag of its own.
- ``segments``, (S, 5) int64, are the bags of one feature each: the number of the first
  bag, the number of bags, the element of the flat output at which the first bag begins,
  the number of elements between bags, and the number of the table. ``most_bags`` is
  the largest number of bags of a segment.
- ``numbers``, (tables, len(NUMBERS)) float32, and ``integers``, (tables, len(INTEGERS))
  int64, are the settings of each table for one update.

A kernel runs on the current stream, and no method waits for it.

A kernel is compiled when it is first used, which can fail. With ``compile_only``, the
methods that change rows do everything but run the kernel, so that a group can compile
all kernels of a change before it runs the first one.

Tests: tests/kernels/test_device_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from torchrec_recstore.optim import Ftrl, Optimizer, RowOptimizer, state_names
from torchrec_recstore.row_types import ROW_TYPES, row_bytes
from torchrec_recstore.store import Table

NUMBERS = (
    "learning_rate",
    "eps",
    "weight_decay",
    "decay_factor",
    "momentum",
    "beta1",
    "beta2",
    "one_minus_beta1",
    "one_minus_beta2",
    "adam_rate",
    "bias1",
    "bias2",
    "eta",
    "alpha",
    "one_minus_alpha",
    "l1",
    "l2",
    "beta",
    "max_gradient",
    "max_gradient_norm",
    "max_norm",
    "decouple",
)
"""The float32 settings of a table in one update: members of ``StepScalars`` in
csrc/rows/optimizer.h. 0 in the last four is off.
"""

INTEGERS = (
    "stochastic",
    "rounding_key",
    "column_begin",
    "block_rows",
    "world_size",
    "rank",
    "mixed",
    "nonfinite",
)
"""The int64 settings of a table in one update.

They are the members of ``StochasticRounding`` and ``Routing`` of csrc, and
``NONFINITE.index`` of ``TableOptions.nonfinite``.
"""

SEGMENT_FIELDS = 5
_ROW_ALIGNMENT = 4  # floats


@dataclass(frozen=True)
class ArenaLayout:
    """The layout of the rows of an arena. Tables with equal layouts share an arena."""

    columns: int
    """The number of columns of the shard."""
    row_type: int
    """The value of ``ROW_TYPES``."""
    optimizer: int
    """``Optimizer.kind``."""
    element_states: int
    """The number of element-wise states."""
    has_row_state: bool
    """Whether a row has a row-wise state."""

    @classmethod
    def of(cls, table: Table) -> ArenaLayout:
        """Returns the layout of a table's rows.

        Raises:
            ValueError: Kernels cannot update rows of this kind. The message names the
                table and the option.
        """
        reason = unsupported(table.dtype, table.state_dtype, table.optimizer)
        if reason is not None:
            raise ValueError(
                f"table {table.name!r}: rows cannot be in the memory of a device:"
                f" {reason}; use device_rows=0"
            )
        kinds = list(state_names(table.optimizer).values())
        return cls(
            columns=len(table.columns),
            row_type=ROW_TYPES[table.dtype],
            optimizer=table.optimizer.kind,
            element_states=kinds.count("element"),
            has_row_state="row" in kinds,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights."""
        for dtype, row_type in ROW_TYPES.items():
            if row_type == self.row_type:
                return dtype
        raise ValueError(f"no row type has the number {self.row_type}")

    @property
    def weight_floats(self) -> int:
        """The number of floats of the weights."""
        return row_bytes(self.dtype, self.columns) // 4

    @property
    def host_floats(self) -> int:
        """The number of floats of a row of the host."""
        return self.weight_floats + self.element_states * self.columns

    @property
    def stride(self) -> int:
        """The number of floats of a row of an arena."""
        floats = self.host_floats + int(self.has_row_state)
        return -(-floats // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def unsupported(
    dtype: torch.dtype, state_dtype: torch.dtype, optimizer: Optimizer
) -> str | None:
    """Returns the option of a table for which there is no kernel, None if there are
    kernels for all.
    """
    if dtype is torch.int8:
        return "dtype=torch.int8"
    if state_dtype is not torch.float32:
        return f"state_dtype={state_dtype}"
    if isinstance(optimizer, RowOptimizer):
        return f"the optimizer {optimizer.name!r} is a RowOptimizer"
    if isinstance(optimizer, Ftrl) and optimizer.lr_power != -0.5:
        return f"Ftrl.lr_power={optimizer.lr_power}, and not -0.5"
    return None


@dataclass(frozen=True)
class UpdateKind:
    """What a compiled update does. A table that does not use a part of it switches the
    part off by its settings.
    """

    layout: ArenaLayout
    clips_values: bool = False
    """Whether a table has ``max_gradient``."""
    clips_norm: bool = False
    """Whether a table has ``max_gradient_norm``."""
    bounds_norm: bool = False
    """Whether a table has ``max_norm``."""
    is_stochastic: bool = False
    """Whether a table rounds its weights stochastically."""
    skips_nonfinite: bool = False
    """Whether a table has ``nonfinite="skip"`` or ``"raise"``."""

    @classmethod
    def of(cls, layout: ArenaLayout, tables: Sequence[Table]) -> UpdateKind:
        """Returns the kind of updates of the tables, which have the layout."""
        optimizers = [table.optimizer for table in tables]
        is_narrow = layout.dtype is not torch.float32
        return cls(
            layout=layout,
            clips_values=any(map(_clips_values, optimizers)),
            clips_norm=any(map(_clips_norm, optimizers)),
            bounds_norm=any(map(_bounds_norm, optimizers)),
            is_stochastic=is_narrow and any(t.stochastic_rounding for t in tables),
            skips_nonfinite=any(t.options.nonfinite != "pass" for t in tables),
        )


def _clips_values(optimizer: Optimizer) -> bool:
    return optimizer.max_gradient is not None


def _clips_norm(optimizer: Optimizer) -> bool:
    return optimizer.max_gradient_norm is not None


def _bounds_norm(optimizer: Optimizer) -> bool:
    return getattr(optimizer, "max_norm", None) is not None


class DeviceKernels(Protocol):
    """The kernels of a device. The module explains the arguments that they share."""

    def gather(self, arena: Tensor, slots: Tensor, out: Tensor) -> None:
        """Copies the rows ``slots``, (n,) int32, of an arena to ``out``, (n, stride)."""

    def scatter(
        self, arena: Tensor, slots: Tensor, rows: Tensor, *, compile_only: bool = False
    ) -> None:
        """Copies ``rows``, (n, stride), to the distinct rows ``slots`` of an arena."""

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
        """Pools the bags of segments whose tables have the layout.

        ``weights``, (N,) float32, are per-sample weights. ``out``, contiguous, is
        float32, float16 or bfloat16. Only the columns of the segments are written.
        """

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
        """Writes where the gradient of each position is.

        ``sources``, (N,) int64, is the element of the flat gradient at which the
        gradient of a position's bag begins. ``scales``, (N,) float32, is its factor.
        ``tables``, (N,) int32, is the number of the table.
        """

    def sort(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``slots`` in ascending order, and the positions, (N,) int64, that
        have them. Positions of one slot ascend.
        """

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
        """Writes the gradients of the per-sample weights of the segments' positions.

        ``grad`` is the gradient of the output, contiguous, float32, float16 or
        bfloat16. ``out`` is (N,) float32.
        """

    def check_finite(
        self,
        grad: Tensor,
        segments: Tensor,
        most_bags: int,
        columns: int,
        integers: Tensor,
        failed: Tensor,
    ) -> None:
        """Looks for NaN and infinity in the gradients of tables with
        ``nonfinite="raise"``.

        ``failed``, (tables + 1,) int32, becomes 1 for such a table, and at the end.
        """

    def new_sums(
        self, kind: UpdateKind, positions: int, device: torch.device
    ) -> Tensor:
        """Returns memory for one call of :meth:`update` with so many positions.

        An update allocates nothing, because there is no way back in the middle of it.
        """

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
        """Updates each row on the sum of its gradients, in the order of the batch.

        ``keys`` and ``order`` are the results of :meth:`sort`. The positions of this
        arena are those from ``begin`` to ``end``, exclusive, of the sorted ones.
        ``sources``, ``scales`` and ``tables`` are those of :meth:`locate`. ``ids``,
        (N,) int64, are those of the batch as the lookup got them, for stochastic
        rounding; None without. Nothing changes if the last element of ``failed`` is
        not 0. ``skipped``, (tables,) int64, counts the rows that are left as they are
        because their gradient is not finite; None if ``kind.skips_nonfinite`` is false.
        ``sums`` is a result of :meth:`new_sums`.
        """


kernels_by_type: dict[str, Callable[[], DeviceKernels]] = {}
"""The kernels of device types that do not run Triton's."""


def kernels_of(device: torch.device) -> DeviceKernels:
    """Returns the kernels of a device. Triton is imported here, if it is needed.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    make = kernels_by_type.get(device.type)
    if make is None:
        try:
            module = import_module("torchrec_recstore.kernels.device_kernels")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ModuleNotFoundError(
                f"tables with TableOptions.device_rows on a {device.type} device need"
                " triton, which is not installed: install torch for CUDA, which brings"
                " it, or use device_rows=0",
                name="triton",
            ) from error
        make = module.TritonKernels
    return cast(DeviceKernels, make())
