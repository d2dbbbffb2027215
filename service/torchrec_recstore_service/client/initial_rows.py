"""Makes initial rows with a function of the user.

Tests: tests/service/test_recstore_client.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

InitFunc = Callable[[tuple[int, int], torch.dtype], Tensor]
"""A function ``(shape, dtype) -> tensor``. It is always called with a shape of one row."""

_SAMPLE = (0, 1, -1, 2**40)
_generator = threading.Lock()  # held while torch's default generator is seeded, so that rows are made one by one


class InitialRowMaker:
    """Makes the initial rows of a table with a function of the user.

    The initial row of an id is the result of ``init_func((1, dim), dtype)``. For this call, torch's default generator
    is seeded with a hash of the table's name, the table's seed and the id; its state is restored afterwards. So the row
    depends neither on the order of ids nor on the client. Making one row takes some tens of microseconds.

    Args:
        init_func: The function of the user.
        name: The name of the table.
        seed: The seed of the table's options.
        dim: The number of columns of a row.
        dtype: The dtype of a row.

    Raises:
        TypeError, ValueError: ``init_func`` does not return a row of the table, or returns another row in each call.
    """

    def __init__(self, init_func: InitFunc, name: str, seed: int, dim: int, dtype: torch.dtype) -> None:
        self._init_func = init_func
        self._name = name
        self._seed = seed
        self._dim = dim
        self._dtype = dtype
        sample = torch.tensor(_SAMPLE, device="cpu")
        self.digest = _digest(self.rows(sample))
        """A hexadecimal hash of a few rows. It identifies ``init_func``, also in other processes."""
        if self.digest != _digest(self.rows(sample)):
            raise ValueError(
                f"table {name!r}: init_func returns another row in each call: it may depend only on its arguments and "
                "on torch's default generator"
            )

    def rows(self, ids: Tensor) -> Tensor:
        """Returns the initial rows of ``ids``, (n,) int64, as (n, dim) in the table's dtype."""
        rows = torch.empty(len(ids), self._dim, dtype=self._dtype, device="cpu")  # not on torch's default device
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
