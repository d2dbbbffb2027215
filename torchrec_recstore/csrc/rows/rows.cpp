#include "rows/rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace recstore {

Rows::Rows(const TableConfig& config)
    : type_(config.row_type),
      state_type_(config.state_type),
      columns_(config.columns()),
      states_(config.optimizer.states()),
      stride_(weight_floats(type_, columns_) +
              state_floats(state_type_, columns_ * config.optimizer.element_states())) {}

void Rows::check_room(int64_t slots) const {
  if (slots > int64_t{kNoSlot}) throw OutOfMemory("a shard holds at most 2**32 - 1 rows");
  if (slots > high_water_) check_available(static_cast<size_t>((slots - high_water_) * image_bytes()));
}

void Rows::take(int64_t count, std::vector<Slot>& out) {
  const bool compacts = is_compacting() && count <= free_.size() - free_above_;
  const int64_t again = std::min(count, free_.size());
  const int64_t grown = high_water_ + count - again;
  if (grown > int64_t{kNoSlot}) throw OutOfMemory("a shard holds at most 2**32 - 1 rows");
  data_.reserve(static_cast<size_t>(grown * stride_) * sizeof(float));
  asides_.reserve(static_cast<size_t>(grown * aside_bytes()));
  if (changes_.tracks()) changes_.reserve(grown);
  free_.reserve(grown);
  out.reserve(out.size() + static_cast<size_t>(count));
  if (!compacts) {  // the slots from the limit on are needed
    limit_ = kNoLimit;
    free_above_ = 0;
  }
  for (int64_t i = 0; i < again; ++i) {
    out.push_back(free_.lowest());
    free_.remove(out.back());
  }
  while (high_water_ < grown) out.push_back(static_cast<Slot>(high_water_++));
}

void Rows::reclaim(uint64_t oldest_pass) noexcept {
  for (; reclaimed_ < retired_.size() && retired_[reclaimed_].last_pass < oldest_pass; ++reclaimed_) {
    give_back_now(retired_[reclaimed_].slot);
  }
  if (reclaimed_ == retired_.size()) {
    retired_ = {};
    reclaimed_ = 0;
  } else if (reclaimed_ > retired_.size() / 2) {
    retired_.erase(retired_.begin(), retired_.begin() + static_cast<int64_t>(reclaimed_));
    reclaimed_ = 0;
  }
  if (free_.size() == high_water_ && high_water_ > 0) give_up_from(0);
}

bool Rows::begin_compaction(bool tight) noexcept {
  if (is_compacting()) return true;
  const int64_t rows = high_water_ - free_.size();
  if ((!tight && 2 * rows >= high_water_) || (high_water_ - rows) * image_bytes() <= kLeastGain) return false;
  limit_ = tight ? rows : rows + rows / 8 + 1;
  free_above_ = 0;
  free_.for_each(static_cast<Slot>(limit_), [&](Slot) { ++free_above_; });
  return true;
}

Slot Rows::move(Slot from) noexcept {
  const Slot to = free_.lowest();
  free_.remove(to);
  std::memcpy(row(to), row(from), static_cast<size_t>(row_bytes()));
  std::memcpy(aside(to), aside(from), static_cast<size_t>(aside_bytes()));
  if (changes_.tracks()) changes_.move(from, to);
  give_back_now(from);
  return to;
}

bool Rows::finish_compaction() noexcept {
  if (!is_compacting() || free_above_ != high_water_ - limit_) return false;
  give_up_from(limit_);
  return true;
}

void Rows::give_up_from(int64_t slots) noexcept {
  free_.truncate(slots);
  stale_ = std::max(stale_, high_water_);
  high_water_ = slots;
  limit_ = kNoLimit;
  free_above_ = 0;
}

void Rows::give_memory_back(int64_t bytes) noexcept {
  if (stale_ <= high_water_) return;
  const int64_t first = std::max(high_water_, stale_ - std::max<int64_t>(1, bytes / image_bytes()));
  data_.discard(static_cast<size_t>(first * row_bytes()), static_cast<size_t>(stale_ * row_bytes()));
  asides_.discard(static_cast<size_t>(first * aside_bytes()), static_cast<size_t>(stale_ * aside_bytes()));
  stale_ = first;
}

Changes::Mark Rows::mark() {
  changes_.reserve(high_water_);
  return changes_.mark();
}

void Rows::reset_state(Slot slot, uint32_t step) {
  std::fill(row(slot) + weight_floats(type_, columns_), row(slot) + stride_, 0.0f);
  std::memset(aside(slot), 0, static_cast<size_t>(aside_bytes()));
  meta(slot).last_step = step;
  if (changes_.tracks()) changes_.touch(slot);
}

void Rows::read_image(Slot slot, char* image) const {
  std::memcpy(image, row(slot), static_cast<size_t>(row_bytes()));
  std::memcpy(image + row_bytes(), aside(slot), static_cast<size_t>(aside_bytes()));
}

void Rows::write_image(Slot slot, const char* image) const {
  std::memcpy(row(slot), image, static_cast<size_t>(row_bytes()));
  std::memcpy(aside(slot), image + row_bytes(), static_cast<size_t>(aside_bytes()));
}

void Rows::clear() noexcept {
  const int64_t touched = std::max(high_water_, stale_);
  data_.discard(0, static_cast<size_t>(touched * row_bytes()));
  asides_.discard(0, static_cast<size_t>(touched * aside_bytes()));
  changes_.clear();
  high_water_ = stale_ = 0;
  limit_ = kNoLimit;
  free_above_ = 0;
  free_.clear();
  retired_ = {};
  reclaimed_ = 0;
}

int64_t Rows::bytes() const {
  return high_water_ * image_bytes() + free_.bytes() + static_cast<int64_t>(retired_.size() * sizeof(Retired));
}

}  // namespace recstore
