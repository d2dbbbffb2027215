"""The mutations still fit the code and the tests; ``make test-mutations`` applies them."""

from __future__ import annotations

import pytest

from tests.packages import ROOT

from .all import MUTATIONS
from .mutation import Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_it_applies(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert mutation.mutated(text) != text
    assert mutation.tests
    for name in mutation.cpp_tests:
        assert mutation.is_native
        assert (ROOT / "tests/cpp" / f"{name}.cpp").exists()
    for test in mutation.python_tests:
        file, _, function = test.partition("::")
        assert (
            f"def {function.rpartition('::')[2]}(" in (ROOT / file).read_text()
            or not function
        )


def test_each_sentence_is_of_one_mutation() -> None:
    assert len({mutation.breaks for mutation in MUTATIONS}) == len(MUTATIONS) >= 30


def test_a_line_that_is_gone_or_there_twice_is_an_error() -> None:
    mutation = Mutation("a.py", "x = 1", "x = 2", ["test_index"], "It breaks.")
    assert mutation.mutated("if y:\n  x = 1  # why\n") == "if y:\n  x = 2\n"
    for text in ("x = 10\n", "  x = 1\n  x = 1\n"):
        with pytest.raises(
            ValueError, match=r"a\.py has this line \d times, not once: x = 1"
        ):
            mutation.mutated(text)
