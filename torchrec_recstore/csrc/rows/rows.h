#pragma once

#include <cstdint>
#include <vector>

#include "base/memory.h"
#include "base/prefetch.h"
#include "index/index.h"
#include "index/sets.h"
#include "row_loops/row_loops.h"
#include "rows/config.h"
#include "snapshot/changes.h"

namespace recstore {

// The memory of a shard's rows, by slot.
//
// The weights and element-wise optimizer states of a row are stored together at a fixed stride. The row-wise state and
// the bookkeeping (RowAside) are stored apart, so that the weights have cache lines of their own. Freed slots are
// reused, but not while a pass that may refer to them is pending.
class Rows {
 public:
  explicit Rows(const TableConfig& config);

  RowsView view() const {
    return {reinterpret_cast<float*>(data_.data()),  stride_, columns_,
            reinterpret_cast<char*>(asides_.data()), type_,   state_type_};
  }
  float* row(Slot slot) const { return view().data + int64_t{slot} * stride_; }
  RowMeta& meta(Slot slot) const { return *reinterpret_cast<RowMeta*>(aside(slot) + state_bytes(state_type_)); }
  // The RowAside of a slot, of aside_bytes() bytes.
  char* aside(Slot slot) const { return view().asides + slot * aside_bytes(); }
  int64_t aside_bytes() const { return state_bytes(state_type_) + static_cast<int64_t>(sizeof(RowMeta)); }
  // The bookkeeping in a copy of a RowAside, which may be at any even address.
  const RowMeta& meta_of(const char* aside) const {
    return *reinterpret_cast<const RowMeta*>(aside + state_bytes(state_type_));
  }
  int64_t columns() const { return columns_; }
  // The states of the optimizer; see OptimizerConfig::states().
  const std::vector<OptimizerState>& states() const { return states_; }
  int64_t row_bytes() const { return stride_ * static_cast<int64_t>(sizeof(float)); }
  // Bytes of a copy of a row: its row_bytes(), followed by its RowAside.
  int64_t image_bytes() const { return row_bytes() + aside_bytes(); }
  RowType type() const { return type_; }
  StateType state_type() const { return state_type_; }
  RECSTORE_PREFETCHES void prefetch(Slot slot) const {
    const char* data = reinterpret_cast<const char*>(row(slot));
    for (int64_t byte = 0; byte < row_bytes(); byte += 64) __builtin_prefetch(data + byte);
    __builtin_prefetch(aside(slot));
  }
  // Number of slots that were ever handed out.
  int64_t slots() const { return high_water_; }
  template <class Visit>  // visit(slot) for the slots without a row
  void for_each_free(const Visit& visit) const {
    free_.for_each(0, visit);
    for_each_retired(visit);
  }
  // Whether a slot is free. The slots that for_each_retired() visits have no row either.
  bool is_free(Slot slot) const { return free_.size() > 0 && free_.contains(slot); }
  template <class Visit>  // visit(slot) for the slots without a row that pending passes may refer to
  void for_each_retired(const Visit& visit) const {
    for (size_t r = reclaimed_; r < retired_.size(); ++r) visit(retired_[r].slot);
  }

  const Changes& changes() const { return changes_; }
  Changes& changes() { return changes_; }
  // Sets a mark: from now on it is known which rows change. Throws OutOfMemory.
  Changes::Mark mark();

  // Throws OutOfMemory if the machine has no memory for `slots` slots in all now. No memory is promised to them.
  void check_room(int64_t slots) const;
  // Appends `count` free slots to `out`, the lowest first. Throws OutOfMemory, and changes nothing then.
  void take(int64_t count, std::vector<Slot>& out);
  // Frees a slot that no pending pass refers to.
  void give_back_now(Slot slot) noexcept {
    free_.add(slot);
    free_above_ += slot >= limit_;
  }
  // Makes room for `count` calls of give_back(). Throws std::bad_alloc.
  void reserve_give_back(int64_t count) { reserve_more(retired_, static_cast<size_t>(count)); }
  // Frees a slot; it is handed out again after every pass up to number `last_pass` has ended.
  void give_back(Slot slot, uint64_t last_pass) noexcept { retired_.push_back({last_pass, slot}); }
  // Notes that no pass with a number below `oldest_pass` is pending.
  void reclaim(uint64_t oldest_pass) noexcept;
  // Initialises a new row: its optimizer states and frequency become zero. The caller writes its weights.
  void reset_state(Slot slot, uint32_t step);

  // Copies a row out of the table and back, byte for byte. image: (image_bytes(),).
  void read_image(Slot slot, char* image) const;
  void write_image(Slot slot, const char* image) const;

  // Writes the weights (columns,) of a row, rounded to nearest.
  void set_weights(Slot slot, const float* weights) { row_loops().narrow(type_, weights, columns_, row(slot)); }
  void clear() noexcept;

  // Compaction, which runs when more slots are free than in use: rows move one by one to free slots below a limit,
  // until all slots from the limit on are free and their memory can be returned. During compaction no slot from the
  // limit on is handed out; if the slots below the limit do not suffice, the compaction ends.
  bool is_compacting() const { return limit_ != kNoLimit; }
  bool wants_compaction() const {
    return is_compacting() || stale_ > high_water_ || free_.size() * image_bytes() > kLeastGain;
  }
  // Begins a compaction if it is worthwhile: if more slots are free than in use, or, with `tight`, if any memory can be
  // returned. The limit leaves some free slots for new rows, none with `tight`. Returns whether a compaction is under
  // way.
  bool begin_compaction(bool tight = false) noexcept;
  int64_t limit() const { return limit_; }
  // Whether a row can move to a free slot below the limit.
  bool has_room_below() const { return free_.size() > free_above_; }
  // Moves the row in slot `from`, which is not below the limit. Returns its new slot.
  Slot move(Slot from) noexcept;
  // Ends the compaction if all slots from the limit on are free. Returns whether it has ended.
  bool finish_compaction() noexcept;
  // Returns memory of slots that are no longer in use to the system; at most `bytes`, so that the pause is short.
  void give_memory_back(int64_t bytes) noexcept;

  int64_t bytes() const;

 private:
  static constexpr int64_t kNoLimit = INT64_MAX;
  static constexpr int64_t kLeastGain = 2 << 20;  // bytes of a huge page

  void give_up_from(int64_t slots) noexcept;

  struct Retired {
    uint64_t last_pass;
    Slot slot;
  };

  RowType type_;
  StateType state_type_;
  int64_t columns_;
  std::vector<OptimizerState> states_;
  int64_t stride_;
  Region data_;
  Region asides_;
  int64_t high_water_ = 0;
  Changes changes_;
  FreeSlots free_;
  std::vector<Retired> retired_;  // last_pass ascends
  size_t reclaimed_ = 0;          // this many slots at the front of retired_ are free
  int64_t limit_ = kNoLimit;      // limit of the compaction
  int64_t free_above_ = 0;        // number of free slots from the limit on
  int64_t stale_ = 0;             // memory of slots below this one may have been touched
};

}  // namespace recstore
