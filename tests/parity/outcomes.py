"""The outcome of each cell and of each use, and the reason if it does not work."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .cells import WORLD_SIZES, Cell
from .ranks import Report, Trial, run_trials
from .uses.use import Use

WORKS, UPSTREAM, UNSUPPORTED, DIFFERS, FAILS = (
    "works",
    "upstream failure",
    "not supported",
    "differs",
    "fails",
)
# of the results of uses: the dense optimizer amplifies differences of rounding
TOLERANCE = 1e-3
# The error of a rank when another rank has failed.
_OF_ANOTHER = re.compile(
    r"Timed out|timeout|closed by peer|pair closure|Connection reset"
)


@dataclass(frozen=True)
class Outcome:
    """An outcome: works, upstream failure, not supported, differs or fails; and the
    reason.

    Args:
        reason: The error with RecStore tables.
        stock: The outcome with TorchRec's FUSED tables.
    """

    kind: str
    reason: str = ""
    stock: str = ""


def outcomes_of(
    cells: Sequence[Cell], expected_to_fail: Collection[Cell] = ()
) -> dict[Cell, Outcome]:
    """Runs the cells. Cells that do not work run again with stock tables.

    A failure is upstream's where stock tables fail as well, RecStore's refusal where
    the error says so, and else a defect of RecStore's: it "fails".

    Args:
        expected_to_fail: these run with stock tables right away, which saves the start
            of another group of ranks.
    """
    outcomes: dict[Cell, Outcome] = {}
    for world_size in WORLD_SIZES:
        of_size = [cell for cell in cells if cell.world_size == world_size]
        reports = run_trials(
            [Trial(cell, "recstore") for cell in of_size]
            + [Trial(cell, "stock") for cell in of_size if cell in expected_to_fail]
        )
        failed = [
            cell for cell in of_size if _failure(reports[Trial(cell, "recstore")])
        ]
        stock = [Trial(cell, "stock") for cell in failed]
        reports.update(run_trials([trial for trial in stock if trial not in reports]))
        for cell in of_size:
            ours = reports[Trial(cell, "recstore")]
            outcomes[cell] = (
                _outcome(ours, reports[Trial(cell, "stock")])
                if cell in failed
                else Outcome(WORKS)
            )
    return outcomes


def _outcome(ours: Sequence[Report], stock: Sequence[Report]) -> Outcome:
    failure, stock_failure = _failure(ours), _failure(stock)
    assert failure is not None
    reason = failure.error
    said = stock_failure.error if stock_failure else "works"
    if failure.refused:
        return Outcome(UNSUPPORTED, reason, said)
    if stock_failure is None:
        return Outcome(FAILS, reason, said)
    return Outcome(UPSTREAM, reason, said)


def outcomes_of_uses(uses: Sequence[Use]) -> dict[Use, Outcome]:
    """Tries the uses with stock tables and with RecStore tables, and compares the
    results.
    """
    outcomes: dict[Use, Outcome] = {}
    for world_size in sorted({use.world_size for use in uses}):
        of_size = [use for use in uses if use.world_size == world_size]
        reports = run_trials(
            [Trial(use, kernel) for use in of_size for kernel in ("stock", "recstore")]
        )
        for use in of_size:
            outcomes[use] = _outcome_of_use(
                use, reports[Trial(use, "recstore")], reports[Trial(use, "stock")]
            )
    return outcomes


def _outcome_of_use(
    use: Use, ours: Sequence[Report], stock: Sequence[Report]
) -> Outcome:
    failure, stock_failure = _failure(ours), _failure(stock)
    said = stock_failure.error if stock_failure else "works"
    if failure:
        if stock_failure:
            return Outcome(UPSTREAM, failure.error, said)
        return Outcome(UNSUPPORTED if failure.refused else FAILS, failure.error, said)
    if stock_failure:
        return Outcome(WORKS, "", said)
    if _equal([report.result for report in ours], [report.result for report in stock]):
        return Outcome(WORKS)
    return Outcome(
        DIFFERS if use.differs else FAILS,
        use.differs or "another result than with stock tables",
        said,
    )


def _equal(ours: Any, stock: Any) -> bool:
    if isinstance(ours, list) and isinstance(stock, list):
        return len(ours) == len(stock) and all(map(_equal, ours, stock))
    if isinstance(ours, dict) and isinstance(stock, dict):
        return ours.keys() == stock.keys() and all(
            _equal(value, stock[key]) for key, value in ours.items()
        )
    if isinstance(ours, float) and isinstance(stock, float):
        return math.isclose(ours, stock, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(ours == stock)


def _failure(reports: Sequence[Report]) -> Report | None:
    """The first error that is not a consequence of another rank's error."""
    failed = [report for report in reports if report.error]
    own = [report for report in failed if not _OF_ANOTHER.search(report.error)]
    return next(iter(own or failed), None)
