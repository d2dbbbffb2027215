#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "index.h"

namespace recstore {

// The slots of a shard that may be handed out: a bit each, and a bit for each 64 of those, so that the lowest one is
// found soon. Adding a slot needs no memory, and so cannot fail.
class FreeSlots {
 public:
  // Makes room for slots below `slots`.
  void reserve(int64_t slots) {
    const auto words = static_cast<size_t>(slots + 63) / 64;
    if (words <= words_.size()) return;
    full_.resize((words + 63) / 64, 0);
    words_.resize(words, 0);
  }

  int64_t size() const { return size_; }
  bool contains(Slot slot) const { return (words_[slot / 64] >> (slot % 64) & 1) != 0; }
  void add(Slot slot) {
    const size_t word = slot / 64;
    words_[word] |= uint64_t{1} << (slot % 64);
    full_[word / 64] |= uint64_t{1} << (word % 64);
    first_ = std::min(first_, word / 64);
    ++size_;
  }
  // There must be one.
  Slot lowest() {
    while (full_[first_] == 0) ++first_;
    const size_t word = first_ * 64 + static_cast<size_t>(__builtin_ctzll(full_[first_]));
    return static_cast<Slot>(word * 64 + static_cast<size_t>(__builtin_ctzll(words_[word])));
  }
  void remove(Slot slot) {
    const size_t word = slot / 64;
    words_[word] &= ~(uint64_t{1} << (slot % 64));
    if (words_[word] == 0) full_[word / 64] &= ~(uint64_t{1} << (word % 64));
    --size_;
  }
  template <class Visit>  // visit(slot), ascending, for those from `first` on
  void for_each(Slot first, const Visit& visit) const {
    for (size_t word = first / 64; word < words_.size(); ++word) {
      uint64_t bits = words_[word];
      if (word == first / 64) bits &= ~uint64_t{0} << (first % 64);
      for (; bits != 0; bits &= bits - 1) visit(static_cast<Slot>(word * 64 + static_cast<size_t>(__builtin_ctzll(bits))));
    }
  }
  // Forgets the slots from `slots` on, which are all free.
  void truncate(int64_t slots) {
    for_each(static_cast<Slot>(slots), [&](Slot slot) { remove(slot); });
  }
  void clear() {
    std::fill(words_.begin(), words_.end(), 0);
    std::fill(full_.begin(), full_.end(), 0);
    first_ = 0;
    size_ = 0;
  }
  // Without spare capacity, which depends on how the table has grown.
  int64_t bytes() const { return static_cast<int64_t>((words_.size() + full_.size()) * sizeof(uint64_t)); }

 private:
  std::vector<uint64_t> words_;
  std::vector<uint64_t> full_;  // by word: whether it has a bit
  size_t first_ = 0;            // no word of full_ before it has a bit
  int64_t size_ = 0;
};

}  // namespace recstore
