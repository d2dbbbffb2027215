"""Programs on the simulated device in a process of their own, because torch registers a
device once for each process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.processes import START_METHOD


def run_in_process(
    program: Callable[..., None], *arguments: Any, timeout_s: float = 280
) -> None:
    """Runs a function of a module in a new process, and asserts that it has ended
    without an error.
    """
    process = mp.get_context(START_METHOD).Process(target=program, args=arguments)
    process.start()
    process.join(timeout_s)
    assert process.exitcode == 0


def results_of(
    program: Callable[..., None],
    path: Path,
    *arguments: Any,
    timeout_s: float = 280,
) -> Any:
    """Runs a function in a new process, and returns what it has saved.

    The last argument of the function is the path to which it saves its results.
    """
    run_in_process(program, *arguments, str(path), timeout_s=timeout_s)
    return torch.load(path, weights_only=False)
