"""The kernels of a device against the core, bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.device_cases import COLUMNS, OPTIMIZERS, ROW_DTYPES, SPECIAL, grid
from tests.kernels.device_work import (
    Arena,
    Case,
    Tables,
    assert_same_bits,
    check_case,
    settings_of,
)
from tests.kernels.interpreted import Interpreter, interpreter
from torchrec_recstore.kernels.device_interface import (
    ArenaLayout,
    DeviceKernels,
    UpdateKind,
    kernels_by_type,
    kernels_of,
)
from torchrec_recstore.kernels.reference_kernels import ReferenceKernels
from torchrec_recstore.optim import SGD, Ftrl, Optimizer, RowWiseAdagrad
from torchrec_recstore.store import Table

from .optimizer_cases import NADAM

GRID = grid()
QUICK = ("two_tables", "bfloat16_stochastic", "hot")
"""The special cases that the interpreter runs in ``make test``."""
SUMS_COLUMNS = ("row_wise_adagrad_bounds", "lamb")
"""Optimizers whose sums over the columns of a row are tried with each number of them."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreter]:
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpreter() as started:
        yield started


@pytest.mark.parametrize("name", SPECIAL)
def test_reference_kernels_have_the_bits_of_the_core(name: str) -> None:
    check_case(SPECIAL[name], ReferenceKernels(), steps=3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reference_of_each_optimizer(optimizer: str) -> None:
    for dtype in ROW_DTYPES:
        check_case(GRID[f"{optimizer}-50-{dtype}"], ReferenceKernels())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reference_grid(optimizer: str) -> None:
    for name, case in GRID.items():
        if name.startswith(f"{optimizer}-"):
            check_case(case, ReferenceKernels(), steps=3)


@pytest.mark.parametrize("name", QUICK)
def test_interpreted_kernels_have_the_bits_of_the_core(
    interpreted: Interpreter, name: str
) -> None:
    interpreted.check(SPECIAL[name], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPECIAL if name not in QUICK])
def test_interpreted_special_cases(interpreted: Interpreter, name: str) -> None:
    interpreted.check(SPECIAL[name])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_interpreted_grid(interpreted: Interpreter, optimizer: str) -> None:
    """50 columns of float32 and, in turn, of the other types, and another number of
    columns in turn.
    """
    number = list(OPTIMIZERS).index(optimizer)
    others = [columns for columns in COLUMNS if columns != 50]
    if optimizer not in SUMS_COLUMNS:
        others = [others[number % len(others)]]
    settings = [(columns, torch.float32) for columns in (50, *others)]
    settings.append((50, ROW_DTYPES[1 + number % 2]))
    for columns, dtype in settings:
        interpreted.check(GRID[f"{optimizer}-{columns}-{dtype}"], 1)


def plain_lookup(kernels: DeviceKernels) -> dict[str, torch.Tensor]:
    """Looks up rows without pooling, of the arena, of staging and of neither, and pools
    bags of segments of different sizes. Then it updates the rows.
    """
    layout = ArenaLayout(
        columns=5,
        row_type=0,
        optimizer=RowWiseAdagrad.kind,
        element_states=0,
        has_row_state=True,
    )
    generator = torch.Generator().manual_seed(1)
    arena = torch.randn((9, layout.stride), generator=generator).abs()
    staging = torch.randn((3, layout.stride), generator=generator)
    slots = torch.tensor([103, -1, -2, 108, 103, -4, -1, 100], dtype=torch.int32)
    n = len(slots)
    rows = torch.full((n * 5,), 9.0)
    each = torch.tensor([[0, n, 0, 5, 0]])
    kernels.pool(layout, arena, 100, staging, slots, None, None, each, n, False, rows)
    # Two features with three bags and one bag, which are apart in the output.
    offsets = torch.tensor([0, 2, 2, 5, 8], dtype=torch.int32)
    segments = torch.tensor([[0, 3, 10, 7, 0], [3, 1, 0, 0, 1]])
    bags = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.full((40,), 9.0, dtype=dtype)
        kernels.pool(
            layout, arena, 100, staging, slots, offsets, None, segments, 3, True, out
        )
        bags[str(dtype)] = out
    sources = torch.zeros(n, dtype=torch.int64)
    scales = torch.zeros(n)
    tables = torch.zeros(n, dtype=torch.int32)
    kernels.locate(offsets, None, segments, 3, True, sources, scales, tables)
    numbers = torch.rand((2, 22), generator=generator)
    numbers[:, -4:] = 0.0
    integers = torch.zeros((2, 8), dtype=torch.int64)
    kind = UpdateKind(layout)
    grad = torch.randn(40, generator=generator)
    weight_grads = torch.full((n,), 9.0)
    kernels.weight_gradients(
        kind,
        arena,
        100,
        staging,
        slots,
        offsets,
        segments,
        3,
        True,
        grad,
        numbers,
        weight_grads,
    )
    keys, order = kernels.sort(slots)
    begin = int((slots < 0).sum())
    before = arena.clone()
    for compile_only in (True, False):
        assert torch.equal(arena, before)
        kernels.update(
            kind,
            arena,
            100,
            keys,
            order,
            begin,
            n,
            sources,
            scales,
            tables,
            grad,
            numbers,
            integers,
            None,
            None,
            None,
            kernels.new_sums(kind, n - begin, arena.device),
            compile_only=compile_only,
        )
    copies = torch.empty((2, layout.stride))
    places = torch.tensor([8, 3], dtype=torch.int32)
    kernels.gather(arena, places, copies)
    targets = torch.tensor([0, 5], dtype=torch.int32)
    before = arena.clone()
    for compile_only in (True, False):
        assert torch.equal(arena, before)
        kernels.scatter(arena, targets, copies, compile_only=compile_only)
    return {
        "rows": rows,
        **bags,
        "weight_grads": weight_grads,
        "sources": sources,
        "scales": scales,
        "tables": tables,
        "arena": arena,
    }


def test_missing_triton_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = "torchrec_recstore.kernels.device_kernels"
    monkeypatch.delitem(sys.modules, kernels, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"device_rows on a cuda device need triton, which"
    ):
        kernels_of(torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels can be compiled")
@pytest.mark.parametrize("compile_only", [True, False])
def test_a_kernel_that_triton_refuses_names_the_option(compile_only: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from torchrec_recstore.kernels.device_kernels import TritonKernels

    arena = torch.zeros(3, 4)
    slots = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"kernel _scatter, .*device_rows=0") as seen:
        TritonKernels().scatter(
            arena, slots, torch.ones(1, 4), compile_only=compile_only
        )
    assert "TableOptions.device_rows: RuntimeError: 0 active drivers" in str(seen.value)
    assert not arena.any()


def test_plain_lookups_and_segments(interpreted: Interpreter) -> None:
    wanted = plain_lookup(ReferenceKernels())
    rows = wanted["rows"].view(-1, 5)
    assert torch.equal(rows[1], torch.zeros(5))
    assert torch.equal(rows[0], rows[4])
    assert torch.equal(wanted["arena"][0], wanted["arena"][8])
    assert torch.equal(wanted["arena"][5], wanted["arena"][3])
    assert wanted["tables"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    actual = interpreted.call(plain_lookup)
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31(interpreted: Interpreter) -> None:
    """The rows at the end of a large arena. Only a few of its pages are touched."""
    interpreted.call(large_arena)


def large_arena(kernels: DeviceKernels) -> None:
    case = Case([RowWiseAdagrad(lr=0.1)], columns=1024, bags=3, rows=4, longest_bag=3)
    tables = Tables(case)
    small = Arena(tables, kernels)
    large = Arena(tables, kernels)
    stride = tables.layout.stride
    count = 2**31 // stride + len(small.rows) + 8
    rows = torch.empty((count, stride))
    rows[-len(small.rows) :] = small.rows
    large.rows = rows
    large.places = small.places + (count - len(small.rows))
    batch = tables.batch(0)
    settings = settings_of(tables)
    result = small.step(batch, settings=settings)
    slots = large.slots(batch) - large.base
    assert int(slots.min()) * stride > 2**31
    # A clone of the large arena would touch all of its pages.
    out = torch.empty_like(result.out)
    kernels.pool(
        tables.layout,
        rows,
        0,
        None,
        slots,
        batch.offsets,
        None,
        large.segments(),
        case.bags,
        False,
        out,
    )
    assert_same_bits(out, result.out, None)
    copies = torch.empty((len(small.rows), stride))
    kernels.gather(rows, large.places.flatten().int(), copies)
    kernels.scatter(rows, large.places.flatten().int(), copies + 1)
    changed = rows[large.places.flatten()]
    assert_same_bits(changed, copies + 1, tables.layout)


def test_a_failed_update_changes_nothing(interpreted: Interpreter) -> None:
    for rows, arena in (
        failed_update(ReferenceKernels()),
        interpreted.call(failed_update),
    ):
        assert torch.equal(rows, arena)


def failed_update(kernels: DeviceKernels) -> tuple[torch.Tensor, torch.Tensor]:
    optimizers = [SGD(lr=0.1), SGD(lr=0.2)]
    tables = Tables(Case(optimizers, nonfinite="raise", bags=5, rows=4))
    arena = Arena(tables, kernels)
    before = arena.rows.clone()
    batch = tables.batch(0)
    batch.grad[2, 20] = torch.nan
    arena.step(batch, settings=settings_of(tables))
    assert arena.failed.tolist() == [0, 1, 1]
    return before, arena.rows


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (SGD(), {"dtype": torch.int8}, "torch.int8"),
        (SGD(), {"state_dtype": torch.float16}, "state_dtype=torch.float16"),
        (NADAM, {}, "is a RowOptimizer"),
        (Ftrl(lr_power=-0.6), {}, "Ftrl.lr_power=-0.6"),
    ],
)
def test_rows_without_kernels_are_refused(
    optimizer: Optimizer, arguments: dict[str, torch.dtype], message: str
) -> None:
    table = Table(4, optimizer=optimizer, name="t", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"table 't'.*{message}"):
        ArenaLayout.of(table)


def test_a_device_type_can_have_its_own_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(kernels_by_type, "meta", ReferenceKernels)
    assert isinstance(kernels_of(torch.device("meta")), ReferenceKernels)
