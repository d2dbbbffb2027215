"""Checks of the arguments of a client, and conversions of ids and rows to the types
that tables take.

Tests: tests/service/test_recstore_client.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

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
    """Checks a shape and returns its two numbers: the expected number of rows, and the
    dim.

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


def checked_init_func(
    name: str,
    part_policy: object,
    init_func: object,
    row_func: object,
    options: TableOptions,
) -> tuple[object, Any]:
    """Checks the functions that make initial rows, and returns ``part_policy`` and
    ``init_func``.

    ``init_data`` once had them in the opposite order: a function is never a
    ``part_policy``.

    Raises:
        TypeError, ValueError: A function is not one, both arguments are functions, or
            two functions, or a function and an initializer, define the initial rows.
    """
    if callable(part_policy):
        if callable(init_func):
            raise TypeError(
                f"table {name!r}: part_policy and init_func are both functions: pass"
                " init_func by its name only"
            )
        part_policy, init_func = init_func, part_policy
    makers = {"init_func": init_func, "row_func": row_func}
    for argument, function in makers.items():
        if function is not None and not callable(function):
            raise TypeError(
                f"table {name!r}: {argument} must be callable, got"
                f" {type(function).__name__}"
            )
    given = [argument for argument, function in makers.items() if function is not None]
    given += ["options.initializer"] if options.initializer is not None else []
    if len(given) > 1:
        raise ValueError(
            f"table {name!r}: {' and '.join(given[:2])} both define initial rows: give"
            " only one"
        )
    return part_policy, init_func


def checked_offset(
    name: str, base_offset: object, rows: int, is_gdata: object
) -> range:
    """Checks the first id of a table and returns the range of its ids.

    Raises:
        TypeError, ValueError: ``base_offset`` is not an int, or an id of the range does
            not fit 64 bits. Or ``is_gdata``, which is before it in the order of the
            arguments, is not a bool.
    """
    if not isinstance(is_gdata, bool):
        raise TypeError(
            f"table {name!r}: is_gdata must be a bool, got {type(is_gdata).__name__}:"
            " pass base_offset by its name"
        )
    if isinstance(base_offset, bool) or not isinstance(base_offset, int):
        raise TypeError(
            f"table {name!r}: base_offset must be an int, got"
            f" {type(base_offset).__name__}"
        )
    if not -(2**63) <= base_offset < 2**63:
        raise ValueError(
            f"table {name!r}: base_offset must fit 64 bits, got {base_offset}"
        )
    return range(base_offset, base_offset + rows)


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
    name: str, argument: str, rows: object, ids: Tensor, spec: TableSpec
) -> Tensor:
    """Checks the rows of ``ids`` and returns them as a contiguous tensor on the CPU.

    Rows of another real type than float32 and the table's dtype are cast to float32.

    Raises:
        TypeError, ValueError: ``rows`` is not an (N, dim) tensor of real numbers.
    """
    dtypes = sorted((torch.float32, value_dtype(spec.dtype)), key=str)
    if (
        isinstance(rows, Tensor)
        and not rows.is_meta
        and (rows.is_floating_point() or rows.dtype in _INTEGERS)
    ):
        rows = rows.to("cpu", rows.dtype if rows.dtype in dtypes else torch.float32)
    check_rows(rows, argument, (len(ids), spec.dim), dtypes, f"table {name!r}: ")
    return cast(Tensor, rows).detach().contiguous()


def split_by_range(
    ids: object, tables: Mapping[str, tuple[range, int]]
) -> list[tuple[str, Tensor, Tensor]]:
    """Splits the ids of a read without a table's name.

    Args:
        ids: (N,) of integers. The ids of all tables.
        tables: The range of ids and the dim of each table, by name.

    Returns:
        For each table with ids, the name, the ids, and their positions in ``ids``.

    Raises:
        TypeError, ValueError: ``ids`` are not (N,) integers. Or an id belongs to no
            table, to two tables or to a table of another dim than the other ids.
    """
    if not tables:
        raise ValueError(
            "prefetch(ids) without the name of a table needs a table of init_data"
        )
    fix = "name the table, prefetch(name, ids), or give each table its own base_offset"
    ids = checked_ids(next(iter(tables)), ids)
    taken = torch.zeros(len(ids), dtype=torch.bool)
    parts = []
    for name, (some, _) in tables.items():
        mine = (ids >= some.start) & (ids <= min(some.stop, 2**63) - 1)
        if bool((mine & taken).any()):
            raise ValueError(
                f"id {int(ids[mine & taken][0])} is in the ids of table {name!r} and of"
                f" another one: {fix}"
            )
        taken |= mine
        places = mine.nonzero()[:, 0]
        parts.append((name, ids[places], places))
    if not bool(taken.all()):
        raise ValueError(f"id {int(ids[~taken][0])} is in the ids of no table: {fix}")
    found = [part for part in parts if len(part[1])] or parts[:1]
    if len({tables[name][1] for name, *_ in found}) > 1:
        names = ", ".join(repr(name) for name, *_ in found)
        raise ValueError(
            f"tables {names} have rows of different dims: prefetch the ids of each"
            " table by its name"
        )
    return found
