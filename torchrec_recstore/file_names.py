"""Names that come from outside the process and become parts of paths, as types that
check them.

A client of a server, the metadata of a checkpoint or a publication can name anything:
``../victim``, a name with a NUL byte, a name of 4,096 characters. A function that joins
a name to a path takes a :class:`FileName`, never ``str``, so that mypy refuses a name
that nothing has checked. This module imports no torch.

Tests: tests/service/test_names_from_outside.py, tests/checkpoint/test_info.py.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

_Name = TypeVar("_Name", bound="FileName")


class FileName(str):
    """The name of a file or directory within a directory that is given already.

    It is not empty, neither ``.`` nor ``..``, and has neither a slash nor a NUL byte.
    It is valid UTF-8 of at most ``most_bytes`` bytes: file systems of Linux take 255.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is not such a name.
    """

    __slots__ = ()
    description: ClassVar[str] = "the name of a file"
    most_bytes: ClassVar[int] = 255

    def __new__(cls: type[_Name], name: str) -> _Name:
        """Checks the name."""
        if isinstance(name, cls):
            return name
        if not isinstance(name, str):
            raise TypeError(f"{cls.description} must be a string, got {name!r}")
        cls.check(name)
        return super().__new__(cls, name)

    @classmethod
    def check(cls, name: str) -> None:
        """Raises ValueError if ``name`` is not a name of this type."""
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(
                f"{cls.description} must be a plain name without directories, got"
                f" {shortened(name)}"
            )
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"{cls.description} must be valid UTF-8, got {shortened(name)}"
            ) from None
        if size > cls.most_bytes:
            raise ValueError(
                f"{cls.description} may have at most {cls.most_bytes} bytes, got"
                f" {size}: {shortened(name)}"
            )


def shortened(name: str) -> str:
    """Returns the repr of a name from outside for an error message, with at most 100 of
    its characters.
    """
    if len(name) <= 100:
        return repr(name)
    return f"{name[:100]!r} and {len(name) - 100} more characters"
