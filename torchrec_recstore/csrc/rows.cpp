#include "rows.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace recstore {

Rows::Rows(const TableConfig& config)
    : type_(config.row_type),
      columns_(config.columns()),
      stride_(weight_floats(type_, columns_) + columns_ * config.optimizer.element_states()) {}

void Rows::reserve(int64_t count, int64_t given_back) {
  const int64_t free = static_cast<int64_t>(free_.size()) + given_back;
  const int64_t grown = high_water_ + std::max<int64_t>(0, count - free);
  if (grown > int64_t{kNoSlot}) throw OutOfMemory("a shard holds at most 2**32 - 1 rows");
  data_.reserve(static_cast<size_t>(grown * stride_) * sizeof(float));
  meta_.reserve(static_cast<size_t>(grown) * sizeof(RowMeta));
  if (changes_.tracks()) changes_.reserve(grown);
  free_.reserve(static_cast<size_t>(free));
}

void Rows::take(int64_t count, std::vector<Slot>& out) {
  reserve(count, 0);
  out.reserve(out.size() + static_cast<size_t>(count));
  for (; count > 0 && !free_.empty(); --count) {
    out.push_back(free_.back());
    free_.pop_back();
  }
  for (; count > 0; --count) out.push_back(static_cast<Slot>(high_water_++));
}

void Rows::give_back(Slot slot, uint64_t last_pass) { retired_.push_back({last_pass, slot}); }

void Rows::reclaim(uint64_t oldest_pass) {
  while (!retired_.empty() && retired_.front().last_pass < oldest_pass) {
    free_.push_back(retired_.front().slot);
    retired_.pop_front();
  }
  if (static_cast<int64_t>(free_.size()) == high_water_ && high_water_ > 0) clear();
}

Changes::Mark Rows::mark() {
  changes_.reserve(high_water_);
  return changes_.mark();
}

void Rows::reset_state(Slot slot, uint32_t step) {
  std::fill(row(slot) + weight_floats(type_, columns_), row(slot) + stride_, 0.0f);
  meta(slot) = RowMeta{0.0f, step, 0};
  if (changes_.tracks()) changes_.touch(slot);
}

void Rows::clear() {
  data_.discard(0, static_cast<size_t>(high_water_ * stride_) * sizeof(float));
  meta_.discard(0, static_cast<size_t>(high_water_) * sizeof(RowMeta));
  changes_.clear();
  high_water_ = 0;
  free_.clear();
  retired_.clear();
}

int64_t Rows::bytes() const {
  return high_water_ * (stride_ * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(RowMeta))) +
         static_cast<int64_t>(free_.capacity() * sizeof(Slot));
}

}  // namespace recstore
