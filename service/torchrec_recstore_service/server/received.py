"""The files of a save of other servers, which a server receives before it distributes
their rows anew.

Tests: tests/service/test_set_calls.py.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from torchrec_recstore.checkpoint.files import naming
from torchrec_recstore.ownership import open_own, refuse_link, remove
from torchrec_recstore_service.server.data_directory import DataDirectory
from torchrec_recstore_service.server.deadline import Deadline
from torchrec_recstore_service.server.native import CallRefusedError
from torchrec_recstore_service.server.save_names import SavedFileName, SaveId
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.agreement import SLOTS

FILES = 1 << 18
"""The largest number of files."""
SILENT_S = 600.0
"""The time after which files whose client has sent no more are deleted."""
GIVES_WAY_S = 30.0
"""The time after which such files give way to those of another client."""


class ReceivedFiles:
    """The files of one save of other servers.

    Args:
        directory: The data directory.
        room: A function that returns the number of bytes on the disk that the server
            needs for itself.
    """

    def __init__(self, directory: DataDirectory, room: Callable[[], int]) -> None:
        self._directory = directory
        self._room = room
        self._lock = threading.Lock()
        self._id: SaveId | None = None
        self._last_heard = 0.0
        self._files = 0
        self._room_bytes = 0  # that the disk has for these files
        self._deadline = Deadline(SILENT_S, "recstore-received")
        self.bytes = 0
        """The size in bytes of the files."""

    def write(self, save_id: SaveId, request: pb.WriteFileRequest) -> None:
        """Writes a piece of a file of the save, at its end or over another piece.

        Raises:
            CallRefusedError: The server receives the files of another save.
            ValueError: The request makes no sense, or there are too many files.
            OSError: The disk has no room.
        """
        if request.part >= SLOTS:
            raise ValueError(f"a save has at most {SLOTS} parts")
        name = SavedFileName(request.file)
        root = self._directory.received(save_id)
        path = root / str(request.part) / name
        with self._lock:
            self._begin(save_id)
            for place in (root, path.parent, path):
                refuse_link(place)
            is_new = not path.exists()
            if is_new and self._files >= FILES:
                raise ValueError(f"a save has at most {FILES} files")
            size = 0 if is_new else path.stat().st_size
            if request.offset > size:
                raise ValueError(
                    f"the file {name!r} has {size} bytes, got the offset"
                    f" {request.offset}"
                )
            new_bytes = max(0, request.offset + len(request.content) - size)
            if new_bytes > self._room_bytes:
                self._measure()
                if new_bytes > self._room_bytes:
                    raise OSError(
                        f"the files of the save have {self.bytes} bytes so far, and the"
                        " server needs the other free space of the disk for its own"
                        f" tables: make room in {self._directory.path}"
                    )
            _write(path, request.content, request.offset)
            self.bytes += new_bytes
            self._room_bytes -= new_bytes
            self._files += is_new
            time_s = time.monotonic()
            if time_s - self._last_heard > 1.0:
                self._deadline.begin(lambda: self.forget(save_id))
            self._last_heard = time_s

    def forget(self, save_id: SaveId) -> None:
        """Deletes the files of a save."""
        with self._lock:
            remove(self._directory.received(save_id))
            if save_id == self._id:
                self._deadline.cancel()
                self._id = None
                self._files = 0
                self.bytes = 0
                self._room_bytes = 0

    def _begin(self, save_id: SaveId) -> None:
        if save_id == self._id:
            return
        if self._id is not None and time.monotonic() - self._last_heard < GIVES_WAY_S:
            raise CallRefusedError(
                grpc.StatusCode.UNAVAILABLE,
                "the server receives the files of another save: repeat the call",
            )
        if self._id is not None:
            remove(self._directory.received(self._id))
        self._id = save_id
        self._files = 0
        self.bytes = 0
        self._room_bytes = 0
        self._last_heard = 0.0

    def _measure(self) -> None:
        """Finds how many bytes the disk has.

        The rows are written once more when they are distributed.
        """
        free = shutil.disk_usage(self._directory.path).free
        self._room_bytes = free - self._room()


def _write(path: Path, content: bytes, offset: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_own(path, os.O_WRONLY | os.O_CREAT)
    try:
        unwritten = memoryview(content)
        with naming(path):
            while unwritten:  # a disk that is almost full takes a part
                written = os.pwrite(file, unwritten, offset)
                offset += written
                unwritten = unwritten[written:]
    finally:
        os.close(file)
