"""Files that may be open, and room on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torchrec_recstore.doctor.finding import Finding, size
from torchrec_recstore.doctor.machine import UNLIMITED, Machine

_FILES = 4096
_GOOD = 65536
_LITTLE = 1 << 30


def open_files(machine: Machine) -> Finding:
    """RocksDB keeps all files of its databases open, 64 MB each at first; a server has one for each connection."""
    soft, hard = machine.open_files
    if soft == UNLIMITED or soft >= _FILES:
        return Finding("open files", "ok", f"ulimit -n: {'unlimited' if soft == UNLIMITED else soft}")
    found = f"ulimit -n: {soft}, few for a large cold store in RocksDB and for a server of many clients"
    if hard == UNLIMITED or hard >= _GOOD:
        return Finding("open files", "warning", found, f"ulimit -n {_GOOD}")
    return Finding("open files", "warning", f"{found}; at most {hard}", f"sudo prlimit --pid $$ --nofile={_GOOD}")


def disk(folder: Path) -> Finding:
    """Room for checkpoints and cold rows."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("disk", "problem", f"{folder}: {error.strerror}", f"mkdir -p {folder}")
    if not folder.is_dir():
        return Finding("disk", "problem", f"{os.path.abspath(folder)} is no folder", "name one: --data DIR")
    found = f"{size(free)} free at {os.path.abspath(folder)}"
    if not os.access(folder, os.W_OK):
        return Finding("disk", "problem", f"{os.path.abspath(folder)} cannot be written", "name another: --data DIR")
    if free < _LITTLE:
        return Finding("disk", "warning", found, "name another disk for checkpoints and cold stores")
    return Finding("disk", "ok", found)
