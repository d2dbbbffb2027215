#include "lookup/find.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/error.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

constexpr int64_t kTaskIds = 4096;  // ids in a task

std::vector<Miss> resolve_all(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor) {
  if (n >= int64_t{kNotFirst}) throw InvalidArgument("a call takes at most 2**31 - 1 ids");
  const int64_t tasks = (n + kTaskIds - 1) / kTaskIds;
  std::vector<std::vector<Miss>> misses(static_cast<size_t>(tasks));
  const Routing no_routing;
  for_each_task(executor, tasks, [&](int64_t t) {
    const int64_t end = std::min((t + 1) * kTaskIds, n);
    resolve(table, no_routing, ids, t * kTaskIds, end, slots, misses[t]);
  });
  std::vector<Miss> all;
  for (const auto& some : misses) all.insert(all.end(), some.begin(), some.end());
  return all;
}

}  // namespace

void resolve(const Table& table, const Routing& routing, const int64_t* ids, int64_t begin, int64_t end, Slot* slots,
             std::vector<Miss>& misses) {
  constexpr int64_t kChunk = 1024;
  std::array<int64_t, kChunk> raw;
  for (; begin < end; begin += kChunk) {
    const int64_t n = std::min(kChunk, end - begin);
    const int64_t* chunk = ids + begin;
    if (routing.world_size != 0) {
      std::transform(chunk, chunk + n, raw.begin(), [&](int64_t id) { return routing.raw_id(id); });
      chunk = raw.data();
    }
    const int64_t missing = table.index().find(chunk, n, slots + begin);
    if (missing == 0) continue;
    reserve_more(misses, static_cast<size_t>(missing));
    for (int64_t i = 0; i < n; ++i) {
      if (slots[begin + i] == kNoSlot) misses.push_back({chunk[i], table.index().hash(chunk[i]), begin + i});
    }
  }
}

void find(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor) {
  resolve_all(table, ids, n, slots, executor);
}

std::vector<Slot> find_rows(const Table& table, const int64_t* ids, int64_t n, Executor& executor) {
  std::vector<Slot> slots(static_cast<size_t>(n));
  const std::vector<Miss> misses = resolve_all(table, ids, n, slots.data(), executor);
  if (!misses.empty()) throw InvalidArgument("id " + std::to_string(misses.front().id) + " has no row");
  return slots;
}

void contains(const Table& table, const int64_t* ids, int64_t n, bool* out, Executor& executor) {
  std::vector<Slot> slots(static_cast<size_t>(n));
  find(table, ids, n, slots.data(), executor);
  std::transform(slots.begin(), slots.end(), out, [](Slot slot) { return slot != kNoSlot; });
}

std::vector<Miss> find_missing(const Table& table, const int64_t* ids, int64_t n, Executor& executor) {
  std::vector<Slot> slots(static_cast<size_t>(n));
  return resolve_all(table, ids, n, slots.data(), executor);
}

Upsert::Upsert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival)
    : table_(table), slots_(slots), executor_(executor) {
  std::vector<Miss> misses = resolve_all(table, ids, n, slots, executor);
  if (misses.empty()) return;
  try {
    insert(std::move(misses), n, arrival);
  } catch (...) {
    if (insertion_.has_value()) insertion_->undo();
    throw;
  }
}

void Upsert::insert(std::vector<Miss> misses, int64_t n, Arrival arrival) {
  arrivals_.emplace(table_, std::move(misses), arrival);
  arrivals_->plan([&](SlotSet& pinned) { pinned.add(slots_, n); }, executor_);
  insertion_.emplace(table_, arrivals_->take_admitted(), slots_, initialises(arrival));
  tasks_.emplace(std::vector<Insertion*>{&*insertion_});
  const std::vector<Leaver>& leavers = arrivals_->leavers();
  insertion_->take_slots(table_.slots_are_free_at_once() ? leavers : std::vector<Leaver>{});
  if (!leavers.empty()) table_.reserve_leave(static_cast<int64_t>(leavers.size()));
  tasks_->run(executor_, [](Insertion& insertion, int64_t task) { insertion.resolve(task); });
}

Upsert::~Upsert() {
  if (!committed_ && insertion_.has_value()) insertion_->undo();
}

void Upsert::commit() noexcept {
  committed_ = true;
  if (!insertion_.has_value()) return;
  arrivals_->make_room(insertion_->reused(), executor_);
  tasks_->run(executor_, [](Insertion& insertion, int64_t task) { insertion.fill(task); });
  insertion_->finish();
  arrivals_->finish(insertion_->rows_made(), executor_);
}

void find_or_insert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival) {
  Upsert(table, ids, n, slots, executor, arrival).commit();
}

}  // namespace recstore
