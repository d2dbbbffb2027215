"""Locks paths, writes files completely or not at all, and checks files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from weakref import WeakSet

import safetensors.torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from torchrec_recstore.ownership import open_own

# The time to wait until a new holder of a lock has written its name.
_UNKNOWN_HOLDER_S = 1.0
_STAGING = re.compile(r"\..+\.saving-[0-9a-f]{12}")
_BLOCK = 1 << 20  # bytes

_held: WeakSet[FileLock] = WeakSet()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an error of the system that names no file.

    The error of a full disk is such an error.

    Args:
        path: The file or directory that the block writes or reads.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        reason = os.strerror(error.errno)
        raise OSError(error.errno, reason, os.fspath(path)) from error


class CheckpointError(ValueError):
    """A checkpoint cannot be used: it is damaged, incomplete, or of another format.

    The message names the file.
    """


class FileLock(AbstractContextManager["FileLock"]):
    """A lock of a file, which one process holds, or several if all share it.

    It is also a context manager.

    The lock is an ``flock``. The operating system releases it when the process ends for
    any reason, and a forked process does not inherit it. On NFS it works between hosts,
    unless the filesystem is mounted with ``nolock`` or ``local_lock``. The file, which
    is deleted at the end without ``keep``, names the processes that hold the lock.

    Raises BlockingIOError if it is held, with the message that ``refusal`` makes of a
    description of the holder: "process 12 on host h has been writing it since
    2026-01-31T12:00:00Z", in which "writing it" is ``doing``.
    """

    def __init__(
        self,
        file: Path,
        doing: str,
        refusal: Callable[[str], str],
        *,
        shared: bool = False,
        keep: bool = False,
    ) -> None:
        self._descriptor: int | None = None
        self._file = file
        self._shared = shared
        self._keep = keep
        self._record = _Record(
            pid=os.getpid(),
            host=socket.gethostname(),
            since=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            doing=doing,
            token=secrets.token_hex(4),
        )
        deadline = time.monotonic() + _UNKNOWN_HOLDER_S
        while not self._acquire():
            holder = _newest_holder(file)
            if holder is not None:
                raise BlockingIOError(refusal(str(holder)))
            # An unknown holder has just taken the lock and not written its name yet, or
            # has just died.
            if time.monotonic() > deadline:
                raise BlockingIOError(refusal("another process has been using it"))
            time.sleep(0.01)

    def close(self) -> None:
        """Releases the lock."""
        descriptor = self._descriptor
        self._descriptor = None
        if descriptor is None:
            return
        _held.discard(self)
        try:
            # A process that has opened the file and then gets the lock finds that the
            # file is gone, and tries again.
            with suppress(OSError):
                if self._shared and not _is_alone(descriptor):
                    records = _records(self._file)
                    others = [record for record in records if record != self._record]
                    _write_records(descriptor, others)
                elif not self._keep and self._is_at_its_path(descriptor):
                    self._file.unlink()
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _acquire(self) -> bool:
        """Takes the lock if it is free, and returns whether it was."""
        mode = fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX
        while True:
            descriptor = open_own(self._file, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                # Otherwise the previous holder has removed the file: try again.
                if self._is_at_its_path(descriptor):
                    self._add_record(descriptor)
                    self._descriptor = descriptor
                    _held.add(self)
                    return True
            except BlockingIOError:
                return False
            except OSError as error:
                reason = f"cannot be locked: {error.strerror}"
                if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    reason = "its filesystem has no file locks"
                raise OSError(error.errno, reason, os.fspath(self._file)) from error
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def _add_record(self, descriptor: int) -> None:
        """Writes the name of this process into the locked file.

        After an error, the file is deleted if nobody else needs it.
        """
        records = _records(self._file) if self._shared else []
        records.append(self._record)
        try:
            _write_records(descriptor, records)
        except OSError:
            if not self._keep and (not self._shared or _is_alone(descriptor)):
                self._file.unlink()
            raise

    def _is_at_its_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False


def lock_file(path: Path) -> Path:
    """Returns the path of the file that a process locks before it writes to ``path``."""
    return path.with_name(f".{path.name}.lock")


def path_lock(path: Path, needed_by: Path | None = None) -> FileLock:
    """Takes the lock of a process that writes to ``path``.

    With ``needed_by``, the lock is shared, to write a delta of ``path`` there.
    """
    if needed_by is None:
        return FileLock(
            lock_file(path),
            doing="writing it",
            refusal=lambda holder: (
                f"{path} cannot be written: {holder}: wait for that process, or use"
                " another path"
            ),
        )
    return FileLock(
        lock_file(path),
        doing=f"writing {needed_by}, which needs it,",
        refusal=lambda holder: (
            f"{path}, which {needed_by} needs, cannot be used: {holder}: wait for that"
            " process"
        ),
        shared=True,
    )


def _is_alone(descriptor: int) -> bool:
    """Returns whether no other process shares the lock.

    If another process does, this process loses the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class _Record:
    """A line of a lock's file: a holder of the lock."""

    pid: int
    host: str
    since: str
    doing: str
    token: str  # distinguishes the locks of one process

    def __str__(self) -> str:
        return (
            f"process {self.pid} on host {self.host} has been {self.doing} since"
            f" {self.since}"
        )

    def may_be_alive(self) -> bool:
        """Returns whether the process may be alive: a process on another host may."""
        try:
            with suppress(PermissionError):  # The process belongs to another user.
                if self.host == socket.gethostname():
                    os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


def _records(file: Path) -> list[_Record]:
    """Returns the holders of a lock.

    A process that took a shared lock while another one released it can be missing.
    """
    try:
        lines = file.read_bytes().splitlines()
        return [_Record(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError):
        return []


def _newest_holder(file: Path) -> _Record | None:
    """Returns the process that took the lock last and may be alive, if there is one."""
    for record in reversed(_records(file)):
        if record.may_be_alive():
            return record
    return None


def _write_records(descriptor: int, records: Sequence[_Record]) -> None:
    text = ""
    for record in records:
        line = json.dumps(asdict(record))
        text += line + "\n"
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _forget_all() -> None:
    """Closes the files in a forked process, without unlocking them.

    The parent process still holds the locks.
    """
    for lock in list(_held):
        assert lock._descriptor is not None
        os.close(lock._descriptor)
        lock._descriptor = None
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)


def staging_name(path: Path) -> str:
    """Returns a new, hidden name for what is being written to ``path``."""
    return f".{path.name}.saving-{secrets.token_hex(6)}"


def is_staging(path: Path) -> bool:
    """Returns whether the name of ``path`` was made by :func:`staging_name`."""
    return _STAGING.fullmatch(path.name) is not None


def leftovers(path: Path) -> Iterator[Path]:
    """Yields the files that dead processes have left beside ``path``.

    The caller holds the lock of ``path``, so that no living process writes to it.
    """
    beginning = f".{path.name}.saving-"
    for entry in path.parent.iterdir():
        is_of_path = entry.name.startswith(beginning) and is_staging(entry)
        if is_of_path and not entry.is_symlink():
            yield entry


@dataclass(frozen=True)
class FileInfo:
    """The size of a file in bytes and its XXH3 checksum.

    The checksum has the hexadecimal form that ``xxhsum -H2`` prints.
    """

    bytes: int
    xxh3_128: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileInfo:
    """Writes and syncs a safetensors file, and returns its size and checksum.

    The tensors share no memory.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(contiguous, path)
    # safetensors raises it in the place of an OSError.
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else errno.EIO
        reason = f"cannot be written: {os.strerror(number)}"
        raise OSError(number, reason, os.fspath(path)) from error
    # Files of safetensors 0.8 are readable by their owner only.
    mode_of_directory = path.parent.stat().st_mode
    path.chmod(mode_of_directory & 0o666)
    sync(path)
    return file_info(path)


def file_info(
    path: Path,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> FileInfo:
    """Reads a file, and returns its size and checksum.

    ``on_bytes`` is called with the size of each block.
    """
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    size = 0
    with naming(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
            on_bytes(count)
    return FileInfo(size, digest.hexdigest())


def check_file(
    path: Path,
    expected: FileInfo,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> None:
    """Refuses a file that is missing or has another size or another checksum.

    See :func:`file_info`.
    """
    # a pipe would never be opened, and a device never end
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no regular file")
    try:
        actual = file_info(path, on_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if actual.bytes != expected.bytes:
        raise CheckpointError(
            f"{path} is damaged: it has {actual.bytes} bytes instead of"
            f" {expected.bytes}"
        )
    if actual != expected:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")


def read_tensors(path: Path, expected: FileInfo) -> dict[str, Tensor]:
    """Checks a safetensors file and returns its tensors.

    Their memory is mapped from the file.
    """
    check_file(path, expected)
    return safetensors.torch.load_file(path)


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file with a name of this package, and syncs it to the disk.

    A file or a link there is replaced.

    Raises:
        OSError: The file cannot be written. The error names it.
    """
    path.unlink(missing_ok=True)
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with naming(path), os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_directory(path: Path) -> None:
    """Creates a directory and its parents, and syncs the new entries to the disk."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        # Otherwise another process has created the directory at the same time.
        if not path.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR,
                os.strerror(errno.ENOTDIR),
                os.fspath(path),
            ) from None
    sync(path.parent)


def check_path(path: Path) -> None:
    """Refuses the path of a file if it is a directory, or if its parent is none."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no directory")


@contextmanager
def whole_file(path: Path, *, keeps_mode: bool = False) -> Iterator[Path]:
    """Yields the path of an empty file for the body to write, and then renames it.

    ``path`` is locked meanwhile, and after an error it is as it was. Raises
    BlockingIOError if it is locked already. With ``keeps_mode``, the file has the mode
    of the one that it replaces.
    """
    check_path(path)
    beside = path.with_name(staging_name(path))
    try:
        with path_lock(path):
            for leftover in leftovers(path):
                leftover.unlink()
            try:
                beside.touch(exist_ok=False)
                mode = (path if keeps_mode else beside).stat().st_mode
                yield beside
                sync(beside)
                # Files of safetensors are readable by their owner only.
                beside.chmod(mode)
                beside.replace(path)
                sync(path.parent)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        if error.strerror:  # The error names the path, not the hidden file.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
