"""What both sides of the protocol agree on besides recstore.proto."""

from __future__ import annotations

import re

VERSION = "1"
VERSION_KEY = "recstore-protocol"
TOKEN_KEY = "authorization"
ERROR_KEY = "recstore-error"
"""In the trailing metadata of an error: its class in :data:`~torchrec_recstore.rpc.errors.REMOTE_ERRORS`."""
NO_INITIAL_ROW = "NoInitialRow"
"""There: an id has no row, and only the client's init_func can tell how it begins."""

PART_IDS = 1 << 16
PART_BYTES = 1 << 20
MESSAGE_BYTES = (1 << 26) + (1 << 20)
"""Of one part at most: a row is not split, may be longer than ``PART_BYTES``, and has at most 2**24 columns."""


def is_token(text: str) -> bool:
    """Whether a header can have it: printable ASCII characters without blanks."""
    return re.fullmatch("[!-~]+", text) is not None


def token_value(token: str) -> str:
    """What ``TOKEN_KEY`` has."""
    return f"Bearer {token}"


def rows_a_part(row_bytes: int) -> int:
    """How many rows go into one part."""
    return max(1, min(PART_IDS, PART_BYTES // max(1, row_bytes)))
