"""A process that opens a cold store in RocksDB and kills itself, at a moment of its
life, with SIGKILL.

python -m tests.store.dying_store MOMENT DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchrec_recstore.options import RocksDBStore
from torchrec_recstore.store import open_cold_store

MOMENTS = ("unlocked", "written", "closing", "forked")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(
    function: Callable[..., Any], dies: Callable[[Path], bool]
) -> Callable[..., Any]:
    """Returns a function that does the same, but kills the process if ``dies`` returns
    True for its path.
    """

    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | Path) and dies(Path(path)):
            die()
        return function(path, *arguments, **named)

    return call


def main(moment: str, directory: str) -> None:
    if moment == "unlocked":
        os.open = deadly(
            os.open, lambda path: path.match("run-*/lock") and not path.exists()
        )
    store = open_cold_store(RocksDBStore(directory), name=f"{moment}/0", row_bytes=8)
    store.put(torch.arange(1000), torch.ones(1000, 8, dtype=torch.uint8))
    if moment == "closing":  # all files have gone, the directory has not
        os.rmdir = deadly(os.rmdir, lambda path: path.match("run-*"))
        store.close()
    if moment == "forked":  # the child stays, as a worker of a DataLoader does
        child = os.fork()
        if child == 0:
            # multiprocessing waits for the end of the child, too
            for file in os.listdir("/proc/self/fd"):
                with suppress(OSError):
                    if not os.readlink(f"/proc/self/fd/{file}").endswith("/lock"):
                        os.close(int(file))
            time.sleep(600)
        print(child, flush=True)
    if moment == "living":
        print("open", flush=True)
        time.sleep(600)
    die()


if __name__ == "__main__":
    main(*sys.argv[1:])
