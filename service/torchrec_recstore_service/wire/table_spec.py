"""The specification of a table on parameter servers: clients send it, servers keep it,
and checkpoints store it.

Tests: tests/service/test_server.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from torchrec_recstore.encoding import check_fields, decode, encode
from torchrec_recstore.optim import Optimizer, RowOptimizer
from torchrec_recstore.options import TableOptions, check_int, not_on_servers
from torchrec_recstore.row_types import MOST_COLUMNS, ROW_DTYPES

_LONGEST = 1 << 16
# the errors of a text that is not a specification
_INVALID = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True)
class TableSpec:
    """The specification of a table: everything on which the values of its rows depend.

    Args:
        dim: The number of columns.
        dtype: The data type of the weights.
        optimizer: The optimizer of updates.
        options: The options of the table, without ``cold_store``, which each server
            chooses for itself.
        initial_rows: A digest of some rows that the client's ``init_func`` creates.
            Default: "", for a client without ``init_func``.
        shard: The index of the server that stores this part of the table, and the
            number of servers. Default: (0, 1).
        temporary: Whether checkpoints leave the table out. Default: False.
        lossless: Whether no row may be evicted or expire for good, because it could not
            be created again. A server that limits the rows of a lossless table moves
            rows to its cold store. Without a cold store, it refuses rows beyond the
            limit. Default: False.

    Raises:
        TypeError: A field has the wrong type. The message names the field.
        ValueError: A field has an invalid value. The message names the field.
    """

    dim: int
    dtype: torch.dtype
    optimizer: Optimizer
    options: TableOptions
    initial_rows: str = ""
    shard: tuple[int, int] = (0, 1)
    temporary: bool = False
    lossless: bool = False

    def __post_init__(self) -> None:
        check_int("dim", self.dim, 1)
        if self.dim > MOST_COLUMNS:
            raise ValueError("dim must be at most 2**24")
        if self.dtype not in ROW_DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(map(str, ROW_DTYPES))}, got"
                f" {self.dtype}"
            )
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                "optimizer must be one of torchrec_recstore.optim, got"
                f" {type(self.optimizer).__name__}"
            )
        if isinstance(self.optimizer, RowOptimizer):
            raise ValueError(
                f"optimizer must not be the RowOptimizer {self.optimizer.name!r},"
                " because servers do not run code of clients: pass one of the other"
                " optimizers, or keep the table in the process"
            )
        if not isinstance(self.options, TableOptions):
            raise TypeError(
                f"options must be TableOptions, got {type(self.options).__name__}"
            )
        if self.options.servers is not None:
            raise ValueError(
                "options.servers must be None: the client names the servers"
            )
        if self.options.cold_store is not None:
            raise ValueError(
                "options.cold_store must be None: each server chooses it with recstore"
                " serve --cold-store"
            )
        reason = not_on_servers(self.options)
        if reason is not None:
            raise ValueError(f"options.{reason}")

    def to_json(self) -> str:
        """Returns the specification as JSON."""
        document = {
            "dim": self.dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "optimizer": encode(self.optimizer, {}),
            "options": encode(self.options, {}),
            "initial_rows": self.initial_rows,
            "shard": self.shard,
            "temporary": self.temporary,
            "lossless": self.lossless,
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> TableSpec:
        """Returns the specification of JSON text. The text may be invalid.

        Raises:
            ValueError: The text is not the specification of a table.
        """
        if len(text) > _LONGEST:
            raise ValueError(
                f"the specification of a table may have at most {_LONGEST} characters,"
                f" got {len(text)}"
            )
        try:
            entry = json.loads(text)
            names = [field.name for field in fields(cls)]
            check_fields("it", entry, names)
            shard, shards = entry["shard"]
            if not 0 <= shard < shards:
                raise ValueError(f"shard must be one of {shards}, got {shard}")
            return cls(
                dim=entry["dim"],
                dtype=getattr(torch, entry["dtype"]),
                optimizer=decode(entry["optimizer"], {}),
                options=decode(entry["options"], {}),
                initial_rows=str(entry["initial_rows"]),
                shard=(int(shard), int(shards)),
                temporary=bool(entry["temporary"]),
                lossless=bool(entry["lossless"]),
            )
        except _INVALID as error:
            raise ValueError(f"not the specification of a table: {error}") from error

    def difference(self, other: TableSpec) -> str:
        """Describes the fields in which another specification differs.

        Empty if there is no difference.
        """
        return ", ".join(
            f"{name} is {value!r}, not {other_value!r}"
            for name, value, other_value in _differences("", self, other)
        )


def _differences(name: str, value: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name of each field in which two values differ, and its values."""
    if is_dataclass(value) and type(value) is type(other):
        for field in fields(value):
            inner = f"{name}.{field.name}" if name else field.name
            yield from _differences(
                inner,
                getattr(value, field.name),
                getattr(other, field.name),
            )
    elif value != other:
        yield name, value, other
