"""The options of a table as the named fields that ``ops.table_create`` gives to C++.

A field has the same name here and in ``TableConfig`` of csrc/rows/config.h. C++ raises
an error for a field that it does not know, and for one that is missing.

Tests: tests/test_ops.py.
"""

from __future__ import annotations

import struct
from dataclasses import asdict

from torchrec_recstore.options import (
    LFU,
    LRU,
    ConstantInit,
    Initializer,
    NormalInit,
    Scored,
    TableOptions,
    UniformInit,
)

_INITIALIZERS = {UniformInit: 0, NormalInit: 1, ConstantInit: 2}
"""The values of ``InitKind`` in csrc/rows/config.h."""
_NO_EVICTION = 0
_LEAST_RECENT = 1
_LEAST_FREQUENT = 2
_LEAST_OCCURRING = 3
_LEAST_SCORED = 4
"""The values of ``Eviction`` in csrc/rows/config.h."""


def initializer_kind(initializer: Initializer) -> int:
    """Returns the value of ``InitKind`` of an initializer, or of its base class."""
    for initializer_type, kind in _INITIALIZERS.items():
        if isinstance(initializer, initializer_type):
            return kind
    raise TypeError(f"{type(initializer).__name__} is not an initializer")


def initializer_numbers(initializer: Initializer) -> dict[str, float]:
    """Returns the numbers of ``InitConfig``; 0 for a number that the initializer does
    not have.
    """
    numbers = {
        "init_low": 0.0,
        "init_high": 0.0,
        "init_mean": 0.0,
        "init_std": 0.0,
        "init_truncate_std": 0.0,
        "init_value": 0.0,
    }
    for name, value in asdict(initializer).items():
        if value is not None:
            numbers[f"init_{name}"] = float(value)
    return numbers


def encoded_score(score: float) -> int:
    """Returns a score as ``encoded_score`` in csrc/bounds/row_uses.h encodes it: a
    number that ascends with the score.
    """
    (bits,) = struct.unpack("<I", struct.pack("<f", score + 0.0))
    is_negative = bits & 0x80000000
    return int(~bits & 0xFFFFFFFF if is_negative else bits | 0x80000000)


def _eviction(eviction: LRU | LFU | Scored | None) -> dict[str, int]:
    fields = {
        "eviction": _NO_EVICTION,
        "half_life": 0,
        "unscored": 0,
    }
    if isinstance(eviction, Scored):
        fields["eviction"] = _LEAST_SCORED
        fields["unscored"] = encoded_score(eviction.default)
    elif isinstance(eviction, LFU):
        counts_occurrences = eviction.count == "occurrences"
        fields["eviction"] = _LEAST_OCCURRING if counts_occurrences else _LEAST_FREQUENT
        fields["half_life"] = eviction.half_life_steps or 0
    elif eviction is not None:
        fields["eviction"] = _LEAST_RECENT
    return fields


def bounds(options: TableOptions) -> dict[str, int]:
    """Returns the fields of ``Bounds``; 0 for a bound that the table lacks."""
    fields = {
        "max_rows": options.max_rows or 0,
        "expiry": 0,
        "expiry_time": 0,
        "max_jump": 0,
        "min_frequency": 0,
        "counter_bytes": 0,
        "cold_store": int(options.cold_store is not None),
        "shared": int(bool(getattr(options.cold_store, "shared", None))),
        **_eviction(options.eviction),
    }
    if options.expiry is not None:
        fields["expiry"] = options.expiry.steps or 0
        fields["expiry_time"] = options.expiry.microseconds
        fields["max_jump"] = options.expiry.max_jump_microseconds
    if options.admission is not None:
        fields["min_frequency"] = options.admission.count
        fields["counter_bytes"] = options.admission.counter_bytes
    return fields
