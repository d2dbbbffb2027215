"""Settings of a run, free of torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """What a run is asked to do; the command's flags, one by one.

    Attributes:
        data: a Criteo TSV, plain or gzip; None generates rows.
        limit_rows: only the first so many rows exist; how many the generator makes.
        skip_bad_rows: bad lines are left out and counted instead of being an error.
    """

    data: Path | None
    limit_rows: int | None
    skip_bad_rows: bool
