"""Files that this process writes at names that another user may guess, in folders that
all users may write.

In a folder with the sticky bit, such as ``/tmp`` and ``/dev/shm``, another user can
create an entry first: a folder of his own, in which he can replace all files later, or
a symbolic link to a file of this user. Files of one process alone have random names and
are made exclusively (``tempfile``, ``memfd_create``). This module is for the other
ones: locks, and the directories of cold stores, checkpoints and servers. It imports no
torch.

An archive that was unpacked can leave a link at such a name, too. A lock that is taken
through it empties a file elsewhere, and a directory that is deleted through it loses
files elsewhere. Links that a user makes, to a data directory or to a checkpoint, are
followed as everywhere.

Tests: tests/test_ownership.py, tests/outside/test_links.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

_SHARED = stat.S_ISVTX | stat.S_IWOTH


def refuse_foreign(path: str | Path) -> None:
    """Refuses a path of which a part was made by another user in a folder that all
    users may write.

    The user may be that of this process, root, the owner of the folder, or one that
    ``RECSTORE_TRUSTED_USERS`` names: numbers with commas between. A mount point may
    belong to anybody, because only root can mount there. Where a filesystem gives the
    files of this process to another user, as NFS with root squash does, that user is
    trusted.

    Args:
        path: A path to which this process writes. It need not exist.

    Raises:
        PermissionError: Another user can change what is written there. The error names
            the part.
    """
    absolute = Path(path).absolute()
    real = Path(os.path.realpath(absolute))
    for part in dict.fromkeys([absolute, *absolute.parents, real, *real.parents]):
        folder = part.parent
        try:
            of_part = part.lstat()
            of_folder = folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not _is_foreign(of_part, of_folder):
            continue
        is_mount = not part.is_symlink() and _is_mount(part)
        if not is_mount and not _is_squashed(folder, of_part.st_uid):
            raise _foreign(part, of_part)


def _is_foreign(of_entry: os.stat_result, of_folder: os.stat_result) -> bool:
    """Returns whether an entry of a folder that all users may write was made by another
    user.
    """
    is_shared = of_folder.st_mode & _SHARED == _SHARED
    if not is_shared:
        return False
    trusted_users = [os.geteuid(), 0, of_folder.st_uid, *_trusted_users()]
    return of_entry.st_uid not in trusted_users


def _trusted_users() -> list[int]:
    numbers = os.environ.get("RECSTORE_TRUSTED_USERS", "").split(",")
    return [int(number) for number in numbers if number.strip().isdecimal()]


def _is_mount(path: Path) -> bool:
    """Returns whether a path is a mount point.

    ``os.path.ismount`` misses a part of the same filesystem.
    """
    if os.path.ismount(path):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    # proc_pid_mountinfo(5): the fifth field is the mount point, in which a space is
    # \\040 and a backslash is \\134.
    mount_points = {os.fsdecode(line.split()[4]) for line in lines}
    escaped_path = os.fspath(path).replace("\\", "\\134").replace(" ", "\\040")
    return escaped_path in mount_points


def _is_squashed(folder: Path, user: int) -> bool:
    """Returns whether a file that this process makes in a folder belongs to another
    user, who is ``user``.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid == user
    except OSError:
        return False


def _foreign(path: Path, status: os.stat_result) -> PermissionError:
    return PermissionError(
        errno.EPERM,
        f"belongs to user {status.st_uid}, who can change what this process writes"
        f" there, because all users may write {path.parent}: use a path that only user"
        f" {os.geteuid()} may write, or set RECSTORE_TRUSTED_USERS={status.st_uid} if"
        " you trust that user",
        os.fspath(path),
    )


def open_own(
    path: str | Path,
    flags: int,
    mode: int = 0o666,
) -> int:
    """Opens or creates a file at a name that another user may guess.

    Returns the file descriptor.

    Args:
        path: The path of the file.
        flags: The flags of ``os.open``.
        mode: The mode of a file that is created. Default: 0o666.

    Raises:
        PermissionError: The path is no file; or it is opened to be written, and has
            several names or was made by another user. See refuse_foreign.
        OSError: The file is a link, or it cannot be opened.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    if writes:
        refuse_foreign(path)
    try:
        descriptor = os.open(
            path,
            flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            mode,
        )
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _link_error(path) from None
    try:
        _check_opened(
            Path(path),
            os.fstat(descriptor),
            writes=writes,
            is_new=bool(flags & os.O_EXCL),
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_opened(
    path: Path,
    status: os.stat_result,
    *,
    writes: bool,
    is_new: bool,
) -> None:
    """Refuses an open file that is no file or has another name, or that another user
    has made since the first check.
    """
    is_foreign = writes and not is_new and _is_foreign(status, path.parent.stat())
    if is_foreign and not _is_squashed(path.parent, status.st_uid):
        raise _foreign(path, status)
    if not stat.S_ISREG(status.st_mode):
        reason = "is no file, and a file is needed: delete it, or use another path"
        raise PermissionError(errno.EPERM, reason, os.fspath(path))
    if writes and status.st_nlink > 1:
        reason = (
            "has another name, too, and a file with one name is needed: delete it, or"
            " use another path"
        )
        raise PermissionError(errno.EPERM, reason, os.fspath(path))


def refuse_link(path: str | Path) -> None:
    """Raises OSError if there is a link at ``path``."""
    if os.path.islink(path):
        raise _link_error(path)


def refuse_links_below(directory: str | Path) -> None:
    """Raises OSError if a directory is a link, or has one at any depth.

    The directory need not exist.
    """
    refuse_link(directory)
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            refuse_link(os.path.join(folder, name))


def remove(path: str | Path) -> None:
    """Deletes a file, a link or a directory with all of its files.

    What a link names stays. Errors are ignored.
    """
    try:
        is_directory = os.path.isdir(path) and not os.path.islink(path)
        if is_directory:
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        pass


def _link_error(path: str | Path) -> OSError:
    return OSError(
        errno.ELOOP,
        "is a link, which this package never makes: delete it",
        os.fspath(path),
    )
