"""Settings of a run, free of torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from common.command import DataError
from common.run_settings import LrSchedule, RunSettings


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """What a run is asked to do; the command's flags, one by one.

    Attributes:
        data: a Criteo TSV, plain or gzip; None generates rows.
        limit_rows: only the first so many rows exist; how many the generator makes.
        skip_bad_rows: bad lines are left out and counted instead of being an error.
        lr_schedule: what becomes of both learning rates after the warm-up.
        warmup_steps: steps in which they rise to what was set.
        checkpoint: folder of the run's checkpoints; None writes none.
        checkpoint_every: steps from one checkpoint to the next; one is written at the end of an epoch in any case.
        resume: go on from the newest checkpoint, if there is one.
        keep: how many checkpoints stay.
    """

    data: Path | None
    limit_rows: int | None
    skip_bad_rows: bool
    lr_schedule: LrSchedule = "constant"
    warmup_steps: int = 0
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    keep: int = 3

    @property
    def goes_on(self) -> bool:
        """Whether the run may go on from where another one came to, and from its curves."""
        return self.resume

    def check(self, world_size: int) -> None:
        """Finds what would fail only later, or less clearly.

        Raises:
            DataError: a setting does not fit another, or the number of ranks.
        """
        super().check(world_size)
        if self.checkpoint is None:
            for flag, given in (("--resume", self.resume), ("--checkpoint-every", self.checkpoint_every is not None)):
                if given:
                    raise DataError(f"{flag} needs --checkpoint DIR")
        elif self.backend == "fused":
            raise DataError(
                "--checkpoint is for --backend recstore: stock tables are torch.distributed.checkpoint's job"
            )

    def must_match(self) -> dict[str, str | int | float | None]:
        """What a run that goes on from a checkpoint must be asked for again: flags and their values."""
        names = ("dim", "optimizer", "lr", "dense_lr", "lr_schedule", "warmup_steps", "batch_size", "epochs", "seed")
        # A cold store may lie elsewhere: the checkpoint has its rows.
        bounds = {name: value for name, value in asdict(self.bounds).items() if name != "cold_store"}
        asked = {name: getattr(self, name) for name in names} | bounds
        return {f"--{name.replace('_', '-')}": value for name, value in asked.items()}
