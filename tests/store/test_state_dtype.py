"""Tables with optimizer state in float16: the stored numbers, how they are rounded, and
that nothing else changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import (
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    Optimizer,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    is_square,
    state_bytes,
    state_names,
)
from torchrec_recstore.options import (
    LRU,
    ConstantInit,
    NormalInit,
    RocksDBStore,
    TableOptions,
)
from torchrec_recstore.row_types import ROW_DTYPES
from torchrec_recstore.store import Table

from ..instruction_sets import check_same_bits
from ..kernels.optimizer_cases import OPTIMIZERS, Reference

HALF = torch.float16
LARGEST = 65504.0
STATEFUL = [optimizer for optimizer in OPTIMIZERS if state_names(optimizer)]
OPTIONS = TableOptions(NormalInit(0.0, 0.5))


def stored(states: Tensor, name: str) -> Tensor:
    """Returns the float16 numbers of states that a table has returned, as float64."""
    # numpy's roots are exact on every processor, and torch's are not.
    return (
        torch.as_tensor(np.sqrt(states.double().numpy()))
        if is_square(name)
        else states.double()
    )


def assert_neighbours(found: Tensor, exact: Tensor, name: str) -> None:
    """Asserts that each state is one of the two float16 numbers next to the exact
    state.
    """
    numbers, wanted = stored(found, name), stored(exact, name)
    assert torch.equal(numbers.half().double(), numbers), name
    # 2**-24 is the distance of subnormal numbers. The exact states have errors of
    # float32.
    apart = (wanted.abs() * 2.0**-10).clamp(min=2.0**-24)
    assert ((numbers - wanted).abs() <= apart + wanted.abs() * 1e-5 + 1e-7).all(), name


@pytest.mark.parametrize(
    "dim",
    [
        1,
        pytest.param(16, marks=pytest.mark.slow),
        33,
        pytest.param(64, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("optimizer", STATEFUL, ids=repr)
def test_updates_equal_the_published_formula_with_states_rounded_at_each_step(
    optimizer: Optimizer, dim: int
) -> None:
    table = Table(dim, optimizer=optimizer, options=OPTIONS, state_dtype=HALF)
    every, generator = torch.arange(8), torch.Generator().manual_seed(dim)
    reference = Reference(optimizer, dict(enumerate(table.lookup(every, train=True))))
    for _ in range(10):
        ids = torch.randint(0, 8, (6,), generator=generator)
        grads = torch.randn(6, dim, generator=generator)
        table.update(ids, grads)
        reference.update(ids.tolist(), grads)
        rows = table.read_rows(every)
        for id_ in ids.unique().tolist():
            torch.testing.assert_close(
                rows["weight"][id_].double(), reference.rows[id_], atol=1e-5, rtol=1e-4
            )
            reference.rows[id_] = rows["weight"][id_].double()
            for name in state_names(optimizer):
                of_row = reference.states[id_]
                assert_neighbours(rows[name][id_], of_row[name], name)
                of_row[name] = rows[name][id_].double()


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("optimizer", STATEFUL, ids=repr)
def test_weights_are_those_of_a_table_with_the_same_states_in_float32(
    dtype: torch.dtype, optimizer: Optimizer
) -> None:
    for dim in (7, 64):
        half = Table(dim, dtype, optimizer, OPTIONS, state_dtype=HALF)
        full = Table(dim, dtype, optimizer, OPTIONS)
        ids, generator = torch.arange(-4, 4), torch.Generator().manual_seed(dim)
        for table in (half, full):
            table.lookup(ids, train=True)
        for _ in range(5):
            batch, grads = (
                ids[torch.randint(0, 8, (6,), generator=generator)],
                torch.randn(6, dim, generator=generator),
            )
            for table in (half, full):
                table.update(batch, grads)
            rows, exact = half.read_rows(ids), full.read_rows(ids)
            assert torch.equal(rows["weight"], exact["weight"])
            for name in state_names(optimizer):
                assert_neighbours(rows[name], exact[name], name)
            full.write_rows(ids, rows)


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.0), Adagrad(0.0)], ids=repr)
@pytest.mark.parametrize(
    ("start", "gradient"), [(1.0, 0.01), (0.0, 3e-8), (100.0, 0.3), (1e-9, 2e-7)]
)
def test_sums_grow_by_addends_that_are_smaller_than_the_last_bit(
    optimizer: Optimizer, start: float, gradient: float
) -> None:
    table, ids, steps = (
        Table(16, optimizer=optimizer, state_dtype=HALF),
        torch.arange(2000),
        100,
    )
    rows = {**table.read_rows(ids[:0]), "weight": torch.zeros(2000, 16)}
    rows["sum"] = torch.full(
        (2000, 16) if type(optimizer) is Adagrad else (2000,), start
    )
    rows |= {"last_step": torch.zeros_like(ids), "frequency": torch.zeros_like(ids)}
    table.write_rows(ids, rows)
    first = table.read_rows(ids)["sum"].double().mean().item()
    table.update(ids, torch.full((2000, 16), gradient))
    assert len(table.read_rows(ids)["sum"].unique()) == 2
    for _ in range(steps - 1):
        table.update(ids, torch.full((2000, 16), gradient))
    grown = table.read_rows(ids)["sum"].double().mean().item() - first
    assert grown == pytest.approx(steps * gradient**2, rel=0.1)


def test_rounding_has_the_right_mean_in_each_column() -> None:
    n, dim = 4000, 70
    # normal numbers, subnormal numbers, and a few units of the last bit
    for size in (1.0, -3e-5, 1e-6):
        table = Table(dim, optimizer=SGD(0.0, momentum=0.5), state_dtype=HALF)
        below = torch.tensor(size).half()
        above = torch.nextafter(below, torch.tensor(torch.inf).half()).float()
        exact = below.float() + 0.3 * (above - below.float())
        table.update(torch.arange(n), exact.expand(n, dim))
        found = table.read_rows(torch.arange(n))["momentum_buffer"]
        assert set(found.unique().tolist()) == {below.item(), above.item()}
        up = (found == above).float()
        assert up.mean().item() == pytest.approx(0.3, abs=0.005)
        assert (up.mean(0) - 0.3).abs().max() < 0.04  # the standard error is 0.007
        assert (up.mean(1) - 0.3).abs().max() < 0.3
        assert len(up.unique(dim=0)) == n


def test_states_of_a_row_are_rounded_independently() -> None:
    n = 4000
    table = Table(4, optimizer=Adam(0.0, betas=(0.5, 0.5)), state_dtype=HALF)
    # exp_avg is halfway between two numbers, and so is nearly the root of exp_avg_sq
    exact = 2 * (1 + 0.5 * 2**-10)
    table.update(torch.arange(n), torch.full((n, 4), exact))
    rows = table.read_rows(torch.arange(n))
    first, second = (
        (rows[name] > rows[name].mean()).double().flatten()
        for name in ("exp_avg", "exp_avg_sq")
    )
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.05


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_large_states_become_the_largest_number_and_nan_and_infinity_stay(
    dtype: torch.dtype,
) -> None:
    gradients = torch.tensor(
        [1e6, -1e6, 65519.0, torch.inf, -torch.inf, torch.nan, 1.0]
    )
    ids = torch.arange(len(gradients))
    for optimizer in (SGD(0.0, momentum=0.5), Adagrad(0.0), RowWiseAdagrad(0.0)):
        half, full = (
            Table(3, dtype, optimizer, state_dtype=kind)
            for kind in (HALF, torch.float32)
        )
        for table in (half, full):
            table.update(ids, gradients[:, None].expand(-1, 3))
        (name,) = state_names(optimizer)
        rows, exact = half.read_rows(ids), full.read_rows(ids)
        wanted = stored(exact[name], name)
        wanted = torch.where(wanted.isfinite(), wanted.clamp(-LARGEST, LARGEST), wanted)
        torch.testing.assert_close(
            stored(rows[name], name), wanted, rtol=1e-3, atol=0.0, equal_nan=True
        )
        assert torch.equal(rows["weight"].isnan(), exact["weight"].isnan())


def all_numbers() -> Tensor:
    """Returns every bit pattern of float16, (1024, 64)."""
    return (
        torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(HALF).view(1024, 64)
    )


def rows_with(table: Table, n: int, **states: Tensor) -> dict[str, Tensor]:
    zeros = torch.zeros(n, dtype=torch.int64)
    return {
        "weight": torch.zeros(n, len(table.columns)),
        "last_step": zeros,
        "frequency": zeros,
        **states,
    }


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_every_number_is_written_and_read_exactly(dtype: torch.dtype) -> None:
    numbers, ids = all_numbers().float(), torch.arange(1024)
    squares = numbers.square()
    table = Table(64, dtype, Adam(), state_dtype=HALF)
    table.write_rows(ids, rows_with(table, 1024, exp_avg=numbers, exp_avg_sq=squares))
    found = table.read_rows(ids)
    torch.testing.assert_close(
        found["exp_avg"], numbers, rtol=0.0, atol=0.0, equal_nan=True
    )
    assert torch.equal(found["exp_avg"].signbit(), numbers.signbit())
    torch.testing.assert_close(
        found["exp_avg_sq"], squares, rtol=0.0, atol=0.0, equal_nan=True
    )
    row_wise = Table(64, dtype, RowWiseAdagrad(), state_dtype=HALF)
    for column in range(0, 64, 7):
        row_wise.write_rows(ids, rows_with(row_wise, 1024, sum=squares[:, column]))
        found_sum = row_wise.read_rows(ids)["sum"]
        torch.testing.assert_close(
            found_sum, squares[:, column], rtol=0.0, atol=0.0, equal_nan=True
        )


def test_other_numbers_are_written_as_the_nearest_one() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = (
        torch.randint(-(2**31), 2**31, (4000, 33), generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )
    edges = all_numbers().float().sort().values
    ties = torch.cat([(edges[:, 1:] + edges[:, :-1]) / 2, edges[:, :1]], dim=1)
    for values in (
        numbers,
        numbers.abs() % 1e-4,
        ties,
        torch.tensor([[65519.9, 65520.0, -7e4, torch.inf, -torch.inf]]),
    ):
        n, dim = values.shape
        table = Table(dim, optimizer=Adam(), state_dtype=HALF)
        table.write_rows(
            torch.arange(n),
            rows_with(table, n, exp_avg=values, exp_avg_sq=values.abs()),
        )
        found = table.read_rows(torch.arange(n))
        for name, wanted in (
            ("exp_avg", values),
            ("exp_avg_sq", values.abs().double().sqrt().float()),
        ):
            nearest = wanted.half().float()
            nearest = torch.where(
                wanted.isfinite(), nearest.clamp(-LARGEST, LARGEST), nearest
            )
            exact = nearest.square() if name == "exp_avg_sq" else nearest
            torch.testing.assert_close(
                found[name], exact, rtol=0.0, atol=0.0, equal_nan=True
            )


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize(
    "optimizer",
    [RowWiseAdagrad(0.1), Adam(0.1), PartialRowWiseAdam(0.1), Ftrl(0.1)],
    ids=repr,
)
@pytest.mark.parametrize("dim", [5, 64])
def test_copies_snapshots_and_tables_of_float32_states_have_the_same_rows(
    dtype: torch.dtype, optimizer: Optimizer, dim: int
) -> None:
    table, ids = (
        Table(dim, dtype, optimizer, state_dtype=HALF),
        torch.tensor([5, -1, 0]),
    )
    full, copy = Table(dim, dtype, optimizer), table.empty_copy()
    assert copy.state_dtype is HALF
    table.update(ids, torch.randn(3, dim, generator=torch.Generator().manual_seed(0)))
    rows = table.read_rows(ids)
    full.write_rows(ids, rows)
    copy.write_rows(ids, full.read_rows(ids))
    copy.set_state(replace(copy.state(), optimizer_steps=table.optimizer_steps))
    with table.snapshot() as snapshot:
        before = snapshot.read(1)
        for each in (table, copy):
            each.update(ids, torch.ones(3, dim))
        after = snapshot.read(2)
    for name, value in rows.items():
        assert torch.equal(
            torch.cat([before.rows[name], after.rows[name]]), value[ids.argsort()]
        ), name
    for name, value in table.read_rows(ids).items():
        assert torch.equal(copy.read_rows(ids)[name], value), name
    copy.remove(ids)
    table.exchange_rows(copy)
    assert len(table) == 0
    with pytest.raises(ValueError, match="different shapes"):
        copy.exchange_rows(full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    "optimizer", [RowWiseAdagrad(0.1), Adam(0.1), PartialRowWiseAdam(0.1)], ids=repr
)
@pytest.mark.parametrize("dim", [5, 64])
def test_rows_come_back_from_a_cold_store_as_they_were(
    dtype: torch.dtype, optimizer: Optimizer, dim: int, tmp_path: Path
) -> None:
    bounded = TableOptions(
        max_rows=16, eviction=LRU(), cold_store=RocksDBStore(str(tmp_path))
    )
    generator = torch.Generator().manual_seed(0)
    plain = Table(dim, dtype, optimizer, state_dtype=HALF)
    with Table(dim, dtype, optimizer, bounded, state_dtype=HALF) as cold:
        for _ in range(12):
            ids, grads = (
                torch.randint(0, 60, (10,), generator=generator),
                torch.randn(10, dim, generator=generator),
            )
            for table in (cold, plain):
                table.lookup(ids, train=True)
                table.update(ids, grads)
        every = plain.ids()
        assert cold.stats().cold_rows > 0
        assert torch.equal(cold.lookup(every), plain.lookup(every))
        with cold.snapshot() as snapshot:
            rows = snapshot.read(len(every)).rows
        for name, value in plain.read_rows(every).items():
            assert torch.equal(cold.read_rows(every)[name], value), name
            assert torch.equal(rows[name], value), name


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("optimizer", STATEFUL, ids=repr)
def test_states_take_half_the_memory(dtype: torch.dtype, optimizer: Optimizer) -> None:
    for columns in (5, 48):
        sizes, images = [], []
        for kind in (torch.float32, HALF):
            table = Table(columns, dtype, optimizer, state_dtype=kind)
            table.lookup(torch.arange(5000), train=True)
            sizes.append(table.stats().bytes / 5000)
            images.append(table.image_bytes)
        saved = state_bytes(optimizer, columns) - state_bytes(
            optimizer, columns, itemsize=2
        )
        # Each row has room for a row-wise state, also if its optimizer has none.
        saved += 0 if "row" in state_names(optimizer).values() else 2
        assert images[0] - images[1] == saved
        assert sizes[0] - sizes[1] == pytest.approx(saved, rel=0.01)


def test_rounding_depends_on_seed_name_id_column_and_step_alone() -> None:
    def rows(
        ids: Tensor, columns: range = range(40), steps: int = 2, **more: object
    ) -> dict[str, Tensor]:
        options = TableOptions(ConstantInit(1.0), seed=int(str(more.get("seed", 0))))
        name = str(more.get("name", "table"))
        table = Table(
            40,
            optimizer=Adam(1e-3),
            options=options,
            columns=columns,
            state_dtype=HALF,
            name=name,
        )
        group = PooledGroup([table], [0], "sum")
        for _ in range(steps):
            group(ids, torch.arange(len(ids) + 1), train=True).backward(
                torch.full((len(ids), len(columns)), 0.3)
            )
        found = table.read_rows(torch.arange(100))
        return {name: found[name] for name in ("weight", "exp_avg", "exp_avg_sq")}

    whole = rows(torch.arange(100))
    for name, value in rows(torch.arange(99, -1, -1)).items():
        assert torch.equal(value, whole[name])
    for name, value in rows(torch.arange(100), columns=range(3, 23)).items():
        assert torch.equal(value, whole[name][:, 3:23])
    for other in (
        rows(torch.arange(100), seed=1),
        rows(torch.arange(100), name="t"),
        rows(torch.arange(100), steps=1),
    ):
        assert not torch.equal(other["exp_avg"], whole["exp_avg"])
        assert not torch.equal(other["exp_avg_sq"], whole["exp_avg_sq"])


def _digests() -> list[str]:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        digest, number = hashlib.sha256(), 0
        every = Table(64, optimizer=Adam(), state_dtype=HALF)
        numbers = all_numbers().float()
        ids = torch.arange(1024)
        every.write_rows(
            ids,
            rows_with(
                every, 1024, exp_avg=numbers * 1.0003, exp_avg_sq=numbers.abs() * 1.0003
            ),
        )
        every.update(ids, torch.zeros(1024, 64))
        for name in ("exp_avg", "exp_avg_sq"):
            digest.update(every.read_rows(ids)[name].nan_to_num(7.0).numpy().tobytes())
        for dtype in ROW_DTYPES:
            for optimizer in STATEFUL:
                number += 1
                dim, generator = (
                    (16, 33, 64)[number % 3],
                    torch.Generator().manual_seed(number),
                )
                options = TableOptions(NormalInit(0.0, 1e-3 if number % 2 else 1.0))
                table = Table(dim, dtype, optimizer, options, state_dtype=HALF)
                group = PooledGroup([table], [0], "mean")
                for _ in range(2):
                    batch, offsets = (
                        torch.randint(0, 2000, (4500,), generator=generator),
                        torch.arange(0, 4501, 3),
                    )
                    out = group(
                        batch,
                        offsets,
                        torch.rand(4500, generator=generator),
                        train=True,
                    )
                    out.backward(
                        torch.randn(out.shape, generator=generator)
                        * 10.0 ** (number % 5 - 4)
                    )
                for value in table.read_rows(table.ids()).values():
                    digest.update(
                        value.contiguous().view(torch.uint8).numpy().tobytes()
                    )
        found.append(digest.hexdigest())
    return found


@pytest.mark.slow
def test_bits_depend_neither_on_the_instruction_set_nor_on_threads() -> None:
    check_same_bits(_digests)


def test_other_types_are_refused() -> None:
    for kind in (torch.bfloat16, torch.int8, "float16"):
        with pytest.raises(
            ValueError,
            match=r"state_dtype must be one of torch\.float32, torch\.float16, got",
        ):
            Table(4, state_dtype=kind)  # type: ignore[arg-type]
