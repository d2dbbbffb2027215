#include "rows/device_slots.h"

#include <algorithm>

#include "base/error.h"

namespace recstore {
namespace {

constexpr int64_t kAhead = 4;         // candidates that are found at once, in multiples of those that are needed,
constexpr int64_t kPartOfSlots = 16;  // or at least this part of the device slots
constexpr int64_t kRowsAhead = 16;    // rows whose entries are prefetched while those before are read
constexpr int kSlotBits = 30;         // of a device slot
static_assert(DeviceSlots::kMost == int64_t{1} << kSlotBits);

}  // namespace

DeviceSlots::DeviceSlots(int64_t slots) : slots_(static_cast<size_t>(slots)) {}

void DeviceSlots::wrote(Slot slot) noexcept {
  const uint32_t entry = entry_of(slot);
  if (is_device_slot(entry)) {
    slots_[entry].state = State::kStale;
  } else if (is_arriving(entry)) {
    overwritten_[entry & ~kArriving] = 1;
  }
}

void DeviceSlots::left(Slot slot) noexcept {
  const uint32_t entry = entry_of(slot);
  if (entry == kNone) return;
  if (is_device_slot(entry)) {
    slots_[entry].host = kNoSlot;
    slots_[entry].state = State::kClean;
    --rows_;
  } else if (is_flying(entry)) {
    flight_[entry & ~kFlying] = kNoSlot;
  } else {
    plan_.rows[entry & ~kArriving] = kNoSlot;
  }
  device_of_[slot] = kNone;
}

void DeviceSlots::moved(Slot from, Slot to) noexcept {
  // A row moves to a lower slot, so that the map has room for it.
  const uint32_t entry = entry_of(from);
  if (entry == kNone) return;
  device_of_[from] = kNone;
  device_of_[to] = entry;
  if (is_device_slot(entry)) {
    slots_[entry].host = to;
  } else if (is_flying(entry)) {
    flight_[entry & ~kFlying] = to;
  } else {
    plan_.rows[entry & ~kArriving] = to;
  }
}

void DeviceSlots::clear() noexcept {
  abort();
  for (Entry& entry : slots_) {
    entry.host = kNoSlot;
    entry.state = State::kClean;
  }
  std::fill(device_of_.begin(), device_of_.end(), kNone);
  std::fill(flight_.begin(), flight_.end(), kNoSlot);
  rows_ = 0;
}

bool DeviceSlots::plan(const std::vector<Range>& ranges, uint64_t pass, uint64_t oldest, const Frequencies& frequencies,
                       int64_t host_slots) {
  if (!flight_.empty()) throw InvalidArgument("rows are in flight to the host: land them before a plan");
  if (device_of_.size() < static_cast<size_t>(host_slots)) device_of_.resize(static_cast<size_t>(host_slots), kNone);
  plan_pass_ = pass;
  try {
    find_rows(ranges, pass);
    if (find_room(pass, std::min(oldest, pass), frequencies)) return true;
  } catch (...) {
    abort();
    throw;
  }
  abort();
  return false;
}

void DeviceSlots::find_rows(const std::vector<Range>& ranges, uint64_t pass) {
  std::vector<DeviceSlot> stale;
  for (const Range& range : ranges) {
    for (int64_t i = 0; i < range.n; ++i) {
      const Slot ahead = i + kRowsAhead < range.n ? range.slots[i + kRowsAhead] : kNoSlot;
      if (ahead != kNoSlot) __builtin_prefetch(&device_of_[ahead]);
      const Slot slot = range.slots[i];
      if (slot == kNoSlot) continue;
      const uint32_t entry = device_of_[slot];
      if (entry == kNone) {
        plan_.rows.push_back(slot);
        device_of_[slot] = kArriving | static_cast<uint32_t>(plan_.rows.size() - 1);
      } else if (is_device_slot(entry) && slots_[entry].pass != pass) {
        slots_[entry].pass = pass;
        plan_.distinct.push_back(entry);
        if (slots_[entry].state == State::kStale) stale.push_back(entry);
      }
    }
  }
  plan_.arrivals = static_cast<int64_t>(plan_.rows.size());
  plan_.hits = static_cast<int64_t>(plan_.distinct.size());
  plan_.rows.reserve(plan_.rows.size() + stale.size());
  plan_.targets.reserve(plan_.rows.size() + stale.size());
  overwritten_.assign(plan_.rows.size() + stale.size(), 0);
  plan_.targets.assign(plan_.rows.size(), kNone);
  for (const DeviceSlot d : stale) {
    plan_.rows.push_back(slots_[d].host);
    plan_.targets.push_back(d);
    slots_[d].state = State::kRefreshing;
  }
}

bool DeviceSlots::find_room(uint64_t pass, uint64_t oldest, const Frequencies& frequencies) {
  bool searched = false;
  for (int64_t i = 0; i < plan_.arrivals;) {
    if (next_candidate_ == candidates_.size()) {
      if (searched) return false;
      find_candidates(plan_.arrivals - i, oldest, frequencies);
      searched = true;
      continue;
    }
    const Candidate candidate = candidates_[next_candidate_++];
    Entry& entry = slots_[candidate.slot];
    if (entry.pass != candidate.pass || entry.pass >= oldest) continue;  // used since
    entry.pass = pass;
    plan_.targets[i++] = candidate.slot;
    plan_.distinct.push_back(candidate.slot);
    if (entry.host != kNoSlot && entry.state == State::kDirty) plan_.leaving.push_back(candidate.slot);
  }
  flight_.reserve(plan_.leaving.size());
  return true;
}

void DeviceSlots::find_candidates(int64_t count, uint64_t oldest, const Frequencies& frequencies) {
  // A device slot and how much its row is used, as one number that is compared at once. 0: it has no row.
  const auto ranked_slot = [](uint64_t uses, DeviceSlot slot) { return uses << kSlotBits | slot; };
  std::vector<uint64_t> ranked;
  std::vector<DeviceSlot> taken;
  std::vector<Slot> rows;
  for (size_t d = 0; d < slots_.size(); ++d) {
    const Entry& entry = slots_[d];
    if (entry.pass >= oldest) continue;
    if (entry.host == kNoSlot) {
      ranked.push_back(ranked_slot(0, static_cast<DeviceSlot>(d)));
    } else {
      taken.push_back(static_cast<DeviceSlot>(d));
      rows.push_back(entry.host);
    }
  }
  std::vector<uint32_t> of_rows;
  of_rows.reserve(rows.size());
  frequencies(rows, of_rows);
  ranked.reserve(ranked.size() + taken.size());
  for (size_t i = 0; i < taken.size(); ++i) ranked.push_back(ranked_slot(uint64_t{of_rows[i]} + 1, taken[i]));
  const auto wanted = static_cast<size_t>(std::max(kAhead * count, size() / kPartOfSlots));
  if (wanted < ranked.size()) {
    std::nth_element(ranked.begin(), ranked.begin() + static_cast<int64_t>(wanted), ranked.end());
    ranked.resize(wanted);
  }
  std::sort(ranked.begin(), ranked.end());
  candidates_.clear();
  next_candidate_ = 0;
  candidates_.reserve(ranked.size());
  for (const uint64_t lowest : ranked) {
    const auto slot = static_cast<DeviceSlot>(lowest & ((uint64_t{1} << kSlotBits) - 1));
    candidates_.push_back({slot, slots_[slot].pass});
  }
}

void DeviceSlots::plan_refresh(const std::vector<DeviceSlot>& distinct) {
  const auto is_stale = [&](DeviceSlot d) { return slots_[d].host != kNoSlot && slots_[d].state == State::kStale; };
  const auto count = static_cast<size_t>(std::count_if(distinct.begin(), distinct.end(), is_stale));
  plan_.rows.reserve(count);
  plan_.targets.reserve(count);
  overwritten_.assign(count, 0);
  for (const DeviceSlot d : distinct) {
    if (!is_stale(d)) continue;
    plan_.rows.push_back(slots_[d].host);
    plan_.targets.push_back(d);
    slots_[d].state = State::kRefreshing;
  }
}

DeviceSlots::DeviceSlot DeviceSlots::planned_slot(Slot slot) const {
  const uint32_t entry = device_of_[slot];
  return is_arriving(entry) ? plan_.targets[entry & ~kArriving] : entry;
}

void DeviceSlots::commit() noexcept {
  for (const DeviceSlot d : plan_.leaving) {
    const Slot host = slots_[d].host;
    if (host != kNoSlot) device_of_[host] = kFlying | static_cast<uint32_t>(flight_.size());
    flight_.push_back(host);
    if (host != kNoSlot) --rows_;
    slots_[d].host = kNoSlot;
  }
  for (int64_t i = 0; i < plan_.arrivals; ++i) {
    Entry& entry = slots_[plan_.targets[i]];
    if (entry.host != kNoSlot) {
      device_of_[entry.host] = kNone;
      --rows_;
    }
    entry.host = plan_.rows[i];
    entry.state = State::kClean;
    if (entry.host == kNoSlot) continue;
    device_of_[entry.host] = plan_.targets[i];
    if (overwritten_[i] != 0) entry.state = State::kStale;
    ++rows_;
  }
  for (size_t i = static_cast<size_t>(plan_.arrivals); i < plan_.rows.size(); ++i) {
    Entry& entry = slots_[plan_.targets[i]];
    if (entry.state == State::kRefreshing) entry.state = State::kClean;
  }
  counts_.hits += plan_.hits;
  counts_.arrivals += plan_.arrivals;
  plan_ = {};
}

void DeviceSlots::abort() noexcept {
  for (size_t i = 0; i < plan_.rows.size(); ++i) {
    const Slot slot = plan_.rows[i];
    if (slot != kNoSlot && is_arriving(device_of_[slot])) device_of_[slot] = kNone;
  }
  for (const DeviceSlot d : plan_.targets) {
    if (d != kNone && slots_[d].state == State::kRefreshing) slots_[d].state = State::kStale;
  }
  plan_ = {};
}

std::vector<DeviceSlots::DeviceSlot> DeviceSlots::dirty_slots(const std::vector<Range>& ranges) const {
  std::vector<DeviceSlot> dirty;
  for (const Range& range : ranges) {
    for (int64_t i = 0; i < range.n; ++i) {
      if (range.slots[i] == kNoSlot) continue;
      const uint32_t entry = entry_of(range.slots[i]);
      if (is_device_slot(entry) && slots_[entry].state == State::kDirty) dirty.push_back(entry);
    }
  }
  std::sort(dirty.begin(), dirty.end());
  dirty.erase(std::unique(dirty.begin(), dirty.end()), dirty.end());
  return dirty;
}

std::vector<DeviceSlots::DeviceSlot> DeviceSlots::dirty_slots() const {
  std::vector<DeviceSlot> dirty;
  for (size_t d = 0; d < slots_.size(); ++d) {
    if (slots_[d].host != kNoSlot && slots_[d].state == State::kDirty) dirty.push_back(static_cast<DeviceSlot>(d));
  }
  return dirty;
}

bool DeviceSlots::is_behind(Slot slot) const {
  const uint32_t entry = entry_of(slot);
  return is_flying(entry) || (is_device_slot(entry) && slots_[entry].state == State::kDirty);
}

DeviceSlots::DeviceSlot DeviceSlots::device_slot(Slot slot) const {
  const uint32_t entry = entry_of(slot);
  return is_device_slot(entry) ? entry : kNone;
}

int64_t DeviceSlots::bytes() const {
  return static_cast<int64_t>(slots_.capacity() * sizeof(Entry) + device_of_.capacity() * sizeof(uint32_t) +
                              flight_.capacity() * sizeof(Slot) + candidates_.capacity() * sizeof(Candidate));
}

}  // namespace recstore
