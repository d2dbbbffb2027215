"""Tables with 8-bit rows: the codes, scales and biases, how updates are rounded, and
what other rows can do as well.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import fbgemm_gpu  # noqa: F401  (registers the op that reads 8-bit rows)
import numpy as np
import pytest
import torch

from torchrec_recstore.kernels import PooledGroup, SequenceGroup
from torchrec_recstore.optim import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import (
    LRU,
    ConstantInit,
    NormalInit,
    RocksDBStore,
    TableOptions,
    UniformInit,
)
from torchrec_recstore.row_types import (
    as_stored,
    columns_of,
    joined_columns,
    stored_columns,
    values,
)
from torchrec_recstore.store import Table

from ..instruction_sets import check_same_bits
from ..kernels.optimizer_cases import OPTIMIZERS
from .bags import train_beside_torch

INT8 = torch.int8
DIMS = [1, 3, 16, 33, 64, 100, 1500]


def grid(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and the biases, (N, 1) float32 each, of stored rows."""
    numbers = rows[:, -8:].contiguous().view(torch.float32)
    return numbers[:, :1], numbers[:, 1:]


def random_rows(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Returns rows of several sizes and offsets."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-6, 7, (n, 1), generator=generator)
    return (
        torch.randn(n, dim, generator=generator)
        + torch.randn(n, 1, generator=generator)
    ) * size


def stored(weights: torch.Tensor) -> torch.Tensor:
    """Returns the rows that a table makes of ``weights``."""
    table, ids = Table(weights.shape[1], INT8), torch.arange(len(weights))
    table.insert(ids, weights)
    return table.read_rows(ids)["weight"]


@pytest.mark.parametrize("dim", DIMS)
def test_weights_are_within_half_a_step_of_what_was_written(dim: int) -> None:
    weights, ids = random_rows(300, dim), torch.arange(300)
    table = Table(dim, INT8)
    table.insert(ids, weights)
    rows = table.read_rows(ids)["weight"]
    assert rows.dtype is torch.uint8
    assert rows.shape == (300, dim + 8)
    scale, bias = grid(rows)
    found = table.lookup(ids)
    assert found.dtype is torch.float32
    assert torch.equal(found, rows[:, :dim].float() * scale + bias)
    # The scale is the range over 255, rounded to 16 bits. Sums of float32 have errors
    # of their own.
    least, greatest = weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
    assert (
        (found - weights).abs()
        <= scale * 0.5001 + weights.abs().amax(1, keepdim=True) * 2.0**-23
    ).all()
    torch.testing.assert_close(scale, (greatest - least) / 255, rtol=2.0**-16, atol=0)
    assert torch.equal(bias, least)
    if dim > 1:
        assert torch.equal(rows[:, :dim].amin(1), torch.zeros(300, dtype=torch.uint8))
        assert torch.equal(
            rows[:, :dim].amax(1), torch.full((300,), 255, dtype=torch.uint8)
        )
    # The layout is FBGEMM's.
    unpacked = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(rows)
    torch.testing.assert_close(unpacked, found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dim", DIMS)
def test_rows_that_are_read_as_floats_and_written_back_keep_their_bits(
    dim: int,
) -> None:
    rows = stored(random_rows(300, dim))
    assert torch.equal(stored(values(rows)), rows)
    assert torch.equal(as_stored(values(rows), INT8), rows)


def test_torch_makes_the_same_rows() -> None:
    for dim in DIMS:
        weights = random_rows(200, dim, seed=1)
        assert torch.equal(as_stored(weights, INT8), stored(weights))
    odd = torch.tensor(
        [
            [0.0, -0.0, 0.0], [-0.0, -0.0, -0.0], [1.0, 1.0, 1.0], [-3.25, -3.25, -3.25], [1e-38, 2e-38, 3e-38],
            [math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.inf], [-math.inf, 0.0, 0.0],
            [3e38, -3e38, 0.0], [8e37, -8e37, 1.0], [2.0**126, -(2.0**126), 0.0], [1e-30, 0.0, 5e-31],
            [1.0, 1.0 + 2**-23, 1.0],
        ]
    )  # fmt: skip
    assert torch.equal(as_stored(odd, INT8), stored(odd))


def test_constant_rows_are_exact() -> None:
    numbers = torch.tensor([0.0, 1.0, -0.7, 1e30, -1e-30, 0.1])
    weights = numbers[:, None].expand(-1, 33).contiguous()
    assert torch.equal(values(stored(weights)), weights)
    table = Table(33, INT8, SGD(0.5), TableOptions(ConstantInit(0.1)))
    ids = torch.tensor([4, -4])
    assert torch.equal(table.lookup(ids, train=True), torch.full((2, 33), 0.1))
    table.update(ids, torch.ones(2, 33))
    assert torch.equal(table.lookup(ids), torch.full((2, 33), 0.1) - 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("place", [0, 16, 32])
def test_a_row_with_a_number_that_8_bits_cannot_hold_reads_as_nan(
    bad: float, place: int
) -> None:
    weights = torch.rand(3, 33)
    weights[1, place] = bad
    table, ids = Table(33, INT8, SGD(0.1)), torch.arange(3)
    table.insert(ids, weights)
    for _ in range(3):
        found = table.lookup(ids)
        assert found[1].isnan().all()
        assert not found[[0, 2]].isnan().any()
        table.update(ids, torch.ones(3, 33))
    table.insert(ids, torch.rand(3, 33))  # new weights mend the row
    assert not table.lookup(ids).isnan().any()
    grads = torch.zeros(3, 33)
    grads[2, place] = bad
    table.update(ids, grads * 10)
    assert table.lookup(ids)[2].isnan().all()
    assert not table.lookup(ids)[:2].isnan().any()


@pytest.mark.parametrize(
    "init", [UniformInit(-0.3, 0.4), NormalInit(0.1, 0.3), ConstantInit(0.1)], ids=repr
)
@pytest.mark.parametrize("columns", [range(150), range(3, 140), range(2000)], ids=str)
def test_new_rows_are_the_float32_rows_rounded_to_nearest(
    init: UniformInit, columns: range
) -> None:
    ids, dim = torch.arange(-50, 50), max(150, columns.stop)
    for missing, train in (("zeros", True), ("init", False)):
        options = TableOptions(init, seed=3, missing=missing)  # type: ignore[arg-type]
        wide = Table(dim, options=options, columns=columns).lookup(ids, train=train)
        narrow = Table(dim, INT8, options=options, columns=columns).lookup(
            ids, train=train
        )
        assert torch.equal(narrow, values(as_stored(wide, INT8)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_updates_are_float32_updates_rounded_to_a_neighbour(
    optimizer: Optimizer,
) -> None:
    for dim in (1, 16, 33, 64):
        options, generator = (
            TableOptions(NormalInit(0.0, 0.5)),
            torch.Generator().manual_seed(dim),
        )
        narrow, wide = (
            Table(dim, INT8, optimizer, options),
            Table(dim, optimizer=optimizer, options=options),
        )
        ids = torch.arange(8)
        wide.lookup(ids, train=True)
        wide.insert(ids, narrow.lookup(ids, train=True))
        for _ in range(5):
            batch, grads = (
                torch.randint(0, 8, (6,), generator=generator),
                torch.randn(6, dim, generator=generator),
            )
            narrow.update(batch, grads)
            wide.update(batch, grads)
            exact, rows = wide.lookup(ids), narrow.read_rows(ids)["weight"]
            scale = grid(rows)[0]
            touched = torch.isin(ids, batch)
            # The grid is that of the exact row, and each weight is one of its two
            # neighbours on the grid.
            assert torch.equal(rows[touched, -8:], as_stored(exact, INT8)[touched, -8:])
            assert (
                (values(rows) - exact).abs() <= scale * 1.0001 + exact.abs() * 2.0**-22
            ).all()
            wide.insert(ids, values(rows))
        expected = wide.read_rows(ids)
        for name, value in narrow.read_rows(ids).items():
            assert name == "weight" or torch.equal(value, expected[name]), name


def test_updates_are_rounded_up_with_the_probability_of_the_fraction() -> None:
    """Each weight is rounded up with the probability of its fraction, independently of
    the other weights.
    """
    key_table = Table(64, INT8, SGD(1.0), TableOptions(NormalInit(0.0, 1.0)))
    ids = torch.arange(500)
    before = key_table.lookup(ids, train=True).numpy()
    grads = np.random.default_rng(0).normal(size=(500, 64)).astype(
        np.float32
    ) * np.float32(0.01)
    key_table.update(ids, torch.from_numpy(grads))
    rows = key_table.read_rows(ids)["weight"]
    exact = before - grads
    scale, bias = (number.numpy() for number in grid(rows))
    steps = np.minimum(
        (exact - bias) * (np.float32(65536) / scale), np.float32(255 * 65536)
    )
    fixed = steps.astype(np.int64)
    up = rows[:, :64].numpy().astype(np.int64) - (fixed >> 16)
    assert set(np.unique(up)) <= {0, 1}
    # A weight is rounded up if the sum of its fraction and its random number, of 16
    # bits each, has a carry. Fractions f of weights that are rounded up are therefore
    # distributed with the density 2f, the others with 2(1 - f).
    fraction = (fixed & 0xFFFF) / 65536
    inner = (fixed > 0) & (fixed < 255 * 65536)
    assert up[inner].mean() == pytest.approx(fraction[inner].mean(), abs=0.01)
    assert fraction[inner & (up == 1)].mean() == pytest.approx(2 / 3, abs=0.02)
    assert fraction[inner & (up == 0)].mean() == pytest.approx(1 / 3, abs=0.02)
    # The numbers of two columns, and those of two rows, are not correlated. The
    # correlation of two rows has a standard error of 1 / 8, and the mean over all pairs
    # of rows one of 0.0004.
    excess = up - fraction
    for sides, samples in ((excess.T, 500), (excess, 64)):
        correlations = np.corrcoef(sides)[np.triu_indices(len(sides), 1)]
        assert abs(correlations.mean()) < 0.01
        assert np.abs(correlations).max() < 6 / math.sqrt(samples)


def test_small_updates_are_kept_on_average() -> None:
    """Updates of a hundredth of a step move the mean by as much as they should."""
    n, dim = 4000, 40
    table, ids = Table(dim, INT8, SGD(1.0)), torch.arange(n)
    weights = torch.linspace(-1.0, 1.0, dim).repeat(n, 1)
    table.insert(ids, weights)
    before = table.lookup(ids)
    step = 2 / 255 / 100
    grads = torch.full((n, dim), -step)
    grads[:, [0, -1]] = 0.0  # the ends of the range stay
    for _ in range(20):
        table.update(ids, grads)
    moved = (table.lookup(ids) - before).double().mean(0)
    # The standard error of a column's mean is below 0.03 steps of the grid: sqrt(20 *
    # 0.01) / sqrt(4000) = 0.007.
    assert moved[1:-1].sub(20 * step).abs().max() < 0.04 * 2 / 255
    assert moved[1:-1].mean().item() == pytest.approx(20 * step, rel=0.02)
    assert moved[[0, -1]].abs().max() < 1e-6


def test_rounding_depends_on_seed_id_column_and_step_alone() -> None:
    def rows(
        ids: torch.Tensor, columns: range = range(100), seed: int = 0, steps: int = 2
    ) -> torch.Tensor:
        options = TableOptions(ConstantInit(1.0), seed=seed)
        table = Table(100, INT8, SGD(1.0), options, columns=columns)
        group = PooledGroup([table], [0], "sum")
        grads = torch.linspace(0.0, 1.0, len(columns) - 1).repeat(len(ids), 1)
        grads = torch.cat([grads, torch.zeros(len(ids), 1)], 1)
        for _ in range(steps):
            group(ids, torch.arange(len(ids) + 1), train=True).backward(grads)
        return table.lookup(torch.arange(100))

    whole = rows(torch.arange(100))
    assert torch.equal(whole, rows(torch.arange(99, -1, -1)))
    assert not torch.equal(whole, rows(torch.arange(100), seed=1))
    assert not torch.equal(whole, rows(torch.arange(100), steps=1))
    assert len(whole.unique(dim=0)) == 100
    assert len(rows(torch.arange(100), columns=range(7, 77)).unique(dim=0)) == 100


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [20, 64])
def test_bags_equal_torch(pooling: str, weighted: bool, dim: int) -> None:
    table = Table(dim, INT8, SGD(0.1), TableOptions(NormalInit(0.0, 0.5)))
    for exact, rows in train_beside_torch(table, pooling, weighted):
        scale = grid(table.read_rows(torch.arange(10))["weight"])[0]
        assert ((rows - exact).abs() <= scale * 1.001 + 1e-6).all()


def test_rows_in_the_order_of_the_batch() -> None:
    table = Table(16, INT8, SGD(0.5), TableOptions(ConstantInit(1.0)))
    ids = torch.tensor([7, 7, 9])
    SequenceGroup([table])(ids, [3], train=True).sum().backward()
    assert table.lookup(ids)[:, 0].tolist() == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad(), Adagrad()], ids=repr)
def test_a_row_of_64_columns_takes_72_bytes_and_its_state(optimizer: Optimizer) -> None:
    ids, sizes = torch.arange(20000), {}
    for kind in (torch.float32, INT8):
        table = Table(64, kind, optimizer)
        table.lookup(ids, train=True)
        sizes[kind] = table.stats().bytes
    assert sizes[torch.float32] - sizes[INT8] == pytest.approx(
        (256 - 72) * 20000, rel=0.02
    )


@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), Adagrad(0.1), Adam(0.1), RowWiseAdagrad(0.1)], ids=repr
)
@pytest.mark.parametrize("dim", [5, 64])
def test_a_copy_of_rows_goes_on_as_the_original(optimizer: Optimizer, dim: int) -> None:
    table, copy = Table(dim, INT8, optimizer), Table(dim, INT8, optimizer)
    ids = torch.tensor([5, -1, 0])
    table.update(ids, torch.randn(3, dim, generator=torch.Generator().manual_seed(0)))
    copy.write_rows(ids, table.read_rows(ids))
    copy.set_state(replace(copy.state(), optimizer_steps=table.optimizer_steps))
    for each in (table, copy):
        each.update(ids, torch.ones(3, dim))
    for name, value in table.read_rows(ids).items():
        assert torch.equal(copy.read_rows(ids)[name], value), name
    with table.snapshot() as snapshot:
        part = snapshot.read(3)
        read_ids, rows = part.ids, part.rows
    assert torch.equal(read_ids, ids.sort().values)
    assert all(
        torch.equal(rows[name], value)
        for name, value in table.read_rows(read_ids).items()
    )


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.1), Adam(0.1)], ids=repr)
@pytest.mark.parametrize("dim", [6, 64])
def test_rows_come_back_from_a_cold_store_as_they_were(
    optimizer: Optimizer, dim: int, tmp_path: Path
) -> None:
    bounded = TableOptions(
        max_rows=16, eviction=LRU(), cold_store=RocksDBStore(str(tmp_path))
    )
    generator = torch.Generator().manual_seed(0)
    cold, plain = Table(dim, INT8, optimizer, bounded), Table(dim, INT8, optimizer)
    with cold:
        for _ in range(12):
            ids = torch.randint(0, 60, (10,), generator=generator)
            grads = torch.randn(10, dim, generator=generator)
            for table in (cold, plain):
                table.lookup(ids, train=True)
                table.update(ids, grads)
        every = plain.ids()
        assert cold.stats().cold_rows > 0
        assert torch.equal(cold.ids(), every)
        assert torch.equal(cold.lookup(every), plain.lookup(every))
        for name, value in plain.read_rows(every).items():
            assert torch.equal(cold.read_rows(every)[name], value), name
        with cold.snapshot() as snapshot:
            rows = snapshot.read(len(every)).rows
        assert torch.equal(rows["weight"], plain.read_rows(every)["weight"])


def test_columns_of_rows() -> None:
    rows = stored(random_rows(20, 12))
    left, right = columns_of(rows, slice(0, 5)), columns_of(rows, slice(5, 12))
    assert left.shape == (20, stored_columns(INT8, 5))
    assert torch.equal(values(left), values(rows)[:, :5])
    assert joined_columns([left]) is left
    assert torch.equal(joined_columns([left, right]), values(rows))
    assert torch.equal(as_stored(joined_columns([left, right]), INT8), rows)
    half = torch.ones(3, 4, dtype=torch.float16)
    assert torch.equal(columns_of(half, slice(1, 3)), half[:, 1:3])
    assert joined_columns([half, half]).dtype is torch.float16


def test_what_makes_no_sense_is_refused() -> None:
    table, ids = Table(4, INT8), torch.tensor([1])
    for call in (table.update, table.insert):
        with pytest.raises(
            TypeError, match=r"must be a float32 tensor, got torch\.int8"
        ):
            call(ids, torch.ones(1, 4, dtype=INT8))
    table.insert(ids, torch.ones(1, 4))
    rows = table.read_rows(ids)
    with pytest.raises(
        ValueError, match=r"weight must have the shape \(1, 12\), got \(1, 4\)"
    ):
        table.write_rows(ids, {**rows, "weight": rows["weight"][:, :4]})
    with pytest.raises(
        TypeError, match=r"weight must be a float32 tensor, got torch\.float16"
    ):
        table.write_rows(ids, {**rows, "weight": torch.ones(1, 4, dtype=torch.float16)})
    assert table.stochastic_rounding
    with pytest.raises(
        ValueError,
        match=r"stochastic_rounding=False is not supported for rows of torch\.int8",
    ):
        Table(4, INT8, stochastic_rounding=False)
    with pytest.raises(
        ValueError, match=r"dtype must be one of .*int8, got torch\.uint8"
    ):
        Table(4, torch.uint8)


def _digests() -> list[str]:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        digest = hashlib.sha256()
        for number, optimizer in enumerate(OPTIMIZERS):
            dim, generator = (
                (16, 33, 64, 128)[number % 4],
                torch.Generator().manual_seed(number),
            )
            options = TableOptions(NormalInit(0.0, 1e-3 if number % 2 else 1.0))
            columns = range(5, dim) if number % 3 == 2 else range(dim)
            table = Table(dim, INT8, optimizer, options, columns=columns)
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
            digest.update(table.read_rows(table.ids())["weight"].numpy().tobytes())
        found.append(digest.hexdigest())
    return found


@pytest.mark.slow
def test_bits_depend_neither_on_the_instruction_set_nor_on_threads() -> None:
    check_same_bits(_digests)
