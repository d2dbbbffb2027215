"""Runs every cell and every use, and writes docs/parity.md: ``python -m
tests.parity.report``.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from .cells import all_cells
from .document import PATH, text
from .outcomes import FAILS, outcomes_of, outcomes_of_uses
from .uses.every import all_uses


def main() -> int:
    """Returns the exit status: 1 if a cell or a use fails because of RecStore."""
    start = time.monotonic()
    outcomes, uses = outcomes_of(all_cells()), outcomes_of_uses(all_uses())
    PATH.write_text(text(outcomes, uses))
    counts = Counter(outcome.kind for outcome in (*outcomes.values(), *uses.values()))
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(
        f"{PATH}: {len(outcomes)} cells, {len(uses)} uses in"
        f" {time.monotonic() - start:.0f} s: {said}"
    )
    return 1 if counts[FAILS] else 0


if __name__ == "__main__":
    sys.exit(main())
