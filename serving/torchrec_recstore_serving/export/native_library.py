"""Loads the native library of served models, which models with ``index="hash"`` need.

Tests: tests/serving/export/test_elsewhere.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch._library.fake_class_registry import register_fake_class

_FOLDER = Path(__file__).parents[1]


@cache
def load_library() -> Path:
    """Loads the library of models that were exported with ``index="hash"``.

    A second call does nothing.

    The library needs libtorch, and no Python, TorchRec or FBGEMM. A process without
    this package calls ``torch.ops.load_library`` with the path of the library, and a
    process in C++ calls ``dlopen``. The library fits the minor version of torch with
    which this package was built.

    Returns:
        The path of the library.

    Raises:
        ImportError: The library has not been built, or it was built with a different
            minor version of torch.
    """
    path = next(_FOLDER.glob("_serving*.so"), None)
    if path is None:
        raise ImportError(
            f"the library of served models is not in {_FOLDER}: run `make build` in the"
            " repository"
        )
    match = re.search(
        rb"recstore serving library for torch (\d+\.\d+)",
        path.read_bytes(),
    )
    built = match[1].decode() if match else "an unknown version"
    if built != ".".join(torch.__version__.split(".")[:2]):
        raise ImportError(
            f"{path.name} was built with torch {built}, and this is torch"
            f" {torch.__version__}: build the package with `pip install"
            ' --no-build-isolation ./serving`, or export with index="sorted", which'
            " needs no library"
        )
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    # The documented way to give torch.export a class of C++. The types of torch 2.13
    # know an older form of it.
    for name in ("ServedTable", "ServerTable"):
        register_fake_class(f"recstore::{name}", _TracedTable)  # type: ignore[arg-type]
    return path


class _TracedTable:
    """What ``torch.export`` calls in the place of a table of the library.

    It has no rows, and knows the shapes.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim

    @classmethod
    def __obj_unflatten__(cls, flattened: tuple[tuple[str, int]]) -> _TracedTable:
        return cls(**dict(flattened))

    def lookup(self, values: Tensor) -> Tensor:
        return values.new_empty((values.shape[0], self.dim), dtype=torch.float32)

    def pooled(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        mean: bool,
    ) -> Tensor:
        return values.new_empty((lengths.shape[0], self.dim), dtype=torch.float32)

    def contains(self, values: Tensor) -> Tensor:
        return values.new_empty((values.shape[0],), dtype=torch.bool)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Stands for the other methods.

        Torch logs a warning for each one that it does not find.
        """

        def refuse(*arguments: object) -> None:
            raise NotImplementedError(
                f"torch.export cannot trace {name}, which changes a served table or"
                " describes it"
            )

        return refuse
