#include "snapshot/changes.h"

#include <algorithm>
#include <atomic>

#include "base/memory.h"

namespace recstore {
namespace {

constexpr Changes::Mark kMostMarks = 255;
constexpr Changes::Mark kForgotten = 128;  // this many marks are forgotten together
constexpr int64_t kLeastLeft = 1 << 16;

}  // namespace

Changes::Mark Changes::mark() {
  if (now_ - base_ == kMostMarks) {
    const auto forget = [](uint8_t& stamp) {
      stamp = stamp > kForgotten ? static_cast<uint8_t>(stamp - kForgotten) : 0;
    };
    std::for_each(stamps(), stamps() + slots_, forget);
    std::for_each(newest(), newest() + (slots_ + kGroup - 1) / kGroup, forget);
    base_ += kForgotten;
    auto known = left_.begin();
    for (; known != left_.end() && known->mark <= base_; ++known) {
      left_count_ -= static_cast<int64_t>(known->ids.size());
    }
    left_.erase(left_.begin(), known);
  }
  return ++now_;
}

void Changes::reserve(int64_t slots) {
  if (slots <= slots_) return;
  stamps_.reserve(static_cast<size_t>((slots + kGroup - 1) / kGroup * kGroup));
  newest_.reserve(static_cast<size_t>(slots / kGroup) + 1);
  if (places_rows()) positions_.reserve(static_cast<size_t>(slots) * sizeof(uint32_t));
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

uint64_t Changes::begin_locating() {
  static std::atomic<uint64_t> last{0};  // of all tables, because tables exchange their rows
  positions_.reserve(static_cast<size_t>(slots_) * sizeof(uint32_t));
  locates_ = Locates::kSome;
  return locating_ = ++last;
}

void Changes::restart(Mark last) {
  if (slots_ > 0) {
    std::fill_n(stamps(), slots_, uint8_t{0});
    std::fill_n(newest(), (slots_ + kGroup - 1) / kGroup, uint8_t{0});
  }
  locates_ = Locates::kNo;
  positions_ = {};
  base_ = now_ = last;
  left_.clear();
  left_count_ = 0;
  left_from_ = now_ + 1;
}

void Changes::clear() {
  stamps_.discard(0, static_cast<size_t>(slots_));
  newest_.discard(0, static_cast<size_t>(slots_ / kGroup) + 1);
  positions_.discard(0, positions_.reserved_bytes());
}

}  // namespace recstore
