"""Compares a part of the cells, which has every row and column of the parity table, with docs/parity.md."""

from __future__ import annotations

from dataclasses import fields

import pytest

from .cells import WORLD_SIZES, Cell, all_cells, subset
from .document import PATH, kinds, text
from .outcomes import FAILS, UNSUPPORTED, UPSTREAM, WORKS, Outcome, outcomes_of


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_outcomes_are_the_documented_ones(world_size: int) -> None:
    documented = kinds(PATH.read_text())
    cells = [cell for cell in subset() if cell.world_size == world_size]
    outcomes = outcomes_of(cells, expected_to_fail=[cell for cell in cells if documented[cell] != WORKS])
    others = {cell: outcome for cell, outcome in outcomes.items() if outcome.kind != documented[cell]}
    assert not others, "make parity, and see what has changed in docs/parity.md"


def test_the_document_has_every_cell() -> None:
    documented = kinds(PATH.read_text())
    assert documented.keys() == set(all_cells())
    assert FAILS not in documented.values()


def test_the_subset_has_every_value_of_every_dimension() -> None:
    assert set(subset()) <= set(all_cells())
    for field in fields(Cell):
        of_all, of_subset = ({getattr(cell, field.name) for cell in cells} for cells in (all_cells(), subset()))
        assert of_subset == of_all, field.name


def test_a_document_is_read_as_it_was_written() -> None:
    turns = [Outcome(WORKS), Outcome(UPSTREAM, "a", "b"), Outcome(UNSUPPORTED, "c", "works"), Outcome(FAILS, "d", "e")]
    outcomes = {cell: turns[i % 4] for i, cell in enumerate(all_cells())}
    assert kinds(text(outcomes)) == {cell: outcome.kind for cell, outcome in outcomes.items()}
