"""A tree of directories with victims around the directory that is fuzzed, and a watch
on the victims.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tests.outside.names import VICTIM
from torchrec_recstore.optim import SGD
from torchrec_recstore.options import TableOptions
from torchrec_recstore_service.server.data_directory import MANIFEST
from torchrec_recstore_service.tables.hosted import HostedTables
from torchrec_recstore_service.wire.table_spec import TableSpec

MARKER = b"precious-8f1c"
"""Bytes that are in each victim's files, and nowhere else."""

MARKED_WEIGHT = 6.6601
"""The weight of all rows of the checkpoints of the victims."""

_READS = ("open", "os.listdir", "os.scandir")
_CHANGES = (
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.rename",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "shutil.rmtree",
)


@dataclass(frozen=True)
class Entry:
    """What the watch knows of a file, a directory or a link."""

    mode: int
    inode: int
    bytes: int
    changed_ns: int
    content: str


class Sandbox:
    """A tree of directories: a directory that is fuzzed, and victims beside each
    directory above it.

    ::

        root/victim/...           a checkpoint of a server, with marked rows, and ``file``
        root/victim-file
        root/cwd/                 the working directory of the process
        root/a/victim...          the same
        root/a/b/victim...        the same
        root/a/b/own/victim...    the same
        root/a/b/own/data/        the directory that is fuzzed

    Args:
        root: The path of the tree, which does not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.beside = root / "a" / "b" / "own"
        self.data = self.beside / "data"
        self.cwd = root / "cwd"
        self.data.mkdir(parents=True)
        self.cwd.mkdir()
        for folder in (root, root / "a", root / "a" / "b", self.beside):
            make_victim(folder / VICTIM)
            (folder / f"{VICTIM}-file").write_bytes(MARKER)
        self._known: dict[str, tuple[tuple[int, ...], Entry]] = {}
        self._entries = self._listed()

    @property
    def victims(self) -> list[Path]:
        """The directories of the victims."""
        return [
            path
            for path in sorted(self.root.rglob(VICTIM))
            if self.data not in path.parents
        ]

    @contextmanager
    def watched(self, readable: frozenset[str] = frozenset()) -> Iterator[Watch]:
        """Returns a context in which no file outside of :attr:`data` may be read or
        changed.

        Args:
            readable: The names of files that may be read outside of :attr:`data`.
                Default: none.

        Raises:
            AssertionError: A file was read, or something was created, changed or
                deleted.
        """
        watch = Watch(self, readable)
        _watches.append(watch)
        try:
            yield watch
        finally:
            _watches.remove(watch)
        self.check()
        assert not watch.seen, f"outside of the directory: {watch.seen}"

    def check(self) -> None:
        """Checks that all victims are as they were.

        Raises:
            AssertionError: Something outside of :attr:`data` was created, changed or
                deleted.
        """
        present = self._listed()
        if present == self._entries:
            return
        created = sorted(present.keys() - self._entries.keys())
        deleted = sorted(self._entries.keys() - present.keys())
        changed = sorted(
            path
            for path in present.keys() & self._entries.keys()
            if present[path] != self._entries[path]
        )
        raise AssertionError(
            f"created: {created}, deleted: {deleted}, changed: {changed}"
        )

    def owns(self, path: str) -> bool:
        """Returns whether a path without links is that of the directory that is fuzzed,
        or below it.
        """
        return _is_below(path, self.data)

    def _listed(self) -> dict[str, Entry]:
        """Returns an entry for each path outside of :attr:`data`, by path.

        It is called after each of many thousand calls, so it reads a file again only
        if its inode has changed.
        """
        data = str(self.data)
        folders = [str(self.root)]
        entries = {}
        while folders:
            folder = folders.pop()
            entries[folder] = self._entry(folder)
            with os.scandir(folder) as children:
                for child in children:
                    if child.path == data:
                        continue
                    if child.is_dir(follow_symlinks=False):
                        folders.append(child.path)
                    else:
                        entries[child.path] = self._entry(child.path)
        return entries

    def _entry(self, path: str) -> Entry:
        status = os.lstat(path)
        known = self._known.get(path)
        # No program can set the time of change of an inode.
        version = (status.st_ino, status.st_mode, status.st_size, status.st_ctime_ns)
        if known is not None and known[0] == version:
            return known[1]
        entry = _read_entry(path, status)
        self._known[path] = (version, entry)
        return entry


class Watch:
    """What Python's audit events say of files that are opened, listed or changed in a
    sandbox.

    Args:
        sandbox: The sandbox.
        readable: The names of files that may be read.
    """

    def __init__(self, sandbox: Sandbox, readable: frozenset[str]) -> None:
        self._sandbox = sandbox
        self._readable = readable
        self.seen: list[tuple[str, str]] = []
        """The events and paths outside of the directory that is fuzzed."""

    def note(self, event: str, path: str, follows: bool) -> None:
        """Adds an event, unless the path is in the directory that is fuzzed, or far
        away.

        Args:
            event: The name of the event.
            path: The path.
            follows: Whether a link at the path is followed. One that is removed is not.
        """
        if follows:
            target = os.path.realpath(path)
        else:
            target = os.path.join(
                os.path.realpath(os.path.dirname(path)), os.path.basename(path)
            )
        target = os.path.normpath(target)
        if not _is_below(target, self._sandbox.root) or self._sandbox.owns(target):
            return
        if event in _READS and os.path.basename(target) in self._readable:
            return
        self.seen.append((event, target))


def make_victim(path: Path) -> None:
    """Writes a checkpoint of a server whose rows all have :data:`MARKED_WEIGHT`, and a
    file beside.
    """
    tables = HostedTables()
    spec = TableSpec(4, torch.float32, SGD(lr=1.0), TableOptions())
    tables.create("t", spec)
    tables.push("t", torch.arange(8), torch.full((8, 4), MARKED_WEIGHT))
    tables.save(
        path, training_state={MANIFEST: {"name": VICTIM, "id": VICTIM, "number": 1}}
    )
    tables.close()
    (path / "file").write_bytes(MARKER)
    (path / "0").mkdir()
    (path / "0" / "file").write_bytes(MARKER)


def _read_entry(path: str, status: os.stat_result) -> Entry:
    content = ""
    if stat.S_ISLNK(status.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(status.st_mode):
        with open(path, "rb") as file:
            content = xxhash.xxh3_128_hexdigest(file.read())
    return Entry(
        status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, content
    )


def _is_below(path: str, folder: Path) -> bool:
    return path == str(folder) or path.startswith(f"{folder}/")


_watches: list[Watch] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watches or (event not in _READS and event not in _CHANGES):
        return
    paths = arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]
    for path in paths:
        if not isinstance(path, str | bytes):
            continue  # a descriptor of a file that is open
        text = os.fsdecode(path)
        if "/" not in text:
            continue  # it may be relative to the descriptor of a directory
        follows = event in _READS
        if (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & os.O_NOFOLLOW
        ):
            follows = False
        for watch in list(_watches):
            watch.note(event, text, follows)


sys.addaudithook(_audit)
