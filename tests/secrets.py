"""Files with secrets, which servers accept only if other users cannot read them."""

from __future__ import annotations

from pathlib import Path


def write_secret(path: Path, text: str) -> Path:
    """Writes a file that only its owner can read. Returns its path."""
    path.touch(0o600)
    path.chmod(0o600)
    path.write_text(text)
    return path
