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

from torchrec_recstore.checkpoint.fold import (
    FoldedTable,
    common_columns,
    count_nonfinite,
    together,
)
from torchrec_recstore.checkpoint.info import DENSE, CheckpointInfo
from torchrec_recstore.checkpoint.reader import saved_state
from torchrec_recstore.encoding import encode
from torchrec_recstore.row_types import values
from torchrec_recstore.store import Part
from torchrec_recstore.store.arguments import among
from torchrec_recstore.store.parts import STAMPS
from torchrec_recstore.store.table_state import Sightings, no_sightings

_FACTS = ("dtype", "optimizer", "options", "steps", "optimizer_steps")
_BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}


@dataclass
class Difference:
    """The differences between two tables, or between two dense parts.

    The numbers are those of rows, and of the tensors of the dense parts.
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
        has_changed = self.added or self.gone or self.changed or self.facts
        return not has_changed


@dataclass(frozen=True)
class CheckpointDifference:
    """The differences between two checkpoints.

    They are those of each table by name, of the other tensors, and of the training
    state.
    """

    tables: Mapping[str, Difference]
    dense: Difference
    training_state: bool

    @property
    def equal(self) -> bool:
        """Whether both checkpoints load to the same state."""
        differences = [*self.tables.values(), self.dense]
        has_equal_parts = all(difference.equal for difference in differences)
        return has_equal_parts and not self.training_state


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
    first_info = first[-1]
    second_info = second[-1]
    for name in sorted(first_info.tables.keys() & second_info.tables.keys()):
        first_dim = first_info.tables[name].dim
        second_dim = second_info.tables[name].dim
        if first_dim != second_dim:
            raise ValueError(
                f"table {name!r} is of dim {first_dim} in {first_info.path} and of dim"
                f" {second_dim} in {second_info.path}"
            )
    tables = {}
    for name in sorted({*first_info.tables, *second_info.tables}):
        tables[name] = _compare_tables(first, second, name, on_rows)

    dense = _compare_dense(first_info, second_info)
    training_state = _differs(first_info.training_state, second_info.training_state)
    return CheckpointDifference(
        tables=tables,
        dense=dense,
        training_state=training_state,
    )


def _compare_tables(
    first: Sequence[CheckpointInfo],
    second: Sequence[CheckpointInfo],
    name: str,
    on_rows: Callable[[int], object],
) -> Difference:
    first_info = first[-1].tables.get(name)
    second_info = second[-1].tables.get(name)
    if first_info is None or second_info is None:
        added = 0 if second_info is None else second_info.rows
        gone = 0 if first_info is None else first_info.rows
        return Difference(added=added, gone=gone)

    facts: dict[str, tuple[object, object]] = {}
    for fact in _FACTS:
        first_value = getattr(first_info, fact)
        second_value = getattr(second_info, fact)
        if first_value != second_value:
            facts[fact] = (first_value, second_value)
    facts |= _sightings(first[-1], second[-1], name)
    difference = Difference(facts=facts)

    columns = common_columns(name, [*first, *second])
    first_table = FoldedTable(first, name, columns)
    second_table = FoldedTable(second, name, columns)
    states = [state for state in first_table.states if state in second_table.states]
    keys = ["weight", *states, *STAMPS]
    for first_parts, second_parts in together(first_table, second_table):
        _compare_windows(first_parts, second_parts, keys, difference)
        first_rows = len(_ids(first_parts))
        second_rows = len(_ids(second_parts))
        on_rows(first_rows + second_rows)
    return difference


def _ids(parts: Sequence[Part]) -> Tensor:
    """Returns the ids of a window of rows, which has no part after the last row."""
    if not parts:
        return torch.empty(0, dtype=torch.int64)
    return parts[0].ids


def _compare_windows(
    first: Sequence[Part],
    second: Sequence[Part],
    keys: Sequence[str],
    difference: Difference,
) -> None:
    """Adds the differences between the rows of a range of ids in two tables.

    The windows have a part for each range of columns, or are empty.
    """
    first_ids = _ids(first)
    second_ids = _ids(second)
    in_second = among(first_ids, second_ids)
    in_first = among(second_ids, first_ids)

    # A slice does not copy the rows.
    first_rows = slice(None) if in_second.all() else in_second
    second_rows = slice(None) if in_first.all() else in_first
    changed = torch.zeros(int(in_second.sum()), dtype=torch.bool)
    for first_part, second_part in zip(first, second, strict=False):
        for key in keys:
            first_values = first_part.rows[key][first_rows]
            second_values = second_part.rows[key][second_rows]
            if torch.uint8 in (first_values.dtype, second_values.dtype):
                first_values = values(first_values)
                second_values = values(second_values)
            differs, largest = _changes(first_values, second_values)
            changed |= differs
            if key not in STAMPS:
                _grow(difference.largest, key, largest)

    difference.both += len(changed)
    difference.added += int((~in_first).sum())
    difference.gone += int((~in_second).sum())
    difference.changed += int(changed.sum())


def nonfinite_rows(chain: Sequence[CheckpointInfo], name: str) -> int:
    """Returns how many rows have a weight or state that is not finite.

    All files must have passed ``check_files``.
    """
    count = 0
    for parts in FoldedTable(chain, name):
        if parts:
            count += count_nonfinite(parts)
    return count


def _sightings(
    first: CheckpointInfo,
    second: CheckpointInfo,
    name: str,
) -> dict[str, tuple[object, object]]:
    """Returns the sums of the counts of admission if any count differs."""
    first_counts = _ordered_sightings(first, name)
    second_counts = _ordered_sightings(second, name)
    for first_tensor, second_tensor in zip(first_counts, second_counts, strict=True):
        if not torch.equal(first_tensor, second_tensor):
            first_sum = int(first_counts.counts.sum())
            second_sum = int(second_counts.counts.sum())
            return {"sightings": (first_sum, second_sum)}
    return {}


def _ordered_sightings(info: CheckpointInfo, name: str) -> Sightings:
    sightings = saved_state(info, name).sightings or no_sightings()
    order = sightings.ids.argsort(stable=True)
    return sightings.take(order)


def _compare_dense(first: CheckpointInfo, second: CheckpointInfo) -> Difference:
    first_tensors = _dense_tensors(first)
    second_tensors = _dense_tensors(second)
    common = first_tensors.keys() & second_tensors.keys()
    difference = Difference(
        both=len(common),
        added=len(second_tensors.keys() - common),
        gone=len(first_tensors.keys() - common),
    )
    for name in sorted(common):
        first_tensor = first_tensors[name]
        second_tensor = second_tensors[name]
        if first_tensor.shape != second_tensor.shape:
            difference.changed += 1
            continue
        changed, largest = _changes(_as_row(first_tensor), _as_row(second_tensor))
        difference.changed += int(changed)
        _grow(difference.largest, "weight", largest)
    return difference


def _dense_tensors(info: CheckpointInfo) -> dict[str, Tensor]:
    if DENSE not in info.files:
        return {}
    return safetensors.torch.load_file(info.path / DENSE)


def _changes(first: Tensor, second: Tensor) -> tuple[Tensor, float]:
    """Returns which of N rows differ in any bit, (N,) bool, and the largest change.

    The rows are (N,) or (N, columns). The largest change can be NaN.
    """
    if first.dtype == second.dtype:
        bits = _BITS[first.element_size()]
        first_bits = first.contiguous().view(bits)
        second_bits = second.contiguous().view(bits)
        differs = first_bits != second_bits
    else:
        differs = first.double() != second.double()

    before = first[differs].double()
    after = second[differs].double()
    changes = (before - after).abs()
    largest = 0.0
    if len(changes):
        largest = float(changes.max())
    if differs.dim() == 2:
        differs = differs.any(dim=1)
    return differs, largest


def _grow(
    largest: dict[str, float],
    key: str,
    change: float,
) -> None:
    """Keeps the larger one of the changes; NaN is larger than any number."""
    earlier_change = largest.get(key, 0.0)
    changes = torch.tensor([earlier_change, change], dtype=torch.float64)
    largest[key] = float(changes.max())


def _differs(first: Any, second: Any) -> bool:
    """Returns whether two training states differ."""
    first_tensors: dict[str, Tensor] = {}
    second_tensors: dict[str, Tensor] = {}
    if encode(first, first_tensors) != encode(second, second_tensors):
        return True
    for name, first_tensor in first_tensors.items():
        second_tensor = second_tensors[name]
        has_same_dtype = first_tensor.dtype == second_tensor.dtype
        has_same_shape = first_tensor.shape == second_tensor.shape
        if not has_same_dtype or not has_same_shape:
            return True
        changed, _ = _changes(_as_row(first_tensor), _as_row(second_tensor))
        if changed:
            return True
    return False


def _as_row(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.flatten().unsqueeze(0)
