"""Runs every cell and writes docs/parity.md: ``python -m tests.parity.report``."""

from __future__ import annotations

import sys
import time
from collections import Counter

from .cells import all_cells
from .document import PATH, text
from .outcomes import FAILS, outcomes_of


def main() -> int:
    """Returns the exit status: 1 if a cell fails because of RecStore."""
    start = time.monotonic()
    outcomes = outcomes_of(all_cells())
    PATH.write_text(text(outcomes))
    counts = Counter(outcome.kind for outcome in outcomes.values())
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{PATH}: {len(outcomes)} cells in {time.monotonic() - start:.0f} s: {said}")
    return 1 if counts[FAILS] else 0


if __name__ == "__main__":
    sys.exit(main())
