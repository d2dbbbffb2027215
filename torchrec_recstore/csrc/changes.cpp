#include "changes.h"

#include <algorithm>

#include "memory.h"

namespace recstore {
namespace {

constexpr Changes::Mark kMostMarks = 255;
constexpr Changes::Mark kForgotten = 128;  // this many marks are forgotten together
constexpr int64_t kLeastLeft = 1 << 16;

}  // namespace

Changes::Mark Changes::mark() {
  if (now_ - base_ == kMostMarks) {
    for (int64_t s = 0; s < slots_; ++s) {
      const uint8_t stamp = stamps()[s];
      stamps()[s] = stamp > kForgotten ? static_cast<uint8_t>(stamp - kForgotten) : 0;
    }
    base_ += kForgotten;
    auto known = left_.begin();
    for (; known != left_.end() && known->mark <= base_; ++known) left_count_ -= static_cast<int64_t>(known->ids.size());
    left_.erase(left_.begin(), known);
  }
  return ++now_;
}

void Changes::reserve(int64_t slots) {
  if (slots <= slots_) return;
  stamps_.reserve(static_cast<size_t>(slots));
  slots_ = slots;
}

void Changes::reserve_left(int64_t count) {
  if (left_from_ > now_) return;
  if (left_.empty() || left_.back().mark != now_) left_.push_back({now_, {}});
  reserve_more(left_.back().ids, static_cast<size_t>(count));
}

void Changes::left(int64_t id, int64_t rows) noexcept {
  if (left_count_ >= std::max(rows, kLeastLeft)) {  // a list of the remaining rows is shorter
    left_.clear();
    left_count_ = 0;
    left_from_ = now_ + 1;
    return;
  }
  if (left_from_ > now_) return;
  left_.back().ids.push_back(id);
  ++left_count_;
}

std::optional<std::vector<int64_t>> Changes::left_since(Mark mark) const {
  if (mark < left_from_) return std::nullopt;
  std::vector<int64_t> ids;
  for (const Left& some : left_) {
    if (some.mark >= mark) ids.insert(ids.end(), some.ids.begin(), some.ids.end());
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

void Changes::restart(Mark last) {
  if (slots_ > 0) std::fill_n(stamps(), slots_, uint8_t{0});
  base_ = now_ = last;
  left_.clear();
  left_count_ = 0;
  left_from_ = now_ + 1;
}

void Changes::clear() {
  stamps_.discard(0, static_cast<size_t>(slots_));
}

}  // namespace recstore
