"""A run's curves as TensorBoard's event files: written while it trains, and read back for the report."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENT_FILES = "*tfevents*"


class Curve(NamedTuple):
    """One number over the run.

    Attributes:
        samples: training samples seen, ascending.
        values: as float32.
    """

    samples: list[int]
    values: list[float]


def read_curves(folder: Path) -> dict[str, Curve]:
    """Reads every curve of a folder; of a run that was killed, up to the last whole record of each file.

    Points that a resumed run has taken again are left out, as TensorBoard does; of a curve of more than 10,000 points,
    10,000 are drawn.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: Curve([p.step for p in curve], [p.value for p in curve]) for tag, curve in points.items()}


def has_curves(folder: Path) -> bool:
    """Whether a run has written there."""
    return any(folder.glob(EVENT_FILES))


class CurveWriter:
    """Adds points to the curves of a folder. What a disk refuses is said once, and no more is written then.

    Args:
        folder: which is there.
        samples: training samples behind the run; points beyond, of a run that was killed, no longer count.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        before = read_curves(folder) if has_curves(folder) else {}
        # An epoch's validation may come after the checkpoint of its last step: what is there is not written again.
        self._samples = samples
        self._there = {tag for tag, curve in before.items() if samples in curve.samples}
        purge = samples + 1 if before else None
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=purge)  # type: ignore[no-untyped-call]

    def add(self, values: Mapping[str, float], samples: int) -> None:
        """Adds a point to each of some curves, on disk when this returns."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        new = {tag: value for tag, value in values.items() if samples > self._samples or tag not in self._there}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in new.items()])

        def write(writer: SummaryWriter) -> None:
            # As one record, which a killed run has as a whole or not at all; a call of add_scalar each takes twice as
            # long as all the rest of a point.
            writer.file_writer.add_summary(summary, samples)
            # A run that goes on from a checkpoint finds all points before it.
            writer.flush()

        self._unless_failed(write)

    def close(self) -> None:
        """Ends the writing."""
        self._unless_failed(lambda writer: writer.close())
        self._writer = None

    def _unless_failed(self, work: Callable[[SummaryWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            work(self._writer)
        except OSError as error:
            self._writer = None
            print(f"warning: no more curves are written: {error}", file=sys.stderr)


def _silence_writer_threads() -> None:
    """Keeps a traceback of TensorBoard's writing thread off the terminal: its error is raised by the next call too."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            before(failure)

    threading.excepthook = hook
