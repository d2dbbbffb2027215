"""The places where exports and deltas are published, and a directory as one."""

from __future__ import annotations

import grp
import hmac
import json
import os
import pwd
import stat
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torchrec_recstore.checkpoint.files import (
    FileLock,
    is_staging,
    make_directory,
    whole_file,
)
from torchrec_recstore_serving.export.signing import Key, no_signature, wrong_signature

Kind = Literal["program", "full", "delta"]
FULL: tuple[Kind, ...] = ("program", "full")
"""The files of a full export: a model without rows, and all of its rows and dense
tensors.
"""
_SUFFIXES: dict[Kind, str] = {
    "program": ".pt",
    "full": ".safetensors",
    "delta": ".delta",
}


@dataclass(frozen=True)
class Publication:
    """A published moment of a model.

    Args:
        number: The number of the publication. The numbers of a place count up by one.
        version: The version of the served model; see ``recstore_version``.
        base: The version to which the publication's delta applies, which is that of the
            publication before. None: the publication has no delta, only a full export.
        time: The moment whose rows the publication has, in seconds since 1970.
        full: Whether the publication has a full export.
        run: The name of the publisher.
    """

    number: int
    version: str
    base: str | None
    time: float
    full: bool
    run: str


@dataclass(frozen=True)
class Latest:
    """The newest publication of a place.

    Args:
        number: The number of the newest publication.
        version: Its version.
        time: The moment up to which the model has not changed after the newest
            publication, in seconds since 1970.
        fulls: The numbers of the full exports that the place has, ascending: the newest
            one, and the one before.
        run: The name of the publisher.
    """

    number: int
    version: str
    time: float
    fulls: tuple[int, ...]
    run: str


def latest_after(publication: Publication, known_latest: Latest | None) -> Latest:
    """Returns the state of a place after another publication.

    A full export replaces all but one before it.
    """
    fulls = () if known_latest is None else known_latest.fulls
    if publication.full:
        fulls = (*fulls[-1:], publication.number)
    return Latest(
        number=publication.number,
        version=publication.version,
        time=publication.time,
        fulls=fulls,
        run=publication.run,
    )


def is_same(latest: Latest | None, other: Latest | None) -> bool:
    """Returns whether two states of a place have the same newest publication."""
    if latest is None or other is None:
        return latest is other
    return latest.number == other.number and latest.run == other.run


def first_kept(latest: Latest, kind: Kind) -> int:
    """Returns the least number whose file of this kind a follower may need.

    It may need all from the older full export on.
    """
    older_full = latest.fulls[0]
    return older_full + 1 if kind == "delta" else older_full


class Publications(Protocol):
    """A place of publications. A publication appears with all of its files at once."""

    def claim(self, run: str) -> Latest | None:
        """Makes this process the publisher of the place.

        Returns the newest publication.

        Raises:
            BlockingIOError: Another process publishes to the place.
            OSError: The place cannot be written.
            ValueError: The place cannot hold publications.
        """

    def path_of(self, number: int, kind: Kind) -> Path:
        """Returns the path at which the publisher writes a file of its next
        publication.
        """

    def append(
        self,
        publication: Publication,
        known_latest: Latest | None,
    ) -> Latest | None:
        """Publishes the files at :meth:`path_of`.

        Deletes files that no follower needs any more.

        Args:
            publication: The publication.
            known_latest: The newest publication, as this publisher knows it.

        Returns:
            The newest publication. None if the place has lost the one before, so that
            this one was not published.

        Raises:
            BlockingIOError: Another publisher has published in the meantime.
            OSError: The place cannot be written.
        """

    def confirm(self, latest: Latest) -> bool:
        """Publishes that the model has not changed up to ``latest.time``.

        Returns:
            Whether the place still has the newest publication. Otherwise nothing was
            published.

        Raises:
            BlockingIOError, OSError: See :meth:`append`.
        """

    def latest(self) -> Latest | None:
        """Returns the newest publication, or None if there is none.

        Raises:
            OSError: The place cannot be read.
            ValueError: The place holds something else.
        """

    def publication(self, number: int) -> Publication:
        """Returns the publication of this number.

        Raises:
            FileNotFoundError: The publication is not there any more.
            OSError: The place cannot be read.
        """

    def fetch(self, number: int, kind: Kind, folder: Path) -> Path:
        """Returns a file of a publication.

        It is copied into ``folder`` if it is not a file already.

        Raises:
            FileNotFoundError: The file is not there any more.
            OSError: The place cannot be read.
            ValueError: There is no key, and everyone may write the file.
        """

    def name_of(self, number: int, kind: Kind) -> str:
        """Returns the name of a file of a publication, for messages."""

    def wait(self, number: int, seconds: float) -> None:
        """Waits, at most for ``seconds``, until there may be a later publication."""

    def writers(self) -> Writers:
        """Returns who may write to the place."""

    def stop(self) -> None:
        """Ends the waits and reads of other threads, and all later waits.

        The reads may then raise any error.
        """

    def close(self) -> None:
        """Releases the place and its connection."""

    def __str__(self) -> str:
        """Returns the place without credentials, for messages."""


@dataclass(frozen=True)
class Writers:
    """Who may write to a place.

    A follower without a key trusts them, because a model that is loaded runs code.

    Args:
        trusted: All of them, for messages.
        danger: Why others than the publisher may be among them, and how to prevent
            that. None: there are none that can be seen.
        anyone: Whether everyone may write, so that a follower without a key refuses the
            place.
    """

    trusted: str
    danger: str | None = None
    anyone: bool = False


def described(value: Publication | Latest, key: Key | None = None) -> str:
    """Returns a publication or the state of a place as JSON.

    A signature is at its end if there is a key.
    """
    fields = dict(sorted(asdict(value).items()))
    if key is not None:
        fields["signature"] = _signature(fields, key)
    return json.dumps(fields)


def _signature(fields: Mapping[str, Any], key: Key) -> str:
    """Returns the signature of the text without it.

    A reader that parses no JSON finds that text in the record.
    """
    return key.sign("record", json.dumps(fields, sort_keys=True).encode())


def latest_of(
    text: str | bytes,
    location: object,
    key: Key | None = None,
) -> Latest:
    """Returns the :class:`Latest` of a text that :func:`described` has made.

    Raises:
        ValueError: The text is something else, or it is not signed with the key.
    """
    fields = _fields(text, location, key)
    try:
        fields["fulls"] = tuple(fields["fulls"])
        latest = Latest(**fields)
        _check_types(latest)
        for full in latest.fulls:
            _check_number("fulls", full)
        return latest
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{location} is not what a DeltaPublisher writes: {error}"
        ) from error


def publication_of(
    text: str | bytes,
    number: int,
    location: object,
    key: Key | None = None,
) -> Publication:
    """Returns the :class:`Publication` of a text that :func:`described` has made.

    Raises:
        ValueError: The text is something else, has another number, or is not signed
            with the key.
    """
    try:
        publication = Publication(**_fields(text, location, key))
        _check_types(publication)
        if not isinstance(publication.full, bool):
            raise TypeError(f"full is {publication.full!r}")
        if not isinstance(publication.base, str | None):
            raise TypeError(f"base is {publication.base!r}")
    except TypeError as error:
        raise ValueError(
            f"{location} is not what a DeltaPublisher writes: {error}"
        ) from error
    if publication.number != number:
        raise ValueError(f"{location} is publication {publication.number}")
    return publication


_LATEST_S = 10**12
"""An upper bound of times, in seconds since 1970."""


def _check_types(value: Publication | Latest) -> None:
    """Checks the fields that both kinds of record have.

    The numbers become parts of paths.

    Raises:
        TypeError: A field has another type.
    """
    _check_number("number", value.number)
    for field, text in (("version", value.version), ("run", value.run)):
        if not isinstance(text, str):
            raise TypeError(f"{field} is {text!r}")
    time = value.time
    is_number = isinstance(time, int | float) and not isinstance(time, bool)
    if not is_number or not abs(time) < _LATEST_S:  # NaN is not.
        raise TypeError(f"time is {time!r}")


def _check_number(field: str, number: object) -> None:
    is_integer = isinstance(number, int) and not isinstance(number, bool)
    if not is_integer or not 0 <= number < 10**12:  # type: ignore[operator]
        raise TypeError(f"{field} is {number!r}, which is no number of a publication")


def _fields(text: str | bytes, location: object, key: Key | None) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{location} is not what a DeltaPublisher writes: {error}"
        ) from error
    if not isinstance(fields, dict):
        raise ValueError(f"{location} is not what a DeltaPublisher writes")
    signature = fields.pop("signature", None)
    if key is not None:
        if not isinstance(signature, str):
            raise no_signature(location, key)
        expected = _signature(fields, key)
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            raise wrong_signature(location, key, expected)
    return fields


def _open_folder(folder: Path) -> Path | None:
    """Returns the directory in which every user may replace the given one.

    It is the directory itself or one around it.
    """
    if folder.stat().st_mode & stat.S_IWOTH:
        return folder
    for parent in folder.parents:
        mode = parent.stat().st_mode
        # In a sticky directory, users replace only their own files.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return parent
    return None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"the user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


class DirectoryPublications:
    """Publications in a directory, which others may see by network.

    The files of publication 12 are ``000000000012.delta``, ``000000000012.pt`` and
    ``000000000012.safetensors`` if it has a full export, and ``000000000012.json``.
    ``latest.json`` names the newest publication. Each file is written under another
    name, synced and renamed, and ``latest.json`` is the last of them. A reader begins
    there and asks for files by their names, so that it never reads a part of a file,
    and never lists the directory.

    Args:
        directory: The directory. The publisher creates it if it does not exist.
        key: The key with which a publisher signs and which a follower requires. A
            publisher reads the number of the newest publication whatever its signature
            is. Default: None.
    """

    def __init__(self, directory: Path, key: Key | None = None) -> None:
        self._directory = directory
        self._key = key
        self._lock: FileLock | None = None
        self._stopped = threading.Event()
        self._needed_files: set[str] = set()
        """The names of the publisher's newest full export, and of the files after it.
        """

    def claim(self, run: str) -> Latest | None:
        """See :meth:`Publications.claim`."""
        make_directory(self._directory)
        self._lock = FileLock(
            self._directory / ".publisher.lock",
            "publishing to it",
            lambda holder: (
                f"{self} cannot be published to: {holder}: wait for that process, or"
                " use another directory"
            ),
        )
        for entry in self._directory.iterdir():
            if is_staging(entry):  # A publisher that was killed has left it.
                entry.unlink(missing_ok=True)
        return self.latest()

    def path_of(self, number: int, kind: Kind) -> Path:
        """See :meth:`Publications.path_of`."""
        return self._directory / f"{number:012d}{_SUFFIXES[kind]}"

    def append(
        self,
        publication: Publication,
        known_latest: Latest | None,
    ) -> Latest | None:
        """See :meth:`Publications.append`."""
        if not self._has(known_latest):
            return None
        if publication.base is not None and not self._is_whole():
            return None
        latest = latest_after(publication, known_latest)
        record = self._record(publication.number)
        self._write(record, described(publication, self._key))
        self._write(self._directory / "latest.json", described(latest, self._key))
        if publication.full:
            self._needed_files.clear()
        self._needed_files.add(record.name)
        for kind in FULL if publication.full else ("delta",):
            self._needed_files.add(self.path_of(publication.number, kind).name)
        if publication.full:
            self._trim(latest)
        return latest

    def confirm(self, latest: Latest) -> bool:
        """See :meth:`Publications.confirm`."""
        if not self._has(latest) or not self._is_whole():
            return False
        self._write(self._directory / "latest.json", described(latest, self._key))
        return True

    def latest(self) -> Latest | None:
        """See :meth:`Publications.latest`."""
        path = self._directory / "latest.json"
        is_publisher = self._lock is not None
        try:
            return latest_of(
                path.read_bytes(),
                path,
                None if is_publisher else self._key,
            )
        except FileNotFoundError:
            return None

    def publication(self, number: int) -> Publication:
        """See :meth:`Publications.publication`."""
        path = self._record(number)
        return publication_of(path.read_bytes(), number, path, self._key)

    def fetch(self, number: int, kind: Kind, folder: Path) -> Path:
        """See :meth:`Publications.fetch`."""
        path = self.path_of(number, kind)
        mode = stat.S_IMODE(path.stat().st_mode)
        if self._key is None and mode & stat.S_IWOTH:
            raise ValueError(
                f"every user of this machine may write {path} (mode {mode:04o}): chmod"
                f" o-w {path}"
            )
        return path

    def name_of(self, number: int, kind: Kind) -> str:
        """See :meth:`Publications.name_of`."""
        return str(self.path_of(number, kind))

    def wait(self, number: int, seconds: float) -> None:
        """See :meth:`Publications.wait`."""
        self._stopped.wait(seconds)

    def writers(self) -> Writers:
        """See :meth:`Publications.writers`."""
        trusted = f"everyone who may write the directory {self}"
        try:
            folder = self._directory.resolve(strict=True)
            status = folder.stat()
            open_folder = _open_folder(folder)
        except OSError:  # It does not exist yet.
            return Writers(trusted)
        owner = _user(status.st_uid)
        trusted += f", which belongs to {owner}"
        if open_folder is not None:
            return Writers(
                trusted,
                f"every user of this machine may write {open_folder}: chmod o-w"
                f" {open_folder}",
                anyone=True,
            )
        group = _group(status.st_gid)
        if status.st_mode & stat.S_IWGRP and group != owner:
            return Writers(
                trusted,
                f"the group {group} may write {folder}: chmod g-w {folder}",
            )
        return Writers(trusted)

    def stop(self) -> None:
        """See :meth:`Publications.stop`."""
        self._stopped.set()

    def close(self) -> None:
        """See :meth:`Publications.close`."""
        if self._lock is not None:
            self._lock.close()

    def __str__(self) -> str:
        return str(self._directory)

    def _has(self, known_latest: Latest | None) -> bool:
        """Returns whether the newest publication is the one that the publisher knows.

        It creates a lost directory.
        """
        latest = self.latest()
        if latest is None:
            make_directory(self._directory)
        return is_same(latest, known_latest)

    def _is_whole(self) -> bool:
        """Returns whether nobody else has deleted what followers need."""
        return self._needed_files <= set(os.listdir(self._directory))

    def _record(self, number: int) -> Path:
        return self._directory / f"{number:012d}.json"

    def _write(self, path: Path, text: str) -> None:
        with whole_file(path) as beside:
            beside.write_text(text)

    def _trim(self, latest: Latest) -> None:
        """Deletes the files of publications that no follower needs."""
        first_numbers = {".json": latest.fulls[0]}
        for kind, suffix in _SUFFIXES.items():
            first_numbers[suffix] = first_kept(latest, kind)
        for entry in self._directory.iterdir():
            first_number = first_numbers.get(entry.suffix)
            if first_number is None or not entry.stem.isdecimal():
                continue
            if int(entry.stem) < first_number:
                entry.unlink(missing_ok=True)
