#include "insertion.h"

#include <algorithm>
#include <utility>

#include "sets.h"

namespace recstore {
namespace {

constexpr int64_t kTaskMisses = 512;  // approximate number of misses in a task
constexpr size_t kAhead = 8;          // entries of the index that are prefetched ahead

}  // namespace

Insertion::Insertion(Table& table, std::vector<Miss> misses, Slot* slots, bool initialise)
    : table_(table), misses_(std::move(misses)), slots_(slots), initialise_(initialise), order_(misses_.size()) {
  const auto n = static_cast<int64_t>(misses_.size());
  tasks_ = 1;
  while (tasks_ < Index::kParts && n / tasks_ > kTaskMisses) tasks_ *= 2;
  for (const Miss& miss : misses_) ++parts_[Index::part_of(miss.hash) + 1].begin;
  for (int p = 0; p < Index::kParts; ++p) parts_[p + 1].begin += parts_[p].begin;
  std::array<int32_t, Index::kParts> next;
  for (int p = 0; p < Index::kParts; ++p) next[p] = parts_[p].begin;
  for (size_t i = 0; i < misses_.size(); ++i) order_[next[Index::part_of(misses_[i].hash)]++] = static_cast<int32_t>(i);
  taken_.reserve(misses_.size());
}

template <class Work>
void Insertion::for_each_part(int64_t task, const Work& work) {
  const int64_t parts = Index::kParts / tasks_;
  for (int64_t p = task * parts; p < (task + 1) * parts; ++p) {
    if (parts_[p].begin < parts_[p + 1].begin) work(parts_[p], order_.data() + parts_[p].begin, order_.data() + parts_[p + 1].begin);
  }
}

void Insertion::group(int64_t task) {
  for_each_part(task, [&](Part& part, const int32_t* begin, const int32_t* end) {
    IdSet distinct(static_cast<size_t>(end - begin));
    part.fresh.reserve(static_cast<size_t>(end - begin));
    for (const int32_t* m = begin; m != end; ++m) {
      const Miss& miss = misses_[*m];
      const uint32_t number = distinct.add(miss.id, miss.hash << Index::kPartBits);
      if (number == part.fresh.size()) part.fresh.push_back(*m);
      slots_[miss.position] = number;  // stands for the slot until take_slots() has been called
    }
  });
}

void Insertion::take_slots(const std::vector<Leaver>& leaving) {
  int64_t total = 0;
  for (Part& part : parts_) {
    part.first_row = total;
    total += static_cast<int64_t>(part.fresh.size());
  }
  table_.index().reserve(total);
  table_.evictions().reserve(total);
  reused_ = std::min(total, static_cast<int64_t>(leaving.size()));
  for (int64_t i = 0; i < reused_; ++i) taken_.push_back(leaving[i].slot);
  table_.rows().take(total - reused_, taken_);
}

void Insertion::resolve(int64_t task) noexcept {
  for_each_part(task, [&](const Part& part, const int32_t* begin, const int32_t* end) {
    const Slot* slots = taken_.data() + part.first_row;
    for (const int32_t* m = begin; m != end; ++m) {
      Slot& slot = slots_[misses_[*m].position];
      slot = slots[slot];
    }
  });
}

void Insertion::fill(int64_t task) noexcept {
  const auto step = static_cast<uint32_t>(table_.clock());
  for_each_part(task, [&](Part& part, const int32_t*, const int32_t*) {
    int32_t* left = order_.data() + part.begin;  // resolve() was the last to read the order
    for (size_t row = 0; row < part.fresh.size(); ++row) {
      if (row + kAhead < part.fresh.size()) table_.index().prefetch(misses_[part.fresh[row + kAhead]].hash);
      const Miss& miss = misses_[part.fresh[row]];
      const Slot slot = taken_[static_cast<size_t>(part.first_row) + row];
      if (!table_.index().insert_within_part(miss.id, miss.hash, slot)) left[part.left++] = static_cast<int32_t>(row);
      if (initialise_) table_.initializer().fill(miss.id, table_.rows().row(slot));
      table_.rows().reset_state(slot, step);
      if (table_.rows().changes().places_rows()) table_.rows().changes().place(slot, Index::position_of(miss.hash));
    }
  });
}

void Insertion::finish() noexcept {
  finished_ = true;
  int64_t left = 0;
  for (const Part& part : parts_) {
    left += part.left;
    if (table_.evictions().notes_arrivals()) {
      for (const int32_t m : part.fresh) table_.evictions().arrived(misses_[m].id);
    }
    for (int32_t i = 0; i < part.left; ++i) {
      const int32_t row = order_[part.begin + i];
      const Miss& miss = misses_[part.fresh[row]];
      table_.index().insert(miss.id, miss.hash, taken_[static_cast<size_t>(part.first_row + row)]);
    }
  }
  table_.index().inserted(rows_made() - left);
}

void Insertion::undo() noexcept {
  if (finished_) {
    for (const Part& part : parts_) {
      for (const int32_t m : part.fresh) table_.index().erase(misses_[m].id);
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
