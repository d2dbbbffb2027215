"""Writes the curves of a run as TensorBoard event files, and reads them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


OVERVIEW = (
    "loss/training",
    "loss/validation",
    "loss/test",
    "AUC/training",
    "AUC/validation",
    "AUC/test",
    "speed/samples_per_second",
    "memory/processes",
    "rows/all",
    "hit_rate/all",
)
"""The curves that matter first. TensorBoard shows them below its first heading."""

_TABLES = ("rows", "bytes", "hit_rate", "unseen_share", "insert_rate", "eviction_rate")


def tensorboard_tag(name: str) -> str:
    """Returns the tag of a curve.

    TensorBoard shows tags with the same first part below one heading, in ASCII order.
    """
    if name in OVERVIEW:
        return f"Overview/{name}"
    kind, _, table = name.partition("/")
    if kind in _TABLES:
        return f"tables/{table}/{kind}"
    return f"Steps/{name}"


def curve_name(tag: str) -> str:
    """Returns the name of the curve that has a tag.

    It is the inverse of :func:`tensorboard_tag`.
    """
    heading, _, name = tag.partition("/")
    if heading == "tables":
        table, _, kind = name.rpartition("/")
        return f"{kind}/{table}"
    return name


class Curve(NamedTuple):
    """The values of one number during a run.

    Attributes:
        samples: The numbers of training samples at the points, ascending.
        values: The values at the points, in float32 precision.
    """

    samples: list[int]
    values: list[float]


def has_curves(folder: Path) -> bool:
    """Returns whether a folder contains the curves of a run."""
    return any(folder.glob("*tfevents*"))


def read_curves(folder: Path) -> dict[str, Curve]:
    """Reads all curves of a folder.

    Files of a run that was killed are read up to the last complete record.

    If a resumed run has written points again, the older points are ignored, as in
    TensorBoard. A curve of more than 10,000 points is reduced to a random sample of
    10,000 points.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    curves = {}
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        curves[curve_name(tag)] = Curve(
            samples=[point.step for point in points],
            values=[point.value for point in points],
        )
    return curves


class CurveWriter:
    """Adds points to the curves in a folder.

    After a failed write it prints one warning and writes no more points.

    Args:
        folder: The folder, which must exist.
        samples: The number of training samples at which the run begins. Later points,
            which a killed run has written, are discarded.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        older_curves = read_curves(folder) if has_curves(folder) else {}
        self._samples = samples
        # The validation of an epoch may have been written after the checkpoint of the
        # epoch's last step. Such points are not written again.
        self._has_first_point = {
            name for name, curve in older_curves.items() if samples in curve.samples
        }
        purge = samples + 1 if older_curves else None
        self._writer: SummaryWriter | None = SummaryWriter(
            str(folder), purge_step=purge
        )  # type: ignore[no-untyped-call]

    def add(self, values: Mapping[str, float], samples: int) -> None:
        """Adds a point to each of the named curves and writes the points to the disk."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = []
        for name, value in values.items():
            if samples > self._samples or name not in self._has_first_point:
                tag = tensorboard_tag(name)
                points.append(Summary.Value(tag=tag, simple_value=value))
        summary = Summary(value=points)

        def write(writer: SummaryWriter) -> None:
            # All values are one record, so that a killed run leaves either all or none
            # of them. Calls of add_scalar would take twice as long as the other work
            # for a point.
            writer.file_writer.add_summary(summary, samples)
            # The points must be on the disk before the next checkpoint, from which a
            # run may be resumed.
            writer.flush()

        self._unless_failed(write)

    def close(self) -> None:
        """Closes the file."""
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
    """Hides the traceback of TensorBoard's writing thread.

    The next call of the writer raises the same error.
    """
    previous_hook = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            previous_hook(failure)

    threading.excepthook = hook
