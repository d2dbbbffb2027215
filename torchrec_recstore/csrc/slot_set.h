#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "index.h"

namespace recstore {

// A set of a table's slots: a bit each.
class SlotSet {
 public:
  explicit SlotSet(int64_t slots) : bits_(static_cast<size_t>(slots + 63) / 64, 0) {}

  bool contains(Slot slot) const { return (bits_[slot / 64] >> (slot % 64) & 1) != 0; }
  void add(Slot slot) { bits_[slot / 64] |= uint64_t{1} << (slot % 64); }
  // Adds those among n slots that are slots; kNoSlot is none.
  void add(const Slot* slots, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if (slots[i] != kNoSlot) add(slots[i]);
    }
  }
  void remove(Slot slot) { bits_[slot / 64] &= ~(uint64_t{1} << (slot % 64)); }
  void remove(const SlotSet& others) {
    for (size_t w = 0; w < bits_.size(); ++w) bits_[w] &= ~others.bits_[w];
  }
  bool empty() const {
    return std::all_of(bits_.begin(), bits_.end(), [](uint64_t bits) { return bits == 0; });
  }
  int64_t size() const {
    int64_t size = 0;
    for (const uint64_t bits : bits_) size += __builtin_popcountll(bits);
    return size;
  }

 private:
  std::vector<uint64_t> bits_;
};

}  // namespace recstore
