"""Makes initial rows with a function of the user: of a table at once, or by id.

Tests: tests/service/test_recstore_client.py, tests/service/test_seed_calls.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

InitFunc = Callable[[tuple[int, int], torch.dtype], Tensor]
"""A function ``(shape, dtype) -> tensor``."""

_SAMPLE = (0, 1, -1, 2**40)
_MOST_GIB = 4  # of the rows that a client keeps for one table
# held while torch's default generator is seeded, so that functions are called one by
# one
_generator = threading.Lock()


class WholeTable:
    """Makes the initial rows of the ids of a table's shape, by one call of a function,
    and keeps the rows.

    Row ``i`` of ``init_func((rows, dim), dtype)`` is the initial row of the ``i``-th
    id. For the call, torch's default generator is seeded with a hash of the table's
    name and seed, so that all clients get the same rows; its state is restored
    afterwards.

    Args:
        init_func: The function of the user.
        name: The name of the table.
        seed: The seed of the table's options.
        ids: The ids of the rows.
        dim: The number of columns of a row.
        dtype: The dtype of a row.

    Raises:
        TypeError, ValueError: ``init_func`` does not return the rows of the table, or
            the rows take more than 4 GiB.
    """

    def __init__(
        self,
        init_func: InitFunc,
        name: str,
        seed: int,
        ids: range,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._name = name
        self._first = ids.start
        self._last = min(ids.stop, 2**63) - 1
        shape = (ids.stop - ids.start, dim)
        gib = shape[0] * dim * dtype.itemsize / 2**30
        if gib > _MOST_GIB:
            raise ValueError(
                f"table {name!r}: init_func is called with the whole shape {shape},"
                f" whose rows take {gib:.1f} GiB, and at most {_MOST_GIB} GiB are made:"
                " pass row_func, which makes the row of an id, or options.initializer"
            )
        with _generator, torch.no_grad(), torch.random.fork_rng(devices=[]):
            _seed_for(f"{seed}/{name}")
            rows = _checked(
                init_func(shape, dtype),
                f"table {name!r}: init_func",
                shape,
                (shape,),
            )
        # a copy, because the function may return a tensor that is written to
        self._rows = rows.to("cpu", dtype, copy=True).contiguous()
        self.digest = _digest(self._rows, f"{ids.start}/{shape}")
        """A hexadecimal hash of the rows and of their ids.

        It identifies them, also in other processes.
        """

    def makes(self, ids: Tensor) -> Tensor:
        """Returns which ``ids``, (n,) int64, have an initial row: (n,) bool."""
        return (ids >= self._first) & (ids <= self._last)

    def rows(self, ids: Tensor) -> Tensor:
        """Returns the initial rows of ``ids``, (n,) int64: (n, dim) in the table's dtype.

        Raises:
            ValueError: An id is not in the table's shape.
        """
        has_row = self.makes(ids)
        if not bool(has_row.all()):
            first_id = int(ids[~has_row][0])
            raise ValueError(
                f"table {self._name!r}: id {first_id} has no row, and"
                f" init_func has made rows of the ids {self._first} to {self._last}"
                " only: push the row of the id, or pass row_func, which makes the row"
                " of any id"
            )
        return self._rows[ids - self._first]


class RowByRow:
    """Makes the initial row of any id with a function of the user.

    The initial row of an id is the result of ``row_func((1, dim), dtype)``. For this
    call, torch's default generator is seeded with a hash of the table's name, the
    table's seed and the id; its state is restored afterwards. So the row depends
    neither on the order of ids nor on the client. Making one row takes some tens of
    microseconds.

    Args:
        row_func: The function of the user.
        name: The name of the table.
        seed: The seed of the table's options.
        dim: The number of columns of a row.
        dtype: The dtype of a row.

    Raises:
        TypeError, ValueError: ``row_func`` does not return a row of the table, or
            returns another row in each call.
    """

    def __init__(
        self,
        row_func: InitFunc,
        name: str,
        seed: int,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._row_func = row_func
        self._name = name
        self._seed = seed
        self._dim = dim
        self._dtype = dtype
        sample = torch.tensor(_SAMPLE, device="cpu")
        self.digest = _digest(self.rows(sample))
        """A hexadecimal hash of a few rows.

        It identifies ``row_func``, also in other processes.
        """
        if self.digest != _digest(self.rows(sample)):
            raise ValueError(
                f"table {name!r}: row_func returns another row in each call: it may"
                " depend only on its arguments and on torch's default generator"
            )

    def makes(self, ids: Tensor) -> Tensor:
        """Returns (n,) bool, all True: any id has an initial row."""
        return torch.ones(len(ids), dtype=torch.bool)

    def rows(self, ids: Tensor) -> Tensor:
        """Returns the initial rows of ``ids``, (n,) int64: (n, dim) in the table's dtype."""
        # not on torch's default device
        rows = torch.empty(len(ids), self._dim, dtype=self._dtype, device="cpu")
        shape = (1, self._dim)
        with _generator, torch.no_grad(), torch.random.fork_rng(devices=[]):
            for position, row_id in enumerate(ids.tolist()):
                _seed_for(f"{self._seed}/{row_id}/{self._name}")
                row = self._row_func(shape, self._dtype)
                rows[position] = _checked(
                    row,
                    f"table {self._name!r}: row_func",
                    shape,
                    (shape, (self._dim,)),
                )
        return rows


def _seed_for(text: str) -> None:
    """Seeds torch's default generator with a hash of a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest, "little"))


def _checked(
    rows: object,
    function: str,
    shape: tuple[int, int],
    allowed: tuple[tuple[int, ...], ...],
) -> Tensor:
    """Returns the result of a function of the user, as a tensor of ``shape``.

    Raises:
        TypeError, ValueError: The result is not a floating-point tensor of an allowed
            shape.
    """
    rule = f"{function} must return a floating-point tensor of shape {shape}"
    if not isinstance(rows, Tensor):
        raise TypeError(f"{rule}, got {type(rows).__name__}")
    if not rows.is_floating_point():
        raise TypeError(f"{rule}, got {rows.dtype}")
    if tuple(rows.shape) not in allowed:
        raise ValueError(f"{rule}, got {tuple(rows.shape)}")
    return rows.reshape(shape)


def _digest(rows: Tensor, prefix: str = "") -> str:
    digest = hashlib.blake2b(prefix.encode(), digest_size=16)
    digest.update(rows.view(torch.uint8).numpy().data)
    return digest.hexdigest()
