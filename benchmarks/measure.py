"""Functions that the benchmarks share: conditions, interleaved timing, lanes and JSON
rows.

There are three lanes. ``shipped`` is a process with default settings. In ``kept``,
malloc is told to keep large blocks, so that the memory of outputs is not mapped afresh
in each step and only the kernels are compared. ``avx2`` is ``kept`` on a processor with
AVX-512 that is told to use AVX2. A lane is set by environment variables, so each lane
runs in a separate process.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**28),
}
ENVIRONMENTS = {"shipped": {}, "kept": KEPT, "avx2": {**KEPT, "RECSTORE_ISA": "avx2"}}
ROOT = Path(__file__).resolve().parent.parent


def lane() -> str:
    """Returns the lane of this process."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        return "shipped"
    return "avx2" if os.environ.get("RECSTORE_ISA") == "avx2" else "kept"


def run_lanes(
    script: str,
    lanes: Sequence[str],
    flags: Sequence[str] = (),
    errors: IO[str] | None = None,
) -> list[dict[str, Any]]:
    """Runs a benchmark in each lane and returns its JSON rows.

    Args:
        script: The path of the script.
        lanes: The names of the lanes.
        flags: The flags of the script. Default: no flags.
        errors: The file for the script's stderr. Default: None, the stderr of this
            process.

    Raises:
        subprocess.CalledProcessError: The script failed.
    """
    rows = []
    for name in lanes:
        environment = {**os.environ, **ENVIRONMENTS[name]}
        command = [sys.executable, script, *flags]
        run = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=True,
        )
        rows += [
            json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")
        ]
    return rows


def forget(folder: Path) -> None:
    """Drops the files of a folder, and of the folders in it, from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextmanager
def redis_server(folder: Path) -> Iterator[str | None]:
    """Starts ``redis-server`` or ``valkey-server`` and yields its URL, or None if none
    is on this machine.
    """
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    server = subprocess.Popen([*command, "--logfile", str(folder / "redis.log")])
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def anonymous_bytes() -> int:
    """Returns the resident memory of this process in bytes, without pages of files."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def end_rank() -> NoReturn:
    """Ends the process of a rank together with the others."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown sometimes aborts after all work is done.


def commit() -> str:
    """Returns the commit of the checkout, or the version of the installed package."""
    if (ROOT / ".git").exists():
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    return version("torchrec-recstore")


def conditions() -> dict[str, Any]:
    """Returns the conditions that every row contains: commit or version, processor,
    torch, threads and lane.
    """
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = [
        line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")
    ]
    return {
        "commit": commit(),
        "cpu": f"{names[0] if names else platform.processor()} x{os.cpu_count()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "lane": lane(),
    }


def emit(row: dict[str, Any]) -> None:
    """Prints a JSON row with its conditions."""
    print(json.dumps({**row, **conditions()}), flush=True)


def interleave(
    sides: dict[str, Callable[[int], tuple[float, ...]]], steps: int, warm_up: int
) -> dict[str, list[tuple[float, ...]]]:
    """Runs step ``i`` of every side, then step ``i + 1``, and so on, and returns the
    timings after the warm-up.

    A side is a function of the step number that returns the timings of the step in
    seconds.
    """
    timings: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
    for i in range(warm_up + steps):
        for name, side in sides.items():
            timing = side(i)
            if i >= warm_up:
                timings[name].append(timing)
    return timings


def spread(values: Sequence[float], scale: float = 1e3) -> dict[str, float]:
    """Returns the median and the 10th, 90th and 99th percentiles of ``values`` times
    ``scale``.

    With the default scale, seconds become milliseconds.
    """
    ordered = sorted(values)
    pick = [ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9, 0.99)]
    return {
        "median": round(statistics.median(ordered) * scale, 4),
        "p10": round(pick[0] * scale, 4),
        "p90": round(pick[1] * scale, 4),
        "p99": round(pick[2] * scale, 4),
    }


def clock() -> float:
    """Returns the time of a monotonic clock in seconds."""
    return time.perf_counter()
