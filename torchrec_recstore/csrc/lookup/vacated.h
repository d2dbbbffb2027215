#pragma once

#include <cstdint>
#include <vector>

#include "index/index.h"

namespace recstore {

// The slots that rows have left recently: by eviction, expiry, removal or a move. Slots that were resolved ahead of
// their use are compared with it. The record has a fixed size, so that an entry cannot fail; the newest entries replace
// the oldest ones. Nothing is recorded before start().
class Vacated {
 public:
  using Stamp = int64_t;  // number of entries so far

  // Begins the record if it has not begun. capacity: number of entries, a power of two. Throws std::bad_alloc.
  void start(int64_t capacity) {
    if (slots_.empty()) slots_.resize(static_cast<size_t>(capacity));
  }
  Stamp now() const { return count_; }
  void add(Slot slot) noexcept {
    if (!slots_.empty()) slots_[static_cast<size_t>(count_++) & (slots_.size() - 1)] = slot;
  }
  // Records that all rows have left their slots.
  void add_all() noexcept { count_ += static_cast<Stamp>(slots_.size()) + 1; }

  // Number of entries since the stamp.
  int64_t since(Stamp stamp) const { return count_ - stamp; }
  // Whether the record still has all entries since the stamp.
  bool knows(Stamp stamp) const { return since(stamp) <= static_cast<int64_t>(slots_.size()); }
  template <class Visit>  // visit(slot) for the entries since the stamp, which the record knows
  void for_each_since(Stamp stamp, const Visit& visit) const {
    for (Stamp i = stamp; i < count_; ++i) visit(slots_[static_cast<size_t>(i) & (slots_.size() - 1)]);
  }

 private:
  std::vector<Slot> slots_;  // a ring
  Stamp count_ = 0;
};

}  // namespace recstore
