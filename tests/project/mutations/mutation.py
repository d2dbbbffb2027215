"""What a mutation is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One line of the package's code, and a mistake in it that a test must find.

    Args:
        file: The path of the file, from the root of the checkout.
        line: The code of the line, without its indentation and without a comment at its
            end. The file must contain this line exactly once.
        mutant: The line that replaces it.
        tests: The tests that must find the mistake, all of them part of ``make test``:
            the name of a C++ test, such as ``test_index``, or an argument for pytest,
            such as ``tests/store/test_table.py::test_any_strides``. At least one of
            them must fail.
        breaks: What the mistake does, in one sentence.
    """

    file: str
    line: str
    mutant: str
    tests: Sequence[str]
    breaks: str

    @property
    def cpp_tests(self) -> list[str]:
        return [test for test in self.tests if not test.startswith("tests/")]

    @property
    def python_tests(self) -> list[str]:
        return [test for test in self.tests if test.startswith("tests/")]

    @property
    def is_native(self) -> bool:
        return "/csrc/" in self.file

    def mutated(self, text: str) -> str:
        """The text of the file with the mistake.

        Raises:
            ValueError: The file does not contain the line exactly once.
        """
        lines = text.split("\n")
        places = [
            place for place, line in enumerate(lines) if code_of(line) == self.line
        ]
        if len(places) != 1:
            raise ValueError(
                f"{self.file} has this line {len(places)} times, not once: {self.line}"
            )
        line = lines[places[0]]
        lines[places[0]] = line[: len(line) - len(line.lstrip())] + self.mutant
        return "\n".join(lines)


def code_of(line: str) -> str:
    """The line without its indentation and without a comment at its end."""
    return re.sub(r"\s+(//|# ).*$", "", line.strip())
