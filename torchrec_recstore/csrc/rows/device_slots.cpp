#include "rows/device_slots.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace recstore {
namespace {

constexpr int64_t kAhead = 4;           // candidates that are found at once, in multiples of those that are needed,
constexpr int64_t kPartOfSlots = 16;    // or at least this part of the device slots
constexpr int64_t kRowsAhead = 32;      // rows whose entries are prefetched while those before are read
constexpr int kSlotBits = 30;           // of a device slot
constexpr size_t kRankedAtOnce = 1024;  // device slots
static_assert(DeviceSlots::kMost == int64_t{1} << kSlotBits);

// A device slot and how much its row is used, as one number that is compared at once. Uses of 0: it has no row.
uint64_t ranked_slot(uint64_t uses, DeviceSlots::DeviceSlot slot) { return uses << kSlotBits | slot; }

// Uses below kExact have a bucket each. Beyond, up to 2**32, there are 32 buckets between two powers of two.
constexpr size_t kExact = 256;
constexpr size_t kBuckets = kExact + (33 - 8) * 32;

// The bucket of a ranked slot, which ascends with its uses.
size_t bucket_of(uint64_t ranked) {
  const uint64_t uses = ranked >> kSlotBits;
  if (uses < kExact) return static_cast<size_t>(uses);
  const int power = 63 - __builtin_clzll(uses);
  return kExact + static_cast<size_t>(power - 8) * 32 + static_cast<size_t>(uses >> (power - 5)) - 32;
}

// Leaves the `wanted` lowest ranked slots, in ascending order. Before, those with equal uses are in ascending order.
// Most rows are used a few times, so that counting them takes a fraction of the time of a sort.
void keep_lowest(std::vector<uint64_t>& ranked, size_t wanted) {
  std::array<size_t, kBuckets> places{};
  for (const uint64_t slot : ranked) ++places[bucket_of(slot)];
  size_t kept = 0;
  size_t buckets = 0;  // those with the kept ones
  for (; buckets < kBuckets && kept < wanted; ++buckets) kept += std::exchange(places[buckets], kept);
  std::vector<uint64_t> lowest(kept);
  for (const uint64_t slot : ranked) {
    if (bucket_of(slot) < buckets) lowest[places[bucket_of(slot)]++] = slot;
  }
  for (size_t b = kExact; b < buckets; ++b) {  // a place is now that after the bucket
    std::sort(lowest.begin() + static_cast<int64_t>(places[b - 1]), lowest.begin() + static_cast<int64_t>(places[b]));
  }
  ranked.resize(std::min(kept, wanted));  // it keeps its memory for the next time
  std::copy_n(lowest.begin(), ranked.size(), ranked.begin());
}

}  // namespace

DeviceSlots::DeviceSlots(int64_t slots) : slots_(static_cast<size_t>(slots)) {}

void DeviceSlots::wrote(Slot slot) noexcept {
  const uint32_t entry = entry_of(slot);
  if (is_device_slot(entry)) {
    slots_[entry].state = State::kStale;
    slots_[entry].uses = 0;
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
    slots_[entry].uses = 0;
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
    entry.uses = 0;
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

RECSTORE_PREFETCHES inline void DeviceSlots::prefetch_entry(const Range& range, int64_t i) const {
  const auto slot_at = [&](int64_t place) { return place < range.n ? range.slots[place] : kNoSlot; };
  const Slot first = slot_at(i + 2 * kRowsAhead), second = slot_at(i + kRowsAhead);
  if (first != kNoSlot) __builtin_prefetch(&device_of_[first]);
  if (second == kNoSlot) return;
  const uint32_t entry = device_of_[second];
  if (is_device_slot(entry)) __builtin_prefetch(&slots_[entry], 1);
}

void DeviceSlots::find_rows(const std::vector<Range>& ranges, uint64_t pass) {
  std::vector<DeviceSlot> stale;
  int64_t positions = 0;
  for (const Range& range : ranges) positions += range.n;
  plan_.entries.resize(static_cast<size_t>(positions), kNone);
  uint32_t* entries = plan_.entries.data();
  for (const Range& range : ranges) {
    for (int64_t i = 0; i < range.n; ++i, ++entries) {
      prefetch_entry(range, i);
      const Slot slot = range.slots[i];
      if (slot == kNoSlot) continue;
      uint32_t& entry = device_of_[slot];
      if (entry == kNone) {
        plan_.rows.push_back(slot);
        entry = kArriving | static_cast<uint32_t>(plan_.rows.size() - 1);
      } else if (is_device_slot(entry) && slots_[entry].pass != pass) {
        slots_[entry].pass = pass;
        plan_.distinct.push_back(entry);
        if (slots_[entry].state == State::kStale) stale.push_back(entry);
      }
      *entries = entry;
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
  const auto wanted = static_cast<size_t>(std::max(kAhead * count, size() / kPartOfSlots));
  if (!frequencies.ascend) read_uses_ = kMostUses;
  if (rank_slots(oldest, frequencies) < wanted && read_uses_ < kMostUses) {
    read_uses_ = kMostUses;
    rank_slots(oldest, frequencies);
  }
  keep_lowest(ranked_, wanted);
  // The next candidates are used a little more than these. If there are too few of them, all rows are read.
  const uint64_t most = ranked_.empty() ? 0 : ranked_.back() >> kSlotBits;
  read_uses_ = static_cast<uint32_t>(std::min<uint64_t>(most + most / 4 + 1, kMostUses));
  candidates_.clear();
  next_candidate_ = 0;
  candidates_.reserve(ranked_.size());
  for (const uint64_t lowest : ranked_) {
    const auto slot = static_cast<DeviceSlot>(lowest & ((uint64_t{1} << kSlotBits) - 1));
    candidates_.push_back({slot, slots_[slot].pass});
  }
}

// Ranks the device slots that no pending pass uses, except those whose rows were used more than read_uses_ when they
// were read last, and so are now. Returns the number of ranked ones that are not used more than that.
size_t DeviceSlots::rank_slots(uint64_t oldest, const Frequencies& frequencies) {
  ranked_.clear();
  ranked_.reserve(slots_.size());
  size_t lowest = 0;
  Slot hosts[kRankedAtOnce];
  DeviceSlot slots[kRankedAtOnce];
  uint32_t of_hosts[kRankedAtOnce];
  for (size_t begin = 0; begin < slots_.size(); begin += kRankedAtOnce) {
    const size_t end = std::min(begin + kRankedAtOnce, slots_.size());
    int64_t n = 0;
    for (size_t d = begin; d < end; ++d) {  // without branches, which the processor could not predict
      hosts[n] = slots_[d].host;
      slots[n] = static_cast<DeviceSlot>(d);
      n += static_cast<int64_t>(slots_[d].pass < oldest) & static_cast<int64_t>(slots_[d].uses <= read_uses_);
    }
    frequencies.read(hosts, n, of_hosts);
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t uses = hosts[i] == kNoSlot ? 0 : uint64_t{of_hosts[i]} + 1;
      slots_[slots[i]].uses = static_cast<uint16_t>(std::min<uint64_t>(uses, kMostUses));
      lowest += uses <= read_uses_ ? 1 : 0;
      ranked_.push_back(ranked_slot(uses, slots[i]));
    }
  }
  return lowest;
}

void DeviceSlots::plan_refresh(const std::vector<DeviceSlot>& distinct) {
  std::vector<DeviceSlot> stale;
  for (size_t i = 0; i < distinct.size(); ++i) {
    prefetch_host_of(distinct, i, [](Slot) {});
    const Entry& entry = slots_[distinct[i]];
    if (entry.host != kNoSlot && entry.state == State::kStale) stale.push_back(distinct[i]);
  }
  plan_.rows.reserve(stale.size());
  plan_.targets.reserve(stale.size());
  overwritten_.assign(stale.size(), 0);
  for (const DeviceSlot d : stale) {
    plan_.rows.push_back(slots_[d].host);
    plan_.targets.push_back(d);
    slots_[d].state = State::kRefreshing;
  }
}

void DeviceSlots::commit() noexcept {
  const auto prefetch = [&](Slot host) RECSTORE_PREFETCHES { __builtin_prefetch(&device_of_[host], 1); };
  for (size_t i = 0; i < plan_.leaving.size(); ++i) {
    prefetch_host_of(plan_.leaving, i, prefetch);
    const DeviceSlot d = plan_.leaving[i];
    const Slot host = slots_[d].host;
    if (host != kNoSlot) device_of_[host] = kFlying | static_cast<uint32_t>(flight_.size());
    flight_.push_back(host);
    if (host != kNoSlot) --rows_;
    slots_[d].host = kNoSlot;
  }
  for (int64_t i = 0; i < plan_.arrivals; ++i) {
    prefetch_host_of(plan_.targets, static_cast<size_t>(i), prefetch);
    Entry& entry = slots_[plan_.targets[i]];
    if (entry.host != kNoSlot) {
      device_of_[entry.host] = kNone;
      --rows_;
    }
    entry.host = plan_.rows[i];
    entry.state = State::kClean;
    entry.uses = 0;
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
                              flight_.capacity() * sizeof(Slot) + candidates_.capacity() * sizeof(Candidate) +
                              ranked_.capacity() * sizeof(uint64_t));
}

}  // namespace recstore
