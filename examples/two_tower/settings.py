"""The settings of a two-tower run. This module does not import torch, so that ``--help`` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.run_settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """The settings of a two-tower run. Each setting is a flag of the command.

    Attributes:
        data: The folder with the three MovieLens files.
    """

    data: Path
