"""Checkpoints of a DLRM run: when one is due, what it holds beside the model, and going on from it."""

from __future__ import annotations

from pathlib import Path

from common.checkpoints import CheckpointFolder
from common.command import DataError
from common.sharding import dense_part
from loops import Progress, Training
from settings import Settings
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer


class Checkpoints:
    """The checkpoints that a run writes and the one that it goes on from. Every method is collective.

    Args:
        settings: of the run, which has the ``checkpoint`` folder to itself; without one nothing is read or written.

    Attributes:
        resumed_from: the checkpoint that the run goes on from; None where it starts anew.

    Raises:
        DataError: the folder has checkpoints that the run does not go on from, or the newest cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = CheckpointFolder(settings.checkpoint, settings.keep) if settings.checkpoint else None
        if self._folder:
            self._folder.sweep()
        self._newest = self._folder.newest() if self._folder else None
        self._identity: dict[str, str | int | float | None] = {}
        self._saved_step = 0
        if self._newest and not settings.resume:
            raise DataError(
                f"{settings.checkpoint} has checkpoints already, up to {self._newest.path.name}: "
                "--resume goes on from there, another folder starts anew"
            )

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that the run goes on from."""
        return self._newest.path if self._newest else None

    def identify(self, data: str) -> None:
        """Tells what data the run has.

        Args:
            data: the same text for the same data.

        Raises:
            DataError: the checkpoint to go on from is of a run with other data or settings.
        """
        self._identity = {"--data": data} | self._settings.must_match()
        if self._newest:
            path = self._newest.path
            before = (self._newest.training_state or {}).get("identity")
            if not isinstance(before, dict):
                raise DataError(f"{path} was not written by this command")
            flags = [flag for flag, now in self._identity.items() if before.get(flag) != now]
            others = [f"{flag} {before.get(flag)}, not {self._identity[flag]}" for flag in flags]
            if others:
                raise DataError(f"{path} is of a run with {'; '.join(others)}")

    def restore(self, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> Training:
        """Brings a new model and its optimizer to where the checkpoint to go on from was written.

        Raises:
            DataError: the checkpoint is damaged.
        """
        if not (self._folder and self._newest):
            return Training(model, optimizer, Progress())
        # A keyed optimizer copies into the state it has, and a new one has none; this step is undone by the load.
        dense_part(optimizer).init_state()
        state = self._folder.load(model, self._newest.path)
        dense_part(optimizer).load_state_dict(state["dense_optimizer"])
        progress = Progress.from_state(state["progress"])
        self._saved_step = progress.step
        return Training(model, optimizer, progress)

    def save_if_due(self, training: Training) -> None:
        """Saves after every ``checkpoint_every``-th step.

        Raises:
            DataError: it cannot be written.
        """
        every = self._settings.checkpoint_every
        if every and training.progress.step % every == 0:
            self.save(training)

    def save(self, training: Training) -> None:
        """Saves, where no checkpoint of this step is there yet.

        Raises:
            DataError: it cannot be written.
        """
        step = training.progress.step
        if self._folder and step > self._saved_step:
            state = {
                "identity": self._identity,
                "progress": training.progress.state(),
                "dense_optimizer": dense_part(training.optimizer).state_dict(),
            }
            self._folder.save(training.model, step, state)
            self._saved_step = step
