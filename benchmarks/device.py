"""The CUDA device of this machine, and the copies in a trace of ``torch.profiler``.

The benchmark ``cuda.py`` and the tests of ``tests/cuda`` use this module.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEPS = "recstore steps"
"""The annotation of the steps in a trace. Waits are counted within it."""

Interval = tuple[float, float]


def no_device() -> str | None:
    """Returns the reason why nothing can run on CUDA here, or None."""
    return None if torch.cuda.is_available() else "no CUDA device"


def no_fbgemm() -> str | None:
    """Returns the reason why TorchRec's sharded modules cannot run on CUDA, or None."""
    reason = no_device()
    if reason is not None:
        return reason
    missing = "FBGEMM's CUDA build is not installed"
    try:
        import fbgemm_gpu  # noqa: F401  (it registers its operators)
        import torchrec  # noqa: F401
    except (ImportError, OSError):
        return missing
    has = torch._C._dispatch_has_kernel_for_dispatch_key(
        "fbgemm::asynchronous_complete_cumsum", "CUDA"
    )
    return None if has else missing


@dataclass(frozen=True)
class Copies:
    """The copies of one direction."""

    sizes: list[int]  # the bytes of each copy
    pageable: int  # the number of copies that use memory that is not pinned


@dataclass(frozen=True)
class Timeline:
    """The copies and waits in a trace.

    Args:
        up: The copies from the host to the device.
        down: The copies from the device to the host.
        overlap: The share of the time of the copies in which a kernel runs on the
            device. None: there are no copies. Kernels of NCCL are not counted.
        waits: How often the host waits for the device within the annotation
            :data:`STEPS`, by the name of the call, for example
            ``cudaEventSynchronize``.
    """

    up: Copies
    down: Copies
    overlap: float | None
    waits: dict[str, int]


def traced(steps: Callable[[], None], device: torch.device) -> Timeline:
    """Runs training steps under ``torch.profiler`` and returns their timeline.

    Args:
        steps: Runs the steps.
        device: The device of the steps. A trace of the CPU has no copies.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        with record_function(STEPS):
            steps()
        synchronize(device)  # after the annotation: it is no wait of the steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return timeline(trace["traceEvents"])


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timeline(events: list[dict[str, Any]]) -> Timeline:
    """Returns the timeline of the events of a Chrome trace.

    Source: the categories and names that Kineto writes (torch 2.13,
    ``kineto/libkineto/src/output_json.cpp``).
    """
    events = [event for event in events if event.get("ph") == "X"]
    up = []
    down = []
    kernels = []
    steps = []
    calls = []
    for event in events:
        category = event.get("cat")
        name = event.get("name", "")
        if category == "gpu_memcpy" and " HtoD " in name:
            up.append(event)
        elif category == "gpu_memcpy" and " DtoH " in name:
            down.append(event)
        elif category == "kernel" and "nccl" not in name.lower():
            kernels.append(_interval(event))
        elif category == "user_annotation" and name == STEPS:
            steps.append(_interval(event))
        elif category in ("cuda_runtime", "cuda_driver") and "Synchronize" in name:
            calls.append(event)
    waits: Counter[str] = Counter()
    for call in calls:
        moment = call["ts"]
        if any(begin <= moment <= end for begin, end in steps):
            waits[call["name"]] += 1
    copies = [_interval(event) for event in (*up, *down)]
    return Timeline(
        up=_copies(up),
        down=_copies(down),
        overlap=_overlap(copies, _union(kernels)),
        waits=dict(waits),
    )


def _overlap(copies: list[Interval], kernels: list[Interval]) -> float | None:
    """Returns the share of the time of the copies in which a kernel runs."""
    copying = sum(end - begin for begin, end in copies)
    if not copying:
        return None
    hidden = 0.0
    for copy_begin, copy_end in copies:
        for kernel_begin, kernel_end in kernels:
            begin = max(copy_begin, kernel_begin)
            end = min(copy_end, kernel_end)
            hidden += max(0.0, end - begin)
    return hidden / copying


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _copies(events: list[dict[str, Any]]) -> Copies:
    sizes = []
    pageable = 0
    for event in events:
        copied_bytes = event["args"]["bytes"]
        sizes.append(int(copied_bytes))
        pageable += "Pageable" in event["name"]
    return Copies(sizes, pageable)


def _union(intervals: list[Interval]) -> list[Interval]:
    """Returns the intervals in ascending order, with those that touch joined."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if not joined:
            joined.append((begin, end))
            continue
        last_begin, last_end = joined[-1]
        if begin <= last_end:
            joined[-1] = (last_begin, max(end, last_end))
        else:
            joined.append((begin, end))
    return joined
