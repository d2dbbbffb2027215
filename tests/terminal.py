"""Runs a command whose stderr is a terminal, and returns the output."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence

ROWS, COLUMNS = 40, 120


def run_in_terminal(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> tuple[int, str, str]:
    """Returns the command's status, its stdout, and its stderr with all escape
    sequences.
    """
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    seen: list[bytes] = []

    def read() -> None:
        # Reading fails after the last process has closed the other end of the terminal.
        while True:
            try:
                seen.append(os.read(terminal, 1 << 16))
            except OSError:
                return

    environment = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=its_end, text=True, env=environment
    ) as process:
        os.close(its_end)
        reader = threading.Thread(target=read)
        reader.start()
        try:
            out = process.communicate(timeout=timeout_s)[0]
        finally:
            process.kill()
            reader.join(10)
            os.close(terminal)
    return process.returncode, out, b"".join(seen).decode()
