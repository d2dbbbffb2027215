#include "lookup/insertion.h"

#include <algorithm>
#include <utility>

#include "index/sets.h"

namespace recstore {
namespace {

constexpr int64_t kTaskMisses = 512;  // approximate number of misses in a task
constexpr size_t kAhead = 8;          // entries of the index, and rows, that are prefetched ahead

}  // namespace

DistinctMisses::DistinctMisses(std::vector<Miss> misses)
    : misses_(std::move(misses)), order_(misses_.size()), numbers_(misses_.size()) {
  const auto n = static_cast<int64_t>(misses_.size());
  while (tasks_ < Index::kParts && n / tasks_ > kTaskMisses) tasks_ *= 2;
  begins_ = part_begins<Index::kParts>(misses_.size(), [&](size_t i) { return Index::part_of(misses_[i].hash); });
  auto next = begins_;
  for (size_t i = 0; i < misses_.size(); ++i) order_[next[Index::part_of(misses_[i].hash)]++] = static_cast<int32_t>(i);
}

template <class Work>
void DistinctMisses::for_each_part(int64_t task, const Work& work) const {
  const int64_t parts = Index::kParts / tasks_;
  for (int64_t p = task * parts; p < (task + 1) * parts; ++p) {
    if (begins_[p] < begins_[p + 1]) work(p);
  }
}

void DistinctMisses::group(int64_t task) {
  for_each_part(task, [&](int64_t p) {
    IdSet distinct(begins_[p + 1] - begins_[p]);
    fresh_[p].reserve(begins_[p + 1] - begins_[p]);
    for (size_t i = begins_[p]; i < begins_[p + 1]; ++i) {
      const Miss& miss = misses_[order_[i]];
      numbers_[i] = distinct.add(miss.id, miss.hash << Index::kPartBits);
      if (numbers_[i] == fresh_[p].size()) fresh_[p].push_back(order_[i]);
    }
  });
}

int64_t DistinctMisses::count() const {
  int64_t count = 0;
  for (const auto& fresh : fresh_) count += static_cast<int64_t>(fresh.size());
  return count;
}

std::vector<int64_t> DistinctMisses::ids() const {
  std::vector<char> is_first(misses_.size());
  for (const auto& fresh : fresh_) {
    for (const int32_t m : fresh) is_first[m] = 1;
  }
  std::vector<int64_t> ids;
  ids.reserve(static_cast<size_t>(count()));
  for (size_t m = 0; m < misses_.size(); ++m) {
    if (is_first[m] != 0) ids.push_back(misses_[m].id);
  }
  return ids;
}

Insertion::Insertion(Table& table, DistinctMisses misses, Slot* slots, bool initialise)
    : table_(table), misses_(std::move(misses)), slots_(slots), initialise_(initialise) {}

void Insertion::take_slots(const std::vector<Leaver>& leaving) {
  int64_t total = 0;
  for (int p = 0; p < Index::kParts; ++p) {
    rows_[p].first = total;
    total += static_cast<int64_t>(misses_.fresh_[p].size());
  }
  table_.index().reserve(total);
  table_.evictions().reserve(total);
  taken_.reserve(static_cast<size_t>(total));
  reused_ = std::min(total, static_cast<int64_t>(leaving.size()));
  for (int64_t i = 0; i < reused_; ++i) taken_.push_back(leaving[i].slot);
  table_.rows().take(total - reused_, taken_);
}

void Insertion::resolve(int64_t task) noexcept {
  misses_.for_each_part(task, [&](int64_t p) {
    const Slot* slots = taken_.data() + rows_[p].first;
    for (size_t i = misses_.begins_[p]; i < misses_.begins_[p + 1]; ++i) {
      slots_[misses_.misses_[misses_.order_[i]].position] = slots[misses_.numbers_[i]];
    }
  });
}

void Insertion::fill(int64_t task) noexcept {
  const auto step = static_cast<uint32_t>(table_.clock());
  misses_.for_each_part(task, [&](int64_t p) {
    const std::vector<int32_t>& fresh = misses_.fresh_[p];
    int32_t* left = misses_.order_.data() + misses_.begins_[p];  // resolve() was the last to read the order
    for (size_t row = 0; row < fresh.size(); ++row) {
      if (row + kAhead < fresh.size()) table_.index().prefetch(misses_.misses_[fresh[row + kAhead]].hash);
      const Miss& miss = misses_.misses_[fresh[row]];
      const size_t number = static_cast<size_t>(rows_[p].first) + row;
      if (number + kAhead < taken_.size()) table_.rows().prefetch(taken_[number + kAhead]);
      const Slot slot = taken_[number];
      if (!table_.index().insert_within_part(miss.id, miss.hash, slot)) {
        left[rows_[p].left++] = static_cast<int32_t>(row);
      }
      if (initialise_) table_.initializer().fill(miss.id, table_.rows().row(slot));
      table_.rows().reset_state(slot, step);
      if (table_.rows().changes().places_rows()) table_.rows().changes().place(slot, Index::position_of(miss.hash));
    }
  });
}

void Insertion::finish() noexcept {
  finished_ = true;
  int64_t left = 0;
  for (int p = 0; p < Index::kParts; ++p) {
    const std::vector<int32_t>& fresh = misses_.fresh_[p];
    left += rows_[p].left;
    if (table_.evictions().notes_arrivals()) {
      for (const int32_t m : fresh) table_.evictions().arrived(misses_.misses_[m].id);
    }
    for (int32_t i = 0; i < rows_[p].left; ++i) {
      const int32_t row = misses_.order_[misses_.begins_[p] + i];
      const Miss& miss = misses_.misses_[fresh[row]];
      table_.index().insert(miss.id, miss.hash, taken_[static_cast<size_t>(rows_[p].first + row)]);
    }
  }
  table_.index().inserted(rows_made() - left);
}

void Insertion::undo() noexcept {
  if (finished_) {
    for (const auto& fresh : misses_.fresh_) {
      for (const int32_t m : fresh) table_.index().erase(misses_.misses_[m].id);
    }
  }
  for (size_t i = static_cast<size_t>(reused_); i < taken_.size(); ++i) table_.rows().give_back_now(taken_[i]);
}

InsertionTasks::InsertionTasks(const std::vector<Insertion*>& insertions) {
  for (Insertion* insertion : insertions) {
    for (int64_t task = 0; task < insertion->tasks(); ++task) tasks_.push_back({insertion, task});
  }
}

}  // namespace recstore
