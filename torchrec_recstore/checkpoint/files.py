"""Files and directories: locked by path, written completely or not at all, and checked when they are read."""

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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

import safetensors.torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

_UNKNOWN_HOLDER_S = 1.0  # how long to wait for the name of a holder that has not written it yet

_held: WeakSet[FileLock] = WeakSet()


class FileLock:
    """A lock that one process holds, or that several share; also a context manager.

    The lock is an ``flock`` of a file. The system gives it up when the process that holds it ends, however it ends; a
    process that is forked meanwhile does not have it. The file tells others who holds the lock. On NFS the lock holds
    over hosts, unless the filesystem is mounted with ``nolock`` or ``local_lock``.

    Args:
        file: the lock's file, in a directory that exists. It is made where it is missing.
        doing: what this process does with the lock, for the error of others: "writing it".
        refusal: makes the message of the error out of the holder, "process 12 on host h has been writing it since
            2026-01-31T12:00:00Z".
        shared: whether others may have the lock as well, if they share it, too.
        keep: whether the file stays when the lock is given up.

    Raises:
        BlockingIOError: another process has the lock, or another part of this one.
        OSError: the file cannot be written, or its filesystem has no locks.
    """

    def __init__(
        self, file: Path, doing: str, refusal: Callable[[str], str], *, shared: bool = False, keep: bool = False
    ) -> None:
        self._descriptor: int | None = None
        self._file = file
        since = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._record = _Record(os.getpid(), socket.gethostname(), since, doing, secrets.token_hex(4))
        self._shared = shared
        self._keep = keep
        deadline = time.monotonic() + _UNKNOWN_HOLDER_S
        while not self._acquire():
            holder, known = _holder(file)
            # A holder that is not known is only beginning, or has just died.
            if known or time.monotonic() > deadline:
                raise BlockingIOError(refusal(holder))
            time.sleep(0.01)

    def close(self) -> None:
        """Gives up the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        _held.discard(self)
        try:
            # Whoever has opened the file by now, and waits for nothing but its lock, finds that the file is gone.
            with suppress(OSError):
                if self._shared and not _is_alone(descriptor):
                    _write_records(descriptor, [each for each in _records(self._file) if each != self._record])
                elif not self._keep and self._is_at_its_path(descriptor):
                    self._file.unlink()
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self) -> bool:
        """Takes the lock if it is free."""
        while True:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if self._is_at_its_path(descriptor):  # else whoever had it before has removed it
                    others = _records(self._file) if self._shared else []
                    _write_records(descriptor, [*others, self._record])
                    self._descriptor = descriptor
                    _held.add(self)
                    return True
            except BlockingIOError:
                return False
            except OSError as error:
                without = error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
                reason = "its filesystem has no file locks" if without else f"cannot be locked: {error.strerror}"
                raise OSError(error.errno, reason, os.fspath(self._file)) from error
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def _is_at_its_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False

    def _forget(self) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)  # not unlocked: the parent's is the same lock
        self._descriptor = None


def lock_file(path: Path) -> Path:
    """The file that is locked by whoever writes to ``path``."""
    return path.with_name(f".{path.name}.lock")


def path_lock(path: Path) -> FileLock:
    """The lock of whoever writes to ``path``, which :class:`FileLock` describes."""
    return FileLock(
        lock_file(path),
        "writing it",
        lambda holder: f"{path} cannot be written: {holder}: wait for that process, or use another path",
    )


def _is_alone(descriptor: int) -> bool:
    """Whether nobody else shares the lock; if somebody does, this process has given it up by asking."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class _Record:
    """A holder, as the file of the lock names it; ``token`` tells the locks of one process apart."""

    pid: int
    host: str
    since: str
    doing: str
    token: str

    def is_alive(self) -> bool:
        """Whether the process lives, as far as this host can tell."""
        try:
            if self.host == socket.gethostname():
                os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        return True


def _records(file: Path) -> list[_Record]:
    """The holders, the last one to take the lock last. Those that share it may miss one that came as another left."""
    try:
        return [_Record(**json.loads(line)) for line in file.read_bytes().splitlines()]
    except (OSError, ValueError, TypeError):
        return []


def _write_records(descriptor: int, records: Sequence[_Record]) -> None:
    text = "".join(json.dumps(asdict(record)) + "\n" for record in records)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _holder(file: Path) -> tuple[str, bool]:
    """Who holds a lock, in words, and whether that is known."""
    for each in reversed(_records(file)):
        if each.is_alive():
            return f"process {each.pid} on host {each.host} has been {each.doing} since {each.since}", True
    return "another process has been using it", False


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)


_STAGING = re.compile(r"\..+\.saving-[0-9a-f]{12}")


def staging_name(path: Path) -> str:
    """A name beside ``path`` that nobody else uses."""
    return f".{path.name}.saving-{secrets.token_hex(6)}"


def is_staging(path: Path) -> bool:
    """Whether :func:`staging_name` has given the name."""
    return _STAGING.fullmatch(path.name) is not None


def leftovers(path: Path) -> Iterator[Path]:
    """What is beside ``path`` under such names: of dead processes, unless a process has the lock of the path."""
    for entry in path.parent.iterdir():
        if entry.name.startswith(f".{path.name}.saving-") and is_staging(entry) and not entry.is_symlink():
            yield entry


_BLOCK = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint cannot be used: damaged, incomplete, or of another format; the message names the file."""


@dataclass(frozen=True)
class FileInfo:
    """Size and checksum of a file.

    Args:
        bytes: its size.
        xxh3_128: of its bytes, hexadecimal, as ``xxhsum -H2`` prints it.
    """

    bytes: int
    xxh3_128: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileInfo:
    """Writes a safetensors file that is on the disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    try:
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # what it makes of the system's errors
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, f"cannot be written: {os.strerror(number)}", os.fspath(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors 0.8 lets nobody else read
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_info(path)


def file_info(path: Path, on_bytes: Callable[[int], object] = lambda count: None) -> FileInfo:
    """Reads a file through.

    Args:
        path: the file.
        on_bytes: called after every block with its size.
    """
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    size = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
            on_bytes(count)
    return FileInfo(size, digest.hexdigest())


def check_file(path: Path, expected: FileInfo, on_bytes: Callable[[int], object] = lambda count: None) -> None:
    """Reads a file through and compares it with what it should be.

    Raises:
        CheckpointError: it is missing, or has another size or other bytes.
    """
    try:
        found = file_info(path, on_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if found.bytes != expected.bytes:
        raise CheckpointError(f"{path} is damaged: it has {found.bytes} bytes instead of {expected.bytes}")
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")


def read_tensors(path: Path, expected: FileInfo) -> dict[str, Tensor]:
    """The tensors of a safetensors file, after :func:`check_file`; they lie in the file until they are touched."""
    check_file(path, expected)
    tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    return tensors


def read_ids(path: Path) -> Tensor:
    """The ids of a file with rows, which is not checked.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            ids: Tensor = file.get_tensor("ids")
            return ids
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error


def sync_directory(path: Path) -> None:
    """Has the directory's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes a directory and its parents where they are missing, and has the new entries on the disk.

    Raises:
        NotADirectoryError: there is a file in the way.
        OSError: it cannot be made.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():  # else another process was faster
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path)) from None
    sync_directory(path.parent)


def check_path(path: Path) -> None:
    """Refuses a path that no file can be written to.

    Raises:
        FileNotFoundError, IsADirectoryError: the message names it.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no directory")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields an empty file beside ``path``, which its body writes, and renames it. The path is locked meanwhile.

    Raises:
        BlockingIOError: another process is writing to ``path``.
        OSError: it cannot be written; what was there is there still.
    """
    check_path(path)
    beside = path.with_name(staging_name(path))
    try:
        with path_lock(path):
            for rest in leftovers(path):  # of dead processes, since this one has the lock
                rest.unlink()
            try:
                beside.touch()
                mode = beside.stat().st_mode
                yield beside
                with beside.open("rb") as file:
                    os.fsync(file.fileno())
                beside.chmod(mode)  # those of safetensors are their owner's alone
                beside.replace(path)
                sync_directory(path.parent)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        if error.strerror:  # without the hidden file's name
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
