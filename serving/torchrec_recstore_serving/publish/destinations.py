"""Opens the place of publications that a path or a URL names.

Tests: tests/serving/publish/test_publisher.py.
"""

from __future__ import annotations

from pathlib import Path

from torchrec_recstore.installing import install
from torchrec_recstore_serving.export.signing import Key
from torchrec_recstore_serving.publish.publications import (
    DirectoryPublications,
    Publications,
)

_SCHEMES = ("redis", "rediss", "unix")


def publications_at(place: str | Path, key: Key | None = None) -> Publications:
    """Opens a place of publications.

    Args:
        place: The path of a directory, or ``redis://host:port/db?stream=name``. The
            schemes ``rediss://`` and ``unix://`` are accepted too.
        key: The key with which publications are signed, and which a follower requires.
            Default: None.

    Raises:
        TypeError, ValueError: ``place`` is neither of them.
        ImportError: The package ``redis`` is missing.
    """
    if not isinstance(place, str | Path):
        raise TypeError(
            "the place must be the path of a directory or the URL of a stream, got"
            f" {place!r}"
        )
    scheme, separator, _ = str(place).partition("://")
    if not separator:
        return DirectoryPublications(Path(place), key)
    if scheme not in _SCHEMES:
        raise ValueError(
            "a place of publications is a directory, or"
            f" redis://host:port/db?stream=name, got {scheme}://"
        )
    try:
        from torchrec_recstore_serving.publish.redis_publications import (
            RedisPublications,
        )
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is missing: {install('redis')}") from error
    return RedisPublications(str(place), key)
