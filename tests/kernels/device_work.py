"""A step of tables on the host, and the same step by kernels on an arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.kernels.device_interface import (
    INTEGERS,
    NUMBERS,
    ArenaLayout,
    DeviceKernels,
    UpdateKind,
)
from torchrec_recstore.kernels.routing import BlockRouting
from torchrec_recstore.optim import Optimizer, state_names
from torchrec_recstore.options import TableOptions
from torchrec_recstore.store import Table

Pooling = Literal["sum", "mean"]


@dataclass(frozen=True)
class Case:
    """One setting of the tables of a group, which share an arena.

    The options of the tables follow each other: table 1 has ``optimizers[1]``.
    """

    optimizers: Sequence[Optimizer]
    columns: int = 16
    dtype: torch.dtype = torch.float32
    stochastic: bool = False
    pooling: Pooling = "sum"
    weighted: bool = False
    nonfinite: str = "pass"
    bags: int = 12
    longest_bag: int = 6
    rows: int = 20
    hot_share: float = 0.3
    """The share of positions that have the same id."""
    special: bool = False
    """Whether gradients have NaN and infinity."""
    routing: BlockRouting | None = None
    grad_dtype: torch.dtype = torch.float32
    column_begin: int = 0

    def numbered(self, **changes: object) -> Case:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass
class Batch:
    """A batch of one feature of each table."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    grad: Tensor


class Tables:
    """The tables of a case on the host, and their rows."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tables = [
            Table(
                case.column_begin + case.columns,
                dtype=case.dtype,
                optimizer=optimizer,
                options=TableOptions(nonfinite=case.nonfinite),  # type: ignore[arg-type]
                name=f"t{number}",
                columns=range(case.column_begin, case.column_begin + case.columns),
                stochastic_rounding=case.stochastic,
            )
            for number, optimizer in enumerate(case.optimizers)
        ]
        self.group = PooledGroup(
            self.tables,
            range(len(self.tables)),
            case.pooling,
            routings=[case.routing] * len(self.tables),
        )
        self.rates = [optimizer.lr for optimizer in case.optimizers]
        generator = torch.Generator().manual_seed(case.columns)
        self.local_ids = torch.arange(case.rows)
        self.raw_ids = self.local_ids
        if case.routing is not None:
            self.raw_ids = _raw(case.routing, self.local_ids)
        for table in self.tables:
            rows = torch.randn((case.rows, case.columns), generator=generator)
            table.insert(self.raw_ids, rows.to(case.dtype))
        self.layout = ArenaLayout.of(self.tables[0])
        self.kind = UpdateKind.of(self.layout, self.tables)

    def batch(self, seed: int) -> Batch:
        case = self.case
        generator = torch.Generator().manual_seed(seed)
        features = len(self.tables)
        bags = features * case.bags
        lengths = torch.randint(0, case.longest_bag + 1, (bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        n = int(offsets[-1])
        rows = torch.randint(0, case.rows, (n,), generator=generator)
        is_hot = torch.rand(n, generator=generator) < case.hot_share
        rows = torch.where(is_hot, 3, rows)
        columns = features * case.columns
        grad = torch.randn((case.bags, columns), generator=generator)
        grad[torch.rand(grad.shape, generator=generator) < 0.05] = -0.0
        if case.special:
            grad[torch.rand(grad.shape, generator=generator) < 0.01] = torch.inf
            grad[torch.rand(grad.shape, generator=generator) < 0.01] = torch.nan
        weights = torch.randn(n, generator=generator) if case.weighted else None
        return Batch(
            ids=self.local_ids[rows],
            offsets=offsets,
            weights=weights,
            grad=grad.to(case.grad_dtype),
        )

    def arena(self, places: Tensor) -> Tensor:
        """Returns an arena in which row ``i`` of table ``t`` is at ``places[t, i]``."""
        rows = torch.full((places.numel(), self.layout.stride), torch.nan)
        for table, table_places in zip(self.tables, places, strict=True):
            rows[table_places] = self._arena_rows(table)
        return rows

    def _arena_rows(self, table: Table) -> Tensor:
        """Returns the rows of a table as those of an arena, (rows, stride)."""
        content = table.read_rows(self.raw_ids)
        count = len(self.raw_ids)
        weights = torch.zeros((count, self.layout.weight_floats * 4), dtype=torch.uint8)
        weight_bytes = content["weight"].contiguous().view(torch.uint8)
        weights[:, : weight_bytes.shape[1]] = weight_bytes.view(count, -1)
        parts = [weights.view(torch.float32)]
        kinds = state_names(table.optimizer)
        parts += [content[n] for n, kind in kinds.items() if kind == "element"]
        parts += [content[n][:, None] for n, kind in kinds.items() if kind == "row"]
        padding = self.layout.stride - sum(part.shape[1] for part in parts)
        return torch.cat([*parts, torch.zeros(count, padding)], 1)


def _raw(routing: BlockRouting, local: Tensor) -> Tensor:
    """Returns raw ids of ids that TorchRec's input distribution has mapped."""
    in_block = local + routing.rank * routing.block_rows
    beyond = local * routing.world_size + routing.rank
    ids = torch.where(local < routing.block_rows, in_block, beyond)
    return ops.mix_ids(ids, True) if routing.mixed else ids


@dataclass
class Result:
    """What a step gives: the output, the gradient of the weights, and the rows."""

    out: Tensor
    weight_grad: Tensor | None
    arena: Tensor


class Arena:
    """The rows of tables in an arena, and steps of kernels on it."""

    def __init__(
        self, tables: Tables, kernels: DeviceKernels, base: int = 1000
    ) -> None:
        self.tables = tables
        self.kernels = kernels
        self.base = base
        count = tables.case.rows * len(tables.tables)
        generator = torch.Generator().manual_seed(5)
        order = torch.randperm(count, generator=generator)
        self.places = order.view(len(tables.tables), -1)
        self.rows = tables.arena(self.places)
        self.skipped = torch.zeros(len(tables.tables), dtype=torch.int64)
        self.failed = torch.zeros(len(tables.tables) + 1, dtype=torch.int32)

    def slots(self, batch: Batch) -> Tensor:
        bags = self.tables.case.bags
        row_of = {int(i): r for r, i in enumerate(self.tables.local_ids)}
        slots = torch.empty(len(batch.ids), dtype=torch.int32)
        for table in range(len(self.tables.tables)):
            begin = int(batch.offsets[table * bags])
            end = int(batch.offsets[(table + 1) * bags])
            rows = torch.tensor(
                [row_of[int(i)] for i in batch.ids[begin:end]], dtype=torch.int64
            )
            slots[begin:end] = self.places[table][rows] + self.base
        return slots

    def segments(self) -> Tensor:
        case = self.tables.case
        count = len(self.tables.tables)
        columns = count * case.columns
        return torch.tensor(
            [
                [t * case.bags, case.bags, t * case.columns, columns, t]
                for t in range(count)
            ]
        )

    def step(
        self,
        batch: Batch,
        *,
        settings: tuple[Tensor, Tensor],
        out_dtype: torch.dtype = torch.float32,
    ) -> Result:
        """Does a training step, and returns its result."""
        case = self.tables.case
        numbers, integers = settings
        slots = self.slots(batch)
        segments = self.segments()
        bags = case.bags
        mean = case.pooling == "mean"
        layout = self.tables.layout
        kind = self.tables.kind
        kernels = self.kernels
        out = torch.full((bags, len(segments) * case.columns), 9.0, dtype=out_dtype)
        kernels.pool(
            layout,
            self.rows,
            self.base,
            None,
            slots,
            batch.offsets,
            batch.weights,
            segments,
            bags,
            mean,
            out,
        )
        n = len(slots)
        sources = torch.zeros(n, dtype=torch.int64)
        scales = torch.zeros(n)
        tables = torch.zeros(n, dtype=torch.int32)
        kernels.locate(
            batch.offsets, batch.weights, segments, bags, mean, sources, scales, tables
        )
        weight_grad = None
        if batch.weights is not None:
            weight_grad = torch.zeros(n)
            kernels.weight_gradients(
                kind,
                self.rows,
                self.base,
                None,
                slots,
                batch.offsets,
                segments,
                bags,
                mean,
                batch.grad,
                numbers,
                weight_grad,
            )
        kernels.check_finite(
            batch.grad, segments, bags, case.columns, integers, self.failed
        )
        keys, order = kernels.sort(slots)
        kernels.update(
            kind,
            self.rows,
            self.base,
            keys,
            order,
            0,
            n,
            sources,
            scales,
            tables,
            batch.grad,
            numbers,
            integers,
            batch.ids if kind.is_stochastic else None,
            self.failed,
            self.skipped if kind.skips_nonfinite else None,
            kernels.new_sums(kind, n, self.rows.device),
        )
        return Result(out, weight_grad, self.rows.clone())


def host_step(tables: Tables, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Does a training step of the tables. Returns the output and the gradient of the
    weights.
    """
    weights = None
    if batch.weights is not None:
        weights = batch.weights.clone().requires_grad_()
    out = tables.group(batch.ids, batch.offsets, weights, train=True)
    out.backward(batch.grad.float())
    return out.detach(), None if weights is None else weights.grad


def settings_of(tables: Tables) -> tuple[Tensor, Tensor]:
    """Returns the settings of the next update."""
    return ops.device_settings([tables.group.handle], tables.rates, NUMBERS, INTEGERS)


def assert_same_bits(
    actual: Tensor, wanted: Tensor, layout: ArenaLayout | None
) -> None:
    """Raises unless the bits are equal. NaN equals NaN.

    ``layout`` is that of rows of an arena, whose padding is not compared.
    """
    if layout is None:
        _assert_equal(actual, wanted)
        return
    weights = slice(0, layout.weight_floats)
    states = slice(layout.weight_floats, layout.host_floats + int(layout.has_row_state))
    narrow = layout.dtype
    _assert_equal(
        actual[:, weights].contiguous().view(narrow)[:, : layout.columns],
        wanted[:, weights].contiguous().view(narrow)[:, : layout.columns],
    )
    _assert_equal(actual[:, states], wanted[:, states])


def _assert_equal(actual: Tensor, wanted: Tensor) -> None:
    bits = torch.int32 if actual.dtype is torch.float32 else torch.int16
    same = actual.contiguous().view(bits) == wanted.contiguous().view(bits)
    same |= actual.isnan() & wanted.isnan()
    assert bool(same.all()), (
        f"{int((~same).sum())} of {same.numel()} numbers differ:"
        f" {actual[~same][:5]} and {wanted[~same][:5]}"
    )


def check_case(case: Case, kernels: DeviceKernels, steps: int = 2) -> None:
    """Raises AssertionError unless training steps of kernels have the bits of the
    host.
    """
    tables = Tables(case)
    arena = Arena(tables, kernels)
    for seed in range(steps):
        batch = tables.batch(seed)
        result = arena.step(batch, settings=settings_of(tables))
        out, weight_grad = host_step(tables, batch)
        assert_same_bits(result.out, out, None)
        if weight_grad is not None:
            assert result.weight_grad is not None
            assert_same_bits(result.weight_grad, weight_grad, None)
        assert_same_bits(result.arena, tables.arena(arena.places), tables.layout)
    # Updates have changed the rows.
    assert not torch.equal(arena.rows, Tables(case).arena(arena.places))
