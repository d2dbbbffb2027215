"""Mutations of the rows that are also in the memory of a device."""

from __future__ import annotations

from .mutation import Mutation

_SLOTS = "torchrec_recstore/csrc/rows/device_slots.cpp"


def _of_slots(line: str, mutant: str, breaks: str) -> Mutation:
    return Mutation(_SLOTS, line, mutant, ["test_device_slots"], breaks)


DEVICE = [
    _of_slots(
        "flight_[entry & ~kFlying] = kNoSlot;",
        ";",
        "A row on its way to the host is written to the slot that the row has left.",
    ),
    _of_slots(
        "flight_[entry & ~kFlying] = to;",
        ";",
        "A row on its way to the host is written to the slot from which the row has"
        " moved.",
    ),
    _of_slots(
        "slots_[entry].host = to;",
        ";",
        "A device slot refers to the slot from which its row has moved.",
    ),
    _of_slots(
        "slots_[entry].host = kNoSlot;",
        ";",
        "A row that has left the table keeps its device slot.",
    ),
    _of_slots(
        "slots_[entry].state = State::kStale;",
        ";",
        "The device does not see what the host has written.",
    ),
    _of_slots(
        "if (!is_stale(d)) continue;",
        "continue;",
        "A backward on the device updates rows that are older than the host's.",
    ),
    _of_slots(
        "if (find_room(pass, std::min(oldest, pass), rank)) return true;",
        "if (find_room(pass, pass, rank)) return true;",
        "Rows of a pending pass lose their device slots.",
    ),
    _of_slots(
        "if (!flight_.empty()) throw InvalidArgument("
        '"rows are in flight to the host: land them before a plan");',
        ";",
        "A plan copies rows to the device that have not come back yet.",
    ),
    _of_slots(
        "if (overwritten_[i] != 0) entry.state = State::kStale;",
        ";",
        "A write of the host between a plan's copies and its end is lost.",
    ),
    _of_slots(
        "if (entry.state == State::kRefreshing) entry.state = State::kClean;",
        "entry.state = State::kClean;",
        "A write of the host while its row is copied again is lost.",
    ),
    _of_slots(
        "if (entry.host != kNoSlot && entry.state == State::kDirty)"
        " plan_.leaving.push_back(candidate.slot);",
        ";",
        "A row that leaves the device does not come back to the host.",
    ),
    _of_slots(
        "if (d != kNone && slots_[d].state == State::kRefreshing) slots_[d].state ="
        " State::kStale;",
        ";",
        "A row that was not copied again counts as copied.",
    ),
]
