"""The kernels of a CUDA device in Triton's interpreter, which runs them on the host.

Triton reads ``TRITON_INTERPRET`` when it is imported. The interpreter therefore runs in
a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from tests.kernels.device_work import Case, check_case


class Interpreter:
    """Calls functions in a process in which Triton's kernels are interpreted."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of ``function(kernels, *arguments)``, with
        ``TritonKernels``.
        """
        return self._pool.submit(_with_kernels, function, arguments).result()

    def check(self, case: Case, steps: int = 2) -> None:
        """See :func:`check_case`."""
        self._pool.submit(_check, case, steps).result()


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    """Yields an interpreter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            pool.submit(_import_triton).result()
        yield Interpreter(pool)


def _import_triton() -> None:
    # The result of a call must not be kernels, whose module this process would import.
    _kernels()


def _kernels() -> Any:
    # In the process of the pool: this module must not import Triton.
    from torchrec_recstore.kernels.device_kernels import TritonKernels

    return TritonKernels()


def _with_kernels(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(_kernels(), *arguments)


def _check(case: Case, steps: int) -> None:
    check_case(case, _kernels(), steps)
