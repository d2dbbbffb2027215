"""What peers.py and the processes of its sides send each other.

This module needs numpy alone. A side reads a JSON object from each line of stdin and
answers with one. All sides make the same ids and gradients from the number of a step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

ANSWER = "answer: "
"""Begins each line with an answer, because packages print lines of their own."""
ODD = 0x9E3779B97F4A7C15
"""Spreads the numbers of rows over 64-bit ids, one to one."""


class Shape(NamedTuple):
    """The sizes of a run.

    Args:
        rows: The rows of the table.
        dim: The columns.
        ids: The ids of a lookup and of a step, drawn from all rows.
        part: The rows of each call that fills the table.
        threads: The threads of each side.
    """

    rows: int
    dim: int
    ids: int
    part: int
    threads: int


class Side(Protocol):
    """A table of one package."""

    def fill(self, ids: Any, weights: Any) -> float | None:
        """Writes rows (N, dim), and returns the seconds. None: it does not grow."""

    def lookup(self, ids: Any) -> float:
        """Looks ids (N,) up, and returns the seconds."""

    def step(self, ids: Any, gradient: Any) -> float:
        """Looks ids up and updates their rows, and returns the seconds."""

    def rows(self) -> int:
        """Returns the number of rows."""

    def save(self, folder: Path) -> float:
        """Saves the rows and their state, and returns the seconds."""

    def load(self, folder: Path) -> float:
        """Loads what is saved, and returns the seconds."""

    def check(self, ids: Any) -> list[float]:
        """Returns the first number of the rows of ids."""


def raw_ids(numbers: Any, is_numbered: bool) -> Any:
    """Returns the ids (N,) int64 of rows by number.

    Args:
        numbers: (N,) int64.
        is_numbered: Whether the table takes the numbers of rows alone.
    """
    if is_numbered:
        return numbers
    with np.errstate(over="ignore"):
        spread = numbers.astype(np.uint64) * np.uint64(ODD)
    return (spread >> np.uint64(1)).astype(np.int64)


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes, without pages of files."""
    status = Path("/proc/self/status").read_text()
    _, _, value = status.partition("RssAnon:")
    kib = int(value.split()[0])
    return kib * 1024


def bytes_of(folder: Path) -> int:
    """Returns the bytes of the files of a folder and of the folders in it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class _Session:
    """Answers the requests of peers.py with a side."""

    def __init__(self, make: Callable[[Shape], Side], shape: Shape) -> None:
        self.shape = shape
        self.empty_bytes = resident_bytes()
        self.side = make(shape)
        self.is_numbered = getattr(self.side, "is_numbered", False)

    def _part(self, step: int) -> Any:
        begin = step * self.shape.part
        end = begin + self.shape.part
        generator = np.random.default_rng(step)
        numbers = generator.permutation(np.arange(begin, end))
        return raw_ids(numbers, self.is_numbered)

    def _drawn(self, step: int) -> Any:
        generator = np.random.default_rng(1_000 + step)
        numbers = generator.integers(0, self.shape.rows, self.shape.ids)
        return raw_ids(numbers, self.is_numbered)

    def _gradient(self, count: int) -> Any:
        generator = np.random.default_rng(0)
        shape = (count, self.shape.dim)
        return generator.standard_normal(shape, dtype=np.float32)

    def fill(self, step: int) -> Any:
        """Writes a part of the rows."""
        ids = self._part(step)
        weights = self._gradient(self.shape.part)
        return self.side.fill(ids, weights)

    def new(self, step: int) -> Any:
        """Trains on a part of ids, which are new if the table is not yet filled."""
        ids = self._part(step)
        gradient = self._gradient(self.shape.part)
        return self.side.step(ids, gradient)

    def lookup(self, step: int) -> Any:
        """Looks ids up."""
        return self.side.lookup(self._drawn(step))

    def step(self, step: int) -> Any:
        """Looks ids up and updates their rows."""
        ids = self._drawn(step)
        gradient = self._gradient(self.shape.ids)
        return self.side.step(ids, gradient)

    def memory(self, _: int) -> Any:
        """Returns the bytes that the table has added to the process."""
        return resident_bytes() - self.empty_bytes

    def rows(self, _: int) -> Any:
        """Returns the number of rows."""
        return self.side.rows()

    def disk(self, _: int) -> Any:
        """Saves and loads, and returns both times, the bytes, and whether rows agree."""
        ids = self._drawn(0)[:1_000]
        before = self.side.check(ids)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            save_s = self.side.save(path)
            os.sync()
            saved_bytes = bytes_of(path)
            load_s = self.side.load(path)
        if self.side.check(ids) != before:
            raise AssertionError("the loaded rows differ from the saved ones")
        return {
            "save_s": save_s,
            "load_s": load_s,
            "bytes": saved_bytes,
        }


def answer(make: Callable[[Shape], Side]) -> None:
    """Answers all requests of stdin, the first of which is the shape."""
    shape = Shape(**json.loads(sys.stdin.readline()))
    session = _Session(make, shape)
    for line in sys.stdin:
        request = json.loads(line)
        call = getattr(session, request["call"])
        result = json.dumps(call(request["step"]))
        print(f"{ANSWER}{result}", flush=True)
