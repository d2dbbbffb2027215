"""Saves the checkpoints of a DLRM run and resumes from them."""

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
    """The checkpoints that a run writes, and the checkpoint that it resumes from. Every method is collective.

    Args:
        settings: The settings of the run. Only this run may use the ``checkpoint`` folder. If ``checkpoint`` is None,
            nothing is read or written.

    Attributes:
        resumed_from: The path of the checkpoint that the run resumes from, or None if the run starts from the
            beginning.

    Raises:
        DataError: The folder contains checkpoints and ``resume`` is not set, or the newest checkpoint cannot be read.
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
                "resume the run with --resume, or choose another folder"
            )

    @property
    def resumed_from(self) -> Path | None:
        """The path of the checkpoint that the run resumes from."""
        return self._newest.path if self._newest else None

    def identify(self, data: str) -> None:
        """Sets the identity of the run's data, and compares it and the settings with the checkpoint to resume from.

        Args:
            data: A text that identifies the data.

        Raises:
            DataError: The checkpoint belongs to a run with other data or settings.
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
                raise DataError(f"{path} belongs to a run with {'; '.join(others)}")

    def restore(self, model: DistributedModelParallel, optimizer: CombinedOptimizer) -> Training:
        """Loads the checkpoint to resume from into a new model and its optimizer, and returns the training.

        Raises:
            DataError: The checkpoint is damaged.
        """
        if not (self._folder and self._newest):
            return Training(model, optimizer, Progress())
        # A keyed optimizer copies a loaded state into its existing state, and a new optimizer has no state.
        # init_state creates the state with an optimizer step, which the load undoes.
        dense_part(optimizer).init_state()
        state = self._folder.load(model, self._newest.path)
        dense_part(optimizer).load_state_dict(state["dense_optimizer"])
        progress = Progress.from_state(state["progress"])
        self._saved_step = progress.step
        return Training(model, optimizer, progress)

    def save_if_due(self, training: Training) -> None:
        """Saves a checkpoint after every ``checkpoint_every`` steps.

        Raises:
            DataError: The checkpoint cannot be written.
        """
        every = self._settings.checkpoint_every
        if every and training.progress.step % every == 0:
            self.save(training)

    def save(self, training: Training) -> None:
        """Saves a checkpoint if there is no checkpoint of this step yet.

        Raises:
            DataError: The checkpoint cannot be written.
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
