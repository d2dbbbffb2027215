from __future__ import annotations

import math

import pytest
import torch

from torchrec_recstore.options import (
    ConstantInit,
    Initializer,
    NormalInit,
    TableOptions,
    UniformInit,
    default_initializer,
)
from torchrec_recstore.store import Table


def _weights(
    initializer: Initializer | None, rows: int = 20_000, dim: int = 50
) -> torch.Tensor:
    return Table(dim, options=TableOptions(initializer)).lookup(
        torch.arange(rows) - rows // 2, train=True
    )


def test_uniform() -> None:
    weights = _weights(UniformInit(-0.25, 0.75))
    assert weights.min() >= -0.25
    assert weights.max() < 0.75
    assert abs(weights.mean() - 0.25) < 1e-3
    assert abs(weights.std() - 1 / math.sqrt(12)) < 1e-3
    # neighbors in a row, in a column
    for correlated in (weights[:, :-1] * weights[:, 1:], weights[:-1] * weights[1:]):
        assert abs(correlated.mean() - 0.0625) < 1e-3
    assert len(weights.unique()) > 0.95 * min(weights.numel(), 2**24) * 0.9


def test_normal() -> None:
    weights = _weights(NormalInit(1.0, 0.5))
    assert abs(weights.mean() - 1.0) < 2e-3
    assert abs(weights.std() - 0.5) < 2e-3
    z = ((weights - 1.0) / 0.5).flatten().double()
    for point in (-3.0, -1.5, -0.3, 0.8, 2.5):
        expected = 0.5 * math.erfc(-point / math.sqrt(2))
        assert abs((z < point).double().mean() - expected) < 2e-3


def test_truncated_normal() -> None:
    weights = _weights(NormalInit(0.0, 2.0, truncate_std=1.5))
    assert weights.abs().max() <= 3.0
    inside = math.erf(1.5 / math.sqrt(2))
    below = 0.5 * math.erfc(0.5 / math.sqrt(2))  # P(Z < -0.5)
    tail = 0.5 * math.erfc(1.5 / math.sqrt(2))
    assert abs((weights < -1.0).double().mean() - (below - tail) / inside) < 2e-3


def test_constant() -> None:
    assert torch.equal(_weights(ConstantInit(0.125), 10), torch.full((10, 50), 0.125))


def test_default_is_bounded_by_two_to_the_twenty() -> None:
    assert default_initializer(TableOptions()) == UniformInit(-(2**-10), 2**-10)
    assert default_initializer(TableOptions(), 2**40) == UniformInit(-(2**-10), 2**-10)
    assert default_initializer(TableOptions(), 100) == UniformInit(-0.1, 0.1)
    assert default_initializer(TableOptions(expected_rows=400), 100) == UniformInit(
        -0.05, 0.05
    )
    assert default_initializer(TableOptions(ConstantInit(1.0)), 100) == ConstantInit(
        1.0
    )
    assert _weights(None).abs().max() <= 2**-10


@pytest.mark.parametrize(
    ("make", "error", "names"),
    [
        (lambda: UniformInit(1.0, 0.0), ValueError, "low"),
        (lambda: UniformInit(float("nan"), 0.0), ValueError, "low"),
        (lambda: NormalInit(0.0, -1.0), ValueError, "std"),
        (lambda: NormalInit(0.0, 1.0, 0.0), ValueError, "truncate_std"),
        (lambda: ConstantInit(float("inf")), ValueError, "value"),
        (lambda: TableOptions(initializer=0.1), TypeError, "initializer"),
        (lambda: TableOptions(seed=1.5), TypeError, "seed"),
        (lambda: TableOptions(seed=2**63), ValueError, "seed"),
        (lambda: TableOptions(expected_rows=0), ValueError, "expected_rows"),
        (lambda: TableOptions(missing="error"), ValueError, "missing"),
    ],
)
def test_options_that_make_no_sense(
    make: object, error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        make()  # type: ignore[operator]


def test_options_are_hashable_values() -> None:
    assert hash(TableOptions(NormalInit(0.0, 1.0))) == hash(
        TableOptions(NormalInit(0.0, 1.0))
    )
    assert TableOptions(seed=1) != TableOptions(seed=2)


class _Symmetric(UniformInit):
    """A user's own name for an initializer."""


def test_a_subclass_is_its_base_class() -> None:
    ids = torch.arange(10)
    tables = []
    for initializer in (_Symmetric(-1.0, 1.0), UniformInit(-1.0, 1.0)):
        options = TableOptions(initializer=initializer)
        tables.append(Table(4, options=options, name="t"))
    first, second = (table.lookup(ids, train=True) for table in tables)
    assert torch.equal(first, second)
