"""Follows a published model.

A follower loads the newest full export, applies the deltas after it, and goes on.

Tests: tests/serving/publish/test_publisher.py.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

import torch
from safetensors import SafetensorError
from torch import Tensor

from torchrec_recstore.utils import warn_user
from torchrec_recstore_serving.export.delta import checked_delta
from torchrec_recstore_serving.export.opening import load_libraries, private_copy
from torchrec_recstore_serving.export.signing import key_at
from torchrec_recstore_serving.export.verification import check_file, compile_checksums
from torchrec_recstore_serving.publish.bad_reads import BadReads, last_line
from torchrec_recstore_serving.publish.destinations import publications_at
from torchrec_recstore_serving.publish.follower_state import FollowerState
from torchrec_recstore_serving.publish.full_export import load_full
from torchrec_recstore_serving.publish.publications import (
    FULL,
    Kind,
    Latest,
    Publication,
)
from torchrec_recstore_serving.retrieval.retrieval import Retrieval, as_sequence

# The errors of a file that is gone, not whole, damaged or of another model, and of a
# machine without memory.
_BAD = (
    OSError,
    MemoryError,
    ValueError,
    RuntimeError,
    SafetensorError,
    torch.jit.Error,
)
# The longest time to wait for the end of a thread that only reads the source.
_END_S = 1.0


def _check_pinned(pinned: int | None) -> None:
    if pinned is not None and pinned < 1:
        raise ValueError(
            f"pinned must be the number of a publication, from 1, got {pinned}"
        )


def _prepare_process() -> None:
    """Does once what a thread must not do, because it changes the state of the process:
    registering operators and compiling.
    """
    load_libraries()
    compile_checksums()


class Follower:
    """A served model that follows a :class:`DeltaPublisher`.

    It is also a context manager, which closes it.

    Any number of threads may call :attr:`model`. A call sees one version of the rows
    from its beginning to its end. Get :attr:`model` anew for each call: a publication
    may replace the model.

    If a publication is missing, damaged, or does not apply to the version before, the
    follower warns with the cause and serves the rows that it has. It reads the file
    again after pauses that grow up to a minute, or continues with the next full export.
    A file whose checksum was wrong in eight reads in a row, each time with the same
    bytes, is not read again. If the place has lost the publication that is served, and
    has publications of another publisher in its stead, the follower loads the newest
    full export at once.

    Args:
        source: The destination of the publisher: the path of a directory, or
            ``redis://host:port/db?stream=name``.
        key: The file of the publisher's key. Nothing is loaded that is not signed with
            it. Default: None, everyone who may write to the source is trusted.
        retrieval: The index of a table, or several, which the follower brings to each
            publication before it serves the publication. Default: none.
        pinned: The number of the only publication that is served, for example to go
            back to an earlier one: the newest full export up to it, and the deltas up
            to it. No other publication is served before or after it. Default: None, the
            newest publication is served.

    Raises:
        TypeError, ValueError: ``source`` is neither of them; ``key`` is short, or other
            users can read it; there is no ``key``, and everyone can write to the
            source; or ``pinned`` is no number of a publication.
        OSError: The key cannot be read.
        ImportError: The package ``redis`` is missing.

    Warns:
        RecStoreWarning: There is no ``key``, and other users can write to the source.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        key: str | Path | None = None,
        retrieval: Retrieval | Sequence[Retrieval] = (),
        pinned: int | None = None,
    ) -> None:
        _check_pinned(pinned)
        _prepare_process()
        self._pinned = pinned
        self._indexes = as_sequence(retrieval)
        self._key = key_at(key)
        self._source = publications_at(source, self._key)
        self._served: tuple[torch.jit.ScriptModule, Publication] | None = None
        self._reached: tuple[torch.jit.ScriptModule, Publication] | None = None
        """The newest model that has been made: not served on the way to the pinned
        publication.
        """
        self._latest: Latest | None = None
        self._seen_s = 0.0
        """The time by ``time.monotonic()`` at which the follower has first seen the
        newest publication.
        """
        self._fresh = (-math.inf, -math.inf)
        """The moment up to which the rows are right, by the publisher's clock, and when
        the follower has seen it.
        """
        self._bad_reads = BadReads()
        """The files that cannot be used, by the run and the number of the publication,
        and the kind of file.
        """
        self._failed: tuple[str, int, Kind] | None = None
        """The file for which the last poll ended."""
        self._problem: str | None = None
        self._warned_problems: set[str] = set()
        """The problems that were warned about since the follower was up to date."""
        self._warned_dangers: set[str] = set()
        self._fulls = 0
        self._deltas = 0
        self._history_changes = 0
        self._polling = threading.Lock()
        self._stop = threading.Event()
        self._loading = False
        self._thread: threading.Thread | None = None
        try:
            self._check_writers()
        except ValueError:
            self._source.close()
            raise

    @property
    def trusts(self) -> str:
        """Whose models are loaded. A model that is loaded runs code of its file."""
        if self._key is not None:
            return f"everyone who has the key {self._key.path}"
        return f"{self._source.writers().trusted}, because there is no key"

    def _check_writers(self) -> None:
        writers = self._source.writers()
        if self._key is not None or writers.danger is None:
            return
        if writers.anyone:
            raise ValueError(
                f"{writers.danger}, or publish and follow with a key: a model that is"
                " loaded runs code"
            )
        if writers.danger not in self._warned_dangers:
            self._warned_dangers.add(writers.danger)
            warn_user(f"{writers.danger}, or publish and follow with a key")

    @property
    def model(self) -> torch.jit.ScriptModule:
        """The served model with the newest rows, as ``torch.jit.load`` returns it.

        Raises:
            RuntimeError: No full export has been loaded yet.
        """
        return self.served[0]

    @property
    def served(self) -> tuple[torch.jit.ScriptModule, Publication]:
        """The served model, and the publication whose rows it has.

        Raises:
            RuntimeError: No full export has been loaded yet.
        """
        if self._served is None:
            raise RuntimeError(f"{self._source}: no full export has been loaded yet")
        return self._served

    @property
    def _current(self) -> Publication | None:
        return None if self._reached is None else self._reached[1]

    @property
    def _number(self) -> int:
        return 0 if self._served is None else self._served[1].number

    @property
    def _newest(self) -> int:
        return 0 if self._latest is None else self._latest.number

    @property
    def version(self) -> str | None:
        """The version of the served rows, ``recstore_version``.

        None: no full export has been loaded yet.
        """
        return None if self._served is None else self._served[1].version

    @property
    def seconds_behind(self) -> float:
        """The age of the served rows in seconds; see :class:`FollowerState`."""
        return max(self._ages())

    def _ages(self) -> tuple[float, float]:
        """Returns the two ages of the rows in seconds.

        The first is by the publisher's clock, the second since the arrival of the news.
        """
        moment, arrival = self._fresh
        return max(0.0, time.time() - moment), time.monotonic() - arrival

    @property
    def versions_behind(self) -> int:
        """The number of publications that are not applied yet."""
        return max(0, self._newest - self._number)

    @property
    def state(self) -> FollowerState:
        """The state of the follower."""
        publication_age_s, arrival_age_s = self._ages()
        return FollowerState(
            source=str(self._source),
            version=self.version,
            number=self._number,
            newest=self._newest,
            versions_behind=self.versions_behind,
            seconds_behind=max(publication_age_s, arrival_age_s),
            publication_age_s=publication_age_s,
            arrival_age_s=arrival_age_s,
            fulls_loaded=self._fulls,
            deltas_applied=self._deltas,
            history_changes=self._history_changes,
            problem=self._problem,
            waits_for=self._waits_for(),
            pinned=self._pinned,
        )

    def _waits_for(self) -> str:
        """Returns what the follower loads or applies next, for :attr:`state`."""
        # other threads may change them meanwhile
        current = self._current
        failed = self._failed
        latest = self._latest
        if failed is not None and not self._bad_reads.is_final(failed):
            _, number, kind = failed
            file = "full export" if kind == "full" else kind
            return f"{file} {number}, {self._bad_reads.next_read(failed)}"
        if self._pinned is not None:
            return f"publication {self._pinned}" if self._served is None else "nothing"
        if current is None or failed is not None:
            return "a full export"
        newest = (
            current.number if latest is None else max(current.number, latest.number)
        )
        return f"publication {newest + 1}"

    def poll(self) -> bool:
        """Applies everything that has been published since the last call.

        Returns:
            Whether the served rows have changed.

        Raises:
            OSError, ValueError: The source cannot be read, or its newest publication is
                not signed with the key, or everyone can write to it. The model is as it
                was, and the call can be repeated. The errors of
                :meth:`Retrieval.update` are raised as they are.

        Warns:
            RecStoreWarning: A publication cannot be used. The message has the cause.
        """
        with self._polling:
            served_before = self._served
            poll_s = time.monotonic()
            latest = self._source.latest()
            if latest != self._latest:
                self._seen_s = poll_s
            self._latest = latest
            if latest is None:
                return False
            if not self._is_done(latest):
                self._failed = None
                self._check_writers()
                with tempfile.TemporaryDirectory(prefix="recstore-follow-") as folder:
                    self._catch_up(latest, Path(folder))
            if self._is_done(latest):
                self._problem = None
                self._failed = None
                self._warned_problems.clear()
                self._bad_reads.clear()
            if self._is_at(latest):
                self._fresh = (latest.time, self._seen_s)
            elif self._served is not served_before and self._served is not None:
                self._fresh = (self._served[1].time, self._seen_s)
            old_version = None if served_before is None else served_before[1].version
            return self.version != old_version

    def start(self, every_s: float = 0.5) -> None:
        """Starts a thread that polls the source.

        Errors of the source are warned about once, are the ``problem`` of
        :attr:`state`, and pass when the source can be read again.

        Args:
            every_s: The longest time between two polls, in seconds. A Redis server
                wakes the follower earlier. Default: 0.5.
        """
        if self._thread is None:
            _started.add(self)
            _start_closer()
            self._thread = threading.Thread(
                target=self._run,
                args=(every_s,),
                name="follower",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """Stops the thread and releases the source. The model can still be called.

        The call waits for a publication that is being loaded or applied, and for
        nothing else.
        """
        self._stop.set()
        end = time.monotonic() + _END_S
        while (
            self._thread is not None
            and self._thread.is_alive()
            and (self._loading or time.monotonic() < end)
        ):
            # again and again, because the thread may just have begun to wait
            self._source.stop()
            self._thread.join(0.01)
        self._source.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, every_s: float) -> None:
        while not self._stop.is_set():
            try:
                self.poll()
                self._source.wait(self._newest, every_s)
            except Exception as error:
                if not self._stop.is_set():
                    self._say(f"it cannot be read at the moment: {last_line(error)}")
                    self._stop.wait(every_s)

    def _is_at(self, latest: Latest) -> bool:
        """Returns whether the newest publication has been reached."""
        current = self._current
        return (
            current is not None
            and current.run == latest.run
            and current.number == latest.number
        )

    def _is_done(self, latest: Latest) -> bool:
        """Returns whether there is nothing to load or to apply."""
        return self._is_at(latest) if self._pinned is None else self._served is not None

    def _catch_up(self, latest: Latest, folder: Path) -> None:
        """Loads a full export if that is necessary, and applies the deltas after it."""
        last = (
            latest.number if self._pinned is None else min(latest.number, self._pinned)
        )
        if self._pinned is not None and self._pinned > latest.number:
            self._say(f"publication {self._pinned} has not been published yet")
        elif self._pinned is not None and self._pinned < min(latest.fulls, default=0):
            self._say(
                f"publication {self._pinned} has been deleted, because there are newer"
                " full exports"
            )
        if self._current is None:
            self._load(latest, 0, folder)
        elif self._is_lost(self._current, latest):
            self._say(
                f"it has lost publication {self._current.number}, and the publisher has"
                " begun another history"
            )
            if not self._load(latest, 0, folder):
                return
            self._history_changes += 1
        while self._current is not None and self._current.number < last:
            cause = self._apply(self._current, latest, folder)
            if cause is not None:
                self._say(
                    f"publication {self._current.number + 1} cannot be applied: {cause}"
                )
                if not self._load(latest, self._current.number, folder):
                    break

    def _is_lost(self, current: Publication, latest: Latest) -> bool:
        """Returns whether the newest publication does not descend from ``current``.

        A publisher uses each number once.
        """
        if latest.run == current.run:
            return False
        if latest.number <= current.number:
            return True
        with suppress(ValueError):  # The record cannot be read now.
            try:
                published = self._source.publication(current.number)
                return (
                    published.run != current.run or published.version != current.version
                )
            except FileNotFoundError:
                # It was deleted, as the publisher does with old ones.
                with suppress(FileNotFoundError):
                    base = self._source.publication(current.number + 1).base
                    return base is not None and base != current.version
        return False

    def _apply(
        self,
        current: Publication,
        latest: Latest,
        folder: Path,
    ) -> str | None:
        """Applies the delta after ``current``.

        Returns the reason if that is not possible.
        """
        number = current.number + 1
        file: tuple[str, int, Kind] = (latest.run, number, "delta")
        cause = self._bad_reads.cause(file)
        if cause is not None:
            self._failed = file
            return cause
        try:
            publication = self._source.publication(number)
            if publication.base is None:
                return "it has no delta, because the publisher began anew"
            if publication.base != current.version:
                return (
                    f"it is a delta of version {publication.base}, and the rows are of"
                    f" version {current.version}"
                )
            path = self._source.fetch(number, "delta", folder)
            name = self._source.name_of(number, "delta")
            delta = checked_delta(path, name, self._key, self._check_open)
            with self._changing():
                # Calls that run keep the model that they have.
                assert self._reached is not None
                model = copy.deepcopy(self._reached[0])
                model.apply_delta(delta)
                if model.recstore_version() != publication.version:
                    raise ValueError("its delta is that of another publication")
        except ConnectionError:
            raise
        except _BAD as error:
            self._failed = file
            return self._bad_reads.add(file, error)
        self._serve(model, publication, delta)
        self._deltas += 1
        return None

    def _load(self, latest: Latest, least_number: int, folder: Path) -> bool:
        """Loads the newest full export above ``least_number`` that can be used."""
        for number in reversed(latest.fulls):
            file: tuple[str, int, Kind] = (latest.run, number, "full")
            is_too_new = self._pinned is not None and number > self._pinned
            if number <= least_number or is_too_new:
                continue
            if self._bad_reads.cause(file) is not None:
                self._failed = file
                continue
            try:
                publication = self._source.publication(number)
                paths = [self._checked(number, kind, folder) for kind in FULL]
                with self._changing():
                    model = load_full(*paths)
                    if model.recstore_version() != publication.version:
                        raise ValueError(
                            "its full export is that of another publication"
                        )
            except ConnectionError:
                raise
            except _BAD as error:
                self._failed = file
                cause = self._bad_reads.add(file, error)
                self._say(f"full export {number} cannot be loaded: {cause}")
                continue
            self._serve(model, publication)
            self._fulls += 1
            return True
        return False

    def _serve(
        self,
        model: torch.jit.ScriptModule,
        publication: Publication,
        delta: dict[str, Tensor] | None = None,
    ) -> None:
        """Serves a model, unless it is only on the way to the pinned publication."""
        if self._pinned is not None:
            delta = None  # The indexes have not had the publication before.
        if self._pinned in (None, publication.number):
            with self._changing():
                for index in self._indexes:
                    index.update(model, delta)
            self._served = (model, publication)
        self._reached = (model, publication)

    def _checked(self, number: int, kind: Kind, folder: Path) -> Path:
        """Returns a file of a full export after its bytes have been checked."""
        path = self._source.fetch(number, kind, folder)
        name = self._source.name_of(number, kind)
        # Rows that are mapped must stay in the directory, and the tensors are read
        # while others could shorten the file.
        if path.parent != folder and (self._key is not None or kind == "full"):
            return private_copy(path, folder, name, self._key, self._check_open)
        with path.open("rb") as file:
            check_file(file, name, self._key, self._check_open)
        return path

    def _check_open(self) -> None:
        if self._stop.is_set() and threading.current_thread() is self._thread:
            raise ConnectionError(f"{self._source} is closed")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Makes :meth:`close` wait: the process must not end while torch loads a model."""
        self._loading = True
        try:
            self._check_open()
            yield
        finally:
            self._loading = False

    def _say(self, problem: str) -> None:
        """Keeps a problem for :attr:`state`, and warns about it.

        It warns once until the follower is up to date again.
        """
        self._problem = f"{self._source}: {problem}"
        if problem not in self._warned_problems:
            self._warned_problems.add(problem)
            warn_user(
                f"{self._problem}: the present rows are served until the newest"
                " publication can be used"
            )


def follow(
    source: str | Path,
    *,
    every_s: float = 0.5,
    timeout_s: float = 60.0,
    key: str | Path | None = None,
    retrieval: Retrieval | Sequence[Retrieval] = (),
    pinned: int | None = None,
) -> Follower:
    """Loads a published model and keeps it up to date in a thread.

    Args:
        source: The destination of a :class:`DeltaPublisher`: the path of a directory,
            or the URL of a stream on a Redis server,
            ``redis://host:port/db?stream=name``.
        every_s: The longest time between two looks at the source, in seconds. Default:
            0.5.
        timeout_s: The time in seconds to wait for the first full export. Default: 60.
        key: The file of the publisher's key; see :class:`Follower`. Default: None.
        retrieval: The index of a table, or several; see :class:`Follower`. Default:
            none.
        pinned: The number of the only publication that is served; see
            :class:`Follower`. Default: None.

    Returns:
        The follower, which has loaded a full export and all deltas after it. Close it
        at the end.

    Raises:
        TypeError, ValueError: See :class:`Follower`; the newest publication is not
            signed with the key; or the model does not fit ``retrieval``.
        TimeoutError: There was no full export that can be used.
        OSError: The source could not be read for this time.
        ImportError: The package ``redis`` is missing.
    """
    follower = Follower(source, key=key, retrieval=retrieval, pinned=pinned)
    try:
        _wait_for_model(follower, source, every_s, timeout_s)
        follower.start(every_s)
    except BaseException:
        follower.close()
        raise
    return follower


def _wait_for_model(
    follower: Follower,
    source: str | Path,
    every_s: float,
    timeout_s: float,
) -> None:
    """Polls until the follower has a model.

    Raises:
        TimeoutError, OSError: See :func:`follow`.
    """
    end = time.monotonic() + timeout_s
    while True:
        cause: OSError | None = None
        try:
            follower.poll()
        except OSError as error:
            cause = error
        if follower.version is not None:
            return
        if time.monotonic() >= end:
            if cause is not None:
                raise cause
            problem = follower.state.problem or "nothing has been published there"
            raise TimeoutError(f"{source}: no model after {timeout_s:g} s: {problem}")
        time.sleep(min(every_s, max(0.0, end - time.monotonic())))


_started: WeakSet[Follower] = WeakSet()
_closer: threading.Thread | None = None


def _start_closer() -> None:
    """Starts the thread that closes followers at the end, unless it runs.

    A daemon thread that runs torch while the interpreter ends would abort the process.
    The interpreter waits for the closer, which is no daemon, before it ends.
    """
    global _closer
    if not threading.main_thread().is_alive():
        return  # The thread that starts the follower outlives the main thread.
    if _closer is None or not _closer.is_alive():
        _closer = threading.Thread(
            target=_close_at_end,
            name="followers-end",
            daemon=False,
        )
        _closer.start()


def _close_at_end() -> None:
    """Waits until the main thread has ended, and stops the threads of all followers."""
    threading.main_thread().join()
    for follower in list(_started):
        follower.close()


# The threads of followers are not in a process that was forked.
os.register_at_fork(after_in_child=_started.clear)
