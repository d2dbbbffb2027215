"""Tables with 16-bit weights: the stored values, how they are rounded, and that nothing
else changes them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad, state_bytes
from torchrec_recstore.options import (
    ConstantInit,
    NormalInit,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.store import Table

from ..instruction_sets import check_same_bits
from ..kernels.optimizer_cases import OPTIMIZERS
from .bags import train_beside_torch

NARROW = [torch.float16, torch.bfloat16]
DIMS = [1, 16, 33, 64]


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Returns every bit pattern of a 16-bit type, (1024, 64)."""
    return (
        torch.arange(2**16, dtype=torch.int32)
        .to(torch.int16)
        .view(dtype)
        .view(1024, 64)
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether all numbers are equal, including the signs of zeros, and NaNs are
    in the same places.
    """
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = torch.where(a.isnan(), 9.0, a), torch.where(b.isnan(), 9.0, b)
    return torch.equal(a.signbit(), b.signbit()) and torch.equal(a, b)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_of_the_type_is_kept(dtype: torch.dtype) -> None:
    numbers, ids = all_patterns(dtype), torch.arange(1024)
    table = Table(64, dtype)
    table.insert(ids, numbers)
    assert same(table.read_rows(ids)["weight"], numbers)
    assert table.lookup(ids).dtype is dtype


@pytest.mark.parametrize("dtype", NARROW)
def test_other_numbers_are_rounded_to_nearest_as_torch_does(dtype: torch.dtype) -> None:
    numbers = torch.randint(
        -(2**31), 2**31, (4000, 33), generator=torch.Generator().manual_seed(0)
    )
    values = numbers.to(torch.int32).view(torch.float32)
    edges = all_patterns(dtype).float()
    ties = torch.cat([(edges[:, 1:] + edges[:, :-1]) / 2, edges[:, :1]], dim=1)
    for rows in (values, values.abs() % 1e-4, ties):
        table = Table(rows.shape[1], dtype)
        table.insert(torch.arange(len(rows)), rows)
        assert same(table.read_rows(torch.arange(len(rows)))["weight"], rows.to(dtype))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    "init", [UniformInit(-0.3, 0.4), NormalInit(0.1, 0.3), ConstantInit(0.1)], ids=repr
)
def test_new_rows_are_the_float32_rows_rounded(
    dtype: torch.dtype, init: UniformInit
) -> None:
    ids = torch.arange(-50, 50)
    for missing, train in (("zeros", True), ("init", False)):
        options = TableOptions(init, seed=3, missing=missing)  # type: ignore[arg-type]
        for columns in (range(150), range(3, 140)):
            wide = Table(150, options=options, columns=columns).lookup(ids, train=train)
            narrow = Table(150, dtype, options=options, columns=columns).lookup(
                ids, train=train
            )
            assert torch.equal(narrow, wide.to(dtype))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_updates_are_float32_updates_rounded_at_each_step(
    dtype: torch.dtype, optimizer: Optimizer
) -> None:
    for dim in DIMS:
        options, generator = (
            TableOptions(NormalInit(0.0, 0.5)),
            torch.Generator().manual_seed(dim),
        )
        narrow, wide = (
            Table(dim, dtype, optimizer, options),
            Table(dim, optimizer=optimizer, options=options),
        )
        ids = torch.arange(8)
        wide.lookup(ids, train=True)
        wide.insert(ids, narrow.lookup(ids, train=True).float())
        for _ in range(5):
            batch, grads = (
                torch.randint(0, 8, (6,), generator=generator),
                torch.randn(6, dim, generator=generator),
            )
            narrow.update(batch, grads)
            wide.update(batch, grads)
            wide.insert(ids, wide.lookup(ids).to(dtype).float())
            assert torch.equal(narrow.lookup(ids).float(), wide.lookup(ids))
        expected = wide.read_rows(ids)
        for name, value in narrow.read_rows(ids).items():
            assert torch.equal(value, expected[name].to(value.dtype)), name
            assert name != "weight" or value.dtype is dtype


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_equal_torch_with_rows_rounded_at_each_step(
    dtype: torch.dtype, pooling: str, weighted: bool
) -> None:
    table = Table(20, dtype, SGD(0.1), TableOptions(NormalInit(0.0, 0.5)))
    for exact, rows in train_beside_torch(table, pooling, weighted):
        spacing = 2.0**-10 if dtype is torch.float16 else 2.0**-7
        assert ((rows - exact).abs() <= spacing / 2 * exact.abs() * 1.001 + 1e-6).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_rows_in_the_order_of_the_batch(dtype: torch.dtype) -> None:
    table = Table(16, dtype, SGD(0.5), TableOptions(ConstantInit(1.0)))
    ids = torch.tensor([7, 7, 9])
    out = SequenceGroup([table])(ids, [3], train=True)
    out.sum().backward()
    assert table.lookup(ids)[:, 0].tolist() == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad(), Adagrad()], ids=repr)
def test_a_row_takes_half_the_memory(dtype: torch.dtype, optimizer: Optimizer) -> None:
    ids, sizes = torch.arange(20000), {}
    for kind in (torch.float32, dtype):
        table = Table(64, kind, optimizer)
        table.lookup(ids, train=True)
        sizes[kind] = table.stats().bytes
    assert sizes[torch.float32] - sizes[dtype] == pytest.approx(
        2 * 64 * 20000, rel=0.02
    )
    elements = state_bytes(optimizer, 64) // 256 * 256
    assert sizes[dtype] > (128 + elements) * 20000


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("start", [1.0, 3.0e-6, -0.7])
def test_random_rounding_has_the_right_mean_and_rounds_to_a_neighbour(
    dtype: torch.dtype, start: float
) -> None:
    ids = torch.arange(4000)
    table = Table(
        33, dtype, SGD(1.0), TableOptions(ConstantInit(start)), stochastic_rounding=True
    )
    before = table.lookup(ids, train=True)
    step = (
        torch.nextafter(before[0, 0], torch.tensor(9.0, dtype=dtype)) - before[0, 0]
    ).float().item() * 0.3
    table.update(ids, torch.full((4000, 33), -step))
    exact = before[0, 0].float().item() + step
    after = table.lookup(ids).float()
    assert len(after.unique()) == 2
    up = (after > exact).float().mean().item()
    assert up == pytest.approx(0.3, abs=0.01)
    assert after.mean(0).double().sub(exact).abs().max() < step  # in each column
    unchanged = table.lookup(ids)
    table.update(ids, torch.zeros(4000, 33))
    # values that the type can represent are not changed
    assert torch.equal(table.lookup(ids), unchanged)


def test_random_rounding_keeps_infinities_and_nan() -> None:
    for dtype in NARROW:
        table = Table(4, dtype, SGD(0.0), stochastic_rounding=True)
        odd = torch.tensor([[float("inf"), -float("inf"), float("nan"), -0.0]])
        table.insert(torch.tensor([1]), odd)
        for _ in range(20):
            table.update(torch.tensor([1]), torch.zeros(1, 4))
        assert same(table.read_rows(torch.tensor([1]))["weight"], odd.to(dtype))


def test_random_rounding_depends_on_seed_id_column_and_step_alone() -> None:
    def rows(
        ids: torch.Tensor, columns: range = range(40), seed: int = 0, steps: int = 2
    ) -> torch.Tensor:
        options = TableOptions(ConstantInit(1.0), seed=seed)
        table = Table(
            40,
            torch.bfloat16,
            SGD(1e-3),
            options,
            columns=columns,
            stochastic_rounding=True,
        )
        group = PooledGroup([table], [0], "sum")
        for _ in range(steps):
            group(ids, torch.arange(len(ids) + 1), train=True).backward(
                torch.ones(len(ids), len(columns))
            )
        return table.lookup(torch.arange(100))

    whole = rows(torch.arange(100))
    assert torch.equal(whole, rows(torch.arange(99, -1, -1)))
    assert torch.equal(whole[:, 3:23], rows(torch.arange(100), columns=range(3, 23)))
    assert not torch.equal(whole, rows(torch.arange(100), seed=1))
    assert not torch.equal(whole, rows(torch.arange(100), steps=1))
    assert len(whole.unique(dim=0)) > 90
    assert len(whole.unique(dim=1)[0]) > 30


def test_random_rounding_of_accumulated_gradients() -> None:
    options = TableOptions(ConstantInit(1.0))
    tables = [
        Table(8, torch.bfloat16, SGD(1e-3), options, stochastic_rounding=True)
        for _ in range(2)
    ]
    ids, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 4])
    groups = [
        PooledGroup([tables[0]], [0], "sum", accumulation_steps=2),
        PooledGroup([tables[1]], [0], "sum"),
    ]
    for _ in range(2):
        groups[0](ids, offsets, train=True).backward(torch.ones(2, 8))
    groups[1](ids, offsets, train=True).backward(torch.full((2, 8), 2.0))
    assert torch.equal(tables[0].lookup(ids), tables[1].lookup(ids))


def _digests() -> list[str]:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        digest, number = hashlib.sha256(), 0
        for dtype in NARROW:
            every = Table(64, dtype, optimizer=OPTIMIZERS[1])
            every.insert(torch.arange(1024), all_patterns(dtype))
            digest.update(
                every.read_rows(torch.arange(1024))["weight"]
                .view(torch.int16)
                .numpy()
                .tobytes()
            )
            for optimizer in OPTIMIZERS:
                number += 1
                dim, generator = (
                    (16, 33, 64)[number % 3],
                    torch.Generator().manual_seed(number),
                )
                options = TableOptions(NormalInit(0.0, 1e-3 if number % 2 else 1.0))
                table = Table(
                    dim, dtype, optimizer, options, stochastic_rounding=number % 4 < 2
                )
                group = PooledGroup([table], [0], "mean")
                for _ in range(2):
                    ids, offsets = (
                        torch.randint(0, 4000, (9000,), generator=generator),
                        torch.arange(0, 9001, 3),
                    )
                    out = group(
                        ids, offsets, torch.rand(9000, generator=generator), train=True
                    )
                    out.backward(torch.randn(out.shape, generator=generator))
                    digest.update(out.detach().numpy().tobytes())
                digest.update(
                    table.lookup(table.ids()).view(torch.int16).numpy().tobytes()
                )
        found.append(digest.hexdigest())
    return found


@pytest.mark.slow
def test_bits_depend_neither_on_the_instruction_set_nor_on_threads() -> None:
    check_same_bits(_digests)


def test_what_does_not_fit_is_refused() -> None:
    table, ids = Table(4, torch.bfloat16), torch.tensor([1])
    table.update(ids, torch.ones(1, 4, dtype=torch.bfloat16))
    table.insert(ids, torch.ones(1, 4, dtype=torch.bfloat16))
    for call in (table.update, table.insert):
        with pytest.raises(
            TypeError, match=r"must be a float32 or bfloat16 tensor, got torch\.float16"
        ):
            call(ids, torch.ones(1, 4, dtype=torch.float16))
    with pytest.raises(
        ValueError, match=r"dtype must be one of .*bfloat16.*, got torch\.float64"
    ):
        Table(4, torch.float64)
    with pytest.raises(TypeError, match="stochastic_rounding must be a bool or None"):
        Table(4, stochastic_rounding=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", NARROW)
def test_a_copy_of_rows_goes_on_as_the_original(dtype: torch.dtype) -> None:
    for optimizer in (SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1)):
        table, copy = Table(5, dtype, optimizer), Table(5, dtype, replace(optimizer))
        ids = torch.tensor([5, -1, 0])
        table.update(ids, torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))
        copy.write_rows(ids, table.read_rows(ids))
        for each in (table, copy):
            each.update(ids, torch.ones(3, 5))
        assert torch.equal(table.lookup(ids), copy.lookup(ids))
