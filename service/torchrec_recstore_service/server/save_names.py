"""The names that clients and other servers give to saves and their files, as types that
check them.

Tests: tests/service/test_names_from_outside.py.
"""

from __future__ import annotations

import re
from typing import ClassVar

from torchrec_recstore.file_names import FileName, shortened

_SAVE_ID = re.compile(r"[0-9A-Za-z]{1,64}")


class SaveId(FileName):
    """The id of a save, which all of its parts have: 1 to 64 letters and digits."""

    __slots__ = ()
    description: ClassVar[str] = "the id of a save"

    @classmethod
    def check(cls, name: str) -> None:
        """See :meth:`FileName.check`."""
        if not _SAVE_ID.fullmatch(name):
            raise ValueError(
                "a save needs an id of at most 64 letters and digits, got"
                f" {shortened(name)}"
            )


class SaveName(FileName):
    """The name of a save, and of its directory in a server's data directory.

    It does not begin with a dot, and it is not the name of a file of the server. It has
    at most 200 bytes, because hidden names that are made of it are longer.
    """

    __slots__ = ()
    description: ClassVar[str] = "the name of a checkpoint on a server"
    most_bytes: ClassVar[int] = 200
    reserved: ClassVar[frozenset[str]] = frozenset({"server.json", "set.json", "lock"})

    @classmethod
    def check(cls, name: str) -> None:
        """See :meth:`FileName.check`."""
        super().check(name)
        if name.startswith(".") or name in cls.reserved:
            raise ValueError(
                "on a server, save and load take a plain name below its data"
                f" directory, got {name!r}"
            )


class SavedFileName(FileName):
    """The name of a file of a save.

    It may begin with a dot, because names of tables do.
    """

    __slots__ = ()
    description: ClassVar[str] = "the name of a file of a save"
