"""The specification of a served table: ``init_data`` sends it, servers keep it, and checkpoints store it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from torchrec_recstore import ops
from torchrec_recstore.encoding import check_fields, decode, encode
from torchrec_recstore.optim import Optimizer
from torchrec_recstore.options import TableOptions


@dataclass(frozen=True)
class TableSpec:
    """All that decides what a table's rows are.

    Args:
        dim: columns.
        dtype: of the weights.
        optimizer: what an update does.
        options: without ``cold_store``, which is the business of who holds the rows.
        initial_rows: digest of some rows that the client's ``init_func`` makes; empty without one.
        shard: number of the server that holds this part of the table, and how many there are.
        temporary: whether saves leave the table out.
        lossless: whether no row may be given up for want of room or for age, because it cannot be made again: a server
            that is to bound such a table puts rows into its cold store, and without one refuses more of them.

    Raises:
        TypeError, ValueError: a value makes no sense; the message names it.
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
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"dim must be an int, got {type(self.dim).__name__}")
        if self.dim < 1:
            raise ValueError(f"dim must be at least 1, got {self.dim}")
        if self.dtype not in ops.ROW_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, ops.ROW_DTYPES))}, got {self.dtype}")
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"optimizer must be one of torchrec_recstore.optim, got {type(self.optimizer).__name__}")
        if not isinstance(self.options, TableOptions):
            raise TypeError(f"options must be TableOptions, got {type(self.options).__name__}")
        if self.options.cold_store is not None:
            raise ValueError("options.cold_store is chosen where the rows are held: with recstore serve --cold-store")

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(
            {
                "dim": self.dim,
                "dtype": str(self.dtype).removeprefix("torch."),
                "optimizer": encode(self.optimizer, {}),
                "options": encode(self.options, {}),
                "initial_rows": self.initial_rows,
                "shard": self.shard,
                "temporary": self.temporary,
                "lossless": self.lossless,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> TableSpec:
        """From JSON, which may come from anywhere.

        Raises:
            ValueError: it is no table's specification.
        """
        try:
            entry = json.loads(text)
            names = [field.name for field in fields(cls)]
            check_fields("it", entry, names, names)
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
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"no table's specification: {error}") from error

    def difference(self, other: TableSpec) -> str:
        """In which fields another one differs, for messages; empty where it does not."""
        return ", ".join(f"{name} is {own!r}, not {others!r}" for name, own, others in _differences("", self, other))


def _differences(name: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            inner = f"{name}.{field.name}" if name else field.name
            yield from _differences(inner, getattr(one, field.name), getattr(other, field.name))
    elif one != other:
        yield name, one, other
