#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/prefetch.h"
#include "index/index.h"

namespace recstore {

// The rows of a table that are also in the memory of a device, in *device slots*. The host has the ids and all rows. A
// device slot is clean (equal to the host's row), dirty (newer) or stale (older).
//
// This object moves no row. Its caller copies rows between the host and the device, and tells it what has happened: a
// plan says which rows to copy, and commit() makes it so. A plan that is not committed changes nothing. At most one
// plan exists at a time. The caller holds the lock of the table, and between a plan and its end it makes no other plan.
//
// A row of a dirty device slot that gets another row is *in flight*: it is on its way to the host until land(). The
// host may read or write a row only if it is neither dirty nor in flight; see dirty_slots().
class DeviceSlots {
 public:
  using DeviceSlot = uint32_t;
  static constexpr int64_t kMost = int64_t{1} << 30;  // device slots at most

  // Throws std::bad_alloc.
  explicit DeviceSlots(int64_t slots);

  int64_t size() const { return static_cast<int64_t>(slots_.size()); }

  // What the host does. Calls of wrote() for distinct slots may run in parallel.
  void wrote(Slot slot) noexcept;           // the host has written the row
  void left(Slot slot) noexcept;            // the row has left the table
  void moved(Slot from, Slot to) noexcept;  // the row has moved to another slot of the host
  void clear() noexcept;                    // all rows have left

  struct Range {
    const Slot* slots;  // (n,); kNoSlot is skipped
    int64_t n;
  };
  // The rows that a plan copies.
  struct Plan {
    std::vector<DeviceSlot> distinct;  // the device slots of the pass, each once
    std::vector<uint32_t> entries;     // by position, range by range; see planned_slot()
    std::vector<Slot> rows;            // the host's rows that are copied to the device,
    std::vector<DeviceSlot> targets;   // and where to
    std::vector<DeviceSlot> leaving;   // the rows that are copied to the host first; see land()
    int64_t arrivals = 0;              // number of `rows` that had no device slot
    int64_t hits = 0;                  // number of distinct rows that had one
  };
  // How often the rows of the host are used.
  struct Frequencies {
    // Writes the frequency of each row. rows, frequencies: (n,); of kNoSlot, any number.
    std::function<void(const Slot* rows, int64_t n, uint32_t* frequencies)> read;
    // Whether the frequency of a row in the table never falls, except when the host writes the row. Most rows then need
    // not be read again.
    bool ascend = false;
  };
  // Plans that the rows of a pass have device slots. pass: its number, which ascends from call to call. oldest: the
  // number of the oldest pending pass; the rows of later ones keep their device slots. frequencies: the least frequent
  // rows leave the device first. host_slots: the number of slots of the host.
  // Returns false, and plans nothing, if there is no room. Call it after land(). Throws std::bad_alloc.
  bool plan(const std::vector<Range>& ranges, uint64_t pass, uint64_t oldest, const Frequencies& frequencies,
            int64_t host_slots);
  // Plans that those of `distinct` that are stale are copied to the device again, before the device changes them.
  void plan_refresh(const std::vector<DeviceSlot>& distinct);
  const Plan& planned() const { return plan_; }
  // Lets the plan count no hits, because a later plan counts the same rows.
  void forget_hits() noexcept { plan_.hits = 0; }
  // The device slot of a position of the plan; kNone if it has no row.
  DeviceSlot planned_slot(int64_t position) const {
    const uint32_t entry = plan_.entries[static_cast<size_t>(position)];
    return is_arriving(entry) ? plan_.targets[entry & ~kArriving] : entry;
  }
  void commit() noexcept;
  void abort() noexcept;

  // Notes that the device has changed the rows of a pass, and calls visit(slot) for those that are still in the table.
  // prefetch(slot) is called for a row some rows before.
  template <class Prefetch, class Visit>
  void changed_on_device(const std::vector<DeviceSlot>& distinct, const Prefetch& prefetch,
                         const Visit& visit) noexcept {
    for (size_t i = 0; i < distinct.size(); ++i) {
      prefetch_host_of(distinct, i, prefetch);
      Entry& entry = slots_[distinct[i]];
      if (entry.host == kNoSlot) continue;  // the row has left, and its device slot waits for the pass
      visit(entry.host);
      entry.state = State::kDirty;
    }
  }

  // Number of rows in flight.
  int64_t in_flight() const { return static_cast<int64_t>(flight_.size()); }
  // Ends the flight: calls write(i, slot) for each row that is still in the table. i: its place in Plan::leaving.
  // prefetch(slot) is called for a row some rows before.
  template <class Prefetch, class Write>
  void land(const Prefetch& prefetch, const Write& write) noexcept {
    for (size_t i = 0; i < flight_.size(); ++i) {
      if (i + kHostsAhead < flight_.size() && flight_[i + kHostsAhead] != kNoSlot) {
        __builtin_prefetch(&device_of_[flight_[i + kHostsAhead]], 1);
        prefetch(flight_[i + kHostsAhead]);
      }
      if (flight_[i] == kNoSlot) continue;
      write(static_cast<int64_t>(i), flight_[i]);
      ++counts_.written_back;
      device_of_[flight_[i]] = kNone;
    }
    flight_.clear();
  }

  // Returns the dirty device slots of rows, or of all rows, in ascending order.
  std::vector<DeviceSlot> dirty_slots(const std::vector<Range>& ranges) const;
  std::vector<DeviceSlot> dirty_slots() const;
  // Calls write(i, slot) for each of these rows that is still in the table; the rows are clean afterwards.
  template <class Write>
  void settled(const std::vector<DeviceSlot>& dirty, const Write& write) noexcept {
    for (size_t i = 0; i < dirty.size(); ++i) {
      Entry& entry = slots_[dirty[i]];
      if (entry.host == kNoSlot || entry.state != State::kDirty) continue;
      write(static_cast<int64_t>(i), entry.host);
      ++counts_.written_back;
      entry.state = State::kClean;
    }
  }
  // Whether the host's row is older than the one on the device or in flight.
  bool is_behind(Slot slot) const;
  // Whether a device slot has a row that is newer than the host's, or as new.
  bool is_readable(DeviceSlot slot) const { return slots_[slot].state != State::kStale; }
  // The device slot of a row, kNone if it has none.
  DeviceSlot device_slot(Slot slot) const;
  // Number of rows that have a device slot.
  int64_t rows() const { return rows_; }
  // Distinct rows of the plans that were carried out, and rows that came back.
  struct Counts {
    int64_t hits = 0;
    int64_t arrivals = 0;
    int64_t written_back = 0;
  };
  const Counts& counts() const { return counts_; }
  int64_t bytes() const;

  static constexpr DeviceSlot kNone = 0xFFFFFFFFu;

 private:
  enum class State : uint8_t { kClean, kDirty, kStale, kRefreshing };
  struct Entry {
    Slot host = kNoSlot;
    State state = State::kClean;
    uint16_t uses = 0;  // what find_candidates() has read last, at most kMostUses; 0 for a row that it has not read
    uint64_t pass = 0;  // the last pass that uses it
  };
  static_assert(sizeof(Entry) == 16);
  static constexpr uint32_t kMostUses = 0xFFFFu;
  struct Candidate {
    DeviceSlot slot;
    uint64_t pass;  // when it was found
  };
  // Entries of device_of_ are a device slot, kNone, or an index in plan_.rows or flight_ with one of these flags.
  static constexpr uint32_t kArriving = 0x40000000u;
  static constexpr uint32_t kFlying = 0x80000000u;
  static bool is_device_slot(uint32_t entry) { return entry < kArriving; }
  static bool is_arriving(uint32_t entry) { return entry != kNone && (entry & kArriving) != 0; }
  static bool is_flying(uint32_t entry) { return entry != kNone && (entry & kFlying) != 0; }

  // Entries lie anywhere in memory. Those of a list of device slots are prefetched in two steps: the entry, and later
  // what belongs to the row that it has.
  static constexpr size_t kHostsAhead = 32;
  template <class Prefetch>
  RECSTORE_PREFETCHES void prefetch_host_of(const std::vector<DeviceSlot>& list, size_t i,
                                            const Prefetch& prefetch) const {
    if (i + 2 * kHostsAhead < list.size()) __builtin_prefetch(&slots_[list[i + 2 * kHostsAhead]], 1);
    if (i + kHostsAhead >= list.size()) return;
    const Slot host = slots_[list[i + kHostsAhead]].host;
    if (host != kNoSlot) prefetch(host);
  }

  uint32_t entry_of(Slot slot) const { return slot < device_of_.size() ? device_of_[slot] : kNone; }
  // Prefetches what find_rows() reads for later places of a range.
  void prefetch_entry(const Range& range, int64_t i) const;
  void find_rows(const std::vector<Range>& ranges, uint64_t pass);
  bool find_room(uint64_t pass, uint64_t oldest, const Frequencies& frequencies);
  void find_candidates(int64_t count, uint64_t oldest, const Frequencies& frequencies);
  size_t rank_slots(uint64_t oldest, const Frequencies& frequencies);

  std::vector<Entry> slots_;         // by device slot
  std::vector<uint32_t> device_of_;  // by slot of the host
  std::vector<Slot> flight_;         // kNoSlot: the row has left
  std::vector<Candidate> candidates_;
  std::vector<uint64_t> ranked_;  // memory of find_candidates()
  uint32_t read_uses_ = 0;        // find_candidates() reads the rows that were used so often, or less
  size_t next_candidate_ = 0;
  Plan plan_;
  std::vector<uint8_t> overwritten_;  // for each of plan_.rows: the host has written the row since
  uint64_t plan_pass_ = 0;
  int64_t rows_ = 0;
  Counts counts_;
};

}  // namespace recstore
