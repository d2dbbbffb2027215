#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "index.h"
#include "memory.h"

namespace recstore {

// Records which rows have changed and which ids have left since a mark. A delta checkpoint consists of these.
//
// Before the first mark this takes no memory. After it, each row takes a byte, and each id that has left eight bytes.
class Changes {
 public:
  using Mark = int64_t;  // the first mark is 1

  // Sets a mark. Changes from now on are changes after this mark.
  Mark mark();
  bool tracks() const { return now_ > 0; }

  // Makes room for slots below `slots`; call it before touch(). Throws OutOfMemory.
  void reserve(int64_t slots);
  // Records that a row was made or changed, or is about to be. Distinct slots may be touched in parallel.
  void touch(Slot slot) { stamps()[slot] = static_cast<uint8_t>(now_ - base_); }
  // Records that a row moves from slot `from` to the free slot `to`.
  void move(Slot from, Slot to) { stamps()[to] = stamps()[from]; }
  // Makes room for `count` calls of left(). Throws std::bad_alloc.
  void reserve_left(int64_t count);
  // Records that the row of an id was removed. rows: the number of rows that remain.
  void left(int64_t id, int64_t rows) noexcept;

  // Whether the changes since the mark are still known.
  bool knows(Mark mark) const { return mark > base_ && mark <= now_; }
  bool changed_since(Slot slot, Mark mark) const { return stamps()[slot] >= mark - base_; }
  // The ids that have left since the mark, in ascending order, including ids that have returned. Empty if they are no
  // longer known: the list is dropped when it grows longer than the list of the remaining rows.
  std::optional<std::vector<int64_t>> left_since(Mark mark) const;
  // Records that all rows were removed.
  void clear();
  // Forgets all marks up to `last`, because the table has other rows now. The next mark is last + 1.
  void restart(Mark last);
  Mark last_mark() const { return now_; }

 private:
  struct Left {
    Mark mark;
    std::vector<int64_t> ids;
  };

  uint8_t* stamps() const { return reinterpret_cast<uint8_t*>(stamps_.data()); }

  Region stamps_;         // by slot: the mark after which the row changed last, minus base_; 0: before all known marks
  int64_t slots_ = 0;     // stamps_ has room for this many slots
  Mark base_ = 0;         // marks up to this one are forgotten, so that a stamp fits a byte
  Mark now_ = 0;
  std::vector<Left> left_;
  int64_t left_count_ = 0;
  Mark left_from_ = 1;    // left_ is complete since this mark
};

}  // namespace recstore
