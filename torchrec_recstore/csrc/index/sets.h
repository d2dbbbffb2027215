#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "index/index.h"

namespace recstore {

// A set of ids, in the order in which they were added.
class IdSet {
 public:
  // most: the largest number of ids that the set will hold.
  explicit IdSet(size_t most) {
    while ((size_t{1} << bits_) < 2 * most) ++bits_;
    places_.assign(size_t{1} << bits_, 0);
    ids_.reserve(most);
  }

  // Adds an id, and returns its position in ids(). hash: the hash of the id; its top bits are used.
  uint32_t add(int64_t id, uint64_t hash) {
    size_t place = hash >> (64 - bits_);
    for (; places_[place] != 0; place = (place + 1) & (places_.size() - 1)) {
      if (ids_[places_[place] - 1] == id) return places_[place] - 1;
    }
    ids_.push_back(id);
    places_[place] = static_cast<uint32_t>(ids_.size());
    return places_[place] - 1;
  }
  const std::vector<int64_t>& ids() const { return ids_; }

 private:
  int bits_ = 4;
  std::vector<uint32_t> places_;  // by hash: the position of an id in ids_ plus one, or 0
  std::vector<int64_t> ids_;
};

// A set of slots of a table, with one bit for each slot.
class SlotSet {
 public:
  explicit SlotSet(int64_t slots) : bits_(static_cast<size_t>(slots + 63) / 64, 0) {}

  bool contains(Slot slot) const { return (bits_[slot / 64] >> (slot % 64) & 1) != 0; }
  void add(Slot slot) { bits_[slot / 64] |= uint64_t{1} << (slot % 64); }
  // Adds n slots, except those that are kNoSlot.
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

// The free slots of a shard: one bit for each slot, and one bit for each word of 64 slots, by which the lowest free
// slot is found fast. To add a slot needs no memory, so it cannot fail.
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
  // The set must not be empty.
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
  template <class Visit>  // visit(slot), in ascending order, for the free slots from `first` on
  void for_each(Slot first, const Visit& visit) const {
    for (size_t word = first / 64; word < words_.size(); ++word) {
      uint64_t bits = words_[word];
      if (word == first / 64) bits &= ~uint64_t{0} << (first % 64);
      for (; bits != 0; bits &= bits - 1) {
        visit(static_cast<Slot>(word * 64 + static_cast<size_t>(__builtin_ctzll(bits))));
      }
    }
  }
  // Removes the slots from `slots` on; all of them are free.
  void truncate(int64_t slots) {
    for_each(static_cast<Slot>(slots), [&](Slot slot) { remove(slot); });
  }
  void clear() {
    std::fill(words_.begin(), words_.end(), 0);
    std::fill(full_.begin(), full_.end(), 0);
    first_ = 0;
    size_ = 0;
  }
  // Memory in use. Spare capacity is not counted, because it depends on how the table has grown.
  int64_t bytes() const { return static_cast<int64_t>((words_.size() + full_.size()) * sizeof(uint64_t)); }

 private:
  std::vector<uint64_t> words_;
  std::vector<uint64_t> full_;  // by word: whether the word has a bit set
  size_t first_ = 0;            // all words of full_ before this one are zero
  int64_t size_ = 0;
};

}  // namespace recstore
