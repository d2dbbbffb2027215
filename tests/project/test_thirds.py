"""The order of the tests, and the third of them that CI runs for a commit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems

LONG = "tests/test_a.py::test_7["
TESTS = [f"tests/test_a.py::test_{n}[{case}]" for n in range(50) for case in "xy"]


def time_limit(nodeid: str) -> SimpleNamespace | None:
    return SimpleNamespace(args=(900,)) if nodeid.startswith(LONG) else None


def run_in(third: int | None, tests: list[str] = TESTS) -> list[str]:
    """The tests that are left when one third is asked for."""
    deselected: list[SimpleNamespace] = []
    config = SimpleNamespace(
        getoption=lambda name: third,
        hook=SimpleNamespace(
            pytest_deselected=lambda items: deselected.extend(items),
        ),
    )
    items = [
        SimpleNamespace(
            nodeid=nodeid,
            get_closest_marker=lambda name, nodeid=nodeid: time_limit(nodeid),
        )
        for nodeid in tests
    ]
    pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert len(items) + len(deselected) == len(tests)
    return [item.nodeid for item in items]


def test_each_test_is_in_one_third() -> None:
    thirds = [run_in(third) for third in (1, 2, 3)]
    assert sorted(thirds[0] + thirds[1] + thirds[2]) == sorted(TESTS)
    assert all(len(third) > len(TESTS) // 6 for third in thirds)


@pytest.mark.parametrize("third", [1, 2, 3])
def test_cases_of_a_function_are_in_one_third(third: int) -> None:
    functions = [nodeid.partition("[")[0] for nodeid in run_in(third)]
    assert all(functions.count(function) == 2 for function in functions)


def test_without_the_option_all_run() -> None:
    assert run_in(None) == TESTS


def test_modules_with_long_tests_come_first() -> None:
    others = ["tests/test_0.py::test_0", "tests/test_b.py::test_0"]
    assert run_in(None, [others[0], *TESTS, others[1]]) == [*TESTS, *others]
