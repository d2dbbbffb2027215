"""Initial rows that a user's function makes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

InitFunc = Callable[[tuple[int, int], torch.dtype], Tensor]
"""``(shape, dtype) -> tensor``: here always asked for one row."""

_SAMPLE = (0, 1, -1, 2**40)
_generator = threading.Lock()  # torch's default one is for one maker of rows at a time


class InitialRowMaker:
    """Makes the rows that ids of a table begin with.

    The row of an id is ``init_func((1, dim), dtype)`` with torch's default generator seeded by the table's name, its
    seed and the id, and put back afterwards: it depends on nothing else, not on the order of ids or the client that
    asks. It takes some tens of microseconds a row.

    Args:
        init_func: the user's.
        name: of the table.
        seed: of its options.
        dim: of its rows.
        dtype: likewise.

    Raises:
        TypeError, ValueError: what ``init_func`` gives is no row of the table, or another one each time.
    """

    def __init__(self, init_func: InitFunc, name: str, seed: int, dim: int, dtype: torch.dtype) -> None:
        self._init_func = init_func
        self._name = name
        self._seed = seed
        self._dim = dim
        self._dtype = dtype
        sample = torch.tensor(_SAMPLE, device="cpu")
        self.digest = _digest(self.rows(sample))
        """Of some rows, hexadecimal: tells one ``init_func`` from another, also between processes."""
        if self.digest != _digest(self.rows(sample)):
            raise ValueError(
                f"table {name!r}: init_func gives another row each time: it may depend on its arguments and on torch's "
                "default generator alone"
            )

    def rows(self, ids: Tensor) -> Tensor:
        """(n, dim) of the table's dtype: the initial rows of ``ids``, (n,) int64."""
        rows = torch.empty(len(ids), self._dim, dtype=self._dtype, device="cpu")  # whatever the default is
        with _generator, torch.no_grad(), torch.random.fork_rng(devices=[]):
            for place, number in enumerate(ids.tolist()):
                torch.default_generator.manual_seed(self._seed_of(number))
                rows[place] = self._checked(self._init_func((1, self._dim), self._dtype))
        return rows

    def _seed_of(self, number: int) -> int:
        text = f"{self._seed}/{number}/{self._name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _checked(self, row: object) -> Tensor:
        what = f"table {self._name!r}: init_func must return a floating-point tensor of shape (1, {self._dim})"
        if not isinstance(row, Tensor):
            raise TypeError(f"{what}, got {type(row).__name__}")
        if not row.is_floating_point():
            raise TypeError(f"{what}, got {row.dtype}")
        if tuple(row.shape) not in ((1, self._dim), (self._dim,)):
            raise ValueError(f"{what}, got {tuple(row.shape)}")
        return row.reshape(self._dim)


def _digest(rows: Tensor) -> str:
    return hashlib.blake2b(rows.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
