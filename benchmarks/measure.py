"""Functions that the benchmarks share: conditions, timings, lanes and JSON rows.

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

KEEP_BLOCKS = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""Environment variables by which malloc keeps large blocks."""
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "shipped": {},
    "kept": KEEP_BLOCKS,
    "avx2": {**KEEP_BLOCKS, "RECSTORE_ISA": "avx2"},
}
ROOT = Path(__file__).resolve().parent.parent

Timing = tuple[float, ...]
"""The timings of a step, in seconds."""
Side = Callable[[int], Timing]
"""A function of the step number that returns the timings of the step."""


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
        for line in run.stdout.splitlines():
            if line.startswith("{"):
                rows.append(json.loads(line))
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
    """Starts ``redis-server`` or ``valkey-server`` and yields its URL.

    It yields None if neither is on this machine.
    """
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "--port": str(port),
        "--bind": "127.0.0.1",
        "--save": "",
        "--dir": str(folder),
        "--logfile": str(folder / "redis.log"),
    }
    command = [program]
    for option, value in options.items():
        command += [option, value]
    server = subprocess.Popen(command)
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def anonymous_bytes() -> int:
    """Returns the resident memory of this process in bytes, without pages of files."""
    status = Path("/proc/self/status").read_text()
    _, _, value = status.partition("RssAnon:")
    kib = int(value.split()[0])
    return kib * 1024


def end_rank() -> NoReturn:
    """Ends the process of a rank together with those of all other ranks."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown sometimes aborts after all work is done.


def commit() -> str:
    """Returns the commit of the checkout, or the version of the installed package."""
    if not (ROOT / ".git").exists():
        return version("torchrec-recstore")
    command = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return git.stdout.strip()


def processor() -> str:
    """Returns the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def conditions() -> dict[str, Any]:
    """Returns the conditions that every row contains.

    They are commit or version, processor, torch, threads and lane.
    """
    return {
        "commit": commit(),
        "cpu": f"{processor()} x{os.cpu_count()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "lane": lane(),
    }


def emit(row: dict[str, Any]) -> None:
    """Prints a JSON row with its conditions."""
    print(json.dumps({**row, **conditions()}), flush=True)


def interleave(
    sides: dict[str, Side],
    steps: int,
    warm_up: int,
) -> dict[str, list[Timing]]:
    """Runs step ``i`` of every side, then step ``i + 1``, and so on.

    Returns:
        The timings of each side after the warm-up.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    for i in range(warm_up + steps):
        for name, side in sides.items():
            timing = side(i)
            if i >= warm_up:
                timings[name].append(timing)
    return timings


def step_seconds(timings: Sequence[Timing]) -> list[float]:
    """Returns the first timing of each step."""
    return [timing[0] for timing in timings]


def rates(timings: Sequence[Timing], count: int) -> list[float]:
    """Returns how much was done a second in each step, of ``count`` in a step."""
    return [count / seconds for seconds in step_seconds(timings)]


def ratios(numerators: Sequence[Timing], denominators: Sequence[Timing]) -> list[float]:
    """Returns the ratio of the first timings of each pair of steps."""
    numerator_s = step_seconds(numerators)
    denominator_s = step_seconds(denominators)
    pairs = zip(numerator_s, denominator_s, strict=True)
    return [numerator / denominator for numerator, denominator in pairs]


def spread(values: Sequence[float], scale: float = 1e3) -> dict[str, float]:
    """Returns the median and the 10th, 90th and 99th percentiles of values.

    They are multiplied by ``scale``. By default, seconds become milliseconds.
    """
    ordered = sorted(values)

    def percentile(percent: int) -> float:
        place = round(percent / 100 * (len(ordered) - 1))
        return round(ordered[place] * scale, 4)

    median = statistics.median(ordered)
    return {
        "median": round(median * scale, 4),
        "p10": percentile(10),
        "p90": percentile(90),
        "p99": percentile(99),
    }


def clock() -> float:
    """Returns the time of a monotonic clock in seconds."""
    return time.perf_counter()
