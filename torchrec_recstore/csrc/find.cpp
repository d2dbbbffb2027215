#include "find.h"

#include <algorithm>
#include <string>
#include <utility>

#include "error.h"
#include "resolver.h"
#include "row_kernels.h"

namespace recstore {
namespace {

std::vector<Miss> resolve_all(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor) {
  if (n >= int64_t{kNotFirst}) throw InvalidArgument("a call takes at most 2**31 - 1 ids");
  const int64_t tasks = (n + kTaskIds - 1) / kTaskIds;
  std::vector<std::vector<Miss>> misses(static_cast<size_t>(tasks));
  const Routing no_routing;
  for_each_task(executor, tasks, [&](int64_t t) {
    const int64_t end = std::min((t + 1) * kTaskIds, n);
    with_lines(table, [&](auto lines) {
      Resolver<lines> resolver(table, no_routing, ids, t * kTaskIds, end, slots);
      while (resolver.resolved() < end) resolver.advance();
      misses[t] = std::move(resolver.misses);
    });
  });
  std::vector<Miss> all;
  for (const auto& some : misses) all.insert(all.end(), some.begin(), some.end());
  return all;
}

}  // namespace

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
  tasks_->run(executor_, [](Insertion& insertion, int64_t task) { insertion.place(task); });
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
  arrivals_->make_room(insertion_->reused());
  tasks_->run(executor_, [](Insertion& insertion, int64_t task) { insertion.fill(task); });
  arrivals_->finish(insertion_->rows_made());
}

void find_or_insert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival) {
  Upsert(table, ids, n, slots, executor, arrival).commit();
}

}  // namespace recstore
