"""Checks of the arguments of a client, and conversions of ids and rows to the types
that tables take.

Tests: tests/service/test_recstore_client.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from torchrec_recstore.options import TableOptions
from torchrec_recstore.row_types import value_dtype
from torchrec_recstore.store.arguments import check_ids, check_rows
from torchrec_recstore_service.wire.table_spec import TableSpec

_INTEGERS = (  # bool is not one
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def checked_name(name: object) -> str:
    """Checks and returns the name of a table.

    Raises:
        TypeError, ValueError: ``name`` is not a str, or is empty.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty")
    return name


def checked_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """Checks a shape, and returns the expected number of rows and the dim.

    Raises:
        TypeError, ValueError: ``shape`` is not two positive ints.
    """
    if not isinstance(shape, Sequence) or any(
        isinstance(n, bool) or not isinstance(n, int) for n in shape
    ):
        raise TypeError(
            f"table {name!r}: shape must be two ints, (rows, dim), got {shape!r}"
        )
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(
            f"table {name!r}: shape must be two ints above 0, (rows, dim), got"
            f" {tuple(shape)}"
        )
    return shape[0], shape[1]


def check_makers(
    name: str,
    init_func: object,
    row_func: object,
    options: TableOptions,
) -> None:
    """Checks the functions that make initial rows.

    Raises:
        TypeError, ValueError: A function is not one. Or two functions, or a function
            and an initializer, define the initial rows.
    """
    makers = {"init_func": init_func, "row_func": row_func}
    sources = []
    for argument, function in makers.items():
        if function is None:
            continue
        if not callable(function):
            raise TypeError(
                f"table {name!r}: {argument} must be callable, got"
                f" {type(function).__name__}"
            )
        sources.append(argument)
    if options.initializer is not None:
        sources.append("options.initializer")
    if len(sources) > 1:
        raise ValueError(
            f"table {name!r}: {' and '.join(sources[:2])} both define initial rows:"
            " give only one"
        )


def checked_offset(
    name: str,
    base_offset: object,
    row_count: int,
) -> range:
    """Checks the first id of a table and returns the range of its ids.

    Raises:
        TypeError, ValueError: ``base_offset`` is not an int, or does not fit 64 bits.
    """
    if isinstance(base_offset, bool) or not isinstance(base_offset, int):
        raise TypeError(
            f"table {name!r}: base_offset must be an int, got"
            f" {type(base_offset).__name__}"
        )
    if not -(2**63) <= base_offset < 2**63:
        raise ValueError(
            f"table {name!r}: base_offset must fit 64 bits, got {base_offset}"
        )
    return range(base_offset, base_offset + row_count)


def checked_ids(name: str, ids: object) -> Tensor:
    """Checks ids and returns them as a contiguous int64 tensor on the CPU.

    Ids of other integer types are cast.

    Raises:
        TypeError, ValueError: ``ids`` is not an (N,) tensor of integers.
    """
    if isinstance(ids, Tensor) and ids.dtype in _INTEGERS and not ids.is_meta:
        ids = ids.to("cpu", torch.int64)
    check_ids(ids, f"table {name!r}: ")
    return cast(Tensor, ids).detach().contiguous()


def checked_rows(
    name: str,
    argument: str,
    rows: object,
    ids: Tensor,
    spec: TableSpec,
) -> Tensor:
    """Checks the rows of ``ids`` and returns them as a contiguous tensor on the CPU.

    Rows of another real type than float32 and the table's dtype are cast to float32.

    Raises:
        TypeError, ValueError: ``rows`` is not an (N, dim) tensor of real numbers.
    """
    dtypes = sorted((torch.float32, value_dtype(spec.dtype)), key=str)
    if isinstance(rows, Tensor) and not rows.is_meta:
        is_real = rows.is_floating_point() or rows.dtype in _INTEGERS
        if is_real:
            dtype = rows.dtype if rows.dtype in dtypes else torch.float32
            rows = rows.to("cpu", dtype)
    check_rows(
        rows,
        argument,
        (len(ids), spec.dim),
        dtypes,
        f"table {name!r}: ",
    )
    return cast(Tensor, rows).detach().contiguous()
