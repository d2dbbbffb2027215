"""Settings of a run, free of torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.run_settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """What a run is asked to do; the command's flags, one by one.

    Attributes:
        data: the folder of the three MovieLens files.
    """

    data: Path
