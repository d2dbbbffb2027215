#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "index.h"
#include "memory.h"

namespace recstore {

// Which rows have changed, and which ids have left, since a mark: what a delta checkpoint is made of.
//
// Costs nothing before the first mark; then a byte a row, and eight bytes for each id that has left.
class Changes {
 public:
  using Mark = int64_t;  // the first is 1

  // From here on a change is one after this mark.
  Mark mark();
  bool tracks() const { return now_ > 0; }

  // Makes room for slots up to `slots`, before they are touched. Throws OutOfMemory.
  void reserve(int64_t slots);
  // The row has been made or changed, or is about to be. Distinct slots may be touched in parallel.
  void touch(Slot slot) { stamps()[slot] = static_cast<uint8_t>(now_ - base_); }
  // A row that `to` has no row in place of, as little or much changed, lies there from now on.
  void move(Slot from, Slot to) { stamps()[to] = stamps()[from]; }
  // Makes room for `count` calls of left(). Throws std::bad_alloc.
  void reserve_left(int64_t count);
  // The id's row has gone, of which `rows` are left.
  void left(int64_t id, int64_t rows) noexcept;

  // Whether what has changed since the mark is known still.
  bool knows(Mark mark) const { return mark > base_ && mark <= now_; }
  bool changed_since(Slot slot, Mark mark) const { return stamps()[slot] >= mark - base_; }
  // The ids that have left since the mark, ascending, also those that have come back; nothing where they are no
  // longer known, because they are more than the rows that stayed.
  std::optional<std::vector<int64_t>> left_since(Mark mark) const;
  // Every row has gone.
  void clear();
  // The rows are others now: forgets every mark up to `last`, and goes on behind it.
  void restart(Mark last);
  Mark last_mark() const { return now_; }

 private:
  struct Left {
    Mark mark;
    std::vector<int64_t> ids;
  };

  uint8_t* stamps() const { return reinterpret_cast<uint8_t*>(stamps_.data()); }

  Region stamps_;         // by slot: the mark after which the row has last changed, less base_; 0: before all that count
  int64_t slots_ = 0;     // that stamps_ has room for
  Mark base_ = 0;         // older marks are forgotten, so that a stamp fits a byte
  Mark now_ = 0;
  std::vector<Left> left_;
  int64_t left_count_ = 0;
  Mark left_from_ = 1;    // the first mark since which left_ is complete
};

}  // namespace recstore
