#include "insertion.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace recstore {
namespace {

constexpr int64_t kTaskMisses = 512;  // approximate number of misses in a task
constexpr int kAhead = 8;             // entries of the index that are prefetched ahead

}  // namespace

Insertion::Insertion(Table& table, std::vector<Miss> misses, Slot* slots, bool initialise)
    : table_(table), misses_(std::move(misses)), slots_(slots), initialise_(initialise), order_(misses_.size()) {
  const auto n = static_cast<int64_t>(misses_.size());
  tasks_ = 1;
  while (tasks_ < Index::kParts && n / tasks_ > kTaskMisses) tasks_ *= 2;
  for (const Miss& miss : misses_) ++begin_[Index::part_of(miss.hash) + 1];
  std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
  auto next = begin_;
  for (size_t i = 0; i < misses_.size(); ++i) order_[next[Index::part_of(misses_[i].hash)]++] = static_cast<int32_t>(i);
  table_.index().reserve_inserts(n);
  taken_.reserve(misses_.size());
}

template <class Work>
void Insertion::for_each_part(int64_t task, const Work& work) {
  const int64_t parts = Index::kParts / tasks_;
  for (int64_t p = task * parts; p < (task + 1) * parts; ++p) work(p);
}

void Insertion::place(int64_t task) {
  for_each_part(task, [&](int64_t p) {
    std::vector<int32_t>& fresh = fresh_[p];
    for (int32_t i = begin_[p]; i < begin_[p + 1]; ++i) {
      const Miss& miss = misses_[order_[i]];
      if (i + kAhead < begin_[p + 1]) __builtin_prefetch(table_.index().home_line(misses_[order_[i + kAhead]].hash), 1, 3);
      // Reserve first, so that push_back() cannot fail after the index has the id.
      if (fresh.size() == fresh.capacity()) fresh.reserve(std::max<size_t>(16, 2 * fresh.size()));
      // The rank of the id within the part represents its slot until the slots are known.
      const auto rank = static_cast<Slot>(fresh.size());
      const Slot placed = table_.index().find_or_insert(miss.id, miss.hash, rank);
      if (placed == rank) fresh.push_back(order_[i]);
      slots_[miss.position] = placed;
    }
  });
}

void Insertion::take_slots(const std::vector<Leaver>& leaving) {
  int64_t total = 0;
  for (int p = 0; p < Index::kParts; ++p) {
    base_[p] = total;
    total += static_cast<int64_t>(fresh_[p].size());
  }
  reused_ = std::min(total, static_cast<int64_t>(leaving.size()));
  for (int64_t i = 0; i < reused_; ++i) taken_.push_back(leaving[i].slot);
  table_.rows().take(total - reused_, taken_);
}

void Insertion::resolve(int64_t task) noexcept {
  for_each_part(task, [&](int64_t p) {
    const Slot* slots = taken_.data() + base_[p];
    for (int32_t i = begin_[p]; i < begin_[p + 1]; ++i) {
      Slot& slot = slots_[misses_[order_[i]].position];
      slot = slots[slot];
    }
  });
}

void Insertion::fill(int64_t task) noexcept {
  const auto step = static_cast<uint32_t>(table_.clock());
  for_each_part(task, [&](int64_t p) {
    const Slot* slots = taken_.data() + base_[p];
    for (size_t rank = 0; rank < fresh_[p].size(); ++rank) {
      const Miss& miss = misses_[fresh_[p][rank]];
      if (rank + kAhead < fresh_[p].size()) {
        __builtin_prefetch(table_.index().home_line(misses_[fresh_[p][rank + kAhead]].hash), 1, 3);
      }
      table_.index().set_slot(miss.id, miss.hash, slots[rank]);
      if (initialise_) table_.initializer().fill(miss.id, table_.rows().row(slots[rank]));
      table_.rows().reset_state(slots[rank], step);
    }
  });
}

void Insertion::undo() noexcept {
  for (const auto& fresh : fresh_) {
    for (const int32_t m : fresh) table_.index().erase(misses_[m].id, misses_[m].hash);
  }
  for (size_t i = static_cast<size_t>(reused_); i < taken_.size(); ++i) table_.rows().give_back_now(taken_[i]);
}

InsertionTasks::InsertionTasks(const std::vector<Insertion*>& insertions) {
  for (Insertion* insertion : insertions) {
    for (int64_t task = 0; task < insertion->tasks(); ++task) tasks_.push_back({insertion, task});
  }
}

}  // namespace recstore
