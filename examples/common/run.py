"""A run of an example: its folder, checkpoints, curves and report.

The training loop calls each of them in a line:

    with process_group(), Run("dlrm", settings) as run:
        # {} if the run starts from the beginning
        state = run.resume(model, optimizer, {"--data": "train.txt"})
        step = state.get("step", 0)
        run.watch(model, {"dense": optimizer}, total_steps=1000, step=step)
        for batch in run.timed(batches):
            ...
            # adds a point to each curve every few steps
            run.step(len(labels), loss, logits, labels)
            run.save(model, optimizer, step, {"step": step})
        run.log({"AUC/test": auc})
        # prints the tables, and writes report.html and the result as JSON
        run.finish({"test_auc": auc})
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.filesize import decimal
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoints import CheckpointFolder
from common.command import DataError
from common.curves import CurveWriter, has_curves
from common.measure import StepSplit, Window, table_points
from common.page import RUN_FILE, read_about, write_report
from common.processes import on_each_rank, on_rank_0
from common.report import (
    check_file,
    console_for,
    finite,
    print_result,
    result_of,
    write_json,
    write_whole,
)
from common.settings import RunSettings
from torchrec_recstore import CheckpointInfo, TableStats, table_stats
from torchrec_recstore.checkpoint.files import FileLock, make_directory

T = TypeVar("T")

INSTEAD = "(choose another folder with --log-dir, or write no log with --no-log)"
POINTS = 100
"""The largest number of points of each curve of a short run."""
MAX_STEPS_OF_POINT = 50
"""The largest number of steps of a point: a long run has more than ``POINTS`` points."""
PACKAGES = (
    "torchrec-recstore",
    "torch",
    "torchrec",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "numpy",
    "tensorboard",
    "matplotlib",
)


class Run:
    """The folder, checkpoints, curves and report of a run.

    Every method is collective; rank 0 writes.

    Args:
        example: The name of the example.
        settings: The settings of the run. Those of ``RunSettings`` say what is written,
            and where.

    Attributes:
        folder: The folder of curves and report, which this run alone uses. None: the
            run writes neither.
        resumed_from: The checkpoint that the run resumes from. None: the run starts
            from the beginning.

    Raises:
        DataError: By the ``with`` statement, on every rank: a setting contradicts
            another one, a folder or the file of the result cannot be written or another
            run uses it, or a folder contains another run.
    """

    def __init__(self, example: str, settings: RunSettings) -> None:
        self.example = example
        self.settings = settings
        self.folder: Path | None = None
        self.resumed_from: Path | None = None
        self._stack = ExitStack()
        self._checkpoints: CheckpointFolder | None = None
        self._newest: CheckpointInfo | None = None
        self._identity: dict[str, Any] = {}
        self._saved_step = 0
        self._about: dict[str, Any] = {}
        self._writer: CurveWriter | None = None
        self._step = 0
        self._first_step = 0
        self._samples = 0
        self._stats: Callable[[], Mapping[str, TableStats]] = dict

    def __enter__(self) -> Run:
        settings = self.settings
        settings.check()
        with ExitStack() as stack:
            on_rank_0(partial(check_file, settings.json_out))
            if settings.checkpoint is not None:
                stack.enter_context(sole_use(settings.checkpoint))
                self._checkpoints = CheckpointFolder(settings.checkpoint, settings.keep)
                self._checkpoints.sweep()
                newest = self._checkpoints.newest()
                if newest and not settings.resume:
                    raise DataError(
                        f"{settings.checkpoint} has checkpoints already, up to"
                        f" {newest.path.name}: resume the run with --resume, or choose"
                        " another folder"
                    )
                if newest:
                    self._newest = newest
                    self.resumed_from = newest.path
            if not settings.no_log:
                self.folder = on_rank_0(partial(self._log_folder, stack))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _log_folder(self, stack: ExitStack) -> Path:
        settings = self.settings
        try:
            # a missing package is reported now, and not after the training
            import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise DataError(
                "curves and the report need tensorboard, which cannot be imported:"
                f" {error}. Install it with `pip install tensorboard`, or train with"
                " --no-log"
            ) from error
        # A resumed run must find the log again, so its folder is below the folder of
        # checkpoints.
        fixed = settings.checkpoint / "log" if settings.checkpoint else None
        folder = settings.log_dir or fixed or _new_folder(self.example)
        try:
            stack.enter_context(locked_folder(folder))
        except DataError as error:
            raise DataError(f"{error} {INSTEAD}") from error
        # After a restart by torchrun, or in a fixed folder, the curves belong to this
        # run, also without --resume: the run then has no checkpoint yet and begins
        # again.
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if has_curves(folder) and not (settings.resume or restarted or folder == fixed):
            raise DataError(
                f"{folder} contains the curves of another run: choose another --log-dir"
            )
        return folder

    def resume(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Loads the newest checkpoint, if there is one, into the model and the
        optimizer of its dense part.

        Args:
            model: The model, wrapped in ``DistributedModelParallel``.
            optimizer: The new optimizer of the dense part. Its state is equal on all
                ranks.
            data: Values that must be the same when the run is resumed, besides
                ``settings.must_match()``, by flag.

        Returns:
            The state that was given to :meth:`save`, or {} if the run starts from the
            beginning.

        Raises:
            DataError: The checkpoint is damaged, or belongs to a run with other data or
                settings.
        """
        self._identity = {**(data or {}), **self.settings.must_match()}
        path = self.resumed_from
        if self._checkpoints is None or path is None:
            return {}
        training_state = None if self._newest is None else self._newest.training_state
        saved_identity = (training_state or {}).get("identity")
        if not isinstance(saved_identity, dict):
            raise DataError(f"{path} was not written by this command")
        differences = []
        for flag, value in self._identity.items():
            saved_value = saved_identity.get(flag)
            if saved_value != value:
                differences.append(f"{flag} {saved_value}, not {value}")
        if differences:
            raise DataError(f"{path} belongs to a run with {'; '.join(differences)}")
        if hasattr(optimizer, "init_state"):
            # A keyed optimizer copies a loaded state into its existing state, and a new
            # optimizer has no state. init_state creates the state with an optimizer
            # step, which the load undoes.
            optimizer.init_state()
        state = self._checkpoints.load(model, path)
        if optimizer is not None:
            optimizer.load_state_dict(state["dense_optimizer"])
        self._saved_step = state["step"]
        return state["progress"]  # type: ignore[no-any-return]

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        step: int,
        state: Mapping[str, Any],
    ) -> None:
        """Saves a checkpoint, unless the run has one of this step.

        A run without a folder for checkpoints saves none.

        Args:
            model: See :meth:`resume`.
            optimizer: See :meth:`resume`.
            step: The number of steps that the run has made. It names the checkpoint.
            state: What the run needs besides to be resumed. It must be the same on
                every rank.

        Raises:
            DataError: The checkpoint cannot be written.
        """
        if self._checkpoints is None or step <= self._saved_step:
            return
        self._point()  # so that a resumed run has the same points
        dense = None if optimizer is None else optimizer.state_dict()
        training_state = {
            "identity": self._identity,
            "step": step,
            "progress": dict(state),
            "dense_optimizer": dense,
        }
        self._checkpoints.save(model, step, training_state)
        self._saved_step = step

    def watch(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        *,
        total_steps: int,
        step: int = 0,
        samples: int = 0,
        about: Mapping[str, Any] | None = None,
        stats: Callable[[], Mapping[str, TableStats]] | None = None,
    ) -> None:
        """Begins the curves of a model.

        Args:
            model: The sharded model.
            optimizers: The optimizers whose learning rates become curves, by name.
            total_steps: The number of steps of the whole run. It determines how often a
                point is written.
            step: The number of steps that the run has already made. Default: 0.
            samples: The number of training samples of these steps, over all ranks.
                Default: 0.
            about: More values for the report, beside the settings.
            stats: A function that returns the statistics of the tables. Collective.
                Default: ``table_stats``.

        Raises:
            DataError: The folder cannot be written.
        """
        self._about = {
            **self.settings.shown(),
            **(about or {}),
            "world_size": dist.get_world_size(),
        }
        self._step = step
        self._first_step = step
        self._samples = samples
        self._stats = stats or partial(table_stats, model)
        if self.folder is None:
            return
        steps_of_point = math.ceil(total_steps / POINTS)
        self._steps_of_point = self.settings.log_every or min(
            max(steps_of_point, 1), MAX_STEPS_OF_POINT
        )
        self._optimizers = dict(optimizers)
        self._split = StepSplit(model)
        self._window = Window()
        self._tables = self._stats()
        on_rank_0(partial(self._begin, self.folder))

    def _begin(self, folder: Path) -> None:
        """Describes the run in its folder, and opens the curves."""
        earlier_starts = read_about(folder).get("started") or []
        start = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
        about = {
            "example": self.example,
            "started": [*earlier_starts, start],
            "settings": self._about,
            "ranks": dist.get_world_size(),
            "versions": _versions(),
            "machine": _machine(),
            "result": None,
        }
        try:
            _describe(folder, about)
            self._writer = CurveWriter(folder, self._samples)
        except OSError as error:
            raise DataError(
                f"{folder}: {error.strerror} (--no-log writes no log)"
            ) from error

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches, and measures how long each of them is waited for."""
        iterator = iter(batches)
        while True:
            if self.folder is not None:
                self._split.wants_batch()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if self.folder is not None:
                self._split.has_batch()
            yield batch

    def step(
        self,
        samples: int,
        loss: Tensor,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Records that a training step has ended.

        Every few steps it adds a point to each curve.

        Args:
            samples: The number of samples of the step, over all ranks.
            loss: (). The mean loss of this rank.
            logits: (B,). The logits for the AUC, with the same B on every rank. None:
                no AUC is computed.
            labels: (B,). The labels, 0 or 1.
        """
        self._step += 1
        self._samples += samples
        if self.folder is not None:
            self._split.step_ends()
            self._window.add(samples, loss, logits, labels)
            if self._step % self._steps_of_point == 0:
                self._point()

    def log(self, values: Mapping[str, float | None]) -> None:
        """Adds a point to the named curves.

        Values that are None or not finite are ignored.
        """
        self._point()
        self._write(values)

    def _point(self) -> None:
        """Adds a point to each curve if there was a step since the previous point."""
        if self.folder is None or not self._window.steps:
            return
        window = self._window
        self._window = Window()
        earlier_tables = self._tables
        self._tables = self._stats()
        points = window.values(self._split.take())
        for name, optimizer in self._optimizers.items():
            # A rank without tables has no rate of the embeddings.
            if optimizer.param_groups:
                rate = float(optimizer.param_groups[0]["lr"])
                points[f"learning_rate/{name}"] = rate
        points |= table_points(earlier_tables, self._tables)
        self._write(points)

    def _write(self, values: Mapping[str, float | None]) -> None:
        if self._writer is not None:
            points = {
                tag: value
                for tag, value in values.items()
                if value is not None and math.isfinite(value)
            }
            self._writer.add(points, self._samples)

    def finish(
        self,
        result: Mapping[str, Any],
        lines: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Ends the run.

        It writes the report, prints the tables and the result, and writes the result as
        JSON.

        Args:
            result: The result of the run.
            lines: What is printed below the tables. Default: nothing.

        Returns:
            The settings and the result of the run, with the rows, bytes and counts of
            the tables.

        Raises:
            DataError: The JSON file cannot be written.
        """
        self._point()
        result = {**result, **result_of(self._stats(), self._first_step)}
        if self._writer is not None and self.folder is not None:
            self._writer.close()
            self._writer = None
            try:
                _describe(self.folder, read_about(self.folder) | {"result": result})
            except OSError as error:
                print(
                    f"warning: the result is not in the log: {error}",
                    file=sys.stderr,
                )
        log_dir = str(self.folder) if self.folder else None
        settings_and_result = {**self._about, "log_dir": log_dir, **result}
        json_out = self.settings.json_out
        if dist.get_rank() == 0:
            print_result(
                console_for(json_out),
                settings_and_result,
                lines or {},
            )
            self._write_report()
        on_rank_0(partial(write_json, json_out, settings_and_result))
        return settings_and_result

    def _write_report(self) -> None:
        if self.folder is None:
            return
        try:
            print(f"report: {write_report(self.folder)}", file=sys.stderr)
        except Exception as error:
            # No error of the report may lose the result of the run.
            print(f"warning: no report was made: {error}", file=sys.stderr)


def _describe(folder: Path, about: Mapping[str, Any]) -> None:
    text = json.dumps(finite(about), indent=2, default=str) + "\n"
    write_whole(folder / RUN_FILE, text.encode())


def say(line: str) -> None:
    """Prints a line on stderr, on rank 0."""
    if dist.get_rank() == 0:
        print(line, file=sys.stderr)


def sole_use(path: Path) -> ExitStack:
    """Creates a folder if it does not exist, and locks it for this run.

    The folder is locked until the returned stack is closed. Collective.

    Args:
        path: The path of the folder, on a file system that all ranks share.

    Raises:
        DataError: The folder cannot be created or written, another run uses it, or a
            rank does not see it.
    """
    with ExitStack() as locks:
        on_rank_0(lambda: locks.enter_context(locked_folder(path)) and None)

        def see() -> None:
            if not path.is_dir():
                raise DataError(
                    f"{path}: rank {dist.get_rank()} does not see this folder, which"
                    " all ranks must share"
                )

        on_each_rank(see)
        return locks.pop_all()


def locked_folder(path: Path) -> FileLock:
    """Creates a folder if it does not exist, and locks it.

    The folder is locked until the lock is closed or the process ends.

    Raises:
        DataError: The folder cannot be created or written, or another run uses it.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: this is not a folder")
    try:
        make_directory(path)
        # If torchrun is killed, its processes continue to train. The lock keeps a
        # second run from writing to the folder at the same time.
        return FileLock(
            path / ".lock",
            "writing there",
            lambda holder: f"{path}: another run is writing there: {holder}",
        )
    except BlockingIOError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _new_folder(example: str) -> Path:
    while True:
        folder = Path("runs", f"{example}-{datetime.now():%Y%m%d-%H%M%S}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            time.sleep(0.1)  # another run began in the same second
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror} {INSTEAD}") from error


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _machine() -> dict[str, str]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads of torch": str(torch.get_num_threads()),
        "memory": decimal(memory_bytes),
        "system": platform.platform(),
        "host": platform.node(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
