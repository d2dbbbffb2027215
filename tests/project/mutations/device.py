"""Mutations of the rows that are also in the memory of a device."""

from __future__ import annotations

from .mutation import Mutation

_MOVES = "torchrec_recstore/csrc/lookup/device_moves.cpp"
_SLOTS = "torchrec_recstore/csrc/rows/device_slots.cpp"
_PASS = "torchrec_recstore/csrc/lookup/device_pass.cpp"
_TABLE = "torchrec_recstore/csrc/rows/table.cpp"
_PROGRAMS = "tests/device/test_device_rows.py::test_equal"


def _of_slots(line: str, mutant: str, breaks: str) -> Mutation:
    return Mutation(_SLOTS, line, mutant, ["test_device_slots"], breaks)


def _of_pass(line: str, mutant: str, breaks: str) -> Mutation:
    return Mutation(_PASS, line, mutant, ["test_device_pass"], breaks)


def _of_moves(line: str, mutant: str, breaks: str) -> Mutation:
    return Mutation(_MOVES, line, mutant, ["test_device_moves"], breaks)


DEVICE = [
    _of_moves(
        "[&](Slot slot) { return slot != kNoSlot && (stale.none() ||"
        " !stale.contains(slot)); });",
        "[&](Slot slot) { return slot != kNoSlot; });",
        "A prefetch copies the row of a slot that its row has left.",
    ),
    _of_moves(
        "if (!device.plan({{slots.data(), n}}, number, table.oldest_pass(),"
        " frequencies_in(table), host_slots)) return false;",
        "if (!device.plan({{slots.data(), n}}, number, number,"
        " frequencies_in(table), host_slots)) return false;",
        "Prefetched rows take the device slots of a pending pass.",
    ),
    _of_moves(
        "stage_planned(*tables[part.table], part.begin, part.end,"
        " out + part.first + part.begin * strides[part.table]);",
        "stage_planned(*tables[part.table], part.begin, part.end,"
        " out + part.begin * strides[part.table]);",
        "The rows of a table are staged in the place of those of another one.",
    ),
    _of_moves(
        "land(*table, rows + firsts[t], device_slots(*table).in_flight());",
        "land(*table, rows, device_slots(*table).in_flight());",
        "A table gets the rows of another one.",
    ),
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
        "if (rank_slots(oldest, frequencies) < wanted && read_uses_ < kMostUses) {",
        "if (rank_slots(oldest, frequencies) > wanted && read_uses_ < kMostUses) {",
        "If few rows are used seldom, rows leave the device that are not the least"
        " frequent ones, or a batch does not find room.",
    ),
    _of_slots(
        "if (!frequencies.ascend) read_uses_ = kMostUses;",
        ";",
        "A row whose frequency has fallen does not leave the device.",
    ),
    _of_slots(
        "if (entry.host != kNoSlot && entry.state == State::kStale)"
        " stale.push_back(distinct[i]);",
        ";",
        "A backward on the device updates rows that are older than the host's.",
    ),
    _of_slots(
        "if (find_room(pass, std::min(oldest, pass), frequencies)) return true;",
        "if (find_room(pass, pass, frequencies)) return true;",
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
    _of_pass(
        "const bool is_read_there = on_device != DeviceSlots::kNone &&"
        " device.is_readable(on_device);",
        "const bool is_read_there = on_device != DeviceSlots::kNone;",
        "An evaluation reads rows on the device that are older than the host's.",
    ),
    _of_pass(
        "stages_missing = stages_missing || table.config().missing_reads_init;",
        "stages_missing = false;",
        "An id without a row is not read from the cold store on a device.",
    ),
    _of_pass(
        "if (!refused[t].empty()) move_staged_numbers(static_cast<int64_t>(t),"
        " rows_before, out);",
        ";",
        "The refused rows of all tables are numbered from the first row of the"
        " staging.",
    ),
    _of_pass(
        "if (out[p] < -1) out[p] -= static_cast<int32_t>(rows_before);",
        "out[p] -= static_cast<int32_t>(rows_before);",
        "The numbers of device slots change with the rows that admission has refused.",
    ),
    _of_slots(
        "std::sort(lowest.begin() + static_cast<int64_t>(places[b - 1]),"
        " lowest.begin() + static_cast<int64_t>(places[b]));",
        ";",
        "Of rows that are used often, some stay that are used less than those that"
        " leave.",
    ),
    _of_slots(
        "ranked_.push_back(ranked_slot(uses, slots[i]));",
        "ranked_.push_back(ranked_slot(hosts[i] == kNoSlot ? 0 : 1, slots[i]));",
        "Rows leave the device in the order of their device slots, not of their use.",
    ),
    _of_pass(
        "staged = std::move(staged_now);",
        ";",
        "Rows of two tables that admission refuses are read from one another.",
    ),
    _of_pass(
        "} else if (initial || table.config().missing_reads_init) {",
        "} else if (!initial || table.config().missing_reads_init) {",
        "An id that admission refuses reads as zeros on a device.",
    ),
    _of_pass(
        "table.before_change(slot);",
        ";",
        "A save has rows that the device has changed after it began.",
    ),
    _of_pass(
        "if (step != 0) count_step(rows.meta(slot), step, half_life);",
        "if (step == 0) count_step(rows.meta(slot), step, half_life);",
        "The rows that a device has updated do not count the step.",
    ),
    _of_pass(
        "mark_updated(t, counted_apart[t] == 0 ? step : 0);",
        "mark_updated(t, step);",
        "A policy that counts occurrences counts steps instead, of rows on a device.",
    ),
    _of_pass(
        "if (!device.plan(ranges(t), numbers_[t], table.oldest_pass(),"
        " frequencies_in(table), host_slots)) {",
        "if (!device.plan(ranges(0), numbers_[t], table.oldest_pass(),"
        " frequencies_in(table), host_slots)) {",
        "A plan has the rows of the first table alone.",
    ),
    Mutation(
        _TABLE,
        "if (device_ != nullptr) device_->moved(move.from, move.to);",
        ";",
        ["test_device_pass"],
        "A compaction moves a row, and its device slot does not follow.",
    ),
    Mutation(
        _TABLE,
        "if (table->device_ != nullptr) table->device_->clear();",
        ";",
        ["test_device_pass"],
        "Device slots keep the rows of a table that has exchanged its rows.",
    ),
    Mutation(
        "torchrec_recstore/store/cold_tier.py",
        "self.settle(ids)",
        "pass",
        [_PROGRAMS],
        "A row leaves to a cold store without what the device has changed.",
    ),
    Mutation(
        "torchrec_recstore/kernels/device_rows.py",
        "self._skipped_before = skipped",
        "pass",
        [_PROGRAMS],
        "Rows that an update has skipped are counted once more by each question.",
    ),
    Mutation(
        "torchrec_recstore/kernels/device_rows.py",
        "if not has_bags_of_one:",
        "if False:",
        [_PROGRAMS],
        "Kernels take each position for a bag.",
    ),
    Mutation(
        "torchrec_recstore/kernels/device_passes.py",
        "begin = len(batch.slots) - sum(batch.packed.positions)",
        "begin = 0",
        [_PROGRAMS],
        "An update begins with positions that have no device slot.",
    ),
]
