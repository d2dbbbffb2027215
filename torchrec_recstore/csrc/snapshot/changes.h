#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/memory.h"
#include "base/prefetch.h"
#include "index/index.h"

namespace recstore {

// Records which rows have changed and which ids have left since a mark. A delta checkpoint consists of these.
//
// Before the first mark this takes no memory. After it, each row takes a byte, and each id that has left eight bytes.
// If the places of rows in the index are recorded too, each row takes four bytes more.
class Changes {
 public:
  using Mark = int64_t;  // the first mark is 1

  // Sets a mark. Changes from now on are changes after this mark.
  Mark mark();
  bool tracks() const { return now_ > 0; }

  // Makes room for slots below `slots`; call it before touch(). Throws OutOfMemory.
  void reserve(int64_t slots);
  // Records that a row was made or changed, or is about to be. Distinct slots may be touched in parallel.
  void touch(Slot slot) { stamp(slot, static_cast<uint8_t>(now_ - base_)); }
  // Records that a row moves from slot `from` to the free slot `to`.
  void move(Slot from, Slot to) {
    stamp(to, stamps()[from]);
    if (locates_ != Locates::kNo) positions()[to] = positions()[from];
  }
  // Returns the mark after which the row has changed last; 0 if it has not changed since the known marks. A row that
  // moves to the cold store takes this number with it, and brings it back: to move is no change.
  Mark changed_after(Slot slot) const { return !tracks() || stamps()[slot] == 0 ? 0 : base_ + stamps()[slot]; }
  // Restores this number of a row that has come back, and for which touch() has just been called. Distinct slots may be
  // restored in parallel. The stamp of the group stays, because it may be too high.
  void restore(Slot slot, Mark changed_after) {
    if (tracks()) stamps()[slot] = knows(changed_after) ? static_cast<uint8_t>(changed_after - base_) : 0;
  }
  // Makes room for `count` calls of left(). Throws std::bad_alloc.
  void reserve_left(int64_t count);
  // Records that the row of an id was removed. rows: the number of rows that remain.
  void left(int64_t id, int64_t rows) noexcept;

  // Whether the changes since the mark are still known.
  bool knows(Mark mark) const { return mark > base_ && mark <= now_; }
  // Visits the slots that have changed since a known mark, in ascending order, also those whose row has left since. It
  // takes time for these slots, and one comparison for every kGroup other slots.
  template <class Visit>  // visit(slot)
  void for_each_since(Mark mark, const Visit& visit) const {
    const auto least = static_cast<uint8_t>(mark - base_);
    constexpr int64_t kAhead = 16;
    std::vector<int64_t> groups;
    for (int64_t group = 0; group * kGroup < slots_; ++group) {
      if (newest()[group] >= least) groups.push_back(group);
    }
    for (size_t g = 0; g < groups.size(); ++g) {
      if (g + kAhead < groups.size()) __builtin_prefetch(stamps() + groups[g + kAhead] * kGroup);
      const uint8_t* const stamp = stamps() + groups[g] * kGroup;  // the region has room for whole groups
      uint64_t changed[kGroup / 8];
      auto* const bytes = reinterpret_cast<uint8_t*>(changed);
      for (int64_t i = 0; i < kGroup; ++i) bytes[i] = stamp[i] >= least;
      for (int64_t word = 0; word < kGroup / 8; ++word) {
        for (; changed[word] != 0; changed[word] &= changed[word] - 1) {
          const auto slot = groups[g] * kGroup + word * 8 + __builtin_ctzll(changed[word]) / 8;
          if (slot < slots_) visit(static_cast<Slot>(slot));
        }
      }
    }
  }
  // The ids that have left since the mark, in ascending order, including ids that have returned. Empty if they are no
  // longer known: the list is dropped when it grows longer than the list of the remaining rows.
  std::optional<std::vector<int64_t>> left_since(Mark mark) const;
  // Records that all rows were removed.
  void clear();
  // Forgets all marks up to `last`, because the table has other rows now. The next mark is last + 1.
  void restart(Mark last);
  Mark last_mark() const { return now_; }

  // Positions of rows in the index, by slot, so that the id of a changed row is found without a walk over the index.
  //
  // Begins to record them: from now on, place() is called for each new row. Returns a number for is_locating(). Throws
  // OutOfMemory.
  uint64_t begin_locating();
  // Whether the call of begin_locating() that returned this number is the last one, and the rows are the same.
  bool is_locating(uint64_t number) const { return locates_ == Locates::kSome && locating_ == number; }
  // Notes that place() was called for all other rows.
  void end_locating() { locates_ = Locates::kAll; }
  bool places_rows() const { return locates_ != Locates::kNo; }
  bool locates_rows() const { return locates_ == Locates::kAll; }
  // Records the position of a row. Distinct slots may be placed in parallel.
  void place(Slot slot, uint32_t position) { positions()[slot] = position; }
  uint32_t position(Slot slot) const { return positions()[slot]; }
  RECSTORE_PREFETCHES void prefetch_position(Slot slot) const { __builtin_prefetch(positions() + slot); }

 private:
  enum class Locates { kNo, kSome, kAll };
  static constexpr int64_t kGroup = 64;
  struct Left {
    Mark mark;
    std::vector<int64_t> ids;
  };

  uint8_t* stamps() const { return reinterpret_cast<uint8_t*>(stamps_.data()); }
  uint8_t* newest() const { return reinterpret_cast<uint8_t*>(newest_.data()); }
  uint32_t* positions() const { return reinterpret_cast<uint32_t*>(positions_.data()); }
  // The byte of a group is written only if it changes, because threads share it: several stamp rows of one group at a
  // time, all of them with the present mark. move() runs alone.
  void stamp(Slot slot, uint8_t stamp) {
    stamps()[slot] = stamp;
    uint8_t* group = newest() + slot / kGroup;
    if (__atomic_load_n(group, __ATOMIC_RELAXED) < stamp) __atomic_store_n(group, stamp, __ATOMIC_RELAXED);
  }

  Region stamps_;     // by slot: the mark after which the row changed last, minus base_; 0: before all known marks
  Region newest_;     // by group of kGroup slots: a stamp that is not below theirs
  Region positions_;  // by slot
  Locates locates_ = Locates::kNo;
  uint64_t locating_ = 0;
  int64_t slots_ = 0;  // stamps_ has room for this many slots
  Mark base_ = 0;      // marks up to this one are forgotten, so that a stamp fits a byte
  Mark now_ = 0;
  std::vector<Left> left_;
  int64_t left_count_ = 0;
  Mark left_from_ = 1;  // left_ is complete since this mark
};

}  // namespace recstore
