"""What is said of files that a newer version of this package has written."""

from __future__ import annotations

from collections.abc import Collection


def not_known(what: str) -> str:
    """The message of an error.

    Args:
        what: is in a file and not known, such as ``"metadata.json has the field 'x'"``.
    """
    from torchrec_recstore import __version__

    return (
        f"{what}, which torchrec_recstore {__version__} does not know: a newer version wrote it; install that: "
        "pip install --upgrade torchrec-recstore"
    )


def check_fields(where: str, found: Collection[str], known: Collection[str], needed: Collection[str] = ()) -> None:
    """Compares the fields of an entry of a file with those that this version knows.

    Args:
        where: names the entry in the message.
        found: names of its fields.
        known: names of the fields that it may have.
        needed: names of the fields that it must have.

    Raises:
        ValueError: it has a field that this version does not know, or lacks one that it must have.
    """
    for name in found:
        if name not in known:
            raise ValueError(not_known(f"{where} has the field {name!r}"))
    for name in needed:
        if name not in found:
            raise ValueError(f"{where} has no field {name!r}")
