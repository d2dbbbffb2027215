from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torchrec_recstore.checkpoint.files import make_directory, sync_directory
from torchrec_recstore.checkpoint.lock import FileLock
from torchrec_recstore.newer import check_fields

_STATE = "server.json"
_LOCK = "lock"
_FIELDS = ("last", "stopped")
_STOPPED = ("checkpoint", "incarnation", "applied")


class DataDirectory:
    """A server's checkpoints, ``DIR/NAME`` each, and which of them it starts from.

    ``server.json`` names the checkpoint that was saved or loaded last, and what a server that has stopped leaves to the
    next: it is taken away before that one serves, so that only one can go on as if nothing had happened.

    Args:
        path: made where it is missing. It belongs to one server at a time.

    Raises:
        OSError: it cannot be made or written, or another server has it.
        ValueError: ``server.json`` is damaged, or a newer version wrote it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        make_directory(self._path)
        self._lock = FileLock(
            self._path / _LOCK,
            "serving it",
            lambda holder: (
                f"{self._path}: another server has this data directory ({holder}): stop that one, or give this one "
                "another"
            ),
            keep=True,
        )
        self.last: str | None = None
        """Name of the checkpoint to start from."""
        self.stopped: dict[str, Any] | None = None
        """What the last server left when it stopped, until :meth:`set_last`."""
        state = self._path / _STATE
        if state.exists():
            try:
                document = json.loads(state.read_bytes())
                check_fields("it", document, _FIELDS, _FIELDS)
                self.last, self.stopped = document["last"], document["stopped"]
                if self.stopped is not None:
                    check_fields("'stopped'", self.stopped, _STOPPED, _STOPPED)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{state} cannot be used: {error}") from error

    def checkpoint(self, name: str) -> Path:
        """Where the checkpoint of that name is.

        Raises:
            ValueError: it is no plain name.
        """
        if not name or name.startswith(".") or "/" in name or "\0" in name or name in (_STATE, _LOCK):
            raise ValueError(f"on a server, save and load take a plain name below its data directory, got {name!r}")
        return self._path / name

    def set_last(self, name: str | None, stopped: dict[str, Any] | None = None) -> None:
        """Names the checkpoint to start from. It is on the disk when this returns."""
        staging = self._path / f".{_STATE}"
        with staging.open("w") as file:
            json.dump({"last": name, "stopped": stopped}, file)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(self._path / _STATE)
        sync_directory(self._path)
        self.last, self.stopped = name, stopped

    def close(self) -> None:
        """Lets another server have it."""
        self._lock.close()
