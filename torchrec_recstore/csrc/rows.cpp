#include "rows.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace recstore {

Rows::Rows(const TableConfig& config)
    : type_(config.row_type),
      columns_(config.columns()),
      stride_(weight_floats(type_, columns_) + columns_ * config.optimizer.element_states()) {}

void Rows::take(int64_t count, std::vector<Slot>& out) {
  const int64_t again = std::min(count, free_.size());
  const int64_t grown = high_water_ + count - again;
  if (grown > int64_t{kNoSlot}) throw OutOfMemory("a shard holds at most 2**32 - 1 rows");
  data_.reserve(static_cast<size_t>(grown * stride_) * sizeof(float));
  meta_.reserve(static_cast<size_t>(grown) * sizeof(RowMeta));
  if (changes_.tracks()) changes_.reserve(grown);
  free_.reserve(grown);
  out.reserve(out.size() + static_cast<size_t>(count));
  for (int64_t i = 0; i < again; ++i) {
    out.push_back(free_.lowest());
    free_.remove(out.back());
  }
  while (high_water_ < grown) out.push_back(static_cast<Slot>(high_water_++));
}

void Rows::reclaim(uint64_t oldest_pass) noexcept {
  for (; reclaimed_ < retired_.size() && retired_[reclaimed_].last_pass < oldest_pass; ++reclaimed_) {
    free_.add(retired_[reclaimed_].slot);
  }
  if (reclaimed_ == retired_.size()) {
    retired_ = {};
    reclaimed_ = 0;
  } else if (reclaimed_ > retired_.size() / 2) {
    retired_.erase(retired_.begin(), retired_.begin() + static_cast<int64_t>(reclaimed_));
    reclaimed_ = 0;
  }
  if (free_.size() == high_water_ && high_water_ > 0) clear();
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

void Rows::clear() noexcept {
  data_.discard(0, static_cast<size_t>(high_water_ * stride_) * sizeof(float));
  meta_.discard(0, static_cast<size_t>(high_water_) * sizeof(RowMeta));
  changes_.clear();
  high_water_ = 0;
  free_.clear();
  retired_ = {};
  reclaimed_ = 0;
}

int64_t Rows::bytes() const {
  return high_water_ * (stride_ * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(RowMeta))) +
         free_.bytes() +
         static_cast<int64_t>(retired_.capacity() * sizeof(Retired));
}

}  // namespace recstore
