"""Signs exports and publications with a secret key (HMAC-SHA256).

Readers then know who has written them.

Tests: tests/serving/publish/test_signing.py.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from dataclasses import dataclass, field
from pathlib import Path

_MIN_CHARACTERS = 32
_MIN_DIFFERENT = 8


@dataclass(frozen=True)
class Key:
    """A secret key that writers and readers share.

    Args:
        path: The file of the key.
        secret: The content of the file without white space at its ends.
    """

    path: Path
    secret: bytes = field(repr=False)

    def begin(self, purpose: str) -> hmac.HMAC:
        """Begins a signature.

        What is signed as one thing is not a signature of another thing.
        """
        return hmac.new(self.secret, purpose.encode() + b"\0", hashlib.sha256)

    def sign(self, purpose: str, data: bytes) -> str:
        """Returns the signature of ``data`` in 64 hexadecimal digits."""
        signature = self.begin(purpose)
        signature.update(data)
        return signature.hexdigest()


def key_at(path: str | Path | None) -> Key | None:
    """Reads the file of a key. None: there is no key.

    Raises:
        TypeError: ``path`` is no path.
        OSError: The file cannot be read.
        ValueError: Other users can read the file, or the key is short.
    """
    if path is None:
        return None
    if not isinstance(path, str | Path):
        raise TypeError(f"key must be the path of a file, got {type(path).__name__}")
    path = Path(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(
            f"the key {path} can be read or changed by other users (mode {mode:04o}):"
            f" chmod 600 {path}"
        )
    secret = path.read_bytes().strip()
    if len(secret) < _MIN_CHARACTERS or len(set(secret)) < _MIN_DIFFERENT:
        raise ValueError(
            f"the key {path} must have at least {_MIN_CHARACTERS} characters,"
            f" {_MIN_DIFFERENT} of them different: openssl rand -hex 32 prints one"
        )
    return Key(path, secret)


def no_signature(name: object, key: Key) -> ValueError:
    """Returns the error of a file that was written without a key."""
    return ValueError(
        f"{name} has no signature, and the key {key.path} is required: write it with"
        " the same key"
    )


def wrong_signature(name: object, key: Key, contents: str) -> ValueError:
    """Returns the error of a file that was changed, or was signed with another key."""
    return damaged(
        f"{name} is not signed with the key {key.path}: it was changed, or was written"
        " with another key",
        contents,
    )


def damaged(message: str, contents: str) -> ValueError:
    """Returns the error of a file whose bytes are not those that were written.

    Args:
        message: The message, which names the file.
        contents: A checksum of the bytes, which becomes the attribute ``contents`` of
            the error.
    """
    error = ValueError(message)
    vars(error)["contents"] = contents
    return error
