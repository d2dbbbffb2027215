"""Publishes a model while it is trained: full exports, and deltas of them."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from torchrec_recstore.checkpoint.background import is_saving
from torchrec_recstore.checkpoint.writer import lower_priority
from torchrec_recstore.sharders.agreed_clock import Pace
from torchrec_recstore.sharders.gather import (
    all_gathered,
    picklable,
    refused_together,
    whole_environment,
)
from torchrec_recstore.store import Table
from torchrec_recstore.utils import warn_user
from torchrec_recstore_serving.export.changed_rows import ChangedRows, remember
from torchrec_recstore_serving.export.delta import (
    DeltaInfo,
    check_attributes,
    checked_delta,
    write_delta,
)
from torchrec_recstore_serving.export.from_model import read_changes, read_model
from torchrec_recstore_serving.export.hashed_tables import check_index
from torchrec_recstore_serving.export.opening import is_hashed
from torchrec_recstore_serving.export.scriptable_modules import scriptable
from torchrec_recstore_serving.export.signing import Key, key_at
from torchrec_recstore_serving.export.verification import compile_checksums
from torchrec_recstore_serving.publish.destinations import publications_at
from torchrec_recstore_serving.publish.full_export import write_full
from torchrec_recstore_serving.publish.program import Program
from torchrec_recstore_serving.publish.publications import Latest, Publication

_PAUSE_S = 0.01
_EXCHANGES = 32  # the largest number of exchanges between ranks within every_s
# the time between two exchanges while a publication is due and has to wait
_LONGEST_WAIT_S = 1.0


class DeltaPublisher:
    """Publishes a model while it is trained; also a context manager.

    :func:`torchrec_recstore.inference.follow` follows it.

    The first :meth:`step` publishes a full export of the model. Later steps publish the
    changes since the publication before, if ``every_s`` has passed since then. The
    model is read in :meth:`step`, and a thread writes what was read. Later steps read
    only the rows that have changed, if ``index`` is ``"hash"``, no rows are selected by
    frequency, and no table is sharded by column. Otherwise they read the whole model.
    The first step also compiles the model, and a later step does if the structure of
    the model has changed; docs/publishing.md says how long that takes. A publication
    that is due while this thread still writes, or while ``async_save`` writes a
    checkpoint, waits for a later step.

    Followers see a publication completely or not at all. Each publication has a number.
    A full export also has the changes since the publication before, so that a follower
    that is up to date need not load it. The place keeps the newest full export, the one
    before, and all deltas after the older one. After a restart, the publisher continues
    the numbers with a full export.

    If the model is sharded, every rank makes the publisher and makes the same calls,
    which are collective. The clock of rank 0 decides when a publication is due, and
    rank 0 writes it. Most steps exchange nothing: the ranks exchange the time about ten
    times between two publications, in steps that follow from the pace of the steps
    before. If the steps suddenly become slower, a publication may therefore be late.

    Args:
        model: The model; see :func:`torchrec_recstore.inference.export_for_inference`.
        destination: The path of a directory, which is created if it does not exist, or
            the URL of a stream on a Redis server: ``redis://host:port/db?stream=name``.
            Only one publisher writes to a destination.
        every_s: The minimum time between two publications, in seconds. Default: 5.
        full_every_s: The minimum time between two full exports, in seconds. Default:
            3600.
        dtype: The data type of the published rows. Default: ``torch.int8``.
        min_frequency: The minimum frequency of a published row. Default: 0.
        top_rows: The maximum number of published rows of each table. Default: None.
        index: How the published model searches ids, ``"hash"`` or ``"sorted"``; see
            ``export_for_inference``. Default: ``"hash"``.
        rows: Where a follower has the rows of a full export, ``"memory"``, ``"mapped"``
            or ``"servers"``; see ``export_for_inference``. Default: ``"memory"``.
        key: The file of a secret key of at least 32 characters, with which everything
            that is published is signed. Followers with the same key load nothing else.
            Rank 0 reads it. Default: None, no signature.

    Raises:
        TypeError, ValueError: An argument is invalid, or the destination holds
            something else. Or the Redis server would evict publications.
        BlockingIOError: Another process publishes to the destination.
        OSError: The destination cannot be written.
        ImportError: The package ``redis`` is missing, or ``index`` is ``"hash"`` and
            the native library cannot be loaded. All of these errors are raised on every
            rank.

    Warns:
        RecStoreWarning: There is no ``key``, and other users can write the destination.
    """

    def __init__(
        self,
        model: nn.Module,
        destination: str | Path,
        *,
        every_s: float = 5.0,
        full_every_s: float = 3600.0,
        dtype: torch.dtype = torch.int8,
        min_frequency: int = 0,
        top_rows: int | None = None,
        index: str = "hash",
        rows: str = "memory",
        key: str | Path | None = None,
    ) -> None:
        for name, value in (("every_s", every_s), ("full_every_s", full_every_s)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number of seconds, got {value!r}")
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(
                    f"{name} must not be negative and must be finite, got {value}"
                )
        self._model = model
        self._every_s = every_s
        self._dtype = dtype
        self._min_frequency = min_frequency
        self._top_rows = top_rows
        self._rows = rows
        self._env = whole_environment()
        self._marks: dict[Table, int] = {}
        """The change marks of this rank's shards when they were read last."""
        self._writer: _Writer | None = None
        self._next = -math.inf  # by time.monotonic()
        self._pace = Pace()
        self._open = True
        with refused_together(self._env):
            check_index(index, rows)
            if self._env.rank == 0:
                self._writer = _Writer(
                    destination=destination,
                    full_every_s=full_every_s,
                    index=index,
                    rows=rows,
                    key=key_at(key),
                )

    def step(self) -> None:
        """Publishes the model if a publication is due.

        Call it after each training step. Collective.

        Raises:
            Exception: The errors of
                :func:`torchrec_recstore.inference.export_for_inference`, which are
                those of this step, and the error with which the last publication has
                failed. The next publication after the latter is a full export.
            ValueError: The publisher is closed.
        """
        if not self._open:
            raise ValueError("the publisher is closed")
        if self._env.world_size > 1 and not self._pace.begin_step():
            return
        # One exchange carries the errors and the clock of the first rank, and says
        # whether a rank writes a checkpoint.
        news_of_ranks = all_gathered(self._news(), self._env)
        for news in news_of_ranks:
            if news.error is not None:
                raise news.error
        first = news_of_ranks[0]
        a_rank_saves = any(news.saving for news in news_of_ranks)
        remaining_s = first.remaining_s
        if first.ready and remaining_s <= 0 and not a_rank_saves:
            self._publish()
            remaining_s = self._every_s
        # After half of the time, so that steps that become slower hardly delay the
        # publication.
        least_pause_s = min(self._every_s / _EXCHANGES, _LONGEST_WAIT_S)
        self._pace.plan(first.time_s, max(remaining_s / 2, least_pause_s))

    def _news(self) -> _News:
        """Returns what this rank tells the others in a step."""
        error: Exception | None = None
        time_s = time.monotonic()
        ready = False
        remaining_s = 0.0
        if self._writer is not None:
            try:
                self._writer.raise_error()
                ready = not self._writer.busy
                if not self._writer.needs_whole:
                    remaining_s = self._next - time_s
            except Exception as raised:
                error = picklable(raised)
        return _News(
            error=error,
            time_s=time_s,
            ready=ready,
            remaining_s=remaining_s,
            saving=is_saving(),
        )

    def close(self) -> None:
        """Publishes the model as it is now, and waits until the publication is
        complete.

        Collective.

        The call first waits for a checkpoint that ``async_save`` writes.

        Raises:
            Exception: See :meth:`step`. The destination has been released.
        """
        if not self._open:
            return
        while is_saving():  # A table has one snapshot at a time.
            time.sleep(_PAUSE_S)
        try:
            self._wait()
            self._publish()
            if self._wait():
                self._publish()
                self._wait()
        finally:
            self._release()

    def __enter__(self) -> DeltaPublisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # Another rank may have failed, so that no collective call can be made.
        self._release()
        error = None if self._writer is None else self._writer.error
        if error is not None:
            warn_user(
                f"the last publication has failed: {type(error).__name__}: {error}"
            )

    def _wait(self) -> bool:
        """Waits for the thread and raises its error.

        Returns whether the whole model has to be published.
        """
        needs_whole = False
        with refused_together(self._env):
            if self._writer is not None:
                self._writer.wait()
                self._writer.raise_error()
                needs_whole = self._writer.needs_whole
        return bool(all_gathered(needs_whole, self._env)[0])

    def _publish(self) -> None:
        """Reads the model, compiles it if that is necessary, and begins to write a
        publication.
        """
        self._next = time.monotonic() + self._every_s
        moment = time.time()
        marks: dict[Table, int] = {}
        reading = self._read_changes(marks)
        if reading is None:
            marks = {}
            reading = self._read_model(marks)
        if self._writer is not None:
            self._writer.begin(reading, moment)
        self._marks = marks

    def _read_model(self, marks: dict[Table, int]) -> _Reading:
        """Reads the whole model, and compiles it if its structure is new.

        Adds the mark of each shard to ``marks``.
        """
        exported = read_model(
            self._model,
            self._dtype,
            self._min_frequency,
            self._top_rows,
            self._env,
            marks,
            rows=self._rows,
        )
        with refused_together(self._env):
            reading = _Reading(exported)
            if self._writer is not None:
                reading = _Reading(scriptable(exported))
                # The writing thread cannot compile: that would change the state of the
                # whole process.
                self._writer.compile(reading.served)
        return reading

    def _read_changes(self, marks: dict[Table, int]) -> _Reading | None:
        """Reads what has changed since the last publication.

        Args:
            marks: The change mark of each shard that is read is added to it.

        Returns:
            The changes. None, on every rank, if they are not known, or if the structure
            of the model has changed.
        """
        version = None if self._writer is None else self._writer.chained_version()
        version = all_gathered(version, self._env)[0]
        if version is None or self._min_frequency or self._top_rows is not None:
            return None
        remember(self._marks, version)
        exported, changes = read_changes(
            self._model,
            self._dtype,
            version,
            self._env,
            marks,
            rows=self._rows,
        )
        if changes is None:
            return None
        is_base = False
        with refused_together(self._env):
            reading = _Reading(exported, changes)
            if self._writer is not None:
                reading = _Reading(scriptable(exported), changes)
                is_base = self._writer.compile(reading.served)
        return reading if all_gathered(is_base, self._env)[0] else None

    def _release(self) -> None:
        self._open = False
        if self._writer is not None:
            self._writer.close()


@dataclass(frozen=True)
class _News:
    """What a rank tells the others in a step. The first rank decides.

    Args:
        error: The error of the last publication.
        time_s: The time by ``time.monotonic()``.
        ready: Whether the writer can write a publication.
        remaining_s: The time in seconds until a publication is due, 0 or less if it is.
        saving: Whether the rank writes a checkpoint.
    """

    error: Exception | None
    time_s: float
    ready: bool
    remaining_s: float
    saving: bool


@dataclass(frozen=True)
class _Reading:
    """A model as it was at one moment.

    Args:
        served: The model in the form that is compiled, with tables that search sorted
            ids.
        changes: The rows that have changed since the last publication, if ``served``
            has no rows; see :func:`torchrec_recstore_serving.export.from_model.read_changes`.
            None: ``served`` has all rows.
    """

    served: nn.Module
    changes: Mapping[str, ChangedRows] | None = None


class _Writer:
    """The thread that writes publications, one at a time.

    The thread compiles nothing, makes no modules and changes no state of the process:
    :meth:`compile` is called in the thread that trains. docs/inside.md has the rules
    for threads.

    Args:
        destination: See :class:`DeltaPublisher`.
        full_every_s: See :class:`DeltaPublisher`.
        index: See :class:`DeltaPublisher`.
        rows: See :class:`DeltaPublisher`.
        key: The key that signs the publications, if there is one.
    """

    def __init__(
        self,
        destination: str | Path,
        full_every_s: float,
        index: str,
        rows: str,
        key: Key | None,
    ) -> None:
        self._program = Program(index)
        self._rows = rows
        self._key = key
        self._place = publications_at(destination, key)
        self._full_every_s = full_every_s
        self._run = secrets.token_hex(8)
        self._latest: Latest | None = None
        self._number = 0
        self._base: torch.jit.ScriptModule | None = None
        """The model as it was published last, which is that of the program.

        None: the next publication is a full export without a delta.
        """
        self.needs_whole = False
        """Whether nothing was written, because the whole model has to be read."""
        self._next_full = -math.inf  # by time.monotonic()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        """The error of the last publication, until it has been raised."""
        try:
            compile_checksums()
            self._latest = self._place.claim(self._run)
            danger = None if key is not None else self._place.writers().danger
            if danger is not None:
                warn_user(f"{danger}, or publish and follow with a key")
        except BaseException:
            self._place.close()
            raise
        if self._latest is not None:
            self._number = self._latest.number

    @property
    def busy(self) -> bool:
        """Whether a publication is being written."""
        return self._thread is not None and self._thread.is_alive()

    def chained_version(self) -> str | None:
        """Returns the version of the last publication.

        None: a delta of the changed rows only cannot be made of it.
        """
        if self._base is None or not is_hashed(self._base):
            return None
        return str(self._base.recstore_version())

    def compile(self, served: nn.Module) -> bool:
        """Compiles a model if its structure is not that of the compiled one.

        The writer must not be busy.

        Returns:
            Whether a delta of the model that was published last can lead to this model.

        Raises:
            ValueError: The model cannot be compiled. The model that was published last
                is as it was.
        """
        if self._program.fits(served):
            return self._base is not None
        reason = "the modules of the model have changed"
        if self._base is not None:
            try:
                check_attributes(served, self._base)
            except ValueError as error:
                reason = str(error)
        if not self._program.compile(served):
            return self._base is not None
        if self._base is not None:
            warn_user(f"a full export is published without a delta: {reason}")
            self._base = None
        return False

    def begin(self, reading: _Reading, moment: float) -> None:
        """Begins to write a publication. The writer must not be busy."""
        self.needs_whole = False
        # The interpreter waits for threads that are no daemons before it ends. A daemon
        # that runs torch meanwhile would abort the process.
        self._thread = threading.Thread(
            target=self._run_once,
            args=(reading, moment),
            name="publisher",
            daemon=False,
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until the publication is written."""
        if self._thread is not None:
            self._thread.join()

    def raise_error(self) -> None:
        """Raises the error of the last publication, once.

        If another publisher has taken over, always.
        """
        error = self.error
        if not isinstance(error, BlockingIOError):
            self.error = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits for the publication and releases the destination."""
        self.wait()
        self._place.close()

    def _run_once(self, reading: _Reading, moment: float) -> None:
        try:
            lower_priority()  # Training continues meanwhile.
            if self._base is None:
                self._resume()
            self._write(reading, moment)
        except BaseException as error:  # The next step raises it.
            self._base = None  # It is not known whether the publication is there.
            self.error = error

    def _resume(self) -> None:
        """Continues after the newest publication of the destination."""
        self._latest = self._place.latest()
        if self._latest is not None:
            self._number = max(self._number, self._latest.number)

    def _write(self, reading: _Reading, moment: float) -> None:
        """Writes a publication of a model as it was at a moment."""
        info = None if self._base is None else self._delta(reading)
        if info is None and reading.changes is not None:
            self._base = None
            self.needs_whole = True
            return
        if info is None:
            self._base = self._program.load(reading.served)
        assert self._base is not None
        full = info is None or time.monotonic() >= self._next_full
        if info is not None and info.base == info.version and not full:
            info.path.unlink()
            is_published = self._confirm(moment)
        else:
            if info is not None:
                delta = checked_delta(info.path, str(info.path), self._key)
                self._base.apply_delta(delta)
            is_published = self._append(info, full, moment)
        if is_published:
            return
        warn_user(f"{self._place} has lost publications: a full export is published")
        self._resume()
        if not self._append(None, True, moment):
            raise OSError(
                f"{self._place} loses its publications while they are written"
            )

    def _confirm(self, moment: float) -> bool:
        """Publishes that the model has not changed up to a moment.

        Returns False if the place has lost the newest publication.
        """
        assert self._latest is not None
        latest = replace(self._latest, time=moment)
        if not self._place.confirm(latest):
            return False
        self._latest = latest
        return True

    def _delta(self, reading: _Reading) -> DeltaInfo | None:
        """Writes the changes since the last publication.

        None: they cannot be expressed by a delta.
        """
        assert self._base is not None
        path = self._place.path_of(self._number + 1, "delta")
        try:
            return write_delta(
                reading.served,
                self._base,
                path,
                changes=reading.changes,
                key=self._key,
            )
        except ValueError as error:
            warn_user(f"a full export is published without a delta: {error}")
            return None

    def _append(self, info: DeltaInfo | None, full: bool, moment: float) -> bool:
        """Publishes a full export, a delta or both.

        Returns False if the place has lost the publication before.
        """
        assert self._base is not None
        number = self._number + 1
        if full:
            write_full(
                self._base,
                self._program.dense,
                program=self._place.path_of(number, "program"),
                full=self._place.path_of(number, "full"),
                key=self._key,
                mapped=self._program.mapped_tables(self._rows),
            )
        publication = Publication(
            number=number,
            version=self._base.recstore_version(),
            base=None if info is None else info.base,
            time=moment,
            full=full,
            run=self._run,
        )
        latest = self._place.append(publication, self._latest)
        if latest is None:
            return False
        self._latest = latest
        self._number = number
        if full:
            self._next_full = time.monotonic() + self._full_every_s
        return True
