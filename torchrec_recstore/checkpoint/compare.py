"""Compares two checkpoints.

Tests: tests/commands/test_checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from torchrec_recstore.checkpoint.fold import FoldedTable, common_columns, together
from torchrec_recstore.checkpoint.info import DENSE, CheckpointInfo
from torchrec_recstore.checkpoint.reader import saved_state
from torchrec_recstore.encoding import encode
from torchrec_recstore.row_types import values
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.parts import STAMPS
from torchrec_recstore.store.table_state import no_sightings

_FACTS = ("dtype", "optimizer", "options", "steps", "optimizer_steps")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Difference:
    """The differences between two tables in numbers of rows, or between the dense parts
    in numbers of tensors.
    """

    both: int = 0
    added: int = 0  # only in the second checkpoint
    gone: int = 0  # only in the first checkpoint
    changed: int = 0  # in any bit of the weights, the optimizer state or the stamps
    # The largest absolute change by name of the tensor; for the dense part, that of all
    # tensors under "weight".
    largest: dict[str, float] = field(default_factory=dict)
    # The values of the other fields of TableInfo that differ, in the first and in the
    # second checkpoint.
    facts: dict[str, tuple[object, object]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.added or self.gone or self.changed or self.facts)


@dataclass(frozen=True)
class CheckpointDifference:
    """The differences between two checkpoints: of each table by name, of the other
    tensors, of the training state.
    """

    tables: Mapping[str, Difference]
    dense: Difference
    training_state: bool

    @property
    def equal(self) -> bool:
        """Whether both checkpoints load to the same state."""
        return (
            all(each.equal for each in (*self.tables.values(), self.dense))
            and not self.training_state
        )


def compare_chains(
    first: Sequence[CheckpointInfo],
    second: Sequence[CheckpointInfo],
    on_rows: Callable[[int], object] = lambda count: None,
) -> CheckpointDifference:
    """Compares the states that two checkpoints load to.

    Their split over ranks and files makes no difference.

    All files of both chains must have passed ``fold.check_files``. ``on_rows`` is
    called with the number of rows read from both since its last call. Raises ValueError
    if a table has different dims in the two checkpoints.
    """
    before, after = first[-1], second[-1]
    names = sorted({*before.tables, *after.tables})
    for name in names:
        dims = [
            info.tables[name].dim for info in (before, after) if name in info.tables
        ]
        if len(set(dims)) > 1:
            raise ValueError(
                f"table {name!r} is of dim {dims[0]} in {before.path} and of dim"
                f" {dims[1]} in {after.path}"
            )
    return CheckpointDifference(
        tables={name: _compare_tables(first, second, name, on_rows) for name in names},
        dense=_compare_dense(before, after),
        training_state=_differs(before.training_state, after.training_state),
    )


def _compare_tables(
    first: Sequence[CheckpointInfo],
    second: Sequence[CheckpointInfo],
    name: str,
    on_rows: Callable[[int], object],
) -> Difference:
    before, after = first[-1].tables.get(name), second[-1].tables.get(name)
    if before is None or after is None:
        return Difference(
            added=after.rows if after else 0, gone=before.rows if before else 0
        )
    pairs = {fact: (getattr(before, fact), getattr(after, fact)) for fact in _FACTS}
    facts = {fact: (a, b) for fact, (a, b) in pairs.items() if a != b} | _sightings(
        first[-1], second[-1], name
    )
    difference = Difference(facts=facts)
    columns = common_columns(name, [*first, *second])
    one, other = FoldedTable(first, name, columns), FoldedTable(second, name, columns)
    compared = [
        "weight",
        *(state for state in one.states if state in other.states),
        *STAMPS,
    ]
    none = torch.empty(0, dtype=torch.int64)
    for shards, other_shards in together(one, other):
        ids, other_ids = (
            parts[0].ids if parts else none for parts in (shards, other_shards)
        )
        common, other_common = among(ids, other_ids), among(other_ids, ids)
        picked, other_picked = (
            slice(None) if mask.all() else mask for mask in (common, other_common)
        )
        changed = torch.zeros(int(common.sum()), dtype=torch.bool)
        # A list is empty after the last row.
        for shard, other_shard in zip(shards, other_shards, strict=False):
            for key in compared:
                pair = shard.rows[key][picked], other_shard.rows[key][other_picked]
                if torch.uint8 in (pair[0].dtype, pair[1].dtype):
                    pair = values(pair[0]), values(pair[1])
                now, largest = _changes(*pair)
                changed |= now
                if key not in STAMPS:
                    _grow(difference.largest, key, largest)
        difference.both += len(changed)
        difference.added += int((~other_common).sum())
        difference.gone += int((~common).sum())
        difference.changed += int(changed.sum())
        on_rows(len(ids) + len(other_ids))
    return difference


def nonfinite_rows(chain: Sequence[CheckpointInfo], name: str) -> int:
    """Returns how many rows have a weight or state that is not finite.

    All files must have passed ``check_files``.
    """
    count = 0
    for shards in FoldedTable(chain, name):
        tensors = [
            tensor
            for shard in shards
            for key, tensor in shard.rows.items()
            if key not in STAMPS
        ]
        finite = [
            values(each).isfinite().view(len(each), -1).all(1) for each in tensors
        ]
        count += int((~torch.stack(finite).all(0)).sum())
    return count


def _sightings(
    before: CheckpointInfo, after: CheckpointInfo, name: str
) -> dict[str, tuple[object, object]]:
    """Returns the sums of the counts of admission if any count differs."""
    counted = (
        saved_state(info, name).sightings or no_sightings() for info in (before, after)
    )
    one, other = (
        sightings.take(sightings.ids.argsort(stable=True)) for sightings in counted
    )
    same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return (
        {} if same else {"sightings": (int(one.counts.sum()), int(other.counts.sum()))}
    )


def _compare_dense(before: CheckpointInfo, after: CheckpointInfo) -> Difference:
    one, other = (
        safetensors.torch.load_file(info.path / DENSE) if DENSE in info.files else {}
        for info in (before, after)
    )
    both = one.keys() & other.keys()
    difference = Difference(
        both=len(both), added=len(other.keys() - both), gone=len(one.keys() - both)
    )
    for name in sorted(both):
        if one[name].shape != other[name].shape:
            difference.changed += 1
            continue
        changed, largest = _changes(_as_row(one[name]), _as_row(other[name]))
        difference.changed += int(changed)
        _grow(difference.largest, "weight", largest)
    return difference


def _changes(one: Tensor, other: Tensor) -> tuple[Tensor, float]:
    """Returns which of N rows, (N,) or (N, columns), differ in any bit, (N,) bool, and
    the largest change or NaN.
    """
    if one.dtype == other.dtype:
        bits = _BITS[one.element_size()]
        differs = one.contiguous().view(bits) != other.contiguous().view(bits)
    else:
        differs = one.double() != other.double()
    changes = (one[differs].double() - other[differs].double()).abs()
    return differs.any(dim=1) if differs.dim() == 2 else differs, (
        float(changes.max()) if len(changes) else 0.0
    )


def _grow(largest: dict[str, float], key: str, change: float) -> None:
    # keeps NaN
    largest[key] = float(
        torch.tensor([largest.get(key, 0.0), change], dtype=torch.float64).max()
    )


def _differs(one: Any, other: Any) -> bool:
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    if encode(one, first) != encode(other, second):
        return True
    pairs = [(first[name], second[name]) for name in first]
    return any(
        a.dtype != b.dtype
        or a.shape != b.shape
        or bool(_changes(_as_row(a), _as_row(b))[0])
        for a, b in pairs
    )


def _as_row(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.flatten().unsqueeze(0)
