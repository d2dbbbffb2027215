"""The settings of a DLRM run. This module does not import torch, so that ``--help`` is fast."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from common.command import DataError
from common.run_settings import LrSchedule, RunSettings

Dtype = Literal["fp32", "fp16", "bf16", "int8"]
"""The data types of the rows. The names are those of TorchRec's ``DataType``, in lower case."""


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """The settings of a DLRM run. Each setting is a flag of the command.

    Attributes:
        data: The path of a Criteo TSV file, plain or gzip. None generates rows.
        limit_rows: The number of rows to read or to generate. None reads all rows.
        skip_bad_rows: Whether bad lines are left out and counted. Otherwise a bad line is an error.
        dtype: The data type of the rows of RecStore tables.
        lr_schedule: The schedule of both learning rates after the warm-up.
        warmup_steps: The number of steps in which both learning rates rise to their values.
        checkpoint: The folder of the run's checkpoints. None writes no checkpoints.
        checkpoint_every: The number of steps between checkpoints. A checkpoint is also written after each epoch.
        resume: Whether the run resumes from the newest checkpoint, if there is one.
        keep: The number of checkpoints to keep.
    """

    data: Path | None
    limit_rows: int | None
    skip_bad_rows: bool
    dtype: Dtype = "fp32"
    lr_schedule: LrSchedule = "constant"
    warmup_steps: int = 0
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    keep: int = 3

    @property
    def goes_on(self) -> bool:
        """Whether the run may resume another run and continue its curves."""
        return self.resume

    def check(self, world_size: int) -> None:
        """Checks the settings before the work begins.

        Raises:
            DataError: A setting contradicts another setting, or does not fit the number of ranks.
        """
        super().check(world_size)
        if self.backend == "fused" and self.dtype != "fp32":
            raise DataError("--dtype is for --backend recstore")
        if self.servers is not None and (self.lr_schedule != "constant" or self.warmup_steps):
            flag = "--warmup-steps" if self.warmup_steps else "--lr-schedule"
            raise DataError(f"{flag} cannot be used with --servers, which apply the optimizer with the rate of --lr")
        if self.checkpoint is None:
            for flag, given in (("--resume", self.resume), ("--checkpoint-every", self.checkpoint_every is not None)):
                if given:
                    raise DataError(f"{flag} needs --checkpoint DIR")
        elif self.servers is not None:
            raise DataError(
                "--checkpoint cannot be used with --servers, which own the tables: RecStoreClient.save saves the tables"
            )
        elif self.backend == "fused":
            raise DataError(
                "--checkpoint is for --backend recstore: save stock tables with torch.distributed.checkpoint"
            )

    def must_match(self) -> dict[str, str | int | float | None]:
        """Returns the flags that must have the same values when a run is resumed, with their values."""
        names = (
            "dim",
            "dtype",
            "optimizer",
            "lr",
            "dense_lr",
            "lr_schedule",
            "warmup_steps",
            "batch_size",
            "epochs",
            "seed",
        )
        # The cold store may change, because a checkpoint contains the cold rows.
        bounds = {name: value for name, value in asdict(self.bounds).items() if name != "cold_store"}
        asked = {name: getattr(self, name) for name in names} | bounds
        return {f"--{name.replace('_', '-')}": value for name, value in asked.items()}
