"""Compares the uses, and a part of the cells with every row and column of the parity
table, with docs/parity.md.
"""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from .cells import WORLD_SIZES, Cell, all_cells, subset
from .document import PATH, kinds, kinds_of_uses, text
from .outcomes import (
    DIFFERS,
    FAILS,
    UNSUPPORTED,
    UPSTREAM,
    WORKS,
    Outcome,
    outcomes_of,
    outcomes_of_uses,
)
from .uses.every import all_uses
from .uses.use import Use


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_outcomes_are_the_documented_ones(world_size: int) -> None:
    documented = kinds(PATH.read_text())
    cells = [cell for cell in subset() if cell.world_size == world_size]
    outcomes = outcomes_of(
        cells, expected_to_fail=[cell for cell in cells if documented[cell] != WORKS]
    )
    others = {
        cell: outcome
        for cell, outcome in outcomes.items()
        if outcome.kind != documented[cell]
    }
    assert not others, "make parity, and see what has changed in docs/parity.md"


def test_the_document_has_every_cell() -> None:
    documented = kinds(PATH.read_text())
    assert documented.keys() == set(all_cells())
    assert FAILS not in documented.values()


def test_the_subset_has_every_value_of_every_dimension() -> None:
    assert set(subset()) <= set(all_cells())
    for field in fields(Cell):
        of_all, of_subset = (
            {getattr(cell, field.name) for cell in cells}
            for cells in (all_cells(), subset())
        )
        assert of_subset == of_all, field.name


def compare_with_the_document(uses: list[Use]) -> None:
    documented = kinds_of_uses(PATH.read_text())
    outcomes = outcomes_of_uses([use for use in uses if use.possible])
    others = {
        use.name: outcome
        for use, outcome in outcomes.items()
        if outcome.kind != documented[use.name]
    }
    assert not others, "make parity, and see what has changed in docs/parity.md"
    for use, outcome in outcomes.items():
        # Each of these errors names the function to call instead.
        if outcome.kind == UNSUPPORTED:
            assert re.search(
                r"\w+_(checkpoint|weights|state_dict)\b|eval\(\)", outcome.reason
            ), use.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "topic", sorted({use.topic for use in all_uses() if not use.slow})
)
def test_uses_have_the_documented_outcomes(topic: str) -> None:
    compare_with_the_document(
        [use for use in all_uses() if use.topic == topic and not use.slow]
    )


@pytest.mark.slow
def test_slow_uses_have_the_documented_outcomes() -> None:
    compare_with_the_document([use for use in all_uses() if use.slow])


def test_the_document_has_every_use() -> None:
    documented, uses = kinds_of_uses(PATH.read_text()), all_uses()
    assert list(documented) == [use.name for use in uses]
    assert FAILS not in documented.values()
    assert {use.name for use in uses if use.differs} == {
        name for name, kind in documented.items() if kind == DIFFERS
    }


def test_a_document_is_read_as_it_was_written() -> None:
    turns = [
        Outcome(WORKS),
        Outcome(UPSTREAM, "a", "b"),
        Outcome(UNSUPPORTED, "c", "works"),
        Outcome(FAILS, "d", "e"),
        Outcome(DIFFERS, "f", "works"),
        Outcome(WORKS, "", "g"),
    ]
    outcomes = {cell: turns[i % 4] for i, cell in enumerate(all_cells())}
    uses = {use: turns[i % 6] for i, use in enumerate(all_uses())}
    document = text(outcomes, uses)
    assert kinds(document) == {cell: outcome.kind for cell, outcome in outcomes.items()}
    assert kinds_of_uses(document) == {
        use.name: outcome.kind for use, outcome in uses.items()
    }
