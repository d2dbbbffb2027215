"""Loads the native library of served models, which models with ``index="hash"`` need.

Tests: tests/serving/test_elsewhere.py.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent


@cache
def load_library() -> Path:
    """Loads the library of models that were exported with ``index="hash"``. A second call does nothing.

    The library needs libtorch, and no Python, TorchRec or FBGEMM. A process without this package calls
    ``torch.ops.load_library`` with the path of the library, and a process in C++ calls ``dlopen``. The library fits the
    minor version of torch with which this package was built.

    Returns:
        The path of the library.

    Raises:
        ImportError: The library has not been built, or it was built with a different minor version of torch.
    """
    path = next(_FOLDER.glob("_serving*.so"), None)
    if path is None:
        raise ImportError(f"the library of served models is not in {_FOLDER}: run `make build` in the repository")
    found = re.search(rb"recstore serving library for torch (\d+\.\d+)", path.read_bytes())
    built = found[1].decode() if found else "an unknown version"
    if built != ".".join(torch.__version__.split(".")[:2]):
        raise ImportError(
            f"{path.name} was built with torch {built}, and this is torch {torch.__version__}: build the package with "
            '`pip install --no-build-isolation ./serving`, or export with index="sorted", which needs no library'
        )
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    return path
