"""Runs a command whose stderr is a terminal, and gives back what was written there."""

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
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = 120
) -> tuple[int, str, str]:
    """Its status, stdout, and all that went to the terminal, escape sequences included."""
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    seen: list[bytes] = []

    def read() -> None:
        # Reading fails when the last process has closed the other end.
        while True:
            try:
                seen.append(os.read(terminal, 1 << 16))
            except OSError:
                return

    environment = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its_end, text=True, env=environment) as process:
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
