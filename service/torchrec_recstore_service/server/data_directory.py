"""The data directory of a server: its saves, the save to start from, and the server's
place in its set of servers.

Tests: tests/service/test_faults.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchrec_recstore.checkpoint.destination import Destination
from torchrec_recstore.checkpoint.files import (
    CheckpointError,
    FileLock,
    make_directory,
    sync,
    write_synced,
)
from torchrec_recstore.checkpoint.info import read_info
from torchrec_recstore.encoding import check_fields
from torchrec_recstore.ownership import remove
from torchrec_recstore_service.server.save_names import SaveId, SaveName
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.agreement import epoch_label, run_label

_STATE = "server.json"
_MEMBERSHIP = "set.json"
_LOCK = "lock"
_UNLESS = "unless_prepared"
_FIELDS = ("last", "stopped", _UNLESS)
_PREPARED_LAST = ("id", "last")
# fields of both files that hold the name of a save, or None
_SAVE_NAMES = {"last", "save"}
_STOPPED = ("checkpoint", "epoch", "applied")
_MEMBER = (
    "set",
    "member",
    "members",
    "slots",
    "epoch",
    "token",
    "save",
    "runs",
    "earlier",
    "next",
)
_SINCE_2 = ("runs", "earlier", "next")  # fields that version 1 of the protocol has not
_EARLIER_RUNS = 1000
_PREPARED = ".prepared-"
_RECEIVED = ".received-"
MANIFEST = "save"  # key in the training state of a save: its manifest


@dataclass(frozen=True)
class Membership:
    """The place of a server in its set, and its last epoch.

    Args:
        set: The identity of the set.
        member: The number of the server in the set.
        members: The number of servers in the set.
        slots: For each slot of ids, the number of the server that stores its ids.
        epoch: The number of the epoch.
        token: The token of the epoch. Empty for an epoch of version 1 of the protocol.
        save: The name of the last save of the set. None: there is none.
        runs: For each member, its last run in this epoch that this server knows.
        earlier: The runs of this server in this epoch before its last one.
        next: The run that begins if the resuming of this server is completed. Empty if
            it was not begun.
    """

    set: str
    member: int
    members: int
    slots: tuple[int, ...]
    epoch: int
    token: str
    save: SaveName | None
    runs: tuple[str, ...]
    earlier: tuple[str, ...] = ()
    next: str = ""

    @property
    def label(self) -> str:
        """The label of the epoch."""
        return epoch_label(self.set, self.epoch, self.token)

    @property
    def run(self) -> str:
        """The last run of this server."""
        return self.runs[self.member]

    @property
    def run_label(self) -> str:
        """The name of the last run of this server in calls."""
        return run_label(self.label, self.run)

    def with_run(self, member: int, run: str) -> Membership:
        """Returns the same place, with another last run of a member."""
        runs = (*self.runs[:member], run, *self.runs[member + 1 :])
        if member != self.member:
            return replace(self, runs=runs)
        earlier = (*self.earlier, self.run)[-_EARLIER_RUNS:]
        return replace(self, runs=runs, earlier=earlier, next="")


class DataDirectory:
    """The data directory of a server, which holds its saves as ``DIR/NAME``.

    The file ``server.json`` names the save that was made or loaded last. It is written
    before this save is renamed to its name, so that the server starts from the save if
    and only if it counts: ``unless_prepared`` has the id of the save, and the name of
    the save to start from as long as this id is one of a prepared part. The file also
    holds the state that a stopped server leaves for the next server. The next server
    deletes this state before it takes calls on tables, so that only one server can
    continue from it. The file ``set.json`` has the server's :class:`Membership`. A part
    of a save that does not count yet is ``DIR/.prepared-ID``.

    Args:
        path: The path of the directory. It is created if it does not exist. One server
            uses it at a time.

    Raises:
        OSError: The directory cannot be created or written, or another server uses it.
        ValueError: ``server.json`` or ``set.json`` is damaged, or was written by a
            newer version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        """The path of the directory."""
        make_directory(self.path)
        self._lock = FileLock(
            self.path / _LOCK,
            "serving it",
            lambda holder: (
                f"{self.path}: another server has this data directory ({holder}): stop"
                " that one, or give this one another"
            ),
            keep=True,
        )
        self.last: SaveName | None = None
        """The name of the save to start from."""
        self.stopped: dict[str, Any] | None = None
        """The state that the last server left when it stopped. :meth:`set_last`
        replaces it.
        """
        self.membership: Membership | None = None
        """The place in a set. None: the server belongs to no set yet."""
        state = self._document(_STATE, _FIELDS)
        if state is not None:
            self.last = _name_or_none(state["last"])
            self.stopped = state["stopped"]
        member = self._document(_MEMBERSHIP, _MEMBER, _SINCE_2)
        if member is not None:
            if not any(field in member for field in _SINCE_2):
                # The token was not of the epoch then, but of one server's load.
                member["token"] = ""
                member["runs"] = [""] * member["members"]
                member["earlier"] = []
                member["next"] = ""
            self.membership = membership_of(member)
        self._saves: dict[SaveName, pb.Saved] = {}
        self._prepared: dict[SaveId, pb.Saved] = {}
        for entry in self.path.iterdir():
            self._add_entry(entry)
        unless = None if state is None else state[_UNLESS]
        # the server was killed before the save counted
        if unless is not None and unless["id"] in self._prepared:
            self.set_last(_name_or_none(unless["last"]))

    def _add_entry(self, entry: Path) -> None:
        """Adds the save of an entry of the directory, or deletes what is left of one."""
        if entry.name.startswith((_RECEIVED, f".{_PREPARED}")):
            remove(entry)
        elif entry.name.startswith(_PREPARED):
            saved = None if entry.is_symlink() else _manifest_of(entry)
            # A part changes places with the save that it replaces. The server was
            # killed before it had deleted the old save.
            if saved is None or entry.name != f"{_PREPARED}{saved.id}":
                remove(entry)
            else:
                self._prepared[SaveId(saved.id)] = saved
        elif entry.is_dir() and not entry.name.startswith("."):
            saved = _manifest_of(entry)
            name = _save_name_of(entry)
            if saved is not None and name is not None:
                self._saves[name] = pb.Saved(
                    name=name,
                    id=saved.id,
                    number=saved.number,
                )

    @property
    def saves(self) -> list[pb.Saved]:
        """The saves that count, in the order in which they were made."""
        return sorted(self._saves.values(), key=lambda saved: saved.number)

    @property
    def prepared(self) -> list[pb.Saved]:
        """The saves that were prepared and do not count yet, in the order of their numbers."""
        return sorted(self._prepared.values(), key=lambda saved: saved.number)

    @property
    def at(self) -> pb.Saved:
        """The save to start from.

        It has no name if there is none, and no id if it has no manifest.
        """
        return self.saved(self.last)

    def saved(self, name: SaveName | None) -> pb.Saved:
        """Returns the save of a name.

        See :meth:`at` for one that is not there, or has no manifest.
        """
        if name is None:
            return pb.Saved()
        return self._saves.get(name, pb.Saved(name=name))

    def checkpoint(self, name: SaveName) -> Path:
        """Returns the path of a save."""
        return self.path / name

    def check_free(self, name: SaveName, overwrite: bool) -> None:
        """Checks that a save of this name can be published.

        See :class:`Destination` for the errors.
        """
        with Destination(self.checkpoint(name), overwrite=overwrite):
            pass

    def staging(self, save_id: SaveId) -> Path:
        """Returns the path to which a part of a save is written before it counts."""
        return self.path / f"{_PREPARED}{save_id}"

    def new_staging(self, save_id: SaveId) -> Path:
        """Returns :meth:`staging` for a part that is written now.

        A link that is there is deleted.
        """
        path = self.staging(save_id)
        if path.is_symlink():
            path.unlink()
        return path

    def received(self, save_id: SaveId) -> Path:
        """Returns the path to which the parts of a save of other servers are written."""
        return self.path / f"{_RECEIVED}{save_id}"

    def add_prepared(self, saved: pb.Saved) -> None:
        """Adds a part that has been written to :meth:`staging`."""
        self._prepared[SaveId(saved.id)] = saved

    def publish(self, save_id: SaveId, start_from: bool = False) -> SaveName:
        """Makes a prepared part count: it replaces a save of the same name.

        Nothing happens if it counts already.

        Args:
            save_id: The id of the save.
            start_from: Whether it becomes the save to start from, in the moment in
                which it counts. Default: False.

        Returns:
            The name of the save.

        Raises:
            FileNotFoundError: The part was not prepared, or another save has replaced
                it.
            OSError: The directory cannot be renamed.
        """
        for name, saved in self._saves.items():
            if saved.id == save_id:
                return name
        prepared = self._prepared.get(save_id)
        if prepared is None:
            raise FileNotFoundError(
                "this save was not prepared, or another save has replaced it"
            )
        name = SaveName(prepared.name)
        with Destination(self.checkpoint(name), overwrite=True) as destination:
            if start_from:
                unless = {"id": save_id, "last": self.last}
                self._write(_STATE, {"last": name, "stopped": None, _UNLESS: unless})
            destination.publish_prepared(self.staging(save_id))
        del self._prepared[save_id]
        self._saves[name] = prepared
        if start_from:
            self.last = name
            self.stopped = None
        return name

    def discard(self, save_id: SaveId) -> None:
        """Deletes a prepared part, and what was received for it."""
        remove(self.received(save_id))
        if self._prepared.pop(save_id, None) is not None:
            remove(self.staging(save_id))

    def forget(self, name: SaveName) -> None:
        """Deletes a save, unless the server starts from it."""
        if name != self.last and self._saves.pop(name, None) is not None:
            remove(self.checkpoint(name))

    def set_last(
        self,
        name: SaveName | None,
        stopped: dict[str, Any] | None = None,
    ) -> None:
        """Writes the name of the save to start from to the disk, with the state of a
        server that has stopped.
        """
        self._write(_STATE, {"last": name, "stopped": stopped, _UNLESS: None})
        self.last = name
        self.stopped = stopped

    def set_membership(self, membership: Membership) -> None:
        """Writes the place in a set to the disk."""
        self._write(_MEMBERSHIP, asdict(membership))
        self.membership = membership

    def close(self) -> None:
        """Releases the directory for another server."""
        self._lock.close()

    def _document(
        self,
        name: str,
        fields: tuple[str, ...],
        optional: tuple[str, ...] = (),
    ) -> dict[str, Any] | None:
        file = self.path / name
        if not file.exists():
            return None
        try:
            document: dict[str, Any] = json.loads(file.read_bytes())
            check_fields("it", document, fields, optional)
            unless = document.get(_UNLESS)
            if unless is not None:
                check_fields(f"{_UNLESS!r}", unless, _PREPARED_LAST)
                SaveId(unless["id"])
                _name_or_none(unless["last"])
            if document.get("stopped") is not None:
                check_fields("'stopped'", document["stopped"], _STOPPED)
            for field in _SAVE_NAMES & document.keys():
                _name_or_none(document[field])
            return document
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} cannot be used: {error}") from error

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        staging = self.path / f".{name}"
        write_synced(staging, json.dumps(document).encode())
        staging.replace(self.path / name)
        sync(self.path)


def membership_of(document: Mapping[str, Any]) -> Membership:
    """Returns the :class:`Membership` of a JSON object with its fields."""
    values = dict(document)
    for field in ("slots", "runs", "earlier"):
        values[field] = tuple(document[field])
    values["save"] = _name_or_none(document["save"])
    return Membership(**values)


def _name_or_none(name: str | None) -> SaveName | None:
    return None if name is None else SaveName(name)


def _save_name_of(path: Path) -> SaveName | None:
    """Returns the name of a directory as that of a save.

    None if no save can have this name.
    """
    try:
        return SaveName(path.name)
    except ValueError:
        return None


def _manifest_of(path: Path) -> pb.Saved | None:
    """Reads the name, the id and the number of a save.

    None if the directory has no manifest that can be read.
    """
    try:
        state = read_info(path).training_state
        manifest = state[MANIFEST]
        name = SaveName(manifest["name"])
        return pb.Saved(
            name=name,
            id=SaveId(manifest["id"]),
            number=manifest["number"],
        )
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        return None
