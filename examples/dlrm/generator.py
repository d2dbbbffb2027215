"""Generates a synthetic click log in the Criteo format, from which a model can learn.

Every feature draws its ids from an unbounded population. Few ids are frequent, and most
ids are rare. The population drifts: new ids become frequent and old ids become rare.
Each id has a hidden effect on the label, so a model must learn the ids to predict the
label. A row depends only on the seed and the number of the row, so a stream can start
at any row.

    python examples/dlrm/generator.py rows.tsv --rows 100000 --seed 0
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from criteo import NUM_DENSE, NUM_IDS, Rows, transform_dense

BLOCK_ROWS = 8192
"""The number of rows of one random stream.

A part of a block is cut from the complete block.
"""

POPULATION = tuple(int(3 * 1.44**feature) for feature in range(NUM_IDS))
"""The number of frequent ids of each feature, 3 to 27,000.

About half of the rows have one of these ids.
"""
DRIFT_ROWS = 200_000
"""The number of rows after which all frequent ids of a drifting feature have been
replaced.
"""
TAIL = 1.2
"""The exponent of the tail.

An id at rank k is drawn with a probability of about ``k ** -(TAIL + 1)``.
"""
EMPTY_IDS = (0.0,) * 20 + (0.03, 0.03, 0.12, 0.44, 0.44, 0.76)
EMPTY_DENSE = 0.05
ID_EFFECT = 0.3
DENSE_EFFECT = 0.15
BIAS = -2.0

_UINT64 = np.uint64


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hashes 64-bit values bijectively.

    Source: the finaliser of splitmix64 (Steele et al. 2014).
    """
    values = values ^ (values >> _UINT64(30))
    values = values * _UINT64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> _UINT64(27))
    values = values * _UINT64(0x94D049BB133111EB)
    return values ^ (values >> _UINT64(31))


def _unit(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Maps hashes to uniformly distributed floats of mean 0 and variance 1."""
    top_bits = (values >> _UINT64(40)).astype(np.float32)
    centred = top_bits * np.float32(2**-23) - np.float32(1)
    return centred * np.float32(3**0.5)


class _Block(NamedTuple):
    labels: npt.NDArray[np.int32]  # (n,)
    dense: npt.NDArray[np.int64]  # (n, 13)
    # (n, 13), True where a value is missing and dense is 0
    dense_empty: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.int64]  # (n, 26)


class Generator:
    """A synthetic click log with the same interface as ``CriteoFile``.

    Args:
        num_rows: The number of rows of the log.
        seed: The seed of the log. Logs of different seeds have different ids.

    Attributes:
        num_rows: The number of rows of the log.
        bad_rows: 0.
        bad_lines: An empty sequence.
        fingerprint: A text that identifies the log.
    """

    path = "generator"
    bad_rows = 0
    bad_lines: Sequence[int] = ()

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.fingerprint = f"{num_rows:,} generated rows of seed {seed}"
        first_number = _UINT64(seed % 2**32) * _UINT64(1 << 20)
        numbers = np.arange(1, 2 * NUM_IDS + 1, dtype=np.uint64) + first_number
        salts = _mix(numbers)
        self._id_salts = salts[:NUM_IDS]
        self._effect_salts = salts[NUM_IDS:]
        signs = np.random.default_rng([seed, 1]).choice([-1, 1], NUM_DENSE)
        self._dense_weights = signs.astype(np.float32)

    def rows(self, start: int, stop: int) -> Iterator[Rows]:
        """Yields rows ``[start, stop)`` in blocks."""
        for first, block in self._blocks(start, stop):
            dense = transform_dense(block.dense)
            rows = Rows(block.labels, dense, block.ids)
            begin = max(start - first, 0)
            end = stop - first
            yield rows[begin:end]

    def lines(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields rows ``[start, stop)`` as lines of a Criteo TSV file.

        Each line ends with a newline.
        """
        for first, block in self._blocks(start, stop):
            begin = max(start - first, 0)
            end = min(stop - first, BLOCK_ROWS)
            for row in range(begin, end):
                yield _line(block, row)

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, _Block]]:
        """Yields the blocks of rows ``[start, stop)``, each with its first row."""
        if start >= stop:
            return
        first_number = start // BLOCK_ROWS
        end_number = math.ceil(stop / BLOCK_ROWS)
        for number in range(first_number, end_number):
            yield number * BLOCK_ROWS, self._block(number)

    def _block(self, number: int) -> _Block:
        random = np.random.default_rng([self.seed, 0, number])
        logits = np.full(BLOCK_ROWS, BIAS, np.float32)

        normal = random.standard_normal((BLOCK_ROWS, NUM_DENSE), np.float32)
        dense = np.exp(1.0 + 1.5 * normal).astype(np.int64) - 2
        dense_empty = random.random((BLOCK_ROWS, NUM_DENSE), np.float32) < EMPTY_DENSE
        dense[dense_empty] = 0
        centred = transform_dense(dense) - np.float32(1.7)
        logits += DENSE_EFFECT * (centred @ self._dense_weights)

        first_row = number * BLOCK_ROWS
        times = np.arange(first_row, first_row + BLOCK_ROWS, dtype=np.float64)
        ids = np.empty((NUM_IDS, BLOCK_ROWS), np.uint64)
        for feature in range(NUM_IDS):
            ids[feature] = self._ids(feature, times, random)
            hashes = _mix(ids[feature] ^ self._effect_salts[feature])
            logits += ID_EFFECT * _unit(hashes)

        probabilities = 1 / (1 + np.exp(-logits))
        labels = random.random(BLOCK_ROWS, np.float32) < probabilities
        return _Block(
            labels=labels.astype(np.int32),
            dense=dense,
            dense_empty=dense_empty,
            ids=ids.view(np.int64).T,
        )

    def _ids(
        self,
        feature: int,
        times: npt.NDArray[np.float64],
        random: np.random.Generator,
    ) -> npt.NDArray[np.uint64]:
        """Draws one id for each row.

        The id is the newest member of the population at the time of the row, or an
        older member: a heavy-tailed age is subtracted.
        """
        width = POPULATION[feature]
        uniform = 1 - random.random(len(times))
        widths = uniform ** (-1 / TAIL) - 1
        ages = np.minimum(width * widths, 2.0**52)
        # Features with few ids, like a country or a device type, do not drift.
        newest: npt.NDArray[np.float64] | float = 0.0
        if width > 100:
            newest = times * (width / DRIFT_ROWS)
        members = np.floor(newest - ages).astype(np.int64)
        salted = members.view(np.uint64) + self._id_salts[feature]
        ids = _mix(salted)
        # An empty field of the format reads as 0.
        is_empty = random.random(len(times), np.float32) < EMPTY_IDS[feature]
        ids[is_empty] = 0
        return ids


def _line(block: _Block, row: int) -> bytes:
    """Returns a row of a block as a line of a Criteo TSV file."""
    fields = [str(block.labels[row])]
    dense = zip(block.dense[row], block.dense_empty[row], strict=True)
    for number, is_empty in dense:
        fields.append("" if is_empty else str(number))
    ids = block.ids[row].astype(np.uint64)
    for id_ in ids.tolist():
        fields.append(f"{id_:016x}" if id_ else "")
    return "\t".join(fields).encode() + b"\n"


def main(
    out: Annotated[Path, typer.Argument(help="Criteo TSV file to write.")],
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the log.")] = 0,
) -> None:
    """Write a synthetic click log in the Criteo format."""
    with out.open("wb") as file:
        file.writelines(Generator(rows, seed).lines(0, rows))
    print(f"{rows:,} rows written to {out}", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
