#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "config.h"
#include "index.h"
#include "region.h"
#include "row_kernels.h"

namespace recstore {

// The memory of a shard's rows, by slot.
//
// Weights and element-wise optimizer state lie together at a fixed stride; row-wise state and
// bookkeeping lie apart, so that a row's weights keep to their own cache lines. Freed slots are
// reused, but not while a pass that may refer to them is pending.
class Rows {
 public:
  explicit Rows(const TableConfig& config);

  RowsView view() const {
    return {reinterpret_cast<float*>(data_.data()), stride_, columns_, reinterpret_cast<RowMeta*>(meta_.data()), type_};
  }
  float* row(Slot slot) const { return view().data + int64_t{slot} * stride_; }
  RowMeta& meta(Slot slot) const { return view().meta[slot]; }

  // Appends `count` free slots to `out`. Throws OutOfMemory and changes nothing where there is no room.
  void take(int64_t count, std::vector<Slot>& out);
  // Takes slots back that take() gave and nobody has seen since.
  void put_back(const std::vector<Slot>& slots) { free_.insert(free_.end(), slots.begin(), slots.end()); }
  // Takes a slot back; it is handed out again once every pass up to number `last_pass` has ended.
  void give_back(Slot slot, uint64_t last_pass);
  // Tells that no pass numbered below `oldest_pass` is pending.
  void reclaim(uint64_t oldest_pass);
  // A new row: its weights are the caller's to write, its optimizer state and bookkeeping zero.
  void reset_state(Slot slot);

  // Writes weights (columns,), rounded to nearest.
  void set_weights(Slot slot, const float* weights) { row_kernels().narrow(type_, weights, columns_, row(slot)); }
  // Copies a row out of the table or into it; image: (image_floats(),), weights and then element-wise optimizer state.
  void read(Slot slot, float* image) const;
  void write(Slot slot, const float* image);
  int64_t image_floats() const { return columns_ + stride_ - weight_floats(type_, columns_); }
  void clear();

  int64_t bytes() const;

 private:
  struct Retired {
    uint64_t last_pass;
    Slot slot;
  };

  RowType type_;
  int64_t columns_;
  int64_t stride_;
  Region data_;
  Region meta_;
  int64_t high_water_ = 0;  // slots ever handed out
  std::vector<Slot> free_;
  std::deque<Retired> retired_;  // last_pass ascends
};

}  // namespace recstore
