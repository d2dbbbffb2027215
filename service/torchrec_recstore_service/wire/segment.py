"""The memory that a server and a client on one host share.

Tests: tests/service/test_shared_memory.py.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

SEGMENT_BYTES = 1 << 27
"""The size of a segment. Only the pages that calls have used take memory."""
MESSAGE_BYTES = 1 << 16
"""The largest size of a message on the socket."""
_ALIGNMENT = 64


def is_available() -> bool:
    """Returns whether processes of this system can share memory in this way.

    It needs Linux.
    """
    return (
        hasattr(os, "memfd_create")
        and hasattr(socket, "SO_PEERCRED")
        and hasattr(fcntl, "F_ADD_SEALS")
    )


def is_same_user(peer: socket.socket) -> bool:
    """Returns whether the process at the other end of a Unix socket runs as the user of
    this process.
    """
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little") == os.geteuid()


class Segment:
    """A mapped segment of memory.

    The memory is unmapped when nothing refers to it any more.

    Args:
        file: The file descriptor of the memory. The caller closes it.
        size: The size in bytes.
    """

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self.bytes: Tensor = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        """(size,) uint8. The memory."""
        # the same; a part of an array is made faster than one of a tensor
        self.array = self.bytes.numpy()

    def arrays(self, sizes: Sequence[int]) -> list[Tensor]:
        """Returns the arrays of ``sizes`` bytes, (size,) uint8 each, without a copy.

        Raises:
            ValueError: The arrays do not fit into the segment.
        """
        arrays = []
        end = 0
        for size in sizes:
            arrays.append(self.bytes[end : end + size])
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self.size:
            raise ValueError(
                f"{end} bytes do not fit into the {self.size} bytes of the shared"
                " memory"
            )
        return arrays
