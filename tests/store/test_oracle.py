"""The table against a dict of rows, on sequences of calls that hypothesis generates."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from torchrec_recstore.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from torchrec_recstore.options import TableOptions, UniformInit
from torchrec_recstore.store import Table

DIM = 5
EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
ids_strategy = st.lists(
    st.one_of(
        st.sampled_from(EDGES), st.integers(-20, 20), st.integers(-(2**63), 2**63 - 1)
    ),
    max_size=40,
)


class Oracle:
    """A dict of rows, each (weights, state), with the formulas of optim.py in plain
    torch.
    """

    def __init__(self, optimizer: Optimizer, initial: Table) -> None:
        self.optimizer = optimizer
        self.initial = initial
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    def initial_row(self, id_: int) -> Tensor:
        return self.initial.lookup(torch.tensor([id_]))[0]

    def touch(self, id_: int) -> None:
        if id_ not in self.rows:
            self.rows[id_] = (
                self.initial_row(id_),
                torch.zeros(DIM if type(self.optimizer) is Adagrad else 1),
            )

    def update(self, ids: list[int], grads: Tensor) -> None:
        sums: dict[int, Tensor] = {}
        for id_, grad in zip(ids, grads, strict=True):
            sums[id_] = sums[id_] + grad if id_ in sums else grad
        for id_, grad in sums.items():
            self.touch(id_)
            weights, state = self.rows[id_]
            o = self.optimizer
            grad = grad + o.weight_decay * weights
            if isinstance(o, SGD):
                weights = weights - o.lr * grad
            else:
                state = state + (grad**2 if type(o) is Adagrad else (grad**2).mean())
                weights = weights - o.lr * grad / (state.sqrt() + o.eps)
            self.rows[id_] = (weights, state)


class TableMachine(RuleBasedStateMachine):
    optimizer: Optimizer

    @initialize(missing=st.sampled_from(["zeros", "init"]))
    def make(self, missing: str) -> None:
        init = UniformInit(-1.0, 1.0)
        self.missing = missing
        self.table = Table(
            DIM,
            optimizer=self.optimizer,
            options=TableOptions(init, seed=3, missing=missing),
        )
        self.oracle = Oracle(
            self.optimizer,
            Table(DIM, options=TableOptions(init, seed=3, missing="init")),
        )

    @rule(ids=ids_strategy, train=st.booleans())
    def lookup(self, ids: list[int], train: bool) -> None:
        out = self.table.lookup(torch.tensor(ids, dtype=torch.int64), train=train)
        for id_, row in zip(ids, out, strict=True):
            if train:
                self.oracle.touch(id_)
            if id_ in self.oracle.rows:
                torch.testing.assert_close(
                    row, self.oracle.rows[id_][0], rtol=1e-5, atol=1e-6
                )
            else:
                expected = (
                    self.oracle.initial_row(id_)
                    if self.missing == "init"
                    else torch.zeros(DIM)
                )
                assert torch.equal(row, expected)

    @rule(ids=ids_strategy, seed=st.integers(0, 1000))
    def update(self, ids: list[int], seed: int) -> None:
        grads = torch.randn(
            len(ids), DIM, generator=torch.Generator().manual_seed(seed)
        )
        self.table.update(torch.tensor(ids, dtype=torch.int64), grads)
        self.oracle.update(ids, grads)

    @rule(ids=ids_strategy, seed=st.integers(0, 1000))
    def insert(self, ids: list[int], seed: int) -> None:
        weights = torch.randn(
            len(ids), DIM, generator=torch.Generator().manual_seed(seed)
        )
        self.table.insert(torch.tensor(ids, dtype=torch.int64), weights)
        for id_, row in zip(ids, weights, strict=True):
            self.oracle.touch(id_)
            self.oracle.rows[id_] = (row, self.oracle.rows[id_][1])

    @rule(ids=ids_strategy)
    def remove(self, ids: list[int]) -> None:
        removed = self.table.remove(torch.tensor(ids, dtype=torch.int64))
        assert removed == len(set(ids) & set(self.oracle.rows))
        for id_ in ids:
            self.oracle.rows.pop(id_, None)

    @rule(ids=ids_strategy)
    def contains(self, ids: list[int]) -> None:
        found = self.table.contains(torch.tensor(ids, dtype=torch.int64))
        assert found.tolist() == [id_ in self.oracle.rows for id_ in ids]

    @invariant()
    def holds_the_same_ids(self) -> None:
        if hasattr(self, "table"):
            assert self.table.ids().tolist() == sorted(self.oracle.rows)
            assert len(self.table) == len(self.oracle.rows)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(SGD(0.1, weight_decay=0.1), marks=pytest.mark.slow),
        pytest.param(Adagrad(0.1, eps=1e-3, weight_decay=0.1), marks=pytest.mark.slow),
        RowWiseAdagrad(0.1, eps=1e-3, weight_decay=0.1),
    ],
)
def test_table_equals_dict(optimizer: Optimizer) -> None:
    machine = type("Machine", (TableMachine,), {"optimizer": optimizer})
    machine.TestCase.settings = settings(
        max_examples=30, stateful_step_count=25, deadline=None, derandomize=True
    )
    machine.TestCase("runTest").runTest()
